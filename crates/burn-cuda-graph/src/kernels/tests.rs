//! Each kernel against loops on the host. The values are small integers, so every order of additions has the same result
//! and every difference is an error.

use super::columns::{Window, columns};
use super::matmul::Way;
use super::{conv, matmul, products, select, softmax, sum, view};
use crate::pool::resolve;
use crate::tensor::AnyTensor;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_backend::ops::ConvOptions;
use burn_cubecl::tensor::CubeTensor;

/// Software Vulkan, or with `BURN_DEVICE=cuda` and the feature, the card.
fn device() -> Device {
    #[cfg(feature = "cuda")]
    if std::env::var("BURN_DEVICE").is_ok_and(|name| name == "cuda") {
        return Device::cuda(0);
    }
    Device::wgpu(Default::default())
}

/// Integers from -4 to 4.
fn values(length: usize, seed: u64) -> Vec<f32> {
    let mut state = seed * 2 + 1;
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) % 9
    };
    (0..length).map(|_| next() as f32 - 4.0).collect()
}

fn tensor(values: &[f32], shape: &[usize]) -> CubeTensor {
    let flat = Tensor::<1>::from_data(TensorData::new(values.to_vec(), [values.len()]), &device());
    let mut tensor = resolve(&AnyTensor::from_float(flat)).expect("is on the device");
    let mut strides = vec![1; shape.len()];
    for at in (0..shape.len() - 1).rev() {
        strides[at] = strides[at + 1] * shape[at + 1];
    }
    *tensor.meta = cubecl::zspace::metadata::Metadata::new(
        burn::tensor::Shape::from(shape.to_vec()),
        cubecl::zspace::Strides::new(&strides),
    );
    tensor
}

fn indices(values: &[i32]) -> CubeTensor {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    let tensor = Tensor::<1, Int>::from_data(data, &device());
    resolve(&AnyTensor::from_int(tensor)).expect("is on the device")
}

/// The elements in the order of the shape, whatever the strides.
fn read(tensor: &CubeTensor) -> Vec<f32> {
    let tensor = burn_cubecl::kernel::into_contiguous(tensor.clone());
    let bytes = tensor
        .client
        .read_one(tensor.handle.clone())
        .expect("can be read");
    let length = tensor.meta.num_elements();
    let words = bytes.chunks_exact(4).take(length);
    words
        .map(|word| f32::from_le_bytes(word.try_into().expect("four bytes")))
        .collect()
}

#[test]
fn rows_are_summed() {
    let shapes = [
        (1, 1000, 256),
        (3, 64, 10),
        (1, 33, 2),
        (2, 128, 5),
        (1, 8192, 7),
        (1, 8, 4096),
        (2, 2, 12),
    ];
    for (outer, rows, inner) in shapes {
        let given = values(outer * rows * inner, rows as u64);
        let mut expected = vec![0f32; outer * inner];
        for (place, value) in given.iter().enumerate() {
            expected[place / (rows * inner) * inner + place % inner] += value;
        }
        let input = tensor(&given, &[outer, rows, inner]);
        for columns in [1, 2, 8, 32] {
            let found = read(&sum::launch(&input, (outer, rows, inner), columns));
            assert_eq!(found, expected, "{outer} {rows} {inner}, {columns} columns");
        }
    }
}

#[test]
fn lines_are_summed() {
    for (count, length) in [(1, 32), (7, 33), (1000, 256), (3, 5000), (64, 130)] {
        let given = values(count * length, length as u64);
        let expected: Vec<f32> = given.chunks(length).map(|line| line.iter().sum()).collect();
        let input = tensor(&given, &[count, length]);
        for lanes in [8, 32, 128] {
            let found = read(&sum::launch_lines(&input, (count, length), lanes));
            assert_eq!(found, expected, "{count} {length}, {lanes} lanes");
        }
    }
}

/// The choice, whatever it is, with Burn's shape: of one axis, of two, of the last.
#[test]
fn sums_as_chosen() {
    let given = values(3 * 40 * 6 * 8, 2);
    let sum = |length: usize, inner: usize| {
        let mut sums = vec![0f32; given.len() / length];
        for (place, value) in given.iter().enumerate() {
            sums[place / (length * inner) * inner + place % inner] += value;
        }
        sums
    };
    let input = tensor(&given, &[3, 40, 6, 8]);
    let one = sum::sum_dims(input.clone(), 1..2);
    assert_eq!(one.meta.shape().to_vec(), [3, 1, 6, 8]);
    assert_eq!(read(&one), sum(40, 48));
    let two = sum::sum_dims(input, 1..3);
    assert_eq!(two.meta.shape().to_vec(), [3, 1, 1, 8]);
    assert_eq!(read(&two), sum(240, 8));
    let last = sum::sum_dims(tensor(&given, &[3, 40, 48]), 2..3);
    assert_eq!(last.meta.shape().to_vec(), [3, 40, 1]);
    assert_eq!(read(&last), sum(48, 1));
}

/// What is left to Burn: short lines, one row, many columns, strides.
#[test]
fn sums_that_are_not_taken() {
    let of = |shape: &[usize]| tensor(&values(shape.iter().product(), 1), shape);
    assert!(sum::takes(&of(&[64, 16]), &(0..1)));
    assert!(sum::takes(&of(&[2, 64, 16]), &(1..2)));
    assert!(sum::takes(&of(&[2, 64, 16]), &(0..2)));
    assert!(!sum::takes(&of(&[64, 16]), &(1..2)));
    assert!(sum::takes(&of(&[16, 64]), &(1..2)));
    assert!(!sum::takes(&of(&[1, 16]), &(0..1)));
    assert!(sum::is_same(&of(&[1, 16]), &(0..1)));
    assert!(!sum::is_same(&of(&[2, 16]), &(0..1)));
    assert!(!sum::takes(&of(&[2, 1 << 19]), &(0..1)));
    assert!(!sum::takes(
        &view(&of(&[64, 16]), [64, 16], [1, 64]),
        &(0..1)
    ));
    assert!(!sum::takes(&of(&[64, 16]), &(2..3)));
}

fn product(lhs: &[f32], rhs: &[f32], (m, k, n): (usize, usize, usize)) -> Vec<f32> {
    let mut out = vec![0f32; m * n];
    for row in 0..m {
        for at in 0..k {
            for column in 0..n {
                out[row * n + column] += lhs[row * k + at] * rhs[at * n + column];
            }
        }
    }
    out
}

/// Each layout of both operands, each number of pieces.
#[test]
fn products_in_pieces() {
    for (m, k, n) in [(8, 256, 10), (33, 128, 64), (64, 784, 16)] {
        let (lhs, rhs) = (values(m * k, 3), values(k * n, 4));
        let transposed = |values: &[f32], rows: usize, columns: usize| -> Vec<f32> {
            let place = |at: usize| values[at % rows * columns + at / rows];
            (0..values.len()).map(place).collect()
        };
        let expected = product(&lhs, &rhs, (m, k, n));
        let lefts = [
            tensor(&lhs, &[m, k]),
            view(&tensor(&transposed(&lhs, m, k), &[k, m]), [m, k], [1, m]),
        ];
        let rights = [
            tensor(&rhs, &[k, n]),
            view(&tensor(&transposed(&rhs, k, n), &[n, k]), [k, n], [1, k]),
        ];
        for (left, right) in lefts
            .iter()
            .flat_map(|left| rights.iter().map(move |right| (left, right)))
        {
            for wanted in [2, 4, 7] {
                let pieces = matmul::pieces(k, wanted);
                assert!(pieces > 1, "{k} {wanted}");
                let found =
                    matmul::cut_product(left, right, (m, k, n), pieces).expect("multiplies");
                assert_eq!(found.meta.shape().to_vec(), [m, n]);
                assert_eq!(read(&found), expected, "{m} {k} {n} in {pieces}");
            }
            assert!(matmul::takes(left, right));
        }
        let single = |tensor: &CubeTensor| {
            let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
            view(
                tensor,
                [1, 1, shape[0], shape[1]],
                [7, 7, strides[0], strides[1]],
            )
        };
        for (name, way) in Way::ALL {
            let Ok(found) = way.multiply(&single(&lefts[0]), &single(&rights[1])) else {
                continue;
            };
            assert_eq!(found.meta.shape().to_vec(), [1, 1, m, n]);
            assert_eq!(read(&found), expected, "{m} {k} {n} {name}");
        }
    }
    let (lhs, rhs) = (values(8 * 256, 3), values(256 * 10, 4));
    let found = matmul::product(tensor(&lhs, &[8, 256]), tensor(&rhs, &[256, 10]));
    assert_eq!(read(&found), product(&lhs, &rhs, (8, 256, 10)), "as chosen");
}

/// Batches that meet one matrix are rows of it, where they follow one another.
#[test]
fn batches_are_rows() {
    let (lhs, rhs) = (values(2 * 3 * 8 * 128, 5), values(128 * 24, 6));
    let expected = product(&lhs, &rhs, (48, 128, 24));
    let right = tensor(&rhs, &[1, 1, 128, 24]);
    let left = tensor(&lhs, &[2, 3, 8, 128]);
    assert!(matmul::takes(&left, &right));
    let mut ways = 0;
    for (name, way) in Way::ALL {
        if let Ok(found) = way.multiply(&left, &right) {
            ways += 1;
            assert_eq!(found.meta.shape().to_vec(), [2, 3, 8, 24]);
            assert_eq!(read(&found), expected, "{name}");
        }
    }
    assert!(ways > 1, "{ways}");
    let folded = |left: &CubeTensor, right: &CubeTensor| Way::Folded.multiply(left, right).is_ok();
    assert!(folded(&left, &right));
    let apart = view(&left, [2, 3, 4, 128], [3 * 8 * 128, 8 * 128, 128, 1]);
    assert!(!folded(&apart, &right));
    let many = tensor(&values(2 * 128 * 24, 7), &[2, 1, 128, 24]);
    assert!(!folded(&left, &many));
}

/// Pieces are equal, and no shorter than they may be.
#[test]
fn contractions_are_cut_evenly() {
    for k in (1..3000).chain([4096, 16_384, 65_536, 1_000_003]) {
        for wanted in [1, 2, 3, 8, 33, 1000] {
            let pieces = matmul::pieces(k, wanted);
            assert!(
                pieces >= 1 && pieces <= wanted && pieces <= 64,
                "{k} {wanted}: {pieces}"
            );
            assert!(
                pieces == 1 || k % (8 * pieces) == 0 && k / pieces >= 32,
                "{k} {wanted}: {pieces}"
            );
        }
    }
    assert_eq!(matmul::pieces(784, 8), 7);
    assert_eq!(matmul::pieces(1024, 8), 8);
}

/// Few of anything are a product of vectors, and what takes long is not decided by launches: both are Burn's, unless the
/// contraction can be cut.
#[test]
fn products_that_are_taken() {
    let of = |shape: &[usize]| tensor(&values(shape.iter().product(), 1), shape);
    assert!(matmul::takes(&of(&[8, 128]), &of(&[128, 8])));
    assert!(matmul::takes(&of(&[8, 64]), &of(&[64, 8])));
    assert!(matmul::takes(&of(&[2, 8, 128]), &of(&[2, 128, 8])));
    assert!(!matmul::takes(&of(&[1, 128]), &of(&[128, 8])));
    assert!(!matmul::takes(&of(&[7, 64]), &of(&[64, 8])));
    assert!(!matmul::takes(&of(&[8, 7]), &of(&[7, 8])));
    let long = |rows: usize| view(&of(&[64, 64]), [rows, 64], [0, 1]);
    assert!(matmul::takes(&long(1 << 20), &of(&[64, 64])));
    assert!(!matmul::takes(&long((1 << 20) + 1), &of(&[64, 64])));
}

/// The values, in the order of `shape`, in memory in the order of axes `order`, with `pad` elements behind each line.
fn laid(values: &[f32], shape: &[usize], order: &[usize], pad: usize) -> CubeTensor {
    let rank = shape.len();
    let mut strides = vec![1; rank];
    let mut length = shape[order[rank - 1]] + pad;
    for axis in order[..rank - 1].iter().rev() {
        strides[*axis] = length;
        length *= shape[*axis];
    }
    let mut memory = vec![f32::NAN; length];
    for (at, value) in values.iter().enumerate() {
        let (mut rest, mut place) = (at, 0);
        for axis in (0..rank).rev() {
            place += rest % shape[axis] * strides[axis];
            rest /= shape[axis];
        }
        memory[place] = *value;
    }
    let mut tensor = tensor(&memory, &[length]);
    *tensor.meta = cubecl::zspace::metadata::Metadata::new(
        burn::tensor::Shape::from(shape.to_vec()),
        cubecl::zspace::Strides::new(&strides),
    );
    tensor
}

/// Batches of products `[outer, inner, m, k]` and `[outer, inner, k, n]`, by loops. One batch meets all.
fn batched(lhs: &[f32], rhs: &[f32], batches: usize, (m, k, n): (usize, usize, usize)) -> Vec<f32> {
    let of = |values: &[f32], batch: usize, size: usize| {
        let at = batch * size % values.len();
        values[at..at + size].to_vec()
    };
    let out = (0..batches)
        .flat_map(|batch| product(&of(lhs, batch, m * k), &of(rhs, batch, k * n), (m, k, n)));
    out.collect()
}

/// Every candidate, exactly: with integers the rounding of tensor cores' operands changes nothing, so each difference is an
/// element read or written in the wrong place.
#[test]
fn candidates_multiply() {
    let (whole, heads, across) = ([0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 3, 2]);
    let keys = [0, 3, 1, 2];
    let mut problems = vec![
        ((2, 3), (40, 24, 32), whole, whole, 0),
        ((2, 3), (40, 24, 32), heads, keys, 0),
        ((2, 3), (33, 20, 9), heads, heads, 0),
        ((2, 2), (64, 64, 40), whole, heads, 3),
        ((2, 2), (16, 100, 30), across, keys, 2),
        ((1, 1), (130, 70, 50), across, whole, 0),
        ((1, 1), (65, 129, 131), whole, across, 1),
    ];
    #[cfg(feature = "cuda")]
    if std::env::var("BURN_DEVICE").is_ok_and(|name| name == "cuda") {
        for (lhs, rhs) in [(whole, whole), (whole, across), (across, whole)] {
            for sizes in [(1024, 256, 768), (256, 1024, 1024), (1024, 256, 96)] {
                problems.push(((1, 1), sizes, lhs, rhs, 0));
            }
        }
        for (sizes, lhs, rhs) in [
            ((128, 32, 128), heads, keys),
            ((128, 128, 32), whole, heads),
            ((128, 32, 128), heads, across),
            ((128, 128, 32), across, heads),
        ] {
            problems.push(((8, 8), sizes, lhs, rhs, 0));
        }
    }
    for ((outer, inner), (m, k, n), left, right, pad) in problems {
        let batches = outer * inner;
        let (lhs, rhs) = (values(batches * m * k, 11), values(batches * k * n, 12));
        let expected = batched(&lhs, &rhs, batches, (m, k, n));
        let lhs = laid(&lhs, &[outer, inner, m, k], &left, pad);
        let rhs = laid(&rhs, &[outer, inner, k, n], &right, pad);
        let what = format!("{outer} x {inner} of {m} x {k} x {n}, {left:?} {right:?} {pad}");
        let mut multiplied = 0;
        for candidate in products::candidates() {
            for order in [whole, heads] {
                let nothing = vec![f32::NAN; expected.len()];
                let out = laid(&nothing, &[outer, inner, m, n], &order, 0);
                let inputs = (lhs.clone(), rhs.clone(), out.clone());
                match candidate.multiply(inputs) {
                    Ok(()) => multiplied += 1,
                    Err(_) => continue,
                }
                let found = read(&out);
                let wrong = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
                assert_eq!(wrong, 0, "{}: {what}, {order:?}", candidate.name);
            }
        }
        assert!(multiplied >= 8, "{what}: {multiplied}");
        let found = products::product(lhs, rhs).expect("multiplies");
        assert_eq!(found.meta.shape().to_vec(), [outer, inner, m, n]);
        assert_eq!(read(&found), expected, "as chosen: {what}");
    }
}

/// A result lies as the operand that has its columns; one batch for all, or columns apart, say nothing.
#[test]
fn heads_leave_as_they_came() {
    let of = |shape: &[usize]| values(shape.iter().product(), 13);
    let strides = |lhs: CubeTensor, rhs: CubeTensor| {
        let found = products::product(lhs, rhs).expect("multiplies");
        found.meta.strides().to_vec()
    };
    let scores = || tensor(&of(&[2, 4, 16, 16]), &[2, 4, 16, 16]);
    let heads = laid(&of(&[2, 4, 16, 8]), &[2, 4, 16, 8], &[0, 2, 1, 3], 0);
    assert_eq!(strides(scores(), heads.clone()), [512, 8, 32, 1]);
    let keys = laid(&of(&[2, 4, 8, 16]), &[2, 4, 8, 16], &[0, 3, 1, 2], 0);
    assert_eq!(strides(heads.clone(), keys), [1024, 256, 16, 1]);
    let whole = tensor(&of(&[2, 4, 8, 16]), &[2, 4, 8, 16]);
    assert_eq!(strides(heads.clone(), whole), [1024, 256, 16, 1]);
    let single = view(&heads, [1, 4, 16, 8], [512, 8, 32, 1]);
    assert_eq!(strides(scores(), single), [512, 128, 8, 1]);
}

/// Bit by bit, with values that round: the order is that of the indices. Indices out of bounds write nothing.
#[test]
fn rows_are_added_in_order() {
    for (heights, width, rows) in [(10, 96, 64), (300, 5, 1000)] {
        let fractions = |length, seed| -> Vec<f32> {
            values(length, seed)
                .iter()
                .map(|value| value * 0.1 + 0.037)
                .collect()
        };
        let (base, value) = (fractions(heights * width, 5), fractions(rows * width, 6));
        let mut at: Vec<i32> = values(rows, 7)
            .iter()
            .enumerate()
            .map(|(row, value)| (row as i32 * 13 + *value as i32).rem_euclid(heights as i32))
            .collect();
        at[3] = heights as i32;
        at[4] = -1;
        at[rows - 1] = at[0];
        let mut expected = base.clone();
        for (row, target) in at.iter().enumerate() {
            if let Some(target) = usize::try_from(*target)
                .ok()
                .filter(|target| *target < heights)
            {
                for column in 0..width {
                    expected[target * width + column] += value[row * width + column];
                }
            }
        }
        let base = tensor(&base, &[heights, width]);
        let value = tensor(&value, &[rows, width]);
        let at = indices(&at);
        assert!(select::takes(&base, &at, &value));
        let kept = base.clone();
        let before = read(&kept);
        let found = read(&select::add_rows(base, at, value));
        let same = found
            .iter()
            .zip(&expected)
            .all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{heights} {width} {rows}");
        assert_eq!(read(&kept), before, "what others hold is left as it was");
    }
}

/// As it is defined, in `f64`: short lines and long ones, of vectors and not, fewer lines than a cube has and more.
#[test]
fn softmax_of_lines() {
    for (count, length) in [
        (1, 1),
        (3, 7),
        (70, 8),
        (64, 128),
        (5, 1000),
        (2, 5000),
        (9, 129),
    ] {
        let given = values(count * length, length as u64);
        let input = tensor(&given, &[1, count, length]);
        assert!(softmax::takes(&input));
        let all = softmax::Keep {
            distances: true,
            exponents: true,
            sums: true,
        };
        let kept = softmax::launch(&input, all);
        let bare = softmax::launch(&input, softmax::Keep::default());
        assert!(bare.distances.is_none() && bare.exponents.is_none() && bare.sums.is_none());
        let distances = read(&kept.distances.expect("was asked for"));
        let exponents = kept.exponents.expect("was asked for");
        let sums = kept.sums.expect("was asked for");
        assert_eq!(exponents.meta.shape().to_vec(), [1, count, length]);
        assert_eq!(sums.meta.shape().to_vec(), [1, count, 1]);
        let out = read(&kept.out);
        assert_eq!(out, read(&bare.out), "{count} {length}");
        let (exponents, sums) = (read(&exponents), read(&sums));
        for (line, given) in given.chunks(length).enumerate() {
            let most = given.iter().fold(f32::MIN, |a, b| a.max(*b));
            let expected: Vec<f64> = given.iter().map(|x| ((x - most) as f64).exp()).collect();
            let sum: f64 = expected.iter().sum();
            let near =
                |found: f32, expected: f64| (found as f64 - expected).abs() <= 2e-6 * expected;
            assert!(
                near(sums[line], sum),
                "{count} {length}: {} {sum}",
                sums[line]
            );
            for (at, expected) in expected.iter().enumerate() {
                let place = line * length + at;
                assert_eq!(distances[place], given[at] - most, "{place}");
                assert!(
                    near(exponents[place], *expected),
                    "{count} {length} {place}"
                );
                assert!(near(out[place], expected / sum), "{count} {length} {place}");
            }
        }
    }
    let infinite = f32::NEG_INFINITY;
    let masked = [infinite, 1.0, infinite, 1.0, f32::NAN, 0.0, 0.0, 0.0];
    let found = read(&softmax::launch(&tensor(&masked, &[2, 4]), Default::default()).out);
    assert_eq!(found[..4], [0.0, 0.5, 0.0, 0.5]);
    assert!(found[4..].iter().all(|value| value.is_nan()), "{found:?}");
    let long = view(&tensor(&[1.0], &[1]), [1, 1 << 17], [0, 0]);
    assert!(!softmax::takes(&long));
}

struct Sizes {
    n: usize,
    channels_in: usize,
    channels_out: usize,
    image: (usize, usize),
    taps: (usize, usize),
    options: ConvOptions<2>,
}

impl Sizes {
    fn result(&self) -> (usize, usize) {
        let size = |axis: usize, image: usize, taps: usize| {
            let (before, behind) = self.options.padding[axis];
            let reach = self.options.dilation[axis] * (taps - 1) + 1;
            (image + before + behind - reach) / self.options.stride[axis] + 1
        };
        (
            size(0, self.image.0, self.taps.0),
            size(1, self.image.1, self.taps.1),
        )
    }

    /// Every product that a convolution adds: indices of the result, the image and the weight.
    fn each(&self, mut visit: impl FnMut(usize, usize, usize)) {
        let (height, width) = self.result();
        let options = &self.options;
        let place = |axis: usize, position: usize, tap: usize, size: usize| {
            (position * options.stride[axis] + tap * options.dilation[axis])
                .checked_sub(options.padding[axis].0)
                .filter(|place| *place < size)
        };
        for image in 0..self.n {
            for out in 0..self.channels_out {
                for input in 0..self.channels_in {
                    for at in 0..height * width * self.taps.0 * self.taps.1 {
                        let (tap_x, at) = (at % self.taps.1, at / self.taps.1);
                        let (tap_y, at) = (at % self.taps.0, at / self.taps.0);
                        let (x, y) = (at % width, at / width);
                        let places = (
                            place(0, y, tap_y, self.image.0),
                            place(1, x, tap_x, self.image.1),
                        );
                        let (Some(from_y), Some(from_x)) = places else {
                            continue;
                        };
                        let result = ((image * self.channels_out + out) * height + y) * width + x;
                        let of_image = image * self.channels_in + input;
                        let pixel = (of_image * self.image.0 + from_y) * self.image.1 + from_x;
                        let of_weight = out * self.channels_in + input;
                        let tap = (of_weight * self.taps.0 + tap_y) * self.taps.1 + tap_x;
                        visit(result, pixel, tap);
                    }
                }
            }
        }
    }
}

/// The convolution and both gradients, forced and for one case as chosen: strides, dilation, padding that differs at both
/// ends, sizes that no vector divides.
#[test]
fn convolutions_by_columns() {
    let cases = [
        (
            (2, 3, 5),
            (8, 8),
            (3, 3),
            ConvOptions::new([1, 1], [1, 1], [1, 1], 1),
        ),
        (
            (2, 4, 8),
            (8, 8),
            (3, 3),
            ConvOptions::new([2, 2], [1, 1], [1, 1], 1),
        ),
        (
            (3, 2, 4),
            (7, 5),
            (3, 2),
            ConvOptions::new([2, 1], [1, 0], [1, 2], 1),
        ),
        (
            (4, 8, 4),
            (4, 4),
            (1, 1),
            ConvOptions::new([2, 2], [0, 0], [1, 1], 1),
        ),
        ((1, 2, 3), (6, 9), (2, 3), {
            let mut options = ConvOptions::new([1, 2], [0, 0], [1, 1], 1);
            options.padding = [(0, 1), (2, 0)];
            options
        }),
    ];
    for (case, ((n, channels_in, channels_out), image, taps, options)) in
        cases.into_iter().enumerate()
    {
        let sizes = Sizes {
            n,
            channels_in,
            channels_out,
            image,
            taps,
            options: options.clone(),
        };
        let (height, width) = sizes.result();
        let shapes = (
            [n, channels_in, image.0, image.1],
            [channels_out, channels_in, taps.0, taps.1],
            [n, channels_out, height, width],
        );
        let (xs, ws, gs) = (
            values(shapes.0.iter().product(), 8),
            values(shapes.1.iter().product(), 9),
            values(shapes.2.iter().product(), 10),
        );
        let mut expected = (
            vec![0f32; gs.len()],
            vec![0f32; xs.len()],
            vec![0f32; ws.len()],
        );
        sizes.each(|result, pixel, tap| {
            expected.0[result] += xs[pixel] * ws[tap];
            expected.1[pixel] += gs[result] * ws[tap];
            expected.2[tap] += gs[result] * xs[pixel];
        });
        let (x, w, g) = (
            tensor(&xs, &shapes.0),
            tensor(&ws, &shapes.1),
            tensor(&gs, &shapes.2),
        );
        let problem = conv::Problem::new(&x, &w, &options).expect("fits");
        let what = format!("{n} {channels_in} {channels_out} {image:?} {taps:?} {options:?}");

        let found = conv::forward_by_columns(&problem, &x, &w).expect("multiplies");
        assert_eq!(found.meta.shape().to_vec(), shapes.2);
        assert_eq!(read(&found), expected.0, "{what}");

        let found = conv::data_by_columns(&problem, &w, &g).expect("multiplies");
        assert_eq!(found.meta.shape().to_vec(), shapes.0);
        assert_eq!(read(&found), expected.1, "{what}");

        let rows = n * height * width;
        for pieces in (1..=8).filter(|pieces| rows % pieces == 0) {
            let found = conv::weight_by_columns(&problem, &x, &g, pieces).expect("multiplies");
            assert_eq!(found.meta.shape().to_vec(), shapes.1);
            assert_eq!(read(&found), expected.2, "{what} in {pieces}");
        }
        // Tuning takes its time on a device in software.
        if case == 0 {
            let chosen = conv::forward(problem.clone(), x.clone(), w.clone(), None);
            assert_eq!(read(&chosen), expected.0, "{what}");
            let chosen = conv::data_gradient(problem.clone(), x.clone(), w.clone(), g.clone());
            assert_eq!(read(&chosen), expected.1, "{what}");
            let chosen = conv::weight_gradient(problem.clone(), x.clone(), w.clone(), g.clone());
            assert_eq!(read(&chosen), expected.2, "{what}");
        }

        // As results of these kernels lie: channels before the number of the image.
        let lies = columns(
            &g,
            Window {
                image: (height, width),
                grid: (height, width),
                ..one()
            },
            1,
        );
        let lies = view(
            &lies,
            shapes.2,
            [height * width, n * height * width, width, 1],
        );
        let found = conv::weight_by_columns(&problem, &x, &lies, 1).expect("multiplies");
        assert_eq!(read(&found), expected.2, "{what}");
    }
}

fn one() -> Window {
    Window {
        image: (1, 1),
        grid: (1, 1),
        taps: (1, 1),
        stride: (1, 1),
        padding: (0, 0),
        dilation: (1, 1),
        back: false,
    }
}

/// A bias is added to each channel.
#[test]
fn a_convolution_with_a_bias() {
    let options = ConvOptions::new([1, 1], [0, 0], [1, 1], 1);
    let (x, w) = (
        tensor(&values(32, 1), &[2, 1, 4, 4]),
        tensor(&values(12, 2), &[3, 1, 2, 2]),
    );
    let problem = conv::Problem::new(&x, &w, &options).expect("fits");
    let without = read(&conv::forward(problem.clone(), x.clone(), w.clone(), None));
    let bias = tensor(&[10.0, 20.0, 30.0], &[3]);
    let with = read(&conv::forward(problem, x, w, Some(bias)));
    for (place, (with, without)) in with.iter().zip(&without).enumerate() {
        assert_eq!(with - without, ((place / 9 % 3 + 1) * 10) as f32);
    }
}
