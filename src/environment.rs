//! What a measurement was made on, for the files in `benches/results`.

use burn::tensor::Device;
use serde::Serialize;
use std::io;
use std::path::Path;

/// Card, driver, versions, commit and command.
#[derive(Debug, Clone, Serialize)]
pub struct Environment {
    /// The card, as its driver names it; `none` without one.
    pub card: String,
    /// The driver's version; `none` without one.
    pub driver: String,
    /// The device, as Burn names it.
    pub device: String,
    /// What a graph is on it.
    pub graph: String,
    /// Version of Burn.
    pub burn: &'static str,
    /// Version of CubeCL.
    pub cubecl: &'static str,
    /// Commit, from the variable `COMMIT` or from git.
    pub commit: String,
    /// Arguments of the program.
    pub command: String,
    /// Day.
    pub date: String,
}

impl Environment {
    /// That of this process on `device`, on which a graph is `graph`.
    pub fn of(device: &Device, graph: String) -> Self {
        let smi = output_of(
            "nvidia-smi",
            &["--query-gpu=name,driver_version", "--format=csv,noheader"],
        );
        let line = smi.as_deref().and_then(|text| text.lines().next());
        let (card, driver) = line
            .and_then(|line| line.split_once(", "))
            .unwrap_or(("none", "none"));
        Self {
            card: card.to_string(),
            driver: driver.to_string(),
            device: format!("{:?}", device.clone().inner()),
            graph,
            burn: "0.22.1",
            cubecl: "0.11.3",
            commit: std::env::var("COMMIT")
                .ok()
                .or_else(|| output_of("git", &["rev-parse", "--short", "HEAD"]))
                .unwrap_or_else(|| "unknown".to_string()),
            command: std::env::args().skip(1).collect::<Vec<_>>().join(" "),
            date: output_of("date", &["-u", "+%Y-%m-%d"]).unwrap_or_default(),
        }
    }
}

/// Write `rows`, measured in `environment`, to `path` as JSON.
///
/// # Errors
///
/// When the file cannot be written.
pub fn save<R: Serialize>(path: &Path, environment: Environment, rows: Vec<R>) -> io::Result<()> {
    #[derive(Serialize)]
    struct Rows<R> {
        rows: Vec<R>,
    }
    save_run(path, environment, &Rows { rows })
}

/// Write the fields of `run`, measured in `environment`, to `path` as JSON.
///
/// # Errors
///
/// When the file cannot be written.
pub fn save_run<R: Serialize>(path: &Path, environment: Environment, run: &R) -> io::Result<()> {
    #[derive(Serialize)]
    struct Results<'a, R> {
        #[serde(flatten)]
        environment: Environment,
        #[serde(flatten)]
        run: &'a R,
    }
    let results = Results { environment, run };
    std::fs::write(path, serde_json::to_string_pretty(&results)?)
}

fn output_of(program: &str, args: &[&str]) -> Option<String> {
    let output = std::process::Command::new(program)
        .args(args)
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_string();
    (output.status.success() && !text.is_empty()).then_some(text)
}
