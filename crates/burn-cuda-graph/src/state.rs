//! The state that a step updates: model, optimizer, whatever else it carries from one step to the next.

use crate::context::UpdateRate;
use crate::error::FallbackReason;
use crate::optim::{self, StateData, Steps};
use crate::shape_key::HostField;
use crate::tensor::AnyTensor;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Bool, DType, Int, Tensor};
use std::collections::HashSet;
#[cfg(feature = "cubecl-backend")]
use std::collections::{HashMap, VecDeque};

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

    /// Hand the name of every tensor to `visit`, in the order of [`visit_state`](Self::visit_state), for messages.
    /// Default: none, and messages give numbers.
    fn visit_names(&self, visit: &mut dyn FnMut(String)) {
        let _ = visit;
    }

    /// The parameters that learning rates are given for, with their paths in the module. Default: none, and the rate is to
    /// be one number.
    fn parameters(&self) -> Vec<(ParamId, String)> {
        Vec::new()
    }

    /// Hand every host counter that a step advances by a fixed amount to `visit`: a number that tells it from the
    /// others, and its value; `None` for a part that counts nothing and is only told from others. Default: none.
    fn visit_clocks(&self, visit: &mut dyn FnMut(u64, Option<u64>)) {
        let _ = visit;
    }

    /// Give counters that share a number (one part was cloned from another) numbers of their own. `seen` are those met so
    /// far. Default: nothing.
    fn separate_clocks(&mut self, seen: &mut HashSet<u64>) {
        let _ = seen;
    }

    /// Advance every counter of [`visit_clocks`](Self::visit_clocks) by what `by` answers for its number: replays ran,
    /// which call no closure. Default: nothing.
    fn advance_clocks(&mut self, by: &dyn Fn(u64) -> u64) {
        let _ = by;
    }

    /// What keeps any step over this state from being a graph. Default: nothing.
    fn blocked(&self) -> Option<FallbackReason> {
        None
    }

    /// The name of what to import in place of a part whose scalars or tensors are out of reach. Default: none.
    fn replacement(&self) -> Option<String> {
        None
    }

    /// Bring tensors that lag behind up to date, so that [`visit_state`](Self::visit_state) shows live values.
    /// Default: nothing lags.
    fn settle(&self) {}

    /// Keep what undoes a step, until the step begins an update: an update that nobody else holds the old values of is made in
    /// place. `false`: nothing is kept, and who runs the step keeps the whole state. Default: `false`.
    #[doc(hidden)]
    fn begin(&mut self) -> bool {
        false
    }

    /// The step is over: let go of what undoes it.
    #[doc(hidden)]
    fn end(&mut self) {}

    /// Put back what the step found, unless it began an update since.
    #[doc(hidden)]
    fn undo(&mut self) {}

    /// Whether an update that panicked took the state along.
    #[doc(hidden)]
    fn is_lost(&self) -> bool {
        false
    }

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
/// With an optimizer of [`optim`](crate::optim), the tensors it keeps (momentum, Adam's moments) and its step counts are
/// part of the state. Those of Burn's own optimizers are private to them, so a stock one that keeps any, or whose scalars
/// move, is refused when a step is to be recorded, with the name of the one to import; stock SGD without momentum keeps
/// none and replays.
#[derive(Clone)]
pub struct Training<M> {
    /// `None` while an update has it, and for good after one that panicked.
    model: Option<M>,
    optimizer: ModuleOptimizer,
    ownership: Ownership,
    accumulated: Option<Accumulated>,
    /// What undoes the step that runs; `None` once it began an update.
    before: Option<Box<Before<M>>>,
}

/// A training from before a step, and the model's tensors, since statistics in its clone are those of the model.
#[derive(Clone)]
struct Before<M> {
    training: Training<M>,
    tensors: Vec<AnyTensor>,
}

/// Gradients summed over micro-batches.
#[derive(Debug, Clone)]
struct Accumulated {
    /// 1 where the next gradients begin a new sum: `[1]` `f32`. On the device, so that one recording serves the first
    /// micro-batch and the others.
    fresh: Tensor<1>,
    sums: Vec<(ParamId, AnyTensor)>,
}

/// Whose optimizers update the parameters of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ownership {
    Ours,
    Stock,
    Mixed,
}

impl Ownership {
    fn of<M: Module>(optimizer: &ModuleOptimizer, model: &M) -> Self {
        let ours = optim::ours(optimizer, model);
        let parameters = optim::parameters(model);
        match parameters
            .iter()
            .filter(|(id, _)| ours.contains(&id.val()))
            .count()
        {
            0 => Ownership::Stock,
            count if count == parameters.len() => Ownership::Ours,
            _ => Ownership::Mixed,
        }
    }
}

impl<M: core::fmt::Debug> core::fmt::Debug for Training<M> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Training")
            .field("model", &self.model)
            .field("ownership", &self.ownership)
            .finish_non_exhaustive()
    }
}

impl<M: Module> Training<M> {
    /// A model on an autodiff device, and its optimizer. The optimizer may hold state, from a record or from earlier
    /// steps; it is moved to the model's device.
    pub fn new(model: M, optimizer: ModuleOptimizer) -> Self {
        let ownership = Ownership::of(&optimizer, &model);
        let device = model.devices().first().map(|device| device.clone().inner());
        let optimizer = match (ownership, device) {
            (Ownership::Ours, Some(device)) => optim::with_states(optimizer, |states| {
                for state in states.values_mut() {
                    state.map(&mut |tensor| tensor.to_device(&device));
                }
            }),
            _ => optimizer,
        };
        Self {
            model: Some(model),
            optimizer,
            ownership,
            accumulated: None,
            before: None,
        }
    }

    /// Let go of what the update to come replaces, and have the model by value: what nobody else holds is updated in place.
    fn begin_update(&mut self) -> M {
        self.before = None;
        self.model.take().unwrap_or_else(|| lost())
    }

    /// Whether every parameter is updated by an optimizer of [`optim`](crate::optim).
    pub(crate) fn is_ours(&self) -> bool {
        self.ownership == Ownership::Ours
    }

    /// The model.
    ///
    /// # Panics
    ///
    /// After a panic in an update, which took the model along.
    pub fn model(&self) -> &M {
        self.model.as_ref().unwrap_or_else(|| lost())
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &ModuleOptimizer {
        &self.optimizer
    }

    /// Update the model: `model = optimizer.step(lr, model, grads)`.
    ///
    /// The model goes through the optimizer by value, as in plain Burn, so that what nobody else holds is updated in place. A
    /// panic in the optimizer takes it along.
    pub fn optimize(&mut self, lr: impl Into<UpdateRate>, grads: GradientsParams) {
        let lr = lr.into().tracked();
        let model = self.begin_update();
        #[cfg(feature = "cubecl-backend")]
        {
            let (model, updates) = optim::collecting(|| self.optimizer.step(lr, model, grads));
            self.model = Some(model);
            if !updates.is_empty() {
                self.make(updates);
            }
        }
        #[cfg(not(feature = "cubecl-backend"))]
        {
            self.model = Some(self.optimizer.step(lr, model, grads));
        }
    }

    /// Make the updates that the optimizer put off, and put their results where it left the gradients.
    #[cfg(feature = "cubecl-backend")]
    fn make(&mut self, updates: Vec<optim::Collected>) {
        let (mut waiting, mut entries) = (Vec::new(), Vec::new());
        for update in updates {
            waiting.push((update.placeholder, update.clock));
            entries.push(update.entry);
        }
        // Parameters that share a gradient are met in the same order again.
        let mut parameters: HashMap<u64, VecDeque<AnyTensor>> = HashMap::new();
        let mut leaves = HashMap::new();
        for ((placeholder, clock), made) in waiting.into_iter().zip(crate::multi::update(entries)) {
            parameters
                .entry(placeholder)
                .or_default()
                .push_back(made.param);
            leaves.insert(clock, made.leaves);
        }
        let mut fill = |old: AnyTensor| {
            let made = (parameters.get_mut(&crate::pool::id(&old))).and_then(VecDeque::pop_front);
            match made {
                Some(made) => AnyTensor::lifted_like(made, &old),
                None => old,
            }
        };
        let model = self.begin_update();
        self.model = Some(model.map(&mut Mapper { map: &mut fill }));
        self.optimizer = optim::with_states(self.optimizer.clone(), |states| {
            for state in states.values_mut() {
                let made = leaves.remove(&state.clock).into_iter().flatten();
                for ((_, leaf), made) in state.leaves.iter_mut().zip(made) {
                    *leaf = made;
                }
            }
        });
    }

    /// Update the model with a function of it and the optimizer, for steps that do more than
    /// [`optimize`](Self::optimize).
    pub fn update(&mut self, update: impl FnOnce(M, &mut ModuleOptimizer) -> M) {
        let model = self.begin_update();
        self.model = Some(update(model, &mut self.optimizer));
    }

    /// Add `grads` to those of the micro-batches before, for a later [`apply`](Self::apply). Sums, as Burn's
    /// `GradientsAccumulator` does: divide the loss by the number of micro-batches for their mean.
    ///
    /// The sums are part of the state, so that a step which accumulates and one which applies are two recordings over the
    /// same buffers.
    ///
    /// # Panics
    ///
    /// When other parameters have gradients than in the first micro-batch: a sum could not tell a parameter without a
    /// gradient from one whose gradient is zero.
    pub fn accumulate(&mut self, grads: GradientsParams) {
        self.before = None;
        let (_, new) = optim::gradients::take(self.model(), grads);
        let Some(old) = &mut self.accumulated else {
            let Some((_, first)) = new.first() else {
                return;
            };
            self.accumulated = Some(Accumulated {
                fresh: Tensor::zeros([1], (&first.device(), DType::F32)),
                sums: new,
            });
            return;
        };
        let ids =
            |sums: &[(ParamId, AnyTensor)]| sums.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        let (before, now) = (ids(&old.sums), ids(&new));
        assert!(
            before == now,
            "accumulate: {} parameters have gradients in this micro-batch, {} had in the first, or others: let every \
             micro-batch reach the same parameters",
            now.len(),
            before.len()
        );
        let fresh = old.fresh.clone().greater_scalar(0.5);
        for ((_, sum), (_, grad)) in old.sums.iter_mut().zip(new) {
            *sum = sum.accumulate(grad, &fresh);
        }
        old.fresh = old.fresh.zeros_like();
    }

    /// The accumulated gradients; the next micro-batch begins anew. For steps that clip or scale them before
    /// [`optimize`](Self::optimize); others call [`apply`](Self::apply).
    ///
    /// # Panics
    ///
    /// When nothing was ever accumulated.
    pub fn take_accumulated(&mut self) -> GradientsParams {
        let Some(old) = &mut self.accumulated else {
            panic!("take_accumulated: no gradients were accumulated; call accumulate before");
        };
        old.fresh = old.fresh.ones_like();
        let sums = old.sums.clone();
        optim::gradients::give(self.model(), &sums, GradientsParams::new())
    }

    /// Update the model with the accumulated gradients; the next micro-batch begins anew. Called twice with no micro-batch
    /// in between, it applies the same gradients twice.
    ///
    /// # Panics
    ///
    /// When nothing was ever accumulated.
    pub fn apply(&mut self, lr: impl Into<UpdateRate>) {
        let grads = self.take_accumulated();
        self.optimize(lr, grads);
    }

    /// Forget what was [accumulated](Self::accumulate) and not applied.
    pub fn without_accumulated(mut self) -> Self {
        self.accumulated = None;
        self
    }

    /// The model, by value.
    ///
    /// # Panics
    ///
    /// As [`model`](Self::model).
    pub fn into_model(self) -> M {
        self.into_parts().0
    }

    /// The model and the optimizer.
    ///
    /// # Panics
    ///
    /// As [`model`](Self::model).
    pub fn into_parts(self) -> (M, ModuleOptimizer) {
        (self.model.unwrap_or_else(|| lost()), self.optimizer)
    }
}

impl<M: Module> StepState for Training<M> {
    fn visit_state(&self, visit: &mut dyn FnMut(AnyTensor)) {
        self.model().visit(&mut Visitor { visit });
        if self.ownership == Ownership::Ours {
            let states = optim::states(&self.optimizer);
            states
                .values()
                .flat_map(StateData::tensors)
                .for_each(&mut *visit);
        }
        if let Some(accumulated) = &self.accumulated {
            visit(AnyTensor::from_float(accumulated.fresh.clone()));
            for (_, sum) in &accumulated.sums {
                visit(sum.clone());
            }
        }
    }

    fn map_state(self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        let model = self.model.unwrap_or_else(|| lost());
        let model = Some(model.map(&mut Mapper { map }));
        let optimizer = match self.ownership {
            Ownership::Ours => optim::with_states(self.optimizer, |states| {
                states.values_mut().for_each(|state| state.map(map));
            }),
            _ => self.optimizer,
        };
        let accumulated = self.accumulated.map(|old| Accumulated {
            fresh: map(AnyTensor::from_float(old.fresh)).into_float(),
            sums: (old.sums.into_iter())
                .map(|(id, sum)| (id, map(sum)))
                .collect(),
        });
        Self {
            model,
            optimizer,
            ownership: self.ownership,
            accumulated,
            before: None,
        }
    }

    fn visit_names(&self, visit: &mut dyn FnMut(String)) {
        let parameters = optim::parameters(self.model());
        let path = |id: u64| {
            let known = parameters.iter().find(|(known, _)| known.val() == id);
            known.map_or_else(|| id.to_string(), |(_, path)| path.clone())
        };
        self.model().visit(&mut Names {
            path: Vec::new(),
            visit: &mut *visit,
        });
        if self.ownership == Ownership::Ours {
            for (id, state) in optim::states(&self.optimizer) {
                let path = path(id);
                for name in state.names() {
                    visit(format!("{name} of {path}"));
                }
            }
        }
        if let Some(accumulated) = &self.accumulated {
            visit("whether accumulation begins anew".into());
            for (id, _) in &accumulated.sums {
                visit(format!("accumulated gradient of {}", path(id.val())));
            }
        }
    }

    fn parameters(&self) -> Vec<(ParamId, String)> {
        optim::parameters(self.model())
    }

    fn visit_clocks(&self, visit: &mut dyn FnMut(u64, Option<u64>)) {
        if self.ownership == Ownership::Ours {
            for state in optim::states(&self.optimizer).values() {
                let steps = match (state.timed, &state.steps) {
                    (true, Steps::Host(steps)) => Some(*steps),
                    _ => None,
                };
                visit(state.clock, steps);
            }
        }
    }

    fn separate_clocks(&mut self, seen: &mut HashSet<u64>) {
        if self.ownership != Ownership::Ours {
            return;
        }
        let mut clocks: Vec<u64> = optim::states(&self.optimizer)
            .values()
            .map(|state| state.clock)
            .collect();
        if clocks.iter().any(|clock| seen.contains(clock)) {
            self.optimizer = optim::with_states(self.optimizer.clone(), |states| {
                for state in states.values_mut() {
                    if seen.contains(&state.clock) {
                        state.renumber();
                    }
                }
                clocks = states.values().map(|state| state.clock).collect();
            });
        }
        seen.extend(clocks);
    }

    fn advance_clocks(&mut self, by: &dyn Fn(u64) -> u64) {
        if self.ownership == Ownership::Ours {
            self.optimizer = optim::with_states(self.optimizer.clone(), |states| {
                for state in states.values_mut() {
                    if let Steps::Host(steps) = &mut state.steps {
                        *steps += by(state.clock);
                    }
                }
            });
        }
    }

    fn blocked(&self) -> Option<FallbackReason> {
        (self.ownership == Ownership::Mixed).then(|| FallbackReason::StockOptimizer {
            replacement: "burn_cuda_graph::optim, for every parameter group".into(),
            detail: "some groups have optimizers of burn_cuda_graph::optim, others have Burn's"
                .into(),
        })
    }

    /// Reads the optimizer's tensors.
    fn replacement(&self) -> Option<String> {
        match self.ownership {
            Ownership::Stock => optim::replacement(&self.optimizer).map(String::from),
            _ => None,
        }
    }

    /// BatchNorm's `RunningState` shows its value one update late: `update` parks the new statistics under the
    /// calling thread's id, and only a later read moves them into the value that visitors see. `valid` is the one
    /// call that every module has and that moves them.
    fn settle(&self) {
        drop(self.model().valid());
    }

    /// A clone of a model shares the cells of its `RunningState`s; going to validation and back makes new ones.
    fn independent(&self) -> Self {
        Self {
            model: Some(self.model().valid().train()),
            optimizer: self.optimizer.clone(),
            ownership: self.ownership,
            accumulated: self.accumulated.clone(),
            before: None,
        }
    }

    fn begin(&mut self) -> bool {
        self.before = None;
        self.settle();
        let mut tensors = Vec::new();
        let visit = &mut |tensor| tensors.push(tensor);
        self.model().visit(&mut Visitor { visit });
        let training = self.clone();
        self.before = Some(Box::new(Before { training, tensors }));
        true
    }

    fn end(&mut self) {
        self.before = None;
    }

    fn undo(&mut self) {
        if let Some(before) = self.before.take() {
            let Before { training, tensors } = *before;
            *self = training;
            self.settle();
            let mut tensors = tensors.into_iter();
            let map = &mut |old: AnyTensor| match tensors.next() {
                Some(tensor) => AnyTensor::lifted_like(tensor.inner(), &old),
                None => old,
            };
            self.model = (self.model.take()).map(|model| model.map(&mut Mapper { map }));
        }
    }

    fn is_lost(&self) -> bool {
        self.model.is_none()
    }
}

fn lost() -> ! {
    panic!("a panic in an update took the model along: make the training anew, from a checkpoint")
}

struct Names<'a> {
    path: Vec<String>,
    visit: &'a mut dyn FnMut(String),
}

impl Names<'_> {
    fn name(&mut self) {
        (self.visit)(self.path.join("."));
    }
}

impl ModuleVisitor for Names<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }
    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        self.name();
    }
    fn visit_int<const D: usize>(&mut self, _param: &Param<Tensor<D, Int>>) {
        self.name();
    }
    fn visit_bool<const D: usize>(&mut self, _param: &Param<Tensor<D, Bool>>) {
        self.name();
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

/// A model alone, in validation mode, for functions that read it: inference, or the evaluation of a model that nothing
/// trains here. To evaluate one that is being trained, read its [`Training`].
#[derive(Debug, Clone)]
pub struct Inference<M> {
    model: M,
}

impl<M: Module> Inference<M> {
    /// `model`, put into validation mode ([`Module::valid`]): without autodiff, BatchNorm and dropout as at inference.
    pub fn new(model: M) -> Self {
        Self {
            model: model.valid(),
        }
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The model, by value.
    pub fn into_model(self) -> M {
        self.model
    }
}

impl<M: Module> StepState for Inference<M> {
    fn visit_state(&self, visit: &mut dyn FnMut(AnyTensor)) {
        self.model.visit(&mut Visitor { visit });
    }
    fn map_state(self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        Self {
            model: self.model.map(&mut Mapper { map }),
        }
    }
    fn visit_names(&self, visit: &mut dyn FnMut(String)) {
        self.model.visit(&mut Names {
            path: Vec::new(),
            visit,
        });
    }

    /// A clone of a model shares the cells of its `RunningState`s; going to validation makes new ones.
    fn independent(&self) -> Self {
        Self::new(self.model.clone())
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
            fn visit_names(&self, visit: &mut dyn FnMut(String)) {
                $({
                    let place = $index;
                    self.$index.visit_names(&mut |name| visit(format!("{place}: {name}")));
                })*
            }
            fn parameters(&self) -> Vec<(ParamId, String)> {
                let mut parameters = Vec::new();
                $(parameters.extend(self.$index.parameters());)*
                parameters
            }
            fn visit_clocks(&self, visit: &mut dyn FnMut(u64, Option<u64>)) {
                $(self.$index.visit_clocks(visit);)*
            }
            fn separate_clocks(&mut self, seen: &mut HashSet<u64>) {
                $(self.$index.separate_clocks(seen);)*
            }
            fn advance_clocks(&mut self, by: &dyn Fn(u64) -> u64) {
                $(self.$index.advance_clocks(by);)*
            }
            fn blocked(&self) -> Option<FallbackReason> {
                None$(.or_else(|| self.$index.blocked()))*
            }
            fn replacement(&self) -> Option<String> {
                None$(.or_else(|| self.$index.replacement()))*
            }
            fn settle(&self) {
                $(self.$index.settle();)*
            }
            fn independent(&self) -> Self {
                ($(self.$index.independent(),)*)
            }
            fn begin(&mut self) -> bool {
                let begun = true $(& self.$index.begin())*;
                if !begun {
                    self.end();
                }
                begun
            }
            fn end(&mut self) {
                $(self.$index.end();)*
            }
            fn undo(&mut self) {
                $(self.$index.undo();)*
            }
            fn is_lost(&self) -> bool {
                false $(|| self.$index.is_lost())*
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
