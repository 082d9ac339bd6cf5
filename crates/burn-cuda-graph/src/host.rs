//! Runs, records and replays a step on a CubeCL device.
//!
//! The graph runs on graph-owned duplicates of the state, so what the state was before the window *is* the snapshot:
//! a refused window taints the duplicates, the originals were never given to it. Once a state is graph-owned, a
//! second graph over it takes its snapshot by copying. Between eager steps the state lives in ordinary tensors and
//! the graph-owned ones are stale (`attached` is false); the next replay copies them in first.

use crate::context::{self, Context, Mode, Rates, Slot, SlotRate, SlotSource, SlotValue, StepRate};
use crate::driver::{DeviceDriver, Prepared, SealedGraph, exclusive, lock_patiently};
use crate::engine::{Attempt, NoReplay, StepHost, Watch};
use crate::error::{FallbackReason, Mismatch, StepError};
use crate::fingerprint::{Recorder, StepTensors};
use crate::lifecycle::{Refusal, Verdict};
use crate::neighbours;
use crate::pool::{Held, Pinned, Pool, duplicate_like, home, id};
use crate::random::{self, DrawScope};
use crate::ranges::{Phase, range};
use crate::replay::{Call, Queue, Replay, Token, launches_around};
use crate::scalars::{self, DeviceScalars, SharedScalars};
use crate::shape_key::{HostField, ShapeKey};
use crate::state::{self, StepState};
use crate::step::run_eager;
use crate::support::Support;
use crate::tensor::AnyTensor;
use crate::tree::{self, TensorTree};
use burn::tensor::{DType, Device};
use burn_fusion::observer::FusionObservation;
use burn_fusion::stream::StreamId;
use burn_ir::OperationIr;
use cubecl_runtime::logging::LaunchObservation;
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

pub(crate) use crate::fingerprint::Fingerprint;

/// What outlives a call: the pool, the stream, whether the state is in the pool's buffers.
#[derive(Debug)]
pub(crate) struct HostCore {
    pool: Option<Pool>,
    driver: DeviceDriver,
    device: Device,
    stream: StreamId,
    support: Support,
    /// The state's tensors are the pool's: a replay writes them.
    attached: bool,
    /// The step's scalars on the device.
    scalars: Option<Arc<Mutex<DeviceScalars>>>,
    /// What the state's counters show; replays since are in `ticks`.
    clocks: Clocks,
    /// The graph replayed last; its own replays keep its counts in step.
    last: Option<Arc<Ticks>>,
    /// What a replay of each graph adds to the state's counters.
    ticks: Vec<Arc<Ticks>>,
    /// Tells these graph-owned buffers from those before and after them.
    generation: u64,
    /// Replays that were handed over.
    queue: Arc<Queue>,
    /// Graphs that were given up for one of the same operations: the metadata that it uses too would go with them.
    given_up: Vec<SealedGraph>,
    token: Token,
}

fn next_generation() -> u64 {
    static GENERATIONS: AtomicU64 = AtomicU64::new(1);
    GENERATIONS.fetch_add(1, Ordering::Relaxed)
}

/// What a replay of one graph adds to the state's counters, and how many are not in them yet.
#[derive(Debug)]
struct Ticks {
    by: HashMap<u64, u64>,
    /// The parts of the state that it was recorded over.
    parts: Vec<u64>,
    pending: Arc<AtomicU64>,
}

impl HostCore {
    pub fn new(device: &Device, support: &Support) -> Self {
        let usable = !matches!(support, Support::None { .. });
        crate::driver::tolerate_captures();
        let pool = usable.then(|| Pool::new(device)).flatten();
        if pool.is_some() {
            neighbours::listen();
        }
        Self {
            scalars: pool
                .as_ref()
                .and_then(|pool| DeviceScalars::new(device, &pool.client)),
            clocks: Clocks::default(),
            last: None,
            ticks: Vec::new(),
            pool,
            driver: DeviceDriver::new(device.clone()),
            device: device.clone(),
            stream: StreamId::current(),
            support: support.clone(),
            attached: false,
            generation: next_generation(),
            queue: Arc::default(),
            given_up: Vec::new(),
            token: Token::default(),
        }
    }

    /// Have every replay that was handed over enqueued: for what does not go through the stream's queue itself.
    fn catch_up(&self) {
        if let Some(pool) = self.pool.as_ref().filter(|_| self.queue.is_busy()) {
            pool.drain();
        }
    }

    /// A replay that was handed over by an earlier call and did not run.
    fn check_queue(&mut self) -> Result<(), StepError> {
        match self.queue.failure() {
            None => Ok(()),
            Some(detail) => {
                self.token.renew();
                Err(StepError::Device {
                    doing: "replaying an earlier call's step, which was not taken".into(),
                    detail,
                })
            }
        }
    }

    /// Changes whenever the graph-owned buffers do: graphs of another generation are not to be replayed.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Give empty pages back to the driver.
    pub fn trim(&self) {
        if let Some(pool) = &self.pool {
            pool.trim();
        }
    }

    /// The stream that graphs are captured on.
    pub fn stream(&self) -> Stream {
        Stream(self.stream)
    }

    /// Run `f` on that stream.
    pub fn pinned<R>(&self, f: impl FnOnce() -> R) -> R {
        self.stream().run(f)
    }

    /// How much replays moved the counter `clock` beyond what the state shows.
    pub fn pending(&self, clock: u64) -> u64 {
        let of = |ticks: &Arc<Ticks>| {
            ticks.by.get(&clock).copied().unwrap_or(0) * ticks.pending.load(Ordering::Relaxed)
        };
        self.ticks.iter().map(of).sum()
    }

    /// Have the state's counters show what replays added to them.
    fn settle_clocks<S: StepState>(&mut self, state: &mut S) {
        let moved = |ticks: &Arc<Ticks>| ticks.pending.load(Ordering::Relaxed) > 0;
        if self.ticks.iter().any(moved) {
            state.advance_clocks(&|clock| self.pending(clock));
            for ticks in &self.ticks {
                ticks.pending.store(0, Ordering::Relaxed);
            }
        }
        // One handle is this list's: the graphs of the others are gone.
        self.ticks.retain(|ticks| Arc::strong_count(ticks) > 1);
        // Each part of the state counts by itself from here on, whatever it was cloned from.
        state.separate_clocks(&mut HashSet::new());
        self.clocks = Clocks::of(state);
        self.last = None;
    }

    /// The count that `clock` shows now.
    fn count(&self, clock: u64) -> Option<u64> {
        Some(self.clocks.get(clock)? + self.pending(clock))
    }

    /// Why `graph` no longer fits the state's counters: parts were replaced since, or counts that were equal when it was
    /// recorded, and share a scalar, no longer are.
    fn outgrown<O>(&mut self, graph: &Sealed<O>) -> Option<String> {
        let last = self.last.as_ref();
        if last.is_some_and(|last| Arc::ptr_eq(last, &graph.ticks)) {
            return None;
        }
        if graph.ticks.parts != self.clocks.parts {
            return Some("an optimizer of the state was replaced".into());
        }
        for slot in &graph.slots {
            let Some((clocks, _)) = &slot.clock else {
                continue;
            };
            let first = clocks.first().and_then(|clock| self.count(*clock));
            if first.is_none() || clocks.iter().any(|clock| self.count(*clock) != first) {
                return Some("step counts that were equal when it was recorded differ now".into());
            }
        }
        self.last = Some(graph.ticks.clone());
        None
    }

    /// The scalars that the next replay of `graph` is to see.
    fn scalar_values<O>(&self, graph: &Sealed<O>, rates: &Rates) -> Vec<(DType, f64)> {
        let value = |slot: &ReplaySlot| {
            let rate = match slot.rate {
                SlotRate::Constant(rate) => rate,
                SlotRate::Class { class, scale } => {
                    let rate = rates.classes.get(class as usize).copied();
                    rate.unwrap_or_else(|| rates.base()) * scale
                }
            };
            let steps = slot.clock.as_ref().map_or(0, |(clocks, ahead)| {
                let shown = clocks.first().and_then(|clock| self.count(*clock));
                shown.unwrap_or(0) + ahead
            });
            (slot.dtype, (slot.value)(rate, steps))
        };
        graph.slots.iter().map(value).collect()
    }

    /// Write the scalars that the next replay of `graph` is to see.
    fn refresh_scalars<O>(&self, graph: &Sealed<O>, rates: &Rates, random: [u32; 4]) {
        self.catch_up();
        if let Some(scalars) = &self.scalars {
            let values = self.scalar_values(graph, rates);
            scalars::lock(scalars).writer().write_all(random, &values);
        }
    }

    fn slot_source(&self) -> Option<Box<dyn SlotSource>> {
        let scalars = self.scalars.clone()?;
        Some(Box::new(SharedScalars(scalars)))
    }

    /// Let the graph-owned state go; every graph must be gone.
    pub fn forget(&mut self) {
        self.attached = false;
        self.generation = next_generation();
        // Whoever takes the state out has its counts settled, or settles them in what is taken.
        self.ticks.clear();
        self.last = None;
        self.given_up.clear();
        self.token.renew();
        let stream = self.stream;
        if let Some(pool) = &mut self.pool {
            // What was copied out of the buffers has to have been before they are let go of.
            stream.executes(|| {
                pool.drain();
                pool.clear();
            });
        }
    }

    /// Whether the calling thread works on the stream that graphs are captured on.
    pub fn is_at_home(&self) -> bool {
        self.pool.is_none() || StreamId::current() == self.stream
    }

    /// `tensor` as one made on this stream: a tensor of another stream is a new one to the fusion server each time it is
    /// used.
    pub fn adopt(&self, tensor: &AnyTensor) -> AnyTensor {
        match self.pool.is_none() || home(tensor) == Some(self.stream) {
            true => tensor.clone(),
            false => duplicate_like(tensor),
        }
    }

    /// Whether the state's tensors are written by replays, so that only duplicates of them may leave.
    pub fn owns_state(&self) -> bool {
        self.attached
    }

    /// A copy of `tensor` that no replay writes.
    pub fn user_copy(&self, tensor: &AnyTensor) -> AnyTensor {
        match self.attached {
            true => {
                self.catch_up();
                duplicate_like(tensor)
            }
            false => tensor.clone(),
        }
    }

    /// Say of a state that is handed out what the next call would be told.
    pub fn warn_of_failures(&self) {
        self.catch_up();
        if let Some(detail) = self.queue.peek() {
            log::error!("the state lacks steps whose replays did not run: {detail}");
        }
    }

    /// Wait for the device.
    pub fn sync(&self) -> Result<(), String> {
        self.device.sync().map_err(|err| err.to_string())
    }
}

impl Drop for HostCore {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.forget();
        }
    }
}

/// A logical stream to run on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream(StreamId);

impl Stream {
    pub fn run<R>(self, f: impl FnOnce() -> R) -> R {
        self.0.executes(f)
    }
}

/// A sealed graph, its static inputs and its outputs.
#[derive(Debug)]
pub(crate) struct Sealed<O> {
    replay: Arc<Replay>,
    /// Hold the tensors that the graph reads and writes, as Burn sees them.
    _inputs: Pinned,
    _outputs: Pinned,
    /// The recorded output, whose tensors every replay overwrites.
    output: O,
    held: Held,
    launches: Option<u64>,
    /// Its scalars, in the order of their slots.
    slots: Vec<ReplaySlot>,
    ticks: Arc<Ticks>,
}

/// A scalar of a sealed graph, as a function of what moves.
struct ReplaySlot {
    dtype: DType,
    rate: SlotRate,
    /// The counters it reads, which are equal, and how far ahead of their value before the step.
    clock: Option<(Vec<u64>, u64)>,
    value: SlotValue,
}

impl core::fmt::Debug for ReplaySlot {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ReplaySlot")
            .field("rate", &self.rate)
            .field("clock", &self.clock)
            .finish_non_exhaustive()
    }
}

impl ReplaySlot {
    /// `slot`, relative to the counters before the step; `None` for one that reads a counter made in the step.
    fn new(slot: &Slot, before: &Clocks) -> Option<Self> {
        let clock = match slot.steps {
            Some(steps) => {
                let first = before.get(*slot.clocks.first()?)?;
                let equal = |clock: &u64| before.get(*clock) == Some(first);
                if !slot.clocks.iter().all(equal) {
                    return None;
                }
                Some((slot.clocks.clone(), steps.checked_sub(first)?))
            }
            None => None,
        };
        Some(Self {
            dtype: slot.dtype,
            rate: slot.rate,
            clock,
            value: slot.value.clone(),
        })
    }
}

/// The state's counters, and the numbers of its parts in the order of its visit.
#[derive(Debug, Clone, Default, PartialEq)]
struct Clocks {
    counts: HashMap<u64, u64>,
    parts: Vec<u64>,
}

impl Clocks {
    fn of<S: StepState>(state: &S) -> Self {
        let mut clocks = Self::default();
        state.visit_clocks(&mut |clock, value| {
            clocks.parts.push(clock);
            if let Some(value) = value {
                clocks.counts.insert(clock, value);
            }
        });
        clocks
    }

    fn get(&self, clock: u64) -> Option<u64> {
        self.counts.get(&clock).copied()
    }
}

impl<O> Sealed<O> {
    /// Write the scalars alone.
    pub fn refresh_bare(&self, core: &HostCore, rates: &Rates, random: [u32; 4]) {
        core.refresh_scalars(self, rates, random);
    }

    /// Enqueue the graph alone.
    pub fn replay_bare(&self, core: &mut HostCore) -> Result<(), String> {
        match core.pool.as_mut() {
            Some(pool) => self.replay.graph().replay(pool),
            None => Err("the graph's pool is gone".to_string()),
        }
    }
}

/// One call's host.
pub(crate) struct Host<'a, S, B, O, F> {
    pub core: &'a mut HostCore,
    pub state: &'a mut S,
    pub step: &'a F,
    /// Tells the function from others over the same state.
    pub function: u64,
    pub batch: &'a B,
    /// The batch's tensors.
    pub tensors: &'a [AnyTensor],
    pub rates: &'a Rates,
    /// The key of the call without its rates' values.
    pub key: &'a ShapeKey,
    /// Keys whose steps use their rates as numbers.
    pub baked: &'a mut HashSet<ShapeKey>,
    /// What the random generator is at.
    pub random: [u32; 4],
    /// How far a verified value may be off.
    pub verify_tolerance: f32,
    /// Update all parameters together.
    pub fused_updates: bool,
    /// Wait for the device after each step, so that the call's time is the step's.
    pub synced: bool,
    pub output: core::marker::PhantomData<O>,
}

impl<S, B, O, F> StepHost for Host<'_, S, B, O, F>
where
    S: StepState,
    B: TensorTree,
    O: TensorTree,
    F: Fn(&mut S, B, StepRate) -> O,
{
    type Fingerprint = Fingerprint;
    type Graph = Sealed<O>;
    type Output = O;

    fn bake_rate(&mut self) -> ShapeKey {
        self.baked.insert(self.key.clone());
        self.key.baked(self.rates.bits())
    }

    fn eager(&mut self, watch: Watch) -> Result<(O, Option<Fingerprint>), StepError> {
        self.core.check_queue()?;
        let _range = range(match watch {
            Watch::Off | Watch::Waited => Phase::Eager,
            Watch::On => Phase::WarmUp,
            Watch::Rehearse => Phase::Rehearsal,
        });
        // With no graphs there is nothing that counted for the state.
        if !watch.is_off() || self.core.attached || !self.core.ticks.is_empty() {
            self.detach();
        }
        if watch.is_off() || self.core.pool.is_none() {
            let output = self.unwatched(self.synced || watch == Watch::Waited);
            self.wait_if_timed()?;
            return Ok((output, None));
        }
        let Some(_watching) = watching() else {
            return Ok((self.unwatched(self.synced), None));
        };
        match watch {
            Watch::Rehearse => self.rehearse(),
            _ => {
                let (output, fingerprint) = self.watch_eager()?;
                Ok((output, Some(fingerprint)))
            }
        }
    }

    fn compare(before: Option<&Fingerprint>, now: &Fingerprint) -> Verdict {
        Fingerprint::compare(before, now)
    }

    fn record(
        &mut self,
        attempt: u32,
        rehearsed: Option<&Fingerprint>,
    ) -> Result<Attempt<Sealed<O>, O>, StepError> {
        self.core.check_queue()?;
        self.core.catch_up();
        let Some(_watching) = watching() else {
            return Ok(Attempt::Busy);
        };
        let Some(_window) = exclusive() else {
            return Ok(Attempt::Busy);
        };
        if let Some(neighbour) = neighbours::lately() {
            return Ok(Attempt::Shared(neighbour));
        }
        let _range = range(Phase::Capture);
        self.record_exclusive(attempt, rehearsed)
    }

    fn replay(&mut self, graph: &Sealed<O>, verify: bool) -> Result<O, NoReplay> {
        match verify {
            true => self.replay_verified(graph),
            false => self.replay_once(graph),
        }
    }

    fn reset(&mut self) {
        self.core.forget();
    }

    fn bytes(graph: &Sealed<O>) -> u64 {
        graph.held.bytes
    }

    fn launches(fingerprint: &Fingerprint) -> Option<u64> {
        fingerprint.launches
    }

    fn launches_per_replay(graph: &Sealed<O>) -> Option<u64> {
        graph.launches
    }

    fn released(&mut self) {
        self.core.trim();
    }

    fn expected_bytes(&self) -> Option<u64> {
        let pool = self.core.pool.as_ref()?;
        let rehearsal = pool.rehearsal(&(self.function, self.key.clone()))?;
        Some(rehearsal.step_bytes)
    }

    fn device_bytes(&self) -> Option<u64> {
        crate::driver::device_memory(&self.core.device).map(|memory| memory.total_bytes)
    }

    fn wait(&mut self) -> Result<(), StepError> {
        self.core.sync().map_err(|detail| StepError::Device {
            doing: "waiting for a step".into(),
            detail,
        })
    }
}

/// Hold the process's observers. They hear every thread, and the launch observer's slot is a stack: two watched steps at
/// once would take each other's off. Taken before the window, by all who take both.
fn watching() -> Option<MutexGuard<'static, ()>> {
    static WATCHING: Mutex<()> = Mutex::new(());
    lock_patiently(&WATCHING)
}

/// The outputs of a replay, in buffers that the next replay does not write.
fn copy_out<O: TensorTree>(output: &O) -> O {
    output.map_tensors(&mut |tensor| duplicate_like(&tensor))
}

impl<S, B, O, F> Host<'_, S, B, O, F>
where
    S: StepState,
    B: TensorTree,
    O: TensorTree,
    F: Fn(&mut S, B, StepRate) -> O,
{
    fn replay_once(&mut self, graph: &Sealed<O>) -> Result<O, NoReplay> {
        if let Some(detail) = self.core.queue.failure() {
            self.core.token.renew();
            return Err(NoReplay::Failed(detail));
        }
        let attached = self.core.attached;
        if !attached {
            self.core.settle_clocks(self.state);
        }
        if let Some(detail) = self.core.outgrown(graph) {
            // The graphs go; what their replays left has to be out of their buffers and in the counters.
            self.detach();
            return Err(NoReplay::Misfit(detail));
        }
        let Some(pool) = self.core.pool.as_mut() else {
            return Err(NoReplay::Misfit("the graph's pool is gone".to_string()));
        };
        if !attached {
            let Some(owned) = pool.state.clone() else {
                return Err(NoReplay::Misfit("the graph's state is gone".to_string()));
            };
            owned
                .write(&state::tensors_of(self.state))
                .map_err(NoReplay::Misfit)?;
            *self.state = state::with_tensors(self.state.clone(), &owned.tensors);
            self.core.attached = true;
        }
        if self.core.queue.is_full() {
            pool.drain();
        }
        let values = self.core.scalar_values(graph, self.rates);
        graph.ticks.pending.fetch_add(1, Ordering::AcqRel);
        let call = Call {
            device: &self.core.device,
            queue: &self.core.queue,
            token: &mut self.core.token,
            pending: &graph.ticks.pending,
            random: self.random,
            values,
            batch: self.tensors,
        };
        let outputs = graph.replay.enqueue(call).map_err(|detail| {
            graph.ticks.pending.fetch_sub(1, Ordering::AcqRel);
            NoReplay::Failed(detail)
        })?;
        let mut outputs = outputs.into_iter();
        let output = graph
            .output
            .map_tensors(&mut |recorded| match outputs.next() {
                Some(output) => AnyTensor::lifted_like(output, &recorded),
                None => duplicate_like(&recorded),
            });
        if self.synced {
            self.core.sync().map_err(NoReplay::Failed)?;
        }
        Ok(output)
    }

    /// A replay, and the eager step from the same state, compared.
    fn replay_verified(&mut self, graph: &Sealed<O>) -> Result<O, NoReplay> {
        let failed = |detail: String| NoReplay::Failed(format!("verifying a replay: {detail}"));
        let Some(watching) = watching() else {
            return self.replay_once(graph);
        };
        let _range = range(Phase::Verification);
        self.core.catch_up();
        self.core.settle_clocks(self.state);
        let live = self.state.clone();
        let copies: Vec<AnyTensor> = state::tensors_of(self.state)
            .iter()
            .map(duplicate_like)
            .collect();
        let attached = core::mem::replace(&mut self.core.attached, false);
        *self.state = state::with_tensors(self.state.independent(), &copies);
        let eager = self.watch_eager();
        let after_eager = core::mem::replace(self.state, live);
        self.core.attached = attached;
        drop(watching);
        let (expected, fingerprint) = eager.map_err(|err| failed(err.to_string()))?;

        let output = self.replay_once(graph)?;
        let mut theirs = state::tensors_of(&after_eager);
        let mut ours = state::tensors_of(self.state);
        theirs.extend(tree::tensors_of(&expected));
        ours.extend(tree::tensors_of(&output));
        let mut names = Vec::new();
        self.state.visit_names(&mut |name| names.push(name));
        let (mut good, mut bad) = (Vec::new(), None);
        for (index, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            let difference =
                Difference::between(ours, theirs, self.verify_tolerance).map_err(failed)?;
            match difference {
                None => good.push(index),
                Some(difference) => {
                    bad.get_or_insert((index, difference));
                }
            }
        }
        if ours.len() != theirs.len() {
            return Err(failed(format!(
                "the replay left {} tensors, the eager step {}",
                ours.len(),
                theirs.len()
            )));
        }
        let Some((index, difference)) = bad else {
            return Ok(output);
        };
        let [first, last] = fingerprint.range(index, &good);
        let name = names.get(index).cloned().unwrap_or_else(|| {
            let outputs = ours.len() - tree::tensors_of(&output).len();
            match index.checked_sub(outputs) {
                Some(output) => format!("output tensor {output}"),
                None => format!("state tensor {index}"),
            }
        });
        // The eager result stands; the replay's step is not in the counters.
        graph.ticks.pending.fetch_sub(1, Ordering::Relaxed);
        *self.state = after_eager;
        self.core.attached = false;
        self.core.settle_clocks(self.state);
        Err(NoReplay::Wrong(Box::new(Mismatch {
            name,
            index,
            differing: difference.differing,
            elements: difference.elements,
            largest: difference.largest,
            first_index: first.0,
            first_operation: first.1,
            last_index: last.0,
            last_operation: last.1,
        })))
    }

    /// Move the state out of the graph-owned buffers, before anything but a replay works on it: what an eager step
    /// leaves as it was, or returns, must not be what a later replay writes.
    fn detach(&mut self) {
        // What reads the buffers from here on is not tied to the replays that write them.
        self.core.catch_up();
        self.core.settle_clocks(self.state);
        if self.core.attached {
            let copies: Vec<AnyTensor> = state::tensors_of(self.state)
                .iter()
                .map(duplicate_like)
                .collect();
            *self.state = state::with_tensors(self.state.clone(), &copies);
            self.core.attached = false;
        }
    }

    /// One eager step, the context as it left it, and the scope of its random draws, which some of them may still need.
    fn run_eager(&mut self, mode: Mode) -> (O, Context, Option<DrawScope>) {
        let keep = mode != Mode::Plain;
        let scope = match &self.core.pool {
            // In a buffer of its own: the draws may run when a later step has begun.
            Some(pool) if random::registered() => {
                let bytes: Vec<u8> = self
                    .random
                    .iter()
                    .flat_map(|word| word.to_le_bytes())
                    .collect();
                DrawScope::open(&self.core.device, pool.client.create_from_slice(&bytes))
            }
            _ => None,
        };
        // Updates that are fused are so in every step, or an eager one would leave other bits than a replay.
        let mode = match (mode, self.fused_updates) {
            (Mode::Plain, true) => Mode::Watched,
            (mode, _) => mode,
        };
        if mode != Mode::Plain {
            // Slots are written at once, and a replay that is not enqueued yet has its own values to write.
            self.core.catch_up();
        }
        let source = match mode {
            Mode::Plain => None,
            _ => self.core.slot_source(),
        };
        let mut context = Context::new(mode, self.rates.clone(), source);
        context.fused_updates = self.fused_updates;
        let run = || run_eager(self.state, self.step, self.batch, keep);
        let (output, context) = context::enter(context, run);
        (output, context, scope)
    }

    /// A step that nobody watches. `waited`: it is waited for before its output is dropped.
    fn unwatched(&mut self, waited: bool) -> O {
        let ends = self.fused_updates || waited;
        let pool = self.core.pool.as_ref().filter(|_| ends);
        // With slots it ends as a watched step does: all of it is launched, so that what is written into the slots next is
        // not what its updates read. So does one that is waited for: in plain Burn the loss is dropped behind the last
        // update, which has that fused with its gradient. A wait before would launch it alone, and round otherwise.
        let step_end = pool.map(|pool| pool.step_end(&state::tensors_of(self.state)));
        let output = self.run_eager(Mode::Plain).0;
        if let Some(step_end) = step_end {
            self.state.settle();
            drop(step_end);
            if let Some(pool) = &self.core.pool {
                pool.drain();
            }
        }
        output
    }

    fn wait_if_timed(&mut self) -> Result<(), StepError> {
        match self.synced {
            true => self.wait(),
            false => Ok(()),
        }
    }

    fn watch_eager(&mut self) -> Result<(O, Fingerprint), StepError> {
        let before = state::tensors_of(self.state);
        let backup = self.state.clone();
        let clocks = Clocks::of(self.state);
        let step_end = self.core.pool.as_ref().map(|pool| pool.step_end(&before));
        let recorder = Arc::new(Recorder::default());
        let (output, context, escaped, launches) = {
            let _operations = FusionObservation::new(recorder.clone());
            let _launches = LaunchObservation::new(recorder.clone());
            let (output, context, draws) = self.run_eager(Mode::Watched);
            self.state.settle();
            drop(step_end);
            if let Some(pool) = &self.core.pool {
                pool.drain();
                pool.settle_queue();
            }
            let escaped = draws.map_or(0, |draws| draws.escaped());
            (output, context, escaped, recorder.launches())
        };
        let after = state::tensors_of(self.state);
        if let Some(pool) = &self.core.pool {
            let results = after.iter().cloned().chain(tree::tensors_of(&output));
            if let Err(detail) = pool.check(&results.collect::<Vec<_>>()) {
                *self.state = state::with_tensors(backup, &before);
                return Err(StepError::Uncomputed { detail });
            }
        }
        drop(backup);
        let step = Observed {
            before: &before,
            batch: self.tensors,
            after: &after,
            clocks: &clocks,
        };
        let mut fingerprint = step.fingerprint(
            recorder.take(),
            self.state,
            &output,
            &context,
            Some(launches),
        );
        fingerprint.escaped = escaped;
        // Where the rate is in the key, asking for it is no matter.
        fingerprint.rate_read &= !self.baked.contains(self.key);
        fingerprint.replacement = self.state.replacement();
        Ok((output, fingerprint))
    }

    /// The last step before a window: run with the stream prepared, so that everything a recorded launch needs
    /// (metadata buffers of any size, pinned staging, tuned kernels) is there, and measured, so that the reserve
    /// is known.
    fn rehearse(&mut self) -> Result<(O, Option<Fingerprint>), StepError> {
        let Some(_window) = exclusive() else {
            return Ok((self.unwatched(self.synced), None));
        };
        let key = (self.function, self.key.clone());
        let mut in_use = None;
        if let Some(pool) = &self.core.pool {
            pool.drain();
            // Only the first time: a trim makes the rehearsals of other shapes stale, and two shapes that take turns
            // would keep each other from ever being recorded.
            if pool.rehearsal(&key).is_none() {
                pool.trim();
                in_use = Some(pool.bytes_in_use());
            }
        }
        // The guard borrows a driver of its own, since the step borrows the core's.
        let driver = DeviceDriver::new(self.core.device.clone());
        let prepared = Prepared::new(&driver);
        let (output, fingerprint) = self.watch_eager()?;
        match prepared {
            Ok(prepared) => {
                if let Some(pool) = &mut self.core.pool {
                    pool.rehearsed(key, fingerprint.launches.unwrap_or(0), in_use);
                }
                drop(prepared);
                Ok((output, Some(fingerprint)))
            }
            Err(detail) => {
                log::debug!(
                    "the stream could not be prepared, so this step rehearses nothing: {detail}"
                );
                Ok((output, None))
            }
        }
    }

    fn record_exclusive(
        &mut self,
        attempt: u32,
        rehearsed: Option<&Fingerprint>,
    ) -> Result<Attempt<Sealed<O>, O>, StepError> {
        let device = |doing: &str| {
            let doing = doing.to_string();
            move |detail: String| StepError::Device { doing, detail }
        };
        self.core.settle_clocks(self.state);
        let mut given_up = core::mem::take(&mut self.core.given_up);
        let before = state::tensors_of(self.state);
        let clocks = self.core.clocks.clone();
        // An optimizer may have made its state since, in a step of another key.
        let Some(rehearsed) = rehearsed.filter(|step| step.state_tensors == before.len()) else {
            return Ok(Attempt::Stale);
        };
        let backup = self.state.clone();
        let tracked = !self.baked.contains(self.key);
        let source = self.core.slot_source();
        let random = self
            .core
            .scalars
            .as_ref()
            .map(|scalars| scalars::lock(scalars).random());
        let device_of_draws = self.core.device.clone();
        let Some(pool) = self.core.pool.as_mut() else {
            return Ok(Attempt::Busy);
        };
        let batch = self.tensors;
        let Some(rehearsal) = pool.fresh_rehearsal(&(self.function, self.key.clone())) else {
            return Ok(Attempt::Stale);
        };

        // The state goes into graph-owned buffers; `snapshot` holds it outside of them.
        let (owned, snapshot) = match (&pool.state, self.core.attached) {
            (None, _) => {
                let owned = Pinned::duplicate(&before).map_err(device("taking over the state"))?;
                (owned, before.clone())
            }
            (Some(owned), true) => (
                owned.clone(),
                before.iter().map(duplicate_like).collect::<Vec<_>>(),
            ),
            (Some(owned), false) => {
                if let Err(detail) = owned.write(&before) {
                    return Ok(Attempt::Misfit(detail));
                }
                (owned.clone(), before.clone())
            }
        };
        let inputs = Pinned::duplicate(batch).map_err(device("taking over the batch"))?;
        let lifted: Vec<AnyTensor> = (inputs.tensors.iter().zip(batch))
            .map(|(owned, like)| AnyTensor::lifted_like(owned.clone(), like))
            .collect();
        let static_batch = tree::with_tensors(self.batch, &lifted, "batch")?;

        let step_end = pool.step_end(&before);
        let prepared = match Prepared::new(&self.core.driver) {
            Ok(prepared) => prepared,
            Err(detail) => {
                log::debug!("the stream could not be prepared: {detail}");
                return Ok(Attempt::Busy);
            }
        };
        // The write-back's launches, once outside the window: their kernels compile and their metadata is cached.
        let warm = owned
            .write(&snapshot)
            .map_err(device("rehearsing the write-back"))?;
        pool.prime_staging(rehearsal.launches + warm);
        let reserve_bytes = match rehearsal.needs.reserve(&pool.client, attempt) {
            Ok(bytes) => bytes,
            Err(detail) => {
                return Ok(Attempt::Refused(Refusal::Memory {
                    needed_bytes: rehearsal.needs.bytes(attempt),
                    detail: format!("the headroom reserve could not be had: {detail}"),
                }));
            }
        };
        let owned_and_inputs = owned.buffers().iter().chain(inputs.buffers());
        let computed = pool.check_buffers(owned_and_inputs.clone());
        if let Err(detail) = computed.and_then(|()| self.core.sync()) {
            let bytes = owned_and_inputs.map(|buffer| buffer.handle.size_in_used());
            return Ok(Attempt::Refused(Refusal::Memory {
                needed_bytes: bytes.sum(),
                detail: format!("the state could not be copied: {detail}"),
            }));
        }

        let overwritten = (owned.tensors.iter().zip(rehearsed.overwritable()))
            .filter(|(_, overwritable)| *overwritable)
            .map(|(tensor, _)| id(tensor))
            .collect();
        *self.state = state::with_tensors(self.state.clone(), &owned.tensors);
        let opened = Instant::now();
        let window = match prepared.open() {
            Ok(window) => window,
            Err(detail) => {
                *self.state = state::with_tensors(backup, &snapshot);
                self.core.attached = false;
                return Ok(Attempt::Refused(Refusal::Other { detail }));
            }
        };
        let recorder = Arc::new(Recorder::default());
        let recorded = {
            let _operations = FusionObservation::new(recorder.clone());
            let _launches = LaunchObservation::new(recorder.clone());
            let (state, step, owned) = (&mut *self.state, self.step, &owned);
            let pool = self.core.pool.as_ref();
            let mut context = Context::new(Mode::Recording { tracked }, self.rates.clone(), source);
            context.fused_updates = self.fused_updates;
            context.overwritten = overwritten;
            catch_unwind(AssertUnwindSafe(|| -> Result<(O, Recorded), String> {
                let draws = random.and_then(|random| DrawScope::open(&device_of_draws, random));
                let (output, context) =
                    context::enter(context, || step(state, static_batch, StepRate::new()));
                let after = state::tensors_of(state);
                // A step that does something else when it is recorded (every fourth one, or since a read failed in
                // the window) must not be replayed for ever.
                if let Some(pool) = pool {
                    pool.settle_queue();
                }
                let observed = Observed {
                    before: &owned.tensors,
                    batch: &lifted,
                    after: &after,
                    clocks: &clocks,
                };
                let mut now = observed.fingerprint(recorder.take(), state, &output, &context, None);
                // Where the rate is in the key, asking for it is no matter.
                now.rate_read &= tracked;
                match Fingerprint::compare(Some(rehearsed), &now) {
                    // Whatever the comparison says, nothing with a marked rate in it is ever sealed.
                    _ if now.holds(context::is_marked) => return Err(RATE_BAKED.into()),
                    Verdict::Same | Verdict::First => {}
                    // Marked rates went somewhere else than to our optimizers, perhaps.
                    _ if tracked => return Err(RATE_BAKED.into()),
                    Verdict::Differs(reason) | Verdict::Never(reason) => {
                        return Err(format!(
                            "the step to record is not the one rehearsed: {reason}"
                        ));
                    }
                    Verdict::RateBaked { .. } => return Err(RATE_BAKED.into()),
                }
                let slots: Option<Vec<ReplaySlot>> = context
                    .slots
                    .iter()
                    .map(|slot| ReplaySlot::new(slot, &clocks))
                    .collect();
                let Some(slots) = slots else {
                    return Err("an optimizer's state was made while recording".into());
                };
                let ticks = Clocks::of(state)
                    .counts
                    .into_iter()
                    .filter_map(|(clock, after)| {
                        let before = clocks.get(clock)?;
                        Some((clock, after.checked_sub(before)?))
                    })
                    .collect();
                let recorded = Recorded {
                    slots,
                    ticks,
                    parts: clocks.parts.clone(),
                };
                drop(step_end);
                // Off the tape, and launched: an output nobody asked for yet would be left out of the recording. One
                // that is the state from before the step is copied before that is overwritten.
                let taped = output;
                let output = taped.map_tensors(&mut |tensor| match owned.shares_memory(&tensor) {
                    true => duplicate_like(&tensor),
                    false => tensor.as_leaf(),
                });
                drop(taped);
                Pinned::hold(tree::tensors_of(&output))?;
                owned.write(&after)?;
                match draws.map_or(0, |draws| draws.escaped()) {
                    0 => Ok((output, recorded)),
                    draws => Err(FallbackReason::RandomEscaped { draws }.to_string()),
                }
            }))
        };
        let sealed = window.seal();
        let neighbour = neighbours::since(opened);
        if let (Some(neighbour), Ok(graph)) = (neighbour, &sealed) {
            // What the neighbour launched meanwhile is in the recording and was not run. Of ours it writes buffers that
            // only graphs own, and that the next attempt fills anew.
            log::warn!(
                "a thread on stream {} launched work while a step was recorded on the device's stream that both share: the \
                 recording is run once, for that work, and dropped",
                neighbour.stream
            );
            let run = match self.core.pool.as_mut() {
                Some(pool) => graph.replay(pool).and_then(|()| self.core.sync()),
                None => Ok(()),
            };
            if let Err(detail) = run {
                log::error!("work of stream {} did not run: {detail}", neighbour.stream);
            }
        }

        let restore = |state: &mut S| *state = state::with_tensors(backup.clone(), &snapshot);
        let (output, recorded, graph) = match (recorded, sealed) {
            (Ok(Ok((output, recorded))), Ok(graph)) if neighbour.is_none() => {
                (output, recorded, graph)
            }
            (recorded, sealed) => {
                restore(self.state);
                self.core.attached = false;
                let (sealed, words) = match sealed {
                    Ok(graph) => (Some(graph), None),
                    Err(words) => (None, Some(words)),
                };
                given_up.extend(sealed);
                return match recorded {
                    Err(panic) => match refused_by_device(panic.as_ref()) {
                        Some(detail) => {
                            Ok(Attempt::Refused(Refusal::Final(FallbackReason::HostRead {
                                detail,
                            })))
                        }
                        None => {
                            self.core.given_up = given_up;
                            resume_unwind(panic)
                        }
                    },
                    Ok(Err(detail)) if detail == RATE_BAKED => {
                        self.core.given_up = given_up;
                        Ok(Attempt::RateBaked)
                    }
                    Ok(_) if neighbour.is_some() => {
                        Ok(neighbour.map_or(Attempt::Busy, Attempt::Shared))
                    }
                    Ok(Err(detail)) => Ok(Attempt::Refused(refusal(
                        words.map_or(detail.clone(), |words| format!("{detail}; {words}")),
                        reserve_bytes,
                    ))),
                    Ok(Ok(_)) => Ok(Attempt::Refused(refusal(
                        words.unwrap_or_default(),
                        reserve_bytes,
                    ))),
                };
            }
        };

        // What the recording computed was never computed; the state is the graph's buffers, still at their values
        // from before the step, and the first replay takes the step.
        *self.state = state::with_tensors(backup.clone(), &owned.tensors);
        self.core.attached = true;
        let ticks = Arc::new(Ticks {
            by: recorded.ticks,
            parts: recorded.parts,
            pending: Arc::default(),
        });
        self.core.ticks.push(ticks.clone());
        let outputs = match Pinned::hold(tree::tensors_of(&output)) {
            Ok(outputs) => outputs,
            Err(detail) => {
                restore(self.state);
                self.core.attached = false;
                return Ok(Attempt::Refused(Refusal::Other { detail }));
            }
        };
        let slots = self.core.scalars.as_ref();
        let slots = slots.map(|_| recorded.slots.iter().map(|slot| slot.dtype));
        let copies = launches_around(&inputs, &outputs, slots);
        let launches = match self.core.support {
            Support::Hardware => Some(1 + copies),
            // Each dispatch is encoded again.
            _ => None,
        };
        let Some(pool) = self.core.pool.as_mut() else {
            return Ok(Attempt::Busy);
        };
        pool.state = Some(owned);
        let held = pool.hold(rehearsal.step_bytes + inputs.bytes());
        let scalars =
            (self.core.scalars.as_ref()).map(|scalars| scalars::lock(scalars).writer().clone());
        let graph = Sealed {
            replay: Replay::new(graph, &inputs, &outputs, scalars),
            _inputs: inputs,
            _outputs: outputs,
            output,
            held,
            launches,
            slots: recorded.slots,
            ticks,
        };
        self.core.refresh_scalars(&graph, self.rates, self.random);
        if let Err(detail) = graph.replay_bare(self.core) {
            restore(self.state);
            self.core.attached = false;
            return Ok(Attempt::Refused(Refusal::Other { detail }));
        }
        graph.ticks.pending.fetch_add(1, Ordering::Relaxed);
        drop(snapshot);
        let returned = copy_out(&graph.output);
        drop(given_up);
        if let Some(pool) = &self.core.pool {
            pool.drain();
            pool.trim();
        }
        log::debug!(
            "recorded {} launches, {warm} of them write-back",
            recorder.launches()
        );
        Ok(Attempt::Sealed {
            graph,
            output: returned,
        })
    }
}

/// What a recording gives up with when its rate went into launches.
const RATE_BAKED: &str = "the step uses its learning rate as a number";

/// What a recording showed beside its launches.
struct Recorded {
    slots: Vec<ReplaySlot>,
    /// What the step added to the state's counters.
    ticks: HashMap<u64, u64>,
    parts: Vec<u64>,
}

/// How two tensors differ.
struct Difference {
    differing: usize,
    elements: usize,
    largest: f64,
}

impl Difference {
    /// `None` when they hold the same bits, or are as near as `tolerance` asks. Reads both.
    fn between(
        ours: &AnyTensor,
        theirs: &AnyTensor,
        tolerance: f32,
    ) -> Result<Option<Self>, String> {
        let (ours, theirs) = (ours.read()?, theirs.read()?);
        if ours.bytes() == theirs.bytes() {
            return Ok(None);
        }
        let elements = ours.num_elements();
        if ours.shape() != theirs.shape() || ours.dtype() != theirs.dtype() {
            return Ok(Some(Self {
                differing: elements,
                elements,
                largest: f64::NAN,
            }));
        }
        let (mut differing, mut largest) = (0, 0f64);
        for (a, b) in ours.iter::<f64>().zip(theirs.iter::<f64>()) {
            let difference = (a - b).abs();
            let near = f64::from(tolerance) * a.abs().max(1.0);
            let both_nan = a.is_nan() && b.is_nan();
            // Equal numbers of other bits are zeros of either sign, which a tolerance of zero tells apart.
            let same_bits = a.to_bits() == b.to_bits();
            if !(same_bits || both_nan || (tolerance > 0.0 && difference <= near)) {
                differing += 1;
                largest = if difference > largest || difference.is_nan() {
                    difference
                } else {
                    largest
                };
            }
        }
        Ok((differing > 0).then_some(Self {
            differing,
            elements,
            largest,
        }))
    }
}

/// The tensors around a step that was observed.
struct Observed<'a> {
    before: &'a [AnyTensor],
    batch: &'a [AnyTensor],
    after: &'a [AnyTensor],
    /// The state's counters before the step.
    clocks: &'a Clocks,
}

impl Observed<'_> {
    fn fingerprint<S: StepState, O: TensorTree>(
        &self,
        operations: Vec<OperationIr>,
        state: &S,
        output: &O,
        context: &Context,
        launches: Option<u64>,
    ) -> Fingerprint {
        let ids = |tensors: &[AnyTensor]| tensors.iter().map(id).collect::<Vec<u64>>();
        let tensors = StepTensors {
            state_before: ids(self.before),
            batch: ids(self.batch),
            state_after: ids(self.after),
            outputs: ids(&tree::tensors_of(output)),
        };
        let mut fingerprint = Fingerprint::new(operations, &tensors, launches);
        state.visit_host_fields(&mut |field| fingerprint.host.push(field));
        output.visit_host_fields(&mut |field| fingerprint.host.push(field));
        // How far the step moved each counter, which a replay will move as far; -1 for one it made.
        state.visit_clocks(&mut |clock, after| {
            if let Some(after) = after {
                let before = self.clocks.get(clock);
                let moved = before.map(|before| after as i64 - before as i64);
                fingerprint.host.push(HostField::Int(moved.unwrap_or(-1)));
            }
        });
        // Parts may be made in a step, behind or between others; one that is gone or double was replaced.
        let before = &self.clocks.parts;
        let after = Clocks::of(state).parts;
        let distinct: HashSet<u64> = after.iter().copied().collect();
        let old = |part: &u64| before.contains(part);
        let kept: Vec<u64> = after.iter().copied().filter(old).collect();
        if distinct.len() != after.len() || kept != *before {
            fingerprint.never = Some(FallbackReason::ReplacedCounters);
        }
        fingerprint.slots = context.slots.iter().map(|slot| slot.rate).collect();
        fingerprint.rates = context.rates.classes.clone();
        fingerprint.rate_read = context.rate_read;
        fingerprint
    }
}

/// Refusals that a larger reserve may cure, by CubeCL's own words: its typed error does not reach this far.
fn refusal(detail: String, reserve_bytes: u64) -> Refusal {
    match detail.contains("No room for") {
        true => Refusal::Room {
            reserve_bytes,
            detail,
        },
        false => Refusal::Other { detail },
    }
}

/// The device's words when a panic inside a window comes from an operation that a window refuses; a panic of the
/// user's own is `None`.
fn refused_by_device(panic: &(dyn core::any::Any + Send)) -> Option<String> {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())?;
    let lower = text.to_lowercase();
    // wgpu names its window; CUDA's driver answers with one of its capture errors, 900 to 908.
    let refused = lower.contains("capture window")
        || (900..=908).any(|status| lower.contains(&format!("failed with status {status}")));
    refused.then(|| text.to_string())
}
