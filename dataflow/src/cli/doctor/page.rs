//! The page: the results of all checks, in words and as JSON.

use std::fmt::Write;

use serde::Serialize;

use crate::device::BackendChoice;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    /// It is there, or it did what it should.
    Works,
    /// It is not there, and nothing needs it here.
    NotNeeded,
    /// It is not there.
    Missing,
    /// It is there and does not do what it should.
    Fails,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Works => "works",
            Self::NotNeeded => "not here",
            Self::Missing => "missing",
            Self::Fails => "FAILS",
        }
    }
}

/// One thing that was checked.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    check: String,
    pub(super) state: State,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

impl Check {
    pub(super) fn works(check: impl Into<String>, found: impl Into<String>) -> Self {
        Self { check: check.into(), state: State::Works, found: found.into(), advice: None }
    }

    pub(super) fn missing(
        check: impl Into<String>,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        let advice = Some(advice.into());
        Self { check: check.into(), state: State::Missing, found: found.into(), advice }
    }

    pub(super) fn fails(
        check: impl Into<String>,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { state: State::Fails, ..Self::missing(check, found, advice) }
    }

    /// The same of what only some uses need.
    pub(super) fn not_needed(self) -> Self {
        Self { state: State::NotNeeded, ..self }
    }
}

/// The checks of a backend.
#[derive(Debug, Serialize)]
pub(super) struct Section {
    backend: &'static str,
    works: bool,
    /// Whether there is something to compute on, though it may be broken.
    pub(super) is_here: bool,
    checks: Vec<Check>,
}

impl Section {
    pub(super) fn new(backend: &'static str) -> Self {
        Self { backend, works: true, is_here: true, checks: Vec::new() }
    }

    pub(super) fn add(&mut self, check: Check) {
        self.works &= matches!(check.state, State::Works | State::NotNeeded);
        self.checks.push(check);
    }

    /// The result of all checks together.
    pub(super) fn state(&self) -> State {
        match (self.works, self.is_here) {
            (true, _) => State::Works,
            (false, true) => State::Fails,
            (false, false) => State::Missing,
        }
    }

    fn in_words(&self, text: &mut String) {
        let _ = writeln!(text, "\n{}: {}", self.backend, self.state().word());
        let widest = self.checks.iter().map(|check| check.check.len()).max().unwrap_or(0);
        for Check { check, state, found, advice } in &self.checks {
            let _ = writeln!(text, "  {check:<widest$}  {:<8}  {found}", state.word());
            if let Some(advice) = advice {
                let _ = writeln!(text, "  {:<widest$}  {:<8}  -> {advice}", "", "");
            }
        }
    }
}

/// All that was checked.
#[derive(Debug, Serialize)]
pub(super) struct Page {
    version: &'static str,
    machine: String,
    asked: &'static str,
    /// Whether the part that was asked for works.
    pub(super) works: bool,
    verdict: String,
    backends: Vec<Section>,
}

impl Page {
    pub(super) fn new(asked: BackendChoice, backends: Vec<Section>) -> Self {
        let broken: Vec<&str> = backends
            .iter()
            .filter(|section| section.state() == State::Fails)
            .map(|section| section.backend)
            .collect();
        let working = backends.iter().find(|section| section.works).map(|section| section.backend);
        let (works, verdict) = match (working, &broken[..]) {
            (Some(backend), []) if asked == BackendChoice::Auto => {
                (true, format!("auto computes on {backend}, which works"))
            }
            (Some(backend), []) => (true, format!("{backend} works")),
            (Some(backend), broken) => {
                let broken = broken.join(" and ");
                (false, format!("{backend} works; what is here of {broken} does not"))
            }
            (None, []) => (false, format!("{} is not here", asked.word())),
            (None, broken) => (false, format!("{} does not work", broken.join(" and "))),
        };
        let (version, asked) = (env!("CARGO_PKG_VERSION"), asked.word());
        Self { version, machine: machine(), asked, works, verdict, backends }
    }

    pub(super) fn in_words(&self) -> String {
        let Self { version, machine, asked, verdict, backends, .. } = self;
        let mut text = format!("tidemill {version} doctor, --backend {asked}\n{machine}\n");
        backends.iter().for_each(|section| section.in_words(&mut text));
        let _ = write!(text, "\nresult: {verdict}");
        text
    }
}

/// A description of the machine.
fn machine() -> String {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let memory = crate::memory::available_bytes() as f64 / f64::from(1 << 30);
    format!(
        "{} {} {}, {cores} cores, {memory:.1} GiB of memory free",
        std::env::consts::OS,
        kernel.trim(),
        std::env::consts::ARCH,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(backend: &'static str, checks: Vec<Check>, is_here: bool) -> Section {
        let mut section = Section::new(backend);
        section.is_here = is_here;
        checks.into_iter().for_each(|check| section.add(check));
        section
    }

    fn good(backend: &'static str) -> Section {
        let missing = Check::missing("library", "x was not found", "install x").not_needed();
        section(backend, vec![Check::works("driver", "here"), missing], true)
    }

    fn bad(backend: &'static str, is_here: bool) -> Section {
        section(backend, vec![Check::fails("driver", "too old", "install a newer one")], is_here)
    }

    #[test]
    fn what_is_asked_for_decides() {
        let auto = BackendChoice::Auto;
        let page = Page::new(auto, vec![bad("cuda", false), good("cpu")]);
        assert!(page.works);
        assert_eq!(page.verdict, "auto computes on cpu, which works");
        let page = Page::new(auto, vec![bad("cuda", true), good("cpu")]);
        assert!(!page.works, "a GPU that is left out is told");
        assert_eq!(page.verdict, "cpu works; what is here of cuda does not");
        assert!(Page::new(auto, vec![good("cuda"), good("cpu")]).works);
        for is_here in [false, true] {
            assert!(!Page::new(BackendChoice::Cuda, vec![bad("cuda", is_here)]).works);
        }
    }

    #[test]
    fn a_page_says_what_to_do() {
        let page = Page::new(BackendChoice::Auto, vec![bad("cuda", true), good("cpu")]);
        let words = page.in_words();
        for line in [
            "cuda: FAILS\n  driver  FAILS     too old\n                    -> install a newer one\n",
            "cpu: works\n  driver   works     here\n  library  not here  x was not found\n",
            "\nresult: cpu works",
        ] {
            assert!(words.contains(line), "{line:?} is not in\n{words}");
        }
    }
}
