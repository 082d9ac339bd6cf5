//! Adafactor.

use super::state::{Layout, Leaf, OptimizerState};
use super::update::{OptimizerId, Update, cast};
use burn::config::Config;
use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{DType, Device, Tensor};

/// Configuration of [`Adafactor`]. As Burn's [`AdafactorConfig`](burn::optim::AdafactorConfig).
///
/// The step size is `min(lr, 1 / sqrt(step))` times the root mean square of the parameter. Switch off both
/// `relative_step` and `scale_parameter` for one that is the learning rate.
#[derive(Config, Debug)]
pub struct AdafactorConfig {
    /// Added to squared gradients. Positive.
    #[config(default = 1e-30)]
    epsilon_1: f32,
    /// The least root mean square of a parameter that scales its step. Positive.
    #[config(default = 1e-3)]
    epsilon_2: f32,
    /// The largest root mean square of an update, before learning rate and scale. Positive.
    #[config(default = 1.0)]
    clip_threshold: f32,
    /// Exponent of the decay of second moments, which is `1 - step^decay_rate`. Negative.
    #[config(default = -0.8)]
    decay_rate: f64,
    /// Whether the learning rate is capped by `1 / sqrt(step)`.
    #[config(default = true)]
    relative_step: bool,
    /// Whether the root mean square of the parameter scales its step.
    #[config(default = true)]
    scale_parameter: bool,
    /// Decoupled weight decay: a step multiplies parameters by one minus this times the learning rate.
    #[config(default = 0.0)]
    weight_decay: f32,
    /// Gradient clipping, per parameter.
    grad_clipping: Option<GradientClippingConfig>,
}

/// Adafactor, whose learning rate and step count a replay follows. As Burn's [`Adafactor`](burn::optim::Adafactor),
/// records included: of a matrix it keeps the second moments of rows and columns, and of half-precision parameters it
/// computes and keeps everything in `f32`.
///
/// [Adafactor: Adaptive Learning Rates with Sublinear Memory Cost](https://arxiv.org/abs/1804.04235).
#[derive(Clone, Debug)]
pub struct Adafactor {
    id: OptimizerId,
    epsilon_1: f32,
    epsilon_2: f32,
    clip_threshold: f32,
    decay_rate: f64,
    relative_step: bool,
    scale_parameter: bool,
    weight_decay: f32,
}

/// What [`Adafactor`]'s state holds.
#[derive(Debug)]
pub struct AdafactorLayout;

const SECOND_MOMENT: &str = "second_moment";
const COLUMN_SECOND_MOMENT: &str = "column_second_moment";

impl Layout for AdafactorLayout {
    const TIME: Option<&'static str> = Some("time");
    const LEAVES: &'static [Leaf] = &[
        Leaf::required(SECOND_MOMENT),
        Leaf::optional(COLUMN_SECOND_MOMENT),
    ];
}

/// State of [`Adafactor`].
pub type AdafactorState<const D: usize> = OptimizerState<D, AdafactorLayout>;

impl AdafactorConfig {
    /// The bare optimizer, for [`ModuleOptimizer::with_group`]. [`init`](Self::init) makes the whole-module one, and is
    /// the one that applies the configured gradient clipping.
    ///
    /// # Panics
    ///
    /// When a setting is not finite, or when `epsilon_1`, `epsilon_2` or `clip_threshold` is not positive, `decay_rate`
    /// is not negative, or `weight_decay` is negative.
    pub fn build(&self) -> Adafactor {
        for (name, value, default) in [
            ("epsilon_1", self.epsilon_1, 1e-30),
            ("epsilon_2", self.epsilon_2, 1e-3),
            ("clip_threshold", self.clip_threshold, 1.0),
        ] {
            assert!(
                value.is_finite() && value > 0.0,
                "Adafactor {name} must be positive and finite, but is {value}; the default is {default:e}"
            );
        }
        assert!(
            self.decay_rate.is_finite() && self.decay_rate < 0.0,
            "Adafactor decay_rate must be negative and finite, but is {}; the default is -0.8",
            self.decay_rate
        );
        assert!(
            self.weight_decay.is_finite() && self.weight_decay >= 0.0,
            "Adafactor weight_decay must be nonnegative and finite, but is {}; 0 switches it off",
            self.weight_decay
        );
        Adafactor {
            id: OptimizerId::new(),
            epsilon_1: self.epsilon_1,
            epsilon_2: self.epsilon_2,
            clip_threshold: self.clip_threshold,
            decay_rate: self.decay_rate,
            relative_step: self.relative_step,
            scale_parameter: self.scale_parameter,
            weight_decay: self.weight_decay,
        }
    }

    /// The optimizer of a whole module.
    ///
    /// # Panics
    ///
    /// As [`build`](Self::build).
    pub fn init(&self) -> ModuleOptimizer {
        super::with_clipping(self.build(), &self.grad_clipping)
    }
}

fn rms<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    tensor.square().mean().sqrt()
}

impl Adafactor {
    /// The gradient over the root of its second moment.
    fn normalized<const D: usize>(
        &self,
        update: &mut Update<D, AdafactorLayout>,
        grad: Tensor<D>,
    ) -> Tensor<D> {
        let exponent = self.decay_rate;
        let new_weight = update.timed(
            "new_weight",
            move |_, steps| (steps as f64).powf(exponent),
            |time| time.steps().powf_scalar(exponent),
        );
        let old_weight = update.timed(
            "old_weight",
            move |_, steps| 1.0 - (steps as f64).powf(exponent),
            |time| -time.steps().powf_scalar(exponent) + 1.0,
        );
        let mut average = |leaf, squared: Tensor<D>| {
            update.evolve(
                leaf,
                || squared.clone(),
                |old| old_weight.times(old).add(new_weight.times(squared.clone())),
            )
        };
        let squared = grad.clone().square().add_scalar(self.epsilon_1);
        if D < 2 {
            return grad.div(average(SECOND_MOMENT, squared).sqrt());
        }
        // Both means before either average, as Burn: fusion compiles by order, and its kernels round by what is in them.
        let (row, column) = (squared.clone().mean_dim(D - 1), squared.mean_dim(D - 2));
        let row = average(SECOND_MOMENT, row);
        let column = average(COLUMN_SECOND_MOMENT, column);
        // The row's factor by itself first: the product of two small moments could vanish.
        let row_scale = row.clone().div(row.mean_dim(D - 2)).sqrt();
        grad.div(row_scale).div(column.sqrt())
    }
}

impl Optimizer for Adafactor {
    type State<const D: usize> = AdafactorState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        super::overhear!(self, self.id, tensor, grad, state);
        let dtype = tensor.dtype();
        // Squares of half-precision gradients vanish, even of ordinary ones.
        let (tensor, grad) = match dtype {
            DType::F16 | DType::BF16 => (cast(tensor, DType::F32), cast(grad, DType::F32)),
            _ => (tensor, grad),
        };
        // From here on in that type, scalars included.
        let mut update = Update::begin(self.id, lr, &tensor, state);
        let mut direction = self.normalized(&mut update, grad);
        let clipping = rms(direction.clone())
            .div_scalar(self.clip_threshold)
            .clamp_min(1.0);
        direction = direction.div(clipping.unsqueeze());
        if self.scale_parameter {
            let scale = rms(tensor.clone()).clamp_min(self.epsilon_2);
            direction = direction.mul(scale.unsqueeze());
        }
        let step_size = match self.relative_step {
            true => update.timed(
                "step_size",
                |lr, steps| lr.min(1.0 / (steps as f64).sqrt()),
                |time| time.rate().min_pair(time.steps().sqrt().recip()),
            ),
            false => update.lr(),
        };
        let delta = step_size.times(direction);
        let decayed = match self.weight_decay == 0.0 {
            true => tensor,
            false => super::shrunk(&update, tensor, self.weight_decay),
        };
        let (updated, state) = update.finish(decayed - delta);
        (cast(updated, dtype), state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.to_device(device)
    }
}
