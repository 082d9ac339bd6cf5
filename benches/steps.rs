//! Training steps: plain Burn eager, the sealed graph alone, and the graphed step, in turns in one process.
//!
//! What it prints, and what it must not be read as:
//!
//! - `eager`, `graphed`: one call and a device sync, median of interleaved rounds, so that drift of the card's clocks
//!   hits both. Not throughput: `async` is, many calls and one sync.
//! - `bare`: the sealed graph alone, without our copies in and out. The difference to `graphed` is our layer. Nothing a
//!   user can call.
//! - `faster`: eager over graphed, both queued.
//! - `launches`: kernel launches of plain Burn's step, and of a call that replays, copies included. Not those inside the
//!   graph, which holds the write-back as well.
//! - `capture`: the call that records, seals and runs the first replay, caches warm. `even`: the steps after which it has
//!   paid for itself, from queued times.
//! - `host`: the time until a graphed call returns, calls queued from an idle device on, few enough that none waits for a
//!   full queue. Not the time of a step.
//! - `control`: a step bound by the GPU's arithmetic, which must show a ratio of about 1.0, or the harness is lying.
//! - `equal`: `bits` when the parameters equal plain Burn's bit by bit. Otherwise the largest difference; whether they
//!   equal those of the same step over our engine that never records; and whether plain Burn, run twice from the same
//!   weights on the same batches, repeats its own bits.
//!
//! Before a row is printed, both twins have taken the same number of steps from the same weights on the same batches and
//! their parameters were compared bit by bit. Plain Burn trains with Burn's optimizer, the graphed step with ours. Where a
//! step draws random numbers, plain Burn draws the same ones in the comparison, by `with_random`; when it is timed it
//! draws its own.
//!
//! ```text
//! cargo bench --features cuda --bench steps -- --device cuda --json benches/results/NAME.json
//! cargo bench --bench steps -- --device wgpu --quick        # software Vulkan: a check of the harness, no figures
//! benches/compare.sh                                        # with PyTorch's times beside ours, a table and a plot
//! ```

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Bool, Device, Distribution, Int, Tensor};
use burn_cuda_graph::{
    GraphConfig, GraphedStep, Policy, StepPath, StepRate, Support, TensorTree, Training,
    optim as ours, support, with_random,
};
use burn_cuda_graph_suite::bench::{
    self, BenchCase, Difference, KernelShare, Memory, Net, OptimizerKind, Row, Summary,
    break_even_steps, idle_share,
};
use burn_cuda_graph_suite::device::{self, DeviceChoice};
use burn_cuda_graph_suite::device_trace::{Activity, busy_ns, by_name};
use burn_cuda_graph_suite::environment::{self, Environment};
use burn_cuda_graph_suite::models::{
    Gpt, GptConfig, LstmClassifier, LstmClassifierConfig, Mlp, MlpConfig, ResNet18, ResNet18Config,
};
use clap::Parser;
use cubecl_runtime::config::RuntimeConfig;
use cubecl_runtime::logging::{LaunchObservation, LaunchObserver};
use std::collections::BTreeSet;
use std::error::Error;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

#[derive(Parser, Debug)]
struct Args {
    /// Device to measure on.
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceChoice,
    /// Cases, as NAME:BATCH or NAME:BATCH:OPTIMIZER: mlp, resnet18, gpt, lstm, control; sgd (the default), adam.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "mlp:64:sgd,mlp:64:adam,resnet18:16:sgd,resnet18:16:adam,gpt:8:adam,lstm:32:adam,control:4096:sgd"
    )]
    cases: Vec<BenchCase>,
    /// Interleaved rounds per case.
    #[arg(long, default_value_t = 8)]
    rounds: usize,
    /// Calls of each kind per round.
    #[arg(long, default_value_t = 15)]
    calls: usize,
    /// Width of ResNet-18.
    #[arg(long, default_value_t = 64)]
    width: usize,
    /// Update all parameters of the graphed step together (`GraphConfig::with_fused_updates`).
    #[arg(long)]
    fused: bool,
    /// Register this crate's kernels first (`register_kernels`): for the plain steps as well.
    #[arg(long)]
    own_kernels: bool,
    /// Independent blocks of operations that Burn's fusion looks at together (`fusion.beam_search.max_blocks` of `burn.toml`).
    #[arg(long)]
    fusion_blocks: Option<usize>,
    /// Write what the GPU did in the traced graphed steps, in order, to a CSV of each case in this folder.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Kernels of a replayed step to name in the JSON, the longest first, where the device is traced.
    #[arg(long, default_value_t = 16)]
    kernels: usize,
    /// Set from the device.
    #[arg(skip)]
    device_is_cuda: bool,
    /// Also replay a thousand times, and capture and release twenty times, reading the memory held, where an eager step
    /// takes less than 25 ms.
    #[arg(long)]
    memory: bool,
    /// Few calls and small nets: checks that the harness works.
    #[arg(long)]
    quick: bool,
    /// Write the rows, the device and the command as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Write the rows as Markdown tables.
    #[arg(long)]
    markdown: Option<PathBuf>,
    /// Write the queued times as an SVG.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Put the rows of this file beside ours: what `benches/pytorch.py` printed.
    #[arg(long)]
    peers: Option<PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The rate of every step.
const LR: f64 = 0.001;
/// Key of the random numbers that twins are compared on.
const KEY: u64 = 7;
/// Calls queued from an idle device on when the host's time is taken; more, and the last ones wait for room in a queue.
const BURST: usize = 4;

/// A network with an input of its own shape.
trait Case: Module + 'static {
    type Input: TensorTree + Clone;
    /// What is made once, outside the step.
    type Fixed: Clone;
    fn logits(&self, x: Self::Input, fixed: &Self::Fixed) -> Tensor<2>;
}

impl Case for Mlp {
    type Input = Tensor<2>;
    type Fixed = ();
    fn logits(&self, x: Tensor<2>, _: &()) -> Tensor<2> {
        self.forward(x)
    }
}

impl Case for ResNet18 {
    type Input = Tensor<4>;
    type Fixed = ();
    fn logits(&self, x: Tensor<4>, _: &()) -> Tensor<2> {
        self.forward(x)
    }
}

impl Case for Gpt {
    type Input = Tensor<2, Int>;
    type Fixed = Tensor<2, Bool>;
    fn logits(&self, x: Tensor<2, Int>, causal: &Tensor<2, Bool>) -> Tensor<2> {
        self.forward(x, causal).flatten(0, 1)
    }
}

impl Case for LstmClassifier {
    type Input = Tensor<3>;
    type Fixed = ();
    fn logits(&self, x: Tensor<3>, _: &()) -> Tensor<2> {
        self.forward(x)
    }
}

type Batch<M> = (<M as Case>::Input, Tensor<1, Int>);

fn step_fn<M: Case>(
    loss: CrossEntropyLoss,
    fixed: M::Fixed,
) -> impl Fn(&mut Training<M>, Batch<M>, StepRate) -> Tensor<1> {
    move |t, (x, y), lr| {
        let loss = loss.forward(t.model().logits(x, &fixed), y);
        t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
        loss
    }
}

/// Our optimizer, and Burn's.
fn optimizers(kind: OptimizerKind) -> [fn() -> ModuleOptimizer; 2] {
    match kind {
        OptimizerKind::Sgd => [
            || ours::SgdConfig::new().init(),
            || burn::optim::SgdConfig::new().init(),
        ],
        OptimizerKind::Adam => [
            || ours::AdamConfig::new().init(),
            || burn::optim::AdamConfig::new().init(),
        ],
    }
}

/// Each parameter's path and values.
fn parameters<M: Module>(model: &M) -> Vec<(String, Vec<f32>)> {
    #[derive(Default)]
    struct Reader {
        path: Vec<String>,
        found: Vec<(String, Vec<f32>)>,
    }
    impl ModuleVisitor for Reader {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.to_string());
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values = param.val().into_data().iter::<f32>().collect();
            self.found.push((self.path.join("."), values));
        }
    }
    let mut reader = Reader::default();
    model.valid().visit(&mut reader);
    reader.found
}

fn values<M: Module>(model: &M) -> Vec<f32> {
    let parameters = parameters(model).into_iter();
    parameters.flat_map(|(_, values)| values).collect()
}

/// The parameters that differ the most.
fn furthest<M: Module>(ours: &M, theirs: &M) -> Vec<Difference> {
    let pairs = parameters(ours).into_iter().zip(parameters(theirs));
    let mut found: Vec<Difference> = pairs
        .map(|((parameter, ours), (_, theirs))| {
            let apart = ours.iter().zip(&theirs).map(|(a, b)| (a - b).abs());
            let (element, largest) =
                apart
                    .enumerate()
                    .fold((0, 0.0), |most, next| match next.1 > most.1 {
                        true => next,
                        false => most,
                    });
            Difference {
                parameter,
                largest,
                element,
            }
        })
        .filter(|difference| difference.largest > 0.0)
        .collect();
    found.sort_by(|a, b| b.largest.total_cmp(&a.largest));
    found.truncate(5);
    found
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

/// How many kernels a step launches, and those of them that add atomically, whose sums depend on the order in which
/// threads arrive.
fn launches(device: &Device, step: impl FnOnce()) -> (u64, Vec<String>) {
    #[derive(Default)]
    struct Launches {
        count: AtomicU64,
        names: Mutex<BTreeSet<&'static str>>,
    }
    impl LaunchObserver for Launches {
        fn launched(&self, kernel: &'static str) {
            self.count.fetch_add(1, Ordering::Relaxed);
            let mut names = self
                .names
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            names.insert(kernel);
        }
    }
    // What is still queued is not of this step.
    drop(device.sync());
    let launches = Arc::new(Launches::default());
    let observation = LaunchObservation::new(launches.clone());
    step();
    drop(device.sync());
    drop(observation);
    let names = launches
        .names
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let atomic = names
        .iter()
        .filter(|name| name.to_lowercase().contains("atomic"))
        .map(|name| name.to_string())
        .collect();
    (launches.count.load(Ordering::Relaxed), atomic)
}

/// What the GPU did while `steps` ran, which end with a wait for it.
#[derive(Default)]
struct Traced {
    /// Milliseconds in which it computed or copied.
    busy_ms: f64,
    /// Milliseconds from the first to the last of it.
    span_ms: f64,
    activities: Vec<Activity>,
}

/// `None` where nothing measures that.
fn traced(cuda: bool, steps: &mut dyn FnMut()) -> Option<Traced> {
    if !cuda {
        return None;
    }
    let activities = trace(steps)?;
    let first = activities.first()?.start_ns;
    let last = activities.iter().map(|activity| activity.end_ns).max()?;
    Some(Traced {
        busy_ms: busy_ns(&activities) as f64 / 1e6,
        span_ms: (last - first) as f64 / 1e6,
        activities,
    })
}

/// A line for each: when it began, after the first and in microseconds, how long it took, whether it was part of a graph.
fn in_order(activities: &[Activity]) -> String {
    let first = activities.first().map_or(0, |activity| activity.start_ns);
    let lines = activities.iter().map(|activity| {
        let start = (activity.start_ns - first) as f64 / 1e3;
        let took = (activity.end_ns - activity.start_ns) as f64 / 1e3;
        let in_graph = activity.graph != 0;
        format!("{start:.2},{took:.2},{in_graph},{}\n", activity.name)
    });
    std::iter::once("start_us,took_us,in_graph,name\n".to_string())
        .chain(lines)
        .collect()
}

#[cfg(feature = "cuda")]
fn trace(steps: &mut dyn FnMut()) -> Option<Vec<Activity>> {
    match burn_cuda_graph_suite::device_trace::Trace::start() {
        Ok(trace) => {
            steps();
            Some(trace.finish())
        }
        Err(error) => {
            eprintln!("no trace of the device: {error}");
            None
        }
    }
}

#[cfg(not(feature = "cuda"))]
fn trace(_steps: &mut dyn FnMut()) -> Option<Vec<Activity>> {
    None
}

fn reserved(device: &Device) -> u64 {
    device
        .memory_pool_usage()
        .map_or(0, |usage| usage.bytes_reserved)
}

/// The sizes of a case, small with `--quick`.
struct Sizes {
    batch: usize,
    random_registered: bool,
}

fn measure<M: Case>(
    case: &BenchCase,
    sizes: &Sizes,
    model: M,
    fixed: M::Fixed,
    sample: impl Fn() -> Batch<M>,
    device: &Device,
    args: &Args,
) -> Result<Row, Box<dyn Error>> {
    let inner = device.clone().inner();
    let loss = CrossEntropyLossConfig::new().init(device);
    let [our_optimizer, burns_optimizer] = optimizers(case.optimizer);
    let batches: Vec<Batch<M>> = (0..8).map(|_| sample()).collect();
    let batch = |index: usize| batches[index % batches.len()].clone();
    inner.sync()?;

    let plain = step_fn::<M>(loss.clone(), fixed.clone());
    // Plain Burn's step on the random numbers that a graphed one draws.
    let plain_at = |training: &mut Training<M>, index: usize| {
        with_random(&inner, KEY, index as u64, || {
            plain(training, batch(index), LR.into())
        })
    };
    let stock = || Training::new(model.valid().train(), burns_optimizer());
    let graphed_step = |config: GraphConfig| {
        let training = Training::new(model.valid().train(), our_optimizer());
        let mut step =
            GraphedStep::new(training, config, step_fn::<M>(loss.clone(), fixed.clone()))?;
        step.seed(KEY);
        Ok::<_, Box<dyn Error>>(step)
    };
    let config = || GraphConfig::new().with_fused_updates(args.fused);
    let never_recorded = || config().with_warmup(u32::MAX);

    // The first steps of a shape try several kernels, in our optimizer's as in Burn's; figures and comparisons come after.
    let started = Instant::now();
    let mut tuned = stock();
    plain_at(&mut tuned, 0);
    inner.sync()?;
    let first_step_s = started.elapsed().as_secs_f64();
    let mut tuned_ours = graphed_step(never_recorded())?;
    for index in 0..4 {
        plain_at(&mut tuned, index);
        inner.sync()?;
        tuned_ours.run(batch(index), LR)?;
        inner.sync()?;
    }
    drop((tuned, tuned_ours));
    let equality_steps = if args.quick { 8 } else { 50 };
    let (mut once, mut again) = (stock(), stock());
    for index in 0..equality_steps {
        plain_at(&mut once, index);
        inner.sync()?;
        plain_at(&mut again, index);
        inner.sync()?;
    }
    let (eager_repeats_itself, eager_largest_difference) =
        compare(&values(once.model()), &values(again.model()));
    let (launches_plain, atomic_kernels) = launches(&inner, || {
        drop(plain(&mut once, batch(0), LR.into()));
    });
    drop((once, again));

    // Equality: the same steps on both, compared bit by bit before anything is timed.
    let mut eager = stock();
    let mut graphed = graphed_step(config().with_policy(Policy::RequireGraph))?;
    // After three equal steps; Adam makes its moments in the first, which is not like the others.
    let recorded_at = match case.optimizer {
        OptimizerKind::Sgd => 3,
        OptimizerKind::Adam => 4,
    };
    let mut losses = Vec::new();
    for index in 0..equality_steps {
        let theirs = plain_at(&mut eager, index);
        inner.sync()?;
        let ours = graphed.run(batch(index), LR)?;
        let expected = match index {
            index if index < recorded_at => true,
            index if index == recorded_at => ours.path == StepPath::Recorded,
            _ => ours.path == StepPath::Replayed,
        };
        if !expected {
            return Err(format!("step {index} of {case} ran as {}", ours.path).into());
        }
        losses.push((theirs, ours.output));
    }
    let losses_equal = losses.into_iter().all(|(theirs, ours)| {
        theirs.into_scalar::<f32>().to_bits() == ours.into_scalar::<f32>().to_bits()
    });
    let graphed_values = values(&graphed.model());
    let (parameters_equal, largest_difference) = compare(&graphed_values, &values(eager.model()));
    let furthest = furthest(&graphed.model(), eager.model());
    // The same step over the same engine, never recorded.
    let unrecorded = || {
        let mut step = graphed_step(never_recorded())?;
        for index in 0..equality_steps {
            step.run(batch(index), LR)?;
        }
        Ok::<_, Box<dyn Error>>(values(&step.model()))
    };
    let own = unrecorded()?;
    let (equals_own_eager, _) = compare(&graphed_values, &own);
    let own_eager_repeats_itself = match equals_own_eager {
        true => None,
        false => Some(compare(&own, &unrecorded()?).0),
    };
    drop((graphed_values, own));

    let (mut e, mut g, mut b) = (vec![], vec![], vec![]);
    let (mut ea, mut ga, mut ba) = (vec![], vec![], vec![]);
    let (mut eh, mut gh, mut bh) = (vec![], vec![], vec![]);
    let ms = |started: Instant| started.elapsed().as_secs_f64() * 1e3;
    for round in 0..=args.rounds {
        let batch = |call: usize| batch(round + call);
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
        // The host alone: the device is idle at the start of a burst, and the outputs live to its end, so that no call pays
        // for dropping another's.
        for _ in 0..args.calls.div_ceil(BURST) {
            let mut outputs = Vec::with_capacity(BURST);
            for call in 0..BURST {
                let batch = batch(call);
                let started = Instant::now();
                outputs.push(plain(&mut eager, batch, LR.into()));
                eh.push(ms(started) * 1e3);
            }
            inner.sync()?;
            outputs.clear();
            for call in 0..BURST {
                let batch = batch(call);
                let started = Instant::now();
                outputs.push(graphed.run(batch, LR)?.output);
                gh.push(ms(started) * 1e3);
            }
            inner.sync()?;
            outputs.clear();
            for _ in 0..BURST {
                let started = Instant::now();
                graphed.replay_bare(&bare_batch, LR)?;
                bh.push(ms(started) * 1e3);
            }
            inner.sync()?;
        }
        // The first round does not count: Burn's fusion cuts queued steps otherwise than those that are waited for, and
        // compiles and tunes kernels for them.
        if round == 0 {
            for samples in [
                &mut e, &mut g, &mut b, &mut ea, &mut ga, &mut ba, &mut eh, &mut gh, &mut bh,
            ] {
                samples.clear();
            }
        }
    }

    let cuda = args.device_is_cuda;
    let eager_trace = traced(cuda, &mut || {
        for call in 0..args.calls {
            plain(&mut eager, batch(call), LR.into());
        }
        drop(inner.sync());
    });
    let mut failed = None;
    let graphed_trace = traced(cuda, &mut || {
        for call in 0..args.calls {
            failed = graphed.run(batch(call), LR).err().or(failed.take());
        }
        drop(inner.sync());
    });
    if let Some(error) = failed {
        return Err(error.into());
    }
    if let (Some(folder), Some(trace)) = (&args.trace, &graphed_trace) {
        std::fs::create_dir_all(folder)?;
        std::fs::write(
            folder.join(format!("{}.csv", case.to_string().replace(':', "-"))),
            in_order(&trace.activities),
        )?;
    }

    let [e, g, b, ea, ga, ba, eh, gh, bh] =
        [&e, &g, &b, &ea, &ga, &ba, &eh, &gh, &bh].map(|samples| Summary::of(samples));
    let memory = match args.memory && e.median < 25.0 {
        false => None,
        true => {
            let replays = if args.quick { 50 } else { 1000 };
            graphed.run(batch(0), LR)?;
            let before = reserved(&inner);
            for index in 0..replays {
                graphed.run(batch(index), LR)?;
            }
            inner.sync()?;
            let after = reserved(&inner);
            let captures = if args.quick { 3 } else { 20 };
            let mut per_capture = Vec::new();
            for _ in 0..captures {
                graphed.release();
                for index in 0..6 {
                    graphed.run(batch(index), LR)?;
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
    let calls = args.calls as f64;
    let per_call = |trace: &Option<Traced>| trace.as_ref().map(|trace| trace.busy_ms / calls);
    let idle = |trace: &Option<Traced>| {
        (trace.as_ref()).map(|trace| idle_share(trace.busy_ms, trace.span_ms))
    };
    let kernels = graphed_trace.as_ref().map_or_else(Vec::new, |trace| {
        let shares = by_name(&trace.activities).into_iter().take(args.kernels);
        shares
            .map(|(name, count, ns)| KernelShare {
                name,
                per_step: count as f64 / calls,
                us_per_step: ns as f64 / 1e3 / calls,
            })
            .collect()
    });
    Ok(Row {
        case: case.net.name().to_string(),
        batch: sizes.batch,
        optimizer: case.optimizer.name().to_string(),
        random_numbers: case.net.draws_random(),
        random_registered: sizes.random_registered,
        first_step_s,
        eager_sync_ms: e.median,
        eager_min_ms: e.min,
        graphed_sync_ms: g.median,
        graphed_min_ms: g.min,
        bare_sync_ms: b.median,
        bare_min_ms: b.min,
        samples: e.samples,
        eager_async_ms: ea.median,
        eager_async_min_ms: ea.min,
        graphed_async_ms: ga.median,
        graphed_async_min_ms: ga.min,
        bare_async_ms: ba.median,
        bare_async_min_ms: ba.min,
        samples_async: ea.samples,
        ratio_sync: g.median / e.median,
        speed_up_sync: e.median / g.median,
        speed_up_async: ea.median / ga.median,
        layer_over_bare_us: (g.median - b.median) * 1e3,
        layer_over_bare_percent: (g.median / b.median - 1.0) * 100.0,
        eager_host_us: eh.median,
        replay_host_us: gh.median,
        bare_host_us: bh.median,
        samples_host: gh.samples,
        launches_plain,
        launches_eager: report.launches_per_eager_step,
        launches_replay: report.launches_per_replay,
        capture_ms: report.median_capture_ms,
        break_even_steps: (report.median_capture_ms)
            .and_then(|capture| break_even_steps(capture, ea.median, ga.median)),
        bytes_held: report.bytes_held,
        eager_gpu_busy_ms: per_call(&eager_trace),
        eager_gpu_idle_share: idle(&eager_trace),
        gpu_busy_ms: per_call(&graphed_trace),
        gpu_idle_share: idle(&graphed_trace),
        fused_updates: args.fused,
        own_kernels: args.own_kernels,
        fusion_blocks: burn::runtime_config().fusion().beam_search.max_blocks,
        kernels,
        replayed: report.replayed,
        equality_steps,
        losses_equal,
        parameters_equal,
        largest_difference,
        furthest,
        equals_own_eager,
        own_eager_repeats_itself,
        eager_repeats_itself,
        eager_largest_difference,
        atomic_kernels,
        memory,
        peers: Vec::new(),
    })
}

/// `shape` random numbers, and `labels` random classes.
fn noise<const D: usize>(
    shape: [usize; D],
    (labels, classes): (usize, usize),
    device: &Device,
) -> (Tensor<D>, Tensor<1, Int>) {
    let x = Tensor::random(shape, Distribution::Normal(0.0, 1.0), device);
    (x, whole([labels], classes, device))
}

/// Random numbers from 0 to `below`, without it.
fn whole<const D: usize>(shape: [usize; D], below: usize, device: &Device) -> Tensor<D, Int> {
    Tensor::random(shape, Distribution::Uniform(0.0, below as f64), device)
}

fn run(
    case: &BenchCase,
    device: &Device,
    args: &Args,
    random_registered: bool,
) -> Result<Row, Box<dyn Error>> {
    device.seed(1);
    let quick = args.quick;
    let batch = match case.net {
        Net::Mlp => case.batch,
        Net::Control if quick => 64,
        Net::ResNet18 | Net::Gpt | Net::Lstm if quick => case.batch.min(2),
        _ => case.batch,
    };
    let sizes = &Sizes {
        batch,
        random_registered,
    };
    match case.net {
        Net::Mlp => {
            let model = MlpConfig::new(vec![784, 256, 256, 256, 10]).init(device);
            let sample = || noise([batch, 784], (batch, 10), device);
            measure(case, sizes, model, (), sample, device, args)
        }
        Net::Control => {
            let wide = if quick { 64 } else { 8192 };
            let model = MlpConfig::new(vec![wide, wide, wide, 10]).init(device);
            let sample = || noise([batch, wide], (batch, 10), device);
            measure(case, sizes, model, (), sample, device, args)
        }
        Net::ResNet18 => {
            let config = ResNet18Config::new().with_width(args.width);
            let sample = || noise([batch, 3, 32, 32], (batch, 10), device);
            measure(case, sizes, config.init(device), (), sample, device, args)
        }
        Net::Gpt => {
            let config = match quick {
                true => GptConfig::new(32, 8)
                    .with_width(16)
                    .with_heads(2)
                    .with_layers(1),
                false => GptConfig::new(512, 128),
            };
            let (window, vocabulary) = (config.window, config.vocabulary);
            let sample = || {
                let tokens = whole([batch, window], vocabulary, device);
                (tokens, whole([batch * window], vocabulary, device))
            };
            let causal = config.causal_mask(device);
            measure(
                case,
                sizes,
                config.init(device),
                causal,
                sample,
                device,
                args,
            )
        }
        Net::Lstm => {
            let (time, config) = match quick {
                true => (
                    4,
                    LstmClassifierConfig::new().with_features(8).with_hidden(8),
                ),
                false => (32, LstmClassifierConfig::new()),
            };
            let sample = || noise([batch, time, config.features], (batch, 10), device);
            measure(case, sizes, config.init(device), (), sample, device, args)
        }
    }
}

fn print_header() {
    println!(
        "{:<20} {:>9} {:>9} {:>9} {:>7} | {:>9} {:>9} {:>9} {:>7} | {:>9} {:>9} {:>7} {:>8} {:>9}  equal",
        "step",
        "eager",
        "graphed",
        "bare",
        "ratio",
        "eager as.",
        "graph as.",
        "bare as.",
        "faster",
        "launches",
        "capture",
        "even",
        "host us",
        "MiB"
    );
}

fn print(row: &Row) {
    let count = |value: Option<u64>| value.map_or("-".to_string(), |value| value.to_string());
    println!(
        "{:<20} {:>9.3} {:>9.3} {:>9.3} {:>7.3} | {:>9.3} {:>9.3} {:>9.3} {:>7.2} | {:>9} {:>9.1} {:>7} {:>8.1} {:>9.1}  {}",
        row.name(),
        row.eager_sync_ms,
        row.graphed_sync_ms,
        row.bare_sync_ms,
        row.ratio_sync,
        row.eager_async_ms,
        row.graphed_async_ms,
        row.bare_async_ms,
        row.speed_up_async,
        format!("{}/{}", row.launches_plain, count(row.launches_replay)),
        row.capture_ms.unwrap_or(f64::NAN),
        row.break_even_steps
            .map_or("-".to_string(), |steps| format!("{:.0}", steps.ceil())),
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
    for difference in &row.furthest {
        println!(
            "    {} [{}]: {:.2e} from plain Burn's",
            difference.parameter, difference.element, difference.largest
        );
    }
    if let Some(memory) = &row.memory {
        println!("    memory {memory:?}");
    }
}

/// Write the rows so far to the files that were asked for.
fn write(args: &Args, environment: &Environment, rows: &[Row]) -> Result<(), Box<dyn Error>> {
    if let Some(path) = &args.markdown {
        std::fs::write(path, bench::markdown(environment, rows))?;
    }
    if let Some(path) = &args.plot {
        std::fs::write(path, bench::plot(environment, rows)?)?;
    }
    if let Some(path) = &args.json {
        environment::save(path, environment.clone(), rows.to_vec())?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    env_logger::init();
    let mut args = Args::parse();
    if args.quick {
        (args.rounds, args.calls, args.width) = (2, 3, args.width.min(4));
    }
    // Read before anything is measured: a file that is wrong is known at once.
    let mut unmatched = match &args.peers {
        Some(path) => bench::peers_of(&std::fs::read_to_string(path)?)?,
        None => Vec::new(),
    };
    if let Some(blocks) = args.fusion_blocks {
        // Its fields are private, but it can be read from a file.
        let config = serde_json::json!({ "fusion": { "beam_search": { "max_blocks": blocks } } });
        if !burn::BurnConfig::try_set(serde_json::from_value(config)?) {
            return Err("Burn's configuration was read before it could be set".into());
        }
    }
    if args.own_kernels {
        burn_cuda_graph::register_kernels()?;
    }
    // Only where a case draws: a program that draws nothing has no reason to, and each of its operations would be offered to
    // one more observer.
    let random_registered = args.cases.iter().any(|case| case.net.draws_random());
    if random_registered {
        burn_cuda_graph::register_random()?;
    }
    let (device, why) = device::open(args.device)?;
    println!("{why}; {}", support(&device));
    args.device_is_cuda = support(&device) == Support::Hardware;
    let device = device.autodiff();
    let environment = Environment::of(&device, support(&device).to_string());
    print_header();
    let (mut rows, mut failed) = (Vec::new(), Vec::new());
    for case in &args.cases {
        match run(case, &device, &args, random_registered) {
            Ok(mut row) => {
                let ours = std::slice::from_mut(&mut row);
                unmatched = bench::match_peers(ours, unmatched);
                print(&row);
                rows.push(row);
                // After each case: a run that is ended early leaves the rows it has.
                write(&args, &environment, &rows)?;
            }
            Err(error) => {
                println!("{case} failed: {error}");
                failed.push(case.to_string());
            }
        }
    }
    for peer in unmatched {
        println!(
            "no row of ours for {} {}:{}:{}",
            peer.peer, peer.case, peer.batch, peer.optimizer
        );
    }
    for path in [&args.json, &args.markdown, &args.plot]
        .into_iter()
        .flatten()
    {
        println!("written to {}", path.display());
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("no row for {}", failed.join(", ")).into()),
    }
}
