//! Adding rows at indices: the gradient of an embedding.
//!
//! Burn's kernel has one thread for each column, which walks through all rows in order. The order is what makes the result
//! the same each time, and it matters within an index only. So here a first kernel finds, for each row, the next one of its
//! index and whether there is an earlier one. In a second one, the first row of an index adds all of that index, from one to
//! the next. Each element is the sum of the same numbers in the same order as by Burn's kernel.

// The macro's expansion names its arguments without need. Conditions within a unit stand apart.
#![allow(clippy::too_many_arguments, clippy::collapsible_if, missing_docs)]

use super::{unshared, view};
use burn::tensor::{DType, Shape};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// Units of a cube that looks for the rows of an index: so many indices are looked at together.
const UNITS: usize = 64;
/// Most units of a cube that adds rows.
const MOST_UNITS: usize = 256;
/// Fewer rows are quickly walked through; more are, by a cube each, looked at too often.
const ROWS: core::ops::RangeInclusive<usize> = 64..=8192;

/// Write two numbers for each row: the next row of the same index, or `rows`, and 1 where no earlier row has it.
#[cube(launch)]
fn link_selected<I: Numeric>(
    indices: &[I],
    links: &mut [u32],
    rows: u32,
    #[comptime] units: u32,
    #[define(I)] _index: ElemType,
) {
    let own = CUBE_POS_X;
    let unit = UNIT_POS_X;
    let target = indices[usize::cast_from(own)];
    let mut earlier = Shared::<[u32]>::new_slice(comptime!(units as usize));
    let mut next = Shared::<[u32]>::new_slice(comptime!(units as usize));
    let mut found = 0u32;
    let mut row = unit;
    while row < own {
        if indices[usize::cast_from(row)] == target {
            found = 1u32;
        }
        row += units;
    }
    let mut nearest = rows;
    let mut row = own + 1 + unit;
    while row < rows {
        if indices[usize::cast_from(row)] == target {
            nearest = row;
            // Those behind are farther.
            row = rows;
        } else {
            row += units;
        }
    }
    earlier[usize::cast_from(unit)] = found;
    next[usize::cast_from(unit)] = nearest;
    sync_cube();
    if unit == 0 {
        let mut first = 1u32;
        let mut least = rows;
        for other in 0..units {
            if earlier[usize::cast_from(other)] == 1u32 {
                first = 0u32;
            }
            if next[usize::cast_from(other)] < least {
                least = next[usize::cast_from(other)];
            }
        }
        links[usize::cast_from(own * 2)] = least;
        links[usize::cast_from(own * 2 + 1)] = first;
    }
}

#[cube(launch)]
fn add_selected<I: Numeric>(
    tensor: &mut [f32],
    indices: &[I],
    value: &[f32],
    links: &[u32],
    rows: u32,
    width: u32,
    heights: u32,
    #[comptime] units: u32,
    #[define(I)] _index: ElemType,
) {
    let own = CUBE_POS_X;
    let target = indices[usize::cast_from(own)];
    if links[usize::cast_from(own * 2 + 1)] == 1u32 {
        // Where an index names no row, nothing is written.
        if target >= I::from_int(0) && target < I::cast_from(heights) {
            let mut column = UNIT_POS_X;
            while column < width {
                let place = usize::cast_from(u32::cast_from(target) * width + column);
                let mut sum = tensor[place];
                let mut row = own;
                while row < rows {
                    sum += value[usize::cast_from(row * width + column)];
                    row = links[usize::cast_from(row * 2)];
                }
                tensor[place] = sum;
                column += units;
            }
        }
    }
}

/// Whether `value`'s rows, at `indices` of the first axis of `tensor`, are for this kernel.
pub(super) fn takes(tensor: &CubeTensor, indices: &CubeTensor, value: &CubeTensor) -> bool {
    let width = |tensor: &CubeTensor| tensor.meta.shape()[1..].iter().product::<usize>();
    let fits = |tensor: &CubeTensor| {
        tensor.is_contiguous() && tensor.meta.num_dims() > 1 && tensor.meta.num_elements() < 1 << 32
    };
    let whole = matches!(indices.dtype, DType::I32 | DType::I64 | DType::U32);
    fits(tensor)
        && fits(value)
        && whole
        && indices.is_contiguous()
        && indices.meta.num_dims() == 1
        && value.meta.shape()[0] == indices.meta.shape()[0]
        && ROWS.contains(&indices.meta.shape()[0])
        && width(tensor) == width(value)
        && width(tensor) > 0
}

/// `tensor` with each row of `value` added to the row that its index names.
pub(super) fn add_rows(tensor: CubeTensor, indices: CubeTensor, value: CubeTensor) -> CubeTensor {
    let tensor = unshared(tensor);
    let (heights, rows) = (tensor.meta.shape()[0], indices.meta.shape()[0]);
    let width = value.meta.num_elements() / rows;
    let client = tensor.client.clone();
    let most = client.properties().hardware.max_units_per_cube as usize;
    let dtype = dtype_to_storage_type(indices.dtype);
    let links = burn_cubecl::ops::numeric::empty_device_contiguous_dtype(
        client.clone(),
        tensor.device.clone(),
        Shape::from([2 * rows]),
        DType::U32,
    );
    let units = UNITS.min(most);
    link_selected::launch(
        &client,
        CubeCount::Static(rows as u32, 1, 1),
        CubeDim::new_1d(units as u32),
        indices.clone().into_buffer_arg(),
        links.clone().into_buffer_arg(),
        rows as u32,
        units as u32,
        dtype,
    );
    let units = width.next_multiple_of(32).min(MOST_UNITS).min(most);
    add_selected::launch(
        &client,
        CubeCount::Static(rows as u32, 1, 1),
        CubeDim::new_1d(units as u32),
        view(&tensor, [heights * width], [1]).into_buffer_arg(),
        indices.into_buffer_arg(),
        view(&value, [rows * width], [1]).into_buffer_arg(),
        links.into_buffer_arg(),
        rows as u32,
        width as u32,
        heights as u32,
        units as u32,
        dtype,
    );
    tensor
}
