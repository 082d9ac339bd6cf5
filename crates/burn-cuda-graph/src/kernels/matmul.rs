//! Products with a small result and a long contraction: gradients of weights, small batches.
//!
//! A kernel for products gives each tile of the result all of the contraction. Where there are fewer tiles than
//! multiprocessors, most of the device idles. Cut into pieces, the contraction is a batch of products, whose results are
//! summed (known as split-K).

use super::{KernelKey, declined, empty, processors, sum, view};
use burn::tensor::DType;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeTuneId};
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};

/// The side of a tile of the result that one cube computes, as an estimate.
const TILE: usize = 64;
/// Shortest contraction that is cut, and shortest piece.
const SHORTEST: usize = 128;
const SHORTEST_PIECE: usize = 32;
/// What the length of a piece is a multiple of, so that rows are read by vectors.
const GRAIN: usize = 8;
/// Most pieces: their results are written and read again.
const MOST_PIECES: usize = 64;

/// Rows, contraction and columns, where all other axes have one element.
fn sizes(lhs: &CubeTensor, rhs: &CubeTensor) -> Option<(usize, usize, usize)> {
    let (left, right) = (lhs.meta.shape(), rhs.meta.shape());
    let rank = left.num_dims();
    if rank < 2 || right.num_dims() != rank {
        return None;
    }
    let single = |shape: &[usize]| shape[..rank - 2].iter().all(|size| *size == 1);
    (single(left) && single(right)).then(|| (left[rank - 2], left[rank - 1], right[rank - 1]))
}

fn tiles(m: usize, n: usize) -> usize {
    m.div_ceil(TILE) * n.div_ceil(TILE)
}

/// Whether the product is one that may gain from being cut.
pub(super) fn takes(lhs: &CubeTensor, rhs: &CubeTensor) -> bool {
    sizes(lhs, rhs).is_some_and(|(m, k, n)| {
        k >= SHORTEST && m * n > 0 && m > 1 && n > 1 && tiles(m, n) <= 2 * processors(lhs)
    })
}

/// The largest number of equal pieces up to `wanted`.
pub(super) fn pieces(k: usize, wanted: usize) -> usize {
    let most = wanted.min(MOST_PIECES).min(k / SHORTEST_PIECE).max(1);
    (1..=most)
        .rev()
        .find(|pieces| k.is_multiple_of(pieces * GRAIN))
        .unwrap_or(1)
}

/// The last two axes' strides.
fn strides(tensor: &CubeTensor) -> (usize, usize) {
    let strides = tensor.meta.strides();
    (strides[strides.len() - 2], strides[strides.len() - 1])
}

/// The batch of products of both matrices' pieces, summed.
pub(super) fn cut_product(
    lhs: &CubeTensor,
    rhs: &CubeTensor,
    (m, k, n): (usize, usize, usize),
    pieces: usize,
) -> Result<CubeTensor, String> {
    let length = k / pieces;
    let ((row, along), (across, column)) = (strides(lhs), strides(rhs));
    let lhs = view(lhs, [pieces, m, length], [length * along, row, along]);
    let rhs = view(rhs, [pieces, length, n], [length * across, across, column]);
    summed(lhs, rhs, (pieces, m, n))
}

/// The sum of a batch of products of `[m, ..]` and `[.., n]`.
pub(super) fn summed(
    lhs: CubeTensor,
    rhs: CubeTensor,
    (pieces, m, n): (usize, usize, usize),
) -> Result<CubeTensor, String> {
    let parts = empty(&lhs, [pieces, m, n]);
    let parts = matmul(lhs, rhs, Some(parts), MatmulStrategy::default(), DType::F32)
        .map_err(|error| format!("{error:?}"))?;
    let sum = sum::launch(&parts, (1, pieces, m * n), 32);
    Ok(view(&sum, [m, n], [n, 1]))
}

/// A result of Burn's rank.
fn ranked(out: CubeTensor, rank: usize) -> CubeTensor {
    let (m, n) = (out.meta.shape()[0], out.meta.shape()[1]);
    let mut sizes = vec![1; rank - 2];
    sizes.extend([m, n]);
    let mut strides = vec![m * n; rank - 2];
    strides.extend([n, 1]);
    let mut out = out;
    *out.meta = cubecl::zspace::metadata::Metadata::new(
        burn::tensor::Shape::from(sizes),
        cubecl::zspace::Strides::new(&strides),
    );
    out
}

/// The product of two matrices, in tensors of any rank.
pub(super) fn product(lhs: CubeTensor, rhs: CubeTensor) -> CubeTensor {
    static TUNER: LocalTuner<KernelKey, CubeTuneId> = local_tuner!();
    type Inputs = (CubeTensor, CubeTensor);

    let client = lhs.client.clone();
    let id = CubeTuneId::new(&client, &lhs.device);
    // Enough pieces for as many tiles as half of the multiprocessors, all of them, and twice their number.
    let cut = |(lhs, rhs): Inputs, halves: usize| {
        let Some((m, k, n)) = sizes(&lhs, &rhs) else {
            return declined("a batch");
        };
        let processors = processors(&lhs);
        let count = |halves: usize| pieces(k, (halves * processors / 2).div_ceil(tiles(m, n)));
        let own = count(halves);
        if own < 2 || (halves > 1 && own == count(halves / 2)) {
            return declined("no other number of pieces");
        }
        let rank = lhs.meta.num_dims();
        cut_product(&lhs, &rhs, (m, k, n), own).map(|out| ranked(out, rank))
    };
    let candidates = TUNER.init(&id, move || {
        let key = |(lhs, rhs): &Inputs| {
            let (m, k, n) = sizes(lhs, rhs).unwrap_or_default();
            KernelKey::new("product", [m, k, n], &[lhs, rhs])
        };
        TunableSet::<KernelKey, Inputs, CubeTensor>::new_cloning_inputs(key)
            .with(Tunable::new("burn", |(lhs, rhs): Inputs| {
                Ok::<_, String>(CubeBackend::float_matmul(lhs, rhs))
            }))
            .with(Tunable::new("pieces_half", move |inputs| cut(inputs, 1)))
            .with(Tunable::new("pieces_one", move |inputs| cut(inputs, 2)))
            .with(Tunable::new("pieces_two", move |inputs| cut(inputs, 4)))
    });
    TUNER.execute(&id, &client, candidates, (lhs, rhs))
}
