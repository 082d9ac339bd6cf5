//! RMSprop.

use super::state::{Layout, Leaf, OptimizerState};
use super::update::{OptimizerId, Update};
use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};

/// Configuration of [`RmsProp`]. As Burn's [`RmsPropConfig`](burn::optim::RmsPropConfig).
#[derive(Config, Debug)]
pub struct RmsPropConfig {
    /// Decay of the averages.
    #[config(default = 0.99)]
    alpha: f32,
    /// Momentum; none at zero.
    #[config(default = 0.9)]
    momentum: f32,
    /// Added to the denominator.
    #[config(default = 1e-5)]
    epsilon: f32,
    /// Whether the gradient is divided by its standard deviation in place of its root mean square.
    #[config(default = false)]
    centered: bool,
    /// Weight decay, as an L2 penalty on the gradient.
    weight_decay: Option<WeightDecayConfig>,
    /// Gradient clipping, per parameter.
    grad_clipping: Option<GradientClippingConfig>,
}

/// RMSprop with momentum, whose learning rate a replay follows. As Burn's [`RmsProp`](burn::optim::RmsProp), records
/// included.
///
/// [Lecture 6e of Neural Networks for Machine Learning](https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf),
/// centered: [Generating Sequences With Recurrent Neural Networks](https://arxiv.org/abs/1308.0850).
#[derive(Clone, Debug)]
pub struct RmsProp {
    id: OptimizerId,
    alpha: f32,
    momentum: f32,
    epsilon: f32,
    centered: bool,
    weight_decay: Option<f32>,
}

/// What [`RmsProp`]'s state holds.
#[derive(Debug)]
pub struct RmsPropLayout;

const SQUARE_AVG: &str = "square_avg.square_avg";
const GRAD_AVG: &str = "centered.grad_avg";
const AVG: &str = "centered.avg";
const BUF: &str = "momentum.buf";

impl Layout for RmsPropLayout {
    const TIME: Option<&'static str> = None;
    const LEAVES: &'static [Leaf] = &[
        Leaf::required(SQUARE_AVG),
        Leaf::optional(GRAD_AVG),
        Leaf::alias(AVG, SQUARE_AVG),
        Leaf::optional(BUF),
    ];
}

/// State of [`RmsProp`].
pub type RmsPropState<const D: usize> = OptimizerState<D, RmsPropLayout>;

impl RmsPropConfig {
    /// The bare optimizer, for [`ModuleOptimizer::with_group`]. [`init`](Self::init) makes the whole-module one, and is
    /// the one that applies the configured gradient clipping.
    pub fn build(&self) -> RmsProp {
        RmsProp {
            id: OptimizerId::new(),
            alpha: self.alpha,
            momentum: self.momentum,
            epsilon: self.epsilon,
            centered: self.centered,
            weight_decay: self.weight_decay.as_ref().map(|decay| decay.penalty),
        }
    }

    /// The optimizer of a whole module.
    pub fn init(&self) -> ModuleOptimizer {
        super::with_clipping(self.build(), &self.grad_clipping)
    }
}

impl Optimizer for RmsProp {
    type State<const D: usize> = RmsPropState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        super::overhear!(self, self.id, tensor, grad, state);
        let Self {
            alpha, momentum, ..
        } = *self;
        let mut update = Update::begin(self.id, lr, &tensor, state);
        let grad = super::decayed(grad, &tensor, self.weight_decay);
        let square = || grad.clone().square().mul_scalar(1. - alpha);
        let square_avg = update.evolve(SQUARE_AVG, square, |old| {
            old.mul_scalar(alpha).add(square())
        });
        let avg = match self.centered {
            true => {
                let share = || grad.clone().mul_scalar(1. - alpha);
                let grad_avg =
                    update.evolve(GRAD_AVG, share, |old| old.mul_scalar(alpha).add(share()));
                let avg = square_avg.sub(grad_avg.square());
                // No later step needs it, but the record has it.
                update.evolve(AVG, || avg.clone(), |_| avg.clone())
            }
            false => square_avg,
        };
        let grad = grad.div(avg.sqrt().add_scalar(self.epsilon));
        let direction = match momentum > 0. {
            true => update.evolve(
                BUF,
                || grad.clone(),
                |old| old.mul_scalar(momentum).add(grad.clone()),
            ),
            false => grad,
        };
        let delta = update.lr().times(direction);
        update.finish(tensor - delta)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.to_device(device)
    }
}
