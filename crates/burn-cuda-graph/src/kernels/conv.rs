//! 2D convolutions as products of matrices, in the order that Burn's tensors have.
//!
//! Burn's kernels for convolutions want channels last, and its tensors have them second: so each operand is laid out anew, and
//! each result lies otherwise than the next operation reads it. With an image as columns `[channels * taps, n * positions]`
//!
//! - the result is `weight * columns`, the weight as it lies: `[c_out, n * positions]`;
//! - the gradient of the image is `weight' * columns` of the result's gradient, with the window the other way round;
//! - the gradient of the weight is `gradient * columns'`, a long contraction, so in pieces.
//!
//! Results lie in memory with the channels first, then the image's number, and are seen with the number first. What works on
//! elements does not mind; sums over a channel, as BatchNorm has, find its elements side by side.
//!
//! The columns are written to memory, taps times the image. Where that is too much, the operation is Burn's.

use super::columns::{Window, columns};
use super::{KernelKey, declined, matmul, occupy, processors, products, view};
use burn_backend::ops::{ConvOptions, ModuleOps};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeTuneId};
use cubecl::tune::{LocalTuner, Tunable, TunableSet, local_tuner};
use std::sync::Arc;

/// Most elements of the columns: 512 MiB.
const MOST_ELEMENTS: usize = 1 << 27;

/// The sizes of a convolution.
#[derive(Debug, Clone)]
pub(super) struct Problem {
    count: usize,
    channels_in: usize,
    channels_out: usize,
    image: (usize, usize),
    result: (usize, usize),
    taps: (usize, usize),
    options: ConvOptions<2>,
}

impl Problem {
    /// `None`: one for Burn.
    pub(super) fn new(
        x: &CubeTensor,
        weight: &CubeTensor,
        options: &ConvOptions<2>,
    ) -> Option<Self> {
        let (x, weight) = (x.meta.shape(), weight.meta.shape());
        if x.num_dims() != 4 || weight.num_dims() != 4 || options.groups != 1 {
            return None;
        }
        let taps = (weight[2], weight[3]);
        let size = |axis: usize, taps: usize| {
            let (before, behind) = options.padding[axis];
            let reach = options.dilation[axis] * (taps - 1) + 1;
            let free = (x[2 + axis] + before + behind).checked_sub(reach)?;
            Some(free / options.stride[axis] + 1)
        };
        if x.num_elements() == 0 || weight.num_elements() == 0 {
            return None;
        }
        let result = (size(0, taps.0)?, size(1, taps.1)?);
        let problem = Self {
            count: x[0],
            channels_in: x[1],
            channels_out: weight[0],
            image: (x[2], x[3]),
            result,
            taps,
            options: options.clone(),
        };
        let positions = problem
            .rows()
            .max(problem.image.0 * problem.image.1 * problem.count);
        let depth = problem.channels_in.max(problem.channels_out) * taps.0 * taps.1;
        (positions * depth <= MOST_ELEMENTS && weight[1] == x[1]).then_some(problem)
    }

    /// Positions of the result, in all images.
    fn rows(&self) -> usize {
        self.count * self.result.0 * self.result.1
    }

    fn taps(&self) -> usize {
        self.taps.0 * self.taps.1
    }

    fn window(&self, back: bool) -> Window {
        let pair = |values: [usize; 2]| (values[0], values[1]);
        let (image, grid) = match back {
            false => (self.image, self.result),
            true => (self.result, self.image),
        };
        Window {
            image,
            grid,
            taps: self.taps,
            stride: pair(self.options.stride),
            padding: (self.options.padding[0].0, self.options.padding[1].0),
            dilation: pair(self.options.dilation),
            back,
        }
    }

    fn key(&self, operation: &str, tensors: &[&CubeTensor]) -> KernelKey {
        let options = &self.options;
        let mut sizes = vec![
            self.count,
            self.channels_in,
            self.channels_out,
            self.image.0,
            self.image.1,
            self.taps.0,
            self.taps.1,
        ];
        sizes.extend(options.stride);
        sizes.extend(
            options
                .padding
                .iter()
                .flat_map(|(before, behind)| [*before, *behind]),
        );
        sizes.extend(options.dilation);
        KernelKey::new(operation, sizes, tensors)
    }
}

/// `[channels, n * positions]` as `[n, channels, height, width]`. On CUDA a product's rows may have holes between them.
fn seen(
    out: &CubeTensor,
    count: usize,
    channels: usize,
    (height, width): (usize, usize),
) -> CubeTensor {
    let (row, along) = (out.meta.strides()[0], out.meta.strides()[1]);
    view(
        out,
        [count, channels, height, width],
        [height * width * along, row, width * along, along],
    )
}

fn multiply(lhs: CubeTensor, rhs: CubeTensor) -> Result<CubeTensor, String> {
    if matmul::takes(&lhs, &rhs) {
        return Ok(matmul::product(lhs, rhs));
    }
    products::product(lhs, rhs)
}

/// A weight `[c_out, c_in, taps..]` as the matrix that it is.
fn matrix(weight: &CubeTensor, rows: usize, depth: usize) -> CubeTensor {
    let weight = burn_cubecl::kernel::into_contiguous(weight.clone());
    view(&weight, [rows, depth], [depth, 1])
}

pub(super) fn forward_by_columns(
    problem: &Problem,
    x: &CubeTensor,
    weight: &CubeTensor,
) -> Result<CubeTensor, String> {
    let (rows, depth) = (problem.rows(), problem.channels_in * problem.taps());
    let columns = columns(x, problem.window(false), 1);
    let columns = view(&columns, [depth, rows], [rows, 1]);
    let weight = matrix(weight, problem.channels_out, depth);
    let out = multiply(weight, columns)?;
    Ok(seen(
        &out,
        problem.count,
        problem.channels_out,
        problem.result,
    ))
}

/// The convolution of `x` by `weight`.
pub(super) fn forward(
    problem: Problem,
    x: CubeTensor,
    weight: CubeTensor,
    bias: Option<CubeTensor>,
) -> CubeTensor {
    static TUNER: LocalTuner<KernelKey, CubeTuneId> = local_tuner!("forward");
    type Inputs = (Problem, CubeTensor, CubeTensor, Option<CubeTensor>);

    let client = x.client.clone();
    let id = CubeTuneId::new(&client, &x.device);
    let candidates = TUNER.init(&id, || {
        let key = |(problem, x, weight, _): &Inputs| problem.key("conv2d", &[x, weight]);
        TunableSet::<KernelKey, Inputs, CubeTensor>::new_cloning_inputs(key)
            .with_eviction(Arc::new(|_: &KernelKey, inputs: &Inputs| {
                occupy(&inputs.1.client, &inputs.1.device)
            }))
            .with(Tunable::new(
                "burn",
                |(problem, x, weight, bias): Inputs| {
                    Ok::<_, String>(CubeBackend::conv2d(x, weight, bias, problem.options))
                },
            ))
            .with(Tunable::new(
                "columns",
                |(problem, x, weight, bias): Inputs| {
                    let out = forward_by_columns(&problem, &x, &weight)?;
                    Ok::<_, String>(match bias {
                        None => out,
                        Some(bias) => {
                            let stride = bias.meta.strides()[0];
                            let bias =
                                view(&bias, [1, problem.channels_out, 1, 1], [0, stride, 0, 0]);
                            burn_cubecl::ops::numeric::add(out, bias)
                        }
                    })
                },
            ))
    });
    TUNER.execute(&id, &client, candidates, (problem, x, weight, bias))
}

pub(super) fn data_by_columns(
    problem: &Problem,
    weight: &CubeTensor,
    grad: &CubeTensor,
) -> Result<CubeTensor, String> {
    let taps = problem.taps();
    let rows = problem.count * problem.image.0 * problem.image.1;
    let depth = problem.channels_out * taps;
    let columns = columns(grad, problem.window(true), 1);
    let columns = view(&columns, [depth, rows], [rows, 1]);
    // [c_out, c_in, taps] to [c_in, c_out, taps].
    let weight = matrix(weight, problem.channels_out, problem.channels_in * taps);
    let weight = view(
        &weight,
        [problem.channels_in, problem.channels_out, taps],
        [taps, problem.channels_in * taps, 1],
    );
    let weight = matrix(&weight, problem.channels_in, depth);
    let out = multiply(weight, columns)?;
    Ok(seen(
        &out,
        problem.count,
        problem.channels_in,
        problem.image,
    ))
}

/// The gradient of a convolution's image.
pub(super) fn data_gradient(
    problem: Problem,
    x: CubeTensor,
    weight: CubeTensor,
    grad: CubeTensor,
) -> CubeTensor {
    static TUNER: LocalTuner<KernelKey, CubeTuneId> = local_tuner!("data_gradient");
    type Inputs = (Problem, CubeTensor, CubeTensor, CubeTensor);

    let client = x.client.clone();
    let id = CubeTuneId::new(&client, &x.device);
    let candidates = TUNER.init(&id, || {
        let key =
            |(problem, _, weight, grad): &Inputs| problem.key("conv2d_x_backward", &[weight, grad]);
        TunableSet::<KernelKey, Inputs, CubeTensor>::new_cloning_inputs(key)
            .with_eviction(Arc::new(|_: &KernelKey, inputs: &Inputs| {
                occupy(&inputs.1.client, &inputs.1.device)
            }))
            .with(Tunable::new(
                "burn",
                |(problem, x, weight, grad): Inputs| {
                    let options = problem.options;
                    Ok::<_, String>(CubeBackend::conv2d_x_backward(x, weight, grad, options))
                },
            ))
            .with(Tunable::new(
                "columns",
                |(problem, _, weight, grad): Inputs| data_by_columns(&problem, &weight, &grad),
            ))
    });
    TUNER.execute(&id, &client, candidates, (problem, x, weight, grad))
}

/// The gradient of a weight, with the contraction in pieces.
pub(super) fn weight_by_columns(
    problem: &Problem,
    x: &CubeTensor,
    grad: &CubeTensor,
    pieces: usize,
) -> Result<CubeTensor, String> {
    let (rows, depth) = (problem.rows(), problem.channels_in * problem.taps());
    let length = rows / pieces;
    let columns = columns(x, problem.window(false), pieces);
    let transposed = view(
        &columns,
        [pieces, length, depth],
        [depth * length, 1, length],
    );
    let channels = problem.channels_out;
    let one = Window {
        image: problem.result,
        grid: problem.result,
        taps: (1, 1),
        stride: (1, 1),
        padding: (0, 0),
        dilation: (1, 1),
        back: false,
    };
    let grad = super::columns::columns(grad, one, pieces);
    let out = match pieces {
        1 => multiply(
            view(&grad, [channels, rows], [rows, 1]),
            view(&transposed, [rows, depth], [1, rows]),
        )?,
        _ => matmul::summed(grad, transposed, (pieces, channels, depth))?,
    };
    let (taps_y, taps_x) = problem.taps;
    let (row, along) = (out.meta.strides()[0], out.meta.strides()[1]);
    Ok(view(
        &out,
        [channels, problem.channels_in, taps_y, taps_x],
        [row, taps_y * taps_x * along, taps_x * along, along],
    ))
}

/// The gradient of a convolution's weight.
pub(super) fn weight_gradient(
    problem: Problem,
    x: CubeTensor,
    weight: CubeTensor,
    grad: CubeTensor,
) -> CubeTensor {
    static TUNER: LocalTuner<KernelKey, CubeTuneId> = local_tuner!("weight_gradient");
    type Inputs = (Problem, CubeTensor, CubeTensor, CubeTensor);

    let client = x.client.clone();
    let id = CubeTuneId::new(&client, &x.device);
    let cut = |(problem, x, _, grad): Inputs, halves: usize| {
        let depth = problem.channels_in * problem.taps();
        let tiles = matmul::tiles(problem.channels_out, depth);
        let processors = processors(&x);
        let count = |halves: usize| match halves {
            0 => 1,
            _ => matmul::pieces(problem.rows(), (halves * processors / 2).div_ceil(tiles)),
        };
        let own = count(halves);
        if halves > 0 && own == count(halves / 2) {
            return declined("no other number of pieces");
        }
        weight_by_columns(&problem, &x, &grad, own)
    };
    let candidates = TUNER.init(&id, move || {
        let key =
            |(problem, x, _, grad): &Inputs| problem.key("conv2d_weight_backward", &[x, grad]);
        TunableSet::<KernelKey, Inputs, CubeTensor>::new_cloning_inputs(key)
            .with_eviction(Arc::new(|_: &KernelKey, inputs: &Inputs| {
                occupy(&inputs.1.client, &inputs.1.device)
            }))
            .with(Tunable::new(
                "burn",
                |(problem, x, weight, grad): Inputs| {
                    let options = problem.options;
                    Ok::<_, String>(CubeBackend::conv2d_weight_backward(
                        x, weight, grad, options,
                    ))
                },
            ))
            .with(Tunable::new("columns", move |inputs| cut(inputs, 0)))
            .with(Tunable::new("columns_half", move |inputs| cut(inputs, 1)))
            .with(Tunable::new("columns_one", move |inputs| cut(inputs, 2)))
            .with(Tunable::new("columns_two", move |inputs| cut(inputs, 4)))
    });
    TUNER.execute(&id, &client, candidates, (problem, x, weight, grad))
}
