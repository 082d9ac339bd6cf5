//! Trains ResNet-18 with SGD, and replays each training step from a CUDA graph where the device allows it.
//!
//! The step is ordinary Burn code in a closure; [`GraphedStep`] runs it eagerly at first, records it once its shapes are
//! stable, and replays the recording from then on. Where nothing can be recorded, the same program trains eagerly and
//! says why. The default data (1,797 handwritten digits) is part of the program, so this needs no download:
//!
//! ```text
//! cargo run --release --example resnet18                               # about two minutes on two CPU cores
//! cargo run --release --features cuda --example resnet18               # on an NVIDIA card
//! cargo run --release --features cuda --example resnet18 -- --mode compare
//! cargo run --release --features cuda --example resnet18 -- --data cifar10 --data-dir path/to/cifar-10-batches-bin
//! ```
//!
//! `--mode eager` trains with plain Burn alone. `--mode learner` trains with Burn's `Learner` and the strategy that graphs its
//! steps, which is the one line that is new in `learner.rs`. `--mode compare` trains an eager and a graphed net side by side, from the
//! same weights and on the same batches, and prints the time of a step in both and how far their parameters differ.
//! `compare.rs` has these two. What a program of your own needs is [`train_step`] and [`Graphed`].

mod compare;
mod learner;
mod options;
mod output;

use std::error::Error;
use std::fs::File;
use std::process::ExitCode;
use std::time::Instant;

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_cuda_graph::{GraphConfig, GraphedStep, StepError, StepPath, StepRate, Support, Training};
use burn_cuda_graph_suite::data::{self, Batch, Dataset};
use burn_cuda_graph_suite::device::{self, Hardware};
use burn_cuda_graph_suite::models::{ResNet18, ResNet18Config};
use burn_cuda_graph_suite::warm_start::{self, Watching};
use clap::Parser;

use compare::{Eager, SideBySide};
use options::{Args, DataChoice, Mode, Settings};
use output::{Epoch, Outcome, Progress};

/// Reading a loss waits for the device, so it is read this often only.
const STEPS_PER_LOSS: usize = 10;

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

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let json = match &args.json {
        // Opened first, so that a wrong path does not cost a training run.
        Some(path) => Some(
            File::create(path)
                .map_err(|error| format!("cannot write {}: {error}", path.display()))?,
        ),
        None => None,
    };
    if args.keep_kernels {
        warm_start::keep_kernels()?;
    }
    let (device, chosen) = device::open(args.device)?;
    let hardware = device::hardware(&device);
    let settings = Settings::new(args, hardware)?;
    let data = match args.data {
        DataChoice::Digits => data::digits(settings.seed)?,
        DataChoice::Cifar10 => data::cifar10(args.data_dir.as_deref(), settings.seed)?,
    };
    if data.train_len() < settings.batch_size {
        return Err(format!(
            "--batch-size {} is more than the {} training images",
            settings.batch_size,
            data.train_len()
        )
        .into());
    }

    let support = burn_cuda_graph::support(&device);
    println!("Device: {chosen}");
    println!("Graphs: {support}");
    if hardware == Hardware::SoftwareRasteriser {
        println!(
            "        A software graph on a CPU rasteriser: it shows that replaying works. It spares host work only, so no \
             speed-up like that of a graphics card is to be expected."
        );
    }
    if hardware != Hardware::Cpu
        && let Some(cache) = warm_start::cache()
    {
        eprintln!("Cache:  {cache}");
    }
    println!(
        "Net:    ResNet-18 of width {} on {} ({} training images, {} for validation), batches of {}, SGD at {}",
        settings.width,
        data.name(),
        data.train_len(),
        data.validation_len(),
        settings.batch_size,
        settings.lr,
    );

    let device = device.autodiff();
    device.seed(settings.seed);
    let model = ResNet18Config::new()
        .with_width(settings.width)
        .with_classes(data.classes())
        .with_channels(data.channels())
        .init(&device);

    let mut outcome = Outcome::new(args.mode, &chosen, &support, &data, &settings);
    match args.mode {
        Mode::Graph => {
            let mut trainer = Graphed::new(model, settings.lr)?;
            outcome.epochs = train(&mut trainer, &data, &settings, &device)?;
            outcome.summary = trainer.summary(&support);
            outcome.steps = Some(trainer.step.report());
        }
        Mode::Eager => {
            let mut trainer = Eager::new(model, settings.lr);
            outcome.epochs = train(&mut trainer, &data, &settings, &device)?;
            outcome.summary = "Every step ran eagerly: --mode eager is plain Burn.".to_string();
        }
        Mode::Compare => {
            println!("Each epoch's time is that of both nets together.");
            let mut trainer = SideBySide::new(model, settings.lr, &device)?;
            outcome.epochs = train(&mut trainer, &data, &settings, &device)?;
            outcome.summary = trainer.graphed().summary(&support);
            outcome.steps = Some(trainer.graphed().step.report());
            outcome.comparison = Some(trainer.compare()?);
        }
        Mode::Learner => {
            let (report, summary) = learner::train(model, &data, &settings, &device, &support)?;
            outcome.summary = summary;
            outcome.steps = Some(report);
        }
    }
    outcome.print();
    if let Some(file) = json {
        serde_json::to_writer_pretty(file, &outcome)?;
    }
    Ok(())
}

/// One way to run the training steps.
trait Trainer {
    /// Trains on one batch; gives its loss, which is still on the device.
    fn step(&mut self, batch: Batch) -> Result<Tensor<1>, Box<dyn Error>>;

    /// The model as it is after the last step.
    fn model(&self) -> ResNet18;
}

/// The forward and the backward pass, the same in every mode.
fn loss_and_grads(model: &ResNet18, (images, labels): Batch) -> (Tensor<1>, GradientsParams) {
    let loss = CrossEntropyLossConfig::new()
        .init(&images.device())
        .forward(model.forward(images), labels);
    let grads = GradientsParams::from_grads(loss.backward(), model);
    (loss.without_autodiff(), grads)
}

/// The whole step: what is recorded, and replayed.
fn train_step(training: &mut Training<ResNet18>, batch: Batch, lr: StepRate) -> Tensor<1> {
    let (loss, grads) = loss_and_grads(training.model(), batch);
    training.optimize(lr, grads);
    loss
}

type StepFn = fn(&mut Training<ResNet18>, Batch, StepRate) -> Tensor<1>;

/// Training through burn-cuda-graph.
struct Graphed {
    step: GraphedStep<Training<ResNet18>, Batch, Tensor<1>, StepFn>,
    lr: f64,
    last_path: Option<StepPath>,
}

impl Graphed {
    fn new(model: ResNet18, lr: f64) -> Result<Self, StepError> {
        Self::with_config(model, lr, GraphConfig::new())
    }

    fn with_config(model: ResNet18, lr: f64, config: GraphConfig) -> Result<Self, StepError> {
        let training = Training::new(model, SgdConfig::new().init());
        Ok(Self {
            step: GraphedStep::new(training, config, train_step as _)?,
            lr,
            last_path: None,
        })
    }

    /// One sentence: how the steps ran.
    fn summary(&self, support: &Support) -> String {
        let report = self.step.report();
        match &self.last_path {
            Some(StepPath::Eager(reason)) if report.recorded + report.replayed == 0 => {
                format!("Every step ran eagerly: {reason}.")
            }
            _ => {
                let graph = match support {
                    Support::Hardware => "a CUDA graph",
                    _ => "a software graph",
                };
                format!(
                    "{} of {} steps were replayed from {graph}.",
                    report.replayed,
                    report.steps()
                )
            }
        }
    }
}

impl Trainer for Graphed {
    fn step(&mut self, batch: Batch) -> Result<Tensor<1>, Box<dyn Error>> {
        let out = self.step.run(batch, self.lr)?;
        self.last_path = Some(out.path);
        Ok(out.output)
    }

    fn model(&self) -> ResNet18 {
        self.step.model()
    }
}

fn train(
    trainer: &mut impl Trainer,
    data: &Dataset,
    settings: &Settings,
    device: &Device,
) -> Result<Vec<Epoch>, Box<dyn Error>> {
    let mut epochs = Vec::new();
    let mut tuning = Some(Watching::start("first step"));
    let mut steps_left = match settings.steps {
        0 => usize::MAX,
        limit => limit,
    };
    for epoch in 0..settings.epochs {
        if steps_left == 0 {
            break;
        }
        // The last, smaller batch is left out: it would need a graph of its own.
        let batches = data.train_batches(epoch, settings.batch_size, true, device);
        let steps = batches.len().min(steps_left);
        let progress = Progress::new(epoch + 1, steps);
        let mut losses = Vec::new();
        let mut clock = Clock::start();
        for (index, batch) in batches.take(steps).enumerate() {
            let loss = trainer.step(batch)?;
            clock.steps += 1;
            if index % STEPS_PER_LOSS == 0 || index + 1 == steps {
                let loss = loss.try_into_scalar::<f64>()?;
                drop(tuning.take());
                losses.push(loss);
                progress.show(loss, clock.step_ms());
            }
            if epoch == 0 && index == 0 && steps > 1 {
                progress.print(&format!(
                    "first step: {:.1} s, not counted below",
                    clock.step_ms() / 1e3
                ));
                clock = Clock::start();
            }
            progress.advance();
        }
        device.sync()?;
        let step_ms = clock.step_ms();
        steps_left -= steps;

        let outcome = Epoch {
            steps,
            loss: losses.iter().sum::<f64>() / losses.len() as f64,
            step_ms,
            validation_accuracy: accuracy(&trainer.model().valid(), data, settings, device)?,
        };
        progress.finish(&outcome);
        epochs.push(outcome);
    }
    Ok(epochs)
}

/// Wall time per step.
struct Clock {
    started: Instant,
    steps: usize,
}

impl Clock {
    fn start() -> Self {
        Self {
            started: Instant::now(),
            steps: 0,
        }
    }

    fn step_ms(&self) -> f64 {
        self.started.elapsed().as_secs_f64() * 1e3 / self.steps as f64
    }
}

/// The share of validation images that `model`, made by `valid()`, classifies correctly.
fn accuracy(
    model: &ResNet18,
    data: &Dataset,
    settings: &Settings,
    device: &Device,
) -> Result<f64, Box<dyn Error>> {
    let device = device.clone().inner();
    let mut correct = 0;
    for (images, labels) in data.validation_batches(settings.batch_size, &device) {
        let predicted = model.forward(images).argmax(1).flatten::<1>(0, 1);
        correct += predicted
            .equal(labels)
            .int()
            .sum()
            .try_into_scalar::<i64>()?;
    }
    Ok(correct as f64 / data.validation_len() as f64)
}
