//! Burn's `Learner`, as its guide has it, with one line that is new: the training strategy.
//!
//! A convolutional net on 1,797 handwritten digits that are part of the program, with dropout and BatchNorm, Adam, a cosine
//! schedule, checkpoints, metrics, and Burn's terminal display where there is a terminal.
//!
//! ```diff
//! -use burn::optim::AdamConfig;
//! +use burn_cuda_graph::optim::AdamConfig;
//! +use burn_cuda_graph::{TensorTree, graph_strategy};
//!
//! +#[derive(TensorTree)]
//!  struct DigitsBatch { .. }
//!
//! -let device = Device::cuda(0);
//! +let device = burn_cuda_graph::device(0)?; // for dropout
//!
//!  SupervisedTraining::new(directory, train, valid)
//!      .metrics((AccuracyMetric::new(), LossMetric::new()))
//! +    .with_training_strategy(graph_strategy(device))
//!      .launch(learner);
//! ```
//!
//! ```text
//! cargo run --release --example learner                        # about a minute on two CPU cores
//! cargo run --release --features cuda --example learner        # on an NVIDIA card
//! cargo run --release --example learner -- --plain             # Burn's own strategy, for comparison
//! ```

mod model;

use std::error::Error;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn_cuda_graph::GraphStrategy;
use burn_cuda_graph::optim::AdamConfig;
use burn_cuda_graph_suite::data;
use burn_cuda_graph_suite::device::{self, DeviceChoice};
use burn_cuda_graph_suite::renderer::LineRenderer;
use burn_cuda_graph_suite::warm_start::{self, Watching};
use burn_train::metric::{AccuracyMetric, LossMetric};
use burn_train::{ExecutionStrategy, Learner, SupervisedTraining};
use clap::Parser;

use model::{Digit, DigitsBatcher, NetConfig};

/// Train with Burn's `Learner`, by graphed steps.
#[derive(Parser, Debug)]
struct Args {
    /// Where to train; the best that is there by default.
    #[arg(long, value_enum, default_value_t = DeviceChoice::Auto)]
    device: DeviceChoice,
    /// Use Burn's own single-device strategy.
    #[arg(long)]
    plain: bool,
    /// Epochs.
    #[arg(long, default_value_t = 5)]
    epochs: usize,
    /// Images in a batch.
    #[arg(long, default_value_t = 64)]
    batch_size: usize,
    /// Of so many steps eight run eagerly, to measure the speed-up.
    #[arg(long, default_value_t = 200)]
    samples: u32,
    /// Go on from the checkpoint of this epoch.
    #[arg(long)]
    resume: Option<usize>,
    /// Where checkpoints and logs go.
    #[arg(long, default_value = "target/learner")]
    directory: PathBuf,
    /// A line for each epoch, where there is a terminal to draw on too.
    #[arg(long)]
    lines: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    burn_cuda_graph::register_random()?; // before the first tensor operation: dropout
    let (device, chosen) = device::open(args.device)?;
    println!("Device: {chosen}");
    println!("Graphs: {}", burn_cuda_graph::support(&device));
    if let Some(cache) = warm_start::cache() {
        eprintln!("Cache:  {cache}");
    }
    let device = device.autodiff();
    device.seed(42);

    let digits = data::digits(42)?;
    let loader = |dataset: InMemDataset<Digit>, shuffle: Option<u64>| {
        let builder = DataLoaderBuilder::new(DigitsBatcher).batch_size(args.batch_size);
        match shuffle {
            Some(seed) => builder.shuffle(seed),
            None => builder,
        }
        .build(dataset)
    };
    let steps = digits.train_len().div_ceil(args.batch_size) * args.epochs;
    let train = loader(model::digits(digits.train_samples()), Some(42));
    let valid = loader(model::digits(digits.validation_samples()), None);

    let schedule = CosineAnnealingLrSchedulerConfig::new(2e-3, steps).init()?;
    let learner = Learner::new(
        NetConfig::new(digits.classes()).init(&device),
        AdamConfig::new().init(),
        schedule,
    );
    let strategy = GraphStrategy::new(device.clone()).with_speed_up_samples(args.samples);
    let mut training = SupervisedTraining::new(&args.directory, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_default_checkpointers()
        .num_epochs(args.epochs);
    training = match args.plain {
        true => training.with_training_strategy(ExecutionStrategy::single(device).into()),
        false => training
            .metric_train_numeric(strategy.replay_rate_metric())
            .metric_train_numeric(strategy.step_time_metric())
            .metric_train_numeric(strategy.speed_up_metric())
            .with_training_strategy(strategy.clone().into()),
    };
    if let Some(epoch) = args.resume {
        training = training.checkpoint(epoch);
    }
    if args.lines || !std::io::stdout().is_terminal() {
        training = training.renderer(Box::new(LineRenderer::tuning(Watching::start(
            "first step",
        ))));
    }

    let started = Instant::now();
    let result = training.launch(learner);
    drop(result.renderer);
    if let Some(error) = result.error {
        return Err(error.to_string().into());
    }
    println!("trained in {:.1} s", started.elapsed().as_secs_f64());
    if args.plain {
        println!("Every step ran eagerly: --plain is Burn's own strategy.");
    }
    if let Some(report) = strategy.report() {
        println!("{report}");
    }
    if let Some(explanation) = strategy.explain() {
        println!("{explanation}");
    }
    Ok(())
}
