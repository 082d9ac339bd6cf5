//! A product and the operations on elements that follow it.
//!
//! Burn's fusion computes them with the product, as its results leave for memory. That saves a launch, and costs the choice:
//! the kernels that it can do so with are few, and none cuts the contraction. So both are candidates: Burn's fusion as it is,
//! and a product of ours, with the operations behind it in one kernel more.

use super::fusion::Tensors;
use super::matmul::{self, Way};
use super::{KernelKey, occupy, plain};
use burn_cubecl::fusion::{CubeFusionHandle, CubeOptimization, FallbackOperation};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeDevice, CubeTuneId};
use burn_fusion::stream::Context;
use burn_ir::MatmulOpIr;
use cubecl::client::Client;
use cubecl::tune::{
    AutotuneError, Eviction, InputGenerator, LocalTuner, Tunable, TunableSet, TuneInputs,
    local_tuner,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Burn's optimizations of the product with what follows, and of what follows alone.
pub(super) struct Followed {
    pub fused: Mutex<CubeOptimization>,
    pub elements: Mutex<CubeOptimization>,
    /// How many operations follow.
    pub behind: usize,
}

pub(super) fn locked(optimization: &Mutex<CubeOptimization>) -> MutexGuard<'_, CubeOptimization> {
    optimization.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A fallback that is run more than once: by each candidate that wants it.
#[derive(Clone)]
struct Shared(Arc<dyn FallbackOperation>);

impl FallbackOperation for Shared {
    fn run(&self, context: &mut Context<CubeFusionHandle>) {
        self.0.run(context);
    }
}

/// The operation in its context, or for a benchmark, in a copy of that.
struct Inputs<'a> {
    operation: Arc<Operation>,
    place: Place<'a>,
}

struct Operation {
    followed: Arc<Followed>,
    op: MatmulOpIr,
    key: KernelKey,
    client: Client,
    device: CubeDevice,
    /// The product, as Burn runs it by itself.
    product: Shared,
}

enum Place<'a> {
    Original(&'a mut Context<CubeFusionHandle>),
    Copy(Box<Context<CubeFusionHandle>>),
}

impl Clone for Inputs<'_> {
    fn clone(&self) -> Self {
        let context = match &self.place {
            Place::Original(context) => context.fork(),
            Place::Copy(context) => context.fork(),
        };
        Self {
            operation: self.operation.clone(),
            place: Place::Copy(Box::new(context)),
        }
    }
}

impl Inputs<'_> {
    fn context(&mut self) -> &mut Context<CubeFusionHandle> {
        match &mut self.place {
            Place::Original(context) => context,
            Place::Copy(context) => context,
        }
    }

    fn fused(&mut self) {
        let operation = self.operation.clone();
        let product = |_| Box::new(operation.product.clone()) as Box<dyn FallbackOperation>;
        locked(&operation.followed.fused).run(self.context(), &product);
    }

    fn product(&mut self, way: Way) -> Result<(), String> {
        let operation = self.operation.clone();
        let op = &operation.op;
        let mut tensors = Tensors {
            context: self.context(),
        };
        let Some((lhs, rhs)) = operands(op, &mut tensors) else {
            return super::declined("operands that are not here");
        };
        let out = way.multiply(&lhs, &rhs)?;
        // Read for the last time, they leave the context.
        drop((tensors.take(&op.lhs), tensors.take(&op.rhs)));
        tensors.give(&op.out, out);
        // Elements have no fallback, so it is not called.
        let none = |_| Box::new(operation.product.clone()) as Box<dyn FallbackOperation>;
        locked(&operation.followed.elements).run(self.context(), &none);
        Ok(())
    }
}

/// What lets the set of candidates outlive the contexts that they run in.
struct AnyInputs;

impl TuneInputs for AnyInputs {
    type At<'a> = Inputs<'a>;
}

/// Benchmarks run in copies of the context: what is read for the last time stays, and results are dropped.
struct Copies;

impl InputGenerator<KernelKey, AnyInputs> for Copies {
    fn generate<'a>(
        &self,
        _key: &KernelKey,
        inputs: &<AnyInputs as TuneInputs>::At<'a>,
    ) -> <AnyInputs as TuneInputs>::At<'a> {
        inputs.clone()
    }
}

impl Eviction<KernelKey, AnyInputs> for Copies {
    fn evict<'a>(
        &self,
        _key: &KernelKey,
        inputs: &<AnyInputs as TuneInputs>::At<'a>,
    ) -> Result<(), AutotuneError> {
        occupy(&inputs.operation.client, &inputs.operation.device).map_err(|err| {
            AutotuneError::Unknown {
                name: "the kernel before a sample".into(),
                err,
            }
        })
    }
}

/// Both operands, where a kernel here takes them.
fn operands(op: &MatmulOpIr, tensors: &mut Tensors<'_>) -> Option<(CubeTensor, CubeTensor)> {
    let (lhs, rhs) = (tensors.peek(&op.lhs)?, tensors.peek(&op.rhs)?);
    (plain(&lhs) && plain(&rhs)).then_some((lhs, rhs))
}

/// The product `op`, and what follows it.
pub(super) fn run(
    followed: &Arc<Followed>,
    op: &MatmulOpIr,
    context: &mut Context<CubeFusionHandle>,
    fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
) {
    static TUNER: LocalTuner<KernelKey, CubeTuneId> = local_tuner!();

    let operands = operands(op, &mut Tensors { context });
    let Some((lhs, rhs)) = operands.filter(|(lhs, rhs)| matmul::takes(lhs, rhs)) else {
        locked(&followed.fused).run(context, fallback);
        return;
    };
    let client = lhs.client.clone();
    let id = CubeTuneId::new(&client, &lhs.device);
    let key = matmul::key(&lhs, &rhs, followed.behind);
    let device = lhs.device.clone();
    drop((lhs, rhs));
    let candidates = TUNER.init(&id, || {
        let burn = Tunable::new("burn", |mut inputs: Inputs<'_>| {
            inputs.fused();
            Ok::<_, String>(())
        });
        let key = |inputs: &Inputs<'_>| inputs.operation.key.clone();
        let all = TunableSet::<KernelKey, AnyInputs, ()>::new(key, Copies)
            .with_eviction(Arc::new(Copies))
            .with(burn);
        Way::ALL.into_iter().fold(all, |all, (name, way)| {
            all.with(Tunable::new(name, move |mut inputs: Inputs<'_>| {
                inputs.product(way)
            }))
        })
    });
    let operation = Operation {
        followed: followed.clone(),
        op: op.clone(),
        key,
        client: client.clone(),
        device,
        product: Shared(Arc::from(fallback(0))),
    };
    let inputs = Inputs {
        operation: Arc::new(operation),
        place: Place::Original(context),
    };
    TUNER.execute(&id, &client, candidates, inputs);
}
