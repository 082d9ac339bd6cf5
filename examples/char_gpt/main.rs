//! A small language model: training and inference as two recordings side by side over one state.
//!
//! A decoder-only transformer with an attention block of its own learns 28 of Shakespeare's sonnets, character by
//! character, with AdamW and dropout; afterwards it writes on. Sampling calls a function that reads the same buffers that
//! training updated. Against the same program in plain Burn, beyond what `mlp` and `dropout_schedule` change:
//!
//! ```diff
//! -    let causal = Tensor::<2, Bool>::tril_mask([WINDOW, WINDOW], 0, &device);     // in forward, at each call
//! +let causal = Tensor::<2, Bool>::tril_mask([WINDOW, WINDOW], 0, &device);         // once, owned by the closures
//!
//! -let logits = model.valid().forward(window, &causal);
//! +let mut logits = GraphedFn::read_only(GraphConfig::new(), move |t: &Training<Gpt>, window: Tensor<2, Int>| {
//! +    t.model().valid().forward(window.inner(), &causal)
//! +});
//! +let logits = logits.call(step.shared(), window)?.output;
//! ```
//!
//! The window always has the same length, padded at its end where the text is shorter, so that there is one recording.
//!
//! ```text
//! cargo run --release --example char_gpt
//! cargo run --release --example char_gpt -- --device wgpu
//! cargo run --release --example char_gpt -- --device wgpu --mode eager     # same loss, same text
//! ```

use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_cuda_graph::optim::AdamWConfig;
use burn_cuda_graph::{GraphedFn, GraphedStep, StepRate, Training};
use burn_cuda_graph_suite::example::{self, Example};
use burn_cuda_graph_suite::models::{Gpt, GptConfig};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const TEXT: &str = include_str!("../data/sonnets.txt");
const BATCH: usize = 8;
/// Characters that the model sees at once.
const WINDOW: usize = 32;

fn main() -> example::Result {
    let example = Example::start()?;
    let device = &example.device;
    let mut alphabet: Vec<char> = TEXT.chars().collect();
    alphabet.sort_unstable();
    alphabet.dedup();
    let code = |c| alphabet.iter().position(|&known| known == c).unwrap_or(0) as i32;
    let text: Vec<i32> = TEXT.chars().map(code).collect();
    let mut random = StdRng::seed_from_u64(example.seed);

    let config = GptConfig::new(alphabet.len(), WINDOW)
        .with_width(64)
        .with_heads(4)
        .with_layers(2);
    let training = Training::new(config.init(device), AdamWConfig::new().init());
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let causal = config.causal_mask(device);
    let mask = causal.clone();
    let step = move |t: &mut Training<Gpt>,
                     (window, next): (Tensor<2, Int>, Tensor<2, Int>),
                     lr: StepRate| {
        let logits = t.model().forward(window, &mask).flatten(0, 1);
        let loss = cross_entropy.forward(logits, next.flatten(0, 1));
        let grads = GradientsParams::from_grads(loss.backward(), t.model());
        t.optimize(lr, grads);
        loss
    };
    let mut step = GraphedStep::new(training, example.config(), step)?;
    let steps = example.steps(1500, 240);
    for count in 1..=steps {
        let starts: [usize; BATCH] =
            [(); BATCH].map(|()| random.random_range(0..text.len() - WINDOW));
        let windows = |shift: usize| {
            let codes = (starts.iter()).flat_map(|start| &text[start + shift..][..WINDOW]);
            let codes = TensorData::new(codes.copied().collect::<Vec<_>>(), [BATCH, WINDOW]);
            Tensor::<2, Int>::from_data(codes, device)
        };
        let loss = step.run((windows(0), windows(1)), 2e-3)?.output;
        if count % (steps / 4) == 0 {
            let loss = loss.try_into_scalar::<f32>()?;
            println!("step {count:>4}: loss {loss:.6}");
        }
    }

    let mut logits = GraphedFn::read_only(
        example.config(),
        move |t: &Training<Gpt>, window: Tensor<2, Int>| {
            (t.model().valid()).forward(window.inner(), &causal.clone().inner())
        },
    );
    let mut written: Vec<i32> = "Shall I ".chars().map(code).collect();
    for _ in 0..160 {
        let mut window = written[written.len().saturating_sub(WINDOW)..].to_vec();
        let last = window.len() - 1;
        window.resize(WINDOW, 0);
        let window = Tensor::from_data(TensorData::new(window, [1, WINDOW]), device);
        let rows = logits.call(step.shared(), window)?.output;
        let rows = rows.try_into_vec_as::<f32>()?;
        let row = &rows[last * alphabet.len()..][..alphabet.len()];
        written.push(draw(row, &mut random) as i32);
    }
    let written: String = written.iter().map(|&c| alphabet[c as usize]).collect();
    println!("\n{written}");
    example.report("training step", &step.report(), &step.explain());
    let explanation = logits.explain(step.shared());
    example.report("inference", &logits.report(), &explanation);
    Ok(())
}

/// Draws from the softmax of `logits` at a temperature of 0.7.
fn draw(logits: &[f32], random: &mut StdRng) -> usize {
    let weights = || logits.iter().map(|logit| f64::from(logit / 0.7).exp());
    let mut left = random.random_range(0.0..1.0) * weights().sum::<f64>();
    let drawn = weights().position(|weight| {
        left -= weight;
        left <= 0.0
    });
    drawn.unwrap_or(0)
}
