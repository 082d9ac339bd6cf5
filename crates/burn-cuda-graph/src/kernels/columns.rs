//! An image as the matrix that a convolution multiplies (im2col).

// The macro's expansion names its arguments without need. Conditions of the compilation stand apart from those of a unit.
#![allow(clippy::too_many_arguments, clippy::collapsible_if, missing_docs)]

use super::{empty, view};
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;

/// How a position of a grid and a tap of the window find their place in an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Window {
    /// Height and width of the image.
    pub image: (usize, usize),
    /// Height and width of the grid of positions.
    pub grid: (usize, usize),
    /// Height and width of the window.
    pub taps: (usize, usize),
    pub stride: (usize, usize),
    /// At the top and at the left.
    pub padding: (usize, usize),
    pub dilation: (usize, usize),
    /// `false`: the convolution's own way, from positions of its result to places of its image. `true`: the way back.
    pub back: bool,
}

/// Write `[pieces, channels * taps, length]` from images `[n, channels, height, width]` with any strides. The positions of all
/// images are numbered in order, and a piece has `length` of them.
#[cube(launch)]
fn write_columns<N: Size>(
    images: &Tensor<f32>,
    out: &mut [Vector<f32, N>],
    length: u32,
    rows: u32,
    total: u32,
    #[comptime] window: Window,
) {
    let position = u32::cast_from(ABSOLUTE_POS);
    if position < total {
        let width = N::value();
        let vector = comptime!(width as u32);
        let vectors = length / vector;
        let within = (position % vectors) * vector;
        let line = position / vectors;
        let row = line % rows;
        let first = (line / rows) * length + within;

        let taps_x = comptime!(window.taps.1 as u32);
        let taps = comptime!((window.taps.0 * window.taps.1) as u32);
        let channel = row / taps;
        let tap = row % taps;
        let tap_y = i32::cast_from(tap / taps_x) * comptime!(window.dilation.0 as i32);
        let tap_x = i32::cast_from(tap % taps_x) * comptime!(window.dilation.1 as i32);

        let grid_x = comptime!(window.grid.1 as u32);
        let grid = comptime!((window.grid.0 * window.grid.1) as u32);
        let start = usize::cast_from(channel) * images.stride(1);
        let mut values = Vector::<f32, N>::empty();
        if comptime!(window.grid.1.is_multiple_of(width)) {
            // All of a vector is in one line of the grid.
            let rest = first % grid;
            let y = i32::cast_from(rest / grid_x);
            let from_x = i32::cast_from(rest % grid_x);
            let (y, y_fits) = place(y, tap_y, comptime!(axis_of(window, 0)));
            let start = start
                + usize::cast_from(first / grid) * images.stride(0)
                + usize::cast_from(y) * images.stride(2);
            #[unroll]
            for lane in 0..width {
                let x = from_x + comptime!(lane as i32);
                let (x, x_fits) = place(x, tap_x, comptime!(axis_of(window, 1)));
                let mut value = 0.0f32;
                if y_fits && x_fits {
                    value = images[start + usize::cast_from(x) * images.stride(3)];
                }
                values.insert(lane, value);
            }
        } else {
            #[unroll]
            for lane in 0..width {
                let at = first + comptime!(lane as u32);
                let rest = at % grid;
                let y = i32::cast_from(rest / grid_x);
                let x = i32::cast_from(rest % grid_x);
                let (y, y_fits) = place(y, tap_y, comptime!(axis_of(window, 0)));
                let (x, x_fits) = place(x, tap_x, comptime!(axis_of(window, 1)));
                let mut value = 0.0f32;
                if y_fits && x_fits {
                    let index = start
                        + usize::cast_from(at / grid) * images.stride(0)
                        + usize::cast_from(y) * images.stride(2)
                        + usize::cast_from(x) * images.stride(3);
                    value = images[index];
                }
                values.insert(lane, value);
            }
        }
        out[usize::cast_from(position)] = values;
    }
}

/// One axis of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Axis {
    image: i32,
    stride: i32,
    padding: i32,
    back: bool,
}

fn axis_of(window: Window, axis: usize) -> Axis {
    let of = |pair: (usize, usize)| if axis == 0 { pair.0 } else { pair.1 } as i32;
    Axis {
        image: of(window.image),
        stride: of(window.stride),
        padding: of(window.padding),
        back: window.back,
    }
}

/// The place in the image, and whether there is one.
#[cube]
fn place(position: i32, tap: i32, #[comptime] axis: Axis) -> (i32, bool) {
    let image = comptime!(axis.image);
    let stride = comptime!(axis.stride);
    let padding = comptime!(axis.padding);
    if comptime!(axis.back) {
        let ahead = position + padding - tap;
        let place = ahead / stride;
        let fits = ahead >= 0 && place * stride == ahead && place < image;
        (place, fits)
    } else {
        let place = position * stride + tap - padding;
        (place, place >= 0 && place < image)
    }
}

impl Window {
    /// Whether each position sees its own place alone.
    fn is_one(&self) -> bool {
        self.taps == (1, 1)
            && self.stride == (1, 1)
            && self.padding == (0, 0)
            && self.image == self.grid
    }
}

/// The columns of `images`, `[n, channels, height, width]`: `[pieces, channels * taps, n * positions / pieces]`. Where they
/// lie so already, nothing is written.
pub(super) fn columns(images: &CubeTensor, window: Window, pieces: usize) -> CubeTensor {
    let (shape, strides) = (images.meta.shape(), images.meta.strides());
    let (count, channels) = (shape[0], shape[1]);
    let positions = shape[2] * shape[3];
    let lies = [positions, count * positions, shape[3], 1];
    if window.is_one() && pieces == 1 && (0..4).all(|axis| strides[axis] == lies[axis]) {
        let all = count * positions;
        return view(images, [1, channels, all], [channels * all, all, 1]);
    }
    let rows = channels * window.taps.0 * window.taps.1;
    let length = count * window.grid.0 * window.grid.1 / pieces;
    let vector = if length.is_multiple_of(4) { 4 } else { 1 };
    let out = empty(images, [pieces, rows, length]);
    let total = pieces * rows * (length / vector);
    let client = &images.client;
    let dim = CubeDim::new(client, total);
    let cubes = calculate_cube_count_elemwise(client, total, dim);
    write_columns::launch(
        client,
        cubes,
        dim,
        vector,
        images.clone().into_tensor_arg(),
        out.clone().into_buffer_arg(),
        length as u32,
        rows as u32,
        total as u32,
        window,
    );
    out
}
