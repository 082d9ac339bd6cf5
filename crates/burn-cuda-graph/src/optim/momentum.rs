//! Burn's momentum, over an [`Update`].

use super::state::Layout;
use super::update::Update;
#[cfg(feature = "cubecl-backend")]
use crate::update_rule::{Constant, VelocityRule};
use burn::optim::momentum::MomentumConfig;
use burn::tensor::Tensor;

/// Paths of the velocity in records.
pub(crate) mod momentum_leaf {
    /// That of SGD and Muon.
    pub const VELOCITY: &str = "momentum.velocity";
}

/// The transformation of a gradient by momentum.
#[derive(Clone, Debug)]
pub(crate) struct Momentum {
    momentum: f32,
    dampening: f64,
    nesterov: bool,
}

impl Momentum {
    pub fn new(config: &MomentumConfig) -> Self {
        Self {
            momentum: config.momentum as f32,
            dampening: config.dampening,
            nesterov: config.nesterov,
        }
    }

    /// The same, as a kernel computes it.
    #[cfg(feature = "cubecl-backend")]
    pub fn rule(&self) -> VelocityRule {
        VelocityRule {
            momentum: Constant::new(self.momentum),
            share: Constant::new((1.0 - self.dampening) as f32),
            nesterov: self.nesterov,
        }
    }

    /// The transformed gradient; the velocity evolves in `update` under `leaf`.
    pub fn transform<const D: usize, L: Layout>(
        &self,
        leaf: &'static str,
        grad: Tensor<D>,
        update: &mut Update<D, L>,
    ) -> Tensor<D> {
        let velocity = update.evolve(
            leaf,
            || grad.clone(),
            |old| {
                grad.clone()
                    .mul_scalar(1.0 - self.dampening)
                    .add(old.mul_scalar(self.momentum))
            },
        );
        match self.nesterov {
            true => velocity.mul_scalar(self.momentum).add(grad),
            false => velocity,
        }
    }
}
