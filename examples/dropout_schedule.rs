//! The second rung: AdamW, a learning rate that moves at every step, and dropout.
//!
//! One recording serves every rate, and each replay draws a new dropout mask. The rate is Burn's own cosine schedule; its
//! answer goes into `run`, and from the closure's argument on to the optimizer. Against the same program in plain Burn,
//! beyond what `mlp` changes:
//!
//! ```diff
//! -use burn::optim::AdamWConfig;
//! +use burn_cuda_graph::optim::AdamWConfig;
//!
//! -let device = Device::cuda(0).autodiff();
//! +let device = burn_cuda_graph::device(0)?.autodiff();    // or wgpu_device(kind): random numbers that replay
//!
//!  let mut schedule = CosineAnnealingLrSchedulerConfig::new(3e-3, steps).init()?;
//!  let lr = schedule.step();
//! -model = optimizer.step(lr, model, grads);
//! +let loss = step.run(batch, lr)?.output;
//! ```
//!
//! Here `Example::start` opens the device that `--device` names, after `burn_cuda_graph::register_random()`: the two
//! calls that `burn_cuda_graph::device` makes.
//!
//! ```text
//! cargo run --release --example dropout_schedule -- --device wgpu
//! cargo run --release --example dropout_schedule -- --device wgpu --mode eager     # same masks, same losses
//! ```

use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn_cuda_graph::optim::AdamWConfig;
use burn_cuda_graph::{GraphedStep, StepRate, Training};
use burn_cuda_graph_suite::data::{self, Batch};
use burn_cuda_graph_suite::example::{self, Example};

#[derive(Module, Debug)]
struct Net {
    hidden: Linear,
    dropout: Dropout,
    output: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(64, 256).init(device),
            dropout: DropoutConfig::new(0.4).init(),
            output: LinearConfig::new(256, 10).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let hidden = relu(self.hidden.forward(images.flatten(1, 3)));
        self.output.forward(self.dropout.forward(hidden))
    }
}

fn main() -> example::Result {
    const EPOCHS: usize = 15;
    const BATCH: usize = 64;
    let example = Example::start()?;
    let device = &example.device;
    let data = data::small_digits(example.seed)?;

    let training = Training::new(Net::new(device), AdamWConfig::new().init());
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let step = move |t: &mut Training<Net>, (images, labels): Batch, lr: StepRate| {
        let loss = cross_entropy.forward(t.model().forward(images), labels);
        let grads = GradientsParams::from_grads(loss.backward(), t.model());
        t.optimize(lr, grads);
        loss
    };
    let mut step = GraphedStep::new(training, example.config(), step)?;

    let steps = EPOCHS * (data.train_len() / BATCH);
    let mut schedule = CosineAnnealingLrSchedulerConfig::new(3e-3, steps).init()?;
    for epoch in 0..EPOCHS {
        let (mut last, mut rate) = (None, 0.0);
        for batch in data.train_batches(epoch, BATCH, true, device) {
            let lr = schedule.step();
            rate = lr.base();
            last = Some(step.run(batch, lr)?.output);
        }
        if let Some(loss) = last {
            let loss = loss.try_into_scalar::<f32>()?;
            println!("epoch {epoch:>2}: rate {rate:.6}, loss {loss:.6}");
        }
    }

    let model = step.model().valid();
    let accuracy = example::accuracy(&data, device, |images| model.forward(images))?;
    println!("validation accuracy {:.1} %", accuracy * 100.0);
    example.report("training step", &step.report(), &step.explain());
    Ok(())
}
