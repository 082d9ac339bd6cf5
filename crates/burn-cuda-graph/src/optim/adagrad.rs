//! AdaGrad.

use super::state::{Layout, Leaf, OptimizerState};
use super::update::{OptimizerId, Update};
use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};

/// Configuration of [`AdaGrad`]. As Burn's [`AdaGradConfig`](burn::optim::AdaGradConfig).
#[derive(Config, Debug)]
pub struct AdaGradConfig {
    /// Decay of the learning rate: in step `t` it is divided by `1 + (t - 1) * lr_decay`.
    #[config(default = 0.)]
    lr_decay: f64,
    /// Added to the denominator.
    #[config(default = 1e-5)]
    epsilon: f32,
    /// Weight decay, as an L2 penalty on the gradient.
    weight_decay: Option<WeightDecayConfig>,
    /// Gradient clipping, per parameter.
    grad_clipping: Option<GradientClippingConfig>,
}

/// AdaGrad, whose learning rate and step count a replay follows. As Burn's [`AdaGrad`](burn::optim::AdaGrad), records
/// included.
///
/// [Adaptive Subgradient Methods for Online Learning and Stochastic Optimization](https://jmlr.org/papers/v12/duchi11a.html).
#[derive(Clone, Debug)]
pub struct AdaGrad {
    id: OptimizerId,
    lr_decay: f64,
    epsilon: f32,
    weight_decay: Option<f32>,
}

/// What [`AdaGrad`]'s state holds.
#[derive(Debug)]
pub struct AdaGradLayout;

impl Layout for AdaGradLayout {
    const TIME: Option<&'static str> = Some("lr_decay.time");
    const LEAVES: &'static [Leaf] = &[Leaf::required("lr_decay.sum")];
}

/// State of [`AdaGrad`].
pub type AdaGradState<const D: usize> = OptimizerState<D, AdaGradLayout>;

impl AdaGradConfig {
    /// The bare optimizer, for [`ModuleOptimizer::with_group`]. [`init`](Self::init) makes the whole-module one, and is
    /// the one that applies the configured gradient clipping.
    pub fn build(&self) -> AdaGrad {
        AdaGrad {
            id: OptimizerId::new(),
            lr_decay: self.lr_decay,
            epsilon: self.epsilon,
            weight_decay: self.weight_decay.as_ref().map(|decay| decay.penalty),
        }
    }

    /// The optimizer of a whole module.
    pub fn init(&self) -> ModuleOptimizer {
        super::with_clipping(self.build(), &self.grad_clipping)
    }
}

impl Optimizer for AdaGrad {
    type State<const D: usize> = AdaGradState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        super::overhear!(self, self.id, tensor, grad, state);
        let lr_decay = self.lr_decay;
        let mut update = Update::begin(self.id, lr, &tensor, state);
        let grad = super::decayed(grad, &tensor, self.weight_decay);
        let square = || grad.clone().square();
        let sum = update.evolve("lr_decay.sum", square, |old| old.add(square()));
        let direction = grad.div(sum.sqrt().add_scalar(self.epsilon));
        let rate = match lr_decay == 0. {
            // Divided by one in every step.
            true => update.lr(),
            false => update.timed(
                "decayed_lr",
                move |lr, steps| lr / (1. + (steps as f64 - 1.) * lr_decay),
                |time| time.rate() / ((time.steps() - 1.) * lr_decay + 1.),
            ),
        };
        let delta = rate.times(direction);
        update.finish(tensor - delta)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.to_device(device)
    }
}
