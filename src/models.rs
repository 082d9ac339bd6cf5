//! The models that examples and benchmarks train: ResNet-18 with a CIFAR stem, a decoder-only transformer, an LSTM, and a
//! plain multi-layer perceptron.
//!
//! ResNet-18 is the hard case for a CUDA graph: hundreds of launches a step, and BatchNorm statistics that change outside
//! the optimizer. The transformer draws random numbers for its dropout. The LSTM launches small kernels for each step in
//! time. The perceptron is the case where launches are nearly all there is.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer,
    LayerNorm, LayerNormConfig, Linear, LinearConfig, Lstm, LstmConfig, PaddingConfig2d,
};
use burn::prelude::*;
use burn::tensor::activation::{gelu, relu, softmax};

/// Configuration of a [`ResNet18`].
#[derive(Config, Debug)]
pub struct ResNet18Config {
    /// Channels of the stem and the first stage; the four stages have `w`, `2w`, `4w` and `8w`. The paper's net has 64.
    #[config(default = 64)]
    pub width: usize,
    /// Classes, the length of one row of logits.
    #[config(default = 10)]
    pub classes: usize,
    /// Channels of the input images.
    #[config(default = 3)]
    pub channels: usize,
}

impl ResNet18Config {
    /// A model with random weights on `device`, float32.
    ///
    /// Put it on an autodiff device to train it. Weights are drawn when they are first used, so seed the device before
    /// and keep the order of operations to get the same weights again.
    pub fn init(&self, device: &Device) -> ResNet18 {
        let width = self.width;
        let mut blocks = Vec::with_capacity(8);
        let mut channels = width;
        for (out, stride) in [(width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)] {
            blocks.push(ResidualBlock::new(channels, out, stride, device));
            blocks.push(ResidualBlock::new(out, out, 1, device));
            channels = out;
        }
        ResNet18 {
            stem: ConvNorm::new(self.channels, width, 3, 1, device),
            blocks,
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            head: LinearConfig::new(channels, self.classes).init(device),
        }
    }
}

/// ResNet-18 for small images: a 3x3 stem without pooling, eight residual blocks, average pooling, one linear layer.
#[derive(Module, Debug)]
pub struct ResNet18 {
    stem: ConvNorm,
    blocks: Vec<ResidualBlock>,
    pool: AdaptiveAvgPool2d,
    head: Linear,
}

impl ResNet18 {
    /// Logits of a batch of images.
    ///
    /// Shapes: images `[batch, channels, height, width]`, float32; logits
    /// `[batch, classes]`, float32. On an autodiff device BatchNorm uses the statistics of the batch and updates its
    /// running ones; on a plain device it uses the running ones.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let mut x = relu(self.stem.forward(images));
        for block in &self.blocks {
            x = block.forward(x);
        }
        self.head.forward(self.pool.forward(x).flatten::<2>(1, 3))
    }
}

/// Two 3x3 convolutions around a shortcut, which is a 1x1 convolution where the shape changes.
#[derive(Module, Debug)]
struct ResidualBlock {
    first: ConvNorm,
    second: ConvNorm,
    shortcut: Option<ConvNorm>,
}

impl ResidualBlock {
    fn new(channels_in: usize, channels_out: usize, stride: usize, device: &Device) -> Self {
        let changes_shape = stride != 1 || channels_in != channels_out;
        Self {
            first: ConvNorm::new(channels_in, channels_out, 3, stride, device),
            second: ConvNorm::new(channels_out, channels_out, 3, 1, device),
            shortcut: changes_shape
                .then(|| ConvNorm::new(channels_in, channels_out, 1, stride, device)),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = relu(self.first.forward(x.clone()));
        let y = self.second.forward(y);
        let x = match &self.shortcut {
            Some(shortcut) => shortcut.forward(x),
            None => x,
        };
        relu(y + x)
    }
}

/// A square convolution without bias, then BatchNorm.
#[derive(Module, Debug)]
struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
}

impl ConvNorm {
    fn new(
        channels_in: usize,
        channels_out: usize,
        kernel: usize,
        stride: usize,
        device: &Device,
    ) -> Self {
        let pad = kernel / 2;
        Self {
            conv: Conv2dConfig::new([channels_in, channels_out], [kernel, kernel])
                .with_stride([stride, stride])
                .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
                .with_bias(false)
                .init(device),
            norm: BatchNormConfig::new(channels_out).init(device),
        }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.norm.forward(self.conv.forward(x))
    }
}

/// Configuration of an [`Mlp`].
#[derive(Config, Debug)]
pub struct MlpConfig {
    /// Features of the input, of each hidden layer and of the output, e.g. `[784, 256, 256, 256, 10]`; at least two.
    pub sizes: Vec<usize>,
}

impl MlpConfig {
    /// A model with random weights on `device`, float32.
    pub fn init(&self, device: &Device) -> Mlp {
        Mlp {
            layers: self
                .sizes
                .windows(2)
                .map(|pair| LinearConfig::new(pair[0], pair[1]).init(device))
                .collect(),
        }
    }
}

/// Linear layers with ReLU between them.
#[derive(Module, Debug)]
pub struct Mlp {
    layers: Vec<Linear>,
}

impl Mlp {
    /// The output of the last layer, without an activation.
    ///
    /// Shapes: input `[batch, first size]`, output `[batch, last size]`, both float32.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let mut x = x;
        for (index, layer) in self.layers.iter().enumerate() {
            if index > 0 {
                x = relu(x);
            }
            x = layer.forward(x);
        }
        x
    }
}

/// Configuration of a [`Gpt`].
#[derive(Config, Debug)]
pub struct GptConfig {
    /// Tokens that there are, the length of one row of logits.
    pub vocabulary: usize,
    /// Tokens that the model sees at once.
    pub window: usize,
    /// Features of a token; a multiple of `heads`. The two linear layers of a block have four times as many between them.
    #[config(default = 256)]
    pub width: usize,
    /// Attention heads of a block.
    #[config(default = 8)]
    pub heads: usize,
    /// Blocks.
    #[config(default = 6)]
    pub layers: usize,
    /// Probability of dropping an attention weight, an output of the attention, or one of the two linear layers.
    #[config(default = 0.1)]
    pub dropout: f64,
}

impl GptConfig {
    /// A model with random weights on `device`, float32: embeddings of standard deviation 0.1, else Burn's defaults.
    ///
    /// Put it on an autodiff device to train it, as [`ResNet18Config::init`] says.
    pub fn init(&self, device: &Device) -> Gpt {
        let small = Initializer::Normal {
            mean: 0.0,
            std: 0.1,
        };
        Gpt {
            tokens: EmbeddingConfig::new(self.vocabulary, self.width)
                .with_initializer(small.clone())
                .init(device),
            positions: small.init([self.window, self.width], device),
            blocks: (0..self.layers).map(|_| Block::new(self, device)).collect(),
            norm: LayerNormConfig::new(self.width).init(device),
            head: LinearConfig::new(self.width, self.vocabulary).init(device),
        }
    }

    /// The mask that hides what follows a token: `[window, window]`, true where it hides.
    ///
    /// Make it once, outside the step: it is a constant, and each step would spend kernels on making it anew.
    pub fn causal_mask(&self, device: &Device) -> Tensor<2, Bool> {
        Tensor::tril_mask([self.window, self.window], 0, device)
    }
}

/// A decoder-only transformer, normalised before each block's two parts.
#[derive(Module, Debug)]
pub struct Gpt {
    tokens: Embedding,
    positions: Param<Tensor<2>>,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    /// Logits of the tokens that follow.
    ///
    /// Shapes: tokens `[batch, length]`, int, of a length up to the window; `causal` `[window, window]`, of
    /// [`GptConfig::causal_mask`]; logits `[batch, length, vocabulary]`, float32. On an autodiff device it drops.
    pub fn forward(&self, tokens: Tensor<2, Int>, causal: &Tensor<2, Bool>) -> Tensor<3> {
        let [_, length] = tokens.dims();
        let [window, _] = causal.dims();
        let (mut positions, mut causal) = (self.positions.val(), causal.clone());
        if length < window {
            positions = positions.narrow(0, 0, length);
            causal = causal.narrow(0, 0, length).narrow(1, 0, length);
        }
        let mut x = self.tokens.forward(tokens) + positions.unsqueeze();
        for block in &self.blocks {
            x = block.forward(x, &causal);
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
    heads: usize,
}

impl Block {
    fn new(config: &GptConfig, device: &Device) -> Self {
        let width = config.width;
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            norms: [(); 2].map(|()| LayerNormConfig::new(width).init(device)),
            qkv: linear(width, 3 * width),
            project: linear(width, width),
            widen: linear(width, 4 * width),
            narrow: linear(4 * width, width),
            dropout: DropoutConfig::new(config.dropout).init(),
            heads: config.heads,
        }
    }

    fn forward(&self, x: Tensor<3>, causal: &Tensor<2, Bool>) -> Tensor<3> {
        let x = x.clone() + self.attend(self.norms[0].forward(x), causal);
        let wide = gelu(self.widen.forward(self.norms[1].forward(x.clone())));
        x + self.dropout.forward(self.narrow.forward(wide))
    }

    fn attend(&self, x: Tensor<3>, causal: &Tensor<2, Bool>) -> Tensor<3> {
        let [batch, window, width] = x.dims();
        let head = width / self.heads;
        let qkv = self.qkv.forward(x);
        let [q, k, v] = [0, 1, 2].map(|part| {
            let part = qkv.clone().narrow(2, part * width, width);
            (part.reshape([batch, window, self.heads, head])).swap_dims(1, 2)
        });
        let scores = q.matmul(k.swap_dims(2, 3)) / (head as f64).sqrt();
        let scores = scores.mask_fill(causal.clone().unsqueeze::<4>(), -1e9);
        let mixed = self.dropout.forward(softmax(scores, 3)).matmul(v);
        let mixed = mixed.swap_dims(1, 2).reshape([batch, window, width]);
        self.dropout.forward(self.project.forward(mixed))
    }
}

/// Configuration of an [`LstmClassifier`].
#[derive(Config, Debug)]
pub struct LstmClassifierConfig {
    /// Features of the input at each step in time.
    #[config(default = 64)]
    pub features: usize,
    /// Size of the hidden state of each layer.
    #[config(default = 128)]
    pub hidden: usize,
    /// LSTM layers, at least one.
    #[config(default = 2)]
    pub layers: usize,
    /// Classes, the length of one row of logits.
    #[config(default = 10)]
    pub classes: usize,
}

impl LstmClassifierConfig {
    /// A model with random weights on `device`, float32.
    pub fn init(&self, device: &Device) -> LstmClassifier {
        let layer = |from| LstmConfig::new(from, self.hidden, true).init(device);
        LstmClassifier {
            layers: (0..self.layers)
                .map(|index| {
                    layer(if index == 0 {
                        self.features
                    } else {
                        self.hidden
                    })
                })
                .collect(),
            head: LinearConfig::new(self.hidden, self.classes).init(device),
        }
    }
}

/// LSTM layers of Burn, and a linear layer on the last output.
#[derive(Module, Debug)]
pub struct LstmClassifier {
    layers: Vec<Lstm>,
    head: Linear,
}

impl LstmClassifier {
    /// Logits of a batch of sequences.
    ///
    /// Shapes: sequences `[batch, time, features]`, logits `[batch, classes]`, both float32.
    pub fn forward(&self, sequences: Tensor<3>) -> Tensor<2> {
        let [batch, time, _] = sequences.dims();
        let mut x = sequences;
        for layer in &self.layers {
            (x, _) = layer.forward(x, None);
        }
        let [_, _, hidden] = x.dims();
        self.head
            .forward(x.narrow(1, time - 1, 1).reshape([batch, hidden]))
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn resnet18_scales_with_its_width() {
        let device = Device::flex();
        let model = ResNet18Config::new()
            .with_width(4)
            .with_classes(7)
            .with_channels(1)
            .init(&device);
        let logits = model.forward(Tensor::zeros([2, 1, 32, 32], &device));
        assert_eq!(logits.dims(), [2, 7]);
    }

    /// 11,173,962 trainable parameters is the known size of this net on CIFAR-10. BatchNorm's running statistics, which
    /// Burn's count includes, are two more values for each of its 4,800 channels.
    #[test]
    fn the_full_width_resnet18_has_the_known_number_of_parameters() {
        let model = ResNet18Config::new().init(&Device::flex());
        assert_eq!(model.num_params(), 11_173_962 + 2 * 4_800);
    }

    #[test]
    fn mlp_maps_first_to_last_size() {
        let device = Device::flex();
        let model = MlpConfig::new(vec![6, 5, 4, 3]).init(&device);
        assert_eq!(model.forward(Tensor::zeros([2, 6], &device)).dims(), [2, 3]);
    }

    /// A mask of the wrong side would let a token see what it is to predict, and the loss would fall to nothing.
    #[test]
    fn gpt_sees_no_token_that_follows() {
        let device = Device::flex();
        let config = GptConfig::new(11, 4)
            .with_width(8)
            .with_heads(2)
            .with_layers(2);
        let model = config.init(&device);
        let mask = config.causal_mask(&device);
        let logits = |tokens: [[i32; 4]; 1]| {
            let tokens = Tensor::<2, Int>::from_data(tokens, &device);
            let logits = model.forward(tokens, &mask);
            assert_eq!(logits.dims(), [1, 4, 11]);
            logits
                .narrow(1, 0, 3)
                .into_data()
                .try_into_vec::<f32>()
                .unwrap()
        };
        assert_eq!(logits([[1, 2, 3, 4]]), logits([[1, 2, 3, 9]]));
        assert_ne!(logits([[1, 2, 3, 4]]), logits([[5, 2, 3, 4]]));
    }

    /// Embeddings, 12 d^2 + 13 d for each block, the last norm and the head.
    #[test]
    fn gpt_has_the_known_number_of_parameters() {
        let d = 256;
        let blocks = 6 * (12 * d * d + 13 * d);
        let model = GptConfig::new(512, 128).init(&Device::flex());
        let rest = 512 * d + 128 * d + 2 * d + (d * 512 + 512);
        assert_eq!(model.num_params(), blocks + rest);
    }

    #[test]
    fn lstm_reads_the_last_output() {
        let device = Device::flex();
        let model = LstmClassifierConfig::new()
            .with_features(3)
            .with_hidden(5)
            .with_classes(4)
            .init(&device);
        let x = Tensor::<3>::random([2, 6, 3], burn::tensor::Distribution::Default, &device);
        let last_changed = x
            .clone()
            .slice_assign([0..2, 5..6, 0..3], Tensor::ones([2, 1, 3], &device));
        let logits = |x| {
            let logits = model.forward(x);
            assert_eq!(logits.dims(), [2, 4]);
            logits.into_data().try_into_vec::<f32>().unwrap()
        };
        assert_ne!(logits(x), logits(last_changed));
    }
}
