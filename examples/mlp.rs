//! The first rung: a training loop of one's own, with `GraphedStep` around its step.
//!
//! A perceptron learns handwritten digits (part of the program) with SGD and momentum. Against the same program in plain
//! Burn:
//!
//! ```diff
//! -use burn::optim::SgdConfig;
//! +use burn_cuda_graph::optim::SgdConfig;
//!
//! -let mut optimizer = SgdConfig::new().with_momentum(momentum).init();
//! +let optimizer = SgdConfig::new().with_momentum(momentum).init();
//! +let training = Training::new(model, optimizer);
//! +let mut step = GraphedStep::new(training, GraphConfig::new(), move |t: &mut Training<Mlp>, (x, y), lr: StepRate| {
//! -    let loss = cross_entropy.forward(model.forward(x), y);
//! +    let loss = cross_entropy.forward(t.model().forward(x), y);
//! -    let grads = GradientsParams::from_grads(loss.backward(), &model);
//! +    let grads = GradientsParams::from_grads(loss.backward(), t.model());
//! -    model = optimizer.step(lr, model, grads);
//! +    t.optimize(lr, grads);
//! +    loss
//! +})?;
//! +let loss = step.run((x, y), lr)?.output;
//! ```
//!
//! ```text
//! cargo run --release --example mlp                        # on the CPU: every step eager, and it says why
//! cargo run --release --example mlp -- --device wgpu       # software graphs
//! cargo run --release --features cuda --example mlp        # CUDA graphs
//! cargo run --release --example mlp -- --device wgpu --mode eager     # nothing recorded: the losses are equal
//! ```

use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::GradientsParams;
use burn::optim::momentum::MomentumConfig;
use burn_cuda_graph::optim::SgdConfig;
use burn_cuda_graph::{GraphedStep, StepRate, Training};
use burn_cuda_graph_suite::data::{self, Batch};
use burn_cuda_graph_suite::example::{self, Example};
use burn_cuda_graph_suite::models::{Mlp, MlpConfig};

fn main() -> example::Result {
    let example = Example::start()?;
    let device = &example.device;
    let data = data::small_digits(example.seed)?;

    let model = MlpConfig::new(vec![64, 128, 128, 10]).init(device);
    let optimizer = SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new()))
        .init();
    let training = Training::new(model, optimizer);
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let step = move |t: &mut Training<Mlp>, (images, labels): Batch, lr: StepRate| {
        let loss = cross_entropy.forward(t.model().forward(images.flatten(1, 3)), labels);
        let grads = GradientsParams::from_grads(loss.backward(), t.model());
        t.optimize(lr, grads);
        loss
    };
    let mut step = GraphedStep::new(training, example.config(), step)?;

    for epoch in 0..10 {
        let mut last = None;
        // The last, smaller batch is left out: it would need a recording of its own.
        for batch in data.train_batches(epoch, 64, true, device) {
            last = Some(step.run(batch, 0.05)?.output);
        }
        // Reading the loss waits for the device, so once an epoch is enough.
        if let Some(loss) = last {
            println!("epoch {epoch}: loss {:.6}", loss.try_into_scalar::<f32>()?);
        }
    }

    let model = step.model().valid();
    let accuracy = example::accuracy(&data, device, |images| model.forward(images.flatten(1, 3)))?;
    println!("validation accuracy {:.1} %", accuracy * 100.0);
    example.report("training step", &step.report(), &step.explain());
    Ok(())
}
