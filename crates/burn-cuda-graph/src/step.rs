//! The one entry: a training step that records itself.

use crate::config::GraphConfig;
use crate::context::{LearningRates, Rates, StepRate};
use crate::engine::Engine;
use crate::error::{FallbackReason, StepError};
use crate::host::{Fingerprint, Host, HostCore, Sealed};
use crate::random;
use crate::report::Report;
use crate::shape_key::ShapeKey;
use crate::state::{self, StepState, Training};
use crate::support::{Support, support};
use crate::tensor::AnyTensor;
use crate::tree::{self, TensorTree};
use burn::module::{Module, ParamId};
use burn::tensor::{DType, Device};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// How a step ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum StepPath {
    /// Eagerly, as plain Burn would have run it.
    Eager(FallbackReason),
    /// It was recorded, and executed by the first replay of its graph.
    Recorded,
    /// As a replay of a graph recorded before.
    Replayed,
}

impl StepPath {
    /// Whether a graph executed the step.
    pub fn is_graph(&self) -> bool {
        !matches!(self, StepPath::Eager(_))
    }
}

impl core::fmt::Display for StepPath {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            StepPath::Eager(reason) => write!(f, "eager: {reason}"),
            StepPath::Recorded => write!(f, "recorded"),
            StepPath::Replayed => write!(f, "replayed"),
        }
    }
}

/// What a step returned, and how it ran.
#[derive(Debug, Clone)]
pub struct StepOutput<O> {
    /// What the closure returned. Tensors are the caller's: a later replay does not change them. From a replay they
    /// are leaves without a tape, from an eager step they are what the closure made.
    pub output: O,
    /// How the step ran.
    pub path: StepPath,
}

/// A training step that records itself into a graph once its shapes and operations are stable.
///
/// Each call of [`run`](Self::run) takes exactly one step of the user's closure on the user's batch, and leaves
/// exactly the state that the eager step would have left. The first steps of a shape key run eagerly (the warm-up);
/// then one step is recorded, executed by its graph's first replay; later ones are replays. A step that cannot be
/// replayed runs eagerly, with its reason in [`StepOutput::path`].
///
/// The closure is `Fn(&mut S, B, StepRate) -> O`: it updates the state from a batch at a learning rate. During a replay it
/// is not called, so whatever it does besides tensor operations on its arguments (counters, logging, reads) does
/// not happen then. `Fn`, not `FnMut`: mutable host state in it would freeze.
///
/// One thread at a time drives a step (`run` takes `&mut self`). It works on the calling thread's stream; called from
/// another thread than before, it drops its graphs and warms up anew. A step run inside another step's closure runs
/// eagerly.
///
/// When a window is refused, the closure has run twice for that step: once for the window and once eagerly. Tensors that
/// it stashes outside of the state and the output are the graph's own, and change at every replay.
pub struct GraphedStep<S, B, O, F> {
    state: S,
    step: F,
    device: Device,
    support: Support,
    /// What keeps any step over this state from being a graph.
    blocked: Option<FallbackReason>,
    // Before `core`: graphs go before the buffers they replay against.
    engine: Engine<Fingerprint, Sealed<O>>,
    core: HostCore,
    /// The parameters that rates are given for.
    parameters: Vec<(ParamId, String)>,
    /// Keys whose steps use their rates as numbers.
    baked: HashSet<ShapeKey>,
    /// Steps taken, and by an earlier run before.
    steps: u64,
    /// The key of the step's random numbers.
    random_key: u64,
    batch: core::marker::PhantomData<fn(B)>,
}

impl<S, B, O, F> core::fmt::Debug for GraphedStep<S, B, O, F> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("GraphedStep")
            .field("device", &self.device)
            .field("support", &self.support)
            .finish_non_exhaustive()
    }
}

impl<S, B, O, F> GraphedStep<S, B, O, F>
where
    S: StepState,
    B: TensorTree,
    O: TensorTree,
    F: Fn(&mut S, B, StepRate) -> O,
{
    /// A step over `state`. Nothing is run or recorded yet; lazy parameters are initialised.
    ///
    /// # Errors
    ///
    /// [`StepError::StateDevices`] when the state is spread over devices, [`StepError::EmptyState`] when it holds no
    /// tensor, [`StepError::TreeMismatch`] when it visits and maps different tensors.
    pub fn new(state: S, config: GraphConfig, step: F) -> Result<Self, StepError> {
        let device = state_device(&state)?;
        let support = support(&device);
        let core = HostCore::new(&device, &support);
        let state = taken_over(state, &core)?;
        let random_key = match (&support, random::registered()) {
            (Support::None { .. }, _) | (_, false) => 0,
            _ => random::key_from_device(&device).map_err(|detail| StepError::Device {
                doing: "drawing the key of the random numbers".into(),
                detail,
            })?,
        };
        Ok(Self {
            blocked: blocked_by_state(&support, &state),
            parameters: state.parameters(),
            baked: HashSet::new(),
            steps: 0,
            random_key,
            state,
            step,
            core,
            engine: Engine::new(config),
            device,
            support,
            batch: core::marker::PhantomData,
        })
    }

    /// Take one step on `batch` at learning rate `lr`.
    ///
    /// Enqueues and returns; reading the output waits for the device.
    ///
    /// # State
    ///
    /// Updated as by one call of the closure. A panic in the closure leaves it as it was and goes on unwinding; the next
    /// call works.
    ///
    /// # Errors
    ///
    /// Bad input ([`StepError::BatchDevice`], [`StepError::EmptyBatch`], [`StepError::LearningRate`],
    /// [`StepError::RateGroups`]) and, under
    /// [`Policy::RequireGraph`](crate::Policy::RequireGraph), [`StepError::GraphRequired`]: the step did not run, the
    /// state is as it was, and the call can be made again. [`StepError::Replay`] and [`StepError::Device`] when the
    /// device fails.
    pub fn run(
        &mut self,
        batch: B,
        lr: impl Into<LearningRates>,
    ) -> Result<StepOutput<O>, StepError> {
        let rates = Rates::new(lr.into(), &self.parameters);
        if let Some(value) = rates.not_finite() {
            return Err(StepError::LearningRate { value });
        }
        if !rates.exact {
            return Err(StepError::RateGroups);
        }
        crate::driver::tolerate_captures();
        self.follow_thread()?;
        let nested = Inside::enter();
        let Self {
            state,
            step,
            device,
            blocked,
            engine,
            core,
            baked,
            steps,
            random_key,
            ..
        } = self;
        let stream = core.stream();
        stream.run(move || {
            // A tensor made on another thread's stream is viewed from this one once, here, rather than at each use.
            let tensors = tree::tensors_of(&batch);
            let given = batch;
            let batch = tree::with_tensors(&given, &tensors, "batch")?;
            drop(given);
            check_batch(&tensors, device)?;
            let busy = nested.is_none().then_some(FallbackReason::CaptureBusy);
            let blocked = busy
                .or(blocked.clone())
                .or_else(|| blocked_by_batch(&tensors));
            let free = key_of(&batch, &tensors, &rates);
            let key = keyed(&free, &rates, baked);
            let synced = engine.config().synced_timing;
            let mut host = Host {
                core,
                state,
                step,
                batch: &batch,
                tensors: &tensors,
                rates: &rates,
                key: &free,
                baked,
                random: random::params(*random_key, *steps),
                verify_tolerance: engine.config().verify_tolerance,
                synced,
                output: core::marker::PhantomData,
            };
            let taken = engine.step(key, blocked, &mut host);
            // A step found wrong was taken all the same, eagerly.
            if matches!(taken, Ok(_) | Err(StepError::Verification(_))) {
                *steps += 1;
            }
            let (output, path) = taken?;
            Ok(StepOutput { output, path })
        })
    }

    /// A copy of the live state, the caller's own: later steps do not change it. Settled, so that BatchNorm statistics
    /// are those of the last step.
    pub fn state(&self) -> S {
        self.core.pinned(|| {
            let live = state::tensors_of(&self.state);
            let mut copies = live.iter().map(|tensor| self.core.user_copy(tensor));
            // Copies keep the autodiff association of the live tensors, which the independent containers may lack.
            let mut copy = self
                .state
                .independent()
                .map_state(&mut |old| copies.next().unwrap_or(old));
            copy.advance_clocks(&|clock| self.core.pending(clock));
            copy
        })
    }

    /// The live state, by value. Graphs are dropped.
    pub fn into_state(self) -> S {
        let Self {
            mut state,
            core,
            engine,
            ..
        } = self;
        core.pinned(|| {
            state.settle();
            state.advance_clocks(&|clock| core.pending(clock));
        });
        drop(engine);
        drop(core);
        state
    }

    /// Change the state from outside the step: load weights, freeze layers, swap in an average, move to another
    /// device. Graphs are dropped, since what they recorded may no longer be what the step does, and the step warms up
    /// anew.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); the state is then what it was before.
    pub fn update_state(&mut self, update: impl FnOnce(S) -> S) -> Result<(), StepError> {
        let updated = update(self.state());
        let device = state_device(&updated)?;
        let new_support = support(&device);
        let core = HostCore::new(&device, &new_support);
        let updated = taken_over(updated, &core)?;
        let dropped = self.engine.invalidate();
        if dropped > 0 {
            log::info!("state changed from outside: {dropped} graphs dropped, warming up anew");
        }
        self.blocked = blocked_by_state(&new_support, &updated);
        self.parameters = updated.parameters();
        self.baked.clear();
        self.state = updated;
        self.support = new_support;
        self.device = device;
        // The old one gives its memory back as it drops.
        self.core = core;
        Ok(())
    }

    /// Move to the calling thread's stream.
    ///
    /// A graph holds the stream it was captured on, and the thread that owns that stream may be using it: its work would
    /// land in our windows, or ours in its.
    fn follow_thread(&mut self) -> Result<(), StepError> {
        if self.core.is_at_home() {
            return Ok(());
        }
        let state = self.state();
        let moving = |detail| StepError::Device {
            doing: "moving to another thread".into(),
            detail,
        };
        self.core.pinned(|| self.core.sync()).map_err(moving)?;
        let core = HostCore::new(&self.device, &self.support);
        self.state = taken_over(state, &core)?;
        let dropped = self.engine.invalidate();
        self.core = core;
        log::info!("called from another thread: {dropped} graphs dropped, warming up anew");
        Ok(())
    }

    /// Replace the state. See [`update_state`](Self::update_state).
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); the state is then what it was before.
    pub fn set_state(&mut self, state: S) -> Result<(), StepError> {
        self.update_state(|_| state)
    }

    /// Drop every graph and give its memory back; the next steps warm up anew. The state stays.
    pub fn release(&mut self) {
        if self.core.owns_state() {
            let state = self.state();
            self.state = state;
        }
        self.engine.invalidate();
        self.core.forget();
    }

    /// Enqueue the sealed graph of this batch's key alone: no copy in, no copy out, no output. For measuring what the
    /// layer around a replay costs; it takes a step on whatever batch was copied in last, and is not counted.
    ///
    /// # Errors
    ///
    /// [`StepError::GraphRequired`] when the key has no sealed graph, or the state is not in the graph's buffers.
    #[doc(hidden)]
    pub fn replay_bare(
        &mut self,
        batch: &B,
        lr: impl Into<LearningRates>,
    ) -> Result<(), StepError> {
        let (key, _) = self.key_and_rates(batch, lr);
        let (graph, core) = match self.engine.sealed(&key) {
            Some(graph) if self.core.owns_state() => (graph, &mut self.core),
            _ => return Err(NO_GRAPH),
        };
        let stream = core.stream();
        stream
            .run(|| graph.replay_bare(core))
            .map_err(|detail| StepError::Replay {
                key: Box::new(key),
                detail,
            })
    }

    /// Write the scalars of this batch's sealed graph alone. For measuring what that costs.
    ///
    /// # Errors
    ///
    /// [`StepError::GraphRequired`] when the key has no sealed graph.
    #[doc(hidden)]
    pub fn refresh_bare(
        &mut self,
        batch: &B,
        lr: impl Into<LearningRates>,
    ) -> Result<(), StepError> {
        let (key, rates) = self.key_and_rates(batch, lr);
        let Some(graph) = self.engine.sealed(&key) else {
            return Err(NO_GRAPH);
        };
        let (core, random) = (&self.core, random::params(self.random_key, self.steps));
        core.pinned(|| graph.refresh_bare(core, &rates, random));
        Ok(())
    }

    fn key_and_rates(&self, batch: &B, lr: impl Into<LearningRates>) -> (ShapeKey, Rates) {
        let rates = Rates::new(lr.into(), &self.parameters);
        let free = key_of(batch, &tree::tensors_of(batch), &rates);
        (keyed(&free, &rates, &self.baked), rates)
    }

    /// Give the step's random numbers another key, as if `Device::seed` had been called before the step was made. Graphs
    /// follow.
    ///
    /// Where [`register_random`](crate::register_random) was called, the random operations of a step draw numbers that
    /// depend on this key, on the count of steps, on the place of the operation in the step and on the element. The key
    /// is drawn from the device's generator when the step is made, so [`Device::seed`] before that decides it.
    pub fn seed(&mut self, key: u64) {
        self.random_key = key;
    }

    /// The key of the step's random numbers: what a checkpoint keeps for [`seed`](Self::seed).
    pub fn random_key(&self) -> u64 {
        self.random_key
    }

    /// Steps taken, those of [`resume_at`](Self::resume_at) included: what a checkpoint keeps for it.
    pub fn steps_taken(&self) -> u64 {
        self.steps
    }

    /// Count `steps` as taken before, so that a resumed run draws the random numbers that the interrupted one would have
    /// drawn. Its key is set with [`seed`](Self::seed).
    pub fn resume_at(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// What happened so far.
    pub fn report(&self) -> Report {
        self.engine.report()
    }

    /// What a graph is on the state's device.
    pub fn support(&self) -> &Support {
        &self.support
    }

    /// The state's device, without autodiff.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl<M, B, O, F> GraphedStep<Training<M>, B, O, F>
where
    M: Module,
    B: TensorTree,
    O: TensorTree,
    F: Fn(&mut Training<M>, B, StepRate) -> O,
{
    /// A copy of the live model, the caller's own: validate it, save it, keep it. Later steps do not change it.
    pub fn model(&self) -> M {
        self.state().into_model()
    }
}

const NO_GRAPH: StepError = StepError::GraphRequired {
    reason: FallbackReason::CaptureBusy,
};

/// One eager call of the closure, in the context that the caller entered. A panic in it leaves the state as it was and
/// goes on unwinding.
pub(crate) fn run_eager<S, B, O>(
    state: &mut S,
    step: &impl Fn(&mut S, B, StepRate) -> O,
    batch: &B,
) -> O
where
    S: StepState,
    B: TensorTree,
{
    let backup = state.clone();
    let tensors = state::tensors_of(state);
    // Off the tape that the batch may have been computed on, as a recorded step has it.
    let batch = batch.map_tensors(&mut |tensor| tensor.as_leaf());
    match catch_unwind(AssertUnwindSafe(|| {
        step(&mut *state, batch, StepRate::new())
    })) {
        Ok(output) => output,
        Err(panic) => {
            *state = state::with_tensors(backup, &tensors);
            resume_unwind(panic)
        }
    }
}

/// The key of a call, but for the values of its rates.
fn key_of<B: TensorTree>(batch: &B, tensors: &[AnyTensor], rates: &Rates) -> ShapeKey {
    let mut host = Vec::new();
    batch.visit_host_fields(&mut |field| host.push(field));
    ShapeKey {
        tensors: tensors.iter().map(AnyTensor::spec).collect(),
        host,
        rate_classes: rates.partition(),
        learning_rate_bits: None,
    }
}

/// `free`, with the values of the rates where its step uses them as numbers.
fn keyed(free: &ShapeKey, rates: &Rates, baked: &HashSet<ShapeKey>) -> ShapeKey {
    match baked.contains(free) {
        true => free.baked(rates.bits()),
        false => free.clone(),
    }
}

fn state_device<S: StepState>(state: &S) -> Result<Device, StepError> {
    let mut devices: Vec<Device> = Vec::new();
    state.visit_state(&mut |tensor| {
        let device = tensor.device();
        if !devices.contains(&device) {
            devices.push(device);
        }
    });
    match devices.len() {
        0 => Err(StepError::EmptyState),
        1 => Ok(devices.remove(0)),
        _ => Err(StepError::StateDevices {
            devices: devices.iter().map(|d| format!("{d:?}")).collect(),
        }),
    }
}

/// The state as the engine keeps it: settled, in containers that share nothing mutable with the caller's, on the core's
/// stream, after its `visit` and `map` were found to walk the same tensors.
fn taken_over<S: StepState>(state: S, core: &HostCore) -> Result<S, StepError> {
    core.pinned(|| {
        let live = state::tensors_of(&state);
        let mut mapped = 0;
        let state = state.independent().map_state(&mut |old| {
            mapped += 1;
            live.get(mapped - 1)
                .map_or(old, |tensor| core.adopt(tensor))
        });
        match live.len() == mapped {
            true => Ok(state),
            false => Err(StepError::TreeMismatch {
                place: "state".into(),
                visited: live.len(),
                mapped,
            }),
        }
    })
}

/// Marks the calling thread as inside a step.
struct Inside;

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Inside {
    /// `None` when it is inside one already.
    fn enter() -> Option<Self> {
        (!INSIDE.replace(true)).then_some(Inside)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

fn check_batch(tensors: &[AnyTensor], device: &Device) -> Result<(), StepError> {
    for (index, tensor) in tensors.iter().enumerate() {
        if !tensor.is_on(device) {
            let found = tensor.device();
            return Err(StepError::BatchDevice {
                index,
                expected: format!("{device:?}"),
                found: format!("{found:?}"),
            });
        }
        let shape = tensor.spec().shape;
        if shape.first() == Some(&0) {
            return Err(StepError::EmptyBatch { index, shape });
        }
    }
    Ok(())
}

fn quantized(place: &str, index: usize, tensor: &AnyTensor) -> Option<FallbackReason> {
    match tensor.spec().dtype {
        dtype @ DType::QFloat(_) => Some(FallbackReason::Quantized {
            place: place.to_string(),
            index,
            dtype: format!("{dtype:?}"),
        }),
        _ => None,
    }
}

/// What keeps a step on this batch from being a graph.
fn blocked_by_batch(batch: &[AnyTensor]) -> Option<FallbackReason> {
    batch.iter().enumerate().find_map(|(index, tensor)| {
        quantized("batch", index, tensor).or_else(|| {
            let spec = tensor.spec();
            (spec.num_elements() == 0).then_some(FallbackReason::EmptyTensor {
                index,
                shape: spec.shape,
            })
        })
    })
}

/// What keeps any step over this state from being a graph.
fn blocked_by_state<S: StepState>(support: &Support, state: &S) -> Option<FallbackReason> {
    if let Support::None { reason } = support {
        return Some(FallbackReason::Unsupported {
            backend: reason.clone(),
        });
    }
    let (mut index, mut found) = (0, state.blocked());
    state.visit_state(&mut |tensor| {
        found = found.take().or_else(|| quantized("state", index, &tensor));
        index += 1;
    });
    found
}
