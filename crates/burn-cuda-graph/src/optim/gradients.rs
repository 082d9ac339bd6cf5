//! The gradients of a module as tensors of any rank, and back.

use crate::tensor::AnyTensor;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

/// Take the gradients of `module` out of `grads`, in the order of the visit; what is left, and those.
pub(crate) fn take<M: Module>(
    module: &M,
    grads: GradientsParams,
) -> (GradientsParams, Vec<(ParamId, AnyTensor)>) {
    struct Take {
        grads: GradientsParams,
        found: Vec<(ParamId, AnyTensor)>,
    }
    impl ModuleVisitor for Take {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.grads.remove::<D>(param.id) {
                self.found.push((param.id, AnyTensor::from_float(grad)));
            }
        }
    }
    let mut taken = Take {
        grads,
        found: Vec::new(),
    };
    module.visit(&mut taken);
    (taken.grads, taken.found)
}

/// Register `given` in `grads` as gradients of `module`, each in its parameter's rank.
pub(crate) fn give<M: Module>(
    module: &M,
    given: &[(ParamId, AnyTensor)],
    grads: GradientsParams,
) -> GradientsParams {
    struct Give<'a> {
        given: &'a [(ParamId, AnyTensor)],
        grads: GradientsParams,
    }
    impl ModuleVisitor for Give<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some((_, grad)) = self.given.iter().find(|(id, _)| *id == param.id) {
                self.grads
                    .register(param.id, grad.clone().into_float::<D>());
            }
        }
    }
    let mut giving = Give { given, grads };
    module.visit(&mut giving);
    giving.grads
}
