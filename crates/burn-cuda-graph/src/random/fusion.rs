//! Which random operations are ours, and what runs them.
//!
//! Burn's fusion registers operations in the program's order and runs them later, in another order. A draw's index is
//! part of its number, so it is assigned at registration, by an observer; the operation that runs later finds it by
//! the id of its output. Ids are never used twice, on any device.
//!
//! The optimization itself is cached by the structure of the operations and reused, so it holds nothing of the
//! operation but the relative id of the output; shape and dtype are read from the context when it runs, and the
//! distribution travels with the assignment. (Burn matches plans by equality of the whole operation, distribution
//! included, so two distributions never share one either.)
//!
//! Burn does not promise that an operation is offered to every optimization: a segment that ends in a hurry runs its
//! tail unfused. Such a draw *escapes* to Burn's own generator. Nothing can redirect it, so it is counted.

use super::kernel;
use burn::tensor::Distribution;
use burn_cubecl::CubeDevice;
use burn_cubecl::fusion::{
    CubeFuser, CubeFusionHandle, CubeOptimization, FallbackOperation, FusedOperation,
    OptimizationProvider,
};
use burn_fusion::observer::{BlockOperations, FusionObservation, FusionObserver};
use burn_fusion::stream::{Context, StreamId};
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::{FloatOperationIr, NumericOperationIr, OperationIr, RandomOpIr, TensorId};
use cubecl::server::Handle;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// Assignments kept for draws that have not run. Those of the oldest closed scopes go first.
const MAX_WAITING: usize = 1 << 16;

/// More than any built-in optimization scores for one operation.
const SCORE: u64 = 100;

/// What a scope has seen.
#[derive(Debug, Default)]
struct Tally {
    drawn: AtomicU32,
    escaped: AtomicU32,
}

impl Tally {
    fn escape(&self) {
        if self.escaped.fetch_add(1, Ordering::Relaxed) == 0 {
            log::warn!(
                "a random operation of a step ran outside Burn's fusion and drew from Burn's own generator: its numbers \
                 are not those of the step's key and count. A configured limit of the fusion search (max_explorations, \
                 max_blocks) does this, and so may reading tensors in the middle of the step"
            );
        }
    }
}

/// A scope that is open on a stream.
struct Active {
    id: u64,
    params: Handle,
    device: CubeDevice,
    tally: Arc<Tally>,
}

/// A draw that is registered and has not run.
struct Draw {
    scope: u64,
    params: Handle,
    device: CubeDevice,
    index: u32,
    distribution: Distribution,
    tally: Arc<Tally>,
}

#[derive(Default)]
struct Draws {
    /// Innermost last.
    active: HashMap<StreamId, Vec<Active>>,
    waiting: HashMap<TensorId, Draw>,
}

static DRAWS: LazyLock<Mutex<Draws>> = LazyLock::new(Mutex::default);
/// Scopes open anywhere, and draws waiting: what an operation looks at before it takes the lock.
static OPEN: AtomicUsize = AtomicUsize::new(0);
static WAITING: AtomicUsize = AtomicUsize::new(0);

static REGISTERED: AtomicBool = AtomicBool::new(false);
static OBSERVATION: Mutex<Option<FusionObservation>> = Mutex::new(None);

thread_local! {
    /// The waiting draws in each block that runs on this thread.
    static RUNNING: RefCell<Vec<Vec<TensorId>>> = const { RefCell::new(Vec::new()) };
}

fn draws() -> MutexGuard<'static, Draws> {
    DRAWS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Draws {
    fn assign(&mut self, stream: StreamId, random: &RandomOpIr) {
        let Some(scope) = self.active.get(&stream).and_then(|scopes| scopes.last()) else {
            return;
        };
        let draw = Draw {
            scope: scope.id,
            params: scope.params.clone(),
            device: scope.device.clone(),
            index: scope.tally.drawn.fetch_add(1, Ordering::Relaxed),
            distribution: random.distribution,
            tally: scope.tally.clone(),
        };
        if self.waiting.len() >= MAX_WAITING {
            self.forget_oldest();
        }
        self.waiting.insert(random.out.id, draw);
        WAITING.store(self.waiting.len(), Ordering::Release);
    }

    fn take(&mut self, output: TensorId) -> Option<Draw> {
        let draw = self.waiting.remove(&output);
        WAITING.store(self.waiting.len(), Ordering::Release);
        draw
    }

    /// Let go of the draws of the oldest scope that is closed.
    fn forget_oldest(&mut self) {
        let open: Vec<u64> = self
            .active
            .values()
            .flatten()
            .map(|scope| scope.id)
            .collect();
        let closed = self.waiting.values().map(|draw| draw.scope);
        if let Some(oldest) = closed.filter(|scope| !open.contains(scope)).min() {
            self.waiting.retain(|_, draw| draw.scope != oldest);
        }
    }
}

/// The random operation that `operation` is.
fn random(operation: &OperationIr) -> Option<&RandomOpIr> {
    match operation {
        OperationIr::Float(_, FloatOperationIr::Random(random))
        | OperationIr::NumericFloat(_, NumericOperationIr::IntRandom(random))
        | OperationIr::NumericInt(_, NumericOperationIr::IntRandom(random)) => Some(random),
        _ => None,
    }
}

/// Assigns draws, and counts those that ran without us.
struct Registrar;

impl FusionObserver for Registrar {
    fn registered(&self, operation: &OperationIr) {
        if let Some(random) = random(operation)
            && OPEN.load(Ordering::Acquire) > 0
        {
            draws().assign(StreamId::current(), random);
        }
    }

    fn block_starts(&self, block: BlockOperations<'_>) {
        let mut ours = Vec::new();
        if WAITING.load(Ordering::Acquire) > 0 {
            ours.extend(block.iter().filter_map(random).map(|random| random.out.id));
        }
        RUNNING.with_borrow_mut(|running| running.push(ours));
    }

    fn block_ran(&self) {
        let ran = RUNNING.with_borrow_mut(Vec::pop).unwrap_or_default();
        if ran.is_empty() {
            return;
        }
        let mut draws = draws();
        for output in ran {
            if let Some(draw) = draws.take(output) {
                draw.tally.escape();
            }
        }
    }
}

/// Takes a random operation, alone.
#[derive(Clone)]
struct RandomFuser {
    device: CubeDevice,
    output: Option<TensorId>,
    closed: bool,
}

impl OperationFuser<CubeOptimization> for RandomFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if !self.closed {
            self.output = random(operation).map(|random| random.out.id);
        }
        self.closed = true;
    }
    fn finish(&mut self) -> CubeOptimization {
        CubeOptimization::new(RandomDraw {
            device: self.device.clone(),
            output: self.output.unwrap_or(TensorId::new(u64::MAX)),
        })
    }
    fn reset(&mut self) {
        self.output = None;
        self.closed = false;
    }
    fn status(&self) -> FuserStatus {
        match self.closed {
            true => FuserStatus::Closed,
            false => FuserStatus::Open,
        }
    }
    fn properties(&self) -> FuserProperties {
        FuserProperties {
            score: SCORE,
            ready: self.output.is_some(),
        }
    }
    fn len(&self) -> usize {
        usize::from(self.output.is_some())
    }
    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// One random operation: ours if it is assigned, else Burn's.
struct RandomDraw {
    device: CubeDevice,
    /// In the plan's own numbering.
    output: TensorId,
}

impl FusedOperation for RandomDraw {
    const NAME: &'static str = "burn-cuda-graph-random";
    type State = u64;

    fn num_ops_fused(&self) -> usize {
        1
    }

    fn run(
        &mut self,
        context: &mut Context<CubeFusionHandle>,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        let output = context.tensors.get(&self.output).cloned();
        let Some(output) = output.filter(|_| WAITING.load(Ordering::Acquire) > 0) else {
            return fallback(0).run(context);
        };
        let draw = draws().take(output.id);
        let Some(draw) = draw else {
            return fallback(0).run(context);
        };
        // The stream's scope may be on another device, and an empty tensor has nothing to draw.
        if draw.device != self.device || !kernel::supports(&output.shape, output.dtype) {
            if draw.device == self.device && output.shape.num_elements() > 0 {
                draw.tally.escape();
            }
            return fallback(0).run(context);
        }
        let tensor = kernel::draw(
            &self.device,
            &draw.params,
            draw.index,
            draw.distribution,
            output.shape,
            output.dtype,
        );
        context.handles.register_handle(output.id, tensor.into());
    }

    fn to_state(&self) -> u64 {
        self.output.value()
    }

    fn from_state(device: &cubecl::Device, output: u64) -> Self {
        Self {
            device: device.clone(),
            output: TensorId::new(output),
        }
    }
}

struct RandomProvider;

impl OptimizationProvider for RandomProvider {
    type Operation = RandomDraw;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(RandomFuser {
            device: device.clone(),
            output: None,
            closed: false,
        })
    }
}

/// Register with Burn's fusion, once for the process. `false`: it runs already, without us.
pub(super) fn register() -> bool {
    let mut observation = OBSERVATION.lock().unwrap_or_else(PoisonError::into_inner);
    if observation.is_none() && burn_cubecl::fusion::register(RandomProvider).is_ok() {
        *observation = Some(FusionObservation::new(Arc::new(Registrar)));
        REGISTERED.store(true, Ordering::Release);
    }
    observation.is_some()
}

pub(super) fn registered() -> bool {
    REGISTERED.load(Ordering::Acquire)
}

type Client = burn_fusion::client::GlobalFusionClient<burn_cubecl::fusion::FusionCubeRuntime>;

/// While it lives, random operations registered on the stream that opened it draw from our generator.
///
/// Scopes of a stream nest; the innermost one draws. Operations registered before it opened are not taken, whenever
/// they run; those registered within it are, even when they run after it closed.
pub(crate) struct DrawScope {
    id: u64,
    stream: StreamId,
    client: Client,
    tally: Arc<Tally>,
}

impl std::fmt::Debug for DrawScope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DrawScope")
            .field("stream", &self.stream)
            .field("tally", &self.tally)
            .finish_non_exhaustive()
    }
}

impl DrawScope {
    /// Open a scope on the current stream. `params` is a buffer of the device that holds [`params`](super::params).
    /// It is read when the draws run, so it must not be overwritten before they did.
    ///
    /// `None` when the generator is not registered, or on another device than CubeCL's.
    pub(crate) fn open(device: &burn::tensor::Device, params: Handle) -> Option<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let device = super::cube_device(device).filter(|_| registered())?;
        let scope = Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            stream: StreamId::current(),
            client: Client::load(&device),
            tally: Arc::default(),
        };
        let active = Active {
            id: scope.id,
            params,
            device,
            tally: scope.tally.clone(),
        };
        OPEN.fetch_add(1, Ordering::AcqRel);
        let stream = scope.stream;
        let opened = scope.client.run(move || {
            draws().active.entry(stream).or_default().push(active);
        });
        // Dropping the scope undoes the count.
        opened.ok().map(|()| scope)
    }

    /// Random operations registered in the scope so far.
    #[allow(dead_code)]
    pub(crate) fn drawn(&self) -> u32 {
        drop(self.client.run(|| ()));
        self.tally.drawn.load(Ordering::Relaxed)
    }

    /// Draws of the scope that ran on Burn's own generator, of those that have run at all.
    ///
    /// Drain the stream first. A recording with such a draw would repeat it at every replay.
    #[allow(dead_code)]
    pub(crate) fn escaped(&self) -> u32 {
        self.tally.escaped.load(Ordering::Relaxed)
    }
}

impl Drop for DrawScope {
    fn drop(&mut self) {
        let (id, stream) = (self.id, self.stream);
        let close = || {
            let mut draws = draws();
            if let Some(scopes) = draws.active.get_mut(&stream) {
                scopes.retain(|scope| scope.id != id);
                if scopes.is_empty() {
                    draws.active.remove(&stream);
                }
            }
        };
        // A server that cannot run it registers nothing more either.
        if self.client.run(close).is_err() {
            close();
        }
        OPEN.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{DType, Shape};
    use burn_ir::TensorIr;

    fn operation(output: u64, distribution: Distribution) -> RandomOpIr {
        let shape = Shape::new([2, 3]);
        RandomOpIr {
            out: TensorIr::uninit(TensorId::new(output), shape, DType::F32),
            distribution,
        }
    }

    /// Every kind of random operation is recognized, and nothing else.
    #[test]
    fn random_operations_are_recognized() {
        let random_op = || operation(1, Distribution::Default);
        let float = OperationIr::Float(DType::F32, FloatOperationIr::Random(random_op()));
        let int = NumericOperationIr::IntRandom(random_op());
        assert!(random(&float).is_some());
        assert!(random(&OperationIr::NumericInt(DType::I32, int.clone())).is_some());
        assert!(random(&OperationIr::NumericFloat(DType::F32, int)).is_some());
        assert!(random(&OperationIr::Drop(random_op().out)).is_none());
    }

    /// Operations that differ in a parameter are different, so that no cached plan serves both.
    #[test]
    fn distributions_never_share_a_plan() {
        let with = |distribution| operation(1, distribution);
        assert_ne!(
            with(Distribution::Bernoulli(0.1)),
            with(Distribution::Bernoulli(0.2))
        );
        assert_eq!(
            with(Distribution::Normal(0.0, 1.0)),
            with(Distribution::Normal(0.0, 1.0))
        );
    }
}
