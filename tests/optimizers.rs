//! The optimizers of `burn_cuda_graph::optim` against Burn's, on devices where both run eagerly.
//!
//! What makes them worth having, their steps in a graph, is tested with the graphs. Here: outside of one they are Burn's
//! optimizers, to the last bit of every parameter and of every record.
//!
//! Burn loads records onto the default device. Built with the feature `cuda`, that is a GPU: `BURN_DEVICE=flex` names
//! another one.
#![cfg(any(feature = "flex", feature = "wgpu"))]

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Initializer, Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdjustLrFn, GradientsParams, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource,
};
use burn::tensor::activation::relu;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_cuda_graph::optim as ours;
use std::collections::BTreeMap;

/// A wide matrix, a tall one, a stack of matrices and vectors.
#[derive(Module, Debug)]
struct Net {
    wide: Linear,
    tall: Linear,
    stack: Param<Tensor<3>>,
}

const INPUTS: usize = 6;
const OUTPUTS: usize = 3;
const MATRICES: [&str; 2] = ["wide.weight", "tall.weight"];

impl Net {
    fn new(device: &Device) -> Self {
        let normal = Initializer::Normal {
            mean: 0.0,
            std: 0.5,
        };
        Self {
            wide: LinearConfig::new(INPUTS, 16).init(device),
            tall: LinearConfig::new(16, 4).init(device),
            stack: normal.init([2, 4, OUTPUTS], device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.tall.forward(relu(self.wide.forward(x)));
        let x = x.unsqueeze_dim::<3>(0).matmul(self.stack.val());
        x.sum_dim(0).squeeze_dim(0)
    }

    fn gradients(&self, device: &Device, step: usize) -> GradientsParams {
        let x = values([8, INPUTS], step, device);
        let y = values([8, OUTPUTS], step + 1000, device);
        let loss = (self.forward(x) - y).square().mean();
        GradientsParams::from_grads(loss.backward(), self)
    }
}

/// Numbers of both signs and several magnitudes, the same on every call.
fn values<const D: usize>(shape: [usize; D], seed: usize, device: &Device) -> Tensor<D> {
    let mut state = (seed as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 22) as f32 - 2.0
    };
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| next()).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// A rate that moves; zero in one step.
fn rate(step: usize) -> f64 {
    match step {
        7 => 0.0,
        _ => 0.03 / (1.0 + (step % 5) as f64),
    }
}

/// The bits of every parameter. None may be infinite or NaN: anything equals itself there.
fn bits(net: &Net) -> Vec<(ParamId, Vec<u32>)> {
    struct Bits(Vec<(ParamId, Vec<u32>)>);
    impl ModuleVisitor for Bits {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let values: Vec<f32> = param.val().into_data().try_into_vec().expect("f32 values");
            assert!(values.iter().all(|value| value.is_finite()));
            let bits = values.into_iter().map(f32::to_bits).collect();
            self.0.push((param.id, bits));
        }
    }
    let mut bits = Bits(Vec::new());
    net.valid().visit(&mut bits);
    bits.0
}

type Sink = (BTreeMap<String, TensorData>, BTreeMap<String, String>);

/// One optimizer with one set of options, here and in Burn.
struct Variant {
    name: &'static str,
    ours: fn() -> ModuleOptimizer,
    burn: fn() -> ModuleOptimizer,
    /// Both configurations, as JSON.
    configs: fn() -> [serde_json::Value; 2],
    /// Compares the states that the bare optimizers keep.
    states: fn(&'static str, &Device, DType),
}

macro_rules! variant {
    ($name:literal, $config:ident $(.$set:ident($value:expr))*) => {
        Variant {
            name: concat!(stringify!($config), " ", $name),
            ours: || ours::$config::new()$(.$set($value))*.init(),
            burn: || burn::optim::$config::new()$(.$set($value))*.init(),
            configs: || [
                serde_json::to_value(ours::$config::new()$(.$set($value))*).expect("JSON"),
                serde_json::to_value(burn::optim::$config::new()$(.$set($value))*).expect("JSON"),
            ],
            states: |name, device, dtype| {
                let ours = || ours::$config::new()$(.$set($value))*.build();
                let burn = || burn::optim::$config::new()$(.$set($value))*.build();
                compare_states(name, ours(), burn(), [12], device, dtype);
                compare_states(name, ours(), burn(), [3, 5], device, dtype);
                compare_states(name, ours(), burn(), [2, 5, 3], device, dtype);
            },
        }
    };
}

/// Muon for the matrices, `$rest` for everything else.
macro_rules! muon {
    ($name:literal, $rest:ident, $config:ident $(.$set:ident($value:expr))*) => {
        Variant {
            name: concat!(stringify!($config), " ", $name),
            ours: || {
                let muon = ours::$config::new()$(.$set($value))*.build();
                let matrices = ParamGroup::from_paths(MATRICES.to_vec());
                ours::$rest::new().init().with_group(matrices, muon, None)
            },
            burn: || {
                let muon = burn::optim::$config::new()$(.$set($value))*.build();
                let matrices = ParamGroup::from_paths(MATRICES.to_vec());
                burn::optim::$rest::new().init().with_group(matrices, muon, None)
            },
            configs: || [
                serde_json::to_value(ours::$config::new()$(.$set($value))*).expect("JSON"),
                serde_json::to_value(burn::optim::$config::new()$(.$set($value))*).expect("JSON"),
            ],
            states: |name, device, dtype| {
                for shape in [[3, 5], [5, 3]] {
                    let ours = ours::$config::new()$(.$set($value))*.build();
                    let burn = burn::optim::$config::new()$(.$set($value))*.build();
                    compare_states(name, ours, burn, shape, device, dtype);
                }
            },
        }
    };
}

fn momentum(dampening: f64, nesterov: bool) -> MomentumConfig {
    MomentumConfig {
        momentum: 0.8,
        dampening,
        nesterov,
    }
}

fn decay() -> Option<WeightDecayConfig> {
    Some(WeightDecayConfig::new(0.02))
}

fn by_value() -> Option<GradientClippingConfig> {
    Some(GradientClippingConfig::Value(0.05))
}

fn by_norm() -> Option<GradientClippingConfig> {
    Some(GradientClippingConfig::Norm(0.1))
}

fn variants() -> Vec<Variant> {
    vec![
        variant!("", SgdConfig),
        variant!(
            "momentum",
            SgdConfig.with_momentum(Some(momentum(0.0, false)))
        ),
        variant!(
            "dampening",
            SgdConfig.with_momentum(Some(momentum(0.3, false)))
        ),
        variant!(
            "nesterov",
            SgdConfig.with_momentum(Some(momentum(0.1, true)))
        ),
        variant!(
            "decay",
            SgdConfig
                .with_weight_decay(decay())
                .with_gradient_clipping(by_norm())
        ),
        variant!("", AdamConfig),
        variant!("amsgrad", AdamConfig.with_amsgrad(true)),
        variant!(
            "decay",
            AdamConfig
                .with_weight_decay(decay())
                .with_grad_clipping(by_value())
        ),
        variant!("", AdamWConfig),
        variant!("no decay", AdamWConfig.with_weight_decay(0.0)),
        variant!("decay", AdamWConfig.with_weight_decay(0.1).with_beta_2(0.9)),
        variant!("amsgrad", AdamWConfig.with_amsgrad(true).with_beta_2(0.8)),
        variant!(
            "cautious",
            AdamWConfig
                .with_cautious_weight_decay(true)
                .with_weight_decay(0.1)
        ),
        variant!("clipped", AdamWConfig.with_grad_clipping(by_norm())),
        variant!("", RmsPropConfig),
        variant!("no momentum", RmsPropConfig.with_momentum(0.0)),
        variant!("centered", RmsPropConfig.with_centered(true)),
        variant!(
            "centered, no momentum, decay",
            RmsPropConfig
                .with_centered(true)
                .with_momentum(0.0)
                .with_alpha(0.9)
                .with_weight_decay(decay())
        ),
        variant!("clipped", RmsPropConfig.with_grad_clipping(by_value())),
        variant!("", AdaGradConfig),
        variant!(
            "rate decay",
            AdaGradConfig.with_lr_decay(0.3).with_weight_decay(decay())
        ),
        variant!("clipped", AdaGradConfig.with_grad_clipping(by_norm())),
        variant!("", AdanConfig),
        variant!("proximal decay", AdanConfig.with_weight_decay(0.1)),
        variant!(
            "decay",
            AdanConfig.with_weight_decay(0.1).with_no_prox(true)
        ),
        variant!("clipped", AdanConfig.with_grad_clipping(by_value())),
        variant!("", LionConfig),
        variant!("decay", LionConfig.with_weight_decay(0.1)),
        variant!("clipped", LionConfig.with_grad_clipping(by_norm())),
        variant!("", LambConfig),
        variant!("decay", LambConfig.with_weight_decay(0.1)),
        variant!("no trust ratio", LambConfig.with_use_trust_ratio(false)),
        variant!("clipped", LambConfig.with_grad_clipping(by_value())),
        variant!("", AdafactorConfig),
        variant!("decay", AdafactorConfig.with_weight_decay(0.1)),
        variant!("absolute", AdafactorConfig.with_relative_step(false)),
        variant!(
            "absolute, unscaled",
            AdafactorConfig
                .with_relative_step(false)
                .with_scale_parameter(false)
                .with_clip_threshold(0.5)
        ),
        variant!("clipped", AdafactorConfig.with_grad_clipping(by_norm())),
        muon!("", SgdConfig, MuonConfig),
        muon!("decay", AdamWConfig, MuonConfig.with_weight_decay(decay())),
        muon!(
            "as AdamW",
            AdamWConfig,
            MuonConfig.with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW)
        ),
        muon!(
            "other momentum",
            SgdConfig,
            MuonConfig
                .with_momentum(momentum(0.2, false))
                .with_ns_steps(3)
        ),
    ]
}

/// The rate passes `1 / sqrt(step)` in these steps, so that Adafactor's relative step is both of its values.
fn capped_rate(step: usize) -> f64 {
    match step {
        7 => 0.0,
        _ => 0.4 - 0.02 * (step % 3) as f64,
    }
}

/// Ours and Burn's train the same network from the same records.
fn same_as_burn(device: &Device) {
    let inner = device;
    let device = &inner.clone().autodiff();
    let start = Net::new(device);
    for variant in variants() {
        let name = variant.name;
        let (mut ours, mut burn) = ((variant.ours)(), (variant.burn)());
        let (mut net, mut reference) = (start.clone(), start.clone());
        for step in 0..20 {
            let before = bits(&reference);
            let grads = reference.gradients(device, step);
            reference = burn.step(rate(step), reference, grads);
            let grads = net.gradients(device, step);
            net = ours.step(rate(step), net, grads);
            let expected = bits(&reference);
            assert_eq!(expected != before, rate(step) != 0.0, "{name}: step {step}");
            assert!(bits(&net) == expected, "{name}: step {step} differs");
        }

        let (ours_record, burn_record) = (ours.to_record(), burn.to_record());
        assert_eq!(ours_record.len(), burn_record.len(), "{name}");
        let ours_bytes = ours_record.into_bytes().expect("a record");
        let burn_bytes = burn_record.into_bytes().expect("a record");
        // A loaded state is compared with a loaded one: it comes from the default device, and how fusion groups what
        // follows, and so how it rounds, depends on that for Burn's optimizers too.
        let start = &reference;
        let mut runs = [
            ("ours", ours),
            ("Burn's", burn),
            (
                "ours from Burn's",
                load((variant.ours)(), burn_bytes.clone()),
            ),
            ("Burn's from ours", load((variant.burn)(), ours_bytes)),
            ("Burn's from Burn's", load((variant.burn)(), burn_bytes)),
        ]
        .map(|(run, optimizer)| (run, optimizer, start.clone()));
        for step in 20..25 {
            let after = runs.each_mut().map(|(_, optimizer, net)| {
                let grads = net.gradients(device, step);
                *net = optimizer.step(rate(step), net.clone(), grads);
                bits(net)
            });
            for (run, as_run) in [(0, 1), (2, 4), (3, 4)] {
                let (run_name, as_name) = (runs[run].0, runs[as_run].0);
                assert!(
                    after[run] == after[as_run],
                    "{name}: step {step} of {run_name} is not that of {as_name}"
                );
            }
        }
    }
}

fn load(optimizer: ModuleOptimizer, bytes: burn::tensor::Bytes) -> ModuleOptimizer {
    optimizer.from_bytes(bytes).expect("a record")
}

fn flatten<S: RecordState>(state: &S) -> Sink {
    let mut sink = StateSink::default();
    state.state_flatten("1", &mut sink);
    let scalars = sink.scalars.into_iter();
    (
        sink.tensors.into_iter().collect(),
        scalars
            .map(|(name, value)| (name, format!("{value:?}")))
            .collect(),
    )
}

/// What a record of `state` makes of itself.
fn rebuild<S: RecordState, T: RecordState>(state: &S, device: &Device) -> Option<T> {
    let mut sink = StateSink::default();
    state.state_flatten("1", &mut sink);
    let mut source = StateSource::new(sink.scalars.into_iter().collect());
    for (name, data) in sink.tensors {
        source.insert_tensor(name, data);
    }
    T::state_unflatten("1", &mut source, device)
}

fn data_bits<const D: usize>(tensor: &Tensor<D>) -> (DType, Vec<u8>) {
    let data = tensor.clone().into_data();
    (data.dtype(), data.as_bytes().to_vec())
}

/// Names, types and bits of everything in the state, in each of some steps; and each other's states are taken over.
fn compare_states<A: Optimizer, B: Optimizer, const D: usize>(
    name: &str,
    ours: A,
    burn: B,
    shape: [usize; D],
    device: &Device,
    dtype: DType,
) {
    let cast = |tensor: Tensor<D>| tensor.cast(FloatDType::from(dtype));
    let param = cast(values(shape, 77, device));
    let (mut ours_run, mut burn_run) = ((param.clone(), None), (param, None));
    for step in 0..10 {
        let what = format!("{name}: {dtype:?}{shape:?}: step {step}");
        let grad = cast(values(shape, step, device) * 0.3);
        let lr = capped_rate(step);
        // Every other state comes from the other's record. Burn's own does not survive one in half precision: it loads
        // as `f32`, which its next step refuses to add to the gradient.
        if step % 2 == 1
            && let (Some(ours_state), Some(burn_state)) = (&ours_run.1, &burn_run.1)
        {
            let swapped: Option<A::State<D>> = rebuild::<B::State<D>, _>(burn_state, device);
            let taken: Option<B::State<D>> = rebuild::<A::State<D>, _>(ours_state, device);
            assert!(swapped.is_some() && taken.is_some(), "{what}");
            ours_run.1 = swapped;
            if dtype == DType::F32 {
                burn_run.1 = taken;
            }
        }
        ours_run = ours.step(lr, ours_run.0, grad.clone(), ours_run.1);
        burn_run = burn.step(lr, burn_run.0, grad, burn_run.1);
        assert_eq!(data_bits(&ours_run.0), data_bits(&burn_run.0), "{what}");
        let (Some(ours_state), Some(burn_state)) = (&ours_run.1, &burn_run.1) else {
            panic!("{what}: no state");
        };
        let same = |found: Sink, expected: Sink| {
            assert_eq!(found.1, expected.1, "{what}");
            let names = |sink: &Sink| sink.0.keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(&found), names(&expected), "{what}");
            for (leaf, data) in &expected.0 {
                let found = &found.0[leaf];
                assert_eq!(found.shape(), data.shape(), "{what}: {leaf}");
                assert_eq!(found.dtype(), data.dtype(), "{what}: {leaf}");
                assert_eq!(found.as_bytes(), data.as_bytes(), "{what}: {leaf}");
            }
        };
        same(flatten(ours_state), flatten(burn_state));
        let ours_loaded: Option<A::State<D>> = rebuild::<B::State<D>, _>(burn_state, device);
        let burn_loaded: Option<B::State<D>> = rebuild::<B::State<D>, _>(burn_state, device);
        match (ours_loaded, burn_loaded) {
            (Some(ours), Some(burn)) => same(flatten(&ours), flatten(&burn)),
            _ => panic!("{what}: not loaded"),
        }
    }
}

/// Total norm and clipped gradients against numbers computed on the host.
fn clips_by_the_global_norm(device: &Device) {
    let device = &device.clone().autodiff();
    let net = Net::new(device);
    let read = |grads: &GradientsParams| -> Vec<Vec<f32>> {
        struct Read<'a>(&'a GradientsParams, Vec<Vec<f32>>);
        impl ModuleVisitor for Read<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let grad = self.0.get::<D>(param.id).expect("a gradient");
                let values = grad.into_data().try_into_vec().expect("f32 values");
                self.1.push(values);
            }
        }
        let mut read = Read(grads, Vec::new());
        net.visit(&mut read);
        read.1
    };
    let before = read(&net.gradients(device, 0));
    let squares = before.iter().flatten().map(|x| f64::from(*x).powi(2));
    let norm = squares.sum::<f64>().sqrt();
    assert!(norm > 0.1, "{norm}");
    for max_norm in [0.01, 0.5 * norm as f32, 2.0 * norm as f32] {
        let mut grads = net.gradients(device, 0);
        let other = ParamId::new();
        grads.register(
            other,
            Tensor::<1>::from_data([1e6], &device.clone().inner()),
        );
        let (grads, found) = ours::clip_by_global_norm(&net, grads, max_norm);
        let found = f64::from(found.into_scalar::<f32>());
        assert!((found - norm).abs() < 1e-6 * norm, "{found} is not {norm}");
        assert_eq!(
            grads
                .get::<1>(other)
                .map(|other| other.into_scalar::<f32>()),
            Some(1e6)
        );
        let factor = (f64::from(max_norm) / (norm + 1e-6)).min(1.0);
        for (before, after) in before.iter().flatten().zip(read(&grads).iter().flatten()) {
            let expected = f64::from(*before) * factor;
            let error = (f64::from(*after) - expected).abs();
            assert!(error <= 2e-6 * expected.abs(), "{after} is not {expected}");
            assert!(factor < 1.0 || before.to_bits() == after.to_bits());
        }
    }
    let (grads, norm) = ours::clip_by_global_norm(&net, GradientsParams::new(), 1.0);
    assert!(grads.is_empty());
    assert_eq!(norm.into_scalar::<f32>(), 0.0);
}

/// One parameter in two places of a module, and a module that has nothing else.
#[derive(Module, Debug)]
struct Tied {
    encoder: Param<Tensor<1>>,
    decoder: Param<Tensor<1>>,
}

fn clips_a_shared_parameter_once(device: &Device) {
    let encoder = Param::from_tensor(Tensor::<1>::zeros([2], device));
    let tied = Tied {
        decoder: encoder.clone(),
        encoder,
    };
    let id = tied.encoder.id;
    let mut grads = GradientsParams::new();
    grads.register(id, Tensor::<1>::from_data([3.0, 4.0], device));
    let (grads, norm) = ours::clip_by_global_norm(&tied, grads, 1.0);
    assert_eq!(norm.into_scalar::<f32>(), 5.0);
    let clipped = grads.get::<1>(id).expect("a gradient").into_data();
    let clipped: Vec<f32> = clipped.try_into_vec().expect("f32 values");
    assert!((clipped[0] - 0.6).abs() < 1e-6 && (clipped[1] - 0.8).abs() < 1e-6);
}

#[cfg(feature = "flex")]
mod flex {
    use super::*;

    fn device() -> Device {
        Device::flex()
    }

    #[test]
    fn optimizers_are_burns() {
        same_as_burn(&device());
    }

    #[test]
    fn states_are_burns() {
        for variant in variants() {
            (variant.states)(variant.name, &device(), DType::F32);
        }
    }

    /// Adafactor keeps `f32` and rounds once; the others compute in the type of the parameter.
    #[test]
    fn states_are_burns_in_half_precision() {
        for variant in variants() {
            (variant.states)(variant.name, &device(), DType::F16);
            (variant.states)(variant.name, &device(), DType::BF16);
        }
    }

    #[test]
    fn clips_by_norm() {
        clips_by_the_global_norm(&device());
        clips_a_shared_parameter_once(&device());
    }

    /// The squares of these overflow in `f16`.
    #[test]
    fn clips_half_precision_gradients() {
        let layer = LinearConfig::new(4, 4).with_bias(false).init(&device());
        let grad = Tensor::<2>::full([4, 4], 1000.0, &device()).cast(FloatDType::F16);
        let mut grads = GradientsParams::new();
        grads.register(layer.weight.id, grad);
        let (grads, norm) = ours::clip_by_global_norm(&layer, grads, 4.0);
        assert_eq!(norm.dtype(), DType::F32);
        assert_eq!(norm.into_scalar::<f32>(), 4000.0);
        let clipped = grads.get::<2>(layer.weight.id).expect("a gradient");
        assert_eq!(clipped.dtype(), DType::F16);
        let clipped = clipped.cast(FloatDType::F32).into_data();
        let clipped: Vec<f32> = clipped.try_into_vec().expect("f32 values");
        assert!(clipped.iter().all(|x| (x - 1.0).abs() < 1e-3));
    }
}

#[cfg(feature = "wgpu")]
mod wgpu {
    use super::*;

    fn device() -> Device {
        Device::wgpu(Default::default())
    }

    #[test]
    fn optimizers_are_burns() {
        same_as_burn(&device());
    }

    #[test]
    fn states_are_burns() {
        for variant in variants() {
            (variant.states)(variant.name, &device(), DType::F32);
        }
    }

    #[test]
    fn clips_by_norm() {
        clips_by_the_global_norm(&device());
        clips_a_shared_parameter_once(&device());
    }
}

/// A configuration file of one is one of the other.
#[test]
fn configurations_are_burns() {
    for variant in variants() {
        let [ours, burn] = (variant.configs)();
        assert_eq!(ours, burn, "{}", variant.name);
    }
}

fn panics(f: impl FnOnce() + std::panic::UnwindSafe) -> String {
    let payload = std::panic::catch_unwind(f).expect_err("no panic");
    match payload.downcast::<String>() {
        Ok(message) => *message,
        Err(payload) => (*payload.downcast::<&str>().expect("a message")).to_string(),
    }
}

/// What is wrong, and what to do, is in the message.
#[test]
fn bad_settings_are_refused() {
    type Bad = fn() -> ours::AdafactorConfig;
    let bad: [(Bad, [&str; 2]); 5] = [
        (
            || ours::AdafactorConfig::new().with_epsilon_1(-0.5),
            ["epsilon_1 must be positive", "-0.5"],
        ),
        (
            || ours::AdafactorConfig::new().with_epsilon_2(f32::INFINITY),
            ["epsilon_2 must be positive", "inf"],
        ),
        (
            || ours::AdafactorConfig::new().with_clip_threshold(0.0),
            ["clip_threshold must be positive", "is 0;"],
        ),
        (
            || ours::AdafactorConfig::new().with_decay_rate(0.8),
            ["decay_rate must be negative", "0.8"],
        ),
        (
            || ours::AdafactorConfig::new().with_weight_decay(f32::NAN),
            ["weight_decay must be nonnegative", "NaN"],
        ),
    ];
    for (config, expected) in bad {
        let message = panics(move || {
            config().build();
        });
        for part in expected {
            assert!(message.contains(part), "{message}");
        }
    }
}

#[cfg(feature = "flex")]
#[test]
fn a_bad_maximum_norm_is_refused() {
    for max_norm in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let message = panics(move || {
            let layer = LinearConfig::new(2, 2).init(&Device::flex());
            drop(ours::clip_by_global_norm(
                &layer,
                GradientsParams::new(),
                max_norm,
            ));
        });
        assert!(message.contains(&format!("is {max_norm};")), "{message}");
    }
}

#[cfg(feature = "flex")]
#[test]
fn muon_refuses_vectors() {
    let message = panics(|| {
        let device = Device::flex();
        let vector = Tensor::<1>::zeros([3], &device);
        drop(
            ours::MuonConfig::new()
                .build()
                .step(0.1, vector.clone(), vector, None),
        );
    });
    assert!(
        message.contains("rank 1") && message.contains("with_group"),
        "{message}"
    );
}
