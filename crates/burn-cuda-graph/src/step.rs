//! The one entry: a training step that records itself.

use crate::config::GraphConfig;
use crate::context::{LearningRates, StepRate};
use crate::error::{FallbackReason, StepError};
use crate::explain::Explanation;
use crate::function::GraphedFn;
use crate::graphed_state::GraphedState;
use crate::random;
use crate::report::Report;
use crate::state::{self, StepState, Training};
use crate::support::Support;
use crate::tree::TensorTree;
use burn::module::Module;
use burn::tensor::Device;
use serde::{Deserialize, Serialize};
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
///
/// It is one [`GraphedFn`] over a [`GraphedState`] of its own; [`shared`](Self::shared) is that state, for other functions
/// over it, evaluation say.
pub struct GraphedStep<S, B, O, F> {
    // Before the state: graphs go before the buffers they replay against.
    function: GraphedFn<S, B, O, F>,
    state: GraphedState<S>,
}

impl<S, B, O, F> core::fmt::Debug for GraphedStep<S, B, O, F> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("GraphedStep")
            .field("state", &self.state)
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
    /// As [`GraphedState::new`].
    pub fn new(state: S, config: GraphConfig, step: F) -> Result<Self, StepError> {
        Ok(Self {
            function: GraphedFn::new(config, step),
            state: GraphedState::new(state)?,
        })
    }

    /// Take one step on `batch` at learning rate `lr`.
    ///
    /// Enqueues and returns; reading the output waits for the device.
    ///
    /// # State
    ///
    /// Updated as by one call of the closure. A panic in the closure leaves it as it was and goes on unwinding; the next
    /// call works. But where nobody watches (the step stays eager), a [`Training`](crate::Training) lets go of its old values
    /// at its first update, as plain Burn does: a panic after that leaves the updates made, and one inside an update loses the
    /// model ([`StepError::StateLost`](crate::StepError::StateLost)).
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
        self.function.run(&mut self.state, batch, lr)
    }

    /// Whether [`run`](Self::run) would open a window for this batch now. Another thread's reads may be in its way then.
    pub fn would_record(&self, batch: &B, lr: impl Into<LearningRates>) -> bool {
        self.function.would_record(&self.state, batch, lr)
    }

    /// The state, for a [`GraphedFn`] that works on it beside this step: evaluation with the live parameters, say.
    pub fn shared(&mut self) -> &mut GraphedState<S> {
        &mut self.state
    }

    /// A copy of the live state, the caller's own: later steps do not change it. Settled, so that BatchNorm statistics
    /// are those of the last step.
    pub fn state(&self) -> S {
        self.state.state()
    }

    /// The live state, by value. Graphs are dropped.
    pub fn into_state(self) -> S {
        let Self { function, state } = self;
        drop(function);
        state.into_state()
    }

    /// Change the state from outside the step: load weights, freeze layers, swap in an average, move to another
    /// device. Graphs are dropped, since what they recorded may no longer be what the step does, and the step warms up
    /// anew.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); the state is then what it was before.
    pub fn update_state(&mut self, update: impl FnOnce(S) -> S) -> Result<(), StepError> {
        let function = &mut self.function;
        self.state.replace(update, || {
            function.drop_graphs("the state changed");
        })
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
        let function = &mut self.function;
        self.state.release_after(|| {
            function.engine.invalidate();
        });
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
        let (key, _) = self.function.key_and_rates(&self.state, batch, lr);
        let core = &mut self.state.core;
        let current = self.function.generation == Some(core.generation());
        let graph = match self.function.engine.sealed(&key) {
            Some(graph) if current && core.owns_state() => graph,
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
        let (key, rates) = self.function.key_and_rates(&self.state, batch, lr);
        let Some(graph) = self.function.engine.sealed(&key) else {
            return Err(NO_GRAPH);
        };
        let state = &self.state;
        let random = random::params(state.random_key, state.steps);
        (state.core).pinned(|| graph.refresh_bare(&state.core, &rates, random));
        Ok(())
    }

    /// Give the step's random numbers another key. See [`GraphedState::seed`].
    pub fn seed(&mut self, key: u64) {
        self.state.seed(key);
    }

    /// The key of the step's random numbers: what a checkpoint keeps for [`seed`](Self::seed).
    pub fn random_key(&self) -> u64 {
        self.state.random_key()
    }

    /// Steps taken, those of [`resume_at`](Self::resume_at) included: what a checkpoint keeps for it.
    pub fn steps_taken(&self) -> u64 {
        self.state.steps_taken()
    }

    /// Count `steps` as taken before. See [`GraphedState::resume_at`].
    pub fn resume_at(&mut self, steps: u64) {
        self.state.resume_at(steps);
    }

    /// What happened so far.
    pub fn report(&self) -> Report {
        self.function.report()
    }

    /// For each shape key, whether it is a graph, why not, and what to do about it.
    pub fn explain(&self) -> Explanation {
        self.function.explain(&self.state)
    }

    /// What a graph is on the state's device.
    pub fn support(&self) -> &Support {
        self.state.support()
    }

    /// The state's device, without autodiff.
    pub fn device(&self) -> &Device {
        self.state.device()
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
        self.state.model()
    }
}

const NO_GRAPH: StepError = StepError::GraphRequired {
    reason: FallbackReason::CaptureBusy,
};

/// One eager call of the closure, in the context that the caller entered. A panic in it goes on unwinding; the state is then as
/// it was, with `keep` in any case, else unless the closure had begun an update.
pub(crate) fn run_eager<S, B, O>(
    state: &mut S,
    step: &impl Fn(&mut S, B, StepRate) -> O,
    batch: &B,
    keep: bool,
) -> O
where
    S: StepState,
    B: TensorTree,
{
    let kept = match keep || !state.begin() {
        true => Some((state.clone(), state::tensors_of(state))),
        false => None,
    };
    // Off the tape that the batch may have been computed on, as a recorded step has it.
    let batch = batch.map_tensors(&mut |tensor| tensor.as_leaf());
    match catch_unwind(AssertUnwindSafe(|| {
        step(&mut *state, batch, StepRate::new())
    })) {
        Ok(output) => {
            state.end();
            output
        }
        Err(panic) => {
            match kept {
                Some((backup, tensors)) => *state = state::with_tensors(backup, &tensors),
                None => state.undo(),
            }
            resume_unwind(panic)
        }
    }
}
