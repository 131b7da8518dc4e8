//! CPU time of the process, which depends little on other programs that run on the machine.

use std::fs;

/// CPU seconds of this process so far, in steps of 10 ms.
pub fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").expect("this bench needs Linux's /proc");
    let fields: Vec<&str> = stat[stat.rfind(')').map_or(0, |at| at + 2)..].split(' ').collect();
    let ticks = |at: usize| fields[at].parse::<f64>().expect("a number of ticks");
    (ticks(11) + ticks(12)) / 100.0
}
