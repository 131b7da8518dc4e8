//! Memory that this machine has left, and that this process holds.

use std::path::Path;

/// The files in which Linux states the memory limit of this process's control group.
const CONTROL_GROUP: &str = "/sys/fs/cgroup";

/// Memory that the system could give this process now; 2 GiB where it does not say.
pub(crate) fn available_bytes() -> usize {
    const UNKNOWN: usize = 2 << 30;
    let of_machine = std::fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(of_machine);
    let of_group = of_group(Path::new(CONTROL_GROUP));
    match (of_machine, of_group) {
        (Some(machine), Some(group)) => machine.min(group),
        (found, other) => found.or(other).unwrap_or(UNKNOWN),
    }
}

/// Memory of the machine that this process holds now, as Linux counts it (VmRSS); none where the system does not say.
pub(crate) fn resident_bytes() -> Option<usize> {
    of_process("VmRSS:")
}

/// The most that it has held (VmHWM).
#[cfg(feature = "cli")]
pub(crate) fn peak_resident_bytes() -> Option<usize> {
    of_process("VmHWM:")
}

fn of_machine(meminfo: &str) -> Option<usize> {
    kibibytes(meminfo, "MemAvailable:")
}

fn of_process(name: &str) -> Option<usize> {
    kibibytes(&std::fs::read_to_string("/proc/self/status").ok()?, name)
}

/// The bytes of a line such as `VmRSS: 3 kB`.
fn kibibytes(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// The part of a group's limit that the group has not taken. Files that it has read take room until something else needs it.
fn of_group(folder: &Path) -> Option<usize> {
    let read = |name| std::fs::read_to_string(folder.join(name)).ok();
    let number = |text: String| text.trim().parse::<usize>().ok();
    let (limit, taken) = (number(read("memory.max")?)?, number(read("memory.current")?)?);
    let stat = read("memory.stat").unwrap_or_default();
    let files = stat.lines().find_map(|line| line.strip_prefix("inactive_file "));
    let files = files.and_then(|bytes| bytes.trim().parse().ok()).unwrap_or(0);
    Some(limit.saturating_sub(taken.saturating_sub(files)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_has_what_it_has_not_taken() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        assert_eq!(of_group(folder.path()), None);
        write("memory.max", "max\n");
        write("memory.current", "700\n");
        assert_eq!(of_group(folder.path()), None, "no limit");
        write("memory.max", "1000\n");
        assert_eq!(of_group(folder.path()), Some(300));
        write("memory.stat", "anon 400\ninactive_file 250\nactive_file 50\n");
        assert_eq!(of_group(folder.path()), Some(550));
        write("memory.current", "5000\n");
        assert_eq!(of_group(folder.path()), Some(0));
        assert_eq!(of_machine("MemTotal: 9 kB\nMemAvailable:   3 kB\n"), Some(3 << 10));
        assert!(available_bytes() > 0);
    }

    #[test]
    fn resident_memory_is_read_from_the_process() {
        assert_eq!(kibibytes("VmHWM: 9 kB\nVmRSS:\t   3 kB\n", "VmRSS:"), Some(3 << 10));
        assert_eq!(kibibytes("VmRSS: many\n", "VmRSS:"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_holds_what_it_has_written() {
        let before = resident_bytes().unwrap();
        // Many times what other tests of this process may free meanwhile.
        let written = std::hint::black_box(vec![1_u8; 512 << 20]);
        let with = resident_bytes().unwrap();
        assert!(with >= before + written.len() / 2, "{before}, then {with}");
    }
}
