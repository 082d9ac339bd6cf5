//! Lion.

use super::state::{Layout, Leaf, OptimizerState};
use super::update::{OptimizerId, Update};
use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};

/// Configuration of [`Lion`]. As Burn's [`LionConfig`](burn::optim::LionConfig).
#[derive(Config, Debug)]
pub struct LionConfig {
    /// Share of the momentum in the direction of the update.
    #[config(default = 0.9)]
    beta_1: f32,
    /// Decay of the momentum.
    #[config(default = 0.99)]
    beta_2: f32,
    /// Decoupled weight decay: a step multiplies parameters by one minus this times the learning rate.
    #[config(default = 0.0)]
    weight_decay: f32,
    /// Gradient clipping, per parameter.
    grad_clipping: Option<GradientClippingConfig>,
}

/// Lion (evolved sign momentum), whose learning rate a replay follows. As Burn's [`Lion`](burn::optim::Lion), records
/// included.
///
/// [Symbolic Discovery of Optimization Algorithms](https://arxiv.org/abs/2302.06675).
#[derive(Clone, Debug)]
pub struct Lion {
    id: OptimizerId,
    beta_1: f32,
    beta_2: f32,
    weight_decay: f32,
}

/// What [`Lion`]'s state holds.
#[derive(Debug)]
pub struct LionLayout;

const MOMENTUM: &str = "momentum";

impl Layout for LionLayout {
    const TIME: Option<&'static str> = None;
    const LEAVES: &'static [Leaf] = &[Leaf::required(MOMENTUM)];
}

/// State of [`Lion`].
pub type LionState<const D: usize> = OptimizerState<D, LionLayout>;

impl LionConfig {
    /// The bare optimizer, for [`ModuleOptimizer::with_group`]. [`init`](Self::init) makes the whole-module one, and is
    /// the one that applies the configured gradient clipping.
    pub fn build(&self) -> Lion {
        Lion {
            id: OptimizerId::new(),
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            weight_decay: self.weight_decay,
        }
    }

    /// The optimizer of a whole module.
    pub fn init(&self) -> ModuleOptimizer {
        super::with_clipping(self.build(), &self.grad_clipping)
    }
}

impl Optimizer for Lion {
    type State<const D: usize> = LionState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        super::overhear!(self, self.id, tensor, grad, state);
        let Self { beta_1, beta_2, .. } = *self;
        let mut update = Update::begin(self.id, lr, &tensor, state);
        let share = |beta: f32| grad.clone().mul_scalar(1.0 - beta);
        let direction = update.read(
            MOMENTUM,
            || share(beta_1).sign(),
            |old| old.mul_scalar(beta_1).add(share(beta_1)).sign(),
        );
        update.evolve(
            MOMENTUM,
            || share(beta_2),
            |old| old.mul_scalar(beta_2).add(share(beta_2)),
        );
        let decayed = match self.weight_decay == 0.0 {
            true => tensor,
            false => super::shrunk(&update, tensor, self.weight_decay),
        };
        let delta = update.lr().times(direction);
        update.finish(decayed - delta)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.to_device(device)
    }
}
