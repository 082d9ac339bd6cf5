//! The models that the examples train: ResNet-18 with a CIFAR stem, and a plain multi-layer perceptron.
//!
//! ResNet-18 is the hard case for a graph: hundreds of launches a step, and BatchNorm statistics that change outside the
//! optimizer. The perceptron is the case where launches are nearly all there is.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::prelude::*;
use burn::tensor::activation::relu;

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
}
