//! Says whether training steps will be replayed from graphs on this machine, and if not, what to do.
//!
//! ```text
//! cargo run --release --features cuda --example doctor
//! cargo run --release --example doctor -- --device wgpu
//! cargo run --release --example doctor -- --json
//! ```
//!
//! It looks at the build, the driver, CubeCL's cache and the device, and trains a tiny net: recorded, sealed, replayed
//! and compared bit by bit with plain Burn. What needs a device runs in a process of its own, so that a driver that ends
//! the process is reported as well.
//!
//! Exit code 0: graphs work on the chosen device. 1: they do not. 2: the arguments are wrong.

mod device;
mod host;

use std::io::Read;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use burn_cuda_graph_suite::device::DeviceChoice;
use burn_cuda_graph_suite::doctor::Diagnosis;
use burn_cuda_graph_suite::warm_start::Watching;
use clap::{Parser, ValueEnum};

/// Says whether training steps will be replayed from graphs on this machine, and if not, what to do.
#[derive(Debug, Parser)]
struct Args {
    /// The device to look at; `auto` takes the best one that works.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceChoice,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Give the device up after this many seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Look at the device in this process, and print lines for the one that started it.
    #[arg(long, hide = true)]
    child: bool,
}

fn main() -> ExitCode {
    env_logger::init();
    let args = Args::parse();
    if args.child {
        device::examine(args.device);
        return ExitCode::SUCCESS;
    }
    let name = args
        .device
        .to_possible_value()
        .map_or("auto".to_string(), |value| value.get_name().to_string());
    let mut diagnosis = Diagnosis {
        device: name.clone(),
        ..Diagnosis::default()
    };
    host::look(args.device, &mut diagnosis.findings);
    let watching = Watching::start("looking at the device");
    let outcome = in_a_child(&name, Duration::from_secs(args.timeout));
    drop(watching);
    match outcome {
        Ok((lines, ending, words)) => diagnosis.take(&lines, ending.as_deref(), &words),
        Err(error) => diagnosis.take("", Some(&format!("did not start ({error})")), ""),
    }
    match args.json {
        true => println!("{:#}", serde_json::json!(diagnosis)),
        false => println!("{diagnosis}"),
    }
    ExitCode::from(diagnosis.verdict.exit_code())
}

/// The child's lines, how it ended where that was not well, and what it wrote to stderr.
fn in_a_child(device: &str, limit: Duration) -> std::io::Result<(String, Option<String>, String)> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["--child", "--device", device])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let lines = collect(child.stdout.take());
    let words = collect(child.stderr.take());
    let ending = match wait(&mut child, limit)? {
        Some(status) if status.success() => None,
        Some(status) => Some(ending(status)),
        None => {
            child.kill()?;
            child.wait()?;
            Some(format!("was still busy after {} s", limit.as_secs()))
        }
    };
    Ok((
        lines.join().unwrap_or_default(),
        ending,
        words.join().unwrap_or_default(),
    ))
}

/// Reads on a thread, so that a full pipe stops nobody.
fn collect(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe
            && pipe.read_to_end(&mut bytes).is_err()
        {
            // What came before the error is kept.
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let give_up = Instant::now() + limit;
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(Some(status)),
            None if Instant::now() > give_up => return Ok(None),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn ending(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return format!("was ended by signal {signal}");
    }
    match status.code() {
        Some(101) => "panicked".to_string(),
        Some(code) => format!("ended with code {code}"),
        None => "ended".to_string(),
    }
}
