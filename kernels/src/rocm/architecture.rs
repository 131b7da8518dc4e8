//! The architectures that have kernels, and the compilers that know them.
//!
//! AMD's hiprtc ends the process when it is given an architecture that it does not know, and it
//! cannot be asked which ones it knows. So an architecture that is not in this list is refused
//! before. An architecture that is not AMD's belongs to a runtime that implements HIP on another
//! interface, with its own compiler.

use crate::error::{KernelError, Result};

/// Architectures with the matrix instructions that kernels use, and the HIP that first compiles for each, as AMD's release notes
/// have it.
const KNOWN: [(&str, (i32, i32)); 3] = [("gfx90a", (5, 0)), ("gfx942", (6, 0)), ("gfx950", (7, 0))];

/// Asks for an architecture that there are kernels for and that HIP of `version` compiles for.
pub(super) fn check(device: &str, architecture: &str, version: (i32, i32)) -> Result<()> {
    // Features follow the name.
    let target = architecture.split(':').next().unwrap_or_default();
    if !target.is_empty() && !target.starts_with("gfx") {
        return Ok(());
    }
    let refused = |expected| {
        let (device, found) = (device.to_owned(), format!("{target:?}"));
        Err(KernelError::UnsupportedArchitecture { device, found, expected })
    };
    match KNOWN.iter().find(|(known, _)| *known == target) {
        Some((_, oldest)) if version >= *oldest => Ok(()),
        Some((_, (major, minor))) => {
            let (found_major, found_minor) = version;
            refused(format!(
                "one that HIP {found_major}.{found_minor} compiles for: this one needs ROCm \
                 {major}.{minor} or newer"
            ))
        }
        None => {
            let known: Vec<&str> = KNOWN.iter().map(|(known, _)| *known).collect();
            refused(format!("one of {}", known.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_that_the_compiler_does_not_know_is_refused() {
        check("a GPU", "gfx90a:sramecc+:xnack-", (5, 2)).unwrap();
        check("a GPU", "gfx942:sramecc+:xnack-", (7, 0)).unwrap();
        check("a GPU of another maker", "sm_90a", (5, 4)).unwrap();
        let refused =
            |architecture, version| check("a GPU", architecture, version).unwrap_err().to_string();
        assert_eq!(
            refused("gfx942:sramecc+:xnack-", (5, 2)),
            "a GPU is \"gfx942\", expected one that HIP 5.2 compiles for: this one needs ROCm 6.0 or newer"
        );
        for without_kernels in ["gfx803", "gfx908:sramecc+:xnack-", "gfx1100"] {
            let said = refused(without_kernels, (7, 0));
            assert!(said.ends_with("expected one of gfx90a, gfx942, gfx950"), "{said}");
        }
        assert!(refused("", (6, 2)).contains("is \"\", expected one of"));
    }
}
