//! This crate's kernels in Burn's fusion. They are registered for the whole process, so they are in one of their own.
//!
//! On software Vulkan; on a card with the feature `cuda` and `BURN_DEVICE=cuda`.
#![cfg(feature = "wgpu")]

mod common;

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::{
    Device, Int, Tensor, TensorData,
    activation::{relu, softmax},
};
use burn_cuda_graph::GraphConfig;
use common::{Net, assert_same, batch, bits, graphed, kernels_during, required, twins, word};
use serial_test::serial;

fn device() -> Device {
    burn_cuda_graph::register_kernels().expect("no operation ran before");
    // Later calls change nothing.
    burn_cuda_graph::register_kernels().expect("registered");
    #[cfg(feature = "cuda")]
    if std::env::var("BURN_DEVICE").is_ok_and(|name| name == "cuda") {
        return Device::cuda(0);
    }
    Device::wgpu(Default::default())
}

/// Integers from -3 to 3, so that every order of additions has the same result.
fn integers<const D: usize>(shape: [usize; D], seed: usize, device: &Device) -> Tensor<D> {
    let value = |index: usize| (((index * 31 + seed * 17) * 2_654_435_761) >> 7) % 7;
    let length = shape.iter().product();
    let values: Vec<f32> = (0..length).map(|index| value(index) as f32 - 3.0).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().expect("f32 values")
}

/// Operations of Burn are computed by them, with the results they always had.
#[test]
#[serial]
fn operations_run_on_them() {
    let device = device();
    // Rows that CUDA's layout leaves no holes between.
    let x = integers([200, 32], 1, &device);
    let w = integers([32, 40], 2, &device);
    let rows = [3, 5, 3, 3, 0, 7, 5, 1].repeat(25);
    let image = integers([2, 4, 8, 8], 4, &device);
    let weight = integers([8, 4, 3, 3], 5, &device);
    let bias = integers([1, 40], 6, &device);
    let mut found = (Vec::new(), Vec::new(), Vec::new());
    let mut more = (Vec::new(), Vec::new());
    let mut last = Vec::new();
    let kernels = kernels_during(|| {
        found.0 = values(x.clone().sum_dim(0));
        found.1 = values(x.clone().transpose().matmul(x.clone().matmul(w.clone())));
        // A product and what follows it: once as it was tuned.
        for _ in 0..2 {
            let y = x.clone().matmul(w.clone());
            let seen = x.clone().transpose().matmul(y) + bias.clone();
            more.0 = values(relu(seen.mul_scalar(2.0)));
        }
        // Batches that meet one matrix, and the sum over both of their axes.
        let batches = x.clone().reshape([4, 50, 32]).sum_dim(0).sum_dim(1);
        more.1 = values(batches);
        // The last axis, and one of one element.
        let lines = x.clone().reshape([100, 64]).sum_dim(1).sum_dim(1);
        // Two tensors, of which one is changed.
        let kept = lines.clone().sum_dim(1);
        device.sync().expect("syncs");
        let changed = lines.add_scalar(1.0);
        device.sync().expect("syncs");
        last = values(kept);
        let changed: Vec<f32> = values(changed).iter().map(|value| value - 1.0).collect();
        assert_eq!(changed, last);
        let data = TensorData::new(rows.clone(), [rows.len()]);
        let at = Tensor::<1, Int>::from_data(data, &device);
        let table = Tensor::<2>::zeros([9, 32], &device);
        found.2 =
            values(table.select_assign(0, at, x.clone(), burn::tensor::IndexingUpdateOp::Add));
        let options = burn::tensor::ops::ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
        let out = burn::tensor::module::conv2d(image.clone(), weight.clone(), None, options);
        assert_eq!(out.dims(), [2, 8, 8, 8]);
        out.into_data();
    });
    // The one that is not chosen by tuning, which may prefer Burn's kernels and remembers that.
    let heard = kernels.iter().any(|kernel| kernel.contains("add_selected"));
    assert!(heard);
    let (xs, ws) = (values(x), values(w));
    let mut sums = vec![0f32; 32];
    let mut table = vec![0f32; 9 * 32];
    for (place, value) in xs.iter().enumerate() {
        sums[place % 32] += value;
        table[rows[place / 32] as usize * 32 + place % 32] += value;
    }
    assert_eq!(found.0, sums);
    assert_eq!(found.2, table);
    let mut product = vec![0f32; 32 * 40];
    for row in 0..200 {
        for column in 0..40 {
            let y: f32 = (0..32)
                .map(|at| xs[row * 32 + at] * ws[at * 40 + column])
                .sum();
            for at in 0..32 {
                product[at * 40 + column] += xs[row * 32 + at] * y;
            }
        }
    }
    assert_eq!(found.1, product);
    assert_eq!(more.1, sums);
    let lines: Vec<f32> = xs.chunks(64).map(|line| line.iter().sum()).collect();
    assert_eq!(last, lines);
    let bias = values(bias);
    for (place, value) in product.iter_mut().enumerate() {
        *value = ((*value + bias[place % 40]) * 2.0).max(0.0);
    }
    assert_eq!(more.0, product);
}

/// Softmax and its gradient: as it is defined, in `f64`. What is before it is fused, and what it leaves is read again behind.
#[test]
#[serial]
fn softmax_is_one_kernel() {
    let device = device().autodiff();
    for (lines, length) in [(6, 5), (64, 128), (40, 1000), (4, 3000)] {
        let shape = [lines / 2, 2, length];
        let x = integers([shape[0], 2, length], 7, &device).require_grad();
        let w = integers([shape[0], 2, length], 8, &device);
        let mut found = (Vec::new(), Vec::new());
        let kernels = kernels_during(|| {
            let p = softmax(x.clone().mul_scalar(0.25).add_scalar(1.0), 2);
            let grads = (p.clone() * w.clone()).sum().backward();
            found.1 = values(x.grad(&grads).expect("has one"));
            found.0 = values(p);
        });
        let own = kernels
            .iter()
            .filter(|kernel| kernel.contains("softmax_lines"));
        assert_eq!(own.count(), 1, "{kernels:?}");
        let (xs, ws) = (values(x.inner()), values(w));
        for line in 0..lines {
            let of = line * length..(line + 1) * length;
            let exponents: Vec<f64> = xs[of.clone()]
                .iter()
                .map(|x| (*x as f64 * 0.25).exp())
                .collect();
            let sum: f64 = exponents.iter().sum();
            let p: Vec<f64> = exponents.iter().map(|exponent| exponent / sum).collect();
            let mean: f64 = p
                .iter()
                .zip(&ws[of.clone()])
                .map(|(p, w)| p * *w as f64)
                .sum();
            for (at, place) in of.enumerate() {
                let gradient = 0.25 * p[at] * (ws[place] as f64 - mean);
                let (p_found, g_found) = (found.0[place] as f64, found.1[place] as f64);
                assert!(
                    (p_found - p[at]).abs() <= 2e-6 * p[at],
                    "{place}: {p_found} {}",
                    p[at]
                );
                // Two terms of up to 3 p cancel.
                assert!(
                    (g_found - gradient).abs() <= 1e-5 * p[at],
                    "{place}: {g_found} {gradient}"
                );
            }
        }
    }
}

/// What looks like one and is not: other operations on the largest, another axis, a result that is read in between.
#[test]
#[serial]
fn what_is_no_softmax_is_left_alone() {
    let device = device();
    let x = integers([64, 64], 9, &device);
    let host = values(x.clone());
    let mut found = Vec::new();
    let kernels = kernels_during(|| {
        let across = softmax(x.clone(), 0);
        found.push(values(across.sum_dim(1)));
        let largest = x.clone().max_dim(1);
        let distance = x.clone() - largest.clone();
        let exponent = distance.clone().exp();
        let p = exponent.clone() / exponent.sum_dim(1);
        found.push(values(p.sum_dim(1)));
        found.push(values(largest + distance.sum_dim(1)));
    });
    assert!(
        !kernels
            .iter()
            .any(|kernel| kernel.contains("softmax_lines")),
        "{kernels:?}"
    );
    let ones = |values: &[f32]| values.iter().all(|value| (value - 1.0).abs() < 1e-5);
    assert!(ones(&found[1]), "{:?}", found[1]);
    let total: f32 = found[0].iter().sum();
    assert!((total - 64.0).abs() < 1e-3, "{total}");
    for (line, found) in host.chunks(64).zip(&found[2]) {
        let largest = line.iter().fold(f32::MIN, |a, b| a.max(*b));
        let apart: f32 = line.iter().map(|value| value - largest).sum();
        assert_eq!(*found, largest + apart);
    }
}

/// An embedding, a convolution, attention and linear layers on `[batch, 32]`: each of the operations that are taken, and its
/// gradients.
#[derive(Module, Debug)]
struct Mixed {
    table: Embedding,
    conv: Conv2d,
    hidden: Linear,
    output: Linear,
}

impl Net for Mixed {
    fn make(device: &Device) -> Self {
        Self {
            table: EmbeddingConfig::new(16, 4).init(device),
            conv: Conv2dConfig::new([4, 8], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device),
            hidden: LinearConfig::new(8 * 32, 32).init(device),
            output: LinearConfig::new(32, 8).init(device),
        }
    }
    fn run(&self, x: Tensor<2>) -> Tensor<2> {
        let [samples, _] = x.dims();
        let words = x.clone().add_scalar(0.5).mul_scalar(15.9).int();
        // [batch, 32, 4] to [batch, 4, 8, 4].
        let seen = self.table.forward(words).swap_dims(1, 2);
        let seen = seen.reshape([samples, 4, 8, 4]) * x.reshape([samples, 1, 8, 4]);
        let seen = relu(self.conv.forward(seen)).flatten::<2>(1, 3);
        // Sixteen places, two heads of eight.
        let heads = seen.clone().reshape([samples, 16, 2, 8]).swap_dims(1, 2);
        let scores = heads.clone().matmul(heads.clone().swap_dims(2, 3));
        let mixed = softmax(scores.mul_scalar(0.3), 3).matmul(heads);
        let seen = seen + mixed.swap_dims(1, 2).reshape([samples, 256]);
        self.output.forward(relu(self.hidden.forward(seen)))
    }
}

/// Replays leave the bits of the same steps that are never recorded.
#[test]
#[serial]
fn steps_replay_on_them() {
    let device = device();
    let run = |config: GraphConfig| {
        let (device, model, _) = twins::<Mixed>(&device);
        let mut step = graphed(model, config, &device);
        let mut left = Vec::new();
        let mut paths = Vec::new();
        for index in 0..12 {
            let out = step.run(batch(&device, index, 64), 0.05).expect("runs");
            paths.push(word(&out));
            left.push(bits(&step.model()));
        }
        (left, paths)
    };
    // The first run tunes.
    run(required());
    let mut paths = Vec::new();
    let mut left = Vec::new();
    let kernels = kernels_during(|| (left, paths) = run(required()));
    assert!(
        paths[4..].iter().all(|path| *path == "replayed"),
        "{paths:?}"
    );
    for own in ["add_selected", "softmax_lines"] {
        assert!(kernels.iter().any(|kernel| kernel.contains(own)), "{own}");
    }
    let (eager, never) = run(GraphConfig::new().with_warmup(u32::MAX));
    assert!(
        never
            .iter()
            .all(|path| !["recorded", "replayed"].contains(path)),
        "{never:?}"
    );
    for (index, (ours, theirs)) in left.iter().zip(&eager).enumerate() {
        assert_same(ours, theirs, format_args!("step {index}"));
    }
}
