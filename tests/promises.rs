//! The whole-system promises of Tidemill, one a file.
//!
//! They are modules of one test program, so that everything below is linked once. `elastic` alone:
//! `cargo test -p tidemill-tests elastic`.
//!
//! | file | what is promised |
//! |---|---|
//! | [`elastic`] | nothing but numerics changes a bit: workers, processes, microbatches, read-ahead, threads |
//! | [`families`] | every family of models trains, resumes and is elastic, and what it leaves can be used |
//! | [`arrival_order`] | those bits can tell one order of summation from another |
//! | [`documents`] | all of it holds where documents of a sample see nothing of each other |
//! | [`kill_and_resume`] | nor do kills, signals and resumes at other world sizes |
//! | [`continuing`] | a new run begins with the parameters of a checkpoint, with transformers' losses on transformers' checkpoints |
//! | [`mixing`] | several data sets in exact shares are as elastic as one |
//! | [`optimizers`] | so is a run of any optimizer, a user's own too, and of groups of parameters |
//! | [`own_samples`] | so is a model of samples that are no tokens |
//! | [`resume_rules`] | what a resumed run may change, and what it may not |
//! | [`versions`] | a data set may change under a run, which stays on the version that it began with |
//! | [`upkeep`] | whatever ends an update, the newest version is whole, and of the other nothing stays |
//! | [`stores`] | samples may come from a store and checkpoints go there, with the same bits, whatever is killed |
//! | [`reading`] | `bench data` reads folders and URLs, samples and rows, and says what bounds them |
//! | [`streaming`] | a data set streams into any timely program, elastically and boundedly |
//! | [`preparing`] | a data set is prepared by any number of processes and hosts, with the bytes of one, or by none |
//! | [`importing`] | files of other frameworks become configs that are accepted, and none of their keys is dropped |
//! | [`defaults`] | a default is never refused |
//! | [`bad_input`] | wrong input is one clear line, exit code 1 or 2, and nothing half-written |
//! | [`doctor`] | `doctor` says what a machine can compute with, what is missing and how to get it |
//! | [`devices`] | a device that is not there is one clear line, and a run says what it computes on |
//! | [`rocm`] | AMD GPUs are as elastic as any device, and a run goes on after one was lost |
//! | [`cut_files`] | what is too large for one file is as good in several |
//! | [`durability`] | what a name relies on is on the disk before the name is |
//! | [`failure`] | one panic, death or silence ends every worker and process within seconds |
//! | [`evaluating`] | answers to questions depend on the question alone, and a second run goes on where the first ended |
//! | [`asking`] | so do the answers to tasks that a run is asked while it trains, whatever workers share them out |
//! | [`scaling`] | training and exchanges are measured over processes as over threads |
//! | [`watching`] | a run that trains can be watched: TensorBoard's events, and numbers for Prometheus |
//! | [`training_report`] | what a run has been through stands on its page, and the page is one whole file |
//! | [`report_in_a_browser`] | that page in a browser: laid out, moving, and asking for nothing |
//! | [`program`] | what stands on standard output, and that what is printed can be used |

mod arrival_order;
mod asking;
mod bad_input;
mod cluster_secret;
mod continuing;
mod cut_files;
mod defaults;
mod devices;
mod doctor;
mod documents;
mod durability;
mod elastic;
mod evaluating;
mod failure;
mod families;
mod importing;
mod kill_and_resume;
#[path = "../streaming-data/tests/remote/listen.rs"]
mod listen;
mod mixing;
mod optimizers;
mod own_samples;
mod preparing;
mod program;
mod reading;
mod report_in_a_browser;
mod reports;
mod resume_rules;
mod rocm;
#[path = "../streaming-data/tests/remote/s3_server.rs"]
mod s3_server;
mod scaling;
mod stores;
mod streaming;
mod support;
mod training_report;
mod upkeep;
mod versions;
mod watching;
