//! A function of a state and a batch that records itself.

use crate::bucketing::{Padding, Plan};
use crate::config::GraphConfig;
use crate::context::{LearningRates, Rates, StepRate};
use crate::engine::Engine;
use crate::error::{FallbackReason, StepError};
use crate::explain::Explanation;
use crate::graphed_state::{GraphedState, quantized};
use crate::host::{Fingerprint, Host, Sealed};
use crate::random;
use crate::report::Report;
use crate::shape_key::ShapeKey;
use crate::state::StepState;
use crate::step::StepOutput;
use crate::tensor::{AnyTensor, TensorSpec};
use crate::tree::{self, TensorTree};
use burn::tensor::Device;
use std::cell::Cell;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

/// A function over a [`GraphedState`] that records itself into a graph once its shapes and operations are stable.
///
/// What [`GraphedStep`](crate::GraphedStep) is for one training step, for anything else: evaluation and inference
/// ([`read_only`](Self::read_only)), the two steps of an adversarial pair over one state, a function of tensors of your
/// own. Each call runs the function once, and leaves the state and returns the output that the plain call would have; how
/// it ran is in [`StepOutput::path`]. All that is said of a step's closure there holds here.
///
/// Functions over one state share its buffers: an evaluation replays on the parameters as the last training step left
/// them. Each has graphs of its own. Called with another state than before, a function drops its graphs and warms up anew.
///
/// ```no_run
/// # use burn::tensor::{Device, Tensor};
/// # use burn::nn::{Linear, LinearConfig};
/// use burn_cuda_graph::{GraphConfig, GraphedFn, GraphedState, Inference};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Device::default();
/// let model: Linear = LinearConfig::new(4, 2).init(&device);
/// let mut state = GraphedState::new(Inference::new(model))?;
/// let mut forward = GraphedFn::read_only(
///     GraphConfig::new(),
///     |state: &Inference<Linear>, x: Tensor<2>| state.model().forward(x),
/// );
/// let y = forward.call(&mut state, Tensor::ones([8, 4], &device))?;
/// assert_eq!(y.output.dims(), [8, 2]);
/// # Ok(())
/// # }
/// ```
pub struct GraphedFn<S, B, O, F> {
    function: F,
    pub(crate) engine: Engine<Fingerprint, Sealed<O>>,
    /// Keys whose steps use their rates as numbers.
    baked: HashSet<ShapeKey>,
    /// Tells this function from the others over its state.
    id: u64,
    /// The buffers that its graphs work on.
    pub(crate) generation: Option<u64>,
    /// Whether a call is a step of the state.
    kind: Kind,
    /// What padding came to.
    padding: Padding,
    types: core::marker::PhantomData<fn(&mut S, B)>,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Calls count as steps.
    Updates,
    /// Calls are counted by themselves: a training step's random numbers must not depend on how often it is evaluated.
    Reads { calls: u64 },
}

/// What a reading function's key of random numbers differs in from the state's.
const READS: u64 = 0x9E37_79B9_7F4A_7C15;

impl<S, B, O, F> core::fmt::Debug for GraphedFn<S, B, O, F> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("GraphedFn")
            .field("id", &self.id)
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

impl<S, B, O, F> GraphedFn<S, B, O, F>
where
    S: StepState,
    B: TensorTree,
    O: TensorTree,
    F: Fn(&mut S, B, StepRate) -> O,
{
    /// A function that updates its state. Nothing is run or recorded yet.
    pub fn new(config: GraphConfig, function: F) -> Self {
        Self::of_kind(config, function, Kind::Updates)
    }

    fn of_kind(config: GraphConfig, function: F, kind: Kind) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            function,
            engine: Engine::new(config),
            baked: HashSet::new(),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            generation: None,
            kind,
            padding: Padding::default(),
            types: core::marker::PhantomData,
        }
    }

    /// Call the function on `batch` at learning rate `lr`.
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
    /// As [`GraphedStep::run`](crate::GraphedStep::run).
    pub fn run(
        &mut self,
        state: &mut GraphedState<S>,
        batch: B,
        lr: impl Into<LearningRates>,
    ) -> Result<StepOutput<O>, StepError> {
        self.run_or_stay(state, batch, lr.into(), None)
    }

    /// [`run`](Self::run), but eagerly where there is a reason to.
    pub(crate) fn run_or_stay(
        &mut self,
        state: &mut GraphedState<S>,
        batch: B,
        lr: LearningRates,
        stay: Option<FallbackReason>,
    ) -> Result<StepOutput<O>, StepError> {
        let rates = Rates::new(lr, state.parameters());
        if let Some(value) = rates.not_finite() {
            return Err(StepError::LearningRate { value });
        }
        if !rates.exact {
            return Err(StepError::RateGroups);
        }
        if state.is_lost() {
            return Err(StepError::StateLost);
        }
        crate::driver::tolerate_captures();
        state.follow_thread(|| {
            self.drop_graphs("called from another thread");
        })?;
        self.follow_state(state);
        let nested = Inside::enter();
        let Self {
            function,
            engine,
            baked,
            id,
            kind,
            padding,
            ..
        } = self;
        let device = state.device().clone();
        let blocked = state.blocked().cloned();
        let random = match kind {
            Kind::Updates => random::params(state.random_key, state.steps),
            Kind::Reads { calls } => random::params(state.random_key ^ READS, *calls),
        };
        let (live, core) = state.parts();
        let stream = core.stream();
        let taken = stream.run(|| {
            // A tensor made on another thread's stream is viewed from this one once, here, rather than at each use.
            let mut tensors = tree::tensors_of(&batch);
            let given = batch;
            let mut specs: Vec<TensorSpec> = tensors.iter().map(AnyTensor::spec).collect();
            let plan = Plan::new(&engine.config().bucketing, &mut specs)?;
            if plan.pads() {
                check_batch(&tensors, &device)?;
                plan.apply(&mut tensors);
            }
            if let (Some((length, largest)), false) = (plan.above, padding.warned) {
                padding.warned = true;
                log::warn!(
                    "a batch of length {length} is above the largest bucket, {largest}: it is not padded, and its shape is \
                     warmed up and recorded by itself"
                );
            }
            let batch = tree::with_tensors(&given, &tensors, "batch")?;
            drop(given);
            check_batch(&tensors, &device)?;
            let busy = nested.is_none().then_some(FallbackReason::CaptureBusy);
            let blocked = busy
                .or(blocked)
                .or_else(|| blocked_by_batch(&tensors))
                .or(stay);
            let free = key_of(&batch, specs, &rates);
            let key = keyed(&free, &rates, baked);
            let (fused_updates, synced, verify_tolerance) = (
                engine.config().fused_updates,
                engine.config().synced_timing,
                engine.config().verify_tolerance,
            );
            let mut host = Host {
                core,
                state: live,
                step: &*function,
                function: *id,
                batch: &batch,
                tensors: &tensors,
                rates: &rates,
                key: &free,
                baked,
                random,
                verify_tolerance,
                fused_updates,
                synced,
                output: core::marker::PhantomData,
            };
            let taken = engine.step(key, blocked, &mut host);
            if was_taken(&taken) {
                padding.count(&plan);
            }
            taken
        });
        // Its own graphs are gone where it had the buffers dropped.
        self.generation = Some(state.core.generation());
        if was_taken(&taken) {
            match &mut self.kind {
                Kind::Updates => state.steps += 1,
                Kind::Reads { calls } => *calls += 1,
            }
        }
        let (output, path) = taken?;
        Ok(StepOutput { output, path })
    }

    /// Call a function that takes no learning rate.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn call(
        &mut self,
        state: &mut GraphedState<S>,
        batch: B,
    ) -> Result<StepOutput<O>, StepError> {
        self.run(state, batch, 0.0)
    }

    /// Whether [`run`](Self::run) would open a window for this batch now. Another thread's reads may be in its way then.
    pub fn would_record(
        &self,
        state: &GraphedState<S>,
        batch: &B,
        lr: impl Into<LearningRates>,
    ) -> bool {
        let key = self.current_key(state, batch, lr);
        state.blocked().is_none() && key.is_some_and(|key| self.engine.would_record(&key))
    }

    /// Whether [`run`](Self::run) would replay a graph for this batch now.
    #[cfg(feature = "train")]
    pub(crate) fn would_replay(
        &self,
        state: &GraphedState<S>,
        batch: &B,
        lr: impl Into<LearningRates>,
    ) -> bool {
        let key = self.current_key(state, batch, lr);
        key.is_some_and(|key| self.engine.sealed(&key).is_some())
    }

    /// The key of a call; `None` when what is known of keys is of other buffers than the state's.
    fn current_key(
        &self,
        state: &GraphedState<S>,
        batch: &B,
        lr: impl Into<LearningRates>,
    ) -> Option<ShapeKey> {
        let current = self.generation == Some(state.core.generation());
        current.then(|| self.key_and_rates(state, batch, lr).0)
    }

    /// Drop every graph; the next calls warm up anew.
    pub fn release(&mut self, state: &mut GraphedState<S>) {
        if self.engine.invalidate() > 0 {
            state.core.trim();
        }
    }

    /// What happened so far.
    pub fn report(&self) -> Report {
        Report {
            padded_calls: self.padding.calls,
            padding_share: self.padding.share(),
            above_buckets: self.padding.above,
            ..self.engine.report()
        }
    }

    /// For each shape key, whether it is a graph, why not, and what to do about it.
    pub fn explain(&self, state: &GraphedState<S>) -> Explanation {
        Explanation::new(&self.engine.report(), state.support())
    }

    /// Drop the graphs when they work on other buffers than the state's.
    fn follow_state(&mut self, state: &mut GraphedState<S>) {
        let generation = state.core.generation();
        if self.generation.replace(generation) != Some(generation) {
            self.baked.clear();
            if self.drop_graphs("the state changed") > 0 {
                state.core.trim();
            }
        }
    }

    pub(crate) fn drop_graphs(&mut self, why: &str) -> usize {
        let dropped = self.engine.invalidate();
        if dropped > 0 {
            log::info!("{why}: {dropped} graphs dropped, warming up anew");
        }
        dropped
    }

    pub(crate) fn key_and_rates(
        &self,
        state: &GraphedState<S>,
        batch: &B,
        lr: impl Into<LearningRates>,
    ) -> (ShapeKey, Rates) {
        let rates = Rates::new(lr.into(), state.parameters());
        let tensors = tree::tensors_of(batch);
        let mut specs: Vec<TensorSpec> = tensors.iter().map(AnyTensor::spec).collect();
        // A call says what does not fit.
        drop(Plan::new(&self.engine.config().bucketing, &mut specs));
        let free = key_of(batch, specs, &rates);
        (keyed(&free, &rates, &self.baked), rates)
    }
}

impl<S, B, O> GraphedFn<S, B, O, ()>
where
    S: StepState,
    B: TensorTree,
    O: TensorTree,
{
    /// A function that reads its state: evaluation, inference. Its calls are no steps: a training step's count and random
    /// numbers do not depend on them.
    ///
    /// What it changes all the same (BatchNorm statistics, in training mode) is state like any other.
    pub fn read_only<R>(
        config: GraphConfig,
        function: R,
    ) -> GraphedFn<S, B, O, impl Fn(&mut S, B, StepRate) -> O>
    where
        R: Fn(&S, B) -> O,
    {
        let function = move |state: &mut S, batch: B, _: StepRate| function(state, batch);
        GraphedFn::of_kind(config, function, Kind::Reads { calls: 0 })
    }
}

/// The key of a call, but for the values of its rates.
fn key_of<B: TensorTree>(batch: &B, tensors: Vec<TensorSpec>, rates: &Rates) -> ShapeKey {
    let mut host = Vec::new();
    batch.visit_host_fields(&mut |field| host.push(field));
    ShapeKey {
        tensors,
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

/// Whether a step was taken: one found wrong was, eagerly.
fn was_taken<T>(taken: &Result<T, StepError>) -> bool {
    matches!(taken, Ok(_) | Err(StepError::Verification(_)))
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
