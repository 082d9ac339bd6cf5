//! Whether the first step has to tune and compile its kernels, and what it is doing while it does.
//!
//! CubeCL tries several kernels for each new shape and keeps the fastest. Nothing of that is printed, so on an empty
//! cache a program's first step looks like a hang of minutes. The choices are kept in one database file (Burn's feature
//! `persistence`, which `burn-cuda-graph` turns on); the compiled kernels only when [`keep_kernels`] or `cubecl.toml`
//! asks for it. `docs/warm-start.md` says where the file is and how to carry it to another machine.

use std::collections::BTreeMap;
use std::fmt;
#[cfg(any(feature = "cuda", feature = "wgpu", test))]
use std::path::Path;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
#[cfg(any(feature = "cuda", feature = "wgpu", test))]
use std::time::SystemTime;
use std::time::{Duration, Instant};

use serde::Serialize;
use thiserror::Error;

/// What CubeCL kept from earlier runs.
#[derive(Clone, Debug, Serialize)]
pub struct Cache {
    /// The database file; it need not exist.
    pub path: PathBuf,
    /// Bytes on disk, the write-ahead log included.
    pub bytes: u64,
    /// Time since something was last written, in seconds.
    pub age_s: Option<u64>,
    /// Whether it can be written; what is tuned is lost otherwise.
    pub writable: bool,
    /// Whether compiled kernels are kept too.
    pub keeps_kernels: bool,
    /// Kernel choices per device, as CubeCL names it, of this version of CubeCL.
    pub choices: BTreeMap<String, u64>,
    /// Compiled kernels, of this version of CubeCL, of all builds.
    pub kernels: u64,
}

impl Cache {
    /// Whether no device has a kernel choice in it.
    ///
    /// A cache that is not cold may still be cold for the shapes of a step, or for the device it runs on.
    pub fn is_cold(&self) -> bool {
        self.choices.values().all(|choices| *choices == 0)
    }
}

impl fmt::Display for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        if self.is_cold() {
            write!(f, "cold: the first step tunes its kernels, into {path}")?;
        } else {
            let choices: u64 = self.choices.values().sum();
            write!(f, "warm: {choices} kernel choices")?;
            if self.keeps_kernels {
                write!(f, " and {} compiled kernels", self.kernels)?;
            }
            write!(f, ", {:.1} MiB in {path}", self.bytes as f64 / MIB)?;
        }
        if !self.writable {
            write!(f, ", which cannot be written: nothing is kept")?;
        }
        Ok(())
    }
}

const MIB: f64 = (1 << 20) as f64;

/// Why compiled kernels are not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KeepError {
    /// No backend of this build compiles kernels.
    #[error("no backend of this build compiles kernels: build with the feature `cuda` or `wgpu`")]
    NoBackend,
    /// Kernels of another build of this program could not be told from its own.
    #[error(
        "this program has no build id, by which kernels of an older build are told from its own: link it with \
         -Wl,--build-id"
    )]
    NoBuildId,
    /// CubeCL reads its configuration once.
    #[error("CubeCL was configured before: ask before the first device is opened")]
    TooLate,
}

/// Has CubeCL keep compiled kernels beside its choices, for later runs of this same build.
///
/// Call it before a device is opened. The rest of CubeCL's configuration (`cubecl.toml`, its variables) stands.
///
/// # Errors
/// [`KeepError`]; kernels are then compiled in each process, as by default.
pub fn keep_kernels() -> Result<(), KeepError> {
    backend::keep()
}

/// What CubeCL kept; `None` in a build without a backend that tunes.
///
/// Reads the database, and creates none.
pub fn cache() -> Option<Cache> {
    backend::find()
}

/// What the first step took.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Tuned {
    /// From start to finish, in seconds.
    pub seconds: f64,
    /// Different kernels launched, those that tuning tried included.
    pub kernels: usize,
    /// Choices that were not in the cache before.
    pub choices: u64,
}

impl fmt::Display for Tuned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} s", self.seconds)?;
        // Those of another process are not heard.
        if self.kernels > 0 {
            write!(f, ", {} kernels", self.kernels)?;
        }
        write!(f, ", {} tuned", self.choices)
    }
}

/// Shows on stderr how far tuning is, from [`Watching::start`] until it is finished or dropped.
///
/// A spinner where somebody watches, else a line every 15 seconds; nothing in the first two seconds.
#[derive(Debug)]
pub struct Watching {
    thread: Option<(Sender<()>, JoinHandle<Tuned>)>,
}

impl Watching {
    /// Starts to watch; `what` begins the line, e.g. `first step`.
    pub fn start(what: &str) -> Self {
        let (stop, stopped) = mpsc::channel();
        let mut line = Line::new(what);
        // The counter is made here, so that it hears what is launched as soon as this returns.
        let mut counter = backend::counter();
        let run = move || {
            let started = Instant::now();
            loop {
                // The sender's drop ends the wait as well.
                let over = stopped.recv_timeout(TICK) != Err(RecvTimeoutError::Timeout);
                let tuned = counter(started.elapsed(), over);
                if over {
                    line.clear();
                    return tuned;
                }
                line.show(&tuned);
            }
        };
        let thread = std::thread::Builder::new()
            .name("tuning-progress".to_string())
            .spawn(run)
            .ok()
            .map(|thread| (stop, thread));
        Self { thread }
    }

    /// Stops, clears the line, and says what it came to.
    pub fn finish(mut self) -> Tuned {
        self.end()
    }

    fn end(&mut self) -> Tuned {
        let Some((stop, thread)) = self.thread.take() else {
            return Tuned::default();
        };
        drop(stop);
        thread.join().unwrap_or_default()
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.end();
    }
}

const TICK: Duration = Duration::from_millis(500);
const QUIET: Duration = Duration::from_secs(2);
const BETWEEN_LINES: Duration = Duration::from_secs(15);

/// The line that is shown.
struct Line {
    what: String,
    bar: indicatif::ProgressBar,
    shown: f64,
}

impl Line {
    fn new(what: &str) -> Self {
        Self {
            what: what.to_string(),
            bar: indicatif::ProgressBar::hidden(),
            shown: 0.0,
        }
    }

    fn show(&mut self, tuned: &Tuned) {
        use std::io::IsTerminal;
        if tuned.seconds < QUIET.as_secs_f64() {
            return;
        }
        let text = format!("{}: {tuned}", self.what);
        if std::io::stderr().is_terminal() {
            if self.bar.is_hidden() {
                self.bar = indicatif::ProgressBar::new_spinner();
            }
            self.bar.set_message(text);
            self.bar.tick();
        } else if tuned.seconds - self.shown >= BETWEEN_LINES.as_secs_f64() {
            self.shown = tuned.seconds;
            eprintln!("{text}");
        }
    }

    fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(any(feature = "cuda", feature = "wgpu", test))]
/// Whether `path`, or the folder that it would be made in, can be written.
fn is_writable(path: &Path) -> bool {
    if path.exists() {
        return std::fs::OpenOptions::new().append(true).open(path).is_ok();
    }
    let Some(folder) = path.ancestors().skip(1).find(|folder| folder.is_dir()) else {
        return false;
    };
    // Permissions do not tell it: the file system may be read-only, or the user root.
    let probe = folder.join(format!(".writable-{}", std::process::id()));
    let created = std::fs::File::create_new(&probe).is_ok();
    created && std::fs::remove_file(&probe).is_ok()
}

#[cfg(any(feature = "cuda", feature = "wgpu", test))]
/// Bytes of the database at `path` with its log, and when either was last written.
fn on_disk(path: &Path) -> (u64, Option<SystemTime>) {
    let log = PathBuf::from(format!("{}-wal", path.display()));
    let files = [path, &log];
    let found = files
        .iter()
        .filter_map(|file| std::fs::metadata(file).ok())
        .collect::<Vec<_>>();
    let bytes = found.iter().map(std::fs::Metadata::len).sum();
    let written = found.iter().filter_map(|file| file.modified().ok()).max();
    (bytes, written)
}

/// Kernel choices per device, and compiled kernels, in CubeCL's `namespaces` of version `version`.
///
/// A namespace is `autotune/VERSION/DEVICE/OPERATION`, or `BACKEND/VERSION/TARGET` for kernels.
#[cfg(any(feature = "cuda", feature = "wgpu", test))]
fn count<'a>(
    namespaces: impl Iterator<Item = (&'a str, u64)>,
    version: &str,
) -> (BTreeMap<String, u64>, u64) {
    let (mut choices, mut kernels) = (BTreeMap::new(), 0);
    for (namespace, entries) in namespaces {
        let mut parts = namespace.splitn(3, '/');
        let (Some(kind), Some(found), Some(rest)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        if found != version {
            continue;
        }
        match kind {
            "autotune" => {
                let device = rest.rsplit_once('/').map_or(rest, |(device, _)| device);
                *choices.entry(device.to_string()).or_default() += entries;
            }
            // Another key to the same kernels, and measurements of the device.
            kind if kind.ends_with("-second-line") || kind == "throughput" => {}
            _ => kernels += entries,
        }
    }
    (choices, kernels)
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
mod backend {
    use super::*;
    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
    use cubecl::environment;
    use cubecl::launched::LaunchedKernels;

    /// The version of CubeCL, which is part of every namespace.
    const CUBECL: &str = "0.11.3";

    pub(super) fn keep() -> Result<(), KeepError> {
        if buildid::build_id().is_none() {
            return Err(KeepError::NoBuildId);
        }
        let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
        config.compilation.cache = true;
        match CubeClRuntimeConfig::try_set(config) || CubeClRuntimeConfig::get().compilation.cache {
            true => Ok(()),
            false => Err(KeepError::TooLate),
        }
    }

    pub(super) fn find() -> Option<Cache> {
        // Reading the configuration is what sets the environment's place.
        let keeps_kernels = CubeClRuntimeConfig::get().compilation.cache;
        let path = environment::path();
        let (bytes, written) = on_disk(&path);
        let (choices, kernels) = entries(&path);
        Some(Cache {
            age_s: written
                .and_then(|written| written.elapsed().ok())
                .map(|age| age.as_secs()),
            writable: is_writable(&path),
            path,
            bytes,
            keeps_kernels,
            choices,
            kernels,
        })
    }

    /// Asking for the namespaces of an environment without a file would make one.
    fn entries(path: &Path) -> (BTreeMap<String, u64>, u64) {
        if !path.is_file() {
            return Default::default();
        }
        let namespaces = environment::namespaces();
        let pairs = namespaces
            .iter()
            .map(|found| (found.namespace.as_str(), found.entries));
        count(pairs, CUBECL)
    }

    fn choices() -> u64 {
        entries(&environment::path()).0.values().sum()
    }

    /// Counts kernels launched and choices made from here on; it is told the time, and whether it is asked for the last
    /// time.
    pub(super) fn counter() -> impl FnMut(Duration, bool) -> Tuned + Send {
        let before = choices();
        let mut made = 0;
        let mut reads = 0u32;
        // A collection tells what it holds when it ends, so each reading starts the next one first.
        let mut launched = LaunchedKernels::new();
        let mut kernels = LaunchedKernels::new().finish();
        move |elapsed, last| {
            let next = LaunchedKernels::new();
            kernels.extend(core::mem::replace(&mut launched, next).finish());
            // The database is written meanwhile; asking it now and then is enough.
            if last || reads.is_multiple_of(4) {
                made = choices().saturating_sub(before);
            }
            reads += 1;
            Tuned {
                seconds: elapsed.as_secs_f64(),
                kernels: kernels.len(),
                choices: made,
            }
        }
    }
}

#[cfg(not(any(feature = "cuda", feature = "wgpu")))]
mod backend {
    use super::*;

    pub(super) fn keep() -> Result<(), KeepError> {
        Err(KeepError::NoBackend)
    }

    pub(super) fn find() -> Option<Cache> {
        None
    }

    pub(super) fn counter() -> impl FnMut(Duration, bool) -> Tuned + Send {
        |elapsed, _| Tuned {
            seconds: elapsed.as_secs_f64(),
            ..Tuned::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a_cache(choices: &[(&str, u64)]) -> Cache {
        Cache {
            path: "target/environment/default.db".into(),
            bytes: 3 << 20,
            age_s: Some(60),
            writable: true,
            keeps_kernels: true,
            choices: choices
                .iter()
                .map(|(device, choices)| (device.to_string(), *choices))
                .collect(),
            kernels: 7,
        }
    }

    #[test]
    fn namespaces_of_another_version_or_kind_are_not_counted() {
        let namespaces = [
            ("autotune/0.11.3/cuda-0/matmul", 3),
            ("autotune/0.11.3/cuda-0/reduce", 2),
            ("autotune/0.11.3/wgpu-1/matmul", 4),
            ("autotune/0.11.2/cuda-0/matmul", 100),
            ("cuda/0.11.3/ptx_sm90-llvm-ptx88", 11),
            ("cuda-second-line/0.11.3/ptx_sm90-llvm-ptx88", 100),
            ("throughput/0.11.3/cuda-0", 100),
            ("records/v1/autotune", 100),
            ("odd", 100),
        ];
        let (choices, kernels) = count(namespaces.into_iter(), "0.11.3");
        let expected = [("cuda-0".to_string(), 5), ("wgpu-1".to_string(), 4)];
        assert_eq!(choices, BTreeMap::from(expected));
        assert_eq!(kernels, 11);
    }

    #[test]
    fn the_line_says_what_the_first_step_will_cost() {
        let cold = a_cache(&[]);
        assert!(cold.is_cold());
        assert_eq!(
            cold.to_string(),
            "cold: the first step tunes its kernels, into target/environment/default.db"
        );
        let mut warm = a_cache(&[("cuda-0", 40), ("wgpu-0", 2)]);
        assert!(!warm.is_cold());
        let line = "warm: 42 kernel choices and 7 compiled kernels, 3.0 MiB in target/environment/default.db";
        assert_eq!(warm.to_string(), line);
        warm.writable = false;
        assert!(warm.to_string().ends_with("nothing is kept"));
    }

    /// A read-only container that says nothing would tune at every start.
    #[test]
    fn a_place_that_cannot_be_written_is_told_from_one_that_can() {
        let folder = std::env::temp_dir().join(format!("warm-start-{}", std::process::id()));
        let inside = folder.join("not/yet/default.db");
        std::fs::create_dir_all(&folder).unwrap();
        assert!(is_writable(&inside), "its folder would be made");
        std::fs::write(folder.join("default.db"), b"123").unwrap();
        std::fs::write(folder.join("default.db-wal"), b"4567").unwrap();
        assert!(is_writable(&folder.join("default.db")));
        assert_eq!(on_disk(&folder.join("default.db")).0, 7);
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(!is_writable(Path::new("/proc/no/such/default.db")));
        assert_eq!(on_disk(&inside), (0, None));
    }

    #[test]
    fn progress_names_what_it_counts() {
        let tuned = Tuned {
            seconds: 41.23,
            kernels: 512,
            choices: 37,
        };
        assert_eq!(tuned.to_string(), "41.2 s, 512 kernels, 37 tuned");
        let elsewhere = Tuned {
            kernels: 0,
            ..tuned
        };
        assert_eq!(elsewhere.to_string(), "41.2 s, 37 tuned");
    }

    #[test]
    fn watching_ends_and_says_how_long_it_took() {
        let tuned = Watching::start("test").finish();
        assert!(tuned.seconds < 60.0);
        drop(Watching::start("dropped"));
    }
}
