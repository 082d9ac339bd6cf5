//! The model: ordinary Burn code that knows nothing of recordings.

use burn::module::Param;
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig,
    Linear, LinearConfig,
};
use burn::prelude::*;
use burn::tensor::activation::{gelu, softmax};

/// Characters that the model sees at once.
pub const WINDOW: usize = 32;
const WIDTH: usize = 64;
const HEADS: usize = 4;

/// A decoder-only transformer over characters.
#[derive(Module, Debug)]
pub struct Gpt {
    tokens: Embedding,
    positions: Param<Tensor<2>>,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    pub fn new(vocabulary: usize, device: &Device) -> Self {
        let small = Initializer::Normal {
            mean: 0.0,
            std: 0.1,
        };
        Self {
            tokens: (EmbeddingConfig::new(vocabulary, WIDTH).with_initializer(small.clone()))
                .init(device),
            positions: small.init([WINDOW, WIDTH], device),
            blocks: (0..2).map(|_| Block::new(device)).collect(),
            norm: LayerNormConfig::new(WIDTH).init(device),
            head: LinearConfig::new(WIDTH, vocabulary).init(device),
        }
    }

    /// Logits `[batch, window, vocabulary]` of the characters that follow.
    pub fn forward(&self, window: Tensor<2, Int>, causal: &Tensor<2, Bool>) -> Tensor<3> {
        let mut x = self.tokens.forward(window) + self.positions.val().unsqueeze();
        for block in &self.blocks {
            x = block.forward(x, causal);
        }
        self.head.forward(self.norm.forward(x))
    }
}

/// Attention, then two linear layers, each around a shortcut.
#[derive(Module, Debug)]
struct Block {
    norms: [LayerNorm; 2],
    qkv: Linear,
    project: Linear,
    widen: Linear,
    narrow: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            norms: [(); 2].map(|()| LayerNormConfig::new(WIDTH).init(device)),
            qkv: linear(WIDTH, 3 * WIDTH),
            project: linear(WIDTH, WIDTH),
            widen: linear(WIDTH, 4 * WIDTH),
            narrow: linear(4 * WIDTH, WIDTH),
            dropout: DropoutConfig::new(0.1).init(),
        }
    }

    fn forward(&self, x: Tensor<3>, causal: &Tensor<2, Bool>) -> Tensor<3> {
        let x = x.clone() + self.attend(self.norms[0].forward(x), causal);
        let wide = gelu(self.widen.forward(self.norms[1].forward(x.clone())));
        x + self.dropout.forward(self.narrow.forward(wide))
    }

    fn attend(&self, x: Tensor<3>, causal: &Tensor<2, Bool>) -> Tensor<3> {
        let [batch, window, width] = x.dims();
        let qkv = self.qkv.forward(x);
        let [q, k, v] = [0, 1, 2].map(|part| {
            let part = qkv.clone().narrow(2, part * width, width);
            (part.reshape([batch, window, HEADS, width / HEADS])).swap_dims(1, 2)
        });
        let scores = q.matmul(k.swap_dims(2, 3)) / ((width / HEADS) as f64).sqrt();
        let scores = scores.mask_fill(causal.clone().unsqueeze::<4>(), -1e9);
        let mixed = self.dropout.forward(softmax(scores, 3)).matmul(v);
        let mixed = mixed.swap_dims(1, 2).reshape([batch, window, width]);
        self.dropout.forward(self.project.forward(mixed))
    }
}
