//! Products with a small result and a long contraction: gradients of weights, small batches.
//!
//! A kernel for products gives each tile of the result all of the contraction. Where there are fewer tiles than
//! multiprocessors, most of the device idles. Cut into pieces, the contraction is a batch of products, whose results are
//! summed (known as split-K). Batches that meet the same matrix are rows of one product.

use super::{KernelKey, declined, occupy, processors, products, shaped, sum, view};
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeTuneId};
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use std::sync::Arc;

/// The side of a tile of the result that one cube computes, as an estimate.
const TILE: usize = 64;
/// Shortest contraction that is cut, and shortest piece.
const SHORTEST: usize = 128;
const SHORTEST_PIECE: usize = 32;
/// What the length of a piece is a multiple of, so that rows are read by vectors.
const GRAIN: usize = 8;
/// Most pieces: their results are written and read again.
const MOST_PIECES: usize = 64;

/// How many rows a matrix has with those of its batches, and how far they are apart, where batches follow one another as rows
/// do.
fn rows(tensor: &CubeTensor) -> Option<(usize, usize)> {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let mut found = None;
    for axis in (0..shape.num_dims() - 1).rev() {
        let (size, stride) = (shape[axis], strides[axis]);
        found = match found {
            _ if size == 1 => found,
            None => Some((size, stride)),
            Some((count, apart)) if stride == count * apart => Some((count * size, apart)),
            Some(_) => return None,
        };
    }
    // One row is at any distance of the next.
    Some(found.unwrap_or((1, shape[shape.num_dims() - 1])))
}

/// Rows, contraction and columns of the one product that it is: all of the left operand's batches meet the same matrix.
fn sizes(lhs: &CubeTensor, rhs: &CubeTensor) -> Option<(usize, usize, usize)> {
    let (left, right) = (lhs.meta.shape(), rhs.meta.shape());
    let rank = left.num_dims();
    if rank < 2 || right.num_dims() != rank || right[..rank - 2].iter().any(|size| *size != 1) {
        return None;
    }
    Some((rows(lhs)?.0, left[rank - 1], right[rank - 1]))
}

/// Tiles of a result, as an estimate.
pub(super) fn tiles(m: usize, n: usize) -> usize {
    m.div_ceil(TILE) * n.div_ceil(TILE)
}

/// Whether the product is one that may gain from being cut.
pub(super) fn takes(lhs: &CubeTensor, rhs: &CubeTensor) -> bool {
    let cut = sizes(lhs, rhs).is_some_and(|(m, k, n)| {
        k >= SHORTEST && m * n > 0 && m > 1 && n > 1 && tiles(m, n) <= 2 * processors(lhs)
    });
    cut || products::takes(lhs, rhs)
}

/// The largest number of equal pieces up to `wanted`.
pub(super) fn pieces(k: usize, wanted: usize) -> usize {
    let most = wanted.min(MOST_PIECES).min(k / SHORTEST_PIECE).max(1);
    (1..=most)
        .rev()
        .find(|pieces| k.is_multiple_of(pieces * GRAIN))
        .unwrap_or(1)
}

/// The batch of products of both matrices' pieces, summed: `[m, n]`.
pub(super) fn cut_product(
    lhs: &CubeTensor,
    rhs: &CubeTensor,
    (m, k, n): (usize, usize, usize),
    pieces: usize,
) -> Result<CubeTensor, String> {
    let length = k / pieces;
    let Some((_, row)) = rows(lhs) else {
        return declined("batches that are no rows of one matrix");
    };
    let last = |tensor: &CubeTensor, from_last: usize| {
        let strides = tensor.meta.strides();
        strides[strides.len() - from_last]
    };
    let (along, across, column) = (last(lhs, 1), last(rhs, 2), last(rhs, 1));
    if pieces == 1 {
        let lhs = view(lhs, [m, k], [row, along]);
        let rhs = view(rhs, [k, n], [across, column]);
        return products::product(lhs, rhs);
    }
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
    let parts = products::product(lhs, rhs)?;
    let sum = sum::launch(&parts, (1, pieces, m * n), 32);
    Ok(view(&sum, [m, n], [n, 1]))
}

/// A result `[m, n]` in Burn's shape.
fn ranked(out: CubeTensor, like: &CubeTensor) -> CubeTensor {
    let mut sizes = like.meta.shape().to_vec();
    if let Some(last) = sizes.last_mut() {
        *last = out.meta.shape()[1];
    }
    shaped(out, sizes)
}

/// How a product is computed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Way {
    /// The operands as they are, by the kernel of CubeK's that is the fastest.
    Chosen,
    /// Batches as rows of one matrix, where Burn's kernels go from batch to batch.
    Folded,
    /// Enough pieces for as many tiles as that many halves of the multiprocessors.
    Pieces { halves: usize },
}

impl Way {
    /// All, and what each is called.
    pub(super) const ALL: [(&'static str, Self); 5] = [
        ("chosen", Self::Chosen),
        ("folded", Self::Folded),
        ("pieces_half", Self::Pieces { halves: 1 }),
        ("pieces_one", Self::Pieces { halves: 2 }),
        ("pieces_two", Self::Pieces { halves: 4 }),
    ];

    /// The product of two matrices, in tensors of any rank.
    pub(super) fn multiply(self, lhs: &CubeTensor, rhs: &CubeTensor) -> Result<CubeTensor, String> {
        if let Self::Chosen = self {
            return match products::takes(lhs, rhs) {
                true => products::product(lhs.clone(), rhs.clone()),
                false => declined("a product that launches do not decide"),
            };
        }
        let Some((m, k, n)) = sizes(lhs, rhs) else {
            return declined("a batch");
        };
        if k < SHORTEST || tiles(m, n) > 2 * processors(lhs) {
            return declined("a product with tiles enough");
        }
        let count = |halves: usize| {
            let wanted = halves * processors(lhs) / 2;
            pieces(k, wanted.div_ceil(tiles(m, n)))
        };
        let own = match self {
            Self::Chosen => 1,
            Self::Folded => match lhs.meta.shape()[lhs.meta.num_dims() - 2] == m {
                true => return declined("no batch"),
                false => 1,
            },
            Self::Pieces { halves } => match count(halves) {
                own if own < 2 || (halves > 1 && own == count(halves / 2)) => {
                    return declined("no other number of pieces");
                }
                own => own,
            },
        };
        cut_product(lhs, rhs, (m, k, n), own).map(|out| ranked(out, lhs))
    }
}

/// What the choice of a way is remembered by, with `behind` operations on elements after it.
pub(super) fn key(lhs: &CubeTensor, rhs: &CubeTensor, behind: usize) -> KernelKey {
    products::key("product", lhs, rhs, behind)
}

/// The product of two matrices, in tensors of any rank.
pub(super) fn product(lhs: CubeTensor, rhs: CubeTensor) -> CubeTensor {
    static TUNER: LocalTuner<KernelKey, CubeTuneId> = local_tuner!();
    type Inputs = (CubeTensor, CubeTensor);

    let client = lhs.client.clone();
    let id = CubeTuneId::new(&client, &lhs.device);
    let candidates = TUNER.init(&id, || {
        let key = |(lhs, rhs): &Inputs| key(lhs, rhs, 0);
        let burn = Tunable::new("burn", |(lhs, rhs): Inputs| {
            Ok::<_, String>(CubeBackend::float_matmul(lhs, rhs))
        });
        let all = TunableSet::<KernelKey, Inputs, CubeTensor>::new_cloning_inputs(key)
            .with_eviction(Arc::new(|_: &KernelKey, (lhs, _): &Inputs| {
                occupy(&lhs.client, &lhs.device)
            }))
            .with(burn);
        Way::ALL.into_iter().fold(all, |all, (name, way)| {
            all.with(Tunable::new(name, move |(lhs, rhs): Inputs| {
                way.multiply(&lhs, &rhs)
            }))
        })
    });
    TUNER.execute(&id, &client, candidates, (lhs, rhs))
}
