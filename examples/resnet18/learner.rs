//! The same training by Burn's `Learner`, with the strategy of burn-cuda-graph.

use std::error::Error;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::{Device, Tensor, TensorData};
use burn_cuda_graph::optim::SgdConfig;
use burn_cuda_graph::{GraphStrategy, Report, Support};
use burn_cuda_graph_suite::data::{Batch, Dataset, SIDE};
use burn_cuda_graph_suite::models::ResNet18;
use burn_cuda_graph_suite::renderer::LineRenderer;
use burn_cuda_graph_suite::warm_start::Watching;
use burn_train::metric::{AccuracyMetric, LossMetric};
use burn_train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};

use crate::options::Settings;

/// ResNet-18, as a `Learner` takes it.
#[derive(Module, Debug)]
pub struct Classifier {
    net: ResNet18,
}

impl Classifier {
    fn classify(&self, (images, targets): Batch) -> ClassificationOutput {
        let output = self.net.forward(images);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), targets.clone());
        ClassificationOutput::new(loss, output, targets)
    }
}

impl TrainStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.classify(batch)
    }
}

/// One image, `[channels * 32 * 32]`, and its label.
type Sample = (Vec<f32>, u8);

#[derive(Clone)]
struct Stack {
    channels: usize,
}

impl Batcher<Sample, Batch> for Stack {
    fn batch(&self, samples: Vec<Sample>, device: &Device) -> Batch {
        let count = samples.len();
        let labels: Vec<i32> = samples.iter().map(|(_, label)| i32::from(*label)).collect();
        let pixels: Vec<f32> = samples.into_iter().flat_map(|(pixels, _)| pixels).collect();
        let shape = [count, self.channels, SIDE, SIDE];
        (
            Tensor::from_data(TensorData::new(pixels, shape), device),
            Tensor::from_data(TensorData::new(labels, [count]), device),
        )
    }
}

/// Trains, and says what the steps came to.
pub fn train(
    net: ResNet18,
    data: &Dataset,
    settings: &Settings,
    device: &Device,
    support: &Support,
) -> Result<(Report, String), Box<dyn Error>> {
    // Whole batches: a smaller last one would need a graph of its own.
    let mut whole = data.train_len() / settings.batch_size;
    if settings.steps > 0 {
        whole = whole.min(settings.steps.div_ceil(settings.epochs));
    }
    let samples = |samples: Vec<(&[f32], u8)>| -> InMemDataset<Sample> {
        let own = |(pixels, label): (&[f32], u8)| (pixels.to_vec(), label);
        InMemDataset::new(samples.into_iter().map(own).collect())
    };
    let loader = || {
        let channels = data.channels();
        DataLoaderBuilder::new(Stack { channels }).batch_size(settings.batch_size)
    };
    let train = data.train_samples().take(whole * settings.batch_size);
    let train = loader()
        .shuffle(settings.seed)
        .build(samples(train.collect()));
    let valid = loader().build(samples(data.validation_samples().collect()));

    let strategy = GraphStrategy::new(device.clone());
    let result = SupervisedTraining::new("target/resnet18", train, valid)
        .num_epochs(settings.epochs)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .metric_train_numeric(strategy.replay_rate_metric())
        .metric_train_numeric(strategy.step_time_metric())
        .with_application_logger(None)
        .renderer(Box::new(LineRenderer::tuning(Watching::start(
            "first step",
        ))))
        .with_training_strategy(strategy.clone().into())
        .launch(Learner::new(
            Classifier { net },
            SgdConfig::new().init(),
            settings.lr,
        ));
    if let Some(error) = result.error {
        return Err(error.to_string().into());
    }
    let (Some(report), Some(explanation)) = (strategy.report(), strategy.explain()) else {
        return Err("no step was taken".into());
    };
    let summary = match report.replayed {
        0 => format!("Every step ran eagerly.\n{explanation}"),
        replayed => {
            let steps = report.steps();
            format!("{replayed} of {steps} steps were replayed; a recorded step is a {support}.")
        }
    };
    Ok((report, summary))
}
