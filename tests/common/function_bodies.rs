//! Bodies of the tests of `GraphedFn`: several functions over one state, each with graphs of its own.

use crate::common::{
    Batch, BnNet, LR, Mlp, Net, assert_same, assert_same_or_moved, batch, bits, closure, required,
    twins_for, value,
};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Dropout, DropoutConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn_cuda_graph::optim::AdamConfig;
use burn_cuda_graph::{
    GraphConfig, GraphedFn, GraphedState, GraphedStep, Inference, StepRate, Training,
};

fn adam() -> ModuleOptimizer {
    AdamConfig::new().init()
}

fn eager_step<M: Net>(model: M, optimizer: &mut ModuleOptimizer, (x, y): Batch, lr: f64) -> M {
    let loss = CrossEntropyLossConfig::new().init(&x.device());
    let loss = loss.forward(model.run(x), y);
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    optimizer.step(lr, model, grads)
}

fn evaluate<M: Net>(model: &M, (x, y): Batch) -> Tensor<1> {
    let (x, y) = (x.inner(), y.inner());
    let loss = CrossEntropyLossConfig::new().init(&x.device());
    loss.forward(model.valid().run(x), y)
}

/// Fills freed memory: what a graph whose pages were given away would write into.
fn canaries(device: &Device) -> Vec<Tensor<1>> {
    let sizes = [8, 64, 128, 512, 2048, 8192, 32_768];
    let canary = |size: usize| Tensor::<1>::full([size], 3.25, &device.clone().inner());
    let made: Vec<Tensor<1>> = sizes
        .iter()
        .flat_map(|size| (0..24).map(move |_| *size))
        .map(canary)
        .collect();
    device.clone().inner().sync().expect("syncs");
    made
}

fn assert_canaries(canaries: &[Tensor<1>], when: &str) {
    for canary in canaries {
        let data = canary.to_data();
        let intact = data.iter::<f32>().all(|element| element == 3.25);
        assert!(intact, "{when}: a canary of {} changed", canary.dims()[0]);
    }
}

/// An evaluation graph reads what the training graph just wrote, changes nothing of the training, and dropping it leaves
/// the training graph sound.
pub fn evaluation_beside_training(device: &Device) {
    let (device, model, twin) = twins_for::<BnNet>(device, &[64]);
    let mut optimizer = adam();
    let mut twin = twin;
    let config = required();
    let training = Training::new(model, adam());
    let mut step = GraphedStep::new(
        training,
        config.clone(),
        closure::<BnNet, _>(&device, |_| {}),
    )
    .expect("the state is on one device");
    let evaluate_graphed =
        |training: &Training<BnNet>, batch: Batch| evaluate(training.model(), batch);
    let mut eval = GraphedFn::read_only(config, evaluate_graphed);
    let moved = |index: usize| 0.001 * (index + 1) as f64 * 2.0;
    for index in 0..24 {
        let given = batch(&device, index, 64);
        step.run(given.clone(), 0.001).expect("runs");
        twin = eager_step(twin, &mut optimizer, given, 0.001);
        let given = batch(&device, 100 + index, 64);
        let ours = eval.call(step.shared(), given.clone()).expect("runs");
        let theirs = evaluate(&twin, given);
        let software = burn_cuda_graph::support(&device) == burn_cuda_graph::Support::Software;
        let (ours, theirs) = (value(&ours.output), value(&theirs));
        match software {
            true => assert_eq!(ours.to_bits(), theirs.to_bits(), "evaluation {index}"),
            false => assert!((ours - theirs).abs() < 0.05, "evaluation {index}"),
        }
        assert_same_or_moved(
            &device,
            &bits(&step.state().into_model()),
            &bits(&twin),
            moved(index),
            format!("step {index}"),
        );
    }
    // Fetching the state moves it out of the graph's buffers no more than a replay needs: both replay.
    let (training, evaluation) = (step.report(), eval.report());
    assert!(training.replayed >= 15, "{training}");
    assert!(evaluation.replayed >= 15, "{evaluation}");
    assert_eq!(step.steps_taken(), 24, "an evaluation is no step");
    assert!(
        eval.explain(step.shared())
            .to_string()
            .contains("is a graph")
    );

    drop(eval);
    let canaries = canaries(&device);
    let before = step.report().replayed;
    for index in 24..40 {
        let given = batch(&device, index, 64);
        step.run(given.clone(), 0.001).expect("runs");
        twin = eager_step(twin, &mut optimizer, given, 0.001);
    }
    assert_eq!(step.report().replayed, before + 16, "{}", step.report());
    assert_canaries(&canaries, "after the evaluation graph was dropped");
    let (ours, theirs) = (bits(&step.state().into_model()), bits(&twin));
    assert_same_or_moved(&device, &ours, &theirs, moved(40), "after dropping");
}

/// Two steps with two optimizers over one state, as an adversarial pair has them.
pub fn two_steps_over_one_state(device: &Device) {
    let (device, first, first_twin) = twins_for::<Mlp>(device, &[64]);
    let second = Mlp::new(&device);
    let second_twin = second.valid().train();
    type Pair = (Training<Mlp>, Training<Mlp>);
    let pull = |to: Tensor<2>, from: Tensor<2>| (to - from).square().mean();
    // The first learns to differ from the second, which learns to follow it.
    let lead = move |pair: &mut Pair, (x, _): Batch, lr: StepRate| {
        let (ours, theirs) = (pair.0.model().run(x.clone()), pair.1.model().run(x));
        let loss = pull(ours, theirs.detach()).neg().exp();
        let grads = GradientsParams::from_grads(loss.backward(), pair.0.model());
        pair.0.optimize(lr, grads);
        loss
    };
    let follow = move |pair: &mut Pair, (x, _): Batch, lr: StepRate| {
        let (ours, theirs) = (pair.1.model().run(x.clone()), pair.0.model().run(x));
        let loss = pull(ours, theirs.detach());
        let grads = GradientsParams::from_grads(loss.backward(), pair.1.model());
        pair.1.optimize(lr, grads);
        loss
    };
    let pair = |first, second| (Training::new(first, adam()), Training::new(second, adam()));
    let mut state = GraphedState::new(pair(first, second)).expect("one device");
    let (mut leading, mut following) = (
        GraphedFn::new(required(), lead),
        GraphedFn::new(required(), follow),
    );
    // The same pair by a step that never records, which is plain Burn but for where its queue is cut.
    let mut twin = pair(first_twin, second_twin);
    for index in 0..16 {
        let given = batch(&device, index, 64);
        let led = leading.run(&mut state, given.clone(), 0.002).expect("runs");
        let followed = following
            .run(&mut state, given.clone(), 0.001)
            .expect("runs");
        let led_twin = lead(&mut twin, given.clone(), StepRate::from(0.002));
        let followed_twin = follow(&mut twin, given, StepRate::from(0.001));
        if burn_cuda_graph::support(&device) == burn_cuda_graph::Support::Software {
            assert_eq!(value(&led.output), value(&led_twin), "leading {index}");
            assert_eq!(
                value(&followed.output),
                value(&followed_twin),
                "following {index}"
            );
        }
        let (ours, moved) = (state.state(), 0.003 * (index + 1) as f64 * 4.0);
        let when = format!("step {index}");
        let models = [
            (ours.0.model(), twin.0.model()),
            (ours.1.model(), twin.1.model()),
        ];
        for (ours, theirs) in models {
            assert_same_or_moved(&device, &bits(ours), &bits(theirs), moved, &when);
        }
    }
    for report in [leading.report(), following.report()] {
        assert!(report.replayed >= 9, "{report}");
    }
    assert_eq!(state.steps_taken(), 32);
}

/// A state that is changed from outside: every function follows, whichever is called first.
pub fn every_function_follows_a_changed_state(device: &Device) {
    let (device, model, _) = twins_for::<Mlp>(device, &[64]);
    let mut state = GraphedState::new(Training::new(model, adam())).expect("one device");
    let mut train = GraphedFn::new(required(), closure::<Mlp, _>(&device, |_| {}));
    let mut eval = GraphedFn::read_only(required(), |training: &Training<Mlp>, batch: Batch| {
        evaluate(training.model(), batch)
    });
    let round =
        |state: &mut GraphedState<Training<Mlp>>, train: &mut _, eval: &mut _, from: usize| {
            fn go<F, G>(
                device: &Device,
                state: &mut GraphedState<Training<Mlp>>,
                train: &mut GraphedFn<Training<Mlp>, Batch, Tensor<1>, F>,
                eval: &mut GraphedFn<Training<Mlp>, Batch, Tensor<1>, G>,
                from: usize,
            ) where
                F: Fn(&mut Training<Mlp>, Batch, StepRate) -> Tensor<1>,
                G: Fn(&mut Training<Mlp>, Batch, StepRate) -> Tensor<1>,
            {
                for index in from..from + 8 {
                    let given = batch(device, index, 64);
                    train.run(state, given.clone(), LR).expect("runs");
                    let ours = eval.call(state, given.clone()).expect("runs");
                    let theirs = evaluate(&state.model(), given);
                    let (ours, theirs) = (value(&ours.output), value(&theirs));
                    assert!(
                        (ours - theirs).abs() <= 1e-5,
                        "step {index}: {ours}, {theirs}"
                    );
                }
            }
            go(&device, state, train, eval, from)
        };
    round(&mut state, &mut train, &mut eval, 0);
    let (trained, evaluated) = (train.report(), eval.report());
    assert!(
        trained.replayed > 0 && evaluated.replayed > 0,
        "{trained}\n{evaluated}"
    );
    let fresh = Mlp::new(&device);
    let expected = bits(&fresh);
    state
        .update(|_| Training::new(fresh.valid().train(), adam()))
        .expect("one device");
    assert_same(&bits(&state.model()), &expected, "after the update");
    // The evaluation first: it must not read the old parameters.
    let given = batch(&device, 50, 64);
    let ours = eval.call(&mut state, given.clone()).expect("runs");
    assert!(!ours.path.is_graph(), "{}", ours.path);
    let theirs = value(&evaluate(&fresh, given));
    assert!((value(&ours.output) - theirs).abs() <= 1e-5);
    round(&mut state, &mut train, &mut eval, 60);
    assert!(
        train.report().replayed > trained.replayed,
        "{}",
        train.report()
    );
    assert!(
        eval.report().replayed > evaluated.replayed,
        "{}",
        eval.report()
    );
    // Released: the buffers go, the state stays, both warm up anew.
    let expected = bits(&state.model());
    state.release();
    assert_same(&bits(&state.model()), &expected, "after the release");
    round(&mut state, &mut train, &mut eval, 80);
    // The state goes before its functions.
    drop(state);
    let canaries = canaries(&device);
    drop((train, eval));
    assert_canaries(&canaries, "after all graphs were dropped");
}

/// Inference of a model alone, at two shapes, and of another model by the same function.
pub fn inference_replays(device: &Device) {
    let (device, model, other) = twins_for::<BnNet>(device, &[64]);
    let plain = device.clone().inner();
    let other = eager_step(other, &mut adam(), batch(&device, 0, 64), 0.1);
    let expect = [model.valid(), other.valid()];
    let inference = |model| GraphedState::new(Inference::new(model)).expect("one device");
    let mut states = [inference(model), inference(other)];
    let mut forward = GraphedFn::read_only(required(), |state: &Inference<BnNet>, x: Tensor<2>| {
        state.model().run(x)
    });
    let check = |out: &Tensor<2>, expected: Tensor<2>, when: String| {
        let near = (out.clone() - expected).abs().max().into_scalar::<f32>();
        assert!(near <= 1e-5, "{when}: off by {near:e}");
    };
    for index in 0..12 {
        for size in [64, 16] {
            let (x, _) = batch(&plain, index, size);
            let ours = forward.call(&mut states[0], x.clone()).expect("runs");
            let expected = expect[0].run(x);
            check(&ours.output, expected, format!("batch {index} of {size}"));
        }
    }
    let report = forward.report();
    assert_eq!(report.graphs_held, 2, "{report}");
    assert!(report.replayed >= 14, "{report}");
    let (x, _) = batch(&plain, 20, 64);
    let ours = forward.call(&mut states[1], x.clone()).expect("runs");
    assert!(!ours.path.is_graph(), "{}", ours.path);
    check(&ours.output, expect[1].run(x), "the other model".into());
    assert_eq!(forward.report().graphs_held, 0, "{}", forward.report());
    assert_same(&bits(&states[0].model()), &bits(&expect[0]), "unchanged");
}

/// [`Mlp`] with dropout.
#[derive(Module, Debug)]
pub struct Noisy {
    net: Mlp,
    dropout: Dropout,
}

impl Net for Noisy {
    fn make(device: &Device) -> Self {
        Self {
            net: Mlp::new(device),
            dropout: DropoutConfig::new(0.5).init(),
        }
    }
    fn run(&self, x: Tensor<2>) -> Tensor<2> {
        self.net.forward(self.dropout.forward(x))
    }
}

/// A training step's random numbers do not depend on how often the model is evaluated, even by a function that draws.
pub fn evaluation_leaves_random_numbers_alone(device: &Device) {
    let (device, model, twin) = twins_for::<Noisy>(device, &[64]);
    let run = |model: Noisy, evaluations: usize| {
        let training = Training::new(model, burn_cuda_graph::optim::SgdConfig::new().init());
        let mut step = GraphedStep::new(training, required(), closure::<Noisy, _>(&device, |_| {}))
            .expect("one device");
        step.shared().seed(99);
        let mut draws = GraphedFn::read_only(
            GraphConfig::new(),
            |training: &Training<Noisy>, (x, _): Batch| training.model().run(x).inner().sum(),
        );
        let mut drawn = Vec::new();
        for index in 0..14 {
            let given = batch(&device, index, 64);
            step.run(given.clone(), LR).expect("runs");
            for _ in 0..evaluations {
                let sum = draws.call(step.shared(), given.clone()).expect("runs");
                drawn.push(value(&sum.output));
            }
        }
        assert!(step.report().replayed >= 9, "{}", step.report());
        (bits(&step.state().into_model()), drawn)
    };
    let (alone, _) = run(model, 0);
    let (beside, drawn) = run(twin, 2);
    assert_same(&beside, &alone, "with evaluations between");
    let distinct: std::collections::HashSet<u32> = drawn.iter().map(|sum| sum.to_bits()).collect();
    assert!(distinct.len() > drawn.len() / 2, "masks repeat: {drawn:?}");
}
