//! Steps that a recording would freeze in one place or another, each against the same step that never records: every
//! tensor of the state and every step count after every step. `device` is a device with graphs, without autodiff.

use super::state_bodies::{optimizer, state_bytes};
use super::*;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::ParamGroup;
use burn_cuda_graph::optim as ours;
use burn_cuda_graph::{AnyTensor, LearningRates, StepError, StepState, TensorTree};
use std::cell::Cell;

/// Every tensor and every counter.
fn everything(state: &impl StepState) -> (Vec<Vec<u8>>, Vec<u64>) {
    state.settle();
    let mut counts = Vec::new();
    state.visit_clocks(&mut |_, count| counts.extend(count));
    (state_bytes(state), counts)
}

/// What all rates of a run here add up to, at least.
const MOVED: f32 = 0.2;

/// The largest difference of two values.
fn apart(ours: &[Vec<u8>], theirs: &[Vec<u8>]) -> f32 {
    let value = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("four bytes"));
    let (ours, theirs) = (ours.concat(), theirs.concat());
    assert_eq!(ours.len(), theirs.len());
    (ours.chunks_exact(4).zip(theirs.chunks_exact(4)))
        .map(|(a, b)| (value(a) - value(b)).abs())
        .fold(0.0, |most, now| {
            if now > most || now.is_nan() {
                now
            } else {
                most
            }
        })
}

/// Run the step made by `make` graphed and unrecorded; the words of the graphed one.
fn run<S, B, O, F, L>(
    make: impl Fn(GraphConfig) -> GraphedStep<S, B, O, F>,
    batches: impl Fn(usize) -> B,
    rate: impl Fn(usize) -> L,
    steps: usize,
    between: impl Fn(usize, &mut GraphedStep<S, B, O, F>),
) -> Vec<&'static str>
where
    S: StepState,
    B: TensorTree,
    O: TensorTree,
    F: Fn(&mut S, B, StepRate) -> O,
    L: Into<LearningRates>,
{
    let mut words = Vec::new();
    // The first pass tunes.
    for compare in [false, true] {
        let mut step = make(GraphConfig::new());
        let mut unrecorded = make(GraphConfig::new().with_warmup(u32::MAX));
        words.clear();
        for index in 0..steps {
            let out = step.run(batches(index), rate(index)).expect("runs");
            words.push(word(&out));
            unrecorded.run(batches(index), rate(index)).expect("runs");
            between(index, &mut step);
            if compare {
                let (ours, theirs) = (everything(&step.state()), everything(&unrecorded.state()));
                assert_eq!(ours.1, theirs.1, "counts of step {index} {words:?}");
                // The step that drops its graphs runs as plain Burn does, with its scalars in the launches, where the
                // other one reads them from the device: on a card another kernel (see `assert_same_or_moved`).
                match step.support() {
                    burn_cuda_graph::Support::Software => {
                        assert!(ours.0 == theirs.0, "step {index} {words:?}");
                    }
                    _ => assert!(apart(&ours.0, &theirs.0) <= MOVED, "step {index} {words:?}"),
                }
            }
        }
    }
    words
}

fn adam() -> ModuleOptimizer {
    ours::AdamConfig::new().init()
}

fn update(t: &mut Training<Mlp>, loss: &CrossEntropyLoss, (x, y): Batch) -> GradientsParams {
    let loss = loss.forward(t.model().forward(x), y);
    GradientsParams::from_grads(loss.backward(), t.model())
}

type Step<S, B> = GraphedStep<S, B, (), Box<dyn Fn(&mut S, B, StepRate)>>;

fn graphed_over<S, B>(
    state: S,
    config: GraphConfig,
    step: impl Fn(&mut S, B, StepRate) + 'static,
) -> Step<S, B>
where
    S: StepState,
    B: TensorTree,
{
    GraphedStep::new(state, config, Box::new(step) as Box<_>).expect("one device")
}

/// An ordinary step over Adam.
fn adam_step(device: &Device, model: &Mlp, config: GraphConfig) -> Step<Training<Mlp>, Batch> {
    let loss = CrossEntropyLossConfig::new().init(device);
    let training = Training::new(model.valid().train(), adam());
    graphed_over(training, config, move |t, batch: Batch, lr| {
        let grads = update(t, &loss, batch);
        t.optimize(lr, grads);
    })
}

/// Counters that agree while a step is recorded and part later: the scalar they shared must not go on for both.
pub fn counts_that_part_after_recording(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let make = |config| {
        let loss = CrossEntropyLossConfig::new().init(&device);
        let training = Training::new(model.valid().train(), adam());
        graphed_over(
            training,
            config,
            move |t, (head, batch): (bool, Batch), lr| {
                let mut grads = update(t, &loss, batch);
                if head {
                    let mut some = GradientsParams::new();
                    let [weight, bias] = t.model().output_ids()[..] else {
                        panic!("two parameters")
                    };
                    some.register(weight, grads.remove::<2>(weight).expect("a gradient"));
                    some.register(bias, grads.remove::<1>(bias).expect("a gradient"));
                    grads = some;
                }
                t.optimize(lr, grads);
            },
        )
    };
    let batches = |index: usize| ((6..9).contains(&index), batch(&device, index, 64));
    let words = run(make, batches, |_| 0.01, 18, |_, _| {});
    assert_eq!(words[5], "replayed", "{words:?}");
    assert_eq!(words[17], "replayed", "{words:?}");
}

/// One part of the state is cloned over another in some steps: their counts are not mixed up.
pub fn a_part_cloned_over_another(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let make = |config| {
        let loss = CrossEntropyLossConfig::new().init(&device);
        let training = || Training::new(model.valid().train(), adam());
        let state = (training(), training());
        graphed_over(state, config, move |s, (sync, batch): (bool, Batch), lr| {
            let grads = update(&mut s.0, &loss, batch);
            s.0.optimize(lr, grads);
            if sync {
                s.1 = s.0.clone();
            }
        })
    };
    let batches = |index: usize| (index % 5 == 4, batch(&device, index, 64));
    let words = run(make, batches, |_| 0.01, 26, |_, _| {});
    assert!(words.contains(&"replaced-counters"), "{words:?}");
}

/// Dropping the graphs counts no step twice.
pub fn released_graphs_count_once(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let make = |config| adam_step(&device, &model, config);
    let release = |index: usize, step: &mut Step<Training<Mlp>, Batch>| {
        if index == 8 {
            step.release();
        }
    };
    let batches = |index| batch(&device, index, 64);
    let words = run(make, batches, |_| 0.01, 16, release);
    assert_eq!((words[8], words[15]), ("replayed", "replayed"), "{words:?}");
}

/// An optimizer reloaded by a step of another key: graphs over the old one are not replayed.
pub fn an_optimizer_reloaded_in_a_step(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    for other_betas in [false, true] {
        let make = |config| {
            let loss = CrossEntropyLossConfig::new().init(&device);
            let training = Training::new(model.valid().train(), adam());
            graphed_over(
                training,
                config,
                move |t, (reload, batch): (bool, Batch), lr| {
                    let grads = update(t, &loss, batch);
                    t.optimize(lr, grads);
                    if reload {
                        t.update(|model, optimizer| {
                            let record = optimizer.to_record();
                            let fresh = match other_betas {
                                true => ours::AdamConfig::new().with_beta_1(0.5).init(),
                                false => optimizer.clone(),
                            };
                            *optimizer = fresh.load_record(record);
                            model
                        });
                    }
                },
            )
        };
        let batches = |index: usize| (index == 8, batch(&device, index, 64));
        let words = run(make, batches, |_| 0.01, 18, |_, _| {});
        assert_eq!((words[7], words[17]), ("replayed", "replayed"), "{words:?}");
    }
}

/// A rate of the closure's own that moves is refused by name, though our optimizer keeps it off the launches.
pub fn an_own_rate_that_moves(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let make = |config| {
        let loss = CrossEntropyLossConfig::new().init(&device);
        let training = Training::new(model.valid().train(), optimizer("sgd-momentum").0);
        let calls = Cell::new(0);
        graphed_over(training, config, move |t, batch: Batch, _lr| {
            calls.set(calls.get() + 1);
            let grads = update(t, &loss, batch);
            t.optimize(0.05 / f64::from(calls.get()), grads);
        })
    };
    let batches = |index| batch(&device, index, 64);
    let words = run(make, batches, |_| 0.01, 10, |_, _| {});
    assert!(!words.contains(&"recorded"), "{words:?}");
    assert_eq!(words[9], "moving-scalar", "{words:?}");
}

/// Arithmetic and branches on the numbers of a rate are not lost: such a step has its rate in the key.
pub fn arithmetic_on_a_rate(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let kinds: [fn(f64) -> f64; 5] = [
        |rate| rate * 0.5,
        |rate| rate + 0.001,
        |rate| rate.min(0.02),
        |rate| rate.max(0.02),
        |rate| if rate > 0.02 { 0.001 } else { rate },
    ];
    for change in kinds {
        let make = |config| {
            let loss = CrossEntropyLossConfig::new().init(&device);
            let training = Training::new(model.valid().train(), adam());
            graphed_over(training, config, move |t, batch: Batch, lr: StepRate| {
                let grads = update(t, &loss, batch);
                t.optimize(change(lr.module().base()), grads);
            })
        };
        let rate = |index: usize| if index < 7 { 0.01 } else { 0.03 };
        let words = run(make, |index| batch(&device, index, 64), rate, 13, |_, _| {});
        assert_eq!((words[6], words[12]), ("replayed", "replayed"), "{words:?}");
        assert_eq!(words[7], "learning-rate-moved", "{words:?}");
    }
}

/// A model's own `optimize` that halves its rate, and a schedule that moves at every step: never twice the rate.
pub fn an_own_optimize_that_halves(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let (mine, theirs) = optimizer("sgd-momentum");
    let mut step = GraphedStep::from_train_step(Training::new(model, mine), GraphConfig::new())
        .expect("one device");
    let mut twin = Training::new(twin, theirs);
    let loss = CrossEntropyLossConfig::new().init(&device);
    for index in 0..14 {
        let rate = if index < 10 {
            0.05
        } else {
            0.05 / index as f64
        };
        let out = step.run(batch(&device, index, 64), rate).expect("runs");
        assert_eq!(
            out.path.is_graph(),
            (4..10).contains(&index),
            "step {index}"
        );
        let grads = update(&mut twin, &loss, batch(&device, index, 64));
        twin.optimize(rate * 0.5, grads);
        let (ours, theirs) = (bits(&step.model()), bits(twin.model()));
        assert_same_or_near(
            &device,
            &ours,
            &theirs,
            CUT_TOLERANCE,
            format_args!("{index}"),
        );
    }
}

/// A batch that was computed on the autodiff device is recorded like any other.
pub fn a_batch_on_the_tape(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let make = |config| adam_step(&device, &model, config);
    let batches = |index| {
        let (x, y) = batch(&device, index, 64);
        ((x - 0.1) / 0.3, y)
    };
    let words = run(make, batches, |_| 0.01, 9, |_, _| {});
    assert_eq!(words[8], "replayed", "{words:?}");
}

/// A state that forwards to a training, but names no parameters.
#[derive(Clone)]
struct Nameless(Training<Mlp>);

impl StepState for Nameless {
    fn visit_state(&self, visit: &mut dyn FnMut(AnyTensor)) {
        self.0.visit_state(visit);
    }
    fn map_state(self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        Self(self.0.map_state(map))
    }
    fn settle(&self) {
        self.0.settle();
    }
    fn independent(&self) -> Self {
        Self(self.0.independent())
    }
}

/// Rates by group for a state whose parameters nobody can name are an error that says what to do; nothing runs.
pub fn rates_for_nameless_parameters(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let before = bits(&model);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let state = Nameless(Training::new(model, optimizer("sgd").0));
    let mut step = graphed_over(state, GraphConfig::new(), move |s, batch: Batch, lr| {
        let grads = update(&mut s.0, &loss, batch);
        s.0.optimize(lr, grads);
    });
    let group = ParamGroup::from_predicate("output");
    let rates = ModuleLrScheduler::new(0.01).with_group(group, 0.5).step();
    let error = step.run(batch(&device, 0, 64), rates).map(|_| ());
    assert_eq!(error, Err(StepError::RateGroups));
    assert_same(&bits(step.state().0.model()), &before, "nothing ran");
    for index in 0..6 {
        step.run(batch(&device, index, 64), 0.01)
            .expect("a number is fine");
    }
    assert!(step.report().replayed > 0, "{}", step.report());
}
