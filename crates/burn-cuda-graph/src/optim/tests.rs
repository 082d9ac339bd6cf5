//! Every optimizer as it runs in a graphed step, without the graph: with its scalars in slots, and with its step count on
//! the device. Both must be what it is in plain Burn.

use super::*;
use crate::context::{self, Context, Mode, Rates, SlotSource};
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdjustLrFn, RecordState, StateSink};
use burn::tensor::{Bool, DType, Device, TensorData};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

macro_rules! with_every_optimizer {
    ($check:ident) => {
        let decay = || Some(WeightDecayConfig::new(0.1));
        let momentum = || Some(MomentumConfig::new().with_nesterov(true));
        let sgd = || SgdConfig::new().with_momentum(momentum());
        $check("sgd", sgd().with_weight_decay(decay()).build(), [4, 3]);
        let adam = || AdamConfig::new().with_amsgrad(true).with_beta_2(0.8);
        $check("adam", adam().with_weight_decay(decay()).build(), [4, 3]);
        let adamw = || AdamWConfig::new().with_weight_decay(0.1);
        $check("adamw", adamw().with_amsgrad(true).build(), [4, 3]);
        let cautious = adamw().with_cautious_weight_decay(true);
        $check("cautious adamw", cautious.build(), [4, 3]);
        $check("rmsprop", RmsPropConfig::new().build(), [4, 3]);
        let centered = RmsPropConfig::new().with_centered(true);
        $check("centered rmsprop", centered.build(), [4, 3]);
        $check("adagrad", AdaGradConfig::new().build(), [4, 3]);
        let fading = AdaGradConfig::new().with_lr_decay(0.3);
        $check("fading adagrad", fading.build(), [4, 3]);
        let adan = || AdanConfig::new().with_weight_decay(0.1);
        $check("adan", adan().build(), [4, 3]);
        $check("no_prox adan", adan().with_no_prox(true).build(), [4, 3]);
        let lion = LionConfig::new().with_weight_decay(0.1);
        $check("lion", lion.build(), [4, 3]);
        let lamb = LambConfig::new().with_weight_decay(0.1);
        $check("lamb", lamb.build(), [4, 3]);
        let adafactor = || AdafactorConfig::new().with_weight_decay(0.1);
        $check("adafactor", adafactor().build(), [4, 3]);
        $check("adafactor", adafactor().build(), [6]);
        $check("adafactor", adafactor().build(), [2, 4, 3]);
        let absolute = adafactor().with_relative_step(false);
        $check("absolute adafactor", absolute.build(), [4, 3]);
        let muon = MuonConfig::new().with_weight_decay(decay());
        $check("muon", muon.build(), [4, 3]);
        let wide = MuonConfig::new().with_adjust_lr_fn(AdjustLrFn::MatchRmsAdamW);
        $check("muon", wide.build(), [3, 5]);
    };
}

/// Numbers of both signs, the same on every call.
fn values<const D: usize>(shape: [usize; D], seed: usize) -> Tensor<D> {
    let count: usize = shape.iter().product();
    let value = |index: usize| ((index * 7 + seed * 13 + seed * index) % 17) as f32 / 8.0 - 1.03;
    let values: Vec<f32> = (0..count).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

/// [`values`] with negative zeros, of which `x - x * 0` makes positive ones. The rate of the first step is zero, and its
/// gradient has both signs there.
fn start<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    let mut values: Vec<f32> = values(shape, 99).into_data().try_into_vec().unwrap();
    for value in values.iter_mut().take(4) {
        *value = -0.0;
    }
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

/// Moves, is zero in the first and in a later step, and passes `1 / sqrt(step)`.
fn rate(step: usize) -> f64 {
    match step {
        0 | 5 => 0.0,
        _ => 0.5 - 0.1 * (step % 3) as f64,
    }
}

/// Parameter and state, as numbers.
fn read<const D: usize, S: RecordState>(
    param: &Tensor<D>,
    state: &Option<S>,
) -> BTreeMap<String, Vec<f32>> {
    let mut sink = StateSink::default();
    if let Some(state) = state {
        state.state_flatten("1", &mut sink);
    }
    let param = ("param".to_string(), param.clone().into_data());
    let tensors = sink.tensors.into_iter().chain([param]);
    let mut read: BTreeMap<_, _> = tensors
        .map(|(name, data)| (name, data.try_into_vec().unwrap()))
        .collect();
    for (name, value) in sink.scalars {
        read.insert(name, vec![usize::try_from(value).unwrap() as f32]);
    }
    read
}

fn bits(read: BTreeMap<String, Vec<f32>>) -> BTreeMap<String, Vec<u32>> {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    read.into_iter()
        .map(|(name, values)| (name, bits(values)))
        .collect()
}

/// Slots whose tensors hold what an earlier run of the same step wrote.
#[derive(Clone, Default)]
struct Slots(Arc<Mutex<BTreeMap<usize, f64>>>);

impl Slots {
    fn values(&self) -> MutexGuard<'_, BTreeMap<usize, f64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SlotSource for Slots {
    fn tensor(&mut self, index: usize, dtype: DType) -> Option<Tensor<1>> {
        let value = self.values().get(&index).copied().unwrap_or(f64::NAN);
        let tensor = Tensor::<1>::full([1], value, (&Device::flex(), dtype));
        Some(tensor)
    }
    fn write(&mut self, index: usize, _dtype: DType, value: f64) {
        self.values().insert(index, value);
    }
}

fn check_slots<O: Optimizer, const D: usize>(name: &str, optimizer: O, shape: [usize; D]) {
    let (mut plain, mut slotted) = ((start(shape), None), (start(shape), None));
    for step in 0..10 {
        let grad = values(shape, step);
        let lr = rate(step);
        plain = optimizer.step(lr, plain.0, grad.clone(), plain.1);
        let slots = Slots::default();
        let run = || {
            let rates = Rates::new(lr.into(), &[]);
            let context = Context::new(Mode::Watched, rates, Some(Box::new(slots.clone())));
            let (param, state) = slotted.clone();
            context::enter(context, || optimizer.step(lr, param, grad.clone(), state))
        };
        drop(run());
        let (after, left) = run();
        slotted = after;
        assert!(!left.slots.is_empty(), "{name}: no scalar is in a slot");
        let (found, expected) = (read(&slotted.0, &slotted.1), read(&plain.0, &plain.1));
        assert!(expected.values().flatten().all(|value| value.is_finite()));
        assert_eq!(bits(found), bits(expected), "{name}: step {step}");
    }
}

/// A replay computes from slots what the eager step computes from numbers, to the bit, at a rate of zero too.
#[test]
fn scalars_in_slots_change_no_bit() {
    with_every_optimizer!(check_slots);
}

/// Two matrices of unlike shape have unlike adjusted rates, and so must not share a slot.
#[test]
fn muon_has_a_rate_for_each_shape() {
    let muon = MuonConfig::new().build();
    let rates = Rates::new(0.1.into(), &[]);
    let slots = Slots::default();
    let context = Context::new(Mode::Watched, rates, Some(Box::new(slots.clone())));
    let (_, left) = context::enter(context, || {
        for shape in [[4, 2], [9, 3], [8, 4]] {
            drop(muon.step(0.1, values(shape, 0), values(shape, 1), None));
        }
    });
    assert_eq!(left.slots.len(), 2);
    let expected = [0.1 * 2.0f64.sqrt(), 0.1 * 3.0f64.sqrt()];
    assert_eq!(
        slots.values().values().copied().collect::<Vec<_>>(),
        expected
    );
}

fn check_device_count<O: Optimizer, const D: usize>(name: &str, optimizer: O, shape: [usize; D]) {
    let (mut plain, mut counted) = ((start(shape), None), (start(shape), None));
    for step in 0..10 {
        let grad = values(shape, step);
        let lr = rate(step);
        let skipped = [0, 1, 4, 8].contains(&step);
        let mask = Tensor::<1, Bool>::from_data([skipped], &Device::flex());
        // What a skipped step computes is not finite.
        let given = match skipped {
            true => grad.clone() * f32::INFINITY,
            false => grad.clone(),
        };
        counted = context::with_skip_mask(mask, || {
            optimizer.step(lr, counted.0.clone(), given, counted.1.clone())
        });
        if !skipped {
            plain = optimizer.step(lr, plain.0, grad, plain.1);
        }
        let (found, expected) = (read(&counted.0, &counted.1), read(&plain.0, &plain.1));
        assert_eq!(
            found.keys().collect::<Vec<_>>(),
            expected.keys().collect::<Vec<_>>(),
            "{name}: step {step}"
        );
        for (leaf, expected) in expected {
            for (found, expected) in found[&leaf].iter().zip(&expected) {
                // The device computes in `f32` what the host does in `f64`, and powers by another function.
                let close = (found - expected).abs() <= 1e-6 + 3e-4 * expected.abs();
                assert!(
                    close,
                    "{name}: step {step}: {leaf}: {found}, not {expected}"
                );
            }
        }
    }
}

/// Under loss scaling an optimizer takes the steps that count and no others, and counts them.
#[test]
fn skipped_steps_change_nothing() {
    with_every_optimizer!(check_device_count);
}
