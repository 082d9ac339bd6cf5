//! What the host does around a step: the engine's decision, the shape key, the walk over a batch, the report.
//!
//! On Burn's CPU backend, which has no graphs, so no device is waited for and every graphed call is an eager one that says
//! why. What it prints, and what it must not be read as:
//!
//! - `direct`, `refused`: a call of a closure that only hands its batch back, by itself and through a graphed step over a
//!   small and a large state. The difference is what a step pays that stays eager: the key, the decision, the backup of
//!   the state that a panic would be undone with, and the counting. Not what a replay pays, which copies a batch and
//!   launches a graph: that is `replay_host_us` of the benchmark `steps`.
//! - `decision`: `would_record`, the key and what the engine answers for it, with nothing run.
//! - `visit`, `key`, `hash`: the walk over a batch's tensors; with their shapes taken down, as a key has them; the hash of a
//!   key. A batch of a pair, and one of 64 tensors.
//! - `report`, `explain`: for what is printed now and then, not at every step.
//!
//! ```text
//! cargo bench --bench host
//! ```

use burn::optim::ModuleOptimizer;
use burn::tensor::{Device, Int, Tensor};
use burn_cuda_graph::optim::SgdConfig;
use burn_cuda_graph::{
    AnyTensor, GraphConfig, GraphedStep, HostField, ShapeKey, StepPath, StepRate, TensorSpec,
    TensorTree, Training,
};
use burn_cuda_graph_suite::models::{MlpConfig, ResNet18Config};
use divan::{Bencher, black_box};
use std::hash::{BuildHasher, RandomState};

type Pair = (Tensor<2>, Tensor<1, Int>);

fn main() {
    divan::main();
}

fn pair() -> Pair {
    let device = Device::flex();
    (
        Tensor::ones([64, 784], &device),
        Tensor::zeros([64], &device),
    )
}

fn many() -> Vec<Tensor<2>> {
    let device = Device::flex();
    (0..64)
        .map(|width| Tensor::ones([8, width + 1], &device))
        .collect()
}

/// Hands the batch's first tensor back: no operation, so that nothing but the call is timed.
fn closure<M>(_: &mut Training<M>, (x, _): Pair, _: StepRate) -> Tensor<2> {
    x
}

fn optimizer() -> ModuleOptimizer {
    SgdConfig::new().init()
}

/// A perceptron, of 8 parameters, and its optimizer.
macro_rules! small {
    () => {{
        let device = Device::flex().autodiff();
        let model = MlpConfig::new(vec![784, 8, 8, 8, 10]).init(&device);
        Training::new(model, optimizer())
    }};
}

/// ResNet-18, of 62 parameters and 40 statistics, narrow, and its optimizer.
macro_rules! large {
    () => {{
        let device = Device::flex().autodiff();
        let model = ResNet18Config::new().with_width(4).init(&device);
        Training::new(model, optimizer())
    }};
}

/// A graphed step over `$state` that was called once, and is refused.
macro_rules! refused {
    ($state:expr) => {{
        let mut step = GraphedStep::new($state, GraphConfig::new(), closure)
            .expect("a state on one device makes a step");
        let path = step.run(pair(), 0.1).expect("a sound batch").path;
        assert!(matches!(path, StepPath::Eager(_)), "{path}");
        step
    }};
}

#[divan::bench]
fn direct(bencher: Bencher) {
    let (mut state, batch) = (small!(), pair());
    bencher.bench_local(|| closure(&mut state, black_box(batch.clone()), 0.1.into()));
}

#[divan::bench]
fn refused_small_state(bencher: Bencher) {
    let (mut step, batch) = (refused!(small!()), pair());
    bencher.bench_local(|| step.run(black_box(batch.clone()), 0.1));
}

#[divan::bench]
fn refused_large_state(bencher: Bencher) {
    let (mut step, batch) = (refused!(large!()), pair());
    bencher.bench_local(|| step.run(black_box(batch.clone()), 0.1));
}

#[divan::bench]
fn decision_small_state(bencher: Bencher) {
    let (step, batch) = (refused!(small!()), pair());
    bencher.bench_local(|| step.would_record(black_box(&batch), 0.1));
}

#[divan::bench]
fn decision_large_state(bencher: Bencher) {
    let (step, batch) = (refused!(large!()), pair());
    bencher.bench_local(|| step.would_record(black_box(&batch), 0.1));
}

fn visit(batch: &impl TensorTree) {
    batch.visit_tensors(&mut |tensor| drop(black_box(tensor)));
}

#[divan::bench]
fn visit_pair(bencher: Bencher) {
    let batch = pair();
    bencher.bench_local(|| visit(black_box(&batch)));
}

#[divan::bench]
fn visit_64_tensors(bencher: Bencher) {
    let batch = many();
    bencher.bench_local(|| visit(black_box(&batch)));
}

#[divan::bench]
fn map_64_tensors(bencher: Bencher) {
    let batch = many();
    bencher.bench_local(|| black_box(&batch).map_tensors(&mut |tensor: AnyTensor| tensor));
}

/// The key of a batch, from what `TensorTree` shows of it.
fn key_of(batch: &impl TensorTree) -> ShapeKey {
    let (mut tensors, mut host): (Vec<TensorSpec>, Vec<HostField>) = Default::default();
    batch.visit_tensors(&mut |tensor| tensors.push(tensor.spec()));
    batch.visit_host_fields(&mut |field| host.push(field));
    ShapeKey {
        tensors,
        host,
        rate_classes: Vec::new(),
        learning_rate_bits: None,
    }
}

#[divan::bench]
fn key_pair(bencher: Bencher) {
    let batch = pair();
    bencher.bench_local(|| key_of(black_box(&batch)));
}

#[divan::bench]
fn key_64_tensors(bencher: Bencher) {
    let batch = many();
    bencher.bench_local(|| key_of(black_box(&batch)));
}

#[divan::bench]
fn hash_pair(bencher: Bencher) {
    let (key, hasher) = (key_of(&pair()), RandomState::new());
    bencher.bench_local(|| hasher.hash_one(black_box(&key)));
}

#[divan::bench]
fn hash_64_tensors(bencher: Bencher) {
    let (key, hasher) = (key_of(&many()), RandomState::new());
    bencher.bench_local(|| hasher.hash_one(black_box(&key)));
}

#[divan::bench]
fn report(bencher: Bencher) {
    let mut step = refused!(small!());
    let batch = pair();
    // As full as its samples get.
    for _ in 0..600 {
        step.run(batch.clone(), 0.1).expect("a sound batch");
    }
    bencher.bench_local(|| black_box(&step).report());
}

#[divan::bench]
fn explain(bencher: Bencher) {
    let step = refused!(small!());
    bencher.bench_local(|| black_box(&step).explain());
}
