//! What `examples/doctor` finds, and how it is judged and printed.
//!
//! The parts that need a device run in a child process, since a driver may end the process that asks it. The child's
//! findings come back as lines of JSON ([`Line`]); what it was doing when it went away becomes a finding of its own.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// How a finding is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mark {
    /// As it should be, or a plain fact.
    Ok,
    /// Graphs work all the same; something is slower, or missing for diagnosis.
    Warning,
    /// Graphs will not work on the chosen device.
    Fail,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What was looked at, e.g. `driver`.
    pub what: String,
    /// How it is judged.
    pub mark: Mark,
    /// What was found.
    pub found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub remedy: Option<String>,
}

impl Finding {
    /// As it should be.
    pub fn ok(what: &str, found: impl Into<String>) -> Self {
        Self::new(what, Mark::Ok, found, None)
    }

    /// Graphs work all the same.
    pub fn warning(what: &str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(what, Mark::Warning, found, Some(remedy.into()))
    }

    /// Graphs will not work.
    pub fn fail(what: &str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(what, Mark::Fail, found, Some(remedy.into()))
    }

    fn new(what: &str, mark: Mark, found: impl Into<String>, remedy: Option<String>) -> Self {
        Self {
            what: what.to_string(),
            mark,
            found: found.into(),
            remedy,
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = match self.mark {
            Mark::Ok => "ok",
            Mark::Warning => "warning",
            Mark::Fail => "FAIL",
        };
        write!(f, "{mark:<8} {:<16} {}", self.what, self.found)?;
        match &self.remedy {
            Some(remedy) => write!(f, "\n{:<8} {:<16} -> {remedy}", "", ""),
            None => Ok(()),
        }
    }
}

/// What steps do on the chosen device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// They are recorded and replayed, with the bits of eager steps.
    Graphs,
    /// They run, eagerly.
    Eager,
    /// No step ran.
    #[default]
    Nothing,
}

impl Verdict {
    /// The program's exit code: 0 only where graphs work.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Graphs => 0,
            Self::Eager | Self::Nothing => 1,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Graphs => "Training steps will be replayed from graphs on this device.",
            Self::Eager => {
                "Training steps will run eagerly on this device: the same results, no graphs."
            }
            Self::Nothing => "No training step ran on this device.",
        })
    }
}

/// A line from the child process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Line {
    /// What it does next.
    Doing(String),
    /// What it found.
    Found(Finding),
    /// What it came to; its last line.
    Verdict(Verdict),
}

/// Everything that was found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Diagnosis {
    /// The device that was asked for.
    pub device: String,
    /// In the order they were looked at.
    pub findings: Vec<Finding>,
    /// What steps do.
    pub verdict: Verdict,
}

impl Diagnosis {
    /// Takes what the child process said. `ending` says how it ended where that was not well, `words` is the end of what
    /// it wrote to stderr.
    pub fn take(&mut self, lines: &str, ending: Option<&str>, words: &str) {
        let mut doing = "starting".to_string();
        let mut verdict = None;
        for line in lines.lines() {
            // Anything else was printed by a library.
            match serde_json::from_str(line) {
                Ok(Line::Doing(next)) => doing = next,
                Ok(Line::Found(finding)) => self.findings.push(finding),
                Ok(Line::Verdict(found)) => verdict = Some(found),
                Err(_) => {}
            }
        }
        match (verdict, ending) {
            (Some(verdict), None) => self.verdict = verdict,
            (Some(_), Some(ending)) => {
                // Nothing to rely on: a training run would end so as well.
                self.verdict = Verdict::Nothing;
                let found = format!("the process {ending} after it was done{}", quoted(words));
                let remedy = "report it, with the output of this program";
                self.findings.push(Finding::fail("process", found, remedy));
            }
            (None, ending) => {
                self.verdict = Verdict::Nothing;
                let ending = ending.unwrap_or("ended early");
                let found = format!("the process {ending} while {doing}{}", quoted(words));
                let remedy = "look for the driver's message above; update the driver, or choose another --device";
                self.findings.push(Finding::fail("process", found, remedy));
            }
        }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{finding}")?;
        }
        write!(f, "\n{}", self.verdict)
    }
}

/// The last line of `words` that says something, in quotes.
fn quoted(words: &str) -> String {
    let said = |line: &&str| {
        let line = line.trim();
        !line.is_empty() && !line.starts_with("note: ") && !line.starts_with("stack backtrace")
    };
    match words.lines().rfind(said) {
        Some(line) => format!(
            ": \"{}\"",
            line.trim().chars().take(200).collect::<String>()
        ),
        None => String::new(),
    }
}

/// `12.8` for 12080, as the driver counts.
pub fn cuda_version_text(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// The driver's version in the text of `/proc/driver/nvidia/version`.
pub fn driver_version(text: &str) -> Option<&str> {
    let line = text.lines().find(|line| line.starts_with("NVRM"))?;
    let is_version =
        |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    line.split_whitespace().find(is_version)
}

/// The toolkit's version in its `version.json`.
pub fn toolkit_version(json: &str) -> Option<String> {
    let value: serde_json::Value = serde_json::from_str(json).ok()?;
    Some(value.get("cuda")?.get("version")?.as_str()?.to_string())
}

/// The files in `folders` whose name begins with `prefix`, shortest first.
pub fn files_named(folders: &[PathBuf], prefix: &str) -> Vec<PathBuf> {
    let begins = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with(prefix))
    };
    let read = |folder: &PathBuf| std::fs::read_dir(folder).ok();
    let mut found: Vec<PathBuf> = folders
        .iter()
        .filter_map(read)
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(begins)
        .collect();
    found.sort_by_key(|path| (path.as_os_str().len(), path.clone()));
    found
}

/// Where the loader looks for NVIDIA's libraries: `LD_LIBRARY_PATH`, the usual folders, those of `toolkit`.
pub fn library_folders(ld_library_path: Option<&str>, toolkit: Option<&Path>) -> Vec<PathBuf> {
    let listed = ld_library_path.unwrap_or_default().split(':');
    let mut folders: Vec<PathBuf> = listed
        .filter(|folder| !folder.is_empty())
        .map(PathBuf::from)
        .collect();
    folders.extend(
        [
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib/aarch64-linux-gnu",
            "/usr/lib64",
            "/usr/lib",
        ]
        .map(PathBuf::from),
    );
    if let Some(toolkit) = toolkit {
        folders.push(toolkit.join("lib64"));
        folders.push(toolkit.join("extras/CUPTI/lib64"));
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(line: Line) -> String {
        serde_json::to_string(&line).unwrap() + "\n"
    }

    #[test]
    fn a_child_that_ends_well_gives_its_verdict() {
        let mut diagnosis = Diagnosis::default();
        let lines = line(Line::Doing("opening the device".into()))
            + "a library's own line\n"
            + &line(Line::Found(Finding::ok("device", "it opens")))
            + &line(Line::Verdict(Verdict::Graphs));
        diagnosis.take(&lines, None, "");
        assert_eq!(diagnosis.verdict.exit_code(), 0);
        assert_eq!(diagnosis.findings, [Finding::ok("device", "it opens")]);
    }

    /// A driver that aborts leaves no error to catch; the user has to learn what it died of.
    #[test]
    fn a_child_that_dies_is_a_failure_that_says_where() {
        let mut diagnosis = Diagnosis::default();
        let lines = line(Line::Doing("opening the device".into()));
        let words = "thread panicked\ncuda error 999\nnote: run with RUST_BACKTRACE\n\n";
        diagnosis.take(&lines, Some("was ended by signal 6"), words);
        assert_eq!(diagnosis.verdict, Verdict::Nothing);
        assert_eq!(diagnosis.verdict.exit_code(), 1);
        let found =
            "the process was ended by signal 6 while opening the device: \"cuda error 999\"";
        assert_eq!(diagnosis.findings[0].found, found);
        assert_eq!(diagnosis.findings[0].mark, Mark::Fail);
    }

    /// It would be read as "graphs work" otherwise.
    #[test]
    fn a_child_that_dies_after_its_verdict_is_not_trusted() {
        let mut diagnosis = Diagnosis::default();
        let lines = line(Line::Verdict(Verdict::Graphs));
        diagnosis.take(&lines, Some("was ended by signal 11"), "");
        assert_eq!(diagnosis.verdict.exit_code(), 1);
    }

    #[test]
    fn versions_are_read_as_nvidia_writes_them() {
        assert_eq!(cuda_version_text(12080), "12.8");
        assert_eq!(cuda_version_text(13000), "13.0");
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: gcc 12.3.0";
        assert_eq!(driver_version(open), Some("580.159.04"));
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\n";
        assert_eq!(driver_version(closed), Some("535.129.03"));
        assert_eq!(driver_version("GCC version: gcc 12.3.0"), None);
        let json = r#"{"cuda": {"name": "CUDA SDK", "version": "12.8.1"}}"#;
        assert_eq!(toolkit_version(json).as_deref(), Some("12.8.1"));
        assert_eq!(toolkit_version("{}"), None);
    }

    #[test]
    fn a_library_is_found_in_the_folders_that_the_loader_reads() {
        let folders = library_folders(Some("/opt/a::/opt/b"), Some(Path::new("/usr/local/cuda")));
        assert_eq!(folders[0], Path::new("/opt/a"));
        assert_eq!(folders[1], Path::new("/opt/b"));
        assert!(folders.contains(&PathBuf::from("/usr/local/cuda/lib64")));
        assert!(files_named(&[PathBuf::from("/no/such/folder")], "libcuda").is_empty());
    }

    #[test]
    fn a_remedy_stands_under_its_finding() {
        let text = Finding::fail("driver", "none", "install it").to_string();
        assert_eq!(
            text.lines().collect::<Vec<_>>(),
            [
                "FAIL     driver           none",
                "                          -> install it"
            ]
        );
    }
}
