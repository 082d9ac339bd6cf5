//! Stochastic gradient descent.

use super::momentum::{Momentum, momentum_leaf};
use super::state::{Layout, Leaf, OptimizerState};
use super::update::{OptimizerId, Update};
#[cfg(feature = "cubecl-backend")]
use crate::update_rule::Method;
use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};

/// Configuration of [`Sgd`]. As Burn's [`SgdConfig`](burn::optim::SgdConfig).
#[derive(Config, Debug)]
pub struct SgdConfig {
    /// Weight decay, as an L2 penalty on the gradient.
    weight_decay: Option<WeightDecayConfig>,
    /// Momentum.
    momentum: Option<MomentumConfig>,
    /// Gradient clipping, per parameter.
    gradient_clipping: Option<GradientClippingConfig>,
}

/// Stochastic gradient descent with momentum, whose learning rate a replay follows. As Burn's
/// [`Sgd`](burn::optim::Sgd), records included.
#[derive(Clone, Debug)]
pub struct Sgd {
    id: OptimizerId,
    weight_decay: Option<f32>,
    momentum: Option<Momentum>,
}

/// What [`Sgd`]'s state holds.
#[derive(Debug)]
pub struct SgdLayout;

impl Layout for SgdLayout {
    const TIME: Option<&'static str> = None;
    const LEAVES: &'static [Leaf] = &[Leaf::optional("momentum.velocity")];
}

/// State of [`Sgd`].
pub type SgdState<const D: usize> = OptimizerState<D, SgdLayout>;

impl SgdConfig {
    /// The bare optimizer, for [`ModuleOptimizer::with_group`]. [`init`](Self::init) makes the whole-module one, and is
    /// the one that applies the configured gradient clipping.
    pub fn build(&self) -> Sgd {
        Sgd {
            id: OptimizerId::new(),
            weight_decay: self.weight_decay.as_ref().map(|decay| decay.penalty),
            momentum: self.momentum.as_ref().map(Momentum::new),
        }
    }

    /// The optimizer of a whole module.
    pub fn init(&self) -> ModuleOptimizer {
        super::with_clipping(self.build(), &self.gradient_clipping)
    }
}

impl Optimizer for Sgd {
    type State<const D: usize> = SgdState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        super::overhear!(self, self.id, tensor, grad, state);
        let mut update = Update::begin(self.id, lr, &tensor, state);
        let rate = update.lr();
        super::put_off!(
            update,
            Method::Sgd {
                velocity: self.momentum.as_ref().map(Momentum::rule)
            },
            self.weight_decay,
            tensor,
            grad,
            &[&rate],
            match self.momentum {
                Some(_) => &[momentum_leaf::VELOCITY],
                None => &[],
            }
        );
        let mut grad = super::decayed(grad, &tensor, self.weight_decay);
        if let Some(momentum) = &self.momentum {
            grad = momentum.transform(momentum_leaf::VELOCITY, grad, &mut update);
        }
        let delta = rate.times(grad);
        update.finish(tensor - delta)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.to_device(device)
    }
}
