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
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::launch_ref;
use cubek::matmul::multi_level::Strategy;
use cubek::matmul::multi_level::components::tile::TileMatmulKind;
use cubek::matmul::multi_level::routines::TileSizeSelection;
use cubek::matmul::multi_level::routines::batch::double_buffering::DoubleBufferingArgs;
use cubek::matmul::multi_level::routines::batch::double_unit::DoubleUnitSelectionArgs;
use cubek::matmul::multi_level::routines::batch::ordered_double_buffering::OrderedSelectionArgs;
use cubek::matmul::multi_level::routines::batch::simple::SimpleArgs;
use cubek::matmul::multi_level::routines::batch::simple_unit::SimpleUnitSelectionArgs;
use cubek::matmul::routine::BlueprintStrategy::Inferred;
use cubek::std::InputBinding;
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

/// The strategies that Burn's tuning has for products of matrices, and whether each needs tensor cores.
fn strategies() -> Vec<(Strategy, Option<TileMatmulKind>)> {
    let mut all = Vec::new();
    for tile_size in [
        TileSizeSelection::MaxTileSize,
        TileSizeSelection::MinTileSize,
    ] {
        let simple = SimpleUnitSelectionArgs { tile_size };
        let double = DoubleUnitSelectionArgs { tile_size };
        all.push((Strategy::SimpleUnit(Inferred(simple)), None));
        all.push((Strategy::DoubleUnit(Inferred(double)), None));
    }
    for tile_matmul in [TileMatmulKind::Cmma, TileMatmulKind::Mma] {
        let mma = matches!(tile_matmul, TileMatmulKind::Mma);
        let mut push = |cmma: Strategy, plain: Strategy| {
            all.push((if mma { plain } else { cmma }, Some(tile_matmul)));
        };
        for multi_rows in [false, true] {
            let args = SimpleArgs {
                tile_matmul,
                multi_rows,
            };
            push(
                Strategy::SimpleCyclicCmma(Inferred(args.clone())),
                Strategy::SimpleCyclicMma(Inferred(args.clone())),
            );
            push(
                Strategy::SimpleTmaCmma(Inferred(args.clone())),
                Strategy::SimpleTmaMma(Inferred(args)),
            );
        }
        for rows in [4, 8] {
            let args = OrderedSelectionArgs {
                partition_k: Some(2),
                row_count: Some(rows),
                rows_per_plane: Some(2),
                tile_matmul,
            };
            push(
                Strategy::OrderedDoubleCmma(Inferred(args.clone())),
                Strategy::OrderedDoubleMma(Inferred(args)),
            );
        }
        for specialized in [false, true] {
            let args = DoubleBufferingArgs {
                specialized,
                tile_matmul,
            };
            push(
                Strategy::DoubleCyclicCmma(Inferred(args.clone())),
                Strategy::DoubleCyclicMma(Inferred(args)),
            );
        }
        push(
            Strategy::SpecializedCyclicCmma(Inferred(().into())),
            Strategy::SpecializedCyclicMma(Inferred(().into())),
        );
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

type Inputs = (CubeTensor, CubeTensor, CubeTensor);

fn launch(strategy: &Strategy, (lhs, rhs, out): Inputs) -> Result<(), String> {
    let float = dtype_to_storage_type(DType::F32);
    let client = out.client.clone();
    launch_ref(
        &strategy.clone().into(),
        &client,
        InputBinding::new(lhs.binding(), float),
        InputBinding::new(rhs.binding(), float),
        out.binding(),
        &mut elements(),
    )
    .map_err(|error| format!("{error:?}"))
}

/// The product of matrices, or of batches of them, in memory without holes.
pub(super) fn product(lhs: CubeTensor, rhs: CubeTensor) -> Result<CubeTensor, String> {
    static TUNER: LocalTuner<KernelKey, CubeTuneId> = local_tuner!();

    let (left, right) = (lhs.meta.shape(), rhs.meta.shape());
    let rank = left.num_dims();
    let mut sizes: Vec<usize> = (0..rank).map(|axis| left[axis].max(right[axis])).collect();
    sizes[rank - 2] = left[rank - 2];
    sizes[rank - 1] = right[rank - 1];
    let (client, device) = (lhs.client.clone(), lhs.device.clone());
    let out = empty_device_contiguous_dtype(client, device, Shape::from(sizes), DType::F32);
    if !takes(&lhs, &rhs) {
        return burn((lhs, rhs, out.clone())).map(|()| out);
    }
    let client = lhs.client.clone();
    let id = CubeTuneId::new(&client, &lhs.device);
    let candidates = TUNER.init(&id, || {
        let key = |(lhs, rhs, _): &Inputs| key("product of CubeK", lhs, rhs, 0);
        let all = TunableSet::<KernelKey, Inputs, ()>::new_cloning_inputs(key)
            .with_eviction(Arc::new(|_: &KernelKey, (lhs, ..): &Inputs| {
                occupy(&lhs.client, &lhs.device)
            }))
            .with(Tunable::new("burn", burn));
        strategies().into_iter().fold(all, |all, (strategy, tile)| {
            all.with(Tunable::new(
                &strategy.to_string(),
                move |inputs: Inputs| {
                    if tile.is_some_and(|tile| !supports(&inputs.0, tile)) {
                        return super::declined("a device without such tensor cores");
                    }
                    launch(&strategy, inputs)
                },
            ))
        })
    });
    TUNER.execute(&id, &client, candidates, (lhs, rhs, out.clone()));
    Ok(out)
}

/// Burn's own choice.
fn burn((lhs, rhs, out): Inputs) -> Result<(), String> {
    matmul(lhs, rhs, Some(out), MatmulStrategy::default(), DType::F32)
        .map(drop)
        .map_err(|error| format!("{error:?}"))
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
