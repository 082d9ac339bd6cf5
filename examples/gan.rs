//! Two steps over one state: the discriminator's and the generator's, each with its own optimizer and recording.
//!
//! `GraphedState` holds both nets with their optimizers; two `GraphedFn`s update it in turns, each a recording that reads
//! what the other one left in the buffers they share. Noise is drawn inside the steps, anew at each replay. Against the
//! same program in plain Burn, beyond what `mlp` and `dropout_schedule` change:
//!
//! ```diff
//! +let mut state = GraphedState::new((Training::new(generator, g_optimizer), Training::new(discriminator, d_optimizer)))?;
//!
//! -let loss_d = discriminator_step(&mut d, &mut d_optimizer, &g, real, lr);
//! +let mut discriminate = GraphedFn::new(GraphConfig::new(), |(g, d): &mut Both, real, lr| ..);
//! +let loss_d = discriminate.run(&mut state, real, lr)?.output;
//!
//! -let loss_g = generator_step(&mut g, &mut g_optimizer, &d, lr);
//! +let mut generate = GraphedFn::new(GraphConfig::new(), |(g, d): &mut Both, (), lr| ..);
//! +let loss_g = generate.run(&mut state, (), lr)?.output;
//! ```
//!
//! ```text
//! cargo run --release --example gan
//! cargo run --release --example gan -- --device wgpu
//! cargo run --release --example gan -- --device wgpu --mode eager     # same noise, same losses
//! ```

use burn::module::Module;
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::tensor::activation::softplus;
use burn_cuda_graph::optim::AdamConfig;
use burn_cuda_graph::{GraphedFn, GraphedState, StepRate, Training};
use burn_cuda_graph_suite::data;
use burn_cuda_graph_suite::example::{self, Example};
use burn_cuda_graph_suite::models::{Mlp, MlpConfig};

/// Generator and discriminator.
type Both = (Training<Mlp>, Training<Mlp>);

const BATCH: usize = 64;
const NOISE: usize = 32;
const PIXELS: usize = 64;
const LEARNING_RATE: f64 = 5e-4;

fn noise(rows: usize, device: &Device) -> Tensor<2> {
    Tensor::random([rows, NOISE], Distribution::Normal(0.0, 1.0), device)
}

fn main() -> example::Result {
    let example = Example::start()?;
    let device = &example.device;
    let data = data::small_digits(example.seed)?;

    let generator = MlpConfig::new(vec![NOISE, 128, 128, PIXELS]).init(device);
    let discriminator = MlpConfig::new(vec![PIXELS, 128, 64, 1]).init(device);
    let optimizer = || AdamConfig::new().with_beta_1(0.5).init();
    let mut state: GraphedState<Both> = GraphedState::new((
        Training::new(generator, optimizer()),
        Training::new(discriminator, optimizer()),
    ))?;

    let mut discriminate = GraphedFn::new(
        example.config(),
        |(g, d): &mut Both, real: Tensor<4>, lr: StepRate| {
            let fake = g.model().forward(noise(BATCH, &real.device())).detach();
            let on_real = d.model().forward(real.flatten(1, 3));
            let on_fake = d.model().forward(fake);
            let loss = softplus(-on_real, 1.0).mean() + softplus(on_fake, 1.0).mean();
            let grads = GradientsParams::from_grads(loss.backward(), d.model());
            d.optimize(lr, grads);
            loss
        },
    );
    let home = device.clone();
    let mut generate = GraphedFn::new(
        example.config(),
        move |(g, d): &mut Both, (): (), lr: StepRate| {
            let verdict = d.model().forward(g.model().forward(noise(BATCH, &home)));
            let loss = softplus(-verdict, 1.0).mean();
            let grads = GradientsParams::from_grads(loss.backward(), g.model());
            g.optimize(lr, grads);
            loss
        },
    );

    let epochs = example.steps(100, 50);
    for epoch in 1..=epochs {
        let mut losses = None;
        for (real, _) in data.train_batches(epoch, BATCH, true, device) {
            let loss_d = discriminate.run(&mut state, real, LEARNING_RATE)?.output;
            let loss_g = generate.run(&mut state, (), LEARNING_RATE)?.output;
            losses = Some((loss_d, loss_g));
        }
        if let (Some((d, g)), 0) = (losses, epoch % 10) {
            let (d, g) = (d.try_into_scalar::<f32>()?, g.try_into_scalar::<f32>()?);
            println!("epoch {epoch:>3}: discriminator {d:.6}, generator {g:.6}");
        }
    }

    let (generator, _) = state.state();
    let digits = generator.into_model().valid();
    let pixels = digits.forward(noise(6, &device.clone().inner()));
    print_digits(&pixels.try_into_vec_as::<f32>()?);
    let explanation = discriminate.explain(&state);
    example.report("discriminator", &discriminate.report(), &explanation);
    example.report("generator", &generate.report(), &generate.explain(&state));
    Ok(())
}

/// Images of 8 x 8 normalised pixels beside each other.
fn print_digits(pixels: &[f32]) {
    const SHADES: &[u8] = b"  .:-=+*#%@";
    for row in 0..8 {
        let line = pixels.chunks(PIXELS).map(|image| {
            let shade = |p: &f32| ((p + 1.0) * 3.5).clamp(0.0, 10.0) as usize;
            let pair = |p| [SHADES[shade(p)] as char; 2];
            (image[8 * row..8 * row + 8].iter().flat_map(pair)).collect::<String>()
        });
        println!("{}", line.collect::<Vec<_>>().join("  "));
    }
}
