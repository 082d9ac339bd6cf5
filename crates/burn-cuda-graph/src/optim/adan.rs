//! Adan.

use super::state::{Layout, Leaf, OptimizerState};
use super::update::{OptimizerId, Update};
use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};

/// Configuration of [`Adan`]. As Burn's [`AdanConfig`](burn::optim::AdanConfig).
#[derive(Config, Debug)]
pub struct AdanConfig {
    /// Decay of the first moment.
    #[config(default = 0.98)]
    beta_1: f32,
    /// Decay of the average of gradient differences, and their share in the update.
    #[config(default = 0.92)]
    beta_2: f32,
    /// Decay of the second moment.
    #[config(default = 0.99)]
    beta_3: f32,
    /// Added to the denominator.
    #[config(default = 1e-8)]
    epsilon: f32,
    /// Weight decay, relative to the learning rate.
    #[config(default = 0.0)]
    weight_decay: f32,
    /// Whether weight decay multiplies the parameter before the update, as AdamW's does, in place of dividing it after
    /// (proximal).
    #[config(default = false)]
    no_prox: bool,
    /// Gradient clipping, per parameter.
    grad_clipping: Option<GradientClippingConfig>,
}

/// Adan, whose learning rate and step count a replay follows. As Burn's [`Adan`](burn::optim::Adan), records included.
///
/// [Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models](https://arxiv.org/abs/2208.06677).
#[derive(Clone, Debug)]
pub struct Adan {
    id: OptimizerId,
    beta_1: f32,
    beta_2: f32,
    beta_3: f32,
    epsilon: f32,
    weight_decay: f32,
    no_prox: bool,
}

/// What [`Adan`]'s state holds.
#[derive(Debug)]
pub struct AdanLayout;

const EXP_AVG: &str = "momentum.exp_avg";
const EXP_AVG_SQ: &str = "momentum.exp_avg_sq";
const EXP_AVG_DIFF: &str = "momentum.exp_avg_diff";
const NEG_PRE_GRAD: &str = "momentum.neg_pre_grad";

impl Layout for AdanLayout {
    const TIME: Option<&'static str> = Some("momentum.time");
    const LEAVES: &'static [Leaf] = &[
        Leaf::required(EXP_AVG),
        Leaf::required(EXP_AVG_SQ),
        Leaf::required(EXP_AVG_DIFF),
        Leaf::required(NEG_PRE_GRAD),
    ];
}

/// State of [`Adan`].
pub type AdanState<const D: usize> = OptimizerState<D, AdanLayout>;

impl AdanConfig {
    /// The bare optimizer, for [`ModuleOptimizer::with_group`]. [`init`](Self::init) makes the whole-module one, and is
    /// the one that applies the configured gradient clipping.
    pub fn build(&self) -> Adan {
        Adan {
            id: OptimizerId::new(),
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            beta_3: self.beta_3,
            epsilon: self.epsilon,
            weight_decay: self.weight_decay,
            no_prox: self.no_prox,
        }
    }

    /// The optimizer of a whole module.
    pub fn init(&self) -> ModuleOptimizer {
        super::with_clipping(self.build(), &self.grad_clipping)
    }
}

impl Adan {
    /// What the learning rate multiplies.
    fn direction<const D: usize>(
        &self,
        update: &mut Update<D, AdanLayout>,
        grad: Tensor<D>,
    ) -> Tensor<D> {
        let Self {
            beta_1,
            beta_2,
            beta_3,
            ..
        } = *self;
        // To the gradient of the step before; none in the first, whose average of differences is zero.
        let difference = update.read(
            NEG_PRE_GRAD,
            || grad.zeros_like(),
            |old| old.add(grad.clone()),
        );
        let exp_avg = update.evolve(
            EXP_AVG,
            || grad.clone().mul_scalar(1.0 - beta_1),
            |old| {
                old.mul_scalar(beta_1)
                    .add(grad.clone().mul_scalar(1.0 - beta_1))
            },
        );
        let exp_avg_diff = update.evolve(
            EXP_AVG_DIFF,
            || difference.clone(),
            |old| {
                old.mul_scalar(beta_2)
                    .add(difference.clone().mul_scalar(1.0 - beta_2))
            },
        );
        let exp_avg_sq = update.evolve(
            EXP_AVG_SQ,
            || grad.clone().square().mul_scalar(1.0 - beta_3),
            |old| {
                let ahead = difference.clone().mul_scalar(beta_2).add(grad.clone());
                old.mul_scalar(beta_3)
                    .add(ahead.square().mul_scalar(1.0 - beta_3))
            },
        );
        let negated = grad.mul_scalar(-1.0);
        update.evolve(NEG_PRE_GRAD, || negated.clone(), |_| negated.clone());

        let root_3 = update.timed(
            "root_3",
            move |_, steps| f64::from((1.0 - beta_3.powi(steps as i32)).sqrt()),
            |time| (-time.power(beta_3) + 1.0).sqrt(),
        );
        let correction_1 = super::correction(update, "correction_1", beta_1);
        let correction_2 = super::correction(update, "correction_2", beta_2);
        let denominator = root_3.divides(exp_avg_sq.sqrt()).add_scalar(self.epsilon);
        let difference = correction_2.divides(exp_avg_diff.mul_scalar(beta_2));
        correction_1
            .divides(exp_avg)
            .div(denominator.clone())
            .add(difference.div(denominator))
    }
}

impl Optimizer for Adan {
    type State<const D: usize> = AdanState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        super::overhear!(self, self.id, tensor, grad, state);
        let mut update = Update::begin(self.id, lr, &tensor, state);
        let direction = self.direction(&mut update, grad);
        let delta = update.lr().times(direction);
        let updated = match (self.weight_decay == 0.0, self.no_prox) {
            (true, _) => tensor - delta,
            (false, true) => super::shrunk(&update, tensor, self.weight_decay) - delta,
            (false, false) => {
                let decay = f64::from(self.weight_decay);
                let divisor = update.rate("divisor", move |lr| 1.0 + lr * decay);
                // Burn leaves the division out at rate zero. By one, it changes no bit.
                divisor.divides(tensor - delta)
            }
        };
        update.finish(updated)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.to_device(device)
    }
}
