//! Sums along an axis, or some one behind the other: gradients of biases, of norms' weights and of their inputs.
//!
//! A kernel that gives each column one thread keeps a few hundred threads busy with a thousand additions each, one waiting for
//! another. Here the rows of a column are dealt to many units, whose sums are added in a tree. So are the elements of a line,
//! where the last axis is summed. The sum of an axis of one is the tensor itself.

// The macro's expansion names its arguments without need. Conditions within a unit stand apart.
#![allow(clippy::too_many_arguments, clippy::collapsible_if, missing_docs)]

use super::{KernelKey, declined, empty, occupy, shaped, view};
use burn::tensor::Shape;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeTuneId};
use cubecl::prelude::*;
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use std::sync::Arc;

/// Fewest rows that are a sum.
const FEWEST_ROWS: usize = 2;
/// Most columns: where there are more, one thread for each fills a device.
const MOST_COLUMNS: usize = 1 << 18;

/// Lines of a length that a few units sum, no more than a grid has cubes.
const SHORTEST_LINE: usize = 32;
const LONGEST_LINE: usize = 1 << 14;
const MOST_LINES: usize = 1 << 16;

/// Sum `rows` rows of `width` vectors. A cube has `columns` of them, and `lanes` units for each.
#[cube(launch)]
fn sum_rows<N: Size>(
    input: &[Vector<f32, N>],
    out: &mut [Vector<f32, N>],
    rows: u32,
    width: u32,
    #[comptime] columns: u32,
    #[comptime] lanes: u32,
) {
    let column = CUBE_POS_X * columns + UNIT_POS_X;
    let lane = UNIT_POS_Y;
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if column < width {
        let mut row = lane;
        while row < rows {
            let place = (CUBE_POS_Y * rows + row) * width + column;
            sum += input[usize::cast_from(place)];
            row += lanes;
        }
    }
    let mut shared = Shared::<[Vector<f32, N>]>::new_slice(comptime!((columns * lanes) as usize));
    let own = usize::cast_from(lane * columns + UNIT_POS_X);
    shared[own] = sum;
    sync_cube();
    let mut half = comptime!(lanes / 2).runtime();
    while half > 0 {
        if lane < half {
            let other = usize::cast_from((lane + half) * columns + UNIT_POS_X);
            let sum = shared[own] + shared[other];
            shared[own] = sum;
        }
        half /= 2;
        sync_cube();
    }
    if lane == 0 {
        if column < width {
            out[usize::cast_from(CUBE_POS_Y * width + column)] = shared[own];
        }
    }
}

/// Units of a cube that sums lines.
const UNITS: usize = 256;

/// Sum each of `count` lines of `width` vectors. A cube has `lines` of them, and `lanes` units for each.
#[cube(launch)]
fn sum_lines<N: Size>(
    input: &[Vector<f32, N>],
    out: &mut [f32],
    count: u32,
    width: u32,
    #[comptime] lines: u32,
    #[comptime] lanes: u32,
) {
    let line = CUBE_POS_X * lines + UNIT_POS_Y;
    let lane = UNIT_POS_X;
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if line < count {
        let mut at = lane;
        while at < width {
            sum += input[usize::cast_from(line * width + at)];
            at += lanes;
        }
    }
    let mut total = sum.extract(0usize);
    #[unroll]
    for element in 1..N::value() {
        total += sum.extract(element);
    }
    let mut shared = Shared::<[f32]>::new_slice(comptime!((lines * lanes) as usize));
    let own = usize::cast_from(UNIT_POS_Y * lanes + lane);
    shared[own] = total;
    sync_cube();
    let mut half = comptime!(lanes / 2).runtime();
    while half > 0 {
        if lane < half {
            let other = usize::cast_from(UNIT_POS_Y * lanes + lane + half);
            let sum = shared[own] + shared[other];
            shared[own] = sum;
        }
        half /= 2;
        sync_cube();
    }
    if lane == 0 {
        if line < count {
            out[usize::cast_from(line)] = shared[own];
        }
    }
}

/// Axes of a tensor that are summed, one behind the other.
pub(super) type Axes = core::ops::Range<usize>;

/// A tensor's axes before the summed ones, the summed ones, and those behind them, each as one.
fn folded(tensor: &CubeTensor, axes: &Axes) -> (usize, usize, usize) {
    let shape = tensor.meta.shape();
    let product = |sizes: &[usize]| sizes.iter().product::<usize>();
    (
        product(&shape[..axes.start]),
        product(&shape[axes.clone()]),
        product(&shape[axes.end..]),
    )
}

/// Whether the sum of `tensor` along `axes` is the tensor.
pub(super) fn is_same(tensor: &CubeTensor, axes: &Axes) -> bool {
    let shape = tensor.meta.shape();
    axes.end <= shape.num_dims() && shape[axes.clone()].iter().all(|size| *size == 1)
}

/// Whether the sum of `tensor` along `axes` is one for these kernels.
pub(super) fn takes(tensor: &CubeTensor, axes: &Axes) -> bool {
    if axes.end > tensor.meta.num_dims() || !tensor.is_contiguous() {
        return false;
    }
    let (outer, rows, inner) = folded(tensor, axes);
    let elements = tensor.meta.num_elements();
    if inner == 1 {
        return (1..MOST_LINES).contains(&outer)
            && (SHORTEST_LINE..=LONGEST_LINE).contains(&rows)
            && elements < 1 << 32;
    }
    rows >= FEWEST_ROWS
        && (1..=MOST_COLUMNS).contains(&(outer * inner))
        // The grid's second axis.
        && outer < 1 << 16
        && elements < 1 << 32
}

/// Vectors, not elements, that a unit sums at once.
fn vector(inner: usize) -> usize {
    if inner.is_multiple_of(4) { 4 } else { 1 }
}

/// Sum `[outer, rows, inner]`, which has no holes, to `[outer, inner]`. A cube takes `columns` vectors of each row.
pub(super) fn launch(
    input: &CubeTensor,
    (outer, rows, inner): (usize, usize, usize),
    columns: usize,
) -> CubeTensor {
    let vector = vector(inner);
    let width = inner / vector;
    let units = input.client.properties().hardware.max_units_per_cube as usize;
    let most = (units / columns)
        .clamp(1, 128)
        .min(rows.next_power_of_two());
    // A power of two, for the tree.
    let lanes = 1usize << most.ilog2();
    let out = empty(input, [outer, inner]);
    sum_rows::launch(
        &input.client,
        CubeCount::Static(width.div_ceil(columns) as u32, outer as u32, 1),
        CubeDim::new_2d(columns as u32, lanes as u32),
        vector,
        view(input, [outer * rows * inner], [1]).into_buffer_arg(),
        out.clone().into_buffer_arg(),
        rows as u32,
        width as u32,
        columns as u32,
        lanes as u32,
    );
    out
}

/// Sum `[count, length]`, which has no holes, to `[count]`, with `lanes` units for each line.
pub(super) fn launch_lines(
    input: &CubeTensor,
    (count, length): (usize, usize),
    lanes: usize,
) -> CubeTensor {
    let vector = vector(length);
    let lines = (UNITS / lanes).max(1);
    let out = empty(input, [count]);
    sum_lines::launch(
        &input.client,
        CubeCount::Static(count.div_ceil(lines) as u32, 1, 1),
        CubeDim::new_2d(lanes as u32, lines as u32),
        vector,
        view(input, [count * length], [1]).into_buffer_arg(),
        out.clone().into_buffer_arg(),
        count as u32,
        (length / vector) as u32,
        lines as u32,
        lanes as u32,
    );
    out
}

/// Burn's shape of the result: that of the input, with the summed axes of one element.
fn kept(out: CubeTensor, shape: &Shape, axes: &Axes) -> CubeTensor {
    let mut sizes = shape.to_vec();
    sizes[axes.clone()].fill(1);
    shaped(out, sizes)
}

/// The sum along `axes`, which are kept with one element.
pub(super) fn sum_dims(input: CubeTensor, axes: Axes) -> CubeTensor {
    static TUNER: LocalTuner<KernelKey, CubeTuneId> = local_tuner!();
    type Inputs = (CubeTensor, Axes);

    let client = input.client.clone();
    let id = CubeTuneId::new(&client, &input.device);
    let by_lines = |(input, axes): Inputs, lanes: usize| {
        let (outer, rows, inner) = folded(&input, &axes);
        match inner {
            1 => {
                let shape = input.meta.shape().clone();
                Ok(kept(
                    launch_lines(&input, (outer, rows), lanes),
                    &shape,
                    &axes,
                ))
            }
            _ => declined("not the last axis"),
        }
    };
    let by_columns = |(input, axes): Inputs, columns: usize| {
        let folded = folded(&input, &axes);
        if folded.2 == 1 {
            return declined("the last axis");
        }
        match columns > 1 && folded.2 / vector(folded.2) < columns / 2 {
            true => declined("fewer columns than a cube has"),
            false => {
                let shape = input.meta.shape().clone();
                Ok(kept(launch(&input, folded, columns), &shape, &axes))
            }
        }
    };
    let candidates = TUNER.init(&id, move || {
        let key = |(input, axes): &Inputs| {
            let (outer, rows, inner) = folded(input, axes);
            KernelKey::new("sum", [outer, rows, inner, axes.len()], &[])
        };
        TunableSet::<KernelKey, Inputs, CubeTensor>::new_cloning_inputs(key)
            .with_eviction(Arc::new(|_: &KernelKey, (input, _): &Inputs| {
                occupy(&input.client, &input.device)
            }))
            .with(Tunable::new("burn", |(input, axes): Inputs| {
                let axes: Vec<usize> = axes.collect();
                Ok::<_, String>(match axes.as_slice() {
                    [axis] => CubeBackend::float_sum_dim(input, *axis),
                    axes => CubeBackend::float_sum_dims(input, axes),
                })
            }))
            .with(Tunable::new("sum_lines_8", move |inputs| {
                by_lines(inputs, 8)
            }))
            .with(Tunable::new("sum_lines_32", move |inputs| {
                by_lines(inputs, 32)
            }))
            .with(Tunable::new("sum_lines_128", move |inputs| {
                by_lines(inputs, 128)
            }))
            .with(Tunable::new("sum_rows_1", move |inputs| {
                by_columns(inputs, 1)
            }))
            .with(Tunable::new("sum_rows_2", move |inputs| {
                by_columns(inputs, 2)
            }))
            .with(Tunable::new("sum_rows_8", move |inputs| {
                by_columns(inputs, 8)
            }))
            .with(Tunable::new("sum_rows_32", move |inputs| {
                by_columns(inputs, 32)
            }))
    });
    TUNER.execute(&id, &client, candidates, (input, axes))
}
