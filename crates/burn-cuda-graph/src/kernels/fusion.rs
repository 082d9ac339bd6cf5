//! Which operations are taken, and what runs them.
//!
//! Burn's fusion hands an operation in the plan's own numbering, without sizes, and keeps the plan for all shapes. So it is
//! told by its kind alone whether an operation is taken, and by its tensors, when it runs, what computes it.

use super::{conv, matmul, plain, select, sum};
use burn::tensor::IndexingUpdateOp;
use burn_cubecl::CubeBackend;
use burn_cubecl::CubeDevice;
use burn_cubecl::fusion::{
    CubeFuser, CubeFusionHandle, CubeOptimization, FallbackOperation, FusedOperation,
    OptimizationProvider,
};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl_fusion::optim::elemwise::ElementWiseFuser;
use burn_fusion::stream::Context;
use burn_fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn_ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr, TensorIr,
};
use serde::{Deserialize, Serialize};
use std::sync::Mutex;

/// Less than whatever Burn's own optimizations score, so that those which save a launch or bytes go first.
const SCORE: u64 = 1;

/// An operation that is taken, by the plan's own numbering.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Taken {
    Sum(burn_ir::ReduceDimOpIr),
    Matmul(burn_ir::MatmulOpIr),
    Select(burn_ir::SelectAssignOpIr),
    Conv(burn_ir::Conv2dOpIr),
    ConvData(burn_ir::Conv2dXBackwardOpIr),
    ConvWeight(burn_ir::Conv2dWeightBackwardOpIr),
}

impl Taken {
    fn from(operation: &OperationIr) -> Option<Self> {
        match operation {
            OperationIr::NumericFloat(_, NumericOperationIr::SumDim(op)) => {
                Some(Self::Sum(op.clone()))
            }
            OperationIr::Float(_, FloatOperationIr::Matmul(op)) => Some(Self::Matmul(op.clone())),
            OperationIr::BaseFloat(BaseOperationIr::SelectAssign(op))
                if op.update == IndexingUpdateOp::Add && op.dim == 0 =>
            {
                Some(Self::Select(op.clone()))
            }
            OperationIr::Module(ModuleOperationIr::Conv2d(op)) if op.options.groups == 1 => {
                Some(Self::Conv(op.clone()))
            }
            OperationIr::Module(ModuleOperationIr::Conv2dXBackward(op))
                if op.options.groups == 1 =>
            {
                Some(Self::ConvData(op.clone()))
            }
            OperationIr::Module(ModuleOperationIr::Conv2dWeightBackward(op))
                if op.options.groups == 1 =>
            {
                Some(Self::ConvWeight(op.clone()))
            }
            _ => None,
        }
    }
}

/// Takes one operation, with what stands before it and Burn would not fuse.
///
/// Burn settles the operation that ends a block together with the block, where nothing in it is worth fusing: zeros and the
/// `select_assign` into them, one operation on elements and the product that follows. So this fuser stays open for as long as
/// the one for elements does, and is ready when an operation follows that it takes. Where the ones before are worth fusing,
/// that scores more, and the next block begins with the operation.
#[derive(Clone)]
struct KernelFuser {
    elements: ElementWiseFuser,
    leading: usize,
    taken: Option<Taken>,
    closed: bool,
}

impl OperationFuser<CubeOptimization> for KernelFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if self.closed {
            return;
        }
        self.taken = Taken::from(operation);
        if self.taken.is_some() {
            self.closed = true;
            return;
        }
        self.elements.fuse(operation);
        match self.elements.status() {
            FuserStatus::Open => self.leading += 1,
            FuserStatus::Closed => self.closed = true,
        }
    }
    fn finish(&mut self) -> CubeOptimization {
        CubeOptimization::new(KernelOperation {
            leading: self.leading,
            taken: self.taken.clone(),
        })
    }
    fn reset(&mut self) {
        self.elements.reset();
        self.leading = 0;
        self.taken = None;
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
            ready: self.taken.is_some(),
        }
    }
    fn len(&self) -> usize {
        self.leading + usize::from(self.taken.is_some())
    }
    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// Operations as Burn runs them, and one by a kernel of ours, or as Burn runs it.
struct KernelOperation {
    leading: usize,
    taken: Option<Taken>,
}

/// The tensors of a plan, as they are in this run.
struct Tensors<'a> {
    context: &'a mut Context<CubeFusionHandle>,
}

impl Tensors<'_> {
    /// The plan's tensor under its own id and size. Its status stays that of the operation: the context knows the last one,
    /// and later operations of the plan may read the tensor as well.
    fn ir(&self, local: &TensorIr) -> Option<TensorIr> {
        let mut ir = self.context.tensors.get(&local.id)?.clone();
        ir.status = local.status;
        Some(ir)
    }

    /// The tensor as it lies in memory, left where it is.
    fn peek(&mut self, local: &TensorIr) -> Option<CubeTensor> {
        let ir = self.ir(local)?;
        let handle = self.context.handles.get_handle_ref(&ir.id)?.clone();
        Some(CubeTensor {
            client: handle.client.clone(),
            handle: handle.handle.clone(),
            device: handle.device.clone(),
            meta: Box::new(handle.metadata(ir.shape)),
            dtype: handle.dtype,
            qparams: handle.qparams.clone(),
        })
    }

    /// The tensor; the last reader takes it out.
    fn take(&mut self, local: &TensorIr) -> Option<CubeTensor> {
        let ir = self.ir(local)?;
        Some(self.context.handles.get_float_tensor::<CubeBackend>(&ir))
    }

    fn give(&mut self, local: &TensorIr, tensor: CubeTensor) {
        if let Some(ir) = self.ir(local) {
            self.context.handles.register_handle(ir.id, tensor.into());
        }
    }
}

impl KernelOperation {
    /// Run it, if a kernel here takes its tensors. Nothing was touched where the answer is `None`.
    fn compute(&self, tensors: &mut Tensors<'_>) -> Option<()> {
        let float = |tensor: CubeTensor| plain(&tensor).then_some(tensor);
        match self.taken.as_ref()? {
            Taken::Sum(op) => {
                let takes = sum::takes(&float(tensors.peek(&op.input)?)?, op.axis);
                takes.then_some(())?;
                let input = tensors.take(&op.input)?;
                tensors.give(&op.out, sum::sum_dim(input, op.axis));
            }
            Taken::Matmul(op) => {
                let lhs = float(tensors.peek(&op.lhs)?)?;
                let rhs = float(tensors.peek(&op.rhs)?)?;
                matmul::takes(&lhs, &rhs).then_some(())?;
                drop((lhs, rhs));
                let (lhs, rhs) = (tensors.take(&op.lhs)?, tensors.take(&op.rhs)?);
                tensors.give(&op.out, matmul::product(lhs, rhs));
            }
            Taken::Select(op) => {
                let value = float(tensors.peek(&op.value)?)?;
                let indices = tensors.peek(&op.indices)?;
                let takes = select::takes(&float(tensors.peek(&op.tensor)?)?, &indices, &value);
                takes.then_some(())?;
                drop((value, indices));
                let tensor = tensors.take(&op.tensor)?;
                let indices = tensors.take(&op.indices)?;
                let value = tensors.take(&op.value)?;
                tensors.give(&op.out, select::add_rows(tensor, indices, value));
            }
            Taken::Conv(op) => {
                let x = float(tensors.peek(&op.x)?)?;
                let weight = float(tensors.peek(&op.weight)?)?;
                let problem = conv::Problem::new(&x, &weight, &op.options.clone().into())?;
                drop((x, weight));
                let x = tensors.take(&op.x)?;
                let weight = tensors.take(&op.weight)?;
                let bias = match &op.bias {
                    Some(bias) => Some(tensors.take(bias)?),
                    None => None,
                };
                tensors.give(&op.out, conv::forward(problem, x, weight, bias));
            }
            Taken::ConvData(op) => {
                let x = float(tensors.peek(&op.x)?)?;
                let weight = float(tensors.peek(&op.weight)?)?;
                float(tensors.peek(&op.output_grad)?)?;
                let problem = conv::Problem::new(&x, &weight, &op.options.clone().into())?;
                drop((x, weight));
                let x = tensors.take(&op.x)?;
                let weight = tensors.take(&op.weight)?;
                let grad = tensors.take(&op.output_grad)?;
                tensors.give(&op.out, conv::data_gradient(problem, x, weight, grad));
            }
            Taken::ConvWeight(op) => {
                let x = float(tensors.peek(&op.x)?)?;
                let weight = float(tensors.peek(&op.weight)?)?;
                float(tensors.peek(&op.output_grad)?)?;
                let problem = conv::Problem::new(&x, &weight, &op.options.clone().into())?;
                drop((x, weight));
                let x = tensors.take(&op.x)?;
                let weight = tensors.take(&op.weight)?;
                let grad = tensors.take(&op.output_grad)?;
                tensors.give(&op.out, conv::weight_gradient(problem, x, weight, grad));
            }
        }
        Some(())
    }
}

impl FusedOperation for KernelOperation {
    const NAME: &'static str = "burn-cuda-graph-kernels";
    type State = (usize, Option<Taken>);

    fn num_ops_fused(&self) -> usize {
        self.leading + usize::from(self.taken.is_some())
    }

    fn run(
        &mut self,
        context: &mut Context<CubeFusionHandle>,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        for index in 0..self.leading {
            fallback(index).run(context);
        }
        if self.compute(&mut Tensors { context }).is_none() {
            fallback(self.leading).run(context);
        }
    }

    fn to_state(&self) -> Self::State {
        (self.leading, self.taken.clone())
    }

    fn from_state(_device: &cubecl::Device, (leading, taken): Self::State) -> Self {
        Self { leading, taken }
    }
}

struct KernelProvider;

impl OptimizationProvider for KernelProvider {
    type Operation = KernelOperation;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(KernelFuser {
            elements: ElementWiseFuser::new(device.clone()),
            leading: 0,
            taken: None,
            closed: false,
        })
    }
}

/// Register with Burn's fusion, once for the process. `false`: it runs already, without us.
pub(crate) fn register() -> bool {
    static REGISTERED: Mutex<bool> = Mutex::new(false);
    let mut registered = REGISTERED
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if !*registered {
        *registered = burn_cubecl::fusion::register(KernelProvider).is_ok();
    }
    *registered
}
