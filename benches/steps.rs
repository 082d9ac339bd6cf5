//! Training steps: plain Burn eager against the graphed step, in one process.
//!
//! What it prints, and what it must not be read as:
//!
//! - `eager`, `graphed`: one call and a device sync, median of interleaved rounds, so that drift of the card's clocks
//!   hits both. Not throughput: `async` is, many calls and one sync.
//! - `bare`: the sealed graph alone, without our copies in and out. The difference to `graphed` is our layer.
//! - `launches`: kernel launches of the eager step. Not those of the graph, which holds the write-back as well.
//! - `capture`: the call that records, seals and runs the first replay, caches warm.
//! - `control`: a step bound by the GPU's arithmetic, which must show a ratio of about 1.0, or the harness is lying.
//! - `equal`: `bits` when the parameters equal plain Burn's bit by bit. Otherwise the largest difference; whether they
//!   equal those of the same step over our engine that never records; and whether plain Burn, run twice from the same
//!   weights on the same batches, repeats its own bits.
//!
//! Before a row is printed, both twins have taken the same number of steps from the same weights on the same batches and
//! their parameters were compared bit by bit.
//!
//! ```text
//! cargo bench --features cuda --bench steps -- --device cuda --json benches/results/NAME.json
//! cargo bench --bench steps -- --device wgpu --quick        # software Vulkan: a check of the harness, no figures
//! ```

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_cuda_graph::{GraphConfig, GraphedStep, Policy, StepPath, StepRate, Training, support};
use burn_cuda_graph_suite::device::{self, DeviceChoice};
use burn_cuda_graph_suite::environment::{self, Environment};
use burn_cuda_graph_suite::models::{Mlp, MlpConfig, ResNet18, ResNet18Config};
use clap::Parser;
use cubecl_runtime::logging::{LaunchObservation, LaunchObserver};
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Instant;

#[derive(Parser, Debug)]
struct Args {
    /// Device to measure on.
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceChoice,
    /// Cases, as `mlp:BATCH`, `resnet18:BATCH`, `control:BATCH`.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "mlp:64,resnet18:16,control:4096"
    )]
    cases: Vec<String>,
    /// Interleaved rounds per case.
    #[arg(long, default_value_t = 8)]
    rounds: usize,
    /// Calls of each kind per round.
    #[arg(long, default_value_t = 15)]
    calls: usize,
    /// Width of ResNet-18.
    #[arg(long, default_value_t = 64)]
    width: usize,
    /// Also replay a thousand times, and capture and release twenty times, reading the memory held.
    #[arg(long)]
    memory: bool,
    /// Few calls and small nets: checks that the harness works.
    #[arg(long)]
    quick: bool,
    /// Write the rows, the device and the command as JSON.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Serialize, Default, Debug)]
struct Row {
    case: String,
    batch: usize,
    optimizer: &'static str,
    first_step_s: f64,
    eager_sync_ms: f64,
    eager_min_ms: f64,
    graphed_sync_ms: f64,
    graphed_min_ms: f64,
    bare_sync_ms: f64,
    eager_async_ms: f64,
    graphed_async_ms: f64,
    bare_async_ms: f64,
    samples: usize,
    ratio_sync: f64,
    layer_over_bare_us: f64,
    layer_over_bare_percent: f64,
    replay_host_us: f64,
    launches_eager: Option<u64>,
    capture_ms: Option<f64>,
    bytes_held: u64,
    replayed: u64,
    equality_steps: usize,
    losses_equal: bool,
    parameters_equal: bool,
    largest_difference: f32,
    equals_own_eager: bool,
    eager_repeats_itself: bool,
    eager_largest_difference: f32,
    atomic_kernels: Vec<String>,
    memory: Option<Memory>,
}

#[derive(Serialize, Default, Debug)]
struct Memory {
    replays: usize,
    reserved_before_replays: u64,
    reserved_after_replays: u64,
    captures: usize,
    reserved_per_capture: Vec<u64>,
}

/// A network with an input of its own shape.
trait Case: Module {
    fn classify(&self, x: Tensor<4>) -> Tensor<2>;
}

impl Case for Mlp {
    fn classify(&self, x: Tensor<4>) -> Tensor<2> {
        let [batch, features, _, _] = x.dims();
        self.forward(x.reshape([batch, features]))
    }
}

impl Case for ResNet18 {
    fn classify(&self, x: Tensor<4>) -> Tensor<2> {
        self.forward(x)
    }
}

type Batch = (Tensor<4>, Tensor<1, Int>);

fn step_fn<M: Case>(
    loss: CrossEntropyLoss,
) -> impl Fn(&mut Training<M>, Batch, StepRate) -> Tensor<1> {
    move |t, (x, y), lr| {
        let loss = loss.forward(t.model().classify(x), y);
        t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
        loss
    }
}

fn values<M: Module>(model: &M) -> Vec<f32> {
    struct Reader(Vec<f32>);
    impl ModuleVisitor for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }
    let mut reader = Reader(Vec::new());
    model.valid().visit(&mut reader);
    reader.0
}

/// Whether all bits are equal, and the largest absolute difference.
fn compare(ours: &[f32], theirs: &[f32]) -> (bool, f32) {
    let pairs = || ours.iter().zip(theirs);
    let equal = ours.len() == theirs.len() && pairs().all(|(a, b)| a.to_bits() == b.to_bits());
    (
        equal,
        pairs().map(|(a, b)| (a - b).abs()).fold(0.0, f32::max),
    )
}

/// The kernels of a step that add atomically, whose sums depend on the order in which threads arrive.
fn atomic_kernels(device: &Device, step: impl FnOnce()) -> Vec<String> {
    #[derive(Default)]
    struct Names(Mutex<BTreeSet<&'static str>>);
    impl LaunchObserver for Names {
        fn launched(&self, kernel: &'static str) {
            let mut names = self
                .0
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            names.insert(kernel);
        }
    }
    let names = Arc::new(Names::default());
    let observation = LaunchObservation::new(names.clone());
    step();
    drop(device.sync());
    drop(observation);
    let names = names
        .0
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    names
        .iter()
        .filter(|name| name.to_lowercase().contains("atomic"))
        .map(|name| name.to_string())
        .collect()
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(f64::NAN)
}

fn reserved(device: &Device) -> u64 {
    device
        .memory_pool_usage()
        .map_or(0, |usage| usage.bytes_reserved)
}

fn measure<M: Case>(
    name: &str,
    size: usize,
    model: M,
    shape: [usize; 4],
    device: &Device,
    args: &Args,
) -> Result<Row, Box<dyn std::error::Error>> {
    const LR: f64 = 0.001;
    let inner = device.clone().inner();
    let loss = CrossEntropyLossConfig::new().init(device);
    let twin = model.valid().train();
    let batches: Vec<Batch> = (0..8)
        .map(|_| {
            let x = Tensor::random(shape, Distribution::Normal(0.0, 1.0), device);
            let y = Tensor::<1, Int>::random([size], Distribution::Uniform(0.0, 10.0), device);
            (x, y)
        })
        .collect();
    inner.sync()?;

    let plain = step_fn::<M>(loss.clone());
    let fresh = || Training::new(model.valid().train(), SgdConfig::new().init());
    // The first steps of a shape try several kernels; figures and comparisons come after.
    let started = Instant::now();
    let mut tuned = fresh();
    plain(&mut tuned, batches[0].clone(), LR.into());
    inner.sync()?;
    let first_step_s = started.elapsed().as_secs_f64();
    for batch in batches.iter().take(4) {
        plain(&mut tuned, batch.clone(), LR.into());
        inner.sync()?;
    }
    drop(tuned);
    let equality_steps = if args.quick { 8 } else { 50 };
    let (mut once, mut again) = (fresh(), fresh());
    for index in 0..equality_steps {
        plain(&mut once, batches[index % batches.len()].clone(), LR.into());
        inner.sync()?;
        plain(
            &mut again,
            batches[index % batches.len()].clone(),
            LR.into(),
        );
        inner.sync()?;
    }
    let (eager_repeats_itself, eager_largest_difference) =
        compare(&values(once.model()), &values(again.model()));
    let atomic_kernels = atomic_kernels(&inner, || {
        drop(plain(&mut once, batches[0].clone(), LR.into()))
    });
    drop((once, again));

    let fresh_copy = fresh();
    let mut eager = Training::new(twin, SgdConfig::new().init());
    let mut graphed = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        GraphConfig::new().with_policy(Policy::RequireGraph),
        step_fn::<M>(loss.clone()),
    )?;

    // Equality: the same steps on both, compared bit by bit before anything is timed.
    let mut losses = Vec::new();
    for index in 0..equality_steps {
        let batch = &batches[index % batches.len()];
        let theirs = plain(&mut eager, batch.clone(), LR.into());
        inner.sync()?;
        let ours = graphed.run(batch.clone(), LR)?;
        let expected = match index {
            0..3 => false,
            3 => ours.path == StepPath::Recorded,
            _ => ours.path == StepPath::Replayed,
        };
        if !expected && index >= 3 {
            return Err(format!("step {index} of {name} ran as {}", ours.path).into());
        }
        losses.push((theirs, ours.output));
    }
    let losses_equal = losses.into_iter().all(|(theirs, ours)| {
        theirs.into_scalar::<f32>().to_bits() == ours.into_scalar::<f32>().to_bits()
    });
    let (parameters_equal, largest_difference) =
        compare(&values(&graphed.model()), &values(eager.model()));
    // The same step over the same engine, never recorded.
    let mut unrecorded = GraphedStep::new(
        fresh_copy,
        GraphConfig::new().with_warmup(u32::MAX),
        step_fn::<M>(loss),
    )?;
    for index in 0..equality_steps {
        unrecorded.run(batches[index % batches.len()].clone(), LR)?;
    }
    let (equals_own_eager, _) = compare(&values(&graphed.model()), &values(&unrecorded.model()));
    drop(unrecorded);

    let (mut e, mut g, mut b, mut host) = (vec![], vec![], vec![], vec![]);
    let (mut ea, mut ga, mut ba) = (vec![], vec![], vec![]);
    let ms = |started: Instant| started.elapsed().as_secs_f64() * 1e3;
    for round in 0..args.rounds {
        let batch = |call: usize| batches[(round + call) % batches.len()].clone();
        for call in 0..args.calls {
            let started = Instant::now();
            let out = plain(&mut eager, batch(call), LR.into());
            inner.sync()?;
            e.push(ms(started));
            drop(out);
        }
        for call in 0..args.calls {
            let started = Instant::now();
            let out = graphed.run(batch(call), LR)?;
            host.push(ms(started) * 1e3);
            inner.sync()?;
            g.push(ms(started));
            assert!(out.path == StepPath::Replayed);
        }
        for call in 0..args.calls {
            let batch = batch(call);
            let started = Instant::now();
            graphed.replay_bare(&batch, LR)?;
            inner.sync()?;
            b.push(ms(started));
        }
        let per_call = |started: Instant| ms(started) / args.calls as f64;
        let started = Instant::now();
        for call in 0..args.calls {
            plain(&mut eager, batch(call), LR.into());
        }
        inner.sync()?;
        ea.push(per_call(started));
        let started = Instant::now();
        for call in 0..args.calls {
            graphed.run(batch(call), LR)?;
        }
        inner.sync()?;
        ga.push(per_call(started));
        let bare_batch = batch(0);
        let started = Instant::now();
        for _ in 0..args.calls {
            graphed.replay_bare(&bare_batch, LR)?;
        }
        inner.sync()?;
        ba.push(per_call(started));
    }

    let memory = match args.memory && median(e.clone()) < 25.0 {
        false => None,
        true => {
            let replays = if args.quick { 50 } else { 1000 };
            graphed.run(batches[0].clone(), LR)?;
            let before = reserved(&inner);
            for index in 0..replays {
                graphed.run(batches[index % batches.len()].clone(), LR)?;
            }
            inner.sync()?;
            let after = reserved(&inner);
            let captures = if args.quick { 3 } else { 20 };
            let mut per_capture = Vec::new();
            for _ in 0..captures {
                graphed.release();
                for batch in batches.iter().take(6) {
                    graphed.run(batch.clone(), LR)?;
                }
                inner.sync()?;
                per_capture.push(reserved(&inner));
            }
            Some(Memory {
                replays,
                reserved_before_replays: before,
                reserved_after_replays: after,
                captures,
                reserved_per_capture: per_capture,
            })
        }
    };

    let report = graphed.report();
    let min = |samples: &[f64]| samples.iter().copied().fold(f64::INFINITY, f64::min);
    let samples = e.len();
    let (eager_min_ms, graphed_min_ms) = (min(&e), min(&g));
    let (eager_sync_ms, graphed_sync_ms, bare_sync_ms) = (median(e), median(g), median(b));
    Ok(Row {
        case: name.to_string(),
        batch: size,
        optimizer: "sgd",
        first_step_s,
        eager_sync_ms,
        eager_min_ms,
        graphed_sync_ms,
        graphed_min_ms,
        bare_sync_ms,
        eager_async_ms: median(ea),
        graphed_async_ms: median(ga),
        bare_async_ms: median(ba),
        samples,
        ratio_sync: graphed_sync_ms / eager_sync_ms,
        layer_over_bare_us: (graphed_sync_ms - bare_sync_ms) * 1e3,
        layer_over_bare_percent: (graphed_sync_ms / bare_sync_ms - 1.0) * 100.0,
        replay_host_us: median(host),
        launches_eager: report.launches_per_eager_step,
        capture_ms: report.median_capture_ms,
        bytes_held: report.bytes_held,
        replayed: report.replayed,
        equality_steps,
        losses_equal,
        parameters_equal,
        largest_difference,
        equals_own_eager,
        eager_repeats_itself,
        eager_largest_difference,
        atomic_kernels,
        memory,
    })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    env_logger::init();
    let mut args = Args::parse();
    if args.quick {
        (args.rounds, args.calls, args.width) = (2, 3, args.width.min(4));
    }
    let (device, why) = device::open(args.device)?;
    println!("{why}; {}", support(&device));
    let device = device.autodiff();
    println!(
        "{:<16} {:>9} {:>9} {:>9} {:>7} | {:>9} {:>9} {:>9} | {:>8} {:>9} {:>8} {:>9}  equal",
        "step",
        "eager",
        "graphed",
        "bare",
        "ratio",
        "eager as.",
        "graph as.",
        "bare as.",
        "launches",
        "capture",
        "host us",
        "MiB"
    );
    let mut rows = Vec::new();
    for case in &args.cases {
        let (name, size) = case
            .split_once(':')
            .ok_or(format!("{case}: expected NAME:BATCH"))?;
        let size: usize = size.parse()?;
        device.seed(1);
        let row = match name {
            "mlp" => {
                let model = MlpConfig::new(vec![784, 256, 256, 256, 10]).init(&device);
                measure(name, size, model, [size, 784, 1, 1], &device, &args)?
            }
            "control" => {
                let wide = if args.quick { 64 } else { 8192 };
                let model = MlpConfig::new(vec![wide, wide, wide, 10]).init(&device);
                let size = if args.quick { 64 } else { size };
                measure(name, size, model, [size, wide, 1, 1], &device, &args)?
            }
            "resnet18" => {
                let model = ResNet18Config::new().with_width(args.width).init(&device);
                let size = if args.quick { size.min(2) } else { size };
                measure(name, size, model, [size, 3, 32, 32], &device, &args)?
            }
            other => return Err(format!("no case {other}: mlp, resnet18, control").into()),
        };
        println!(
            "{:<16} {:>9.3} {:>9.3} {:>9.3} {:>7.3} | {:>9.3} {:>9.3} {:>9.3} | {:>8} {:>9.1} {:>8.1} {:>9.1}  {}",
            format!("{} {}", row.case, row.batch),
            row.eager_sync_ms,
            row.graphed_sync_ms,
            row.bare_sync_ms,
            row.ratio_sync,
            row.eager_async_ms,
            row.graphed_async_ms,
            row.bare_async_ms,
            row.launches_eager.unwrap_or(0),
            row.capture_ms.unwrap_or(f64::NAN),
            row.replay_host_us,
            row.bytes_held as f64 / (1 << 20) as f64,
            match (row.parameters_equal, row.eager_repeats_itself) {
                (true, _) => "bits".to_string(),
                (false, repeats) => format!(
                    "max |d| {:.2e}; bits of the same step unrecorded: {}; plain Burn repeats itself: {repeats}, max |d| {:.2e}",
                    row.largest_difference, row.equals_own_eager, row.eager_largest_difference
                ),
            }
        );
        if let Some(memory) = &row.memory {
            println!("    memory {memory:?}");
        }
        rows.push(row);
    }
    if let Some(path) = &args.json {
        let graph = support(&device).to_string();
        environment::save(path, Environment::of(&device, graph), rows)?;
        println!("written to {}", path.display());
    }
    Ok(())
}
