//! Adam.

use super::state::{Layout, Leaf, OptimizerState};
use super::update::{OptimizerId, Update};
#[cfg(feature = "cubecl-backend")]
use crate::update_rule::{Method, MomentsRule};
use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};

/// Configuration of [`Adam`]. As Burn's [`AdamConfig`](burn::optim::AdamConfig).
#[derive(Config, Debug)]
pub struct AdamConfig {
    /// Decay of the first moment.
    #[config(default = 0.9)]
    beta_1: f32,
    /// Decay of the second moment.
    #[config(default = 0.999)]
    beta_2: f32,
    /// Added to the denominator.
    #[config(default = 1e-5)]
    epsilon: f32,
    /// Whether the denominator is the largest second moment so far (AMSGrad).
    #[config(default = false)]
    amsgrad: bool,
    /// Weight decay, as an L2 penalty on the gradient.
    weight_decay: Option<WeightDecayConfig>,
    /// Gradient clipping, per parameter.
    grad_clipping: Option<GradientClippingConfig>,
}

/// Adam, whose learning rate and step count a replay follows. As Burn's [`Adam`](burn::optim::Adam), records included.
///
/// [Adam: A Method for Stochastic Optimization](https://arxiv.org/abs/1412.6980),
/// [On the Convergence of Adam and Beyond](https://openreview.net/forum?id=ryQu7f-RZ).
#[derive(Clone, Debug)]
pub struct Adam {
    id: OptimizerId,
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    amsgrad: bool,
    weight_decay: Option<f32>,
}

/// What the state of [`Adam`] and [`AdamW`](super::AdamW) holds.
#[derive(Debug)]
pub struct AdamLayout;

pub(super) const MOMENT_1: &str = "momentum.moment_1";
pub(super) const MOMENT_2: &str = "momentum.moment_2";

impl Layout for AdamLayout {
    const TIME: Option<&'static str> = Some("momentum.time");
    const LEAVES: &'static [Leaf] = &[
        Leaf::required(MOMENT_1),
        Leaf::required(MOMENT_2),
        Leaf::optional("momentum.max_moment_2"),
    ];
}

/// State of [`Adam`].
pub type AdamState<const D: usize> = OptimizerState<D, AdamLayout>;

impl AdamConfig {
    /// The bare optimizer, for [`ModuleOptimizer::with_group`]. [`init`](Self::init) makes the whole-module one, and is
    /// the one that applies the configured gradient clipping.
    pub fn build(&self) -> Adam {
        Adam {
            id: OptimizerId::new(),
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
            amsgrad: self.amsgrad,
            weight_decay: self.weight_decay.as_ref().map(|decay| decay.penalty),
        }
    }

    /// The optimizer of a whole module.
    pub fn init(&self) -> ModuleOptimizer {
        super::with_clipping(self.build(), &self.grad_clipping)
    }
}

/// First moment and the second moment to divide by, of Adam and AdamW.
pub(super) fn moments<const D: usize>(
    update: &mut Update<D, AdamLayout>,
    grad: Tensor<D>,
    beta_1: f32,
    beta_2: f32,
    amsgrad: bool,
) -> (Tensor<D>, Tensor<D>) {
    let (factor_1, factor_2) = (1.0 - beta_1, 1.0 - beta_2);
    let moment_1 = update.evolve(
        MOMENT_1,
        || grad.clone().mul_scalar(factor_1),
        |old| {
            old.mul_scalar(beta_1)
                .add(grad.clone().mul_scalar(factor_1))
        },
    );
    let moment_2 = update.evolve(
        MOMENT_2,
        || grad.clone().square().mul_scalar(factor_2),
        |old| {
            old.mul_scalar(beta_2)
                .add(grad.clone().square().mul_scalar(factor_2))
        },
    );
    let divisor = match amsgrad {
        true => update.evolve(
            "momentum.max_moment_2",
            || moment_2.clone(),
            |old| old.max_pair(moment_2.clone()),
        ),
        false => moment_2,
    };
    (moment_1, divisor)
}

impl Optimizer for Adam {
    type State<const D: usize> = AdamState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        super::overhear!(self, self.id, tensor, grad, state);
        let Self {
            beta_1,
            beta_2,
            epsilon,
            ..
        } = *self;
        let mut update = Update::begin(self.id, lr, &tensor, state);
        let root = move |steps: usize| (1.0 - beta_2.powi(steps as i32)).sqrt();
        let factor = update.timed(
            "factor",
            move |_, steps| f64::from(root(steps) / (1.0 - beta_1.powi(steps as i32))),
            |time| {
                let root = (-time.power(beta_2) + 1.0).sqrt();
                root / (-time.power(beta_1) + 1.0)
            },
        );
        let epsilon = update.timed(
            "epsilon",
            move |_, steps| f64::from(epsilon * root(steps)),
            |time| (-time.power(beta_2) + 1.0).sqrt() * epsilon,
        );
        let rate = update.lr();
        if !self.amsgrad {
            super::put_off!(
                update,
                Method::Adam {
                    moments: MomentsRule::new(beta_1, beta_2)
                },
                self.weight_decay,
                tensor,
                grad,
                &[&rate, &factor, &epsilon],
                &[MOMENT_1, MOMENT_2]
            );
        }
        let grad = super::decayed(grad, &tensor, self.weight_decay);
        let (moment_1, divisor) = moments(&mut update, grad, beta_1, beta_2, self.amsgrad);
        let direction = factor.times(moment_1).div(epsilon.plus(divisor.sqrt()));
        let delta = rate.times(direction);
        update.finish(tensor - delta)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.to_device(device)
    }
}
