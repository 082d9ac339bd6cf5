//! Bodies for what a replay would freeze: optimizers, rates, random numbers, accumulation, loss scaling. `device` is a
//! device with graphs, without autodiff, set up for random numbers.

use super::bodies::an_optimizer_replays;
use super::*;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::{ModuleMapper, ParamGroup};
use burn::nn::{Dropout, DropoutConfig};
use burn::optim::GradientsAccumulator;
use burn::tensor::{Distribution, FloatDType};
use burn_cuda_graph::optim::{self as ours, LossScaler, LossScalerConfig};
use burn_cuda_graph::{FallbackReason, StepError, StepState, with_random};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// A convolution, BatchNorm, dropout and a linear layer.
#[derive(Module, Debug)]
pub struct DropNet {
    net: BnNet,
    #[module(skip)]
    dropout: Dropout,
}

impl Net for DropNet {
    fn make(device: &Device) -> Self {
        Self {
            net: BnNet::make(device),
            dropout: DropoutConfig::new(0.3).init(),
        }
    }
    fn run(&self, x: Tensor<2>) -> Tensor<2> {
        self.net.run(self.dropout.forward(x))
    }
}

/// Pairs of an optimizer of ours and Burn's, by name.
pub fn optimizer(name: &str) -> (ModuleOptimizer, ModuleOptimizer) {
    use burn::grad_clipping::GradientClippingConfig::{Norm, Value};
    use burn::optim as burns;
    use burn::optim::decay::WeightDecayConfig;
    use burn::optim::momentum::MomentumConfig;
    let momentum = |nesterov| {
        Some(MomentumConfig {
            momentum: 0.9,
            dampening: 0.1,
            nesterov,
        })
    };
    let decay = || Some(WeightDecayConfig::new(0.01));
    macro_rules! pair {
        ($config:ident $(. $with:ident($value:expr))*) => {
            (
                ours::$config::new()$(.$with($value))*.init(),
                burns::$config::new()$(.$with($value))*.init(),
            )
        };
    }
    match name {
        "sgd" => pair!(SgdConfig),
        "sgd-momentum" => pair!(SgdConfig.with_momentum(momentum(false))),
        "sgd-nesterov-decay" => {
            pair!(
                SgdConfig
                    .with_momentum(momentum(true))
                    .with_weight_decay(decay())
            )
        }
        "adam" => pair!(AdamConfig),
        "adam-amsgrad-decay-clip" => pair!(
            AdamConfig
                .with_amsgrad(true)
                .with_weight_decay(decay())
                .with_grad_clipping(Some(Norm(0.5)))
        ),
        "adamw" => pair!(AdamWConfig),
        "adamw-cautious" => pair!(
            AdamWConfig
                .with_cautious_weight_decay(true)
                .with_weight_decay(0.01)
                .with_grad_clipping(Some(Value(0.01)))
        ),
        "rmsprop" => pair!(RmsPropConfig),
        "rmsprop-centered" => pair!(RmsPropConfig.with_centered(true)),
        "adagrad" => pair!(AdaGradConfig.with_lr_decay(0.01)),
        "adan" => pair!(AdanConfig.with_weight_decay(0.01)),
        "lion" => pair!(LionConfig.with_weight_decay(0.01)),
        "lamb" => pair!(LambConfig.with_weight_decay(0.01)),
        "adafactor" => pair!(AdafactorConfig),
        other => panic!("no optimizer is called {other}"),
    }
}

pub const OPTIMIZERS: [&str; 14] = [
    "sgd",
    "sgd-momentum",
    "sgd-nesterov-decay",
    "adam",
    "adam-amsgrad-decay-clip",
    "adamw",
    "adamw-cautious",
    "rmsprop",
    "rmsprop-centered",
    "adagrad",
    "adan",
    "lion",
    "lamb",
    "adafactor",
];

/// Muon for the matrices, SGD for the rest, as ours and as Burn's.
pub fn muon<M: Module>(model: &M) -> (ModuleOptimizer, ModuleOptimizer) {
    struct Matrices(Vec<ParamId>);
    impl ModuleVisitor for Matrices {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if D == 2 {
                self.0.push(param.id);
            }
        }
    }
    let mut matrices = Matrices(Vec::new());
    model.visit(&mut matrices);
    let group = || ParamGroup::from_ids(matrices.0.clone());
    (
        (ours::SgdConfig::new().init()).with_group(group(), ours::MuonConfig::new().build(), None),
        (SgdConfig::new().init()).with_group(group(), burn::optim::MuonConfig::new().build(), None),
    )
}

/// Case 3: every optimizer replays, at a rate that moves, and equals Burn's eager one.
pub fn every_optimizer_replays(device: &Device, names: &[&str], steps: usize) {
    for name in names {
        println!("{name}");
        // Norms over a whole tensor: CubeCL may sum them with atomics, which do not repeat their last bits on a card.
        let repeats = !matches!(*name, "lamb" | "adafactor");
        let (mine, theirs) = (|| optimizer(name).0, || optimizer(name).1);
        an_optimizer_replays::<Mlp>(device, steps, repeats, mine, theirs);
    }
}

/// The rate of the adaptive optimizers here, or the most of it.
const RATE: f64 = 0.01;

/// The step over an optimizer on a net that may draw random numbers, graphed, and its twin: the same closure on plain
/// Burn, under the same numbers.
struct Pair<M, S, F> {
    step: S,
    twin: Training<M>,
    plain: F,
    device: Device,
}

fn pair<M: Net>(
    device: &Device,
    config: GraphConfig,
    (mine, theirs): (ModuleOptimizer, ModuleOptimizer),
) -> Pair<M, GraphedStep<Training<M>, Batch, Tensor<1>, impl StepFn<M>>, impl StepFn<M>> {
    let (device, model, twin) = twins::<M>(device);
    let step = closure::<M, _>(&device, |_| {});
    Pair {
        step: GraphedStep::new(Training::new(model, mine), config, step).expect("one device"),
        twin: Training::new(twin, theirs),
        plain: closure::<M, _>(&device, |_| {}),
        device,
    }
}

impl<M: Net, F: StepFn<M>, P: StepFn<M>> Pair<M, GraphedStep<Training<M>, Batch, Tensor<1>, F>, P> {
    fn graphed(&mut self, index: usize, lr: f64) -> StepOutput<Tensor<1>> {
        let batch = batch(&self.device, index, 64);
        self.step.run(batch, lr).expect("runs")
    }
    fn eager(&mut self, index: usize, lr: f64) -> Tensor<1> {
        let (key, batch) = (self.step.random_key(), batch(&self.device, index, 64));
        with_random(&self.device, key, index as u64, || {
            (self.plain)(&mut self.twin, batch, lr.into())
        })
    }
    /// `steps`: how many of at most [`RATE`] were taken.
    #[track_caller]
    fn compare(&self, steps: usize, when: impl core::fmt::Display) {
        let (ours, theirs) = (bits(&self.step.model()), bits(self.twin.model()));
        assert_same_or_moved(&self.device, &ours, &theirs, RATE * steps as f64, when);
    }
}

/// Case 1: dropout draws a new mask in every step, at its rate, and the masks are those of the eager steps.
pub fn dropout_draws_new_masks(device: &Device, replays: usize) {
    let (device, model, twin) = twins::<Mlp>(device);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let dropout = DropoutConfig::new(0.5).init();
    let step_of = |t: &mut Training<Mlp>, (x, y): Batch, lr: StepRate| {
        let mask = dropout.forward(x.ones_like());
        let loss = loss.forward(t.model().forward(x * mask.clone()), y);
        t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
        mask.detach()
    };
    let sgd = || SgdConfig::new().init();
    let mut step =
        GraphedStep::new(Training::new(model, sgd()), required(), step_of).expect("one device");
    let (mut twin, key) = (Training::new(twin, sgd()), step.random_key());
    let (mut masks, mut kept) = (Vec::new(), 0usize);
    for index in 0..replays + 4 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        if index >= 4 {
            assert_eq!(word(&out), "replayed");
        }
        let mask: Vec<f32> = out.output.into_data().try_into_vec().expect("f32");
        kept += mask.iter().filter(|value| **value > 0.0).count();
        masks.push(mask);
        let expected = with_random(&device, key, index as u64, || {
            step_of(&mut twin, batch(&device, index, 64), LR.into())
        });
        let expected: Vec<f32> = expected.into_data().try_into_vec().expect("f32");
        assert_eq!(masks[index], expected, "the mask of step {index}");
        if index % 50 < 8 {
            let (ours, theirs) = (bits(&step.model()), bits(twin.model()));
            let when = format_args!("step {index}");
            assert_same_or_near(&device, &ours, &theirs, CUT_TOLERANCE, when);
        }
    }
    let drawn = masks.len() * 64 * 32;
    let sigma = (0.25 / drawn as f64).sqrt();
    let rate = kept as f64 / drawn as f64;
    assert!((rate - 0.5).abs() < 3.0 * sigma, "kept {rate}");
    masks.sort_by(|a, b| a.partial_cmp(b).expect("no NaN"));
    assert!(masks.windows(2).all(|pair| pair[0] != pair[1]));
}

/// Case 2: noise added to the input: the losses of 100 steps are the eager ones.
pub fn noise_in_the_step(device: &Device, steps: usize) {
    let (device, model, twin) = twins::<Mlp>(device);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let step_of = |t: &mut Training<Mlp>, (x, y): Batch, lr: StepRate| {
        let noise = x.random_like(Distribution::Normal(0.0, 0.1));
        let more = Tensor::<2>::random([64, 32], Distribution::Uniform(-0.1, 0.1), &x.device());
        let loss = loss.forward(t.model().forward(x + noise + more), y);
        t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
        loss
    };
    let sgd = || SgdConfig::new().init();
    let mut step =
        GraphedStep::new(Training::new(model, sgd()), required(), step_of).expect("one device");
    let (mut twin, key) = (Training::new(twin, sgd()), step.random_key());
    for index in 0..steps {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        let theirs = with_random(&device, key, index as u64, || {
            step_of(&mut twin, batch(&device, index, 64), LR.into())
        });
        let (ours, theirs) = (value(&out.output), value(&theirs));
        let near = match burn_cuda_graph::support(&device) {
            burn_cuda_graph::Support::Software => ours.to_bits() == theirs.to_bits(),
            _ => (ours - theirs).abs() <= CUT_TOLERANCE,
        };
        assert!(near, "loss of step {index}: {ours} and {theirs}");
    }
    assert_eq!(step.report().replayed as usize, steps - 4);
}

/// Steps of other shapes in between, which run eagerly, draw the numbers of their place in the run, and the same seed
/// gives the same run.
pub fn a_seed_decides_the_run(device: &Device) {
    let run = |seed: u64| {
        let (device, model, _) = twins::<DropNet>(device);
        device.clone().inner().seed(seed);
        let training = Training::new(model, SgdConfig::new().init());
        let step = closure::<DropNet, _>(&device, |_| {});
        let mut step = GraphedStep::new(training, GraphConfig::new(), step).expect("one device");
        let losses: Vec<u32> = (0..12)
            .map(|index| {
                let size = if index == 7 { 40 } else { 64 };
                let out = step.run(batch(&device, index, size), LR).expect("runs");
                value(&out.output).to_bits()
            })
            .collect();
        assert!(step.report().replayed >= 7, "{}", step.report());
        losses
    };
    // The first run tunes.
    run(1);
    let (one, again, other) = (run(5), run(5), run(6));
    assert_eq!(one, again);
    assert_ne!(one, other);
}

/// Case 4: a cosine schedule after a linear warm-up, one graph for all of it; a rate of zero leaves every bit.
pub fn a_schedule_replays(device: &Device) {
    let mut cosine = CosineAnnealingLrSchedulerConfig::new(RATE, 12)
        .init()
        .expect("a schedule");
    let rates: Vec<f64> = (1..=6)
        .map(|step| RATE * f64::from(step) / 6.0)
        .chain((0..10).map(|_| cosine.step().base()))
        .chain([0.0, RATE])
        .collect();
    for compare in [false, true] {
        let mut pair = pair::<Mlp>(device, required(), optimizer("adam"));
        for (index, rate) in rates.iter().enumerate() {
            let before = bits(&pair.step.model());
            let out = pair.graphed(index, *rate);
            pair.eager(index, *rate);
            let after = bits(&pair.step.model());
            if compare {
                pair.compare(index + 1, format_args!("step {index}"));
            }
            if index >= 6 {
                assert_eq!(word(&out), "replayed", "step {index}");
            }
            assert_eq!(*rate == 0.0, before == after, "step {index}");
        }
        assert_eq!(pair.step.report().captures, 1);
    }
}

/// Rates by parameter group follow their schedules through replays.
pub fn rates_by_group_replay(device: &Device) {
    for compare in [false, true] {
        let mut pair = pair::<Mlp>(device, required(), optimizer("adamw"));
        let group = || ParamGroup::from_predicate("output");
        let scheduler = || ModuleLrScheduler::new(RATE).with_group(group(), 0.005);
        for index in 0..10 {
            // The base rate moves, the group's does not; in step 7 they meet.
            let base = if index == 7 {
                0.005
            } else {
                RATE / (1.0 + index as f64)
            };
            let mut schedule = scheduler();
            if index > 0 {
                schedule = ModuleLrScheduler::new(base).with_group(group(), 0.005);
            }
            let rates = schedule.step();
            let batch_of = |device: &Device| batch(device, index, 64);
            let out = pair
                .step
                .run(batch_of(&pair.device), rates.clone())
                .expect("runs");
            let (x, y) = batch_of(&pair.device);
            let loss = CrossEntropyLossConfig::new().init(&pair.device);
            let loss = loss.forward(pair.twin.model().run(x), y);
            let grads = GradientsParams::from_grads(loss.backward(), pair.twin.model());
            pair.twin.optimize(rates, grads);
            if compare {
                pair.compare(index + 1, format_args!("step {index}"));
            }
            match index {
                7 => assert_eq!(word(&out), "warming-up", "equal rates are another key"),
                6 | 8 | 9 => assert_eq!(word(&out), "replayed", "step {index}"),
                _ => {}
            }
        }
    }
}

/// A rate that the step scales is followed; one whose number it asks for is baked in, and named.
pub fn scaled_and_read_rates(device: &Device) {
    for (read, compare) in [(false, false), (false, true), (true, true)] {
        let (device, model, twin) = twins::<Mlp>(device);
        let (mine, theirs) = optimizer("adam");
        let loss = CrossEntropyLossConfig::new().init(&device);
        let step_of = |t: &mut Training<Mlp>, (x, y): Batch, lr: StepRate| {
            let loss = loss.forward(t.model().forward(x), y);
            let grads = GradientsParams::from_grads(loss.backward(), t.model());
            match read {
                true => t.optimize(lr.value().min(0.02) * 0.5, grads),
                false => t.optimize(lr * 0.5, grads),
            }
            loss
        };
        let mut twin = Training::new(twin, theirs);
        let mut step = GraphedStep::new(Training::new(model, mine), GraphConfig::new(), step_of)
            .expect("one device");
        let mut words = Vec::new();
        for index in 0..10 {
            let rate = if index < 7 { RATE } else { 0.03 };
            let out = step.run(batch(&device, index, 64), rate).expect("runs");
            words.push(word(&out));
            step_of(&mut twin, batch(&device, index, 64), rate.into());
            if compare {
                let (ours, theirs) = (bits(&step.model()), bits(twin.model()));
                let when = format_args!("step {index} {words:?}");
                let moved = 3.0 * RATE * (index + 1) as f64;
                assert_same_or_moved(&device, &ours, &theirs, moved, when);
            }
        }
        match read {
            true => {
                assert_eq!(words[7], "learning-rate-moved", "{words:?}");
                assert!(words[..7].contains(&"replayed"), "{words:?}");
            }
            false => assert_eq!(words[7..], ["replayed"; 3], "{words:?}"),
        }
    }
}

/// Case 5: other hyper-parameters between two steps: recorded anew, counted, and right.
pub fn changed_hyper_parameters(device: &Device) {
    for compare in [false, true] {
        let mut pair = pair::<Mlp>(device, required(), optimizer("adam"));
        for index in 0..16 {
            if index == 8 {
                pair.step
                    .update_state(|training| {
                        let (model, optimizer) = training.into_parts();
                        let changed = ours::AdamConfig::new().with_beta_1(0.8).init();
                        Training::new(model, changed.load_record(optimizer.to_record()))
                    })
                    .expect("stays on the device");
                let (model, optimizer) = pair.twin.into_parts();
                let changed = burn::optim::AdamConfig::new().with_beta_1(0.8).init();
                pair.twin = Training::new(model, changed.load_record(optimizer.to_record()));
            }
            pair.graphed(index, RATE);
            pair.eager(index, RATE);
            if compare {
                pair.compare(index + 1, format_args!("step {index}"));
            }
        }
        let report = pair.step.report();
        assert_eq!((report.captures, report.invalidations), (2, 1), "{report}");
    }
}

/// Case 9: four micro-batches and one apply, as two recordings over shared sums, equal Burn's accumulator.
pub fn accumulation_replays(device: &Device) {
    for compare in [false, true] {
        let (device, model, twin) = twins::<Mlp>(device);
        let (mine, mut theirs) = optimizer("adam");
        let loss = CrossEntropyLossConfig::new().init(&device);
        let mut twin = twin;
        let mut step = GraphedStep::new(
            Training::new(model, mine),
            GraphConfig::new(),
            |t: &mut Training<Mlp>, micro: Option<Batch>, lr: StepRate| match micro {
                Some((x, y)) => {
                    let loss = loss.forward(t.model().forward(x), y) / 4.0;
                    let grads = GradientsParams::from_grads(loss.backward(), t.model());
                    t.accumulate(grads);
                    Some(loss)
                }
                None => {
                    t.apply(lr);
                    None
                }
            },
        )
        .expect("one device");
        let mut accumulator = GradientsAccumulator::new();
        let mut words = Vec::new();
        for round in 0..8 {
            let rate = 0.01 / (1.0 + round as f64);
            for micro in 0..4 {
                let index = round * 4 + micro;
                let out = step
                    .run(Some(batch(&device, index, 64)), rate)
                    .expect("runs");
                words.push(word(&out));
                let (x, y) = batch(&device, index, 64);
                let out = loss.forward(twin.run(x), y) / 4.0;
                let grads = GradientsParams::from_grads(out.backward(), &twin);
                accumulator.accumulate(&twin, grads);
            }
            let out = step.run(None, rate).expect("runs");
            words.push(word(&out));
            twin = theirs.step(rate, twin, accumulator.grads());
            if compare {
                let (ours, theirs) = (bits(&step.model()), bits(&twin));
                let when = format_args!("round {round} {words:?}");
                let moved = RATE * (round + 1) as f64;
                assert_same_or_moved(&device, &ours, &theirs, moved, when);
            }
        }
        let report = step.report();
        assert_eq!(
            words[words.len() - 10..],
            ["replayed"; 10],
            "{words:?} {report}"
        );
        assert_eq!(step.report().graphs_held, 2, "{}", step.report());
    }
}

/// Case 11: saved after replays, loaded into plain Burn, and the reverse; the next ten steps are the same bits.
pub fn checkpoints_resume(device: &Device, name: &str) {
    for compare in [false, true] {
        let mut pair = pair::<Mlp>(device, required(), optimizer(name));
        for index in 0..14 {
            pair.graphed(index, RATE);
            pair.eager(index, RATE);
        }
        assert!(pair.step.report().replayed >= 8);
        let state = pair.step.state();
        let saved = (
            state.model().clone().into_record(),
            state.optimizer().into_bytes().expect("bytes"),
        );
        let (twin, optimizer_of_twin) = pair.twin.into_parts();
        let theirs = (
            twin.into_record(),
            optimizer_of_twin.into_bytes().expect("bytes"),
        );
        // Ours into plain Burn.
        let fresh = Mlp::make(&pair.device).load_record(saved.0);
        let loaded = optimizer(name).1.from_bytes(saved.1);
        pair.twin = Training::new(fresh, loaded.expect("Burn reads it"));
        // Plain Burn's into ours.
        let model = Mlp::make(&pair.device).load_record(theirs.0);
        let loaded = optimizer(name).0.from_bytes(theirs.1).expect("we read it");
        let mut resumed = GraphedStep::new(
            Training::new(model, loaded),
            required(),
            closure::<Mlp, _>(&pair.device, |_| {}),
        )
        .expect("one device");
        for index in 14..24 {
            pair.graphed(index, RATE);
            pair.eager(index, RATE);
            resumed
                .run(batch(&pair.device, index, 64), 0.01)
                .expect("runs");
            if compare {
                pair.compare(index + 1, format_args!("step {index}"));
                let (live, other) = (bits(&pair.step.model()), bits(&resumed.model()));
                let (when, moved) = (format_args!("step {index}, resumed"), RATE * index as f64);
                assert_same_or_moved(&pair.device, &live, &other, moved, when);
            }
        }
        assert!(resumed.report().replayed >= 5, "{}", resumed.report());
    }
}

/// A resumed run draws the random numbers that the interrupted one would have drawn.
pub fn random_numbers_resume(device: &Device) {
    let mut whole = pair::<DropNet>(device, required(), optimizer("sgd"));
    for index in 0..8 {
        whole.graphed(index, LR);
    }
    let (key, steps) = (whole.step.random_key(), whole.step.steps_taken());
    let model = whole.step.model();
    let mut resumed = GraphedStep::new(
        Training::new(model, optimizer("sgd").0),
        required(),
        closure::<DropNet, _>(&whole.device, |_| {}),
    )
    .expect("one device");
    resumed.seed(key);
    resumed.resume_at(steps);
    for index in 8..16 {
        let out = whole.graphed(index, LR);
        let other = resumed
            .run(batch(&whole.device, index, 64), LR)
            .expect("runs");
        assert_eq!(
            value(&out.output).to_bits(),
            value(&other.output).to_bits(),
            "step {index}"
        );
    }
    assert!(resumed.report().replayed > 3);
}

/// Case 20: a batch with an infinity under loss scaling: parameters, moments and step counts stay as they are, the scale
/// falls, and the next step is an ordinary one. The eager twin decides on the host.
pub fn an_overflow_is_skipped(device: &Device, name: &str) {
    let config = LossScalerConfig::new()
        .with_init_scale(1024.0)
        .with_growth_interval(5);
    for compare in [false, true] {
        let (device, model, twin) = twins::<Mlp>(device);
        let (mine, mut theirs) = optimizer(name);
        let loss = CrossEntropyLossConfig::new().init(&device);
        let mut twin = twin;
        let mut step = GraphedStep::new(
            (Training::new(model, mine), config.init(&device)),
            required(),
            |(t, scaler): &mut (Training<Mlp>, LossScaler), (x, y): Batch, lr| {
                let loss = loss.forward(t.model().forward(x), y);
                let grads = scaler.scale(loss.clone()).backward();
                let grads = GradientsParams::from_grads(grads, t.model());
                t.optimize_scaled(lr, grads, scaler);
                loss
            },
        )
        .expect("one device");
        let (mut scale, mut good) = (1024.0f32, 0);
        for index in 0..20 {
            let (x, y) = batch(&device, index, 64);
            // The first step of all is skipped, too: there is no state yet then.
            let overflows = matches!(index, 0 | 9 | 14);
            let x = if overflows { x * f32::INFINITY } else { x };
            let before = step.state();
            step.run((x.clone(), y.clone()), 0.01).expect("runs");
            let after = step.state();
            if overflows {
                let saved = |training: &Training<Mlp>| training.optimizer().to_record().len();
                match index {
                    0 => assert_eq!((saved(&before.0), saved(&after.0)), (0, 0), "no state yet"),
                    _ => {
                        let (old, new) = (state_bytes(&before.0), state_bytes(&after.0));
                        assert!(old.len() > 4 && old == new, "state of step {index}");
                    }
                }
                let (old, new) = (bits(before.0.model()), bits(after.0.model()));
                assert_same(&new, &old, format_args!("skipped step {index}"));
                scale *= 0.5;
                good = 0;
            } else {
                let out = loss.forward(twin.run(x), y);
                let grads = GradientsParams::from_grads((out * scale).backward(), &twin);
                let (grads, _) = LossScalerConfig::fixed(f64::from(scale))
                    .init(&device)
                    .unscale(&twin, grads);
                twin = theirs.step(0.01, twin, grads);
                good += 1;
                if good == 5 {
                    scale *= 2.0;
                    good = 0;
                }
                if compare {
                    let (ours, theirs) = (bits(after.0.model()), bits(&twin));
                    let (when, moved) = (format_args!("step {index}"), RATE * (index + 1) as f64);
                    assert_same_or_moved(&device, &ours, &theirs, moved, when);
                }
            }
            let now = value(&after.1.current());
            assert_eq!(now, scale, "the scale after step {index}");
        }
        assert!(step.report().replayed >= 12, "{}", step.report());
    }
}

/// Verification lets right replays pass, and names the parameter and the operations of a wrong one; training goes on
/// from what the eager step left.
pub fn verification_finds_a_frozen_value(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let factor = Rc::new(Cell::new(0.5f32));
    let seen = factor.clone();
    let criterion = loss.clone();
    let mut step = GraphedStep::new(
        Training::new(model, optimizer("adam").0),
        GraphConfig::new().verify(3),
        move |t: &mut Training<Mlp>, (x, y): Batch, lr| {
            let loss = criterion.forward(t.model().forward(x * seen.get()), y);
            t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
            loss
        },
    )
    .expect("one device");
    let (mut twin, mut theirs) = (twin, optimizer("adam").1);
    let mut found = None;
    for index in 0..20 {
        if index == 12 {
            factor.set(0.25);
        }
        let frozen = step.run(batch(&device, index, 64), 0.01);
        let (x, y) = batch(&device, index, 64);
        let out = loss.forward(twin.run(x * factor.get()), y);
        let grads = GradientsParams::from_grads(out.backward(), &twin);
        twin = theirs.step(0.01, twin, grads);
        match frozen {
            Ok(out) if index > 14 => assert_eq!(word(&out), "not-verified"),
            Ok(_) => {}
            Err(StepError::Verification(mismatch)) => {
                assert!(found.is_none(), "once is enough");
                assert!((12..15).contains(&index), "step {index}");
                found = Some(mismatch);
                // What the eager step left from the replayed state before.
                assert!(matches!(
                    step.report().last_refusal,
                    Some(FallbackReason::NotVerified(_))
                ));
            }
            Err(other) => panic!("step {index}: {other}"),
        }
    }
    let mismatch = found.expect("the frozen factor was found");
    assert_eq!(mismatch.name, "hidden.weight", "{mismatch}");
    assert!(mismatch.differing > 0 && mismatch.first_index <= mismatch.last_index);
    assert!(step.report().replayed >= 6, "{}", step.report());
}

/// Parameters that some steps give no gradient: such steps are keys of their own, and the others' counters stay theirs.
pub fn parameters_without_gradients(device: &Device) {
    for compare in [false, true] {
        let (device, model, twin) = twins::<Mlp>(device);
        let (mine, mut theirs) = optimizer("adam");
        let loss = CrossEntropyLossConfig::new().init(&device);
        let mut twin = twin;
        let grads_of = |model: &Mlp, out: Tensor<1>, head: bool| {
            let mut grads = out.backward();
            match head {
                true => {
                    let ids = model.output_ids();
                    GradientsParams::from_params(&mut grads, model, &ids)
                }
                false => GradientsParams::from_grads(grads, model),
            }
        };
        let mut step = GraphedStep::new(
            Training::new(model, mine),
            required(),
            |t: &mut Training<Mlp>, (head, (x, y)): (bool, Batch), lr| {
                let loss = loss.forward(t.model().forward(x), y);
                let grads = grads_of(t.model(), loss.clone(), head);
                t.optimize(lr, grads);
                loss
            },
        )
        .expect("one device");
        let mut replayed = 0;
        for index in 0..24 {
            let head = index % 3 == 2;
            let out = step
                .run((head, batch(&device, index, 64)), 0.01)
                .expect("runs");
            replayed += usize::from(word(&out) == "replayed");
            let (x, y) = batch(&device, index, 64);
            let out = loss.forward(twin.run(x), y);
            let grads = grads_of(&twin, out, head);
            twin = theirs.step(0.01, twin, grads);
            if compare {
                let (ours, theirs) = (bits(&step.model()), bits(&twin));
                let (when, moved) = (format_args!("step {index}"), RATE * (index + 1) as f64);
                assert_same_or_moved(&device, &ours, &theirs, moved, when);
            }
        }
        assert_eq!(step.report().captures, 2, "{}", step.report());
        assert!(replayed >= 8, "{replayed}");
        // The counters are in the record: three more steps of plain Burn, from ours and from its own.
        let state = step.state();
        let mut reloaded = optimizer("adam").1;
        let record = state.optimizer().into_bytes().expect("bytes");
        reloaded = reloaded.from_bytes(record).expect("Burn reads it");
        let mut model = state.into_model();
        for index in 24..27 {
            for (model, optimizer) in [(&mut model, &mut reloaded), (&mut twin, &mut theirs)] {
                let (x, y) = batch(&device, index, 64);
                let out = loss.forward(model.run(x), y);
                let grads = grads_of(model, out, false);
                *model = optimizer.step(0.01, model.clone(), grads);
            }
        }
        if compare {
            let (ours, theirs) = (bits(&model), bits(&twin));
            assert_same_or_moved(&device, &ours, &theirs, RATE * 27.0, "after reloading");
        }
    }
}

/// The bytes of every tensor of a state.
pub fn state_bytes(state: &impl StepState) -> Vec<Vec<u8>> {
    let mut bytes = Vec::new();
    state.visit_state(&mut |tensor| {
        let data = tensor.into_float::<1>().into_data();
        bytes.push(data.as_bytes().to_vec());
    });
    bytes
}

/// Half precision under dynamic loss scaling: the first steps overflow and are skipped, the scale falls until they do not,
/// and the net trains; replays are the bits of the same step unrecorded.
pub fn half_precision_trains(device: &Device, dtype: FloatDType) {
    if !device.supports_dtype(dtype) {
        // A software driver may lack a half precision; a card with hardware graphs has both.
        let software = burn_cuda_graph::Support::Software;
        assert_eq!(burn_cuda_graph::support(device), software, "{dtype:?}");
        println!("{device:?} has no {dtype:?}: not run");
        return;
    }
    let (device, model, _) = twins::<Mlp>(device);
    let model = model.map(&mut Cast(dtype));
    let twin = model.valid().train();
    let loss = CrossEntropyLossConfig::new().init(&device);
    let scaler = || {
        LossScalerConfig::new()
            .with_init_scale(f64::powi(2.0, 127))
            .with_backoff_factor(f64::powi(2.0, -20))
            .with_growth_interval(8)
            .init(&device)
    };
    let step_of = |(t, scaler): &mut (Training<Mlp>, LossScaler), (x, y): Batch, lr: StepRate| {
        let out = t.model().forward(x.cast(dtype)).cast(FloatDType::F32);
        let loss = loss.forward(out, y);
        let grads = scaler.scale(loss.clone()).backward();
        let grads = GradientsParams::from_grads(grads, t.model());
        t.optimize_scaled(lr, grads, scaler);
        loss
    };
    let make = |model: Mlp, config: GraphConfig| {
        let optimizer = ours::AdamConfig::new().with_epsilon(1e-3).init();
        let state = (Training::new(model, optimizer), scaler());
        GraphedStep::new(state, config, step_of).expect("one device")
    };
    let mut step = make(model, required());
    let mut twin = make(twin, GraphConfig::new().with_warmup(u32::MAX));
    let mut losses = Vec::new();
    for index in 0..40 {
        let input = || {
            let (x, y) = batch(&device, index % 8, 64);
            // One batch overflows in any precision.
            (if index == 20 { x * f32::INFINITY } else { x }, y)
        };
        let out = step.run(input(), 0.01).expect("runs");
        twin.run(input(), 0.01).expect("runs");
        if index != 20 {
            losses.push(value(&out.output));
        }
        let (ours, theirs) = (state_bytes(&step.state()), state_bytes(&twin.state()));
        assert!(ours == theirs, "step {index}");
    }
    let scale = value(&step.state().1.current());
    assert!(scale < f32::powi(2.0, 120), "no step overflowed: {scale:e}");
    assert!(
        losses[38] < losses[0] * 0.9 && losses.iter().all(|loss| loss.is_finite()),
        "{losses:?}"
    );
    assert!(step.report().replayed >= 30, "{}", step.report());
}

struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let cast = Tensor::from_inner(tensor.inner().cast(self.0)).require_grad();
        Param::from_mapped_value(id, cast, mapper)
    }
}

/// L-BFGS reads the device to decide what to run next: such a step is never a graph, says why, and is right.
pub fn lbfgs_stays_eager(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let optimizer = || {
        let config = burn::optim::LBFGSConfig::new().with_max_iter(3);
        Rc::new(RefCell::new(config.init()))
    };
    let step_of = |optimizer: Rc<RefCell<burn::optim::LBFGS>>| {
        let loss = loss.clone();
        move |t: &mut Training<Mlp>, (x, y): Batch, lr: StepRate| {
            let rate = lr.value();
            t.update(|model, _| {
                let evaluate = |model: Mlp| {
                    let loss = loss.forward(model.forward(x.clone()), y.clone());
                    let now = f64::from(value(&loss));
                    (now, GradientsParams::from_grads(loss.backward(), &model))
                };
                optimizer.borrow_mut().step(rate, model, evaluate).0
            });
        }
    };
    let sgd = || SgdConfig::new().init();
    let training = Training::new(model, sgd());
    let mut step =
        GraphedStep::new(training, GraphConfig::new(), step_of(optimizer())).expect("one device");
    let (plain, mut twin) = (step_of(optimizer()), Training::new(twin, sgd()));
    let mut words = Vec::new();
    for index in 0..10 {
        let out = step.run(batch(&device, 0, 64), 0.05).expect("runs");
        words.push(word(&out));
        plain(&mut twin, batch(&device, 0, 64), 0.05.into());
        let (ours, theirs) = (bits(&step.model()), bits(twin.model()));
        let when = format_args!("step {index} {words:?}");
        // Its line search turns last bits into other steps.
        assert_same_or_near(&device, &ours, &theirs, 2e-2, when);
    }
    assert_eq!(step.report().captures, 0, "{words:?}");
    assert!(!step.report().refusals.is_empty(), "{words:?}");
}

/// Clipping by the global norm, decided on the device, replays.
pub fn global_norm_clipping_replays(device: &Device) {
    for compare in [false, true] {
        let (device, model, twin) = twins::<Mlp>(device);
        let loss = CrossEntropyLossConfig::new().init(&device);
        let step_of = |t: &mut Training<Mlp>, (x, y): Batch, lr: StepRate| {
            let loss = loss.forward(t.model().forward(x), y);
            let grads = GradientsParams::from_grads(loss.backward(), t.model());
            let (grads, norm) = ours::clip_by_global_norm(t.model(), grads, 0.1);
            t.optimize(lr, grads);
            norm
        };
        let (mine, theirs) = optimizer("sgd-momentum");
        let mut step =
            GraphedStep::new(Training::new(model, mine), required(), step_of).expect("one device");
        let mut twin = Training::new(twin, theirs);
        let mut norms = Vec::new();
        for index in 0..12 {
            let out = step.run(batch(&device, index, 64), LR).expect("runs");
            let theirs = step_of(&mut twin, batch(&device, index, 64), LR.into());
            norms.push(value(&out.output));
            if compare {
                let (ours, theirs) = (
                    (bits(&step.model()), norms[index]),
                    (bits(twin.model()), value(&theirs)),
                );
                let when = format_args!("step {index}");
                assert_same_or_near(&device, &ours.0, &theirs.0, CUT_TOLERANCE, when);
                assert!(
                    (ours.1 - theirs.1).abs() <= CUT_TOLERANCE * theirs.1.max(1.0),
                    "{when}"
                );
            }
        }
        // It clips, and the norms are those of different steps.
        assert!(norms.iter().all(|norm| *norm > 0.1), "{norms:?}");
        assert!(norms.windows(2).all(|pair| pair[0] != pair[1]));
        assert!(step.report().replayed >= 7);
    }
}
