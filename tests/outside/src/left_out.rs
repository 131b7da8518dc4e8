//! The features of Tidemill that this crate leaves off.

use tidemill::cluster::{ClusterSettings, execute};
use tidemill::streaming_data::DataSet;

/// Using one gives an error that names it.
pub fn is_refused_in_words() {
    let processes = ClusterSettings::process(1, 0, vec!["127.0.0.1:0".to_owned(); 2]);
    let refused = execute(processes, |_| Ok(())).err().expect("several processes").to_string();
    assert!(refused.contains("feature `processes` of tidemill"), "{refused}");
    let refused = DataSet::open("s3://bucket/set").err().expect("a store").to_string();
    assert!(refused.contains("feature `remote` of tidemill-streaming-data"), "{refused}");
}
