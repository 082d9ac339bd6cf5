//! Bodies for updates of all parameters by few launches. `device` is a device with graphs, without autodiff.

use crate::common::state_bodies::optimizer;
use crate::common::{
    Batch, CUT_TOLERANCE, LR, Mlp, Net, assert_same, assert_same_or_near, batch, bits, closure,
    kernels_during, required, twins, value, word,
};
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData, activation::relu};
use burn_cuda_graph::optim::clip_by_global_norm;
use burn_cuda_graph::{GraphConfig, GraphedFn, GraphedStep, Policy, StepError, StepRate, Training};

/// 32-31-7-8: layers whose sizes divide by four and layers whose sizes do not.
#[derive(Module, Debug)]
pub struct OddNet {
    layers: Vec<Linear>,
}

impl Net for OddNet {
    fn make(device: &Device) -> Self {
        let sizes = [32, 31, 7, 8];
        let layer = |pair: &[usize]| LinearConfig::new(pair[0], pair[1]).init(device);
        Self {
            layers: sizes.windows(2).map(layer).collect(),
        }
    }
    fn run(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = self.layers[0].forward(x);
        let hidden = self.layers[1].forward(relu(hidden));
        self.layers[2].forward(relu(hidden))
    }
}

/// What a kernel updates.
const FUSED: [&str; 5] = ["sgd", "sgd-momentum", "sgd-nesterov-decay", "adam", "adamw"];

fn fused() -> GraphConfig {
    required().with_fused_updates(true)
}

/// One after the other, the gradients that a parameter gets.
fn gradients<M: Module>(model: &M, step: usize) -> Vec<Tensor<1>> {
    struct Make(Vec<Tensor<1>>, usize);
    impl ModuleVisitor for Make {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let param = param.val().inner();
            let count = param.shape().num_elements();
            let seed = self.1 * 31 + self.0.len() * 7;
            let value = |index: usize| ((index * 17 + seed) % 23) as f32 / 9.0 - 1.2;
            let values: Vec<f32> = (0..count).map(value).collect();
            let data = TensorData::new(values, [count]);
            self.0.push(Tensor::from_data(data, &param.device()));
        }
    }
    let mut make = Make(Vec::new(), step);
    model.visit(&mut make);
    make.0
}

/// Register each of `flat` as the gradient of a parameter, in the order of the visit.
fn registered<M: Module>(model: &M, flat: Vec<Tensor<1>>) -> GradientsParams {
    struct Give(std::vec::IntoIter<Tensor<1>>, GradientsParams);
    impl ModuleVisitor for Give {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let grad = self.0.next().expect("one each");
            let grad: Tensor<D> = grad.reshape(param.val().dims());
            self.1.register(param.id, grad);
        }
    }
    let mut give = Give(flat.into_iter(), GradientsParams::new());
    model.visit(&mut give);
    give.1
}

/// From equal gradients, a kernel leaves what Burn's optimizer leaves: the same bits on a software graph, and to within
/// the rounding of a fused multiply-add on a hardware one.
pub fn a_kernel_computes_burns_update(device: &Device) {
    for name in FUSED {
        let (device, model, twin) = twins::<OddNet>(device);
        let (ours, mut theirs) = optimizer(name);
        let mut twin = twin;
        let mut step = GraphedStep::new(
            Training::new(model, ours),
            fused(),
            |t: &mut Training<OddNet>, flat: Vec<Tensor<1>>, lr: StepRate| {
                let grads = registered(t.model(), flat);
                t.optimize(lr, grads);
            },
        )
        .expect("one device");
        for index in 0..10 {
            let rate = 0.01 / (index + 1) as f64;
            let out = step.run(gradients(&twin, index), rate).expect("runs");
            assert!(out.path.is_graph() || index < 5, "{name}: {}", out.path);
            let grads = registered(&twin, gradients(&twin, index));
            twin = theirs.step(rate, twin, grads);
            let (ours, theirs) = (bits(&step.model()), bits(&twin));
            let when = format_args!("{name}, step {index}");
            assert_same_or_near(&device, &ours, &theirs, CUT_TOLERANCE, when);
        }
    }
}

/// Recorded, replayed and eager steps leave the same bits, and parameters near those of updates that are not fused.
pub fn fused_updates_replay(device: &Device) {
    for name in FUSED {
        let run = |config: GraphConfig| {
            let (device, model, _) = twins::<OddNet>(device);
            let training = Training::new(model, optimizer(name).0);
            let mut step =
                GraphedStep::new(training, config, closure::<OddNet, _>(&device, |_| {}))
                    .expect("one device");
            let mut left = Vec::new();
            for index in 0..12 {
                step.run(batch(&device, index, 64), 0.01).expect("runs");
                left.push(bits(&step.model()));
            }
            (left, step.report())
        };
        // The first run of a kernel may tune it.
        run(fused());
        let (replayed, report) = run(fused());
        let (eager, never) = run(GraphConfig::new()
            .with_fused_updates(true)
            .with_warmup(u32::MAX));
        let (separate, _) = run(required());
        assert!(report.replayed >= 7 && never.replayed == 0, "{report}");
        for (index, (ours, theirs)) in replayed.iter().zip(&eager).enumerate() {
            assert_same(ours, theirs, format_args!("{name}, step {index}"));
        }
        // Gradients may be summed in another order, and Adam moves a parameter by up to the rate whatever its gradient.
        let apart = (replayed.last().iter().zip(separate.last()))
            .flat_map(|(ours, theirs)| ours.iter().flatten().zip(theirs.iter().flatten()))
            .map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs())
            .fold(0f32, f32::max);
        assert!(apart < 12.0 * 0.01, "{name}: {apart:e}");
    }
}

/// All parameters are updated by one launch for those whose sizes divide by four and one for the others; and in one
/// operation of the step, also when there are many.
pub fn few_launches_update_all(device: &Device) {
    for name in FUSED {
        let (device, model, _) = twins::<OddNet>(device);
        let training = Training::new(model, optimizer(name).0);
        // The trial's eager steps are not watched, so their launches can be heard from here.
        let config = GraphConfig::new()
            .with_fused_updates(true)
            .with_policy(Policy::Adaptive);
        let mut step = GraphedStep::new(training, config, closure::<OddNet, _>(&device, |_| {}))
            .expect("one device");
        let mut index = 0;
        let mut run = || {
            let out = step.run(batch(&device, index, 64), 0.01).expect("runs");
            index += 1;
            word(&out)
        };
        while run() != "timed" {}
        let kernels = kernels_during(|| {
            assert_eq!(run(), "timed");
            device.clone().inner().sync().expect("syncs");
        });
        let updates = kernels.iter().filter(|name| name.contains("update_many"));
        assert_eq!(updates.count(), 2, "{name}: {kernels:?}");
    }
}

/// Old values that a step still needs after its update are those from before it: returned, read through a view, or
/// averaged into the state.
pub fn old_values_outlive_a_fused_update(device: &Device) {
    let run = |config: GraphConfig| {
        let (device, model, _) = twins::<Mlp>(device);
        let loss = CrossEntropyLossConfig::new().init(&device);
        let training = Training::new(model, optimizer("adam").0);
        let mut step = GraphedStep::new(
            training,
            config,
            move |t: &mut Training<Mlp>, (x, y): Batch, lr: StepRate| {
                let old = t.model().output_bias();
                let view = old.clone().reshape([2, 4]);
                let loss = loss.forward(t.model().forward(x), y);
                let grads = GradientsParams::from_grads(loss.backward(), t.model());
                t.optimize(lr, grads);
                let moved = (t.model().output_bias() - old.clone()).abs().sum();
                (loss.inner(), old, view * 2.0, moved)
            },
        )
        .expect("one device");
        let mut seen = Vec::new();
        for index in 0..10 {
            let before: Vec<f32> = step
                .model()
                .output_bias()
                .into_data()
                .try_into_vec()
                .expect("f32");
            let out = step.run(batch(&device, index, 64), 0.01).expect("runs");
            assert_eq!(out.path.is_graph(), index >= 4, "{}", out.path);
            let (loss, old, doubled, moved) = out.output;
            let old: Vec<f32> = old.into_data().try_into_vec().expect("f32");
            let doubled: Vec<f32> = doubled.into_data().try_into_vec().expect("f32");
            assert_eq!(old, before, "step {index}");
            let expected: Vec<f32> = before.iter().map(|value| value * 2.0).collect();
            assert_eq!(doubled, expected, "step {index}");
            assert!(value(&moved) > 0.0, "step {index}");
            seen.push((value(&loss).to_bits(), value(&moved).to_bits()));
        }
        seen
    };
    run(fused());
    assert_eq!(run(fused()), run(fused()));
}

/// What no kernel updates goes on as before: another optimizer, and a step that calls Burn's `step` by itself.
pub fn updates_that_are_not_fused(device: &Device) {
    for name in ["lion", "adam-amsgrad-decay-clip", "adamw-cautious"] {
        let run = |config: GraphConfig| -> Result<_, StepError> {
            let (device, model, _) = twins::<Mlp>(device);
            let training = Training::new(model, optimizer(name).0);
            let closure = closure::<Mlp, _>(&device, |_| {});
            let mut step = GraphedStep::new(training, config, closure)?;
            for index in 0..10 {
                step.run(batch(&device, index, 64), 0.01)?;
            }
            assert!(step.report().replayed >= 4, "{name}: {}", step.report());
            Ok(bits(&step.model()))
        };
        run(required()).expect("tunes");
        let (ours, theirs) = (run(fused()).expect("runs"), run(required()).expect("runs"));
        assert_same(&ours, &theirs, name);
    }
}

/// Clipping by the global norm takes few launches where updates are fused, and comes to the same norm and gradients.
pub fn a_fused_clipping(device: &Device) {
    for max_norm in [0.05f32, 1e3] {
        let run = |config: GraphConfig| {
            let (device, model, _) = twins::<OddNet>(device);
            let loss = CrossEntropyLossConfig::new().init(&device);
            let training = Training::new(model, optimizer("sgd").0);
            let mut step = GraphedStep::new(
                training,
                config,
                move |t: &mut Training<OddNet>, (x, y): Batch, lr: StepRate| {
                    let loss = loss.forward(t.model().run(x), y);
                    let grads = GradientsParams::from_grads(loss.backward(), t.model());
                    let (grads, norm) = clip_by_global_norm(t.model(), grads, max_norm);
                    t.optimize(lr, grads);
                    norm
                },
            )
            .expect("one device");
            let norms: Vec<f32> = (0..8)
                .map(|index| {
                    value(
                        &step
                            .run(batch(&device, index, 64), 0.05)
                            .expect("runs")
                            .output,
                    )
                })
                .collect();
            assert!(step.report().replayed >= 3, "{}", step.report());
            let launches = step.report().launches_per_eager_step.expect("watched");
            (norms, bits(&step.model()), launches)
        };
        run(fused());
        let (ours, theirs) = (run(fused()), run(required()));
        assert_eq!(ours.0, run(fused()).0, "it repeats itself");
        assert!(ours.2 < theirs.2, "{} and {} launches", ours.2, theirs.2);
        for (norm, expected) in ours.0.iter().zip(&theirs.0) {
            assert!(
                (norm - expected).abs() < 1e-4 * expected,
                "{norm} and {expected}"
            );
        }
        let pairs = ours.1.iter().flatten().zip(theirs.1.iter().flatten());
        let apart = pairs
            .map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs())
            .fold(0f32, f32::max);
        assert!(apart < 1e-5, "{apart:e}");
    }
}

/// A linear layer whose weight lies in memory column by column.
#[derive(Module, Debug)]
pub struct ColNet {
    layer: Linear,
}

impl Net for ColNet {
    fn make(device: &Device) -> Self {
        let config = LinearConfig::new(32, 8).with_layout(LinearLayout::Col);
        Self {
            layer: config.init(device),
        }
    }
    fn run(&self, x: Tensor<2>) -> Tensor<2> {
        self.layer.forward(x)
    }
}

/// Moments that come from a record lie otherwise than a parameter that is stored by columns.
pub fn a_resumed_update_of_a_transposed_parameter(device: &Device) {
    let (device, model, twin) = twins::<ColNet>(device);
    let (first, _) = optimizer("adam");
    let (fresh, mut theirs) = optimizer("adam");
    let (mut first, mut model, mut twin) = (first, model, twin);
    for index in 0..2 {
        let grads = registered(&model, gradients(&model, index));
        model = first.step(0.01, model, grads);
        let grads = registered(&twin, gradients(&twin, index));
        twin = theirs.step(0.01, twin, grads);
    }
    let resumed = fresh.load_record(first.to_record());
    let mut step = GraphedStep::new(
        Training::new(model, resumed),
        fused(),
        |t: &mut Training<ColNet>, flat: Vec<Tensor<1>>, lr: StepRate| {
            let grads = registered(t.model(), flat);
            t.optimize(lr, grads);
        },
    )
    .expect("one device");
    for index in 2..10 {
        let out = step.run(gradients(&twin, index), 0.01).expect("runs");
        assert!(out.path.is_graph() || index < 7, "{}", out.path);
        let grads = registered(&twin, gradients(&twin, index));
        twin = theirs.step(0.01, twin, grads);
        let (ours, theirs) = (bits(&step.model()), bits(&twin));
        assert_same_or_near(
            &device,
            &ours,
            &theirs,
            CUT_TOLERANCE,
            format_args!("step {index}"),
        );
    }
}

/// Steps that stay eager and are not watched, one after the other at rates that move, with nothing read in between: each
/// update uses its own rate.
pub fn eager_steps_in_a_row_keep_their_rates(device: &Device) {
    let (device, model, twin) = twins::<OddNet>(device);
    let (ours, mut theirs) = optimizer("adam");
    let mut twin = twin;
    let mut step = GraphedStep::new(
        Training::new(model, ours),
        GraphConfig::new().with_fused_updates(true),
        |t: &mut Training<OddNet>, (flat, _): (Vec<Tensor<1>>, Tensor<1>), lr: StepRate| {
            let grads = registered(t.model(), flat);
            t.optimize(lr, grads);
        },
    )
    .expect("one device");
    let all: Vec<_> = (0..60)
        .map(|index| {
            (
                gradients(&twin, index),
                Tensor::<1>::ones([index + 1], &device),
            )
        })
        .collect();
    let rate = |index: usize| 0.01 / (1 + index % 7) as f64;
    for (index, given) in all.into_iter().enumerate() {
        let out = step.run(given, rate(index)).expect("runs");
        assert!(!out.path.is_graph(), "{}", out.path);
    }
    for index in 0..60 {
        let grads = registered(&twin, gradients(&twin, index));
        twin = theirs.step(rate(index), twin, grads);
    }
    let report = step.report();
    assert!(report.fallbacks["never-settles"] >= 30, "{report}");
    let (ours, theirs) = (bits(&step.model()), bits(&twin));
    assert_same_or_near(&device, &ours, &theirs, CUT_TOLERANCE, "at the end");
}

/// Training and evaluation by replay, handed over with other operations pending around them and nothing waited for, see the
/// same states as when each is waited for.
pub fn replays_keep_their_order(device: &Device) {
    let run = |wait: bool| {
        let (device, model, _) = twins::<Mlp>(device);
        let inner = device.clone().inner();
        let training = Training::new(model, optimizer("sgd").0);
        let closure = closure::<Mlp, _>(&device, |_| {});
        let mut step = GraphedStep::new(training, required(), closure).expect("one device");
        let loss = CrossEntropyLossConfig::new().init(&device.clone().inner());
        let mut eval = GraphedFn::read_only(required(), move |t: &Training<Mlp>, (x, y): Batch| {
            loss.forward(t.model().valid().run(x.inner()), y.inner())
        });
        let mut total = Tensor::<1>::zeros([1], &inner);
        let mut seen = Vec::new();
        let settle = || {
            if wait {
                inner.sync().expect("syncs");
            }
        };
        for index in 0..24 {
            let (x, y) = batch(&device, index, 64);
            // Operations that nothing has launched yet, before and after.
            let pending = x * 0.5 - 0.25;
            let out = step.run((pending, y), LR).expect("runs");
            settle();
            total = total + out.output.inner() * 2.0;
            let held = batch(&device, 100, 64);
            let out = eval.call(step.shared(), held).expect("runs");
            settle();
            seen.push(out.output.clone());
            total = total + out.output.abs();
        }
        assert!(step.report().replayed >= 18 && eval.report().replayed >= 18);
        let seen: Vec<u32> = seen.iter().map(|loss| value(loss).to_bits()).collect();
        (seen, value(&total).to_bits(), bits(&step.model()))
    };
    run(false);
    assert_eq!(run(false), run(true));
}
