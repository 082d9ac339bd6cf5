//! Optimizers: graphed against plain Burn, and what they cost where nothing is graphed.
//!
//! Columns, and what they must not be read as:
//!
//! - `mlp`, `conv`: the largest difference of any parameter after so many steps, graphed with the optimizer of
//!   burn-cuda-graph against plain Burn with its own; `bits` when there is none. The convolutional net has BatchNorm and
//!   dropout; its plain twin draws the same numbers. Where bits differ, `own` says that they equal those of the same
//!   step over the same engine that never records: a replay that is right, of operations that fusion cut otherwise.
//!   `any`: that step, run twice, does not repeat its own bits.
//! - `eager`: a whole plain training step with our optimizer over one with Burn's, medians of interleaved calls, each
//!   waited for. Neither runs in a graphed step.
//! - `scalars`: host time of the write that refreshes the step's scalars before a replay; part of the replay's own time.
//!
//! ```text
//! cargo bench --features cuda --bench optimizers -- --device cuda --json benches/results/NAME.json
//! cargo bench --bench optimizers -- --device wgpu --quick     # software Vulkan: a check of the harness, no figures
//! ```

#[path = "../tests/common/mod.rs"]
mod common;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Device;
use burn_cuda_graph::{GraphConfig, GraphedStep, Training, support, with_random};
use burn_cuda_graph_suite::device::{self, DeviceChoice};
use burn_cuda_graph_suite::environment::{self, Environment};
use burn_cuda_graph_suite::models::MlpConfig;
use clap::Parser;
use common::state_bodies::{DropNet, OPTIMIZERS, muon, optimizer};
use common::{Mlp, Net, batch, bits, closure, twins, value};
use serde::Serialize;
use std::error::Error;
use std::time::Instant;

#[derive(Parser, Debug)]
struct Args {
    /// Device to measure on.
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceChoice,
    /// Calls of each kind for the eager ratio.
    #[arg(long, default_value_t = 300)]
    calls: usize,
    /// Only the optimizers whose names contain this.
    #[arg(long, default_value = "")]
    only: String,
    /// Few calls: checks that the harness works.
    #[arg(long)]
    quick: bool,
    /// Write the rows, the device and the command as JSON.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Serialize, Debug, Default)]
struct Equality {
    steps: usize,
    replayed: u64,
    largest_difference: f32,
    values_differing: usize,
    values: usize,
    equals_own_eager: bool,
    /// Whether the step that never records repeats its own bits.
    own_repeats: bool,
}

#[derive(Serialize, Debug)]
struct Row {
    optimizer: String,
    mlp: Equality,
    conv: Equality,
    eager_ours_ms: f64,
    eager_burn_ms: f64,
    eager_ratio: f64,
    samples: usize,
    scalars_us: f64,
    replay_host_us: f64,
}

fn pair_of<M: Net>(name: &str, model: &M) -> (ModuleOptimizer, ModuleOptimizer) {
    match name {
        "muon" => muon(model),
        name => optimizer(name),
    }
}

fn rate(index: usize) -> f64 {
    0.005 * (1.0 + (index as f64 * 0.7).sin())
}

/// Graphed against plain Burn, and against the same engine that never records.
fn equality<M: Net>(name: &str, device: &Device, steps: usize) -> Result<Equality, Box<dyn Error>> {
    let mut found = Equality::default();
    // The first pass tunes.
    for _ in 0..2 {
        let (device, model, twin) = twins::<M>(device);
        let unrecorded = model.valid().train();
        let (mine, theirs) = pair_of(name, &model);
        let (own, again) = (pair_of(name, &model).0, pair_of(name, &model).0);
        let unrecorded_again = model.valid().train();
        let step_of = |model, optimizer, config| {
            let training = Training::new(model, optimizer);
            GraphedStep::new(training, config, closure::<M, _>(&device, |_| {}))
        };
        let mut step = step_of(model, mine, GraphConfig::new())?;
        let mut own = step_of(unrecorded, own, GraphConfig::new().with_warmup(u32::MAX))?;
        let eager = GraphConfig::new().with_warmup(u32::MAX);
        let mut again = step_of(unrecorded_again, again, eager)?;
        own.seed(step.random_key());
        again.seed(step.random_key());
        // Plain Burn runs the same closure: when it drops a tensor decides how fusion cuts the queue.
        let plain = closure::<M, _>(&device, |_| {});
        let mut twin = Training::new(twin, theirs);
        for index in 0..steps {
            step.run(batch(&device, index, 64), rate(index))?;
            own.run(batch(&device, index, 64), rate(index))?;
            again.run(batch(&device, index, 64), rate(index))?;
            with_random(&device, step.random_key(), index as u64, || {
                drop(plain(
                    &mut twin,
                    batch(&device, index, 64),
                    rate(index).into(),
                ));
            });
        }
        let (ours, plain, own) = (bits(&step.model()), bits(twin.model()), bits(&own.model()));
        let pairs = || ours.iter().flatten().zip(plain.iter().flatten());
        let difference = |(a, b): (&u32, &u32)| (f32::from_bits(*a) - f32::from_bits(*b)).abs();
        found = Equality {
            steps,
            replayed: step.report().replayed,
            largest_difference: pairs().map(difference).fold(0.0, f32::max),
            values_differing: pairs().filter(|(a, b)| a != b).count(),
            values: pairs().count(),
            equals_own_eager: ours == own,
            own_repeats: own == bits(&again.model()),
        };
        if found.replayed == 0 {
            return Err(format!("{name} was not replayed: {}", step.report()).into());
        }
    }
    Ok(found)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Milliseconds of a plain step, with our optimizer and with Burn's, interleaved.
fn eager_times(name: &str, device: &Device, calls: usize) -> Result<(f64, f64), Box<dyn Error>> {
    let device = device.clone().autodiff();
    let make = || MlpConfig::new(vec![32, 256, 256, 256, 8]).init(&device);
    let model = make();
    let (mine, theirs) = match name {
        "muon" => muon(&model),
        name => optimizer(name),
    };
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut sides = [(make(), mine), (model, theirs)];
    if name == "muon" {
        sides[0].0 = sides[1].0.valid().train();
    }
    let mut times = [Vec::new(), Vec::new()];
    let batches: Vec<_> = (0..16).map(|index| batch(&device, index, 64)).collect();
    for index in 0..calls + 20 {
        // Which side goes first changes.
        for side in [index % 2, 1 - index % 2] {
            let (model, optimizer) = &mut sides[side];
            let (x, y) = batches[index % 16].clone();
            device.clone().inner().sync()?;
            let started = Instant::now();
            let out = loss.forward(model.forward(x), y);
            let grads = GradientsParams::from_grads(out.backward(), model);
            *model = optimizer.step(rate(index), model.clone(), grads);
            device.clone().inner().sync()?;
            if index >= 20 {
                times[side].push(started.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let [ours, burns] = times;
    Ok((median(ours), median(burns)))
}

/// Host microseconds of the scalars' write and of a whole replay, calls queued.
fn scalar_times(name: &str, device: &Device, calls: usize) -> Result<(f64, f64), Box<dyn Error>> {
    let (device, model, _) = twins::<Mlp>(device);
    let (mine, _) = pair_of(name, &model);
    let training = Training::new(model, mine);
    let step = closure::<Mlp, _>(&device, |_| {});
    let mut step = GraphedStep::new(training, GraphConfig::new(), step)?;
    let one = batch(&device, 0, 64);
    for index in 0..8 {
        value(&step.run(one.clone(), rate(index))?.output);
    }
    let (mut writes, mut replays) = (Vec::new(), Vec::new());
    for index in 0..calls {
        let started = Instant::now();
        step.refresh_bare(&one, rate(index))?;
        writes.push(started.elapsed().as_secs_f64() * 1e6);
        let started = Instant::now();
        step.run(one.clone(), rate(index))?;
        replays.push(started.elapsed().as_secs_f64() * 1e6);
    }
    device.inner().sync()?;
    Ok((median(writes), median(replays)))
}

fn main() -> Result<(), Box<dyn Error>> {
    env_logger::init();
    let mut args = Args::parse();
    burn_cuda_graph::register_random()?;
    let (mlp_steps, conv_steps) = match args.quick {
        true => (10, 8),
        false => (50, 20),
    };
    if args.quick {
        args.calls = 10;
    }
    let (device, why) = device::open(args.device)?;
    println!("{why}; {}", support(&device));
    println!(
        "{:<26} {:>12} {:>12} {:>9} {:>9} {:>7} {:>10} {:>10}",
        "optimizer", "mlp", "conv", "ours ms", "burn ms", "ratio", "scalars us", "replay us"
    );
    let mut rows = Vec::new();
    for name in OPTIMIZERS.into_iter().chain(["muon"]) {
        if !name.contains(&args.only) {
            continue;
        }
        let mlp = equality::<Mlp>(name, &device, mlp_steps)?;
        let conv = equality::<DropNet>(name, &device, conv_steps)?;
        let (ours, burns) = eager_times(name, &device, args.calls)?;
        let (scalars_us, replay_host_us) = scalar_times(name, &device, args.calls)?;
        let row = Row {
            optimizer: name.to_string(),
            mlp,
            conv,
            eager_ours_ms: ours,
            eager_burn_ms: burns,
            eager_ratio: ours / burns,
            samples: args.calls,
            scalars_us,
            replay_host_us,
        };
        let told = |found: &Equality| match (found.values_differing, found.equals_own_eager) {
            (0, _) => "bits".to_string(),
            (_, true) => format!("{:.1e} own", found.largest_difference),
            (_, false) if !found.own_repeats => format!("{:.1e} any", found.largest_difference),
            (_, false) => format!("{:.1e}", found.largest_difference),
        };
        println!(
            "{:<26} {:>12} {:>12} {:>9.3} {:>9.3} {:>7.3} {:>10.1} {:>10.1}",
            row.optimizer,
            told(&row.mlp),
            told(&row.conv),
            row.eager_ours_ms,
            row.eager_burn_ms,
            row.eager_ratio,
            row.scalars_us,
            row.replay_host_us
        );
        rows.push(row);
    }
    if let Some(path) = &args.json {
        let graph = support(&device).to_string();
        environment::save(path, Environment::of(&device, graph), rows)?;
        println!("written to {}", path.display());
    }
    Ok(())
}
