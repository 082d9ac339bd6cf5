//! The state of one parameter's optimizer, in the record format of Burn's optimizer of the same name.
//!
//! A `ModuleOptimizer` keeps the states of its parameters to itself. What it does with them in public is to flatten each
//! into a record and to build each from one, through the state's own [`RecordState`]. So that is where the engine gets
//! hold of the live tensors: while a [`Hook`] is set on the calling thread, flattening hands out the state itself and
//! building takes it from the hook.

use crate::tensor::AnyTensor;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::{
    GradientsParams, LearningRate, ModuleOptimizer, Optimizer, OptimizerRecord, RecordState,
    StateSink, StateSource,
};
use burn::tensor::{Device, Tensor, TensorData};
use core::marker::PhantomData;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};

/// Names and kinds of what one optimizer's state holds.
pub trait Layout: Send + Sync + 'static {
    /// Where the record keeps the step count, for optimizers that have one.
    const TIME: Option<&'static str>;
    /// The tensors, as paths in the record.
    const LEAVES: &'static [Leaf];
}

/// One tensor of an optimizer's state.
#[derive(Debug, Clone, Copy)]
pub struct Leaf {
    /// Path in the record, below the parameter.
    pub name: &'static str,
    /// What a record without it is: that of another optimizer.
    pub required: bool,
    /// The leaf whose values a record repeats under this name when the state does not hold it.
    pub alias: Option<&'static str>,
}

impl Leaf {
    /// A tensor that every state has.
    pub const fn required(name: &'static str) -> Self {
        Self {
            name,
            required: true,
            alias: None,
        }
    }
    /// A tensor that some configurations have.
    pub const fn optional(name: &'static str) -> Self {
        Self {
            name,
            required: false,
            alias: None,
        }
    }
    /// A tensor that Burn's record has in any case: where the state does not hold it, it repeats `of`.
    pub const fn alias(name: &'static str, of: &'static str) -> Self {
        Self {
            name,
            required: true,
            alias: Some(of),
        }
    }
}

/// Steps taken of one parameter.
#[derive(Debug, Clone)]
#[expect(
    clippy::large_enum_variant,
    reason = "one beside tensors as large, for each parameter"
)]
pub(crate) enum Steps {
    /// Counted on the host.
    Host(u64),
    /// Counted on the device, `[1]` `f32`: whether a step counts is decided there (loss scaling).
    Device(Tensor<1>),
}

/// What a state holds, whatever its optimizer and rank.
#[derive(Debug, Clone)]
pub(crate) struct StateData {
    /// Tells this counter from others.
    pub clock: u64,
    /// Whether the optimizer reads the count.
    pub timed: bool,
    pub steps: Steps,
    pub leaves: Vec<(&'static str, AnyTensor)>,
}

fn next_clock() -> u64 {
    static CLOCKS: AtomicU64 = AtomicU64::new(1);
    CLOCKS.fetch_add(1, Ordering::Relaxed)
}

impl StateData {
    pub fn new<L: Layout>(steps: Steps, leaves: Vec<(&'static str, AnyTensor)>) -> Self {
        Self {
            clock: next_clock(),
            timed: L::TIME.is_some(),
            steps,
            leaves,
        }
    }

    /// A counter told from every other.
    pub fn renumber(&mut self) {
        self.clock = next_clock();
    }

    /// Every tensor, the device's step count included.
    pub fn tensors(&self) -> Vec<AnyTensor> {
        let steps = match &self.steps {
            Steps::Host(_) => None,
            Steps::Device(steps) => Some(AnyTensor::from_float(steps.clone())),
        };
        let leaves = self.leaves.iter().map(|(_, tensor)| tensor.clone());
        steps.into_iter().chain(leaves).collect()
    }

    /// Names of [`tensors`](Self::tensors).
    pub fn names(&self) -> Vec<&'static str> {
        let steps = match &self.steps {
            Steps::Host(_) => None,
            Steps::Device(_) => Some("steps"),
        };
        let leaves = self.leaves.iter().map(|(name, _)| *name);
        steps.into_iter().chain(leaves).collect()
    }

    /// Replace every tensor, in the order of [`tensors`](Self::tensors).
    pub fn map(&mut self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) {
        if let Steps::Device(steps) = &mut self.steps {
            *steps = map(AnyTensor::from_float(steps.clone())).into_float();
        }
        for (_, tensor) in &mut self.leaves {
            *tensor = map(tensor.clone());
        }
    }
}

/// The state that an optimizer of [`optim`](crate::optim) keeps for one parameter of rank `D`.
///
/// Its record is that of Burn's optimizer of the same name, step count included.
pub struct OptimizerState<const D: usize, L> {
    pub(crate) data: StateData,
    layout: PhantomData<fn() -> L>,
}

impl<const D: usize, L> OptimizerState<D, L> {
    pub(crate) fn new(data: StateData) -> Self {
        Self {
            data,
            layout: PhantomData,
        }
    }

    #[expect(clippy::wrong_self_convention, reason = "as Burn's states")]
    pub(crate) fn to_device(mut self, device: &Device) -> Self {
        self.data
            .map(&mut |tensor| AnyTensor::from_float(tensor.into_float::<D>().to_device(device)));
        self
    }
}

impl<const D: usize, L> Clone for OptimizerState<D, L> {
    fn clone(&self) -> Self {
        Self::new(self.data.clone())
    }
}

impl<const D: usize, L> core::fmt::Debug for OptimizerState<D, L> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("OptimizerState")
            .field("steps", &self.data.steps)
            .field("tensors", &self.data.names())
            .finish()
    }
}

impl<const D: usize, L: Layout> RecordState for OptimizerState<D, L> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        if hook_collects(prefix, &self.data) {
            return;
        }
        let steps = match &self.data.steps {
            Steps::Host(steps) => *steps,
            Steps::Device(steps) => steps.clone().into_scalar::<f32>() as u64,
        };
        if steps == 0 {
            // Every step so far was skipped: there is no state yet.
            return;
        }
        let leaf = |name: &str| {
            let found = self.data.leaves.iter().find(|(leaf, _)| *leaf == name);
            found.map(|(_, tensor)| tensor.clone().into_float::<D>().into_data())
        };
        for spec in L::LEAVES {
            if let Some(data) = leaf(spec.name).or_else(|| spec.alias.and_then(leaf)) {
                out.push_tensor(prefix, spec.name, data);
            }
        }
        if let Some(time) = L::TIME {
            out.push_scalar(prefix, time, (steps as usize).into());
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        match hook_builds(prefix) {
            Built::Unhooked => {}
            Built::Nothing => return None,
            Built::State(data) => return Some(Self::new(*data)),
        }
        let mut found = Vec::new();
        for spec in L::LEAVES {
            match src.take_tensor(prefix, spec.name) {
                Some(data) => found.push((spec, data)),
                None if spec.required => return None,
                None => {}
            }
        }
        // A leaf that only repeats another one is not held: flattening repeats it again.
        let repeats = |spec: &Leaf, data: &TensorData| {
            found.iter().any(|(of, original)| {
                spec.alias == Some(of.name)
                    && data.shape() == original.shape()
                    && data.dtype() == original.dtype()
                    && data.as_bytes() == original.as_bytes()
            })
        };
        let held = |(spec, data): &(&Leaf, TensorData)| {
            let tensor = || AnyTensor::from_float(Tensor::<D>::from_data(data.clone(), device));
            (!repeats(spec, data)).then(|| (spec.name, tensor()))
        };
        let leaves = found.iter().filter_map(held).collect();
        let steps = match L::TIME {
            Some(time) => usize::try_from(src.take_scalar(prefix, time)?).ok()? as u64,
            None => 1,
        };
        Some(Self::new(StateData::new::<L>(Steps::Host(steps), leaves)))
    }
}

enum Hook {
    /// Flattening hands out states.
    Collect(BTreeMap<u64, StateData>),
    /// Building takes states from here.
    Inject(BTreeMap<u64, StateData>),
    /// Building notes for which parameters it was asked, and builds nothing.
    Probe(BTreeSet<u64>),
}

enum Built {
    Unhooked,
    Nothing,
    State(Box<StateData>),
}

thread_local! {
    static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
}

fn hook_collects(prefix: &str, data: &StateData) -> bool {
    HOOK.with_borrow_mut(|hook| match (hook, prefix.parse()) {
        (Some(Hook::Collect(states)), Ok(id)) => {
            states.insert(id, data.clone());
            true
        }
        _ => false,
    })
}

fn hook_builds(prefix: &str) -> Built {
    HOOK.with_borrow_mut(|hook| match (hook, prefix.parse::<u64>()) {
        (Some(Hook::Inject(states)), Ok(id)) => match states.remove(&id) {
            Some(data) => Built::State(Box::new(data)),
            None => Built::Nothing,
        },
        (Some(Hook::Probe(asked)), Ok(id)) => {
            asked.insert(id);
            Built::Nothing
        }
        _ => Built::Unhooked,
    })
}

/// Run `f` with `hook` set; the hook as `f` left it.
fn hooked<R>(hook: Hook, f: impl FnOnce() -> R) -> (R, Option<Hook>) {
    struct Unset;
    impl Drop for Unset {
        fn drop(&mut self) {
            HOOK.set(None);
        }
    }
    HOOK.set(Some(hook));
    let unset = Unset;
    let result = f();
    let left = HOOK.take();
    drop(unset);
    (result, left)
}

/// The live states that `optimizer` keeps, by parameter. Reads nothing from the device, provided that every state is one
/// of ours.
pub(crate) fn states(optimizer: &ModuleOptimizer) -> BTreeMap<u64, StateData> {
    let (record, left) = hooked(Hook::Collect(BTreeMap::new()), || optimizer.to_record());
    drop(record);
    match left {
        Some(Hook::Collect(states)) => states,
        _ => BTreeMap::new(),
    }
}

/// `optimizer` with the states that `change` makes of its own.
pub(crate) fn with_states(
    optimizer: ModuleOptimizer,
    change: impl FnOnce(&mut BTreeMap<u64, StateData>),
) -> ModuleOptimizer {
    let (record, left) = hooked(Hook::Collect(BTreeMap::new()), || optimizer.to_record());
    let Some(Hook::Collect(mut states)) = left else {
        return optimizer;
    };
    change(&mut states);
    hooked(Hook::Inject(states), || optimizer.load_record(record)).0
}

/// The parameters of `model`, with their paths, in the order of its visit. One that is shared has its first path, by which
/// Burn's optimizers and schedules know it too.
pub(crate) fn parameters<M: Module>(model: &M) -> Vec<(ParamId, String)> {
    struct Paths {
        path: Vec<String>,
        seen: HashSet<ParamId>,
        found: Vec<(ParamId, String)>,
    }
    impl ModuleVisitor for Paths {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.to_string());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.seen.insert(param.id) {
                self.found.push((param.id, self.path.join(".")));
            }
        }
    }
    let mut paths = Paths {
        path: Vec::new(),
        seen: HashSet::new(),
        found: Vec::new(),
    };
    model.visit(&mut paths);
    paths.found
}

/// A record that names every parameter of `model`, its rank and its path, without a state. Runs nothing on the device.
pub(crate) fn record_of_all<M: Module>(model: &M) -> OptimizerRecord {
    // It comes from an optimizer that has met them all.
    let model = model.valid().train();
    let mut all = ModuleOptimizer::from(Bystander);
    let mut grads = Everything(GradientsParams::new());
    model.visit(&mut grads);
    drop(all.step(0.0, model, grads.0));
    all.to_record()
}

/// Run `load`, which loads a record that names every parameter, so that the optimizers of ours which it loads take their
/// states from `states`.
#[cfg(feature = "train")]
pub(crate) fn inject<R>(states: BTreeMap<u64, StateData>, load: impl FnOnce() -> R) -> R {
    hooked(Hook::Inject(states), load).0
}

/// Which parameters of `model` an optimizer of this crate updates. Runs nothing on the device.
pub(crate) fn ours<M: Module>(optimizer: &ModuleOptimizer, model: &M) -> BTreeSet<u64> {
    let record = record_of_all(model);
    let probe = || drop(optimizer.clone().load_record(record));
    match hooked(Hook::Probe(BTreeSet::new()), probe).1 {
        Some(Hook::Probe(asked)) => asked,
        _ => BTreeSet::new(),
    }
}

/// The rates that arrive at an optimizer when `optimize` is called on a copy of `model`, with an optimizer that changes
/// nothing and each parameter as its own gradient.
#[cfg(feature = "train")]
pub(crate) fn arriving_rates<M: Module>(
    model: &M,
    optimize: impl FnOnce(M, &mut ModuleOptimizer, GradientsParams) -> M,
) -> Vec<f64> {
    let model = model.valid().train();
    let mut grads = Everything(GradientsParams::new());
    model.visit(&mut grads);
    let listener = Listener::default();
    let mut optimizer = ModuleOptimizer::from(listener.clone());
    drop(optimize(model, &mut optimizer, grads.0));
    let heard = listener.0.lock();
    heard
        .unwrap_or_else(|poisoned| poisoned.into_inner())
        .clone()
}

/// An optimizer that changes nothing and notes the rates it gets.
#[cfg(feature = "train")]
#[derive(Clone, Default)]
struct Listener(std::sync::Arc<std::sync::Mutex<Vec<f64>>>);

#[cfg(feature = "train")]
impl Optimizer for Listener {
    type State<const D: usize> = ();
    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        _grad: Tensor<D>,
        _state: Option<()>,
    ) -> (Tensor<D>, Option<()>) {
        let heard = self.0.lock();
        heard
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .push(lr);
        (tensor, None)
    }
    fn to_device<const D: usize>(state: (), _device: &Device) {
        state
    }
}

/// Takes each parameter for its own gradient.
struct Everything(GradientsParams);

impl ModuleVisitor for Everything {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.register(param.id, param.val().inner());
    }
}

/// An optimizer that changes nothing and has an empty state for each parameter it meets.
#[derive(Clone)]
struct Bystander;

impl Optimizer for Bystander {
    type State<const D: usize> = ();
    fn step<const D: usize>(
        &self,
        _lr: LearningRate,
        tensor: Tensor<D>,
        _grad: Tensor<D>,
        _state: Option<()>,
    ) -> (Tensor<D>, Option<()>) {
        (tensor, Some(()))
    }
    fn to_device<const D: usize>(state: (), _device: &Device) {
        state
    }
}
