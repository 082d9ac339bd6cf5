//! LAMB.

use super::state::{Layout, Leaf, OptimizerState};
use super::update::{OptimizerId, Update};
use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, FloatDType, Tensor};

/// Configuration of [`Lamb`]. As Burn's [`LambConfig`](burn::optim::LambConfig).
#[derive(Config, Debug)]
pub struct LambConfig {
    /// Decay of the first moment.
    #[config(default = 0.9)]
    beta_1: f32,
    /// Decay of the second moment.
    #[config(default = 0.999)]
    beta_2: f32,
    /// Added to the denominator.
    #[config(default = 1e-6)]
    epsilon: f32,
    /// Weight decay: added to the update, before the trust ratio.
    #[config(default = 0.0)]
    weight_decay: f32,
    /// Whether each parameter's update is scaled by the ratio of the parameter's norm to its own.
    #[config(default = true)]
    use_trust_ratio: bool,
    /// Gradient clipping, per parameter.
    grad_clipping: Option<GradientClippingConfig>,
}

/// LAMB (layer-wise adaptive moments), whose learning rate and step count a replay follows. As Burn's
/// [`Lamb`](burn::optim::Lamb), records included.
///
/// [Large Batch Optimization for Deep Learning: Training BERT in 76 minutes](https://arxiv.org/abs/1904.00962).
#[derive(Clone, Debug)]
pub struct Lamb {
    id: OptimizerId,
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    weight_decay: f32,
    use_trust_ratio: bool,
}

/// What [`Lamb`]'s state holds.
#[derive(Debug)]
pub struct LambLayout;

impl Layout for LambLayout {
    const TIME: Option<&'static str> = Some("time");
    const LEAVES: &'static [Leaf] = &[Leaf::required("moment_1"), Leaf::required("moment_2")];
}

/// State of [`Lamb`].
pub type LambState<const D: usize> = OptimizerState<D, LambLayout>;

impl LambConfig {
    /// The bare optimizer, for [`ModuleOptimizer::with_group`]. [`init`](Self::init) makes the whole-module one, and is
    /// the one that applies the configured gradient clipping.
    pub fn build(&self) -> Lamb {
        Lamb {
            id: OptimizerId::new(),
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
            weight_decay: self.weight_decay,
            use_trust_ratio: self.use_trust_ratio,
        }
    }

    /// The optimizer of a whole module.
    pub fn init(&self) -> ModuleOptimizer {
        super::with_clipping(self.build(), &self.grad_clipping)
    }
}

/// Norm of `param` over norm of `direction`; one where either is zero.
fn trust_ratio<const D: usize>(param: Tensor<D>, direction: Tensor<D>) -> Tensor<1> {
    let finfo = direction.dtype().finfo();
    let min_positive = finfo.unwrap_or(FloatDType::F32.finfo()).min_positive;
    let param_norm = param.square().sum().sqrt();
    let direction_norm = direction.square().sum().sqrt();
    let valid = param_norm
        .clone()
        .greater_scalar(0.0)
        .bool_and(direction_norm.clone().greater_scalar(0.0));
    let ratio = param_norm.div(direction_norm.clamp_min(min_positive));
    ratio.ones_like().mask_where(valid, ratio)
}

impl Optimizer for Lamb {
    type State<const D: usize> = LambState<D>;

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
        let share = || grad.clone().mul_scalar(1.0 - beta_1);
        let moment_1 = update.evolve("moment_1", share, |old| old.mul_scalar(beta_1).add(share()));
        let square = || grad.clone().square().mul_scalar(1.0 - beta_2);
        let moment_2 = update.evolve("moment_2", square, |old| {
            old.mul_scalar(beta_2).add(square())
        });
        let moment_1 = super::correction(&update, "correction_1", beta_1).divides(moment_1);
        let moment_2 = super::correction(&update, "correction_2", beta_2).divides(moment_2);
        let mut direction = moment_1.div(moment_2.sqrt().add_scalar(self.epsilon));
        if self.weight_decay != 0.0 {
            direction = direction.add(tensor.clone().mul_scalar(self.weight_decay));
        }
        if self.use_trust_ratio {
            let ratio = trust_ratio(tensor.clone(), direction.clone());
            direction = direction.mul(ratio.unsqueeze());
        }
        let delta = update.lr().times(direction);
        update.finish(tensor - delta)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.to_device(device)
    }
}
