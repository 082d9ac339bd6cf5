//! Runs, records and replays a step on a CubeCL device.
//!
//! The graph runs on graph-owned duplicates of the state, so what the state was before the window *is* the snapshot:
//! a refused window taints the duplicates, the originals were never given to it. Once a state is graph-owned, a
//! second graph over it takes its snapshot by copying. Between eager steps the state lives in ordinary tensors and
//! the graph-owned ones are stale (`attached` is false); the next replay copies them in first.

use crate::driver::{DeviceDriver, Prepared, SealedGraph, exclusive, lock_patiently};
use crate::engine::{Attempt, NoReplay, StepHost, Watch};
use crate::error::{FallbackReason, StepError};
use crate::fingerprint::{Recorder, StepTensors};
use crate::lifecycle::{Refusal, Verdict};
use crate::pool::{Held, Pinned, Pool, duplicate_like, home, id};
use crate::state::{self, StepState};
use crate::step::run_eager;
use crate::support::Support;
use crate::tensor::{AnyTensor, TensorSpec};
use crate::tree::{self, TensorTree};
use burn::tensor::Device;
use burn_fusion::observer::FusionObservation;
use burn_fusion::stream::StreamId;
use burn_ir::OperationIr;
use cubecl_runtime::logging::LaunchObservation;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard};

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
}

impl HostCore {
    pub fn new(device: &Device, support: &Support) -> Self {
        let usable = !matches!(support, Support::None { .. });
        crate::driver::tolerate_captures();
        Self {
            pool: usable.then(|| Pool::new(device)).flatten(),
            driver: DeviceDriver::new(device.clone()),
            device: device.clone(),
            stream: StreamId::current(),
            support: support.clone(),
            attached: false,
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

    /// Let the graph-owned state go; every graph must be gone.
    pub fn forget(&mut self) {
        self.attached = false;
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
            true => duplicate_like(tensor),
            false => tensor.clone(),
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
    graph: SealedGraph,
    inputs: Pinned,
    /// The recorded output, whose tensors every replay overwrites.
    output: O,
    held: Held,
    launches: Option<u64>,
}

impl<O> Sealed<O> {
    /// Enqueue the graph alone.
    pub fn replay_bare(&self, core: &mut HostCore) -> Result<(), String> {
        match core.pool.as_mut() {
            Some(pool) => self.graph.replay(pool),
            None => Err("the graph's pool is gone".to_string()),
        }
    }
}

/// One call's host.
pub(crate) struct Host<'a, S, B, O, F> {
    pub core: &'a mut HostCore,
    pub state: &'a mut S,
    pub step: &'a F,
    pub batch: &'a B,
    /// The batch's tensors.
    pub tensors: &'a [AnyTensor],
    pub lr: f64,
    /// Wait for the device after each step, so that the call's time is the step's.
    pub synced: bool,
    pub output: core::marker::PhantomData<O>,
}

impl<S, B, O, F> StepHost for Host<'_, S, B, O, F>
where
    S: StepState,
    B: TensorTree,
    O: TensorTree,
    F: Fn(&mut S, B, f64) -> O,
{
    type Fingerprint = Fingerprint;
    type Graph = Sealed<O>;
    type Output = O;

    fn eager(&mut self, watch: Watch) -> Result<(O, Option<Fingerprint>), StepError> {
        self.detach();
        if watch == Watch::Off || self.core.pool.is_none() {
            let output = self.run_eager();
            self.wait_if_timed()?;
            return Ok((output, None));
        }
        let Some(_watching) = watching() else {
            return Ok((self.run_eager(), None));
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
        let Some(_watching) = watching() else {
            return Ok(Attempt::Busy);
        };
        let Some(_window) = exclusive() else {
            return Ok(Attempt::Busy);
        };
        self.record_exclusive(attempt, rehearsed)
    }

    fn replay(&mut self, graph: &Sealed<O>) -> Result<O, NoReplay> {
        let attached = self.core.attached;
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
        let refreshed = graph.inputs.refresh(self.tensors);
        graph.graph.replay(pool).map_err(NoReplay::Failed)?;
        drop(refreshed);
        let output = copy_out(&graph.output);
        if self.synced {
            self.core.sync().map_err(NoReplay::Failed)?;
        }
        Ok(output)
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
        if let Some(pool) = &self.core.pool {
            pool.trim();
        }
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
    output
        .clone()
        .map_tensors(&mut |tensor| duplicate_like(&tensor))
}

impl<S, B, O, F> Host<'_, S, B, O, F>
where
    S: StepState,
    B: TensorTree,
    O: TensorTree,
    F: Fn(&mut S, B, f64) -> O,
{
    /// Move the state out of the graph-owned buffers, before anything but a replay works on it: what an eager step
    /// leaves as it was, or returns, must not be what a later replay writes.
    fn detach(&mut self) {
        if self.core.attached {
            let copies: Vec<AnyTensor> = state::tensors_of(self.state)
                .iter()
                .map(duplicate_like)
                .collect();
            *self.state = state::with_tensors(self.state.clone(), &copies);
            self.core.attached = false;
        }
    }

    /// One step of plain Burn.
    fn run_eager(&mut self) -> O {
        run_eager(self.state, self.step, self.batch, self.lr)
    }

    fn wait_if_timed(&self) -> Result<(), StepError> {
        match self.synced {
            true => self.core.sync(),
            false => Ok(()),
        }
        .map_err(|detail| StepError::Device {
            doing: "waiting for a step".into(),
            detail,
        })
    }

    fn watch_eager(&mut self) -> Result<(O, Fingerprint), StepError> {
        let before = state::tensors_of(self.state);
        let step_end = self.core.pool.as_ref().map(|pool| pool.step_end(&before));
        let recorder = Arc::new(Recorder::default());
        let (output, launches) = {
            let _operations = FusionObservation::new(recorder.clone());
            let _launches = LaunchObservation::new(recorder.clone());
            let output = self.run_eager();
            self.state.settle();
            drop(step_end);
            if let Some(pool) = &self.core.pool {
                pool.drain();
                pool.settle_queue();
            }
            (output, recorder.launches())
        };
        let after = state::tensors_of(self.state);
        let step = Observed {
            before: &before,
            batch: self.tensors,
            after: &after,
        };
        let fingerprint = step.fingerprint(recorder.take(), self.state, &output, Some(launches));
        Ok((output, fingerprint))
    }

    /// The last step before a window: run with the stream prepared, so that everything a recorded launch needs
    /// (metadata buffers of any size, pinned staging, tuned kernels) is there, and measured, so that the reserve
    /// is known.
    fn rehearse(&mut self) -> Result<(O, Option<Fingerprint>), StepError> {
        let Some(_window) = exclusive() else {
            return Ok((self.run_eager(), None));
        };
        let shapes: Vec<TensorSpec> = self.tensors.iter().map(AnyTensor::spec).collect();
        let mut in_use = None;
        if let Some(pool) = &self.core.pool {
            pool.drain();
            // Only the first time: a trim makes the rehearsals of other shapes stale, and two shapes that take turns
            // would keep each other from ever being recorded.
            if pool.rehearsal(&shapes).is_none() {
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
                    pool.rehearsed(shapes, fingerprint.launches.unwrap_or(0), in_use);
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
        let before = state::tensors_of(self.state);
        let backup = self.state.clone();
        let Some(pool) = self.core.pool.as_mut() else {
            return Ok(Attempt::Busy);
        };
        let batch = self.tensors;
        let shapes: Vec<TensorSpec> = batch.iter().map(AnyTensor::spec).collect();
        let Some(rehearsal) = pool.fresh_rehearsal(&shapes) else {
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
                    return Ok(Attempt::Refused(Refusal::Other { detail }));
                }
                (owned.clone(), before.clone())
            }
        };
        let inputs = Pinned::duplicate(batch).map_err(device("taking over the batch"))?;
        let lifted: Vec<AnyTensor> = (inputs.tensors.iter().zip(batch))
            .map(|(owned, like)| AnyTensor::lifted_like(owned.clone(), like))
            .collect();
        let static_batch = tree::with_tensors(self.batch.clone(), &lifted, "batch")?;

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
                return Ok(Attempt::Refused(Refusal::Room {
                    reserve_bytes: rehearsal.needs.bytes(attempt),
                    detail: format!("the headroom reserve could not be had: {detail}"),
                }));
            }
        };
        self.core
            .device
            .sync()
            .map_err(|err| device("preparing a recording")(err.to_string()))?;

        *self.state = state::with_tensors(self.state.clone(), &owned.tensors);
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
            let (state, step, lr, owned) = (&mut *self.state, self.step, self.lr, &owned);
            let pool = self.core.pool.as_ref();
            catch_unwind(AssertUnwindSafe(|| -> Result<O, String> {
                let output = step(state, static_batch, lr);
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
                };
                let now = observed.fingerprint(recorder.take(), state, &output, None);
                if let Verdict::Differs(reason) | Verdict::Never(reason) =
                    Fingerprint::compare(rehearsed, &now)
                {
                    return Err(format!(
                        "the step to record is not the one rehearsed: {reason}"
                    ));
                }
                drop(step_end);
                // Off the tape, and launched: an output nobody asked for yet would be left out of the recording. One
                // that is the state from before the step is copied before that is overwritten.
                let output = output.map_tensors(&mut |tensor| match owned.shares_memory(&tensor) {
                    true => duplicate_like(&tensor),
                    false => tensor.as_leaf(),
                });
                Pinned::hold(tree::tensors_of(&output))?;
                owned.write(&after)?;
                Ok(output)
            }))
        };
        let sealed = window.seal();

        let restore = |state: &mut S| *state = state::with_tensors(backup, &snapshot);
        let (output, graph) = match (recorded, sealed) {
            (Ok(Ok(output)), Ok(graph)) => (output, graph),
            (recorded, sealed) => {
                restore(self.state);
                self.core.attached = false;
                let words = sealed.err();
                return match recorded {
                    Err(panic) => match refused_by_device(panic.as_ref()) {
                        Some(detail) => {
                            Ok(Attempt::Refused(Refusal::Final(FallbackReason::HostRead {
                                detail,
                            })))
                        }
                        None => resume_unwind(panic),
                    },
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
        *self.state = state::with_tensors(self.state.clone(), &owned.tensors);
        let Some(pool) = self.core.pool.as_mut() else {
            return Ok(Attempt::Busy);
        };
        pool.state = Some(owned);
        self.core.attached = true;
        if let Err(detail) = graph.replay(pool) {
            restore(self.state);
            self.core.attached = false;
            return Ok(Attempt::Refused(Refusal::Other { detail }));
        }
        drop(snapshot);
        let returned = copy_out(&output);
        pool.drain();
        pool.trim();
        let held = pool.hold(rehearsal.step_bytes + inputs.bytes());
        let outputs = tree::tensors_of(&output);
        let copies = (batch.len() + outputs.len()) as u64;
        let launches = match self.core.support {
            Support::Hardware => Some(1 + copies),
            // Each dispatch is encoded again.
            _ => None,
        };
        log::debug!(
            "recorded {} launches, {warm} of them write-back",
            recorder.launches()
        );
        Ok(Attempt::Sealed {
            graph: Sealed {
                graph,
                inputs,
                output,
                held,
                launches,
            },
            output: returned,
        })
    }
}

/// The tensors around a step that was observed.
struct Observed<'a> {
    before: &'a [AnyTensor],
    batch: &'a [AnyTensor],
    after: &'a [AnyTensor],
}

impl Observed<'_> {
    fn fingerprint<S: StepState, O: TensorTree>(
        &self,
        operations: Vec<OperationIr>,
        state: &S,
        output: &O,
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
