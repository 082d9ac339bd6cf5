//! Clipping by the norm of all gradients.

use super::update::cast;
#[cfg(feature = "cubecl-backend")]
use crate::tensor::AnyTensor;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};

/// Added to the norm before dividing by it, as PyTorch's `clip_grad_norm_` does.
const EPSILON: f32 = 1e-6;

/// The gradients of `module`, scaled so that the norm of all of them together is at most `max_norm`; and that norm `[1]`
/// before, in `f32`. Where Burn's [`GradientClipping`](burn::grad_clipping::GradientClipping) takes each parameter by
/// itself, this keeps the direction of the update.
///
/// The factor is `min(1, max_norm / (norm + 1e-6))`, as of PyTorch's `clip_grad_norm_`, and stays on the device: nothing
/// is read on the host, so a graphed step may use it. Half-precision gradients are squared and scaled in `f32`.
/// Where updates are fused ([`GraphConfig::fused_updates`](crate::GraphConfig::fused_updates)) it takes three or a few more
/// launches for all of them, with sums in an order that is always the same.
/// Gradients that are not of `module` come back as they were. Without gradients the norm is zero; a norm that is not
/// finite makes the gradients zero or NaN.
///
/// [On the difficulty of training Recurrent Neural Networks](https://arxiv.org/abs/1211.5063).
///
/// # Panics
///
/// When `max_norm` is not positive and finite.
pub fn clip_by_global_norm<M: Module>(
    module: &M,
    grads: GradientsParams,
    max_norm: f32,
) -> (GradientsParams, Tensor<1>) {
    assert!(
        max_norm.is_finite() && max_norm > 0.0,
        "clip_by_global_norm: max_norm must be positive and finite, but is {max_norm}; to clip nothing, do not call it"
    );
    #[cfg(feature = "cubecl-backend")]
    let grads = match by_kernels(module, grads, max_norm) {
        Ok(clipped) => return clipped,
        Err(grads) => grads,
    };
    let mut squares = Squares {
        grads,
        held: GradientsParams::new(),
        total: None,
        device: None,
    };
    module.visit(&mut squares);
    let Squares {
        grads,
        held,
        total,
        device,
    } = squares;
    let Some(total) = total else {
        let device = device.unwrap_or_default();
        return (grads, Tensor::zeros([1], (&device, DType::F32)));
    };
    let norm = total.sqrt();
    let factor = (max_norm / norm.clone().add_scalar(EPSILON)).clamp_max(1.0);
    let mut scaling = Scaling {
        held,
        grads,
        factor,
    };
    module.visit(&mut scaling);
    (scaling.grads, norm)
}

/// The same by three kernels, where the step's updates are fused and all gradients are `f32` on one device of CubeCL's.
#[cfg(feature = "cubecl-backend")]
fn by_kernels<M: Module>(
    module: &M,
    grads: GradientsParams,
    max_norm: f32,
) -> Result<(GradientsParams, Tensor<1>), GradientsParams> {
    if !crate::context::fuses_updates() {
        return Err(grads);
    }
    let (grads, mut found) = super::gradients::take(module, grads);
    let single = (found.iter()).all(|(_, grad)| grad.spec().dtype == DType::F32);
    let tensors: Vec<AnyTensor> = found.iter().map(|(_, grad)| grad.clone()).collect();
    let clipped = single.then(|| crate::multi::clip(&tensors, max_norm, EPSILON));
    let norm = clipped.flatten().map(|(scaled, norm)| {
        for ((_, grad), scaled) in found.iter_mut().zip(scaled) {
            *grad = scaled;
        }
        norm
    });
    let grads = super::gradients::give(module, &found, grads);
    match norm {
        Some(norm) => Ok((grads, norm.into_float())),
        None => Err(grads),
    }
}

/// Sums squares in the order of the visit. A parameter that is visited twice counts once: its gradient has moved.
struct Squares {
    grads: GradientsParams,
    held: GradientsParams,
    total: Option<Tensor<1>>,
    /// Of the first parameter.
    device: Option<Device>,
}

impl ModuleVisitor for Squares {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.device.is_none() {
            self.device = Some(param.val().device().inner());
        }
        let Some(grad) = self.grads.remove::<D>(param.id) else {
            return;
        };
        let square = cast(grad.clone(), DType::F32).square().sum();
        self.total = Some(match self.total.take() {
            Some(total) => {
                let device = total.device();
                total + on(square, &device)
            }
            None => square,
        });
        self.held.register(param.id, grad);
    }
}

struct Scaling {
    held: GradientsParams,
    grads: GradientsParams,
    factor: Tensor<1>,
}

impl ModuleVisitor for Scaling {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(grad) = self.held.remove::<D>(param.id) else {
            return;
        };
        let dtype = grad.dtype();
        let wide = match dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let factor = cast(on(self.factor.clone(), &grad.device()), wide);
        let scaled = cast(grad, wide).mul(factor.unsqueeze());
        self.grads.register(param.id, cast(scaled, dtype));
    }
}

fn on(tensor: Tensor<1>, device: &Device) -> Tensor<1> {
    match tensor.device() == *device {
        true => tensor,
        false => tensor.to_device(device),
    }
}
