//! An ordinary `burn_train` model on digits. What this crate needs of it is the `derive` on the batch.

use burn::config::Config;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_cuda_graph::TensorTree;
use burn_cuda_graph_suite::data;
use burn_train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};

/// Configuration of [`Net`].
#[derive(Config, Debug)]
pub struct NetConfig {
    classes: usize,
    #[config(default = 16)]
    channels: usize,
    #[config(default = 0.25)]
    dropout: f64,
}

impl NetConfig {
    /// A net on `device`.
    pub fn init(&self, device: &Device) -> Net {
        let conv = |from, to| {
            let config = Conv2dConfig::new([from, to], [3, 3]).with_stride([2, 2]);
            config.init(device)
        };
        let (first, second) = (self.channels, 2 * self.channels);
        Net {
            conv1: conv(1, first),
            norm1: BatchNormConfig::new(first).init(device),
            conv2: conv(first, second),
            norm2: BatchNormConfig::new(second).init(device),
            pool: AdaptiveAvgPool2dConfig::new([4, 4]).init(),
            dropout: DropoutConfig::new(self.dropout).init(),
            output: LinearConfig::new(second * 16, self.classes).init(device),
        }
    }
}

/// Two convolutions and a linear layer.
#[derive(Module, Debug)]
pub struct Net {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    pool: AdaptiveAvgPool2d,
    dropout: Dropout,
    output: Linear,
}

impl Net {
    /// Images `[n, 1, 32, 32]` to logits `[n, classes]`.
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let x = relu(self.norm1.forward(self.conv1.forward(images)));
        let x = relu(self.norm2.forward(self.conv2.forward(x)));
        let x = self.pool.forward(x).flatten(1, 3);
        self.output.forward(self.dropout.forward(x))
    }

    fn classify(&self, batch: DigitsBatch) -> ClassificationOutput {
        let output = self.forward(batch.images);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.targets.clone());
        ClassificationOutput::new(loss, output, batch.targets)
    }
}

impl TrainStep for Net {
    type Input = DigitsBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitsBatch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = DigitsBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitsBatch) -> ClassificationOutput {
        self.classify(batch)
    }
}

/// Images `[n, 1, 32, 32]` and their labels `[n]`.
#[derive(TensorTree, Clone, Debug)]
pub struct DigitsBatch {
    images: Tensor<4>,
    targets: Tensor<1, Int>,
}

/// One image and its label.
#[derive(Clone, Debug)]
pub struct Digit {
    pixels: Vec<f32>,
    label: u8,
}

/// A part of the digits, as a data set.
pub fn digits<'a>(samples: impl Iterator<Item = (&'a [f32], u8)>) -> InMemDataset<Digit> {
    let digit = |(pixels, label): (&[f32], u8)| Digit {
        pixels: pixels.to_vec(),
        label,
    };
    InMemDataset::new(samples.map(digit).collect())
}

/// Stacks digits.
#[derive(Clone, Debug)]
pub struct DigitsBatcher;

impl Batcher<Digit, DigitsBatch> for DigitsBatcher {
    fn batch(&self, digits: Vec<Digit>, device: &Device) -> DigitsBatch {
        let count = digits.len();
        let targets: Vec<i32> = digits.iter().map(|digit| i32::from(digit.label)).collect();
        let pixels: Vec<f32> = digits.into_iter().flat_map(|digit| digit.pixels).collect();
        let shape = [count, 1, data::SIDE, data::SIDE];
        DigitsBatch {
            images: Tensor::from_data(TensorData::new(pixels, shape), device),
            targets: Tensor::from_data(TensorData::new(targets, [count]), device),
        }
    }
}
