//! Bodies of the tests of the steps' own random numbers.
//!
//! They run on software Vulkan (`random_software.rs`) and on CUDA (`random_cuda.rs`). The reference is a second
//! implementation, from the layout that the documentation of the module states, so a number that depended on the
//! launch, on the fusion around it or on the device would differ from it.

use burn::nn::DropoutConfig;
use burn::tensor::{DType, Device, Distribution, FloatDType, Int, IntDType, Shape, Tensor};
use burn_cuda_graph::with_random;

const KEY: u64 = 0x0123_4567_89AB_CDEF;

/// Philox 4x32-10.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [a, b, c, d] = counter;
        let first = u64::from(a) * 0xD251_1F53;
        let second = u64::from(c) * 0xCD9E_8D57;
        counter = [
            (second >> 32) as u32 ^ b ^ key[0],
            second as u32,
            (first >> 32) as u32 ^ d ^ key[1],
            first as u32,
        ];
        key[0] = key[0].wrapping_add(0x9E37_79B9);
        key[1] = key[1].wrapping_add(0xBB67_AE85);
    }
    counter
}

/// The words of operation `operation` of a step.
fn words(key: u64, step: u64, operation: u32, count: usize) -> Vec<u32> {
    let halves = |value: u64| [value as u32, (value >> 32) as u32];
    let [low, high] = halves(step);
    (0..count.div_ceil(4) as u32)
        .flat_map(|block| philox([block, operation, low, high], halves(key)))
        .take(count)
        .collect()
}

fn unit(word: u32) -> f32 {
    (word >> 8) as f32 / 16_777_216.0
}

fn uniform(device: &Device, count: usize) -> Tensor<1> {
    Tensor::random([count], Distribution::Default, device)
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

fn drawn(device: &Device, key: u64, step: u64, count: usize, of: Distribution) -> Vec<f32> {
    with_random(device, key, step, || {
        floats(Tensor::<1>::random([count], of, device))
    })
}

fn integers(device: &Device, low: f64, high: f64, dtype: IntDType, count: usize) -> Vec<i64> {
    let of = Distribution::Uniform(low, high);
    with_random(device, KEY, 1, || {
        let tensor = Tensor::<1, Int>::random([count], of, (device, DType::from(dtype)));
        tensor.into_data().iter::<i64>().collect()
    })
}

/// Every element is the reference's, for sizes that fill a block, a vector, a cube, and that do not.
pub fn every_element_is_the_references(device: &Device) {
    let step = (7 << 32) + 5;
    for count in [1, 3, 4, 5, 64, 255, 256, 1000, 4096, 65_537, 1 << 20] {
        let expected: Vec<f32> = words(KEY, step, 0, count).into_iter().map(unit).collect();
        let found = drawn(device, KEY, step, count, Distribution::Default);
        assert!(found == expected, "{count} uniforms");
    }
    let (low, high) = (i32::MIN.into(), 2_147_483_648.0);
    let found = integers(device, low, high, IntDType::I32, 10_000);
    let expected = words(KEY, 1, 0, 10_000);
    let raw: Vec<u32> = found
        .iter()
        .map(|value| (value + (1 << 31)) as u32)
        .collect();
    assert!(raw == expected, "the full range of i32");
}

/// A matrix is filled in row-major order.
pub fn a_matrix_is_filled_in_order(device: &Device) {
    let matrix = with_random(device, KEY, 3, || {
        floats(Tensor::<3>::random(
            [5, 7, 3],
            Distribution::Default,
            device,
        ))
    });
    let expected: Vec<f32> = words(KEY, 3, 0, 105).into_iter().map(unit).collect();
    assert_eq!(matrix, expected);
}

/// Normals follow from the words by Box-Muller, up to the device's logarithm and sine.
pub fn normals_are_the_references(device: &Device) {
    let found = drawn(device, KEY, 2, 4096, Distribution::Normal(1.0, 3.0));
    for (pair, words) in found.chunks(2).zip(words(KEY, 2, 0, 4096).chunks(2)) {
        let u = f64::from(words[0]) / 4_294_967_296.0 + 0.5 / 4_294_967_296.0;
        let radius = 3.0 * (-2.0 * u.ln()).max(0.0).sqrt();
        let angle = (f64::from(unit(words[1])) - 0.5) * std::f64::consts::TAU;
        for (found, expected) in pair.iter().zip([angle.cos(), angle.sin()]) {
            let expected = 1.0 + radius * expected;
            assert!(
                (f64::from(*found) - expected).abs() < 1e-2,
                "{found} where {expected} is due"
            );
        }
    }
}

/// Equal key, step and place give equal numbers; another of any of them gives others.
pub fn numbers_depend_on_key_step_and_place(device: &Device) {
    let of = Distribution::Default;
    let base = drawn(device, KEY, 9, 1000, of);
    assert_eq!(base, drawn(device, KEY, 9, 1000, of));
    for (name, key, step) in [
        ("step", KEY, 10),
        ("step high", KEY, 9 + (1 << 32)),
        ("key", KEY ^ 1, 9),
        ("key high", KEY ^ (1 << 32), 9),
    ] {
        let other = drawn(device, key, step, 1000, of);
        let equal = base.iter().zip(&other).filter(|(a, b)| a == b).count();
        assert!(equal < 5, "another {name} leaves {equal} numbers of 1000");
    }
    let (first, second) = with_random(device, KEY, 9, || {
        (uniform(device, 1000), uniform(device, 1000))
    });
    // Read in the other order: what runs first must not matter.
    let (second, first) = (floats(second), floats(first));
    assert_eq!(first, base);
    let expected: Vec<f32> = words(KEY, 9, 1, 1000).into_iter().map(unit).collect();
    assert_eq!(second, expected);
}

/// A draw has the same numbers alone and within longer chains that fusion cuts in other ways.
pub fn fusion_around_a_draw_does_not_matter(device: &Device) {
    let expected = |operation| -> Vec<f32> {
        let words = words(KEY, 4, operation, 512);
        words.into_iter().map(unit).collect()
    };
    let x = Tensor::<2>::ones([16, 32], device);
    let weights = Tensor::<2>::ones([32, 32], device);
    // Several rounds: the first explores plans, later ones run cached ones.
    for round in 0..6 {
        let (a, b, c, sum) = with_random(device, KEY, 4, || {
            let of = Distribution::Default;
            let warm = (x.clone() * 2.0 + 1.0).matmul(weights.clone());
            let a = Tensor::<2>::random([16, 32], of, device);
            let chain = (warm + a.clone()).exp().log() * a.clone();
            let b = Tensor::<2>::random([16, 32], of, device);
            let chain = burn::tensor::activation::relu(chain - b.clone());
            let reduced = chain.clone().sum_dim(1) * 0.5;
            let c = Tensor::<2>::random([16, 32], of, device);
            let mut sum = chain + c.clone() + reduced;
            if round % 2 == 1 {
                sum = sum * 3.0 + 1.0;
            }
            (a, b, c, sum)
        });
        let _ = floats(sum);
        assert!(floats(c) == expected(2), "third draw of round {round}");
        assert!(floats(a) == expected(0), "first draw of round {round}");
        assert!(floats(b) == expected(1), "second draw of round {round}");
    }
}

/// Draws of one structure and different distributions, over and over, each get their own parameters.
pub fn cached_plans_keep_their_parameters(device: &Device) {
    for step in 0..4 {
        for (low, high) in [(0.0, 1.0), (2.0, 3.0), (-1.0, 1.0)] {
            let found = drawn(device, KEY, step, 256, Distribution::Uniform(low, high));
            for (found, word) in found.iter().zip(words(KEY, step, 0, 256)) {
                let expected = low as f32 + unit(word) * (high - low) as f32;
                assert!((found - expected).abs() < 1e-6, "[{low}, {high})");
            }
        }
        for p in [0.25f32, 0.5] {
            let found = drawn(device, KEY, step, 256, Distribution::Bernoulli(p.into()));
            for (found, word) in found.iter().zip(words(KEY, step, 0, 256)) {
                assert_eq!(*found, f32::from(u8::from(unit(word) < p)));
            }
        }
    }
}

/// An unchanged `Dropout` keeps its share over 200 steps, with another mask in each.
pub fn dropout_keeps_its_share(device: &Device) {
    let device = &device.clone().autodiff();
    let (steps, count, keep) = (200u64, 4096usize, 0.7f64);
    let dropout = DropoutConfig::new(1.0 - keep).init();
    let x = Tensor::<1>::ones([count], device);
    let masks: Vec<Vec<bool>> = (0..steps)
        .map(|step| {
            let out = with_random(device, KEY, step, || dropout.forward(x.clone()));
            floats(out).iter().map(|value| *value != 0.0).collect()
        })
        .collect();
    let kept = masks.iter().flatten().filter(|kept| **kept).count() as f64;
    let draws = steps as f64 * count as f64;
    let deviation = (kept - draws * keep) / (draws * keep * (1.0 - keep)).sqrt();
    println!(
        "kept {:.5} of {keep}, {deviation:.2} deviations",
        kept / draws
    );
    assert!(deviation.abs() < 3.0, "{deviation} deviations off");
    let distinct: std::collections::HashSet<&Vec<bool>> = masks.iter().collect();
    assert_eq!(distinct.len(), masks.len(), "two equal masks");
}

/// The edges of the distributions: 0 and 1 for Bernoulli, `low` reachable and `high` not for uniforms.
pub fn distributions_keep_their_bounds(device: &Device) {
    let count = 1 << 16;
    let of = |distribution| drawn(device, KEY, 1, count, distribution);
    assert!(
        of(Distribution::Bernoulli(0.0))
            .iter()
            .all(|value| *value == 0.0)
    );
    assert!(
        of(Distribution::Bernoulli(1.0))
            .iter()
            .all(|value| *value == 1.0)
    );
    for (low, high) in [
        (0.0, 1.0),
        (1000.0, 1000.01),
        (-3.0, -2.0),
        (16_777_215.0, 16_777_216.0),
    ] {
        let inside = |value: &f32| *value >= low as f32 && *value < high as f32;
        let found = of(Distribution::Uniform(low, high));
        assert!(found.iter().all(inside), "[{low}, {high})");
    }
    assert!(
        of(Distribution::Normal(0.0, 1.0))
            .iter()
            .all(|value| value.is_finite())
    );

    for (low, high) in [(0.0, 6.0), (-5.0, 5.0), (0.0, 1.0), (7.0, 7.0)] {
        let found = integers(device, low, high, IntDType::I32, count);
        let expected = (low as i64)..(high as i64).max(low as i64 + 1);
        let share = count as f64 / (expected.end - expected.start) as f64;
        for value in expected.clone() {
            let seen = found.iter().filter(|found| **found == value).count() as f64;
            let deviation = (seen - share) / share.sqrt();
            assert!(
                deviation.abs() < 5.0,
                "{value} of [{low}, {high}): {seen} of {share}"
            );
        }
        assert!(found.iter().all(|value| expected.contains(value)));
    }
    let default = with_random(device, KEY, 1, || {
        let tensor = Tensor::<1, Int>::random([count], Distribution::Default, device);
        tensor.into_data().iter::<i64>().collect::<Vec<_>>()
    });
    assert!(default.iter().all(|value| (0..255).contains(value)));
    assert!(default.contains(&0) && default.contains(&254));
}

/// Other dtypes, where the device has them.
pub fn other_dtypes_follow(device: &Device) {
    let count = 1 << 16;
    for dtype in [FloatDType::F16, FloatDType::BF16, FloatDType::F64] {
        if !device.supports_dtype(dtype) {
            println!("no {dtype:?} here");
            continue;
        }
        println!("{dtype:?}");
        let of = |distribution: Distribution| -> Vec<f64> {
            with_random(device, KEY, 6, || {
                let tensor =
                    Tensor::<1>::random([count], distribution, (device, DType::from(dtype)));
                assert_eq!(tensor.dtype(), DType::from(dtype));
                tensor.into_data().iter::<f64>().collect()
            })
        };
        let found = of(Distribution::Default);
        assert!(
            found.iter().all(|value| (0.0..1.0).contains(value)),
            "{dtype:?}"
        );
        let tolerance = match dtype {
            FloatDType::BF16 => 1.0 / 256.0,
            FloatDType::F16 => 1.0 / 2048.0,
            _ => 0.0,
        };
        for (found, word) in found.iter().zip(words(KEY, 6, 0, count)) {
            let expected = f64::from(unit(word));
            assert!(
                (found - expected).abs() <= tolerance,
                "{dtype:?}: {found}, {expected}"
            );
        }
        let normals = Moments::of(&of(Distribution::Normal(2.0, 0.5)));
        assert!((normals.mean - 2.0).abs() < 0.01 && (normals.variance - 0.25).abs() < 0.01);
    }
    for dtype in [IntDType::I64, IntDType::U32, IntDType::I16, IntDType::U8] {
        if !device.supports_dtype(dtype) {
            println!("no {dtype:?} here");
            continue;
        }
        println!("{dtype:?}");
        let found = integers(device, 3.0, 103.0, dtype, count);
        for (found, word) in found.iter().zip(words(KEY, 1, 0, count)) {
            assert_eq!(
                *found,
                3 + ((u64::from(word) * 100) >> 32) as i64,
                "{dtype:?}"
            );
        }
    }
    if device.supports_dtype(IntDType::I64) {
        let (low, high) = (-1e15, 3e15);
        let found = integers(device, low, high, IntDType::I64, count);
        for (found, word) in found.iter().zip(words(KEY, 1, 0, count)) {
            let offset = (u128::from(word) * 4_000_000_000_000_000) >> 32;
            assert_eq!(*found, -1_000_000_000_000_000 + offset as i64);
        }
    }
}

/// Outside a scope Burn's generator runs, as it does without us: seeded, and where the scope left it.
pub fn burns_generator_is_untouched(device: &Device) {
    let draw = || floats(uniform(device, 1000));
    device.seed(42);
    let (first, second) = (draw(), draw());
    assert_ne!(first, second);
    device.seed(42);
    assert_eq!(draw(), first);
    let ours = drawn(device, KEY, 0, 1000, Distribution::Default);
    assert_ne!(ours, first);
    assert_eq!(draw(), second, "a scope moved Burn's generator");

    // Registered before the scope, run within it.
    device.seed(42);
    let before = uniform(device, 1000) * 1.0;
    let within = with_random(device, KEY, 0, || floats(uniform(device, 1000)));
    assert_eq!(floats(before), first);
    assert_eq!(within, ours);

    // Registered within the scope, run after it.
    let within = with_random(device, KEY, 0, || uniform(device, 1000) * 1.0);
    assert_eq!(floats(within), ours);

    // Another thread's operations are its own.
    let elsewhere = with_random(device, KEY, 0, || {
        std::thread::scope(|scope| scope.spawn(draw).join().expect("the thread draws"))
    });
    assert_ne!(elsewhere, ours);
}

/// Scopes nest: the inner one draws, and the outer one goes on where it was.
pub fn scopes_nest(device: &Device) {
    let [outer_0, inner, outer_1] = with_random(device, KEY, 1, || {
        let outer_0 = uniform(device, 100);
        let inner = with_random(device, KEY, 2, || uniform(device, 100));
        [outer_0, inner, uniform(device, 100)].map(floats)
    });
    let expected = |step, operation| -> Vec<f32> {
        let words = words(KEY, step, operation, 100);
        words.into_iter().map(unit).collect()
    };
    assert_eq!(outer_0, expected(1, 0));
    assert_eq!(inner, expected(2, 0));
    assert_eq!(outer_1, expected(1, 1));
}

/// An empty tensor draws nothing and harms nothing.
pub fn an_empty_draw_is_empty(device: &Device) {
    let (empty, next) = with_random(device, KEY, 1, || {
        let empty = Tensor::<2>::random(Shape::new([0, 3]), Distribution::Default, device);
        (floats(empty), floats(uniform(device, 8)))
    });
    assert!(empty.is_empty());
    let expected: Vec<f32> = words(KEY, 1, 1, 8).into_iter().map(unit).collect();
    assert_eq!(next, expected);
}

#[derive(Debug)]
struct Moments {
    mean: f64,
    variance: f64,
    kurtosis: f64,
    /// Correlation of neighbours.
    serial: f64,
}

impl Moments {
    fn of(values: &[f64]) -> Self {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let power = |power| values.iter().map(|x| (x - mean).powi(power)).sum::<f64>() / count;
        let variance = power(2);
        let pairs = values
            .windows(2)
            .map(|pair| (pair[0] - mean) * (pair[1] - mean));
        Self {
            mean,
            variance,
            kurtosis: power(4) / variance.powi(2),
            serial: pairs.sum::<f64>() / count / variance,
        }
    }
}

/// Standard deviations that χ² over equal bins is from what it should be.
fn chi_square(values: &[f64], bins: usize) -> f64 {
    let mut counts = vec![0.0; bins];
    for value in values {
        counts[(value * bins as f64) as usize] += 1.0;
    }
    let share = values.len() as f64 / bins as f64;
    let chi: f64 = counts
        .iter()
        .map(|count: &f64| (count - share).powi(2) / share)
        .sum();
    let freedom = (bins - 1) as f64;
    (chi - freedom) / (2.0 * freedom).sqrt()
}

/// The normal distribution function, by Abramowitz and Stegun 26.2.17: off by at most 7.5e-8.
fn normal_cdf(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * x.abs());
    let coefficients = [
        1.330_274_429,
        -1.821_255_978,
        1.781_477_937,
        -0.356_563_782,
        0.319_381_530,
    ];
    let tail = coefficients.iter().fold(0.0, |sum, c| (sum + c) * t) * (-x * x / 2.0).exp()
        / std::f64::consts::TAU.sqrt();
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// √n times the largest distance between the sample's distribution and the normal one.
fn kolmogorov(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let count = values.len() as f64;
    let distance = values.iter().enumerate().map(|(i, value)| {
        let due = normal_cdf(*value);
        (due - i as f64 / count)
            .abs()
            .max(((i + 1) as f64 / count - due).abs())
    });
    distance.fold(0.0, f64::max) * count.sqrt()
}

/// The statistics of 2²⁰ uniforms and normals are within the bounds of chance; Burn's own are printed beside them.
///
/// The seed is fixed, so this is no lottery: a failure means that the numbers changed.
pub fn statistics_are_those_of_chance(device: &Device) {
    let count = 1 << 20;
    device.seed(11);
    let doubles = |values: Vec<f32>| -> Vec<f64> { values.into_iter().map(f64::from).collect() };
    let burns = |of| doubles(floats(Tensor::<1>::random([count], of, device)));
    let root = (count as f64).sqrt();

    let of = Distribution::Default;
    for (name, values) in [
        ("ours", doubles(drawn(device, KEY, 1, count, of))),
        ("Burn", burns(of)),
    ] {
        let moments = Moments::of(&values);
        let (chi, lag) = (chi_square(&values, 256), moments.serial * root);
        let mean = (moments.mean - 0.5) * root * 12f64.sqrt();
        println!(
            "uniforms, {name}: χ² {chi:.2}σ, mean {mean:.2}σ, neighbours {lag:.2}σ, {moments:?}"
        );
        if name == "ours" {
            assert!(chi.abs() < 4.0 && mean.abs() < 4.0 && lag.abs() < 4.0);
            assert!((moments.variance - 1.0 / 12.0).abs() < 1e-3);
        }
    }
    let of = Distribution::Normal(0.0, 1.0);
    for (name, values) in [
        ("ours", doubles(drawn(device, KEY, 2, count, of))),
        ("Burn", burns(of)),
    ] {
        let moments = Moments::of(&values);
        let lag = moments.serial * root;
        let mean = moments.mean * root;
        let variance = (moments.variance - 1.0) * root / 2f64.sqrt();
        let kurtosis = (moments.kurtosis - 3.0) * root / 24f64.sqrt();
        let largest = values
            .iter()
            .fold(0f64, |largest, value| largest.max(value.abs()));
        let distance = kolmogorov(values);
        println!(
            "normals, {name}: mean {mean:.2}σ, variance {variance:.2}σ, kurtosis {kurtosis:.2}σ, neighbours {lag:.2}σ, \
             Kolmogorov {distance:.3}, largest {largest:.2}"
        );
        if name == "ours" {
            // 1.95: the Kolmogorov distance that chance exceeds once in a thousand samples.
            assert!(distance < 1.95 && largest > 4.0);
            assert!(
                mean.abs() < 4.0 && variance.abs() < 4.0 && kurtosis.abs() < 4.0 && lag.abs() < 4.0
            );
        }
    }
    // Between operations and between steps: the same place, one further.
    let base = doubles(drawn(device, KEY, 1, count, Distribution::Default));
    let other_step = doubles(drawn(device, KEY, 2, count, Distribution::Default));
    let other_place = with_random(device, KEY, 1, || {
        let _first = uniform(device, 4);
        doubles(floats(uniform(device, count)))
    });
    for (name, other) in [("steps", other_step), ("operations", other_place)] {
        let products = base
            .iter()
            .zip(&other)
            .map(|(a, b)| (a - 0.5) * (b - 0.5) * 12.0);
        let correlation = products.sum::<f64>() / root;
        println!("between {name}: {correlation:.2}σ");
        assert!(correlation.abs() < 4.0, "{name} correlate: {correlation}σ");
    }
}
