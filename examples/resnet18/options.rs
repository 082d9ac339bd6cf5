//! The command line, and the defaults that depend on the device.

use std::path::PathBuf;

use burn_cuda_graph_suite::device::{DeviceChoice, Hardware};
use clap::{Parser, ValueEnum};
use serde::Serialize;

/// Trains ResNet-18 with SGD, each step replayed from a CUDA graph where the device allows it.
#[derive(Debug, Parser)]
pub struct Args {
    /// Where to run.
    #[arg(long, value_enum, default_value_t)]
    pub device: DeviceChoice,
    /// How to run the training steps.
    #[arg(long, value_enum, default_value_t = Mode::Graph)]
    pub mode: Mode,
    /// What to train on.
    #[arg(long, value_enum, default_value_t = DataChoice::Digits)]
    pub data: DataChoice,
    /// Folder of the unpacked binary version of CIFAR-10.
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Images in a step [default: depends on the device].
    #[arg(long, value_name = "N")]
    pub batch_size: Option<usize>,
    /// Channels of the net's first stage; 64 is the usual net [default: depends on the device].
    #[arg(long, value_name = "N")]
    pub width: Option<usize>,
    /// Passes over the training images [default: depends on the device].
    #[arg(long, value_name = "N")]
    pub epochs: Option<usize>,
    /// Stop after this many steps; 0 sets no limit [default: depends on the device].
    #[arg(long, value_name = "N")]
    pub steps: Option<usize>,
    /// Learning rate, constant over the run.
    #[arg(long, default_value_t = 0.1)]
    pub lr: f64,
    /// Seed of the weights, the split and the order of the images.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Keep compiled kernels for the next run of this build, beside the choices that tuning made.
    #[arg(long)]
    pub keep_kernels: bool,
    /// Also write the final report to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Through burn-cuda-graph
    Graph,
    /// Plain Burn
    Eager,
    /// Both, on the same batches
    Compare,
    /// Through Burn's `Learner`, with the graph strategy
    Learner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DataChoice {
    /// Handwritten digits, part of this program
    Digits,
    /// CIFAR-10, from --data-dir
    Cifar10,
}

/// The numbers of a run, with the defaults of its device filled in.
#[derive(Clone, Debug, Serialize)]
pub struct Settings {
    pub width: usize,
    pub batch_size: usize,
    pub epochs: usize,
    /// 0 sets no limit.
    pub steps: usize,
    pub lr: f64,
    pub seed: u64,
}

impl Settings {
    pub fn new(args: &Args, hardware: Hardware) -> Result<Self, String> {
        // The usual net on a graphics card; nets that finish in about two minutes elsewhere.
        let (width, batch_size, epochs, steps) = match hardware {
            Hardware::Gpu => (64, 64, 20, 0),
            Hardware::Cpu => (16, 32, 7, 0),
            Hardware::SoftwareRasteriser => (4, 16, 1, 20),
        };
        let settings = Self {
            width: args.width.unwrap_or(width),
            batch_size: args.batch_size.unwrap_or(batch_size),
            epochs: args.epochs.unwrap_or(epochs),
            steps: args.steps.unwrap_or(steps),
            lr: args.lr,
            seed: args.seed,
        };
        if args.data_dir.is_some() && args.data != DataChoice::Cifar10 {
            return Err("--data-dir goes with --data cifar10".to_string());
        }
        for (flag, value) in [
            ("--width", settings.width),
            ("--batch-size", settings.batch_size),
            ("--epochs", settings.epochs),
        ] {
            if value == 0 {
                return Err(format!("{flag} has to be at least 1"));
            }
        }
        if !(settings.lr.is_finite() && settings.lr > 0.0) {
            return Err(format!(
                "--lr has to be a finite number above 0, found {}",
                settings.lr
            ));
        }
        Ok(settings)
    }
}
