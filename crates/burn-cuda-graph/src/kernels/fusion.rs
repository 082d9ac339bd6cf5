//! Which operations are taken, and what runs them.
//!
//! Burn's fusion hands an operation in the plan's own numbering, without sizes, and keeps the plan for all shapes. So it is
//! told by its kind alone whether an operation is taken, and by its tensors, when it runs, what computes it.

use super::followed::{self, Followed, locked};
use super::{conv, matmul, plain, select, softmax, sum, unshared};
use burn::tensor::IndexingUpdateOp;
use burn_backend::ops::ConvOptions;
use burn_cubecl::CubeBackend;
use burn_cubecl::CubeDevice;
use burn_cubecl::fusion::{
    CubeFuser, CubeFusionHandle, CubeOptimization, FallbackOperation, FusedOperation,
    OptimizationProvider,
};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl_fusion::optim::CubeOptimizationState;
use burn_cubecl_fusion::optim::elemwise::{ElementWiseFuser, ElemwiseOptimization};
use burn_cubecl_fusion::optim::matmul::{MatmulFuser, MatmulOptimization};
use burn_fusion::stream::Context;
use burn_fusion::{FuserProperties, FuserStatus, NumOperations, OperationFuser};
use burn_ir::{
    BaseOperationIr, FloatOperationIr, ModuleOperationIr, NumericOperationIr, OperationIr, TensorIr,
};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex};

/// Less than whatever Burn's own optimizations score, so that those which save a launch or bytes go first.
const SCORE: u64 = 1;

/// An operation that is taken, by the plan's own numbering.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Taken {
    Sum(burn_ir::ReduceDimOpIr),
    Sums(burn_ir::ReduceDimsOpIr),
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
            OperationIr::NumericFloat(_, NumericOperationIr::SumDims(op))
                if op.axes.is_sorted_by(|axis, next| axis + 1 == *next) =>
            {
                Some(Self::Sums(op.clone()))
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
///
/// A product that begins a block is taken with the operations on elements that follow, as Burn's own fusion of both would,
/// which is among the candidates then.
#[derive(Clone)]
struct KernelFuser {
    device: CubeDevice,
    elements: ElementWiseFuser,
    leading: usize,
    taken: Option<Taken>,
    /// What follows a product: with it, as Burn has it, and alone.
    followed: Option<(MatmulFuser, ElementWiseFuser)>,
    /// Burn's own fusion goes on where ours cannot.
    behind_burn: bool,
    closed: bool,
}

impl KernelFuser {
    fn new(device: CubeDevice) -> Self {
        Self {
            elements: ElementWiseFuser::new(device.clone()),
            device,
            leading: 0,
            taken: None,
            followed: None,
            behind_burn: false,
            closed: false,
        }
    }

    /// Operations on elements behind the product.
    fn behind(&self) -> usize {
        self.followed
            .as_ref()
            .map_or(0, |(_, elements)| elements.len())
    }

    /// Take what begins with `operation`.
    fn begin(&mut self, taken: Taken, operation: &OperationIr) {
        self.closed = true;
        if matches!(taken, Taken::Matmul(_)) && self.leading == 0 {
            let mut product = MatmulFuser::new(self.device.clone());
            product.fuse(operation);
            if product.status() == FuserStatus::Open {
                let elements = ElementWiseFuser::new(self.device.clone());
                self.followed = Some((product, elements));
                self.closed = false;
            }
        }
        self.taken = Some(taken);
    }

    /// Take `operation` as well, or close.
    fn follow(&mut self, operation: &OperationIr) {
        let Some((product, elements)) = &mut self.followed else {
            self.closed = true;
            return;
        };
        product.fuse(operation);
        if product.status() == FuserStatus::Closed {
            self.closed = true;
            return;
        }
        elements.fuse(operation);
        if elements.status() == FuserStatus::Closed || elements.len() + 1 != product.len() {
            self.behind_burn = true;
            self.closed = true;
        }
    }
}

impl OperationFuser<CubeOptimization> for KernelFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if self.closed {
            return;
        }
        if self.taken.is_some() {
            self.follow(operation);
            return;
        }
        if let Some(taken) = Taken::from(operation) {
            self.begin(taken, operation);
            return;
        }
        self.elements.fuse(operation);
        match self.elements.status() {
            FuserStatus::Open => self.leading += 1,
            FuserStatus::Closed => self.closed = true,
        }
    }
    fn finish(&mut self) -> CubeOptimization {
        let behind = self.behind();
        let followed = match &mut self.followed {
            Some((product, elements)) if behind > 0 => Some(Arc::new(Followed {
                fused: Mutex::new(product.finish()),
                elements: Mutex::new(elements.finish()),
                behind,
            })),
            _ => None,
        };
        CubeOptimization::new(KernelOperation {
            leading: self.leading,
            taken: self.taken.clone(),
            followed,
        })
    }
    fn reset(&mut self) {
        *self = Self::new(self.device.clone());
    }
    fn status(&self) -> FuserStatus {
        match self.closed {
            true => FuserStatus::Closed,
            false => FuserStatus::Open,
        }
    }
    fn properties(&self) -> FuserProperties {
        let score = match &self.followed {
            // More than Burn's fusion of the same operations, which is one of the candidates.
            Some((product, elements)) if elements.len() > 0 => {
                product.properties().score.saturating_add(1)
            }
            _ => SCORE,
        };
        FuserProperties {
            score,
            ready: self.taken.is_some() && !self.behind_burn,
        }
    }
    fn len(&self) -> usize {
        self.leading + usize::from(self.taken.is_some()) + self.behind()
    }
    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// Operations as Burn runs them, and one by a kernel of ours, or as Burn runs it.
struct KernelOperation {
    leading: usize,
    taken: Option<Taken>,
    followed: Option<Arc<Followed>>,
}

/// The tensors of a plan, as they are in this run.
pub(super) struct Tensors<'a> {
    pub context: &'a mut Context<CubeFusionHandle>,
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
    pub(super) fn peek(&mut self, local: &TensorIr) -> Option<CubeTensor> {
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
    pub(super) fn take(&mut self, local: &TensorIr) -> Option<CubeTensor> {
        let ir = self.ir(local)?;
        Some(self.context.handles.get_float_tensor::<CubeBackend>(&ir))
    }

    pub(super) fn give(&mut self, local: &TensorIr, tensor: CubeTensor) {
        if let Some(ir) = self.ir(local) {
            self.context.handles.register_handle(ir.id, tensor.into());
        }
    }
}

/// The sum along axes, where the kernel takes it.
fn sum_axes(
    tensors: &mut Tensors<'_>,
    input: &TensorIr,
    out: &TensorIr,
    axes: sum::Axes,
) -> Option<()> {
    let tensor = tensors.peek(input)?;
    let same = sum::is_same(&tensor, &axes);
    (plain(&tensor) && (same || sum::takes(&tensor, &axes))).then_some(())?;
    drop(tensor);
    let tensor = tensors.take(input)?;
    if same {
        // Only where nobody else holds the buffer: who overwrites it in place knows no other name of it.
        tensors.give(out, unshared(tensor));
        return Some(());
    }
    tensors.give(out, sum::sum_dims(tensor, axes));
    Some(())
}

/// A gradient of a convolution from its image, its weight and the gradient of its result, where `compute` takes them.
fn conv_gradient(
    tensors: &mut Tensors<'_>,
    inputs: [&TensorIr; 3],
    options: ConvOptions<2>,
    out: &TensorIr,
    compute: fn(conv::Problem, CubeTensor, CubeTensor, CubeTensor) -> CubeTensor,
) -> Option<()> {
    let mut float = |local| tensors.peek(local).filter(plain);
    let (x, weight, _) = (float(inputs[0])?, float(inputs[1])?, float(inputs[2])?);
    let problem = conv::Problem::new(&x, &weight, &options)?;
    drop((x, weight));
    let x = tensors.take(inputs[0])?;
    let weight = tensors.take(inputs[1])?;
    let grad = tensors.take(inputs[2])?;
    tensors.give(out, compute(problem, x, weight, grad));
    Some(())
}

impl KernelOperation {
    /// Run it, if a kernel here takes its tensors. Nothing was touched where the answer is `None`.
    fn compute(&self, tensors: &mut Tensors<'_>) -> Option<()> {
        let float = |tensor: CubeTensor| plain(&tensor).then_some(tensor);
        match self.taken.as_ref()? {
            Taken::Sum(op) => {
                sum_axes(tensors, &op.input, &op.out, op.axis..op.axis + 1)?;
            }
            Taken::Sums(op) => {
                let (first, last) = (*op.axes.first()?, *op.axes.last()?);
                sum_axes(tensors, &op.input, &op.out, first..last + 1)?;
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
                let inputs = [&op.x, &op.weight, &op.output_grad];
                let options = op.options.clone().into();
                conv_gradient(tensors, inputs, options, &op.out, conv::data_gradient)?;
            }
            Taken::ConvWeight(op) => {
                let inputs = [&op.x, &op.weight, &op.output_grad];
                let options = op.options.clone().into();
                conv_gradient(tensors, inputs, options, &op.out, conv::weight_gradient)?;
            }
        }
        Some(())
    }
}

impl FusedOperation for KernelOperation {
    const NAME: &'static str = "burn-cuda-graph-kernels";
    type State = State;

    fn num_ops_fused(&self) -> usize {
        let behind = self.followed.as_ref().map_or(0, |followed| followed.behind);
        self.leading + usize::from(self.taken.is_some()) + behind
    }

    fn max_relative_shape_id(&self) -> Option<usize> {
        let followed = self.followed.as_ref()?;
        let (fused, elements) = (locked(&followed.fused), locked(&followed.elements));
        fused
            .max_relative_shape_id()
            .max(elements.max_relative_shape_id())
    }

    fn run(
        &mut self,
        context: &mut Context<CubeFusionHandle>,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        if let (Some(followed), Some(Taken::Matmul(op))) = (&self.followed, &self.taken) {
            followed::run(followed, op, context, fallback);
            return;
        }
        for index in 0..self.leading {
            fallback(index).run(context);
        }
        if self.compute(&mut Tensors { context }).is_none() {
            fallback(self.leading).run(context);
        }
    }

    fn to_state(&self) -> Self::State {
        State {
            leading: self.leading,
            taken: self.taken.clone(),
            followed: self.followed.as_ref().map(|followed| {
                let (fused, elements) = (locked(&followed.fused), locked(&followed.elements));
                (fused.to_state(), elements.to_state(), followed.behind)
            }),
        }
    }

    fn from_state(device: &cubecl::Device, state: Self::State) -> Self {
        let followed = state.followed.map(|(fused, elements, behind)| {
            let fused = MatmulOptimization::from_state(device, fused.decode());
            let elements = ElemwiseOptimization::from_state(device, elements.decode());
            Arc::new(Followed {
                fused: Mutex::new(CubeOptimization::new(fused)),
                elements: Mutex::new(CubeOptimization::new(elements)),
                behind,
            })
        });
        Self {
            leading: state.leading,
            taken: state.taken,
            followed,
        }
    }
}

/// What an operation is stored as.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct State {
    leading: usize,
    taken: Option<Taken>,
    followed: Option<(CubeOptimizationState, CubeOptimizationState, usize)>,
}

/// More than Burn's optimizations score, for some thousand operations: the kernel saves more of them than any of those.
const SOFTMAX_SCORE: u64 = 100_000;

/// Takes a softmax, with the operations on elements before it as Burn fuses them.
#[derive(Clone)]
struct SoftmaxFuser {
    device: CubeDevice,
    elements: ElementWiseFuser,
    pattern: Option<softmax::Pattern>,
    closed: bool,
}

impl SoftmaxFuser {
    fn new(device: CubeDevice) -> Self {
        Self {
            elements: ElementWiseFuser::new(device.clone()),
            device,
            pattern: None,
            closed: false,
        }
    }

    fn is_whole(&self) -> bool {
        self.pattern
            .as_ref()
            .is_some_and(softmax::Pattern::is_whole)
    }
}

impl OperationFuser<CubeOptimization> for SoftmaxFuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if self.closed {
            return;
        }
        if let Some(pattern) = &mut self.pattern {
            self.closed = !pattern.follow(operation) || pattern.is_whole();
            return;
        }
        self.pattern = softmax::Pattern::begin(operation);
        if self.pattern.is_none() {
            self.elements.fuse(operation);
            self.closed = self.elements.status() == FuserStatus::Closed;
        }
    }
    fn finish(&mut self) -> CubeOptimization {
        let leading = self.elements.len();
        CubeOptimization::new(SoftmaxOperation {
            leading,
            elements: (leading > 0).then(|| Mutex::new(self.elements.finish())),
            pattern: self.pattern.clone(),
        })
    }
    fn reset(&mut self) {
        *self = Self::new(self.device.clone());
    }
    fn status(&self) -> FuserStatus {
        match self.closed {
            true => FuserStatus::Closed,
            false => FuserStatus::Open,
        }
    }
    fn properties(&self) -> FuserProperties {
        FuserProperties {
            score: SOFTMAX_SCORE,
            ready: self.is_whole(),
        }
    }
    fn len(&self) -> usize {
        let pattern = if self.is_whole() {
            softmax::OPERATIONS
        } else {
            0
        };
        self.elements.len() + pattern
    }
    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// Operations on elements as Burn fuses them, and a softmax by a kernel of ours, or as Burn runs it.
struct SoftmaxOperation {
    leading: usize,
    elements: Option<Mutex<CubeOptimization>>,
    pattern: Option<softmax::Pattern>,
}

impl FusedOperation for SoftmaxOperation {
    const NAME: &'static str = "burn-cuda-graph-softmax";
    type State = SoftmaxState;

    fn num_ops_fused(&self) -> usize {
        self.leading + self.pattern.as_ref().map_or(0, |_| softmax::OPERATIONS)
    }

    fn max_relative_shape_id(&self) -> Option<usize> {
        let elements = self.elements.as_ref()?;
        locked(elements).max_relative_shape_id()
    }

    fn run(
        &mut self,
        context: &mut Context<CubeFusionHandle>,
        fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>,
    ) {
        if let Some(elements) = &self.elements {
            locked(elements).run(context, fallback);
        }
        let Some(pattern) = &self.pattern else {
            return;
        };
        if pattern.compute(&mut Tensors { context }).is_none() {
            for index in self.leading..self.leading + softmax::OPERATIONS {
                fallback(index).run(context);
            }
        }
    }

    fn to_state(&self) -> Self::State {
        SoftmaxState {
            leading: self.leading,
            elements: (self.elements.as_ref()).map(|elements| locked(elements).to_state()),
            pattern: self.pattern.clone(),
        }
    }

    fn from_state(device: &cubecl::Device, state: Self::State) -> Self {
        let elements = state.elements.map(|elements| {
            let elements = ElemwiseOptimization::from_state(device, elements.decode());
            Mutex::new(CubeOptimization::new(elements))
        });
        Self {
            leading: state.leading,
            elements,
            pattern: state.pattern,
        }
    }
}

/// What a softmax is stored as.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SoftmaxState {
    leading: usize,
    elements: Option<CubeOptimizationState>,
    pattern: Option<softmax::Pattern>,
}

struct SoftmaxProvider;

impl OptimizationProvider for SoftmaxProvider {
    type Operation = SoftmaxOperation;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(SoftmaxFuser::new(device.clone()))
    }
}

struct KernelProvider;

impl OptimizationProvider for KernelProvider {
    type Operation = KernelOperation;

    fn fuser(&self, device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(KernelFuser::new(device.clone()))
    }
}

/// Register with Burn's fusion, once for the process. `false`: it runs already, without us.
pub(crate) fn register() -> bool {
    static REGISTERED: Mutex<bool> = Mutex::new(false);
    let mut registered = REGISTERED
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if !*registered {
        *registered = burn_cubecl::fusion::register(KernelProvider).is_ok()
            && burn_cubecl::fusion::register(SoftmaxProvider).is_ok();
    }
    *registered
}
