//! Which of CubeK's kernels computes a product.
//!
//! Burn chooses among them by times taken on an idle device. There a product of some microseconds is as long as the host
//! takes to launch it, whichever kernel computes it: on an H200 a product of 16 x 32 x 16 was measured at 60 to 85 us by
//! all seven. So the choice is made again, on a device that waits for no launch. The candidates are the ones that Burn has.

use super::{KernelKey, occupy};
use burn::tensor::{DType, Shape};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::CubeTuneId;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::TensorBinding;
use cubecl::std::tensor::copy_into;
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use cubecl::zspace::Strides;
use cubecl::zspace::metadata::Metadata;
use cubek::matmul::definition::{
    AvailableVectorSizes, MatmulElems, MatmulGlobalElems, MatmulProblem, MatmulSetupError,
};
use cubek::matmul::multi_level::args::{
    ConcreteInputsFactory, ConcreteOutputFactory, InputArg, OutputArg, TensorArgs,
};
use cubek::matmul::multi_level::components::tile::TileMatmulKind;
use cubek::matmul::multi_level::routines::TileSizeSelection;
use cubek::matmul::multi_level::routines::batch::double_buffering::{
    CyclicDoubleBufferingAlgorithm, DoubleBufferingArgs,
};
use cubek::matmul::multi_level::routines::batch::double_unit::{
    DoubleUnitAlgorithm, DoubleUnitSelectionArgs,
};
use cubek::matmul::multi_level::routines::batch::ordered_double_buffering::{
    OrderedDoubleBufferingAlgorithm, OrderedSelectionArgs,
};
use cubek::matmul::multi_level::routines::batch::simple::{SimpleAlgorithm, SimpleArgs};
use cubek::matmul::multi_level::routines::batch::simple_unit::{
    SimpleUnitAlgorithm, SimpleUnitSelectionArgs,
};
use cubek::matmul::multi_level::{BatchMatmulRoutine, launch_kernel_concrete};
use cubek::matmul::routine::BlueprintStrategy;
use cubek::std::{InputBinding, MatrixLayout};
use std::sync::Arc;

/// Multiplications up to which a launch's time may decide Burn's choice: some 100 microseconds of a large GPU.
const MOST_MULTIPLICATIONS: usize = 1 << 32;
/// A product with fewer rows, columns or terms is one of vectors.
const LEAST: usize = 8;

/// Whether the choice is worth making again.
pub(super) fn takes(lhs: &CubeTensor, rhs: &CubeTensor) -> bool {
    let (left, right) = (lhs.meta.shape(), rhs.meta.shape());
    let rank = left.num_dims();
    if rank < 2 || right.num_dims() != rank {
        return false;
    }
    let sides = [left[rank - 2], left[rank - 1], right[rank - 1]];
    let batches = (0..rank - 2).map(|axis| left[axis].max(right[axis]));
    let multiplications = batches.chain(sides).try_fold(1usize, usize::checked_mul);
    sides.iter().all(|side| *side >= LEAST)
        && multiplications.is_some_and(|count| (1..=MOST_MULTIPLICATIONS).contains(&count))
}

type Inputs = (CubeTensor, CubeTensor, CubeTensor);

/// A kernel of CubeK's with its settings.
#[derive(Clone)]
pub(super) struct Candidate {
    pub name: String,
    /// The tensor cores' instructions that it needs.
    tile: Option<TileMatmulKind>,
    launch: Arc<dyn Fn(Inputs) -> Result<(), String> + Send + Sync>,
}

impl Candidate {
    fn new<A>(name: &str, tile: Option<TileMatmulKind>, settings: A::Strategy) -> Self
    where
        A: BatchMatmulRoutine<(), Strategy: Send + Sync + 'static>,
        InputArg<TensorArgs>: ConcreteInputsFactory<A>,
        OutputArg<TensorArgs>: ConcreteOutputFactory<A>,
    {
        let kind = tile.map_or("", |tile| match tile {
            TileMatmulKind::Mma => "_mma",
            _ => "_cmma",
        });
        Self {
            name: format!("{name}{kind}{settings}"),
            tile,
            launch: Arc::new(move |inputs| launch::<A>(settings.clone(), inputs)),
        }
    }

    /// The product of the first two into the third.
    pub(super) fn multiply(&self, inputs: Inputs) -> Result<(), String> {
        if self.tile.is_some_and(|tile| !supports(&inputs.0, tile)) {
            return super::declined("a device without such tensor cores");
        }
        (self.launch)(inputs)
    }
}

/// The kernels that Burn's tuning has for products of matrices of `f32`, with its settings. Those that copy to shared memory
/// without passing through registers are left out: they cannot round to what tensor cores take.
pub(super) fn candidates() -> Vec<Candidate> {
    let mut all = Vec::new();
    for tile_size in [
        TileSizeSelection::MaxTileSize,
        TileSizeSelection::MinTileSize,
    ] {
        let (simple, double) = (
            SimpleUnitSelectionArgs { tile_size },
            DoubleUnitSelectionArgs { tile_size },
        );
        all.push(Candidate::new::<SimpleUnitAlgorithm>(
            "simple_unit",
            None,
            simple,
        ));
        all.push(Candidate::new::<DoubleUnitAlgorithm>(
            "double_unit",
            None,
            double,
        ));
    }
    for tile_matmul in [TileMatmulKind::Cmma, TileMatmulKind::Mma] {
        let tile = Some(tile_matmul);
        for multi_rows in [false, true] {
            let settings = SimpleArgs {
                tile_matmul,
                multi_rows,
            };
            all.push(Candidate::new::<SimpleAlgorithm>(
                "simple_cyclic",
                tile,
                settings,
            ));
        }
        for rows in [4, 8] {
            let settings = OrderedSelectionArgs {
                partition_k: Some(2),
                row_count: Some(rows),
                rows_per_plane: Some(2),
                tile_matmul,
            };
            all.push(Candidate::new::<OrderedDoubleBufferingAlgorithm>(
                "ordered_double",
                tile,
                settings,
            ));
        }
        for specialized in [false, true] {
            let settings = DoubleBufferingArgs {
                specialized,
                tile_matmul,
            };
            all.push(Candidate::new::<CyclicDoubleBufferingAlgorithm>(
                "double_cyclic",
                tile,
                settings,
            ));
        }
    }
    all
}

/// What a kernel computes in: at the borders `f32`, and what it chooses itself inside.
fn elements() -> MatmulElems {
    let float = dtype_to_storage_type(DType::F32);
    MatmulElems::from_globals(&MatmulGlobalElems {
        lhs: float,
        rhs: float,
        out: float,
    })
}

/// Whether `count` elements may be read at once: along the axis they follow one another, and each step along another starts
/// at a multiple of them.
fn divides(count: usize, binding: &TensorBinding, along: usize) -> bool {
    let (shape, strides) = (&binding.shape, &binding.strides);
    strides[along] == 1
        && shape[along].is_multiple_of(count)
        && (0..shape.len())
            .filter(|axis| *axis != along && shape[*axis] > 1)
            .all(|axis| strides[axis].is_multiple_of(count))
}

/// Launch a kernel on operands as they lie, batches in any order.
///
/// CubeK's own launch first copies operands whose batches are closer together than their rows, as heads of attention are.
/// Its kernels do not need that: they take the distance of each axis.
fn launch<A>(settings: A::Strategy, (lhs, rhs, out): Inputs) -> Result<(), String>
where
    A: BatchMatmulRoutine<()>,
    InputArg<TensorArgs>: ConcreteInputsFactory<A>,
    OutputArg<TensorArgs>: ConcreteOutputFactory<A>,
{
    let words = |error: MatmulSetupError| format!("{error:?}");
    let client = out.client.clone();
    let float = dtype_to_storage_type(DType::F32);
    let mut elements = elements();
    let size = elements.acc_global.size();
    let (lhs, rhs, out) = (lhs.binding(), rhs.binding(), out.binding());
    let rank = out.shape.len();
    for operand in [&lhs, &rhs] {
        let apart = |axis: usize| operand.strides[axis] > 0 || operand.shape[axis] == 1;
        if !apart(rank - 1) || !apart(rank - 2) {
            return super::declined("rows or columns that are one in memory");
        }
    }
    let binding = |operand: TensorBinding| InputBinding::new(operand, float);
    let (left, right) = (binding(lhs.clone()), binding(rhs.clone()));
    let address_type = left
        .required_address_type()
        .max(right.required_address_type())
        .max(out.required_address_type(size));
    let problem = MatmulProblem::from_shapes_and_strides(
        lhs.shape.clone(),
        rhs.shape.clone(),
        out.shape.clone(),
        lhs.strides.clone(),
        rhs.strides.clone(),
        out.strides.clone(),
        elements.as_global_elems(),
        address_type,
        None,
        None,
    )
    .map_err(words)?;
    let along = |layout: MatrixLayout| match layout {
        MatrixLayout::RowMajor => rank - 1,
        MatrixLayout::ColMajor => rank - 2,
    };
    let (left_axis, right_axis) = (along(problem.lhs_layout), along(problem.rhs_layout));
    let vector_sizes = AvailableVectorSizes::from_type_sizes(&client, size, size, size)
        .filter_lhs(|count| divides(*count, &lhs, left_axis))
        .filter_rhs(|count| divides(*count, &rhs, right_axis))
        .filter_out(|count| divides(*count, &out, rank - 1))
        .pick_max()
        .map_err(words)?;
    launch_kernel_concrete::<TensorArgs, A>(
        &client,
        left,
        right,
        out,
        problem,
        vector_sizes,
        &BlueprintStrategy::Inferred(settings),
        &mut elements,
    )
    .map_err(words)
}

/// The order of axes in which the result lies: that of the right operand, whose columns it has, if that has rows farther
/// apart than its batches. So the heads of attention leave as they came, and joining them needs no copy.
fn empty_like(lhs: &CubeTensor, rhs: &CubeTensor, sizes: Vec<usize>) -> CubeTensor {
    let rank = sizes.len();
    let (shape, strides) = (rhs.meta.shape(), rhs.meta.strides());
    let mut order: Vec<usize> = (0..rank).collect();
    let batches = 0..rank - 2;
    let crossed = batches
        .clone()
        .any(|axis| strides[axis] < strides[rank - 2]);
    let whole = batches.clone().all(|axis| shape[axis] == sizes[axis]);
    if strides[rank - 1] == 1 && crossed && whole {
        order[..rank - 1].sort_by_key(|axis| std::cmp::Reverse(strides[*axis]));
    }
    let mut apart = vec![1; rank];
    for at in (0..rank - 1).rev() {
        apart[order[at]] = apart[order[at + 1]] * sizes[order[at + 1]];
    }
    let (client, device) = (lhs.client.clone(), lhs.device.clone());
    let count = Shape::from([sizes.iter().product::<usize>()]);
    let mut out = empty_device_contiguous_dtype(client, device, count, DType::F32);
    *out.meta = Metadata::new(Shape::from(sizes), Strides::new(&apart));
    out
}

/// The product of matrices, or of batches of them, in memory without holes. Batches lie between the rows where those of the
/// right operand do.
pub(super) fn product(lhs: CubeTensor, rhs: CubeTensor) -> Result<CubeTensor, String> {
    static TUNER: LocalTuner<KernelKey, CubeTuneId> = local_tuner!();

    let (left, right) = (lhs.meta.shape(), rhs.meta.shape());
    let rank = left.num_dims();
    let mut sizes: Vec<usize> = (0..rank).map(|axis| left[axis].max(right[axis])).collect();
    sizes[rank - 2] = left[rank - 2];
    sizes[rank - 1] = right[rank - 1];
    let out = empty_like(&lhs, &rhs, sizes);
    if !takes(&lhs, &rhs) {
        return burn((lhs, rhs, out.clone())).map(|()| out);
    }
    let client = lhs.client.clone();
    let id = CubeTuneId::new(&client, &lhs.device);
    let choice = TUNER.init(&id, || {
        let key = |(lhs, rhs, _): &Inputs| key("product of CubeK", lhs, rhs, 0);
        let all = TunableSet::<KernelKey, Inputs, ()>::new_cloning_inputs(key)
            .with_eviction(Arc::new(|_: &KernelKey, (lhs, ..): &Inputs| {
                occupy(&lhs.client, &lhs.device)
            }))
            .with(Tunable::new("burn", burn));
        candidates().into_iter().fold(all, |all, candidate| {
            let name = candidate.name.clone();
            all.with(Tunable::new(&name, move |inputs: Inputs| {
                candidate.multiply(inputs)
            }))
        })
    });
    TUNER.execute(&id, &client, choice, (lhs, rhs, out.clone()));
    Ok(out)
}

/// Burn's own choice.
fn burn((lhs, rhs, out): Inputs) -> Result<(), String> {
    let words = |error: MatmulSetupError| format!("{error:?}");
    let strategy = MatmulStrategy::default();
    if out.is_contiguous() {
        return matmul(lhs, rhs, Some(out), strategy, DType::F32)
            .map(drop)
            .map_err(words);
    }
    let found = matmul(lhs, rhs, None, strategy, DType::F32).map_err(words)?;
    let client = out.client.clone();
    let float = dtype_to_storage_type(DType::F32);
    copy_into(&client, found.binding(), out.binding(), float);
    Ok(())
}

/// Whether the device has the instructions for `f32`, or for what a kernel turns it into.
fn supports(tensor: &CubeTensor, tile: TileMatmulKind) -> bool {
    let mut elements = elements();
    cubek::matmul::multi_level::definition::adjust_dtypes(
        &tensor.client,
        &mut elements,
        tile.requires_accelerator(),
    );
    !tile
        .supported_sizes(
            &tensor.client,
            elements.lhs_register,
            elements.rhs_register,
            elements.acc_register,
        )
        .is_empty()
}

/// What a choice for a product is remembered by, with `behind` operations on elements after it.
pub(super) fn key(operation: &str, lhs: &CubeTensor, rhs: &CubeTensor, behind: usize) -> KernelKey {
    let shapes = lhs.meta.shape().iter().chain(rhs.meta.shape().iter());
    let sizes: Vec<usize> = shapes.copied().chain([behind]).collect();
    KernelKey::new(operation, sizes, &[lhs, rhs])
}
