//! Adam with decoupled weight decay.

use super::adam::{AdamLayout, moments};
#[cfg(feature = "cubecl-backend")]
use super::adam::{MOMENT_1, MOMENT_2};
use super::state::OptimizerState;
use super::update::{OptimizerId, Scalar, Update, spread};
#[cfg(feature = "cubecl-backend")]
use crate::update_rule::{Constant, Method, MomentsRule};
use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};

/// Configuration of [`AdamW`]. As Burn's [`AdamWConfig`](burn::optim::AdamWConfig).
#[derive(Config, Debug)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    #[config(default = 0.9)]
    beta_1: f32,
    /// Decay of the second moment.
    #[config(default = 0.999)]
    beta_2: f32,
    /// Added to the denominator.
    #[config(default = 1e-5)]
    epsilon: f32,
    /// Decoupled weight decay: a step multiplies parameters by one minus this times the learning rate.
    #[config(default = 1e-4)]
    weight_decay: f32,
    /// Whether only those elements decay whose sign agrees with that of the first moment.
    #[config(default = false)]
    cautious_weight_decay: bool,
    /// Whether the denominator is the largest second moment so far (AMSGrad).
    #[config(default = false)]
    amsgrad: bool,
    /// Gradient clipping, per parameter.
    grad_clipping: Option<GradientClippingConfig>,
}

/// Adam with decoupled weight decay, whose learning rate and step count a replay follows. As Burn's
/// [`AdamW`](burn::optim::AdamW), records included.
///
/// [Decoupled Weight Decay Regularization](https://arxiv.org/abs/1711.05101),
/// [Cautious Weight Decay](https://arxiv.org/abs/2510.12402),
/// [On the Convergence of Adam and Beyond](https://openreview.net/forum?id=ryQu7f-RZ).
#[derive(Clone, Debug)]
pub struct AdamW {
    id: OptimizerId,
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    weight_decay: f32,
    cautious_weight_decay: bool,
    amsgrad: bool,
}

/// State of [`AdamW`].
pub type AdamWState<const D: usize> = OptimizerState<D, AdamLayout>;

impl AdamWConfig {
    /// The bare optimizer, for [`ModuleOptimizer::with_group`]. [`init`](Self::init) makes the whole-module one, and is
    /// the one that applies the configured gradient clipping.
    pub fn build(&self) -> AdamW {
        AdamW {
            id: OptimizerId::new(),
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
            weight_decay: self.weight_decay,
            cautious_weight_decay: self.cautious_weight_decay,
            amsgrad: self.amsgrad,
        }
    }

    /// The optimizer of a whole module.
    pub fn init(&self) -> ModuleOptimizer {
        super::with_clipping(self.build(), &self.grad_clipping)
    }
}

/// `param` decayed where its sign agrees with that of `moment_1`.
fn cautiously<const D: usize>(
    update: &Update<D, AdamLayout>,
    param: Tensor<D>,
    moment_1: Tensor<D>,
    weight_decay: f32,
) -> Tensor<D> {
    let decay = f64::from(weight_decay);
    let rate = update.rate("decay", move |lr| lr * decay);
    // At rate zero Burn leaves the parameter alone. `x - x * 0` does not: it makes an infinite `x` NaN and a negative
    // zero positive. So there the whole parameter is exempt, and `x - 0` is `x` to the bit.
    let is_zero = update.rate("no_decay", move |lr| f64::from(lr * decay == 0.0));
    if matches!(is_zero, Scalar::Host(value) if value != 0.0) {
        return param;
    }
    let param_positive = param.clone().greater_equal_scalar(0.0);
    let differ = param_positive.not_equal(moment_1.greater_equal_scalar(0.0));
    let exempt = match is_zero {
        Scalar::Host(_) => differ,
        Scalar::Device(value) => differ.bool_or(spread(&value.not_equal_scalar(0.0), &param)),
    };
    param.clone() - rate.times(param).mask_fill(exempt, 0.0)
}

impl Optimizer for AdamW {
    type State<const D: usize> = AdamWState<D>;

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
            weight_decay,
            ..
        } = *self;
        let mut update = Update::begin(self.id, lr, &tensor, state);
        let correction_1 = super::correction(&update, "correction_1", beta_1);
        let correction_2 = super::correction(&update, "correction_2", beta_2);
        let rate = update.lr();
        if !(self.amsgrad || self.cautious_weight_decay && weight_decay != 0.0) {
            let kept = (weight_decay != 0.0).then(|| super::kept(&update, weight_decay));
            let scalars = [&rate, &correction_1, &correction_2];
            super::put_off!(
                update,
                Method::AdamW {
                    moments: MomentsRule::new(beta_1, beta_2),
                    epsilon: Constant::new(self.epsilon),
                    shrinks: kept.is_some(),
                },
                None,
                tensor,
                grad,
                &scalars.into_iter().chain(&kept).collect::<Vec<_>>(),
                &[MOMENT_1, MOMENT_2]
            );
        }
        let (moment_1, divisor) = moments(&mut update, grad, beta_1, beta_2, self.amsgrad);
        let root = correction_2.divides(divisor).sqrt();
        let direction = correction_1
            .divides(moment_1.clone())
            .div(root.add_scalar(self.epsilon));
        let decayed = match (weight_decay == 0.0, self.cautious_weight_decay) {
            (true, _) => tensor,
            (false, true) => cautiously(&update, tensor, moment_1, weight_decay),
            (false, false) => super::shrunk(&update, tensor, weight_decay),
        };
        let delta = rate.times(direction);
        update.finish(decayed - delta)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.to_device(device)
    }
}
