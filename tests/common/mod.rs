//! Bodies of the tests that need a device with graphs, and their fixture: a graphed twin and an eager one from the
//! same weights on the same batches, compared bit by bit after every step.
//!
//! The bodies run on software Vulkan (`software_graph.rs`) and on CUDA (`cuda.rs`). Every one of them asserts which
//! path ran: a step that quietly fell back to eager would pass any comparison.

#![allow(dead_code)]

pub mod bodies;
pub mod frozen_bodies;
pub mod state_bodies;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Int, Tensor, TensorData, activation::relu};
use burn_cuda_graph::{GraphConfig, GraphedStep, Policy, StepOutput, StepPath, StepRate, Training};
use burn_train::{TrainOutput, TrainStep};

pub const LR: f64 = 0.05;

/// How far parameters of two twins may be apart on a hardware graph, of which one drains its queue at the end of each step:
/// fusion cuts the queues into other kernels, and a fused multiply-add rounds once where two kernels round twice.
pub const CUT_TOLERANCE: f32 = 1e-6;

/// 32-128-8.
#[derive(Module, Debug)]
pub struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    pub fn new(device: &Device) -> Self {
        Self {
            hidden: LinearConfig::new(32, 128).init(device),
            output: LinearConfig::new(128, 8).init(device),
        }
    }
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.output.forward(relu(self.hidden.forward(x)))
    }
    pub fn output_ids(&self) -> Vec<ParamId> {
        let bias = self.output.bias.as_ref().expect("has a bias");
        vec![self.output.weight.id, bias.id]
    }
    pub fn output_bias(&self) -> Tensor<1> {
        self.output.bias.as_ref().expect("has a bias").val().inner()
    }
}

/// Trains at half the rate it is given, by an `optimize` of its own.
impl TrainStep for Mlp {
    type Input = Batch;
    type Output = ();

    fn step(&self, (x, y): Batch) -> TrainOutput<()> {
        let loss = CrossEntropyLossConfig::new().init(&x.device());
        let loss = loss.forward(self.forward(x), y);
        TrainOutput::new(self, loss.backward(), ())
    }

    fn optimize(
        self,
        optimizer: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        let halved = lr.lr_from_param(ParamId::new(), None) * 0.5;
        optimizer.step(halved, self, grads)
    }
}

/// A convolution, BatchNorm and a linear layer on `[batch, 1, 8, 4]`.
#[derive(Module, Debug)]
pub struct BnNet {
    conv: Conv2d,
    norm: BatchNorm,
    output: Linear,
}

impl BnNet {
    pub fn new(device: &Device) -> Self {
        Self {
            conv: Conv2dConfig::new([1, 4], [3, 3]).init(device),
            norm: BatchNormConfig::new(4).init(device),
            output: LinearConfig::new(4 * 6 * 2, 8).init(device),
        }
    }
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let [batch, _] = x.dims();
        let x = self.conv.forward(x.reshape([batch, 1, 8, 4]));
        let x = relu(self.norm.forward(x));
        self.output.forward(x.flatten(1, 3))
    }
}

/// A network that the fixture can train.
pub trait Net: Module + 'static {
    fn make(device: &Device) -> Self;
    fn run(&self, x: Tensor<2>) -> Tensor<2>;
}

impl Net for Mlp {
    fn make(device: &Device) -> Self {
        Self::new(device)
    }
    fn run(&self, x: Tensor<2>) -> Tensor<2> {
        self.forward(x)
    }
}

impl Net for BnNet {
    fn make(device: &Device) -> Self {
        Self::new(device)
    }
    fn run(&self, x: Tensor<2>) -> Tensor<2> {
        self.forward(x)
    }
}

pub type Batch = (Tensor<2>, Tensor<1, Int>);

/// The `index`-th batch of `size` samples, the same on every call.
pub fn batch(device: &Device, index: usize, size: usize) -> Batch {
    let mut state = (index as u64 + 1) * 0x9E37_79B9_7F4A_7C15 + size as u64;
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let x: Vec<f32> = (0..size * 32).map(|_| next()).collect();
    let y: Vec<i32> = (0..size)
        .map(|sample| ((x[sample * 32] + 0.5) * 7.99) as i32)
        .collect();
    (
        Tensor::from_data(TensorData::new(x, [size, 32]), device),
        Tensor::from_data(TensorData::new(y, [size]), device),
    )
}

/// The bits of every float tensor of a model, settled.
pub fn bits<M: Module>(model: &M) -> Vec<Vec<u32>> {
    struct Reader(Vec<Vec<u32>>);
    impl ModuleVisitor for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values: Vec<f32> = param.val().into_data().try_into_vec().expect("f32 values");
            self.0.push(values.into_iter().map(f32::to_bits).collect());
        }
    }
    let mut reader = Reader(Vec::new());
    model.valid().visit(&mut reader);
    reader.0
}

pub fn value(loss: &Tensor<1>) -> f32 {
    loss.clone().into_scalar::<f32>()
}

/// Plain Burn.
pub struct Eager<M> {
    pub model: M,
    pub optimizer: ModuleOptimizer,
    loss: CrossEntropyLoss,
}

impl<M: Net> Eager<M> {
    pub fn new(model: M, device: &Device) -> Self {
        Self {
            model,
            optimizer: SgdConfig::new().init(),
            loss: CrossEntropyLossConfig::new().init(device),
        }
    }
    pub fn step(&mut self, batch: Batch, lr: f64) -> Tensor<1> {
        self.step_with(batch, lr, |_| {})
    }

    /// A step that runs `hook` between the forward and the backward pass.
    pub fn step_with(&mut self, (x, y): Batch, lr: f64, hook: impl Fn(&Tensor<1>)) -> Tensor<1> {
        let loss = self.loss.forward(self.model.run(x), y);
        hook(&loss);
        let grads = GradientsParams::from_grads(loss.backward(), &self.model);
        self.model = self.optimizer.step(lr, self.model.clone(), grads);
        loss
    }
}

/// A step's closure.
pub trait StepFn<M>: Fn(&mut Training<M>, Batch, StepRate) -> Tensor<1> {}
impl<M, F: Fn(&mut Training<M>, Batch, StepRate) -> Tensor<1>> StepFn<M> for F {}

/// The step's closure, with a hook that runs in it.
pub fn closure<M: Net, H: Fn(&Tensor<1>)>(
    device: &Device,
    hook: H,
) -> impl Fn(&mut Training<M>, Batch, StepRate) -> Tensor<1> + use<M, H> {
    let loss = CrossEntropyLossConfig::new().init(device);
    move |t, (x, y), lr| {
        let loss = loss.forward(t.model().run(x), y);
        hook(&loss);
        let grads = GradientsParams::from_grads(loss.backward(), t.model());
        t.optimize(lr, grads);
        loss
    }
}

pub fn required() -> GraphConfig {
    GraphConfig::new().with_policy(Policy::RequireGraph)
}

/// The autodiff device of a graph device, and two independent models of equal weights on it.
///
/// Kernels are tuned for `sizes` before, on a third model: the first steps of a shape in a process try several kernels
/// whose sums round differently, for plain Burn as for us, so two twins only compare after that.
pub fn twins_for<M: Net>(device: &Device, sizes: &[usize]) -> (Device, M, M) {
    let device = device.clone().autodiff();
    let mut tuned = Eager::new(M::make(&device), &device);
    for size in sizes {
        for index in 0..3 {
            value(&tuned.step(batch(&device, index, *size), 0.0));
        }
    }
    device.seed(7);
    let model = M::make(&device);
    let twin = model.valid().train();
    (device, model, twin)
}

/// As [`assert_same`] on a software graph; on a hardware one to within `tolerance`.
///
/// For twins of which one drains its queue where the other does not: Burn's fusion then cuts the queue into other
/// kernels, and on CUDA a fused multiply-add rounds once where two kernels round twice.
#[track_caller]
pub fn assert_same_or_near(
    device: &Device,
    ours: &[Vec<u32>],
    theirs: &[Vec<u32>],
    tolerance: f32,
    when: impl core::fmt::Display,
) {
    if burn_cuda_graph::support(device) == burn_cuda_graph::Support::Software {
        return assert_same(ours, theirs, when);
    }
    let pairs = ours.iter().flatten().zip(theirs.iter().flatten());
    let largest = pairs
        .map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs())
        .fold(0f32, f32::max);
    assert!(
        largest <= tolerance,
        "{when}: the largest difference is {largest:e}"
    );
}

/// As [`assert_same`] on a software graph; on a hardware one to within `moved`, the rates of all steps so far added up.
///
/// For optimizers that divide a gradient by its own size. One twin's scalars are read from the device, so Burn fuses its
/// update with the gradient's kernel in another way, tunes that one by itself, and may sum in another order. Where a
/// gradient is next to nothing its last bits decide its sign, and each step moves such a parameter by up to the rate. That
/// replays are right is tested by bits, against the same step that never records.
#[track_caller]
pub fn assert_same_or_moved(
    device: &Device,
    ours: &[Vec<u32>],
    theirs: &[Vec<u32>],
    moved: f64,
    when: impl core::fmt::Display,
) {
    assert_same_or_near(device, ours, theirs, moved as f32, when);
}

/// Twins tuned for batches of 64.
pub fn twins<M: Net>(device: &Device) -> (Device, M, M) {
    twins_for(device, &[64])
}

/// Both lists of tensors hold the same bits.
#[track_caller]
pub fn assert_same(ours: &[Vec<u32>], theirs: &[Vec<u32>], when: impl core::fmt::Display) {
    assert_eq!(ours.len(), theirs.len(), "{when}");
    let (mut differing, mut largest) = (0, 0f32);
    for (a, b) in ours.iter().flatten().zip(theirs.iter().flatten()) {
        differing += usize::from(a != b);
        largest = largest.max((f32::from_bits(*a) - f32::from_bits(*b)).abs());
    }
    let total: usize = ours.iter().map(Vec::len).sum();
    assert_eq!(
        differing, 0,
        "{when}: of {total} values, the largest difference {largest:e}"
    );
}

/// What path a step took, in a word.
pub fn word<O>(output: &StepOutput<O>) -> &'static str {
    match &output.path {
        StepPath::Eager(reason) => reason.name(),
        StepPath::Recorded => "recorded",
        StepPath::Replayed => "replayed",
    }
}

/// A graphed step over SGD with the given configuration.
pub fn graphed<M: Net>(
    model: M,
    config: GraphConfig,
    device: &Device,
) -> GraphedStep<Training<M>, Batch, Tensor<1>, impl StepFn<M>> {
    GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        config,
        closure::<M, _>(device, |_| {}),
    )
    .expect("the state is on one device")
}

/// Kernel launches of `f` and of everything it leaves queued.
pub fn launches(device: &Device, f: impl FnOnce()) -> u64 {
    launched_during(|| {
        f();
        device.clone().inner().sync().expect("syncs");
    })
}

/// Kernel launches until `f` returns.
pub fn launched_during(f: impl FnOnce()) -> u64 {
    kernels_during(f).len() as u64
}

/// The kernels launched until `f` returns.
pub fn kernels_during(f: impl FnOnce()) -> Vec<&'static str> {
    use cubecl_runtime::logging::{LaunchObservation, LaunchObserver};
    use std::sync::{Arc, Mutex};
    #[derive(Default)]
    struct Names(Mutex<Vec<&'static str>>);
    impl LaunchObserver for Names {
        fn launched(&self, kernel: &'static str) {
            self.0.lock().expect("no panic in here").push(kernel);
        }
    }
    let names = Arc::new(Names::default());
    let observation = LaunchObservation::new(names.clone());
    f();
    drop(observation);
    let names = names.0.lock().expect("no panic in here");
    names.clone()
}

/// Set in the environment of a process that [`in_a_cold_process`] started.
pub const COLD_PROCESS: &str = "BURN_CUDA_GRAPH_TESTS_COLD_PROCESS";

/// Set in the environment of a process whose random numbers are Burn's.
const WITHOUT_RANDOM: &str = "BURN_CUDA_GRAPH_TESTS_WITHOUT_RANDOM";

/// Whether this process is to leave the generator of replays unregistered.
pub fn unregistered() -> bool {
    std::env::var_os(WITHOUT_RANDOM).is_some()
}

/// Run the named test of this binary in a process that does not register the generator of replays.
pub fn in_a_process_without_random(test: &str) {
    let output = std::process::Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", test, "--nocapture"])
        .env(WITHOUT_RANDOM, "1")
        .output()
        .expect("the process starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    assert!(text.contains("1 passed"), "{text}");
}

/// Run the named test of this binary in a process of its own, with CubeCL's caches in an empty folder.
pub fn in_a_cold_process(test: &str) {
    let home = std::env::temp_dir().join(format!("cold-process-{}", std::process::id()));
    std::fs::create_dir_all(&home).expect("a folder for the caches");
    let output = std::process::Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", test, "--nocapture"])
        .env(COLD_PROCESS, "1")
        // CubeCL keeps its caches in the target folder of the package that it is started in, if there is one.
        .current_dir(&home)
        .env("HOME", &home)
        .env("XDG_CACHE_HOME", home.join("cache"))
        .output()
        .expect("the process starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let cached =
        std::fs::read_dir(home.join("cache")).is_ok_and(|mut entries| entries.next().is_some());
    std::fs::remove_dir_all(&home).expect("the caches are removed");
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("1 passed"), "{text}");
    assert!(
        cached,
        "the caches were elsewhere, so the process was not cold"
    );
}
