//! The state that a step updates: model, optimizer, whatever else it carries from one step to the next.

use crate::shape_key::HostField;
use crate::tensor::AnyTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{GradientsParams, LearningRate, ModuleOptimizer};
use burn::tensor::{Bool, Int, Tensor};

/// What a step updates.
///
/// [`Training`] is the one for a model and its optimizer; tuples of states are states. All tensors that a step
/// carries over to the next must be visited: one that is not is found by the fingerprint and the step is refused
/// ([`FallbackReason::HiddenState`](crate::FallbackReason::HiddenState)).
pub trait StepState: Clone {
    /// Hand every tensor to `visit`, in a fixed order.
    fn visit_state(&self, visit: &mut dyn FnMut(AnyTensor));

    /// Replace every tensor by what `map` returns for it, in the order of [`visit_state`](Self::visit_state).
    fn map_state(self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self;

    /// Hand every host value that a step changes to `field`. A step that changes one is refused, since a replay calls no
    /// closure. Default: none.
    fn visit_host_fields(&self, field: &mut dyn FnMut(HostField)) {
        let _ = field;
    }

    /// Bring tensors that lag behind up to date, so that [`visit_state`](Self::visit_state) shows live values.
    /// Default: nothing lags.
    fn settle(&self) {}

    /// A copy whose containers share nothing mutable with this one's. Buffers may be shared. Default: a clone,
    /// right for a state without interior mutability.
    fn independent(&self) -> Self {
        self.clone()
    }
}

/// A model and the optimizer that trains it.
///
/// Inside the step, [`model`](Self::model) is the model to run and [`optimize`](Self::optimize) applies gradients.
///
/// The tensors a stock [`ModuleOptimizer`] keeps (momentum, Adam's moments) are private to it, so an optimizer
/// that keeps any is refused by name when a step is to be recorded; plain SGD keeps none.
#[derive(Debug, Clone)]
pub struct Training<M> {
    model: M,
    optimizer: DebuggableOptimizer,
}

#[derive(Clone)]
struct DebuggableOptimizer(ModuleOptimizer);

impl core::fmt::Debug for DebuggableOptimizer {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("ModuleOptimizer")
    }
}

impl<M: Module> Training<M> {
    /// A model on an autodiff device, and its optimizer.
    pub fn new(model: M, optimizer: ModuleOptimizer) -> Self {
        Self {
            model,
            optimizer: DebuggableOptimizer(optimizer),
        }
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &ModuleOptimizer {
        &self.optimizer.0
    }

    /// Update the model: `model = optimizer.step(lr, model, grads)`.
    ///
    /// A panic in the optimizer leaves the model as it was.
    pub fn optimize(&mut self, lr: LearningRate, grads: GradientsParams) {
        self.model = self.optimizer.0.step(lr, self.model.clone(), grads);
    }

    /// Update the model with a function of it and the optimizer, for steps that do more than
    /// [`optimize`](Self::optimize).
    pub fn update(&mut self, update: impl FnOnce(M, &mut ModuleOptimizer) -> M) {
        self.model = update(self.model.clone(), &mut self.optimizer.0);
    }

    /// The model, by value.
    pub fn into_model(self) -> M {
        self.model
    }

    /// The model and the optimizer.
    pub fn into_parts(self) -> (M, ModuleOptimizer) {
        (self.model, self.optimizer.0)
    }
}

impl<M: Module> StepState for Training<M> {
    fn visit_state(&self, visit: &mut dyn FnMut(AnyTensor)) {
        self.model.visit(&mut Visitor { visit });
    }

    fn map_state(self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        Self {
            model: self.model.map(&mut Mapper { map }),
            optimizer: self.optimizer,
        }
    }

    /// BatchNorm's `RunningState` shows its value one update late: `update` parks the new statistics under the
    /// calling thread's id, and only a later read moves them into the value that visitors see. `valid` is the one
    /// call that every module has and that moves them.
    fn settle(&self) {
        drop(self.model.valid());
    }

    /// A clone of a model shares the cells of its `RunningState`s; going to validation and back makes new ones.
    fn independent(&self) -> Self {
        Self {
            model: self.model.valid().train(),
            optimizer: self.optimizer.clone(),
        }
    }
}

struct Visitor<'a> {
    visit: &'a mut dyn FnMut(AnyTensor),
}

impl ModuleVisitor for Visitor<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        (self.visit)(AnyTensor::from_float(param.val()));
    }
    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        (self.visit)(AnyTensor::from_int(param.val()));
    }
    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        (self.visit)(AnyTensor::from_bool(param.val()));
    }
}

struct Mapper<'a> {
    map: &'a mut dyn FnMut(AnyTensor) -> AnyTensor,
}

impl ModuleMapper for Mapper<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = (self.map)(AnyTensor::from_float(tensor));
        Param::from_mapped_value(id, tensor.into_float(), mapper)
    }
    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = (self.map)(AnyTensor::from_int(tensor));
        Param::from_mapped_value(id, tensor.into_int(), mapper)
    }
    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = (self.map)(AnyTensor::from_bool(tensor));
        Param::from_mapped_value(id, tensor.into_bool(), mapper)
    }
}

macro_rules! tuple_state {
    ($($name:ident . $index:tt),*) => {
        impl<$($name: StepState),*> StepState for ($($name,)*) {
            fn visit_state(&self, visit: &mut dyn FnMut(AnyTensor)) {
                $(self.$index.visit_state(visit);)*
            }
            fn map_state(self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
                ($(self.$index.map_state(map),)*)
            }
            fn visit_host_fields(&self, field: &mut dyn FnMut(HostField)) {
                $(self.$index.visit_host_fields(field);)*
            }
            fn settle(&self) {
                $(self.$index.settle();)*
            }
            fn independent(&self) -> Self {
                ($(self.$index.independent(),)*)
            }
        }
    };
}

tuple_state!(A.0, B.1);
tuple_state!(A.0, B.1, C.2);

/// The tensors of `state`, in order, live values.
pub(crate) fn tensors_of<S: StepState>(state: &S) -> Vec<AnyTensor> {
    state.settle();
    let mut tensors = Vec::new();
    state.visit_state(&mut |tensor| tensors.push(tensor));
    tensors
}

/// `state` with its tensors replaced by `tensors`, in order, each with the autodiff association of the one it
/// replaces.
pub(crate) fn with_tensors<S: StepState>(state: S, tensors: &[AnyTensor]) -> S {
    // Statistics parked by a step that was given up must not surface over the ones put in here.
    state.settle();
    let mut next = tensors.iter();
    state.map_state(&mut |old| match next.next() {
        Some(new) => AnyTensor::lifted_like(new.clone().inner(), &old),
        None => old,
    })
}
