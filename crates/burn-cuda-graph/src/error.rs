//! Errors and fallback reasons.
//!
//! A fallback is a value: the step ran, eagerly, with the result it would have had without us. An error means
//! that the step did not run; the state is what it was before the call, except where a variant says otherwise.

use crate::shape_key::ShapeKey;
use serde::{Deserialize, Serialize};

/// Why a step ran eagerly. The `Display` text names the remedy where there is one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum FallbackReason {
    /// The key is not stable for long enough yet.
    #[error("warming up: {done} of {needed} stable steps of this key seen")]
    WarmingUp {
        /// Stable steps seen, this one included.
        done: u32,
        /// Stable steps needed before the key is recorded.
        needed: u32,
    },
    /// The device has no graphs.
    #[error(
        "the device has no graphs: {backend}; use Device::cuda (feature `cuda`) or Device::wgpu (feature `wgpu`)"
    )]
    Unsupported {
        /// The device, and what it lacks.
        backend: String,
    },
    /// The step draws random numbers from Burn's generator, whose seed a recording would freeze.
    #[error(
        "the step draws random numbers ({operation}, shape {shape:?}) and the generator that replays can follow is not \
         registered: open the device with burn_cuda_graph::device(..) (or call register_random()) at the start of the \
         program, before the first tensor operation"
    )]
    RandomOperation {
        /// The operation.
        operation: String,
        /// Shape of its output.
        shape: Vec<usize>,
    },
    /// Some of the step's random draws ran on Burn's generator all the same.
    #[error(
        "Burn's fusion ran {draws} of the step's random draws by themselves, on its own generator: a replay would repeat \
         them; a step that goes on doing this draws its numbers better outside, and gets them in the batch"
    )]
    RandomEscaped {
        /// Draws.
        draws: u32,
    },
    /// A host scalar of an operation changes from step to step, and a recording would freeze it.
    #[error(
        "operation {index} ({operation}) takes the host scalar {after} where the step before took {before}: a replay \
         would freeze it; stock optimizers with a step counter (Adam and its kin) do this, plain SGD does not"
    )]
    MovingScalar {
        /// The operation.
        operation: String,
        /// Its place in the step.
        index: usize,
        /// The scalar in the step before.
        before: String,
        /// The scalar now.
        after: String,
    },
    /// A stock optimizer keeps its tensors and its scalars to itself, so a replay could not move them.
    #[error("{detail}; the optimizer is one of Burn's own: import {replacement} instead")]
    StockOptimizer {
        /// What to import.
        replacement: String,
        /// What of it a replay would freeze.
        detail: String,
    },
    /// The state has other tensors than in the step before: an optimizer made its own in it.
    #[error(
        "the state has {after} tensors where it had {before}: an optimizer makes its own in its first step; the step is \
         compared with the next one"
    )]
    StateGrew {
        /// Tensors of the state in the step before.
        before: usize,
        /// Tensors now.
        after: usize,
    },
    /// A step replaces the state of an optimizer, step counts included, by another's.
    #[error(
        "the step puts another optimizer's state, step counts included, in the place of one (a part of the state was \
         cloned or loaded in the step): a replay could move its tensors but not its counts; copy the model alone, or \
         do it outside with update_state"
    )]
    ReplacedCounters,
    /// The learning rate differs from that of the other steps with the same shapes.
    #[error(
        "the learning rate moved from {before} to {after}, and the step's launches hold it as a constant, so each rate needs \
         a graph of its own: use an optimizer of burn_cuda_graph::optim and hand it the step's rate as it comes (without \
         asking for its value), or keep the rate constant for a while (at least the warm-up)"
    )]
    LearningRateMoved {
        /// The rate of the step before with these shapes.
        before: f64,
        /// The rate now.
        after: f64,
    },
    /// The step makes a tensor from host data, which a recording would freeze.
    #[error(
        "the step makes a tensor from host data ({dtype}, shape {shape:?}): a replay would use the recorded values for \
         ever; make it outside the step, or pass it in the batch"
    )]
    HostData {
        /// Element type.
        dtype: String,
        /// Shape.
        shape: Vec<usize>,
    },
    /// The step reads the device: a value that a replay cannot hand back.
    #[error(
        "the step reads a tensor's values on the host: return the tensor as the step's output and read it after the \
         step. The device said: {detail}"
    )]
    HostRead {
        /// The device's own words.
        detail: String,
    },
    /// The step carries a tensor over to the next step that is not part of its state.
    #[error(
        "the step uses a tensor that the step before made ({operation}, shape {shape:?}) and that is not part of its \
         declared state: a replay would use the recorded one for ever; optimizers with state (momentum, Adam) and \
         tensors kept inside the closure do this"
    )]
    HiddenState {
        /// The operation that uses it.
        operation: String,
        /// Shape of the tensor.
        shape: Vec<usize>,
    },
    /// Two steps with equal keys ran different operations.
    #[error(
        "two steps with equal shapes ran different operations: operation {index} was {before}, now it is {after}; a \
         branch on data or on a counter does this"
    )]
    UnstableOperations {
        /// Place of the first difference.
        index: usize,
        /// The operation in the step before.
        before: String,
        /// The operation now.
        after: String,
    },
    /// The window closed without a graph.
    #[error("the recording was refused: {detail}")]
    Refused {
        /// The device's own words.
        detail: String,
    },
    /// The memory held had no room for the recording, even with the largest headroom reserve tried.
    #[error(
        "no room for the recording after {attempts} attempts, the last with a reserve of {reserve_bytes} bytes: {detail}"
    )]
    NoRoom {
        /// Windows tried.
        attempts: u32,
        /// Bytes reserved for the last one.
        reserve_bytes: u64,
        /// The device's own words.
        detail: String,
    },
    /// A replay was found to leave something else than the eager step.
    #[error("a verified replay was wrong: {0}")]
    NotVerified(Box<Mismatch>),
    /// Too many different keys came by for any of them to settle.
    #[error(
        "{keys} different shape keys came by without one staying for the warm-up: pad the batches to a few fixed \
         shapes, or drop the last partial batch"
    )]
    NeverSettles {
        /// Keys seen.
        keys: usize,
    },
    /// A tensor of the batch or the state is quantized.
    #[error(
        "tensor {index} of the {place} is quantized ({dtype}): only float, int and bool tensors can be recorded"
    )]
    Quantized {
        /// `batch` or `state`.
        place: String,
        /// Its place.
        index: usize,
        /// Element type.
        dtype: String,
    },
    /// A tensor of the batch has no elements.
    #[error(
        "tensor {index} of the batch has no elements (shape {shape:?}): it has no buffer that a graph could read"
    )]
    EmptyTensor {
        /// Its place.
        index: usize,
        /// Shape.
        shape: Vec<usize>,
    },
    /// Another window is open on this device; the step is recorded at a later call.
    #[error("another recording is under way on this device; this step is recorded at a later call")]
    CaptureBusy,
    /// Another thread works on the device's stream that the step is recorded on. The step is recorded once it is quiet.
    #[error(
        "another thread's stream ({neighbour}) shares one of the device's with this step's, and worked on it within the last \
         seconds: the step is recorded once it is quiet. CubeCL has {streams} streams of the device for all threads: use fewer \
         threads, or raise max_streams in its configuration"
    )]
    StreamShared {
        /// The other stream's number.
        neighbour: u64,
        /// Streams of the device.
        streams: u64,
    },
    /// A step that could have been replayed was run eagerly to be timed, as asked.
    #[error("it was run eagerly to be timed, as asked; others of its key are replayed")]
    Timed,
    /// Replays were not faster than eager steps ([`Policy::Adaptive`](crate::Policy::Adaptive)).
    #[error(
        "a replay took {replay_ms:.3} ms and an eager step {eager_ms:.3} ms, so the graph does not pay and was dropped: \
         the device limits this step, not its launches; it is tried again when the key comes by twice or half as often"
    )]
    ReplayDoesNotPay {
        /// Median of the timed eager steps.
        eager_ms: f64,
        /// Median of the timed replays.
        replay_ms: f64,
    },
    /// The device has too little free memory to record the step, with every graph that could make room gone.
    #[error(
        "the device has no memory left to record the step, which asks for {needed_bytes} bytes: make batches smaller, or \
         free memory and call release(); it is tried again when the state's graphs are dropped. The device said: {detail}"
    )]
    OutOfMemory {
        /// Bytes that the recording asks for beyond what is held.
        needed_bytes: u64,
        /// The device's own words.
        detail: String,
    },
    /// The key comes by too rarely for its replays to earn back the time of its recording.
    #[error(
        "the key comes by too rarely: {expected} replays are expected, and {needed} earn a recording back; pad batches to \
         fewer shapes"
    )]
    TooRare {
        /// Replays expected, from how often the key came by.
        expected: u64,
        /// Replays that earn the time of a recording back, as measured on other keys.
        needed: u64,
    },
    /// The cache is full of graphs that are worth more.
    #[error(
        "the {graphs} graphs held, of {bytes} bytes, save more time than one of this key would: allow more (max_graphs, \
         max_bytes), or pad batches to fewer shapes"
    )]
    CacheFull {
        /// Graphs held.
        graphs: usize,
        /// Bytes they hold.
        bytes: u64,
    },
    /// A graph was evicted before its replays had earned its recording back
    /// ([`Policy::Adaptive`](crate::Policy::Adaptive)).
    #[error(
        "the graph was evicted after {replays} replays, and {needed} earn its recording back: the key comes by too rarely; \
         pad batches to fewer shapes, or allow more graphs (max_graphs, max_bytes); it is tried again when the key comes \
         by twice or half as often"
    )]
    NotAmortised {
        /// Replays of the graph.
        replays: u64,
        /// Replays that were needed.
        needed: u64,
    },
}

impl FallbackReason {
    /// A short name, stable across releases: what the report counts by.
    pub fn name(&self) -> &'static str {
        match self {
            FallbackReason::WarmingUp { .. } => "warming-up",
            FallbackReason::Unsupported { .. } => "unsupported",
            FallbackReason::RandomOperation { .. } => "random-operation",
            FallbackReason::RandomEscaped { .. } => "random-escaped",
            FallbackReason::MovingScalar { .. } => "moving-scalar",
            FallbackReason::StockOptimizer { .. } => "stock-optimizer",
            FallbackReason::StateGrew { .. } => "state-grew",
            FallbackReason::ReplacedCounters => "replaced-counters",
            FallbackReason::LearningRateMoved { .. } => "learning-rate-moved",
            FallbackReason::HostData { .. } => "host-data",
            FallbackReason::HostRead { .. } => "host-read",
            FallbackReason::HiddenState { .. } => "hidden-state",
            FallbackReason::UnstableOperations { .. } => "unstable-operations",
            FallbackReason::Refused { .. } => "refused",
            FallbackReason::NoRoom { .. } => "no-room",
            FallbackReason::NotVerified(_) => "not-verified",
            FallbackReason::NeverSettles { .. } => "never-settles",
            FallbackReason::Quantized { .. } => "quantized",
            FallbackReason::EmptyTensor { .. } => "empty-tensor",
            FallbackReason::CaptureBusy => "capture-busy",
            FallbackReason::StreamShared { .. } => "stream-shared",
            FallbackReason::Timed => "timed",
            FallbackReason::ReplayDoesNotPay { .. } => "replay-does-not-pay",
            FallbackReason::NotAmortised { .. } => "not-amortised",
            FallbackReason::OutOfMemory { .. } => "out-of-memory",
            FallbackReason::TooRare { .. } => "too-rare",
            FallbackReason::CacheFull { .. } => "cache-full",
        }
    }

    /// Whether the step is on its way to a graph rather than kept from one.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            FallbackReason::WarmingUp { .. }
                | FallbackReason::CaptureBusy
                | FallbackReason::StreamShared { .. }
                | FallbackReason::Timed
                | FallbackReason::TooRare { .. }
                | FallbackReason::CacheFull { .. }
                | FallbackReason::LearningRateMoved { .. }
                | FallbackReason::StateGrew { .. }
        )
    }
}

/// The first difference between a replay and the eager step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[error(
    "a replay left {differing} of {elements} values of {name} other than the eager step did (largest difference \
     {largest:e}), after operations {first_index} ({first_operation}) to {last_index} ({last_operation}) of the step"
)]
#[non_exhaustive]
pub struct Mismatch {
    /// The parameter, or what else of state or output it is.
    pub name: String,
    /// Its place in the state, or after it in the output.
    pub index: usize,
    /// Values that differ.
    pub differing: usize,
    /// Values compared.
    pub elements: usize,
    /// The largest absolute difference; NaN when only one of the two is a number.
    pub largest: f64,
    /// Place in the step of the first operation that this tensor depends on and that no equal one does.
    pub first_index: usize,
    /// That operation.
    pub first_operation: String,
    /// Place of the operation that makes the tensor.
    pub last_index: usize,
    /// That operation.
    pub last_operation: String,
}

/// A call that did not run its step.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// A verified replay left something else than the eager step. The state is what the eager step left, so training can
    /// go on; the graph is dropped, and the key stays eager with [`FallbackReason::NotVerified`].
    #[error("{0}; the state is what the eager step left, and the graph is dropped")]
    Verification(Box<Mismatch>),
    /// Rates by parameter group were given for a state that names no parameters.
    #[error(
        "the state names no parameters, so rates by group cannot be told apart: implement StepState::parameters, or give \
         one number as the rate; the state is unchanged"
    )]
    RateGroups,
    /// A tensor of the batch is on another device than the state.
    #[error(
        "tensor {index} of the batch is on {found}, the state is on {expected}: move the batch with `to_device`; the \
         state is unchanged"
    )]
    BatchDevice {
        /// Its place in the batch.
        index: usize,
        /// The state's device.
        expected: String,
        /// The tensor's device.
        found: String,
    },
    /// The batch holds no samples.
    #[error(
        "tensor {index} of the batch has shape {shape:?}, which holds no samples: drop empty batches in the loader; the \
         state is unchanged"
    )]
    EmptyBatch {
        /// Its place in the batch.
        index: usize,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// The state is spread over several devices.
    #[error("the state is on {}: move all of it to one device", devices.join(" and "))]
    StateDevices {
        /// The devices found.
        devices: Vec<String>,
    },
    /// The state holds no tensor.
    #[error("the state holds no tensor, so there is no device to run on: build the model first")]
    EmptyState,
    /// The configured bucketing does not fit the batch.
    #[error("{0}; the state is unchanged")]
    Bucketing(#[from] crate::bucketing::BucketingError),
    /// The learning rate is not a number.
    #[error("the learning rate is {value}: it must be finite; the state is unchanged")]
    LearningRate {
        /// The value given.
        value: f64,
    },
    /// [`Policy::RequireGraph`](crate::Policy::RequireGraph) is set and the step cannot run as a graph. It did
    /// not run; the state is unchanged.
    #[error("a graph is required, and this step cannot run as one: {reason}")]
    GraphRequired {
        /// Why not.
        reason: FallbackReason,
    },
    /// A `TensorTree` or `StepState` implementation visits and maps different numbers of tensors.
    #[error(
        "the {place} visits {visited} tensors but maps {mapped}: its implementation must walk the same tensors"
    )]
    TreeMismatch {
        /// `batch`, `output` or `state`.
        place: String,
        /// Tensors visited.
        visited: usize,
        /// Tensors mapped.
        mapped: usize,
    },
    /// The device could not enqueue a replay. A replay is handed over and not waited for, so this may be about the steps of
    /// earlier calls; this call's did not run either. The outputs of the steps that did not run fail when they are read, and
    /// the buffers the graph writes may be unreadable until a replay succeeds.
    #[error("replay of the graph for [{key}] failed: {detail}")]
    Replay {
        /// The graph's key.
        key: Box<ShapeKey>,
        /// The device's own words.
        detail: String,
    },
    /// The device could not compute a watched step, for lack of memory as a rule. The state is what it was, and dropping
    /// graphs of other keys did not help, or there were none.
    #[error(
        "the device could not compute the step: {detail}; the state is unchanged. Where memory is short, make batches \
         smaller, or free some and call release()"
    )]
    Uncomputed {
        /// The device's own words.
        detail: String,
    },
    /// A panic in an update of an earlier call took the state along.
    #[error(
        "the state is lost: an earlier step panicked in the middle of an update; make a new one, from a checkpoint"
    )]
    StateLost,
    /// The device failed outside a replay, or a replay of an earlier call did not run.
    #[error("the device failed while {doing}: {detail}")]
    Device {
        /// What was under way.
        doing: String,
        /// The device's own words.
        detail: String,
    },
}

impl StepError {
    /// Whether the call can be made again with another batch or policy: nothing was run and the state is intact.
    pub fn is_retryable(&self) -> bool {
        !matches!(
            self,
            StepError::Replay { .. }
                | StepError::Device { .. }
                | StepError::Verification(_)
                | StepError::StateLost
        )
    }
}
