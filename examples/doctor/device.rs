//! What needs a device: runs in a child process and prints [`Line`]s.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_cuda_graph::{GraphConfig, GraphedStep, Policy, StepPath, StepRate, Support, Training};
use burn_cuda_graph_suite::device::{self, DeviceChoice, Hardware};
use burn_cuda_graph_suite::doctor::{Finding, Line, Verdict};
use burn_cuda_graph_suite::models::{Mlp, MlpConfig};

/// Three to warm up, one recorded, and some replays.
const STEPS: usize = 10;
const WARMUP: usize = 3;
const LR: f64 = 0.05;

pub fn examine(choice: DeviceChoice) {
    let verdict = look(choice);
    say(&Line::Verdict(verdict));
}

fn say(line: &Line) {
    match serde_json::to_string(line) {
        Ok(text) => println!("{text}"),
        Err(error) => eprintln!("a finding has no JSON: {error}"),
    }
}

fn found(finding: Finding) {
    say(&Line::Found(finding));
}

fn doing(what: &str) {
    say(&Line::Doing(what.to_string()));
}

fn look(choice: DeviceChoice) -> Verdict {
    #[cfg(feature = "cuda")]
    if matches!(choice, DeviceChoice::Auto | DeviceChoice::Cuda) {
        doing("asking the driver for its cards");
        cards();
    }
    doing("opening the device and computing on it");
    let (device, name) = match device::open(choice) {
        Ok(opened) => opened,
        Err(error) => {
            let remedy = "see the lines above";
            found(Finding::fail("device", error.to_string(), remedy));
            return Verdict::Nothing;
        }
    };
    found(Finding::ok("device", name));
    let support = burn_cuda_graph::support(&device);
    let kind = support.to_string();
    found(match &support {
        Support::Hardware => Finding::ok("graphs", kind),
        Support::Software if device::hardware(&device) == Hardware::SoftwareRasteriser => {
            Finding::warning(
                "graphs",
                format!("{kind}, on a CPU"),
                "good for tests; for speed take an NVIDIA card and --features cuda",
            )
        }
        Support::Software => Finding::ok("graphs", kind),
        Support::None { .. } => Finding::fail(
            "graphs",
            kind,
            "take --device wgpu (software graphs; Mesa's mesa-vulkan-drivers runs without a card), or an NVIDIA card \
             with --features cuda",
        ),
    });
    let records = !matches!(support, Support::None { .. });
    match train(&device.autodiff(), records) {
        Ok(verdict) => verdict,
        Err(error) => {
            let remedy = "RUST_LOG=burn_cuda_graph=debug says more; the README lists the reasons of fallbacks";
            found(Finding::fail("training step", error.to_string(), remedy));
            Verdict::Eager
        }
    }
}

/// The cards as the driver knows them, by cudarc's safe interface.
#[cfg(feature = "cuda")]
fn cards() {
    use cudarc::driver::CudaContext;
    const MIB: usize = 1 << 20;

    // cudarc panics where the library is missing.
    if !burn_cuda_graph::cuda_libraries().is_some_and(|libraries| libraries.driver) {
        return;
    }
    let remedy =
        "nvidia-smi says more; in a container look for --gpus all and NVIDIA_VISIBLE_DEVICES";
    let count = match CudaContext::device_count() {
        Ok(count) if count > 0 => count,
        Ok(_) => {
            let hidden = std::env::var("CUDA_VISIBLE_DEVICES");
            let hidden =
                hidden.map_or(String::new(), |set| format!("; CUDA_VISIBLE_DEVICES={set}"));
            found(Finding::warning("card", format!("none{hidden}"), remedy));
            return;
        }
        Err(error) => {
            found(Finding::warning(
                "card",
                format!("the driver does not start: {error}"),
                remedy,
            ));
            return;
        }
    };
    for index in 0..usize::try_from(count).unwrap_or(0) {
        let what = format!("card {index}");
        let facts = CudaContext::new(index).and_then(|context| {
            let (major, minor) = context.compute_capability()?;
            let (free, total) = context.mem_get_info()?;
            let name = context.name()?;
            let memory = format!("{} of {} MiB free", free / MIB, total / MIB);
            Ok((
                format!("{name}, compute capability {major}.{minor}, {memory}"),
                free,
                total,
            ))
        });
        found(match facts {
            // A recorded step keeps its pages; an eager one that just fits leaves no room for that.
            Ok((facts, free, total)) if free < total / 10 => Finding::warning(
                &what,
                facts,
                "most of its memory is taken: end other processes on it (nvidia-smi lists them)",
            ),
            Ok((facts, ..)) => Finding::ok(&what, facts),
            Err(error) => Finding::warning(&what, error.to_string(), remedy),
        });
    }
}

type Batch = (Tensor<2>, Tensor<1, Int>);

fn step(training: &mut Training<Mlp>, (x, y): Batch, lr: StepRate) -> Tensor<1> {
    let loss = CrossEntropyLossConfig::new().init(&x.device());
    let loss = loss.forward(training.model().forward(x), y);
    let grads = GradientsParams::from_grads(loss.backward(), training.model());
    training.optimize(lr, grads);
    loss
}

/// Trains a tiny net twice, from equal weights on equal batches: with plain Burn, and graphed.
fn train(device: &Device, records: bool) -> Result<Verdict, Box<dyn std::error::Error>> {
    device.seed(7);
    let model = MlpConfig {
        sizes: vec![16, 32, 32, 4],
    }
    .init(device);
    let twin = model.valid().train();
    let batch = |index: usize| -> Batch {
        let number = |i: usize| ((i * 37 + index * 11) % 29) as f32 / 29.0 - 0.5;
        let images: Vec<f32> = (0..8 * 16).map(number).collect();
        let labels: Vec<i64> = (0..8).map(|i| ((i + index) % 4) as i64).collect();
        (
            Tensor::from_data(TensorData::new(images, [8, 16]), device),
            Tensor::from_data(TensorData::new(labels, [8]), device),
        )
    };

    doing("training a tiny net with plain Burn");
    let mut eager = Training::new(twin, SgdConfig::new().init());
    let mut expected = Vec::new();
    for index in 0..STEPS {
        let loss = step(&mut eager, batch(index), LR.into());
        expected.push(loss.try_into_scalar::<f32>()?);
    }
    if let Some(odd) = expected.iter().find(|loss| !loss.is_finite()) {
        return Err(format!("plain Burn's loss is {odd}").into());
    }
    found(Finding::ok(
        "eager step",
        format!(
            "{STEPS} steps, loss {} to {}",
            expected[0],
            expected[STEPS - 1]
        ),
    ));
    if !records {
        return Ok(Verdict::Eager);
    }

    doing("recording a training step and replaying it");
    let config = GraphConfig::new().with_policy(Policy::RequireGraph);
    let mut graphed = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        config,
        step as fn(&mut Training<Mlp>, Batch, StepRate) -> Tensor<1>,
    )?;
    let mut losses = Vec::new();
    for index in 0..STEPS {
        let out = graphed.run(batch(index), LR)?;
        let as_expected = match index {
            0..WARMUP => true,
            WARMUP => out.path == StepPath::Recorded,
            _ => out.path == StepPath::Replayed,
        };
        if !as_expected {
            return Err(format!("step {index} ran as {}", out.path).into());
        }
        losses.push(out.output.try_into_scalar::<f32>()?);
    }
    doing("comparing the two nets");
    let (ours, theirs) = (values(&graphed.model())?, values(eager.model())?);
    let differs = |(a, b): &(&f32, &f32)| a.to_bits() != b.to_bits();
    let off = ours.iter().zip(&theirs).filter(differs).count()
        + losses.iter().zip(&expected).filter(differs).count();
    if off > 0 || ours.len() != theirs.len() {
        found(Finding::fail(
            "replays",
            format!(
                "{off} of {} values and losses differ from plain Burn's bits",
                ours.len() + STEPS
            ),
            "do not train with graphs on this device before the cause is known: report it, with this output",
        ));
        return Ok(Verdict::Eager);
    }
    let report = graphed.report();
    found(Finding::ok(
        "replays",
        format!(
            "1 step recorded and sealed, {} replayed; {} values and all losses equal plain Burn's bit for bit",
            report.replayed,
            ours.len()
        ),
    ));
    doing("letting the graph go");
    drop(graphed);
    Ok(Verdict::Graphs)
}

fn values(model: &Mlp) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
    struct Reader(Result<Vec<f32>, String>);
    impl ModuleVisitor for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let Ok(values) = &mut self.0 else { return };
            match param.val().try_into_data() {
                Ok(data) => values.extend(data.iter::<f32>()),
                Err(error) => self.0 = Err(error.to_string()),
            }
        }
    }
    let mut reader = Reader(Ok(Vec::new()));
    model.valid().visit(&mut reader);
    Ok(reader.0?)
}
