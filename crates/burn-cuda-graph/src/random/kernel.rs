//! The kernels that write a draw.
//!
//! One unit computes one Philox block and stores the four elements it serves, so that the number an element gets never
//! depends on how the launch was cut. The key and the step are read from a buffer: a launch scalar would be frozen
//! into a recording, and every replay would draw the numbers of the recorded step. Everything else (the operation's
//! index, the distribution) is a constant of the operation and may be frozen.

// The macro's expansion names its arguments without need.
#![allow(clippy::too_many_arguments, missing_docs)]

use burn::tensor::{DType, Distribution, Shape, bf16, f16};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::ir::{AddressType, ElemType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::f32::consts::TAU;

/// Elements that one block serves.
const BLOCK: usize = 4;
/// 2⁻²⁴ and 2⁻³².
const UNIT_24: f32 = 1.0 / 16_777_216.0;
const UNIT_32: f32 = 1.0 / 4_294_967_296.0;

/// Most elements one draw can have: the block index is one word of the counter.
pub(super) const MAX_ELEMENTS: u64 = 1 << 34;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Shaping {
    Uniform,
    Normal,
    Bernoulli,
}

/// Philox 4x32-10 of the counter (block, operation, step low, step high) under the key (key low, key high).
#[cube]
fn philox(block: u32, operation: u32, params: &[u32]) -> Vector<u32, Const<4>> {
    let mut a = block;
    let mut b = operation;
    let mut c = params[2];
    let mut d = params[3];
    let mut key_low = params[0];
    let mut key_high = params[1];

    #[unroll]
    for _round in 0..10u32 {
        let high_a = a.mul_hi(0xD251_1F53u32);
        let low_a = a * 0xD251_1F53u32;
        let high_c = c.mul_hi(0xCD9E_8D57u32);
        let low_c = c * 0xCD9E_8D57u32;
        a = high_c ^ b ^ key_low;
        b = low_c;
        c = high_a ^ d ^ key_high;
        d = low_a;
        key_low += 0x9E37_79B9u32;
        key_high += 0xBB67_AE85u32;
    }

    let mut words = Vector::<u32, Const<4>>::empty();
    words.insert(0usize, a);
    words.insert(1usize, b);
    words.insert(2usize, c);
    words.insert(3usize, d);
    words
}

/// The high 24 bits as a number in [0, 1), exactly.
#[cube]
fn unit(word: u32) -> f32 {
    f32::cast_from(word >> 8u32) * UNIT_24
}

/// A standard normal pair by Box-Muller, the first of it.
///
/// The radius takes all 32 bits, in (0, 1], so that the tails reach 6.7 standard deviations; the angle is centred
/// because a device's sine is at its best in [-π, π].
#[cube]
fn radius(word: u32) -> f32 {
    let u = f32::cast_from(word) * UNIT_32 + UNIT_32 * 0.5f32;
    max(u.ln() * -2.0f32, 0.0f32).sqrt()
}

#[cube]
fn angle(word: u32) -> f32 {
    (unit(word) - 0.5f32) * TAU
}

#[cube(launch, address_type = "dynamic")]
fn draw_scaled<E: Numeric, N: Size>(
    params: &[u32],
    out: &mut [Vector<E, N>],
    operation: u32,
    first: f32,
    second: f32,
    below: f32,
    #[comptime] shaping: Shaping,
    #[define(E)] _elem: ElemType,
) {
    let width = N::value();
    let stores = comptime!(BLOCK / width);
    let start = ABSOLUTE_POS * stores;
    if start < out.len() {
        let words = philox(u32::cast_from(ABSOLUTE_POS), operation, params);
        let mut values = Vector::<f32, Const<4>>::empty();
        match comptime!(shaping) {
            Shaping::Uniform =>
            {
                #[unroll]
                for i in 0..4usize {
                    let value = fma(unit(words.extract(i)), second - first, first);
                    values.insert(i, min(value, below));
                }
            }
            Shaping::Bernoulli =>
            {
                #[unroll]
                for i in 0..4usize {
                    let hit = unit(words.extract(i)) < first;
                    values.insert(i, select(hit, 1.0f32, 0.0f32));
                }
            }
            Shaping::Normal =>
            {
                #[unroll]
                for i in 0..2usize {
                    let r = radius(words.extract(comptime!(2 * i))) * second;
                    let theta = angle(words.extract(comptime!(2 * i + 1)));
                    values.insert(comptime!(2 * i), fma(theta.cos(), r, first));
                    values.insert(comptime!(2 * i + 1), fma(theta.sin(), r, first));
                }
            }
        }
        #[unroll]
        for store in 0..stores {
            let mut line = Vector::<E, N>::empty();
            #[unroll]
            for lane in 0..width {
                let value = values.extract(comptime!(store * width + lane));
                line.insert(lane, E::cast_from(value));
            }
            let position = start + store;
            if position < out.len() {
                out[position] = line;
            }
        }
    }
}

/// `low + word * span / 2³²` in words of 32 bits.
#[cube]
fn integer<E: Int>(
    word: u32,
    low: u32,
    low_high: u32,
    span: u32,
    span_high: u32,
    #[comptime] signed: bool,
    #[comptime] wide: bool,
) -> E {
    let carried = word.mul_hi(span);
    let offset = word * span_high + carried;
    let bottom = low + offset;
    if comptime!(wide) {
        let carry_offset = u32::cast_from(offset < carried);
        let carry_low = u32::cast_from(bottom < low);
        let top = low_high + word.mul_hi(span_high) + carry_offset + carry_low;
        let top_value = if comptime!(signed) {
            E::cast_from(i32::cast_from(top))
        } else {
            E::cast_from(top)
        };
        // In halves: a cast to a wider signed integer may extend the sign of an unsigned word.
        let bottom_high = E::cast_from(bottom >> 16u32);
        let bottom_low = E::cast_from(bottom & 0xFFFFu32);
        let shift = E::from_int(65_536);
        (top_value * shift + bottom_high) * shift + bottom_low
    } else if comptime!(signed) {
        E::cast_from(i32::cast_from(bottom))
    } else {
        E::cast_from(bottom)
    }
}

#[cube(launch, address_type = "dynamic")]
fn draw_integers<E: Int, N: Size>(
    params: &[u32],
    out: &mut [Vector<E, N>],
    operation: u32,
    low: u32,
    low_high: u32,
    span: u32,
    span_high: u32,
    #[comptime] signed: bool,
    #[comptime] wide: bool,
    #[define(E)] _elem: ElemType,
) {
    let width = N::value();
    let stores = comptime!(BLOCK / width);
    let start = ABSOLUTE_POS * stores;
    if start < out.len() {
        let words = philox(u32::cast_from(ABSOLUTE_POS), operation, params);
        #[unroll]
        for store in 0..stores {
            let mut line = Vector::<E, N>::empty();
            #[unroll]
            for lane in 0..width {
                let word = words.extract(comptime!(store * width + lane));
                let value = integer::<E>(word, low, low_high, span, span_high, signed, wide);
                line.insert(lane, value);
            }
            let position = start + store;
            if position < out.len() {
                out[position] = line;
            }
        }
    }
}

/// Whether a draw of this shape and dtype can be written here.
pub(super) fn supports(shape: &Shape, dtype: DType) -> bool {
    let elements = shape.num_elements() as u64;
    elements > 0
        && elements <= MAX_ELEMENTS
        && (dtype.is_float() || integer_limits(dtype).is_some())
}

/// Draw a tensor of `shape`, as operation number `operation` of the step that `params` names.
pub(super) fn draw(
    device: &CubeDevice,
    params: &Handle,
    operation: u32,
    distribution: Distribution,
    shape: Shape,
    dtype: DType,
) -> CubeTensor {
    let client = device.client();
    let elements = shape.num_elements();
    let handle = client.empty(elements * dtype.size());
    let out = CubeTensor::new_contiguous(client.clone(), device.clone(), shape, handle, dtype);
    let params = CubeTensor::new_contiguous(
        client.clone(),
        device.clone(),
        Shape::new([4]),
        params.clone(),
        DType::U32,
    );
    let flat = CubeTensor::new_contiguous(
        client.clone(),
        device.clone(),
        Shape::new([elements]),
        out.handle.clone(),
        dtype,
    );
    let lines = elements.is_multiple_of(BLOCK)
        && client
            .io_optimized_vector_sizes(dtype.size())
            .any(|size| size == BLOCK);
    let width = if lines { BLOCK } else { 1 };
    let units = elements.div_ceil(BLOCK);
    let dim = CubeDim::new(&client, units);
    let count = calculate_cube_count_elemwise(&client, units, dim);
    let address = AddressType::from_len(elements);
    let elem = burn::backend::cubecl::dtype_to_storage_type(dtype);
    let (params, flat) = (params.into_buffer_arg(), flat.into_buffer_arg());
    match Plan::new(distribution, dtype) {
        Plan::Scaled(shaping, first, second, below) => draw_scaled::launch(
            &client, count, dim, address, width, params, flat, operation, first, second, below,
            shaping, elem,
        ),
        Plan::Integers(low, span) => draw_integers::launch(
            &client,
            count,
            dim,
            address,
            width,
            params,
            flat,
            operation,
            low as u32,
            (low >> 32) as u32,
            span as u32,
            (span >> 32) as u32,
            dtype.is_int(),
            dtype.size() == 8,
            elem,
        ),
    }
    out
}

/// What a kernel is told of a distribution.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Plan {
    /// Two parameters and the largest value allowed.
    Scaled(Shaping, f32, f32, f32),
    /// The lowest value and how many there are.
    Integers(i128, u64),
}

impl Plan {
    fn new(distribution: Distribution, dtype: DType) -> Self {
        let (low, high) = match distribution {
            Distribution::Bernoulli(p) => {
                return Plan::Scaled(Shaping::Bernoulli, p as f32, 0.0, f32::MAX);
            }
            Distribution::Normal(mean, std) => {
                return Plan::Scaled(Shaping::Normal, mean as f32, std as f32, f32::MAX);
            }
            Distribution::Uniform(low, high) => (low, high),
            Distribution::Default if dtype.is_float() => (0.0, 1.0),
            Distribution::Default => (0.0, 255.0),
        };
        match integer_limits(dtype) {
            Some(limits) => {
                let (low, span) = integer_range(low, high, limits);
                Plan::Integers(low, span)
            }
            None => {
                let (low, high) = (low as f32, high as f32);
                Plan::Scaled(Shaping::Uniform, low, high, ceiling(low, high, dtype))
            }
        }
    }
}

/// The smallest and the largest value of an integer dtype.
fn integer_limits(dtype: DType) -> Option<(i128, i128)> {
    Some(match dtype {
        DType::I64 => (i64::MIN.into(), i64::MAX.into()),
        DType::I32 => (i32::MIN.into(), i32::MAX.into()),
        DType::I16 => (i16::MIN.into(), i16::MAX.into()),
        DType::I8 => (i8::MIN.into(), i8::MAX.into()),
        DType::U64 => (0, u64::MAX.into()),
        DType::U32 => (0, u32::MAX.into()),
        DType::U16 => (0, u16::MAX.into()),
        DType::U8 => (0, u8::MAX.into()),
        _ => return None,
    })
}

/// The first integer of `[low, high)` and how many there are: one, `low` cut to an integer, where there is none.
fn integer_range(low: f64, high: f64, (smallest, largest): (i128, i128)) -> (i128, u64) {
    let (low, high) = if low <= high {
        (low, high)
    } else {
        (high, low)
    };
    let first = (low.ceil() as i128).clamp(smallest, largest);
    let end = (high.ceil() as i128).clamp(smallest, largest + 1);
    match end - first {
        span if span > 0 => (first, u64::try_from(span).unwrap_or(u64::MAX)),
        _ => ((low.trunc() as i128).clamp(smallest, largest), 1),
    }
}

/// The largest value of `dtype` below `high`: rounding must not carry a draw onto a bound that is excluded.
///
/// No bound where the interval is reversed, or narrower than the dtype can tell apart.
fn ceiling(low: f32, high: f32, dtype: DType) -> f32 {
    let ceiling = match dtype {
        DType::F16 => {
            let near = f16::from_f32(high);
            match near.to_f32() < high {
                true => near.to_f32(),
                false => f16::from_bits(bits_below(near.to_bits())).to_f32(),
            }
        }
        DType::BF16 => {
            let near = bf16::from_f32(high);
            match near.to_f32() < high {
                true => near.to_f32(),
                false => bf16::from_bits(bits_below(near.to_bits())).to_f32(),
            }
        }
        _ => high.next_down(),
    };
    if low < high && low <= ceiling {
        ceiling
    } else {
        f32::MAX
    }
}

/// The bits of the next number towards minus infinity, for both 16 bit floats.
fn bits_below(bits: u16) -> u16 {
    const SIGN: u16 = 0x8000;
    match bits {
        0 | SIGN => SIGN | 1,
        negative if negative & SIGN != 0 => negative + 1,
        positive => positive - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A draw in half precision stays below the bound that its documentation excludes.
    #[test]
    fn no_rounding_reaches_the_excluded_bound() {
        let below_one = |dtype| ceiling(0.0, 1.0, dtype);
        assert_eq!(below_one(DType::F32), 1.0 - f32::EPSILON / 2.0);
        assert_eq!(below_one(DType::F16), 1.0 - 1.0 / 2048.0);
        assert_eq!(below_one(DType::BF16), 1.0 - 1.0 / 256.0);
        assert_eq!(ceiling(-2.0, -1.0, DType::BF16), -1.0 - 1.0 / 128.0);
        assert!(ceiling(-1.0, 0.0, DType::F16) < 0.0);
        // A bound between two values of the dtype: the one below it.
        assert_eq!(ceiling(0.0, 1.001, DType::BF16), 1.0);
        assert_eq!(ceiling(1.0, 0.0, DType::F32), f32::MAX);
        assert_eq!(ceiling(0.999, 1.0, DType::BF16), f32::MAX);
    }

    /// Integers are those of the half-open interval, within what the dtype holds.
    #[test]
    fn integer_ranges_are_half_open() {
        let i32s = (i32::MIN.into(), i32::MAX.into());
        assert_eq!(integer_range(0.0, 10.0, i32s), (0, 10));
        assert_eq!(integer_range(-5.0, 5.0, i32s), (-5, 10));
        assert_eq!(integer_range(5.0, -5.0, i32s), (-5, 10));
        assert_eq!(integer_range(0.5, 3.7, i32s), (1, 3));
        assert_eq!(integer_range(7.0, 7.0, i32s), (7, 1));
        assert_eq!(integer_range(0.2, 0.8, i32s), (0, 1));
        let full = integer_range(-2_147_483_648.0, 2_147_483_648.0, i32s);
        assert_eq!(full, (i32::MIN.into(), 1 << 32));
        assert_eq!(integer_range(-1e9, 1e9, (0, 255)), (0, 256));
        let all = integer_range(-1e30, 1e30, (i64::MIN.into(), i64::MAX.into()));
        assert_eq!(all, (i64::MIN.into(), u64::MAX));
    }

    /// The default distribution is Burn's: the unit interval for floats, [0, 255) for integers.
    #[test]
    fn the_default_is_burns() {
        let float = Plan::new(Distribution::Default, DType::F32);
        let ceiling = 1.0f32.next_down();
        assert_eq!(float, Plan::Scaled(Shaping::Uniform, 0.0, 1.0, ceiling));
        let int = Plan::new(Distribution::Default, DType::I32);
        assert_eq!(int, Plan::Integers(0, 255));
    }
}
