//! Softmax along the last axis: attention's scores, a classifier's outputs.
//!
//! Burn computes it as five operations, which its fusion runs as three kernels that each read the scores from memory: the
//! largest of a line, the exponents and their sum, the quotients. Here a few units hold a line, and one kernel does all.

// The macro's expansion names its arguments without need. Conditions within a unit stand apart.
#![allow(clippy::too_many_arguments, clippy::collapsible_if, missing_docs)]

use super::fusion::Tensors;
use super::{empty, plain, shaped, view};
use burn::tensor::DType;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_ir::{FloatOperationIr, NumericOperationIr, OperationIr, TensorIr, TensorStatus};
use cubecl::prelude::*;
use serde::{Deserialize, Serialize};

/// Units of a cube.
const UNITS: usize = 256;
/// Longest line that one cube goes through in about the time of several kernels.
const LONGEST: usize = 1 << 16;
/// Most cubes of a grid.
const MOST_CUBES: usize = 1 << 16;

/// Each of `count` lines of `width` vectors: `x - max(x)`, its exponent, the sum of those, and the quotient of both. A cube has
/// `lines` of them, and `lanes` units for each. The quotients are written, and of the others what is to be kept.
#[cube(launch)]
fn softmax_lines<N: Size>(
    input: &[Vector<f32, N>],
    distances: &mut [Vector<f32, N>],
    exponents: &mut [Vector<f32, N>],
    sums: &mut [f32],
    out: &mut [Vector<f32, N>],
    count: u32,
    width: u32,
    #[comptime] lines: u32,
    #[comptime] lanes: u32,
    #[comptime] keep_distances: bool,
    #[comptime] keep_exponents: bool,
    #[comptime] keep_sums: bool,
) {
    let line = CUBE_POS_X * lines + UNIT_POS_Y;
    let lane = UNIT_POS_X;
    let mut shared = Shared::<[f32]>::new_slice(comptime!((lines * lanes) as usize));
    let first = UNIT_POS_Y * lanes;
    let own = usize::cast_from(first + lane);

    // A lane that has no element of the line takes the line's first.
    let mut most = 0.0f32;
    if line < count {
        most = input[usize::cast_from(line * width)].extract(0usize);
        let mut at = lane;
        while at < width {
            let values = input[usize::cast_from(line * width + at)];
            #[unroll]
            for element in 0..N::value() {
                most = max(most, values.extract(element));
            }
            at += lanes;
        }
    }
    shared[own] = most;
    sync_cube();
    let mut half = comptime!(lanes / 2).runtime();
    while half > 0 {
        if lane < half {
            let other = usize::cast_from(first + lane + half);
            let larger = max(shared[own], shared[other]);
            shared[own] = larger;
        }
        half /= 2;
        sync_cube();
    }
    let most = Vector::<f32, N>::new(shared[usize::cast_from(first)]);
    sync_cube();

    let mut sum = Vector::<f32, N>::new(0.0f32);
    if line < count {
        let mut at = lane;
        while at < width {
            let place = usize::cast_from(line * width + at);
            let distance = input[place] - most;
            if comptime!(keep_distances) {
                distances[place] = distance;
            }
            let exponent = distance.exp();
            if comptime!(keep_exponents) {
                exponents[place] = exponent;
            }
            sum += exponent;
            at += lanes;
        }
    }
    let mut total = sum.extract(0usize);
    #[unroll]
    for element in 1..N::value() {
        total += sum.extract(element);
    }
    shared[own] = total;
    sync_cube();
    let mut half = comptime!(lanes / 2).runtime();
    while half > 0 {
        if lane < half {
            let other = usize::cast_from(first + lane + half);
            let both = shared[own] + shared[other];
            shared[own] = both;
        }
        half /= 2;
        sync_cube();
    }
    let sum = shared[usize::cast_from(first)];

    if line < count {
        if comptime!(keep_sums) {
            if lane == 0 {
                sums[usize::cast_from(line)] = sum;
            }
        }
        let total = Vector::<f32, N>::new(sum);
        let mut at = lane;
        while at < width {
            let place = usize::cast_from(line * width + at);
            out[place] = (input[place] - most).exp() / total;
            at += lanes;
        }
    }
}

/// Lines of a tensor, and their length.
fn lines(input: &CubeTensor) -> (usize, usize) {
    let shape = input.meta.shape();
    let length = shape[shape.num_dims() - 1];
    (shape.num_elements() / length.max(1), length)
}

/// Elements that a unit takes at once, units of a line, and lines of a cube.
fn dealt(length: usize) -> (usize, usize, usize) {
    let vector = if length.is_multiple_of(4) { 4 } else { 1 };
    let lanes = (length / vector).next_power_of_two().clamp(8, UNITS);
    (vector, lanes, UNITS / lanes)
}

/// Whether the kernel is made for such lines.
pub(super) fn takes(input: &CubeTensor) -> bool {
    let (count, length) = lines(input);
    let (_, _, of_cube) = dealt(length);
    (1..=LONGEST).contains(&length)
        && (1..MOST_CUBES).contains(&count.div_ceil(of_cube))
        && input.meta.num_elements() < 1 << 32
}

/// What is kept beside the result: each line's distances from its largest element, their exponents, the sum of those.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Keep {
    pub distances: bool,
    pub exponents: bool,
    pub sums: bool,
}

/// What it leaves: the sums with one element on the last axis, all else of the input's shape.
pub(super) struct Softmax {
    pub distances: Option<CubeTensor>,
    pub exponents: Option<CubeTensor>,
    pub sums: Option<CubeTensor>,
    pub out: CubeTensor,
}

/// The softmax of lines without holes.
pub(super) fn launch(input: &CubeTensor, keep: Keep) -> Softmax {
    let (count, length) = lines(input);
    let (vector, lanes, of_cube) = dealt(length);
    let width = length / vector;
    let space = |kept: bool, elements: usize| empty(input, [if kept { elements } else { vector }]);
    let out = empty(input, [count * length]);
    let distances = space(keep.distances, count * length);
    let exponents = space(keep.exponents, count * length);
    let sums = space(keep.sums, count);
    softmax_lines::launch(
        &input.client,
        CubeCount::Static(count.div_ceil(of_cube) as u32, 1, 1),
        CubeDim::new_2d(lanes as u32, of_cube as u32),
        vector,
        view(input, [count * length], [1]).into_buffer_arg(),
        distances.clone().into_buffer_arg(),
        exponents.clone().into_buffer_arg(),
        sums.clone().into_buffer_arg(),
        out.clone().into_buffer_arg(),
        count as u32,
        width as u32,
        of_cube as u32,
        lanes as u32,
        keep.distances,
        keep.exponents,
        keep.sums,
    );
    let sizes = input.meta.shape().to_vec();
    let mut single = sizes.clone();
    if let Some(last) = single.last_mut() {
        *last = 1;
    }
    Softmax {
        distances: (keep.distances).then(|| shaped(distances, sizes.clone())),
        exponents: (keep.exponents).then(|| shaped(exponents, sizes.clone())),
        sums: keep.sums.then(|| shaped(sums, single)),
        out: shaped(out, sizes),
    }
}

/// Softmax as Burn's operations: the largest, the distance from it, its exponent, their sum, the quotient.
///
/// By the plan's own numbering, as far as it is there.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Pattern {
    input: TensorIr,
    axis: usize,
    largest: TensorIr,
    distance: Option<TensorIr>,
    exponent: Option<TensorIr>,
    sum: Option<TensorIr>,
    out: Option<TensorIr>,
    /// What is read after its part in the softmax: a gradient reads all of it.
    keep: Keep,
}

/// Operations of a softmax.
pub(super) const OPERATIONS: usize = 5;

fn is<'a>(tensor: &TensorIr, known: impl Into<Option<&'a TensorIr>>) -> bool {
    known.into().is_some_and(|known| known.id == tensor.id)
}

fn is_last(tensor: &TensorIr) -> bool {
    tensor.status == TensorStatus::ReadWrite
}

impl Pattern {
    /// The first operation, if it may begin a softmax.
    pub(super) fn begin(operation: &OperationIr) -> Option<Self> {
        let OperationIr::NumericFloat(_, NumericOperationIr::MaxDim(op)) = operation else {
            return None;
        };
        let last = op.axis + 1 == op.input.shape.num_dims();
        (last && op.input.dtype == DType::F32).then(|| Self {
            input: op.input.clone(),
            axis: op.axis,
            largest: op.out.clone(),
            distance: None,
            exponent: None,
            sum: None,
            out: None,
            keep: Keep::default(),
        })
    }

    /// Whether all operations are there.
    pub(super) fn is_whole(&self) -> bool {
        self.out.is_some()
    }

    /// The next operation, if it is the one that softmax goes on with. Only the subtraction reads the largest.
    pub(super) fn follow(&mut self, operation: &OperationIr) -> bool {
        match operation {
            OperationIr::NumericFloat(_, NumericOperationIr::Sub(op))
                if self.distance.is_none()
                    && is(&op.lhs, &self.input)
                    && is(&op.rhs, &self.largest)
                    && is_last(&op.rhs) =>
            {
                // The last reader of the input takes it.
                self.input = op.lhs.clone();
                self.distance = Some(op.out.clone());
            }
            OperationIr::Float(_, FloatOperationIr::Exp(op))
                if self.exponent.is_none() && is(&op.input, self.distance.as_ref()) =>
            {
                self.keep.distances = !is_last(&op.input);
                self.exponent = Some(op.out.clone());
            }
            OperationIr::NumericFloat(_, NumericOperationIr::SumDim(op))
                if self.sum.is_none()
                    && is(&op.input, self.exponent.as_ref())
                    && !is_last(&op.input)
                    && op.axis == self.axis =>
            {
                self.sum = Some(op.out.clone());
            }
            OperationIr::NumericFloat(_, NumericOperationIr::Div(op))
                if self.out.is_none()
                    && is(&op.lhs, self.exponent.as_ref())
                    && is(&op.rhs, self.sum.as_ref()) =>
            {
                self.keep.exponents = !is_last(&op.lhs);
                self.keep.sums = !is_last(&op.rhs);
                self.out = Some(op.out.clone());
            }
            _ => return false,
        }
        true
    }

    /// Run it, if the kernel takes the tensor. Nothing was touched where the answer is `None`.
    pub(super) fn compute(&self, tensors: &mut Tensors<'_>) -> Option<()> {
        let (exponent, sum) = (self.exponent.as_ref()?, self.sum.as_ref()?);
        let (distance, out) = (self.distance.as_ref()?, self.out.as_ref()?);
        let input = &self.input;
        let tensor = tensors.peek(input)?;
        (plain(&tensor) && takes(&tensor)).then_some(())?;
        drop(tensor);
        let tensor = into_contiguous(tensors.take(input)?);
        let found = launch(&tensor, self.keep);
        let kept = [
            (distance, found.distances),
            (exponent, found.exponents),
            (sum, found.sums),
        ];
        for (place, tensor) in kept {
            if let Some(tensor) = tensor {
                tensors.give(place, tensor);
            }
        }
        tensors.give(out, found.out);
        Some(())
    }
}
