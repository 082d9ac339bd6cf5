//! One function per failure kind. `device` is a device with graphs, without autodiff.

use super::*;
use burn::nn::DropoutConfig;
use burn::optim::AdamConfig;
use burn::optim::momentum::MomentumConfig;
use burn_cuda_graph::{FallbackReason, StepError};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// The state of the graphed twin equals the eager one's after every step, and the paths are those expected: three
/// warm-up steps, one recorded, the rest replayed.
pub fn training_equals_eager<M: Net>(device: &Device, steps: usize) {
    let (device, model, twin) = twins::<M>(device);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, required(), &device);
    for index in 0..steps {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        let expected = match index {
            0..3 => "warming-up",
            3 => "recorded",
            _ => "replayed",
        };
        assert_eq!(word(&out), expected, "step {index}");
        let loss = eager.step(batch(&device, index, 64), LR);
        assert_eq!(
            value(&out.output).to_bits(),
            value(&loss).to_bits(),
            "loss of step {index}"
        );
        assert_same(
            &bits(&step.model()),
            &bits(&eager.model),
            format_args!("state after step {index}"),
        );
    }
    let report = step.report();
    assert_eq!(
        report.eager + report.recorded + report.replayed,
        steps as u64
    );
    assert_eq!((report.eager, report.recorded), (3, 1));
    assert!(report.bytes_held > 0);
    assert!(
        report
            .launches_per_eager_step
            .is_some_and(|launches| launches > 5)
    );
}

/// A recorded step equals the same step over the same engine that never records: how a queue is cut into kernels is
/// then the same on both, so every bit must be, whatever the net.
pub fn recorded_equals_unrecorded<M: Net>(device: &Device, steps: usize) {
    let (device, model, twin) = twins::<M>(device);
    let mut step = graphed(model, required(), &device);
    let mut unrecorded = graphed(twin, GraphConfig::new().with_warmup(u32::MAX), &device);
    for index in 0..steps {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        let other = unrecorded.run(batch(&device, index, 64), LR).expect("runs");
        assert_eq!(word(&other), "warming-up");
        assert_eq!(out.path.is_graph(), index >= 3);
        let same = value(&out.output).to_bits() == value(&other.output).to_bits();
        assert!(same, "loss of step {index}");
        assert_same(
            &bits(&step.model()),
            &bits(&unrecorded.model()),
            format_args!("step {index}"),
        );
    }
}

/// A watched step launches the kernels that plain Burn launches: one launched another way rounds another way.
pub fn watched_steps_launch_what_plain_burn_does(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, required(), &device);
    let mut theirs = 0;
    for index in 0..4 {
        step.run(batch(&device, index, 64), LR).expect("runs");
        let batch = batch(&device, index, 64);
        device.clone().inner().sync().expect("syncs");
        theirs = launches(&device, || drop(eager.step(batch, LR)));
    }
    assert_eq!(step.report().launches_per_eager_step, Some(theirs));
}

/// A model's own `TrainStep`, an overridden `optimize` included, is what is recorded and replayed.
pub fn a_train_step_model_replays(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let training = Training::new(model, SgdConfig::new().init());
    let mut step = GraphedStep::from_train_step(training, required()).expect("one device");
    for index in 0..8 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        assert_eq!(out.path.is_graph(), index >= 3);
        eager.step(batch(&device, index, 64), LR * 0.5);
        // The twin drops its tensors elsewhere, so fusion cuts its queue into other kernels.
        let (ours, theirs) = (bits(&step.model()), bits(&eager.model));
        let when = format_args!("step {index}");
        assert_same_or_near(&device, &ours, &theirs, CUT_TOLERANCE, when);
    }
}

/// Case 7: a last, smaller batch; three epochs of ten batches of 64 and one of 17. The small one is recorded once it
/// has been seen often enough, and takes no graph away from the large one.
pub fn last_smaller_batch(device: &Device) {
    let (device, model, twin) = twins_for::<BnNet>(device, &[64, 17]);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, GraphConfig::new(), &device);
    for epoch in 0..3 {
        for index in 0..11 {
            let size = if index == 10 { 17 } else { 64 };
            let out = step.run(batch(&device, index, size), LR).expect("runs");
            if epoch > 0 && size == 64 {
                assert_eq!(word(&out), "replayed");
            }
            eager.step(batch(&device, index, size), LR);
            assert_same(
                &bits(&step.model()),
                &bits(&eager.model),
                format_args!("epoch {epoch}, batch {index}"),
            );
        }
    }
    let report = step.report();
    assert!(report.captures <= 2, "{report}");
    assert_eq!(report.steps(), 33);
}

/// Two keys that alternate are both recorded and both replayed over one state.
pub fn alternating_shapes(device: &Device) {
    let (device, model, twin) = twins_for::<BnNet>(device, &[64, 48]);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, required(), &device);
    for index in 0..20 {
        let size = if index % 2 == 0 { 64 } else { 48 };
        let out = step.run(batch(&device, index, size), LR).expect("runs");
        if index >= 12 {
            assert_eq!(word(&out), "replayed", "step {index}");
        }
        eager.step(batch(&device, index, size), LR);
        assert_same(
            &bits(&step.model()),
            &bits(&eager.model),
            format_args!("step {index}"),
        );
    }
    assert_eq!(step.report().captures, 2);
    assert_eq!(step.report().graphs_held, 2);
}

/// Case 8: losses kept from five replays are five different values, each the eager one.
pub fn outputs_are_the_callers(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, required(), &device);
    let (mut kept, mut expected) = (Vec::new(), Vec::new());
    for index in 0..9 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        let loss = eager.step(batch(&device, index, 64), LR);
        if index >= 4 {
            assert_eq!(word(&out), "replayed");
            kept.push(out.output);
            expected.push(value(&loss).to_bits());
        }
    }
    let values: Vec<u32> = kept.iter().map(|loss| value(loss).to_bits()).collect();
    assert_eq!(values, expected);
    let mut distinct = values.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), 5);
}

/// A model taken from the step is the caller's: replays after it do not change it, and it can be validated.
pub fn snapshots_are_the_callers(device: &Device) {
    let (device, model, twin) = twins::<BnNet>(device);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, required(), &device);
    let mut kept = Vec::new();
    for index in 0..8 {
        step.run(batch(&device, index, 64), LR).expect("runs");
        eager.step(batch(&device, index, 64), LR);
        kept.push((step.model(), bits(&eager.model)));
    }
    for (index, (model, expected)) in kept.iter().enumerate() {
        assert_same(
            &bits(model),
            expected,
            format_args!("the model kept after step {index}"),
        );
    }
    // Validation between replays sees the live statistics and disturbs nothing.
    let inner = device.clone().inner();
    let (x, _) = batch(&inner, 99, 16);
    let mine = step.model().valid().run(x.clone()).into_data();
    let theirs = eager.model.valid().run(x).into_data();
    assert_eq!(mine, theirs);
    let out = step.run(batch(&device, 8, 64), LR).expect("runs");
    assert_eq!(word(&out), "replayed");
    eager.step(batch(&device, 8, 64), LR);
    assert_same(
        &bits(&step.into_state().into_model()),
        &bits(&eager.model),
        "at the end",
    );
}

/// Case 10: weights replaced after capture are the ones that train on; the graph of the old ones is not replayed.
pub fn replaced_weights_train_on(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let other = Mlp::make(&device);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, required(), &device);
    for index in 0..6 {
        step.run(batch(&device, index, 64), LR).expect("runs");
        eager.step(batch(&device, index, 64), LR);
    }
    assert_eq!(step.report().captures, 1);
    // Load a record, as from a checkpoint.
    let record = other.valid().train().into_record();
    step.update_state(|training| {
        let (model, optimizer) = training.into_parts();
        Training::new(
            model.load_record(other.valid().train().into_record()),
            optimizer,
        )
    })
    .expect("stays on the device");
    eager.model = eager.model.clone().load_record(record);
    assert_eq!(step.report().invalidations, 1);
    assert_eq!(step.report().graphs_held, 0);
    for index in 6..13 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        if index == 9 {
            assert_eq!(word(&out), "recorded");
        }
        eager.step(batch(&device, index, 64), LR);
        assert_same(
            &bits(&step.model()),
            &bits(&eager.model),
            format_args!("step {index}"),
        );
    }
    assert_eq!(step.report().captures, 2);
}

/// Case 12: a thread creating tensors on the device during captures. Its tensors are never poisoned. `announced`: it
/// has said that it works beside captures, and every one seals; else they seal or fall back by name. `reads`: it also
/// reads its tensors back meanwhile.
pub fn a_loader_works_during_captures(
    device: &Device,
    captures: usize,
    announced: bool,
    reads: bool,
) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, GraphConfig::new(), &device);
    let stop = Arc::new(AtomicBool::new(false));
    let uploads = Arc::new(AtomicUsize::new(0));
    let check = |doubled: Tensor<2>, n: usize| {
        let found: Vec<f32> = doubled
            .try_into_data()
            .expect("never poisoned")
            .try_into_vec()
            .expect("f32");
        let expected: Vec<f32> = batch(&Device::flex(), n % 32, 64)
            .0
            .into_data()
            .try_into_vec()
            .expect("f32");
        assert!(
            found
                .iter()
                .zip(&expected)
                .all(|(twice, once)| *twice == once * 2.0)
        );
    };
    let loader = std::thread::spawn({
        let (stop, uploads, device) = (stop.clone(), uploads.clone(), device.clone().inner());
        move || {
            if announced {
                burn_cuda_graph::tolerate_captures();
            }
            let mut kept = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let n = uploads.fetch_add(1, Ordering::Relaxed);
                let (x, _) = batch(&device, n % 32, 64);
                let doubled = x * 2.0;
                match reads {
                    true => check(doubled, n),
                    false if n % 16 == 0 => kept.push((doubled, n)),
                    false => device.flush().expect("flushes"),
                }
            }
            kept.into_iter().for_each(|(doubled, n)| check(doubled, n));
        }
    });
    let mut sealed = 0;
    let mut index = 0;
    for _ in 0..captures {
        for attempt in 0..5 {
            let out = step.run(batch(&device, index, 64), LR).expect("runs");
            sealed += usize::from(word(&out) == "recorded");
            let expected: &[&str] = match attempt {
                0..3 => &["warming-up"],
                3 => &["recorded", "refused"],
                _ => &["replayed", "recorded", "refused"],
            };
            assert!(expected.contains(&word(&out)), "{}", out.path);
            eager.step(batch(&device, index, 64), LR);
            index += 1;
        }
        step.release();
    }
    stop.store(true, Ordering::Relaxed);
    loader.join().expect("the loader's tensors are intact");
    assert_same(&bits(&step.model()), &bits(&eager.model), "at the end");
    assert!(uploads.load(Ordering::Relaxed) > 0);
    if announced {
        assert_eq!(sealed, captures, "{}", step.report());
    }
}

/// Case 13: two trainers on two threads, then interleaved on one: both equal their solo runs.
pub fn two_trainers(device: &Device) {
    fn solo<M: Net>(device: &Device, model: M, steps: usize, offset: usize) -> Vec<Vec<u32>> {
        let mut eager = Eager::new(model, device);
        for index in 0..steps {
            eager.step(batch(device, offset + index, 64), LR);
        }
        bits(&eager.model)
    }
    fn train<M: Net>(
        device: &Device,
        model: M,
        steps: usize,
        offset: usize,
    ) -> (Vec<Vec<u32>>, u64) {
        let mut step = graphed(model, GraphConfig::new(), device);
        for index in 0..steps {
            step.run(batch(device, offset + index, 64), LR)
                .expect("runs");
        }
        (bits(&step.model()), step.report().replayed)
    }
    let (device, first, first_twin) = twins::<Mlp>(device);
    let (_, second, second_twin) = twins::<BnNet>(&device.clone().inner());
    let (first_threaded, second_threaded) = (first.valid().train(), second.valid().train());

    let expected_first = solo(&device, first_twin, 40, 0);
    let expected_second = solo(&device, second_twin, 40, 500);
    let ((got_first, replayed_first), (got_second, replayed_second)) =
        std::thread::scope(|scope| {
            let one = scope.spawn(|| train(&device, first_threaded, 40, 0));
            let two = scope.spawn(|| train(&device, second_threaded, 40, 500));
            (
                one.join().expect("first trainer"),
                two.join().expect("second trainer"),
            )
        });
    assert_same(&got_first, &expected_first, "the first, threaded");
    assert_same(&got_second, &expected_second, "the second, threaded");
    assert!(
        replayed_first > 20 && replayed_second > 20,
        "{replayed_first} and {replayed_second}"
    );

    let mut one = graphed(first, required(), &device);
    let mut two = graphed(second, required(), &device);
    for index in 0..40 {
        one.run(batch(&device, index, 64), LR).expect("runs");
        two.run(batch(&device, 500 + index, 64), LR).expect("runs");
    }
    assert_same(
        &bits(&one.model()),
        &expected_first,
        "the first, interleaved",
    );
    assert_same(
        &bits(&two.model()),
        &expected_second,
        "the second, interleaved",
    );
    // One that seals makes the other rehearse once more.
    assert!(one.report().replayed >= 34 && two.report().replayed >= 34);
}

/// Case 14: canaries at every size of the step's intermediates stay intact over a hundred replays.
pub fn canaries_stay_intact(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, required(), &device);
    for index in 0..4 {
        step.run(batch(&device, index, 64), LR).expect("runs");
        eager.step(batch(&device, index, 64), LR);
    }
    let inner = device.clone().inner();
    let sizes = [
        1,
        8,
        64,
        128,
        8 * 64,
        8 * 128,
        32 * 64,
        32 * 128,
        64 * 128,
        1 << 16,
        1 << 20,
    ];
    let canaries: Vec<(f32, Tensor<1>)> = (0..6)
        .flat_map(|round| sizes.map(|size| (round as f32 * 100.0 + size as f32, size)))
        .map(|(value, size)| (value, Tensor::full([size], value, &inner)))
        .collect();
    inner.sync().expect("syncs");
    for index in 4..104 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        assert_eq!(word(&out), "replayed");
        eager.step(batch(&device, index, 64), LR);
    }
    for (value, canary) in canaries {
        let found: Vec<f32> = canary.into_data().try_into_vec().expect("f32");
        assert!(
            found.iter().all(|v| *v == value),
            "canary {value} of {} elements",
            found.len()
        );
    }
    assert_same(&bits(&step.model()), &bits(&eager.model), "at the end");
}

/// Case 15: the first batch of a cold process goes to the graphed step, which seals all the same.
pub fn the_first_batch_of_a_process(device: &Device) {
    let device = device.clone().autodiff();
    let mut step = graphed(Mlp::new(&device), required(), &device);
    let mut losses = Vec::new();
    for index in 0..8 {
        let out = step.run(batch(&device, 0, 64), LR).expect("runs");
        assert_eq!(
            out.path.is_graph(),
            index >= 3,
            "step {index}: {}",
            out.path
        );
        losses.push(value(&out.output));
    }
    assert!(
        losses.windows(2).all(|pair| pair[1] < pair[0]),
        "{losses:?}"
    );
}

/// Cases 16 and 19: a read in the step is refused, the read named; the refused step and all later ones equal eager.
pub fn a_read_in_the_step_is_refused(device: &Device) {
    let (device, model, twin) = twins::<BnNet>(device);
    let mut eager = Eager::new(twin, &device);
    let mut tuned = Eager::new(BnNet::make(&device), &device);
    for index in 0..3 {
        tuned.step_with(batch(&device, index, 64), LR, |loss| {
            assert!(value(loss).is_finite())
        });
        bits(&tuned.model);
    }
    let seen = RefCell::new(Vec::new());
    let mut step = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        GraphConfig::new(),
        closure::<BnNet, _>(&device, |loss| seen.borrow_mut().push(value(loss))),
    )
    .expect("one device");
    for index in 0..8 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        let expected = if index < 3 { "warming-up" } else { "host-read" };
        assert_eq!(word(&out), expected, "step {index}: {}", out.path);
        eager.step_with(batch(&device, index, 64), LR, |loss| {
            assert!(value(loss).is_finite())
        });
        assert_same(
            &bits(&step.model()),
            &bits(&eager.model),
            format_args!("step {index}"),
        );
    }
    let report = step.report();
    assert_eq!((report.eager, report.replayed, report.captures), (8, 0, 0));
    assert_eq!(report.refusals.get("host-read"), Some(&1));
}

/// Case 17: a panic while recording, caught by the caller: the state is that of the steps before, the next eager op and
/// the next capture work.
pub fn a_panic_while_recording(device: &Device) {
    let (device, model, twin) = twins::<BnNet>(device);
    let mut eager = Eager::new(twin, &device);
    let calls = Rc::new(Cell::new(0));
    let mut step = GraphedStep::new(Training::new(model, SgdConfig::new().init()), required(), {
        let calls = calls.clone();
        closure::<BnNet, _>(&device, move |_| {
            calls.set(calls.get() + 1);
            assert!(calls.get() != 4, "the user's own");
        })
    })
    .expect("one device");
    for index in 0..3 {
        step.run(batch(&device, index, 64), LR).expect("runs");
        eager.step(batch(&device, index, 64), LR);
    }
    let panic =
        catch_unwind(AssertUnwindSafe(|| step.run(batch(&device, 3, 64), LR))).expect_err("panics");
    assert!(
        panic
            .downcast_ref::<&str>()
            .is_some_and(|text| text.contains("the user's own"))
    );
    assert_same(&bits(&step.model()), &bits(&eager.model), "at the end");
    // An eager operation works, and so does the next recording.
    let sum: f32 = Tensor::<1>::ones([8], &device.clone().inner())
        .sum()
        .into_scalar();
    assert_eq!(sum, 8.0);
    for index in 3..8 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        assert_eq!(word(&out), if index == 3 { "recorded" } else { "replayed" });
        eager.step(batch(&device, index, 64), LR);
        assert_same(
            &bits(&step.model()),
            &bits(&eager.model),
            format_args!("step {index}"),
        );
    }
    assert_eq!(step.report().steps(), 8);
}

/// A panic in an eager step leaves the state as it was, BatchNorm statistics included.
pub fn a_panic_in_an_eager_step(device: &Device) {
    let (device, model, _) = twins::<BnNet>(device);
    let calls = Rc::new(Cell::new(0));
    let mut step = GraphedStep::new(Training::new(model, SgdConfig::new().init()), required(), {
        let calls = calls.clone();
        closure::<BnNet, _>(&device, move |_| {
            calls.set(calls.get() + 1);
            assert!(calls.get() != 2, "the user's own");
        })
    })
    .expect("one device");
    let out = step.run(batch(&device, 0, 64), LR).expect("runs");
    assert_eq!(word(&out), "warming-up");
    let before = bits(&step.model());
    catch_unwind(AssertUnwindSafe(|| step.run(batch(&device, 1, 64), LR))).expect_err("panics");
    assert_same(&bits(&step.model()), &before, "afterwards");
    step.run(batch(&device, 1, 64), LR).expect("runs");
    assert_ne!(bits(&step.model()), before);
}

/// A panic where nobody watches, in a step that stays eager: before its update it leaves the state as it was, statistics
/// included; after the update, with it; and one inside an update is an error at each later call, never a half-made state.
pub fn a_panic_in_a_step_that_stays_eager(device: &Device) {
    #[derive(Clone, Copy, PartialEq)]
    enum Panics {
        Never,
        Before,
        Within,
        After,
    }
    let (device, model, twin) = twins::<BnNet>(device);
    let panics = Rc::new(Cell::new(Panics::Never));
    let when = panics.clone();
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut step = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        GraphConfig::new(),
        move |t: &mut Training<BnNet>, (x, y): Batch, lr: StepRate| {
            let loss = loss.forward(t.model().run(x), y);
            assert!(when.get() != Panics::Before, "the user's own");
            let grads = GradientsParams::from_grads(loss.backward(), t.model());
            t.update(|model, optimizer| {
                assert!(when.get() != Panics::Within, "the user's own");
                optimizer.step(lr, model, grads)
            });
            assert!(when.get() != Panics::After, "the user's own");
            loss
        },
    )
    .expect("one device");
    let mut eager = Eager::new(twin, &device);
    // Batches of as many sizes as it takes to leave them all unwatched.
    let sizes = 2..24;
    for size in sizes.clone() {
        step.run(batch(&device, size, size), LR).expect("runs");
        eager.step(batch(&device, size, size), LR);
    }
    let mut size = sizes.end;
    let mut panicking = |step: &mut dyn FnMut(Batch) -> Result<(), StepError>, now| {
        size += 1;
        panics.set(now);
        let batch = batch(&device, size, size);
        catch_unwind(AssertUnwindSafe(|| step(batch.clone()))).expect_err("panics");
        panics.set(Panics::Never);
        batch
    };
    let mut run = |batch: Batch| step.run(batch, LR).map(|out| assert!(!out.path.is_graph()));
    panicking(&mut run, Panics::Before);
    let (x, y) = panicking(&mut run, Panics::After);
    eager.step((x, y), LR);
    assert_same(
        &bits(&step.model()),
        &bits(&eager.model),
        "after two panics",
    );
    let next = batch(&device, 40, 40);
    let out = step.run(next.clone(), LR).expect("runs");
    assert_eq!(word(&out), "never-settles");
    eager.step(next, LR);
    assert_same(&bits(&step.model()), &bits(&eager.model), "a step later");
    let mut run = |batch: Batch| step.run(batch, LR).map(drop);
    panicking(&mut run, Panics::Within);
    for _ in 0..2 {
        let error = step.run(batch(&device, 41, 41), LR).map(drop);
        assert_eq!(error, Err(StepError::StateLost));
    }
}

/// Case 18: a capture refused over and over leaks nothing.
pub fn refused_captures_leak_nothing(device: &Device, refusals: usize) {
    let (device, model, _) = twins::<Mlp>(device);
    let mut step = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        GraphConfig::new(),
        closure::<Mlp, _>(&device, |loss| assert!(value(loss).is_finite())),
    )
    .expect("one device");
    let mut reserved = Vec::new();
    for _ in 0..refusals {
        for index in 0..4 {
            step.run(batch(&device, index, 64), LR).expect("runs");
        }
        step.release();
        let usage = device.clone().inner().memory_pool_usage().expect("a pool");
        reserved.push(usage.bytes_reserved);
    }
    assert_eq!(
        step.report().refusals.get("host-read"),
        Some(&(refusals as u64))
    );
    assert_no_growth(&reserved);
}

/// The second half never holds more than the first half did.
#[track_caller]
fn assert_no_growth(reserved: &[u64]) {
    let (early, late) = reserved.split_at(reserved.len() / 2);
    assert!(
        late.iter().max() <= early.iter().max(),
        "reserved bytes grew: {reserved:?}"
    );
}

/// Captured and evicted over and over, memory stays flat, and each eviction gives the bytes back.
pub fn evictions_give_memory_back(device: &Device, rounds: usize) {
    let (device, model, twin) = twins_for::<Mlp>(device, &[64, 48]);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, GraphConfig::new().with_max_graphs(1), &device);
    let mut reserved = Vec::new();
    let mut index = 0;
    for round in 0..rounds {
        for size in [64, 48] {
            for _ in 0..5 {
                step.run(batch(&device, index, size), LR).expect("runs");
                eager.step(batch(&device, index, size), LR);
                index += 1;
            }
        }
        assert_eq!(step.report().graphs_held, 1, "round {round}");
        let usage = device.clone().inner().memory_pool_usage().expect("a pool");
        reserved.push(usage.bytes_reserved);
    }
    assert_same(&bits(&step.model()), &bits(&eager.model), "at the end");
    let report = step.report();
    assert_eq!(report.captures, 2 * rounds as u64, "{report}");
    assert_eq!(report.evictions, 2 * rounds as u64 - 1);
    assert_no_growth(&reserved);
}

/// Case 21: a stream of keys that never settles: a reason, no replay, training goes on.
pub fn a_never_settling_stream(device: &Device) {
    let (device, model, twin) = twins_for::<Mlp>(device, &(8..32).collect::<Vec<_>>());
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, GraphConfig::new(), &device);
    for index in 0..24 {
        let out = step
            .run(batch(&device, index, 8 + index), LR)
            .expect("runs");
        let expected = if index < 16 {
            "warming-up"
        } else {
            "never-settles"
        };
        assert_eq!(word(&out), expected, "step {index}");
        eager.step(batch(&device, index, 8 + index), LR);
    }
    assert_same(&bits(&step.model()), &bits(&eager.model), "at the end");
    let report = step.report();
    assert_eq!((report.replayed, report.captures), (0, 0));
    assert!(report.to_string().contains("never-settles"));
}

/// Case 22: many replays without a sync equal as many with one each.
pub fn replays_need_no_sync(device: &Device, replays: usize) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut free = graphed(model, required(), &device);
    let mut synced = graphed(twin, required().with_synced_timing(true), &device);
    let batches: Vec<Batch> = (0..16).map(|index| batch(&device, index, 64)).collect();
    for index in 0..replays + 6 {
        free.run(batches[index % 16].clone(), LR).expect("runs");
        synced.run(batches[index % 16].clone(), LR).expect("runs");
    }
    assert!(free.report().replayed >= replays as u64 && synced.report().replayed >= replays as u64);
    assert_same(&bits(&free.model()), &bits(&synced.model()), "at the end");
}

/// Random numbers in the step are refused by name at once, and training goes on.
pub fn random_operations_are_refused(device: &Device) {
    let device = device.clone().autodiff();
    let dropout = DropoutConfig::new(0.5).init();
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut step = GraphedStep::new(
        Training::new(Mlp::new(&device), SgdConfig::new().init()),
        GraphConfig::new(),
        move |t: &mut Training<Mlp>, (x, y): Batch, lr| {
            let loss = loss.forward(t.model().forward(dropout.forward(x)), y);
            t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
            loss
        },
    )
    .expect("one device");
    for index in 0..6 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        assert!(
            matches!(&out.path, StepPath::Eager(FallbackReason::RandomOperation { shape, .. }) if shape == &[64, 32]),
            "{}",
            out.path
        );
    }
    assert_eq!(step.report().captures, 0);
}

/// Stock optimizers whose scalars move, or that keep tensors of their own, are refused by name; never replayed wrong.
pub fn stateful_optimizers_are_refused(device: &Device) {
    let run = |optimizer: ModuleOptimizer, compare: bool| {
        let (device, model, twin) = twins::<Mlp>(device);
        let plain = closure::<Mlp, _>(&device, |_| {});
        let mut expected = Training::new(twin, optimizer.clone());
        let mut step = GraphedStep::new(
            Training::new(model, optimizer),
            GraphConfig::new(),
            closure::<Mlp, _>(&device, |_| {}),
        )
        .expect("one device");
        let mut last = String::new();
        for index in 0..8 {
            let out = step.run(batch(&device, index, 64), LR).expect("runs");
            last = word(&out).to_string();
            plain(&mut expected, batch(&device, index, 64), LR.into());
            let (ours, theirs) = (bits(&step.model()), bits(expected.model()));
            if compare {
                // Their first steps run other operations than the later ones, which a drained queue ends differently:
                // an ulp of a parameter (3.7e-9 seen on an H200), which Adam's division may carry to a few.
                let when = format_args!("step {index}");
                assert_same_or_near(&device, &ours, &theirs, 1e-6, when);
            }
        }
        assert_eq!(step.report().captures, 0);
        assert_eq!(step.report().refusals.len(), 1);
        last
    };
    // A first pass tunes the kernels of the optimizer, those of its first step included, on both sides.
    run(AdamConfig::new().init(), false);
    assert_eq!(run(AdamConfig::new().init(), true), "stock-optimizer");
    let momentum = MomentumConfig {
        momentum: 0.9,
        dampening: 0.0,
        nesterov: false,
    };
    let momentum = || {
        SgdConfig::new()
            .with_momentum(Some(momentum.clone()))
            .init()
    };
    run(momentum(), false);
    assert_eq!(run(momentum(), true), "stock-optimizer");
    // Weight decay keeps nothing and moves nothing: it replays.
    let (device, model, _) = twins::<Mlp>(device);
    let decay = burn::optim::decay::WeightDecayConfig::new(0.01);
    let mut step = GraphedStep::new(
        Training::new(
            model,
            SgdConfig::new().with_weight_decay(Some(decay)).init(),
        ),
        required(),
        closure::<Mlp, _>(&device, |_| {}),
    )
    .expect("one device");
    for index in 0..6 {
        step.run(batch(&device, index, 64), LR).expect("runs");
    }
    assert_eq!(step.report().replayed, 2);
}

/// A learning rate that moves is applied at the next step, whatever was recorded before.
pub fn a_moving_learning_rate_is_followed(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, GraphConfig::new(), &device);
    let rates = [0.05; 6]
        .into_iter()
        .chain([0.04, 0.03, 0.0, 0.02])
        .chain([0.05; 3]);
    for (index, rate) in rates.enumerate() {
        let before = bits(&step.model());
        let out = step.run(batch(&device, index, 64), rate).expect("runs");
        eager.step(batch(&device, index, 64), rate);
        assert_same(
            &bits(&step.model()),
            &bits(&eager.model),
            format_args!("step {index} at {rate}"),
        );
        match (index, rate) {
            (6..10, _) => assert_eq!(word(&out), "learning-rate-moved", "step {index}"),
            (10.., _) => assert_eq!(
                word(&out),
                "replayed",
                "the first rate's graph is still there"
            ),
            _ => {}
        }
        assert_eq!(rate == 0.0, before == bits(&step.model()));
    }
}

/// A rate that hides in the closure is caught while it moves.
pub fn a_hidden_rate_is_refused(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let rate = Cell::new(0.1);
    let mut step = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        GraphConfig::new(),
        |t: &mut Training<Mlp>, (x, y): Batch, _lr| {
            let loss = loss.forward(t.model().forward(x), y);
            rate.set(rate.get() * 0.9);
            t.optimize(
                rate.get(),
                GradientsParams::from_grads(loss.backward(), t.model()),
            );
            loss
        },
    )
    .expect("one device");
    for index in 0..6 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        let expected = if index == 0 {
            "warming-up"
        } else {
            "moving-scalar"
        };
        assert_eq!(word(&out), expected, "step {index}: {}", out.path);
    }
}

/// Tensors made from host data in the step, and tensors that the closure carries over, are refused by name.
pub fn hidden_inputs_are_refused(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut step = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        GraphConfig::new(),
        |t: &mut Training<Mlp>, (x, y): Batch, lr| {
            let scale = Tensor::<2>::from_data([[0.5f32]], &x.device());
            let loss = loss.forward(t.model().forward(x * scale), y);
            t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
            loss
        },
    )
    .expect("one device");
    let out = step.run(batch(&device, 0, 64), LR).expect("runs");
    assert_eq!(word(&out), "host-data", "{}", out.path);

    let (device, model, _) = twins::<Mlp>(&device.inner());
    let average: Mutex<Option<Tensor<1>>> = Mutex::new(None);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut step = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        GraphConfig::new(),
        |t: &mut Training<Mlp>, (x, y): Batch, lr| {
            let loss = loss.forward(t.model().forward(x), y);
            t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
            let mut average = average.lock().expect("not poisoned");
            let now = loss.clone().detach();
            *average = Some(match average.take() {
                Some(before) => before * 0.9 + now * 0.1,
                None => now * 1.0,
            });
            loss
        },
    )
    .expect("one device");
    let words: Vec<&str> = (0..8)
        .map(|index| word(&step.run(batch(&device, index, 64), LR).expect("runs")))
        .collect();
    assert_eq!(words.last(), Some(&"hidden-state"), "{words:?}");
    assert_eq!(step.report().captures, 0);
}

/// A constant that the closure owns is part of the recording and stays alive with it.
pub fn a_constant_of_the_closure_replays(device: &Device) {
    let make = |model: Mlp, device: &Device, config: GraphConfig| {
        let scale = Tensor::<2>::from_data([[0.5f32]], device);
        let loss = CrossEntropyLossConfig::new().init(device);
        GraphedStep::new(
            Training::new(model, SgdConfig::new().init()),
            config,
            move |t: &mut Training<Mlp>, (x, y): Batch, lr| {
                let loss = loss.forward(t.model().forward(x * scale.clone()), y);
                t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
                loss
            },
        )
        .expect("one device")
    };
    let (device, model, twin) = twins::<Mlp>(device);
    // The same step that never records is the eager twin: how a queue is cut into kernels is then the same on both.
    let mut eager = make(twin, &device, GraphConfig::new().with_warmup(1000));
    let mut step = make(model, &device, required());
    for index in 0..8 {
        let theirs = eager.run(batch(&device, index, 64), LR).expect("runs");
        assert_eq!(word(&theirs), "warming-up");
        step.run(batch(&device, index, 64), LR).expect("runs");
        assert_same(
            &bits(&step.model()),
            &bits(&eager.model()),
            format_args!("step {index}"),
        );
    }
    assert_eq!(step.report().replayed, 4);
}

/// A replay is handed over, not held back: it runs without anybody asking for its result.
pub fn a_replay_is_not_held_back(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let mut step = graphed(model, required(), &device);
    for index in 0..6 {
        step.run(batch(&device, index, 64), LR).expect("runs");
    }
    let before = bits(&step.model());
    let launched = launched_during(|| {
        // The output is dropped at once.
        for index in 6..40 {
            step.run(batch(&device, index, 64), LR).expect("runs");
        }
        std::thread::sleep(std::time::Duration::from_millis(1500));
    });
    // At least the copies around each of the 34 replays.
    assert!(launched >= 34, "{launched}");
    assert_ne!(bits(&step.model()), before);
    assert_eq!(step.report().replayed, 36);
}

/// A trial of `Policy::Adaptive` takes the caller's own steps, and whatever it finds, training goes on as plain Burn's.
pub fn a_trial_takes_ordinary_steps(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let config = GraphConfig::new().with_policy(Policy::Adaptive);
    let mut step = graphed(model, config, &device);
    for index in 0..30 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        match index {
            0..3 => assert_eq!(word(&out), "warming-up"),
            3 => assert_eq!(word(&out), "recorded"),
            4..12 => assert_eq!(word(&out), "timed"),
            12..18 => assert_eq!(word(&out), "replayed"),
            _ => assert!(["replayed", "replay-does-not-pay"].contains(&word(&out))),
        }
        eager.step(batch(&device, index, 64), LR);
        assert_same(
            &bits(&step.model()),
            &bits(&eager.model),
            format_args!("step {index}"),
        );
    }
    let report = step.report();
    assert_eq!(report.steps(), 30);
    assert_eq!(report.fallbacks["timed"], 8, "{report}");
    assert!(report.replayed >= 6, "{report}");
}

/// Two states that trade tensors in the step: each must be read before its buffer is written.
pub fn states_that_swap(device: &Device) {
    let (device, first, first_twin) = twins::<Mlp>(device);
    let second = Mlp::make(&device);
    let second_twin = second.valid().train();
    let sgd = || SgdConfig::new().init();
    type Pair = (Training<Mlp>, Training<Mlp>);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let step_of = |loss: CrossEntropyLoss| {
        move |pair: &mut Pair, (x, y): Batch, lr: StepRate| {
            let out = loss.forward(pair.0.model().forward(x), y);
            let grads = GradientsParams::from_grads(out.backward(), pair.0.model());
            pair.0.optimize(lr, grads);
            core::mem::swap(&mut pair.0, &mut pair.1);
            out
        }
    };
    let mut expected: Pair = (
        Training::new(first_twin, sgd()),
        Training::new(second_twin, sgd()),
    );
    let plain = step_of(loss.clone());
    let mut step = GraphedStep::new(
        (Training::new(first, sgd()), Training::new(second, sgd())),
        required(),
        step_of(loss),
    )
    .expect("one device");
    for index in 0..9 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        if index > 3 {
            assert_eq!(word(&out), "replayed");
        }
        plain(&mut expected, batch(&device, index, 64), LR.into());
        let state = step.state();
        assert_same(
            &bits(state.0.model()),
            &bits(expected.0.model()),
            format_args!("step {index}"),
        );
        assert_same(
            &bits(state.1.model()),
            &bits(expected.1.model()),
            format_args!("step {index}"),
        );
    }
}

/// A step that moves to another thread leaves its graphs behind, warms up anew on that thread's stream, and equals
/// eager throughout; the thread it came from goes on with tensors of its own.
pub fn a_step_moves_between_threads(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, required(), &device);
    for index in 0..5 {
        step.run(batch(&device, index, 64), LR).expect("runs");
        eager.step(batch(&device, index, 64), LR);
    }
    assert_same(&bits(&step.model()), &bits(&eager.model), "before");
    let inner = device.clone().inner();
    let (step, sum) = std::thread::scope(|scope| {
        let moved = scope.spawn(|| {
            for index in 5..12 {
                let out = step.run(batch(&device, index, 64), LR).expect("runs");
                let expected = match index {
                    5..8 => "warming-up",
                    8 => "recorded",
                    _ => "replayed",
                };
                assert_eq!(word(&out), expected, "step {index}");
            }
            step
        });
        let mut sum = Tensor::<1>::zeros([16], &inner);
        for _ in 0..200 {
            sum = sum + 1.0;
        }
        (moved.join().expect("the other thread"), sum)
    });
    for index in 5..12 {
        eager.step(batch(&device, index, 64), LR);
    }
    // Each thread's queue is cut into kernels on its own.
    let (ours, theirs) = (bits(&step.model()), bits(&eager.model));
    assert_same_or_near(&device, &ours, &theirs, 1e-6, "after");
    assert_eq!(step.report().invalidations, 1);
    let sum: Vec<f32> = sum.into_data().try_into_vec().expect("f32");
    assert_eq!(sum, vec![200.0; 16]);
}

/// Two steps made on one thread and moved to one each do not record each other's work.
pub fn two_steps_made_on_one_thread(device: &Device) {
    let (device, first, first_twin) = twins::<Mlp>(device);
    let (second, second_twin) = (first.valid().train(), first.valid().train());
    let sgd = || SgdConfig::new().init();
    let plain = |model: Mlp, offset: usize| {
        let mut eager = Eager::new(model, &device);
        for index in 0..30 {
            value(&eager.step(batch(&device, offset + index, 64), LR));
        }
        bits(&eager.model)
    };
    let (expected_first, expected_second) = (plain(first_twin, 0), plain(second_twin, 500));
    type Step = fn(&mut Training<Mlp>, Batch, StepRate) -> Tensor<1>;
    let train: Step = |t, (x, y), lr| {
        let loss = CrossEntropyLossConfig::new().init(&x.device());
        let loss = loss.forward(t.model().forward(x), y);
        let grads = GradientsParams::from_grads(loss.backward(), t.model());
        t.optimize(lr, grads);
        loss
    };
    let make = |model| GraphedStep::new(Training::new(model, sgd()), GraphConfig::new(), train);
    let (mut one, mut two) = (
        make(first).expect("one device"),
        make(second).expect("one device"),
    );
    std::thread::scope(|scope| {
        for (step, offset) in [(&mut one, 0), (&mut two, 500)] {
            let device = &device;
            scope.spawn(move || {
                for index in 0..30 {
                    step.run(batch(device, offset + index, 64), LR)
                        .expect("runs");
                }
            });
        }
    });
    assert!(one.report().replayed > 10 && two.report().replayed > 10);
    let near = |ours: &[Vec<u32>], theirs: &[Vec<u32>], name| {
        assert_same_or_near(&device, ours, theirs, 1e-6, name);
    };
    near(&bits(&one.model()), &expected_first, "the first");
    near(&bits(&two.model()), &expected_second, "the second");
}

/// A key that leaves the state alone runs eagerly between replays: what it returns, and models taken meanwhile, are the
/// caller's, and later replays do not write them.
pub fn an_eager_step_between_replays_hands_out_nothing_owned(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let loss = CrossEntropyLossConfig::new().init(&device);
    type Tagged = (&'static str, Batch);
    let mut step = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        GraphConfig::new(),
        move |t: &mut Training<Mlp>, (mode, (x, y)): Tagged, lr: StepRate| {
            let bias = t.model().output_bias();
            let loss = loss.forward(t.model().forward(x), y);
            if mode == "train" {
                let grads = GradientsParams::from_grads(loss.backward(), t.model());
                t.optimize(lr, grads);
            }
            (loss, bias)
        },
    )
    .expect("one device");
    let mut kept = Vec::new();
    let mut index = 0;
    for round in 0..3 {
        for _ in 0..5 {
            step.run(("train", batch(&device, index, 64)), LR)
                .expect("runs");
            eager.step(batch(&device, index, 64), LR);
            index += 1;
        }
        // Never recorded: one step at a time, of a shape of its own.
        let out = step
            .run(("eval", batch(&device, round, 64)), LR)
            .expect("runs");
        assert_eq!(word(&out), "warming-up");
        let bias: Vec<f32> = eager
            .model
            .output_bias()
            .into_data()
            .try_into_vec()
            .expect("f32");
        kept.push((step.model(), out.output.1, bits(&eager.model), bias));
    }
    for (round, (model, bias, expected, expected_bias)) in kept.into_iter().enumerate() {
        assert_same(
            &bits(&model),
            &expected,
            format_args!("the model of round {round}"),
        );
        let bias: Vec<f32> = bias.into_data().try_into_vec().expect("f32");
        assert_eq!(bias, expected_bias, "the bias returned in round {round}");
    }
    assert!(step.report().replayed >= 11, "{}", step.report());
}

/// A step that returns a parameter from before the update returns just that, replayed as well.
pub fn an_output_that_is_the_old_state(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut step = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        required(),
        move |t: &mut Training<Mlp>, (x, y): Batch, lr: StepRate| {
            let bias = t.model().output_bias();
            let loss = loss.forward(t.model().forward(x), y);
            let grads = GradientsParams::from_grads(loss.backward(), t.model());
            t.optimize(lr, grads);
            (loss, bias)
        },
    )
    .expect("one device");
    for index in 0..8 {
        let before: Vec<f32> = eager
            .model
            .output_bias()
            .into_data()
            .try_into_vec()
            .expect("f32");
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        assert_eq!(out.path.is_graph(), index >= 3);
        let returned: Vec<f32> = out.output.1.into_data().try_into_vec().expect("f32");
        assert_eq!(returned, before, "step {index}, {}", out.path);
        eager.step(batch(&device, index, 64), LR);
        eager.model = step.model();
    }
}

/// A model cloned before the step was made keeps its BatchNorm statistics: a clone shares their cells.
pub fn a_clone_kept_outside_keeps_its_statistics(device: &Device) {
    let (device, model, _) = twins::<BnNet>(device);
    let kept = model.clone();
    let before = bits(&kept);
    let mut step = graphed(model, required(), &device);
    for index in 0..8 {
        step.run(batch(&device, index, 64), LR).expect("runs");
    }
    assert_eq!(step.report().replayed, 4);
    assert_same(&bits(&kept), &before, "the clone");
}

/// A host value that the step changes, in its state or its output, is refused: a replay would repeat the recorded one.
pub fn moving_host_values_are_refused(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let loss = CrossEntropyLossConfig::new().init(&device);
    let counter = Cell::new(0i64);
    let mut step = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        GraphConfig::new(),
        |t: &mut Training<Mlp>, (x, y): Batch, lr: StepRate| {
            let loss = loss.forward(t.model().forward(x), y);
            let grads = GradientsParams::from_grads(loss.backward(), t.model());
            t.optimize(lr, grads);
            counter.set(counter.get() + 1);
            (loss, counter.get())
        },
    )
    .expect("one device");
    for index in 0..6 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        assert_eq!(out.output.1, index as i64 + 1);
        let expected = if index == 0 {
            "warming-up"
        } else {
            "unstable-operations"
        };
        assert_eq!(word(&out), expected, "step {index}: {}", out.path);
    }
}

/// A step that does something else just when it is recorded is recorded again, not replayed for ever.
pub fn a_step_that_differs_when_recorded_is_refused(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let calls = Cell::new(0);
    let skip_fourth = |calls: &Cell<u32>| {
        calls.set(calls.get() + 1);
        calls.get() == 4
    };
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut step = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        GraphConfig::new(),
        |t: &mut Training<Mlp>, (x, y): Batch, lr: StepRate| {
            let skip = skip_fourth(&calls);
            let loss = loss.forward(t.model().forward(x), y);
            if !skip {
                let grads = GradientsParams::from_grads(loss.backward(), t.model());
                t.optimize(lr, grads);
            }
            loss
        },
    )
    .expect("one device");
    let mut eager = Eager::new(twin, &device);
    for index in 0..7 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        // The fourth call, which does something else, is not sealed; the fifth, in the same step, is.
        let expected = match index {
            0..3 => "warming-up",
            3 => "recorded",
            _ => "replayed",
        };
        assert_eq!(word(&out), expected, "step {index}: {}", out.path);
        eager.step(batch(&device, index, 64), LR);
        // What the fusion server has seen decides how it cuts a queue, and it has seen the fourth call.
        let (ours, theirs) = (bits(&step.model()), bits(&eager.model));
        let when = format_args!("step {index}");
        assert_same_or_near(&device, &ours, &theirs, CUT_TOLERANCE, when);
    }
}

/// A step run inside another step's closure runs eagerly and hangs nothing.
pub fn a_step_inside_a_step(device: &Device) {
    let (device, outer, inner) = twins::<Mlp>(device);
    let inner = RefCell::new(graphed(inner, GraphConfig::new(), &device));
    let loss = CrossEntropyLossConfig::new().init(&device);
    let mut step = GraphedStep::new(
        Training::new(outer, SgdConfig::new().init()),
        GraphConfig::new(),
        |t: &mut Training<Mlp>, (x, y): Batch, lr: StepRate| {
            let nested = inner
                .borrow_mut()
                .run((x.clone(), y.clone()), lr)
                .expect("runs");
            assert_eq!(word(&nested), "capture-busy");
            let loss = loss.forward(t.model().forward(x), y);
            let grads = GradientsParams::from_grads(loss.backward(), t.model());
            t.optimize(lr, grads);
            loss
        },
    )
    .expect("one device");
    for index in 0..6 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        assert!(
            !out.path.is_graph(),
            "the inner state is hidden from the outer step: {}",
            out.path
        );
    }
    assert_same(
        &bits(&step.model()),
        &bits(&inner.borrow().model()),
        "both trained",
    );
}

/// Bad input: a clear error that names the value, the state as it was, and the next call works.
pub fn bad_input_is_an_error(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let mut step = graphed(model, required(), &device);
    for index in 0..5 {
        step.run(batch(&device, index, 64), LR).expect("runs");
    }
    let before = bits(&step.model());

    let (x, _) = batch(&device, 0, 64);
    let empty = (Tensor::zeros([0, 32], &device), Tensor::zeros([0], &device));
    let error = step.run(empty, LR).expect_err("no samples");
    assert!(
        matches!(&error, StepError::EmptyBatch { index: 0, shape } if shape == &[0, 32]),
        "{error}"
    );

    let error = step
        .run(batch(&device, 0, 64), f64::NAN)
        .expect_err("not a rate");
    assert!(matches!(error, StepError::LearningRate { .. }), "{error}");

    let elsewhere: Tensor<1, Int> = Tensor::zeros([64], &Device::flex());
    let error = step.run((x, elsewhere), LR).expect_err("another device");
    assert!(
        matches!(&error, StepError::BatchDevice { index: 1, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("to_device"));

    assert_same(&bits(&step.model()), &before, "afterwards");
    let out = step.run(batch(&device, 5, 64), LR).expect("runs");
    assert_eq!(word(&out), "replayed");
    assert_eq!(step.report().steps(), 6);
}

/// Another dtype is another key: it warms up on its own and is not fed to the old graph.
pub fn another_dtype_is_another_key(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, GraphConfig::new(), &device);
    for index in 0..6 {
        step.run(batch(&device, index, 64), LR).expect("runs");
        eager.step(batch(&device, index, 64), LR);
    }
    let other = |index| {
        let (x, y) = batch(&device, index, 64);
        (x, y.cast(burn::tensor::IntDType::U32))
    };
    let out = step.run(other(6), LR).expect("runs");
    assert_eq!(word(&out), "warming-up");
    eager.step(other(6), LR);
    assert_same(&bits(&step.model()), &bits(&eager.model), "at the end");
}

/// A model moved to a device without graphs trains on there, and says why it is eager.
pub fn a_model_moved_away_falls_back_by_name(device: &Device) {
    let (device, model, _) = twins::<Mlp>(device);
    let mut step = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        GraphConfig::new(),
        |t: &mut Training<Mlp>, (x, y): Batch, lr: StepRate| {
            let loss = CrossEntropyLossConfig::new().init(&x.device());
            let loss = loss.forward(t.model().forward(x), y);
            t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
            loss
        },
    )
    .expect("one device");
    for index in 0..5 {
        step.run(batch(&device, index, 64), LR).expect("runs");
    }
    let before = bits(&step.model());
    let cpu = Device::flex().autodiff();
    step.update_state(|training| {
        let (model, optimizer) = training.into_parts();
        Training::new(model.fork(&cpu), optimizer)
    })
    .expect("one device");
    assert_same(&bits(&step.model()), &before, "afterwards");
    let error = step
        .run(batch(&device, 5, 64), LR)
        .expect_err("the batch is on the old device");
    assert!(
        matches!(error, StepError::BatchDevice { index: 0, .. }),
        "{error}"
    );
    let out = step.run(batch(&cpu, 5, 64), LR).expect("runs");
    assert_eq!(word(&out), "unsupported", "{}", out.path);
}

/// The graph's bound: a third key evicts the least recently used one, which is recorded again when it comes back.
pub fn the_cache_is_bounded(device: &Device) {
    let (device, model, twin) = twins_for::<Mlp>(device, &[64, 48, 32]);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, GraphConfig::new().with_max_graphs(2), &device);
    let mut index = 0;
    for size in [64, 48, 32, 64] {
        for _ in 0..6 {
            step.run(batch(&device, index, size), LR).expect("runs");
            eager.step(batch(&device, index, size), LR);
            index += 1;
        }
        assert_same(
            &bits(&step.model()),
            &bits(&eager.model),
            format_args!("size {size}"),
        );
    }
    let report = step.report();
    assert_eq!(
        (report.graphs_held, report.captures, report.evictions),
        (2, 4, 2),
        "{report}"
    );
    let json = serde_json::to_string(&report).expect("serialises");
    let back: burn_cuda_graph::Report = serde_json::from_str(&json).expect("deserialises");
    assert_eq!(
        (back.steps(), back.captures),
        (report.steps(), report.captures)
    );
    assert_eq!(back.entries.len(), 3);
}

/// An optimizer of ours, graphed, against Burn's, eager: every parameter after every step, at a rate that moves.
/// `repeats`: its kernels repeat their own bits.
pub fn an_optimizer_replays<M: Net>(
    device: &Device,
    steps: usize,
    repeats: bool,
    ours: impl Fn() -> ModuleOptimizer,
    theirs: impl Fn() -> ModuleOptimizer,
) {
    // A momentum of 0.9 carries a parameter up to ten times as far as the rate.
    const REACH: f64 = 10.0;
    let rate = |index: usize| 0.01 * (1.0 + (index as f64 * 0.7).sin());
    // The first pass tunes the kernels on both sides.
    for compare in [false, true] {
        let (device, model, twin) = twins::<M>(device);
        // Plain Burn runs the same closure: when it drops a tensor decides how fusion cuts the queue.
        let plain = closure::<M, _>(&device, |_| {});
        let unrecorded = twin.valid().train();
        let mut expected = Training::new(twin, theirs());
        let step_of = |model: M, config: GraphConfig| {
            let step = closure::<M, _>(&device, |_| {});
            GraphedStep::new(Training::new(model, ours()), config, step).expect("one device")
        };
        let mut step = step_of(model, required());
        let mut unrecorded = step_of(unrecorded, GraphConfig::new().with_warmup(u32::MAX));
        let (mut words, mut moved) = (Vec::new(), 0.0);
        for index in 0..steps {
            let out = step
                .run(batch(&device, index, 64), rate(index))
                .expect("runs");
            words.push(word(&out));
            moved += rate(index);
            unrecorded
                .run(batch(&device, index, 64), rate(index))
                .expect("runs");
            plain(&mut expected, batch(&device, index, 64), rate(index).into());
            if compare {
                let when = format_args!("step {index}, {words:?}");
                let ours = bits(&step.model());
                let own = bits(&unrecorded.model());
                match repeats {
                    true => assert_same(&ours, &own, when),
                    false => assert_same_or_near(&device, &ours, &own, CUT_TOLERANCE, when),
                }
                let theirs = bits(expected.model());
                assert_same_or_moved(&device, &ours, &theirs, REACH * moved, when);
            }
        }
        let report = step.report();
        assert_eq!(report.captures, 1, "{words:?} {report}");
        assert!(report.replayed as usize >= steps - 6, "{words:?} {report}");
    }
}
