//! What the small examples share: their flags, the device, and the lines that say what ran where.

use std::error::Error;

use burn::prelude::*;
use burn_cuda_graph::{Explanation, GraphConfig, Report};
use clap::{Parser, ValueEnum};

use crate::data::Dataset;
use crate::device::{self, DeviceChoice, Hardware};

/// What `main` of an example returns.
pub type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// How the steps run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Recorded and replayed where the device allows it
    Graph,
    /// The same steps on the same random numbers, none of them recorded: for comparing losses and times
    Eager,
}

#[derive(Debug, Parser)]
struct Args {
    /// Where to run.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceChoice,
    /// How to run the steps.
    #[arg(long, value_enum, default_value_t = Mode::Graph)]
    mode: Mode,
    /// Seed of the weights, the order of the data and the random numbers of the steps.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// An example that runs.
#[derive(Debug)]
pub struct Example {
    /// The device, with autodiff, seeded.
    pub device: Device,
    /// `--seed`.
    pub seed: u64,
    mode: Mode,
}

impl Example {
    /// Reads the command line, opens the device and prints which one it is.
    ///
    /// Random numbers of graphed steps replay: [`burn_cuda_graph::register_random`] is called before the device is opened,
    /// as [`burn_cuda_graph::device`] and [`burn_cuda_graph::wgpu_device`] do.
    ///
    /// # Errors
    /// When the device does not open, or a tensor operation ran before.
    pub fn start() -> Result<Self> {
        env_logger::init();
        let args = Args::parse();
        burn_cuda_graph::register_random()?;
        let (device, chosen) = device::open(args.device)?;
        println!("Device: {chosen}");
        println!("Graphs: {}", burn_cuda_graph::support(&device));
        let device = device.autodiff();
        device.seed(args.seed);
        Ok(Self {
            device,
            seed: args.seed,
            mode: args.mode,
        })
    }

    /// The defaults; with `--mode eager` a warm-up that does not end.
    pub fn config(&self) -> GraphConfig {
        match self.mode {
            Mode::Graph => GraphConfig::new(),
            Mode::Eager => GraphConfig::new().with_warmup(u32::MAX),
        }
    }

    /// `count`, or `on_a_rasteriser` where a software rasteriser does the arithmetic, on which a step takes many times
    /// longer.
    pub fn steps(&self, count: usize, on_a_rasteriser: usize) -> usize {
        match device::hardware(&self.device) {
            Hardware::SoftwareRasteriser => on_a_rasteriser,
            _ => count,
        }
    }

    /// Prints how the steps of `name` ran: the counts, then for each shape key why it is a graph or is not.
    pub fn report(&self, name: &str, report: &Report, explanation: &Explanation) {
        println!("\n{name}\n{report}");
        match self.mode {
            Mode::Graph => println!("{explanation}"),
            Mode::Eager => println!("None was recorded: --mode eager."),
        }
    }
}

/// The share of validation images that `logits`, given `[n, channels, side, side]`, classifies correctly.
///
/// # Errors
/// When the device fails.
pub fn accuracy(
    data: &Dataset,
    device: &Device,
    logits: impl Fn(Tensor<4>) -> Tensor<2>,
) -> Result<f64> {
    let mut correct = 0;
    for (images, labels) in data.validation_batches(128, &device.clone().inner()) {
        let predicted = logits(images).argmax(1).flatten::<1>(0, 1);
        correct += (predicted.equal(labels).int().sum()).try_into_scalar::<i64>()?;
    }
    Ok(correct as f64 / data.validation_len() as f64)
}
