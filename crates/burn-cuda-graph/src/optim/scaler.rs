//! Loss scaling for half-precision training, decided on the device.

use crate::context::{UpdateRate, with_skip_mask};
use crate::state::{StepState, Training};
use crate::tensor::AnyTensor;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Bool, DType, Device, Tensor};

/// Configuration of a [`LossScaler`]. The defaults are those of PyTorch's `GradScaler`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScalerConfig {
    /// The scale to begin with. Default 65,536.
    pub init_scale: f64,
    /// What the scale is multiplied by after [`growth_interval`](Self::growth_interval) good steps. Default 2.
    pub growth_factor: f64,
    /// What the scale is multiplied by after a step whose gradients were not all finite. Default 0.5.
    pub backoff_factor: f64,
    /// Consecutive good steps before the scale grows. Default 2,000.
    pub growth_interval: u32,
    /// Whether the scale moves. A static scale still skips steps whose gradients are not all finite. Default true.
    pub dynamic: bool,
}

impl Default for LossScalerConfig {
    fn default() -> Self {
        Self {
            init_scale: 65_536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2_000,
            dynamic: true,
        }
    }
}

impl LossScalerConfig {
    /// The defaults: dynamic scaling from 65,536.
    pub fn new() -> Self {
        Self::default()
    }

    /// A scale that stays at `scale`.
    pub fn fixed(scale: f64) -> Self {
        Self {
            init_scale: scale,
            dynamic: false,
            ..Self::default()
        }
    }

    /// Set [`init_scale`](Self::init_scale).
    pub fn with_init_scale(mut self, scale: f64) -> Self {
        self.init_scale = scale;
        self
    }

    /// Set [`growth_factor`](Self::growth_factor).
    pub fn with_growth_factor(mut self, factor: f64) -> Self {
        self.growth_factor = factor;
        self
    }

    /// Set [`backoff_factor`](Self::backoff_factor).
    pub fn with_backoff_factor(mut self, factor: f64) -> Self {
        self.backoff_factor = factor;
        self
    }

    /// Set [`growth_interval`](Self::growth_interval).
    pub fn with_growth_interval(mut self, steps: u32) -> Self {
        self.growth_interval = steps;
        self
    }

    /// A scaler whose tensors are on `device`, which is that of the model.
    ///
    /// # Panics
    ///
    /// When a value is out of range: `init_scale` positive and finite, `growth_factor` at least 1, `backoff_factor`
    /// between 0 and 1, `growth_interval` at least 1.
    pub fn init(&self, device: &Device) -> LossScaler {
        let Self {
            init_scale,
            growth_factor,
            backoff_factor,
            growth_interval,
            ..
        } = *self;
        assert!(
            init_scale.is_finite() && init_scale > 0.0 && (init_scale as f32).is_finite(),
            "LossScaler: init_scale is {init_scale}; it must be positive and finite in f32"
        );
        assert!(
            growth_factor.is_finite() && growth_factor >= 1.0,
            "LossScaler: growth_factor is {growth_factor}; it must be at least 1"
        );
        assert!(
            backoff_factor > 0.0 && backoff_factor < 1.0,
            "LossScaler: backoff_factor is {backoff_factor}; it must be between 0 and 1"
        );
        assert!(
            growth_interval >= 1,
            "LossScaler: growth_interval is 0; it must be at least 1"
        );
        let device = device.clone().inner();
        LossScaler {
            scale: Tensor::full([1], init_scale, (&device, DType::F32)),
            good_steps: Tensor::zeros([1], (&device, DType::F32)),
            config: *self,
        }
    }
}

/// Scales the loss so that small gradients of half-precision parameters do not vanish, and skips steps in which one
/// overflowed.
///
/// The scale and the count of good steps are `[1]` `f32` tensors on the device. Whether a gradient was infinite or not a
/// number, whether parameters, optimizer state and step counts change, and how the scale moves is decided there, with
/// masks: the host reads nothing, so the step replays. It is part of the step's state: train a
/// `(Training<M>, LossScaler)`, and in the step
///
/// ```
/// # use burn::{module::Module, optim::GradientsParams, tensor::Tensor};
/// # use burn_cuda_graph::{StepRate, Training, optim::LossScaler};
/// # fn step<M: Module>((training, scaler): &mut (Training<M>, LossScaler), loss: Tensor<1>, lr: StepRate) {
/// let grads = scaler.scale(loss).backward();
/// let grads = GradientsParams::from_grads(grads, training.model());
/// training.optimize_scaled(lr, grads, scaler);
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct LossScaler {
    scale: Tensor<1>,
    good_steps: Tensor<1>,
    config: LossScalerConfig,
}

impl LossScaler {
    /// The loss, scaled: what to call `backward` on. In the loss's own precision.
    pub fn scale(&self, loss: Tensor<1>) -> Tensor<1> {
        let scale = super::update::cast(self.scale.clone(), loss.dtype());
        loss.clone() * on_tape_of(&loss, scale)
    }

    /// The scale now, `[1]` `f32`.
    pub fn current(&self) -> Tensor<1> {
        self.scale.clone()
    }

    /// Good steps since the scale last moved, `[1]` `f32`.
    pub fn good_steps(&self) -> Tensor<1> {
        self.good_steps.clone()
    }

    /// The gradients of `module` divided by the scale, in their own precision, and whether any is infinite or not a
    /// number, as a `[1]` condition on the device.
    ///
    /// Gradients are tested after the division, in `f32`.
    pub fn unscale<M: Module>(
        &self,
        module: &M,
        grads: GradientsParams,
    ) -> (GradientsParams, Tensor<1, Bool>) {
        let mut visitor = Unscale {
            inverse: self.scale.clone().recip(),
            old: grads,
            new: GradientsParams::new(),
            found: None,
        };
        module.visit(&mut visitor);
        let found = visitor.found.unwrap_or_else(|| {
            // No gradients: nothing overflowed.
            self.scale.clone().equal_scalar(f32::NEG_INFINITY)
        });
        (visitor.new, found)
    }

    /// Move the scale, after a step in which `found` says whether a gradient overflowed.
    pub fn update(&mut self, found: Tensor<1, Bool>) {
        if !self.config.dynamic {
            return;
        }
        let LossScalerConfig {
            growth_factor,
            backoff_factor,
            growth_interval,
            ..
        } = self.config;
        let good = self.good_steps.clone().add_scalar(1.0);
        let grown = good.clone().greater_equal_scalar(growth_interval);
        let raised = self.scale.clone().mul_scalar(growth_factor);
        // At the end of the range the scale stays.
        let raised = raised
            .clone()
            .mask_where(raised.is_inf(), self.scale.clone());
        let lowered = self.scale.clone().mul_scalar(backoff_factor);
        self.scale = self
            .scale
            .clone()
            .mask_where(grown.clone(), raised)
            .mask_where(found.clone(), lowered);
        self.good_steps = good.mask_fill(grown, 0.0).mask_fill(found, 0.0);
    }
}

impl StepState for LossScaler {
    fn visit_state(&self, visit: &mut dyn FnMut(AnyTensor)) {
        visit(AnyTensor::from_float(self.scale.clone()));
        visit(AnyTensor::from_float(self.good_steps.clone()));
    }
    fn map_state(self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        Self {
            scale: map(AnyTensor::from_float(self.scale)).into_float(),
            good_steps: map(AnyTensor::from_float(self.good_steps)).into_float(),
            config: self.config,
        }
    }
    fn visit_names(&self, visit: &mut dyn FnMut(String)) {
        visit("the loss scale".into());
        visit("the loss scaler's good steps".into());
    }
}

impl<M: Module> Training<M> {
    /// Undo the scale of `grads`, update the model where they are all finite and leave model and optimizer as they are
    /// where one is not, then move the scale. Decided on the device.
    ///
    /// # Panics
    ///
    /// With an optimizer that is not of [`optim`](crate::optim): Burn's own have no way to leave their state as it is.
    pub fn optimize_scaled(
        &mut self,
        lr: impl Into<UpdateRate>,
        grads: GradientsParams,
        scaler: &mut LossScaler,
    ) {
        assert!(
            self.is_ours(),
            "optimize_scaled needs optimizers of burn_cuda_graph::optim for every parameter: Burn's own cannot leave \
             their state as it is in a step that is skipped"
        );
        let (grads, found) = scaler.unscale(self.model(), grads);
        with_skip_mask(found.clone(), || self.optimize(lr, grads));
        scaler.update(found);
    }
}

/// `value`, where `like` may be on the autodiff tape, as a constant on it.
fn on_tape_of(like: &Tensor<1>, value: Tensor<1>) -> Tensor<1> {
    AnyTensor::lifted_like(
        AnyTensor::from_float(value),
        &AnyTensor::from_float(like.clone().detach()),
    )
    .into_float()
}

struct Unscale {
    inverse: Tensor<1>,
    old: GradientsParams,
    new: GradientsParams,
    found: Option<Tensor<1, Bool>>,
}

impl ModuleVisitor for Unscale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(grad) = self.old.remove::<D>(param.id) else {
            return;
        };
        let dtype = grad.dtype();
        let grad = super::update::cast(grad, DType::F32) * self.inverse.clone().reshape([1; D]);
        let bad = grad.clone().is_finite().bool_not().any();
        self.found = Some(match self.found.take() {
            Some(found) => found.bool_or(bad),
            None => bad,
        });
        self.new
            .register(param.id, super::update::cast(grad, dtype));
    }
}
