//! Writes one eager step beside one replayed step, as a trace for Perfetto and as a picture.
//!
//! ```text
//! cargo run --release --features cuda --example timeline -- --device cuda --out timeline.json --svg timeline.svg
//! cargo run --release --example timeline -- --device wgpu
//! ```
//!
//! Rows of a step: what the calling thread did, the kernel launches it issued, and on a CUDA device what the device did.
//! How to read them, and what they are not:
//!
//! - `launches` are the moments in which launches were issued, heard by CubeCL's launch observer. A replay issues none of
//!   the recorded ones again: what is left are the copies around it.
//! - `device` is of another step of the same kind, the first kernel at zero. With CUPTI (it comes with the CUDA toolkit)
//!   each kernel and copy is shown as it ran, those inside the graph too; tracing makes the step a little longer.
//! - Without CUPTI every kernel of the eager step is bracketed by two events. The brackets make the host slower, so its
//!   kernels are moved together only where the host was the limit; lengths are right, the gaps are wider than in the step
//!   above them. The replayed step is then one window around the whole call: copies in, graph, copies out.
//! - On wgpu there are host rows only: its launches are encoded and submitted in batches, and what timestamps it has do
//!   not lie on one clock with the host.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_cuda_graph::{GraphConfig, GraphedStep, Policy, StepPath, StepRate, Support, Training};
use burn_cuda_graph_suite::device::{self, DeviceChoice};
use burn_cuda_graph_suite::models::{Mlp, MlpConfig};
use burn_cuda_graph_suite::timeline::{Event, Row, Step, Timeline};
use burn_cuda_graph_suite::warm_start::Watching;
use clap::Parser;
use cubecl_runtime::config::{TypeNameFormatLevel, type_name_format};
use cubecl_runtime::logging::{
    LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod, TimingRequest,
};

/// Writes one eager step beside one replayed step, as a trace for Perfetto and as a picture.
#[derive(Debug, Parser)]
struct Args {
    /// Where to run.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceChoice,
    /// The trace: open it in https://ui.perfetto.dev or chrome://tracing.
    #[arg(long, value_name = "FILE", default_value = "timeline.json")]
    out: PathBuf,
    /// Also draw it.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Images in a step.
    #[arg(long, value_name = "N", default_value_t = 64)]
    batch_size: usize,
    /// Features of the net's hidden layers.
    #[arg(long, value_name = "N", default_value_t = 256)]
    width: usize,
}

fn main() -> ExitCode {
    env_logger::init();
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

type Batch = (Tensor<2>, Tensor<1, Int>);

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    const LR: f64 = 0.01;
    if args.batch_size == 0 || args.width == 0 {
        return Err("--batch-size and --width have to be at least 1".into());
    }
    let (device, chosen) = device::open(args.device)?;
    let support = burn_cuda_graph::support(&device);
    println!("Device: {chosen}");
    println!("Graphs: {support}");
    if let Support::None { .. } = support {
        return Err(
            "there is no replayed step on this device: take --device cuda or --device wgpu".into(),
        );
    }
    let on_device = support == Support::Hardware;
    if !on_device {
        println!("        Host rows only: what the device does is shown on CUDA.");
    }

    let inner = device.clone();
    let device = device.autodiff();
    device.seed(0);
    let config = MlpConfig {
        sizes: vec![784, args.width, args.width, args.width, 10],
    };
    let loss = CrossEntropyLossConfig::new().init(&device);
    let size = args.batch_size;
    let batch: Batch = (
        Tensor::random([size, 784], Distribution::Normal(0.0, 1.0), &device),
        Tensor::random([size], Distribution::Uniform(0.0, 10.0), &device),
    );

    // Both sides past tuning and recording.
    let mut plain = Training::new(config.init(&device), SgdConfig::new().init());
    let tuning = Watching::start("warm-up");
    for _ in 0..5 {
        eager(&mut plain, batch.clone(), LR, &loss, &mut Spans::default());
        inner.sync()?;
    }
    let in_graph = loss.clone();
    let mut graphed = GraphedStep::new(
        Training::new(config.init(&device), SgdConfig::new().init()),
        GraphConfig::new().with_policy(Policy::RequireGraph),
        move |training: &mut Training<Mlp>, (x, y): Batch, lr: StepRate| {
            let loss = in_graph.forward(training.model().forward(x), y);
            let grads = GradientsParams::from_grads(loss.backward(), training.model());
            training.optimize(lr, grads);
            loss
        },
    )?;
    let mut path = graphed.run(batch.clone(), LR)?.path;
    for _ in 0..8 {
        path = graphed.run(batch.clone(), LR)?.path;
        inner.sync()?;
    }
    drop(tuning);
    if path != StepPath::Replayed {
        return Err(format!("the step to show was not replayed: {path}").into());
    }

    let mut steps = Vec::new();

    let names = Arc::new(Launches::new(TimingRequest::None));
    let mut spans = Spans::default();
    let observation = LaunchObservation::new(names.clone());
    eager(&mut plain, batch.clone(), LR, &loss, &mut spans);
    spans.time("wait for the device", || inner.sync())?;
    drop(observation);
    let mut rows = vec![spans.row(), names.row(spans.started)];
    if on_device {
        let mut step = || {
            eager(&mut plain, batch.clone(), LR, &loss, &mut Spans::default());
            Ok(())
        };
        rows.push(match traced(&inner, &mut step)? {
            Some(row) => row,
            None => kernels(&inner, || drop(step()))?,
        });
    }
    let launches = rows[1].events.len();
    steps.push(Step {
        name: "eager".to_string(),
        rows,
    });

    let names = Arc::new(Launches::new(TimingRequest::None));
    let mut spans = Spans::default();
    let observation = LaunchObservation::new(names.clone());
    let out = spans.time("GraphedStep::run", || graphed.run(batch.clone(), LR))?;
    spans.time("wait for the device", || inner.sync())?;
    drop(observation);
    if out.path != StepPath::Replayed {
        return Err(format!("the step to show was not replayed: {}", out.path).into());
    }
    let mut rows = vec![spans.row(), names.row(spans.started)];
    if on_device {
        let mut step = || graphed.run(batch.clone(), LR).map(drop).map_err(Into::into);
        rows.push(match traced(&inner, &mut step)? {
            Some(row) => row,
            None => window(&inner, step)?,
        });
    }
    let left = rows[1].events.len();
    steps.push(Step {
        name: "replayed".to_string(),
        rows,
    });

    let note = match on_device {
        true => {
            "One step each. The device rows are of other steps of the same kind, which were traced."
        }
        false => "One step each, host only: no device times on wgpu.",
    };
    let timeline = Timeline {
        title: format!("MLP 784-{0}-{0}-{0}-10, batch {size}: {chosen}", args.width),
        note: note.to_string(),
        steps,
    };
    for step in &timeline.steps {
        println!("{:<8} {:>9.3} ms", step.name, step.end_us() / 1e3);
    }
    println!("launches issued: {launches} eager, {left} around the replay");
    std::fs::write(&args.out, serde_json::to_string(&timeline.chrome_trace())?)
        .map_err(|error| format!("cannot write {}: {error}", args.out.display()))?;
    println!(
        "wrote {} (open it in https://ui.perfetto.dev)",
        args.out.display()
    );
    if let Some(svg) = &args.svg {
        std::fs::write(svg, timeline.svg())
            .map_err(|error| format!("cannot write {}: {error}", svg.display()))?;
        println!("wrote {}", svg.display());
    }
    Ok(())
}

/// One step of plain Burn.
fn eager(
    training: &mut Training<Mlp>,
    (x, y): Batch,
    lr: f64,
    loss: &CrossEntropyLoss,
    spans: &mut Spans,
) {
    let loss = spans.time("forward", || loss.forward(training.model().forward(x), y));
    let grads = spans.time("backward", || {
        GradientsParams::from_grads(loss.backward(), training.model())
    });
    spans.time("optimizer", || training.optimize(lr, grads));
}

/// What the calling thread did.
struct Spans {
    started: Instant,
    events: Vec<Event>,
}

impl Default for Spans {
    fn default() -> Self {
        Self {
            started: Instant::now(),
            events: Vec::new(),
        }
    }
}

impl Spans {
    fn time<R>(&mut self, name: &str, work: impl FnOnce() -> R) -> R {
        let begin = microseconds(self.started, Instant::now());
        let result = work();
        let end = microseconds(self.started, Instant::now());
        self.events.push(Event::span(name, begin, end));
        result
    }

    fn row(&self) -> Row {
        Row {
            name: "host".to_string(),
            events: self.events.clone(),
        }
    }
}

fn microseconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64() * 1e6
}

/// Hears launches, and keeps their measurements where it asks for them.
struct Launches {
    request: TimingRequest,
    issued: Mutex<Vec<(&'static str, Instant)>>,
    measured: Mutex<Vec<(&'static str, ProfileDuration)>>,
}

impl Launches {
    fn new(request: TimingRequest) -> Self {
        Self {
            request,
            issued: Mutex::default(),
            measured: Mutex::default(),
        }
    }

    fn row(&self, started: Instant) -> Row {
        let issued = self.issued.lock().unwrap_or_else(PoisonError::into_inner);
        let event = |(name, at): &(&'static str, Instant)| {
            Event::instant(short(name), microseconds(started, *at))
        };
        Row {
            name: "launches".to_string(),
            events: issued.iter().map(event).collect(),
        }
    }
}

impl LaunchObserver for Launches {
    fn launched(&self, kernel: &'static str) {
        let mut issued = self.issued.lock().unwrap_or_else(PoisonError::into_inner);
        issued.push((kernel, Instant::now()));
    }

    fn timing(&self) -> TimingRequest {
        self.request
    }

    fn profiled(&self, kernel: &'static str, profile: ProfileDuration) {
        let mut measured = self.measured.lock().unwrap_or_else(PoisonError::into_inner);
        measured.push((kernel, profile));
    }
}

fn short(kernel: &str) -> String {
    type_name_format(kernel, TypeNameFormatLevel::Balanced)
}

/// What the device did in a step, the first of it at zero, as CUPTI saw it; `None` without CUPTI.
#[cfg(feature = "cuda")]
fn traced(
    device: &Device,
    step: &mut dyn FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<Option<Row>, Box<dyn Error>> {
    let trace = match burn_cuda_graph_suite::device_trace::Trace::start() {
        Ok(trace) => trace,
        Err(error) => {
            println!("        No kernels inside the graph: {error}.");
            return Ok(None);
        }
    };
    step()?;
    device.sync()?;
    let us = |ns: u64| ns as f64 / 1e3;
    let events = (trace.finish().into_iter())
        .map(|activity| Event::span(activity.name, us(activity.start_ns), us(activity.end_ns)));
    Ok(Some(device_row(events.collect())))
}

#[cfg(not(feature = "cuda"))]
fn traced(
    _device: &Device,
    _step: &mut dyn FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<Option<Row>, Box<dyn Error>> {
    Ok(None)
}

/// The kernels of a step on the device, the first one at zero.
fn kernels(device: &Device, step: impl FnOnce()) -> Result<Row, Box<dyn Error>> {
    let launches = Arc::new(Launches::new(TimingRequest::Deferred));
    // The device's clock is anchored to the host's before its first window, so nothing lies before this.
    let before = Instant::now();
    let observation = LaunchObservation::new(launches.clone());
    step();
    device.sync()?;
    drop(observation);
    let mut measured = launches
        .measured
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let mut events = Vec::new();
    for (name, profile) in measured.drain(..) {
        if let Some(event) = measure(short(name), profile, before) {
            events.push(event);
        }
    }
    Ok(device_row(events))
}

/// A whole call on the device.
fn window(
    device: &Device,
    call: impl FnOnce() -> Result<(), Box<dyn Error>>,
) -> Result<Row, Box<dyn Error>> {
    let Some(client) = client(device) else {
        return Ok(device_row(Vec::new()));
    };
    let before = Instant::now();
    let window = client.profile_start().map_err(|error| error.to_string())?;
    let result = call();
    let profile = client
        .profile_end(window)
        .map_err(|error| error.to_string())?;
    result?;
    let name = "copies and graph".to_string();
    Ok(device_row(
        measure(name, profile, before).into_iter().collect(),
    ))
}

/// A measurement as an event from `epoch` on; `None` for one that the device did not take.
fn measure(name: String, profile: ProfileDuration, epoch: Instant) -> Option<Event> {
    if profile.timing_method() != TimingMethod::Device {
        return None;
    }
    let ticks = block_on(profile)?;
    let us = |duration: std::time::Duration| duration.as_secs_f64() * 1e6;
    Some(Event::span(
        name,
        us(ticks.start_duration_since(epoch)),
        us(ticks.end_duration_since(epoch)),
    ))
}

/// From zero on: the row is of another step than the host's.
fn device_row(mut events: Vec<Event>) -> Row {
    let first = events
        .iter()
        .map(|event| event.start_us)
        .fold(f64::INFINITY, f64::min);
    for event in &mut events {
        event.start_us -= first;
    }
    Row {
        name: "device".to_string(),
        events,
    }
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn block_on(profile: ProfileDuration) -> Option<cubecl_runtime::logging::ProfileTicks> {
    cubecl::future::block_on(profile.resolve())
}

#[cfg(not(any(feature = "cuda", feature = "wgpu")))]
fn block_on(_profile: ProfileDuration) -> Option<cubecl_runtime::logging::ProfileTicks> {
    None
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn client(device: &Device) -> Option<cubecl::client::Client> {
    match device.clone().inner().as_dispatch() {
        burn_dispatch::DispatchDevice::Cube(device) => Some(device.client()),
        #[allow(unreachable_patterns, reason = "the only kind in some builds")]
        _ => None,
    }
}

#[cfg(not(any(feature = "cuda", feature = "wgpu")))]
fn client(_device: &Device) -> Option<cubecl_runtime::client::Client> {
    None
}
