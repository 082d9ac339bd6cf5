//! Graphed steps on batches that come from the host in several ways, in turns in one process.
//!
//! - `resident`: batches that are on the device already: what the step takes without any upload.
//! - `from_data`: `Tensor::from_data` on the step's thread, right before the step.
//! - `from_data, thread`: `Tensor::from_data` on a thread of its own, two batches ahead.
//! - `uploader`: [`Uploader::prefetch`], two batches ahead.
//!
//! All but the first copy each batch from a few that lie in host memory: what a loader does at least, on the thread that it
//! runs on. What it prints, and what it must not be read as:
//!
//! - `ms per step`: many steps and one wait for the device, batches included; median of the rounds. Where it is that of
//!   `resident`, uploads are hidden behind the steps. Where the host cannot keep up, it is the host's time.
//! - `host`: until a call returns, its batch included, in bursts of four from an idle device on. Not the time of a step.
//! - `replayed`: calls that replayed, of those timed. Below all of them the row is no measurement.
//!
//! ```text
//! cargo bench --features cuda --bench uploads -- --device cuda --json benches/results/NAME.json
//! cargo bench --bench uploads -- --device wgpu --quick      # software Vulkan: a check of the harness, no figures
//! ```

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_cuda_graph::optim::{AdamConfig, SgdConfig};
use burn_cuda_graph::{
    GraphConfig, GraphedStep, HostTensor, StepPath, StepRate, Training, Uploader, support,
    tolerate_captures,
};
use burn_cuda_graph_suite::bench::{BenchCase, Net, OptimizerKind, Summary};
use burn_cuda_graph_suite::device::{self, DeviceChoice};
use burn_cuda_graph_suite::environment::{self, Environment};
use burn_cuda_graph_suite::models::{MlpConfig, ResNet18Config};
use clap::Parser;
use serde::Serialize;
use std::error::Error;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Instant;

#[derive(Parser, Debug)]
struct Args {
    /// Device to measure on.
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceChoice,
    /// Cases, as NAME:BATCH or NAME:BATCH:OPTIMIZER: mlp, resnet18; sgd (the default), adam.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "mlp:64:adam,mlp:4096:adam,resnet18:16:adam,resnet18:128:adam"
    )]
    cases: Vec<BenchCase>,
    /// Rounds of each way, in turns; one more before them is not counted.
    #[arg(long, default_value_t = 8)]
    rounds: usize,
    /// Steps of a round.
    #[arg(long, default_value_t = 64)]
    steps: usize,
    /// Few steps of small nets: checks that the harness works.
    #[arg(long)]
    quick: bool,
    /// Write the rows, the device and the command as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

const LR: f64 = 1e-3;
/// Batches kept ready ahead.
const AHEAD: usize = 2;
/// Distinct batches.
const BATCHES: usize = 4;
/// Calls from an idle device on in which the host's time is taken.
const BURST: usize = 4;

/// One way of one case.
#[derive(Debug, Serialize)]
struct Row {
    case: String,
    way: &'static str,
    batch_bytes: usize,
    step_ms: f64,
    step_ms_min: f64,
    host_us: f64,
    steps: usize,
    replayed: usize,
}

type Batch<const D: usize> = (Tensor<D>, Tensor<1, Int>);
type Source<const D: usize> = Box<dyn FnMut() -> Result<Batch<D>, Box<dyn Error>>>;

fn main() -> Result<(), Box<dyn Error>> {
    env_logger::init();
    let mut args = Args::parse();
    if args.quick {
        (args.rounds, args.steps) = (1, 8);
        args.cases = vec!["mlp:16:adam".parse()?, "resnet18:2:sgd".parse()?];
    }
    let (device, why) = device::open(args.device)?;
    println!("{why}; {}", support(&device));
    let environment = Environment::of(&device, support(&device).to_string());
    let device = device.autodiff();
    let mut rows = Vec::new();
    println!("| case | way | MiB a batch | ms per step | host, us | replayed |");
    println!("| --- | --- | --: | --: | --: | --: |");
    for case in &args.cases {
        device.seed(1);
        let batch = case.batch;
        let measured = match case.net {
            Net::Mlp => {
                let sizes = vec![784, 256, 256, 256, 10];
                let model = MlpConfig::new(sizes).init(&device);
                measure(
                    case,
                    model,
                    |m, x| m.forward(x),
                    [batch, 784],
                    &device,
                    &args,
                )?
            }
            Net::ResNet18 => {
                let width = if args.quick { 4 } else { 64 };
                let model = ResNet18Config::new().with_width(width).init(&device);
                let shape = [batch, 3, 32, 32];
                measure(case, model, |m, x| m.forward(x), shape, &device, &args)?
            }
            _ => return Err(format!("{case}: the cases here are mlp and resnet18").into()),
        };
        for row in &measured {
            println!(
                "| {} | {} | {:.2} | {:.3} | {:.1} | {} of {} |",
                row.case,
                row.way,
                row.batch_bytes as f64 / f64::from(1 << 20),
                row.step_ms,
                row.host_us,
                row.replayed,
                row.steps
            );
        }
        rows.extend(measured);
    }
    if let Some(path) = &args.json {
        environment::save(path, environment, rows)?;
    }
    Ok(())
}

/// The `index`-th batch, the same on every call.
fn host_batch<const D: usize>(index: usize, shape: [usize; D]) -> (TensorData, TensorData) {
    let mut state = index as u32 + 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 24) as f32 - 0.5
    };
    let x: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    let y: Vec<i32> = (0..shape[0])
        .map(|_| ((next() + 0.5) * 9.99) as i32)
        .collect();
    (TensorData::new(x, shape), TensorData::new(y, [shape[0]]))
}

/// The ways, each an endless source of the same batches.
fn sources<const D: usize>(
    host: &[(TensorData, TensorData)],
    device: &Device,
) -> Result<[(&'static str, Source<D>); 4], Box<dyn Error>> {
    fn endless(
        host: &[(TensorData, TensorData)],
    ) -> impl Iterator<Item = (TensorData, TensorData)> + Send + use<> {
        let host = host.to_vec();
        (0..).map(move |index: usize| host[index % host.len()].clone())
    }
    fn made<const D: usize>((x, y): (TensorData, TensorData), device: &Device) -> Batch<D> {
        (Tensor::from_data(x, device), Tensor::from_data(y, device))
    }
    let ended = "the source ended";
    let resident: Vec<Batch<D>> = (host.iter().cloned())
        .map(|batch| made(batch, device))
        .collect();
    let mut resident = resident.into_iter().cycle();
    let (mut here, here_device) = (endless(host), device.clone());
    let (sender, there) = mpsc::sync_channel(AHEAD - 1);
    let (source, there_device) = (endless(host), device.clone());
    std::thread::Builder::new().spawn(move || {
        tolerate_captures();
        for batch in source {
            if sender.send(made::<D>(batch, &there_device)).is_err() {
                return;
            }
        }
    })?;
    let upload = endless(host).map(|(x, y)| [HostTensor::float(x), HostTensor::int(y)]);
    let mut uploads = Uploader::new(device).prefetch(upload, AHEAD);
    Ok([
        (
            "resident",
            Box::new(move || resident.next().ok_or(ended.into())),
        ),
        (
            "from_data",
            Box::new(move || Ok(made(here.next().ok_or(ended)?, &here_device))),
        ),
        ("from_data, thread", Box::new(move || Ok(there.recv()?))),
        (
            "uploader",
            Box::new(move || {
                let mut batch = uploads.next().ok_or(ended)??;
                Ok((batch.float()?, batch.int()?))
            }),
        ),
    ])
}

fn measure<M: Module + 'static, const D: usize>(
    case: &BenchCase,
    model: M,
    forward: fn(&M, Tensor<D>) -> Tensor<2>,
    shape: [usize; D],
    device: &Device,
    args: &Args,
) -> Result<Vec<Row>, Box<dyn Error>> {
    let host: Vec<_> = (0..BATCHES).map(|index| host_batch(index, shape)).collect();
    let batch_bytes = host[0].0.as_bytes().len() + host[0].1.as_bytes().len();
    let optimizer = match case.optimizer {
        OptimizerKind::Sgd => SgdConfig::new().init(),
        OptimizerKind::Adam => AdamConfig::new().init(),
    };
    let loss = CrossEntropyLossConfig::new().init(device);
    let step = move |t: &mut Training<M>, (x, y): Batch<D>, lr: StepRate| {
        let loss = loss.forward(forward(t.model(), x), y);
        t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
        loss
    };
    let mut step = GraphedStep::new(Training::new(model, optimizer), GraphConfig::new(), step)?;
    let inner = device.clone().inner();
    let mut ways = sources::<D>(&host, device)?;
    // Until it is recorded; kernels are tuned then.
    for _ in 0..8 {
        step.run(ways[0].1()?, LR)?;
    }
    inner.sync()?;
    let mut samples: Vec<[Vec<f64>; 2]> = vec![Default::default(); ways.len()];
    let mut replayed = vec![0; ways.len()];
    for round in 0..=args.rounds {
        for (index, (_, source)) in ways.iter_mut().enumerate() {
            inner.sync()?;
            let mut host_us = 0.0;
            let mut replays = 0;
            let started = Instant::now();
            for call in 0..args.steps {
                let out = step.run(source()?, LR)?;
                replays += usize::from(out.path == StepPath::Replayed);
                if call + 1 == BURST {
                    host_us = started.elapsed().as_secs_f64() * 1e6 / BURST as f64;
                }
            }
            inner.sync()?;
            let step_ms = started.elapsed().as_secs_f64() * 1e3 / args.steps as f64;
            if round > 0 {
                samples[index][0].push(step_ms);
                samples[index][1].push(host_us);
                replayed[index] += replays;
            }
        }
    }
    let measured = ways.iter().zip(samples).zip(replayed);
    Ok(measured
        .map(|(((way, _), [step_ms, host_us]), replayed)| Row {
            case: case.to_string(),
            way,
            batch_bytes,
            step_ms: Summary::of(&step_ms).median,
            step_ms_min: Summary::of(&step_ms).min,
            host_us: Summary::of(&host_us).median,
            steps: args.rounds * args.steps,
            replayed,
        })
        .collect())
}
