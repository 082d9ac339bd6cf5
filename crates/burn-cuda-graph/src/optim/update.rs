//! One parameter's update, written once for every way it runs.
//!
//! An optimizer describes its update with [`Update`]: how each tensor of its state evolves, and which scalars it takes.
//! The same description runs
//!
//! - as plain Burn: scalars are numbers, the operations are those of Burn's optimizer of the same name, one by one;
//! - in a graphed step: scalars that move are slots of a device buffer (see `context`);
//! - under loss scaling: the step count is on the device too, and where the step is skipped nothing changes.

#[cfg(feature = "cubecl-backend")]
use super::collect;
use super::state::{Layout, OptimizerState, StateData, Steps};
use crate::context::{self, Request};
#[cfg(feature = "cubecl-backend")]
use crate::multi::Entry;
use crate::tensor::AnyTensor;
#[cfg(feature = "cubecl-backend")]
use crate::update_rule::{Constant, Method, Rule};
use burn::tensor::{Bool, DType, Tensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Tells one optimizer's scalars from another's: a graph keeps what they are computed from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OptimizerId(u64);

impl OptimizerId {
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A scalar of an update: a number, or a `[1]` tensor on the device.
#[derive(Debug, Clone)]
#[expect(
    clippy::large_enum_variant,
    reason = "few at a time, and none for long"
)]
pub(crate) enum Scalar {
    Host(f64),
    Device(Tensor<1>),
}

impl Scalar {
    /// `x * self`.
    pub fn times<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Scalar::Host(value) => x.mul_scalar(*value),
            Scalar::Device(value) => {
                let value = as_rank(value, x.dtype());
                x.mul(value)
            }
        }
    }

    /// `x / self`.
    pub fn divides<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Scalar::Host(value) => x.div_scalar(*value),
            Scalar::Device(value) => {
                let value = as_rank(value, x.dtype());
                x.div(value)
            }
        }
    }

    /// `x + self`.
    pub fn plus<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        match self {
            Scalar::Host(value) => x.add_scalar(*value),
            Scalar::Device(value) => {
                let value = as_rank(value, x.dtype());
                x.add(value)
            }
        }
    }
}

fn as_rank<const D: usize>(value: &Tensor<1>, dtype: DType) -> Tensor<D> {
    cast(value.clone(), dtype).reshape([1; D])
}

/// `tensor` in another float type.
pub(crate) fn cast<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    match tensor.dtype() == dtype {
        true => tensor,
        false => tensor.cast(burn::tensor::FloatDType::from(dtype)),
    }
}

/// A `[1]` condition over the shape of `like`.
pub(super) fn spread<const D: usize>(
    condition: &Tensor<1, Bool>,
    like: &Tensor<D>,
) -> Tensor<D, Bool> {
    condition.clone().reshape([1; D]).expand(like.dims())
}

/// `first` where `is_first` holds, else `next` of `old`; and `old`, which is zero where there is none.
fn pick<const D: usize>(
    is_first: &Tensor<1, Bool>,
    old: Option<Tensor<D>>,
    first: impl FnOnce() -> Tensor<D>,
    next: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> (Tensor<D>, Tensor<D>) {
    let first = first();
    let old = old.unwrap_or_else(|| first.zeros_like());
    let next = next(old.clone());
    let is_first = spread(is_first, &first);
    (next.mask_where(is_first, first), old)
}

/// The device's step count, for scalars that are computed there.
pub(crate) struct DeviceTime {
    steps: Tensor<1>,
    rate: Tensor<1>,
}

impl DeviceTime {
    /// Steps taken, this one included: `[1]` `f32`.
    pub fn steps(&self) -> Tensor<1> {
        self.steps.clone()
    }
    /// The learning rate: `[1]` `f32`.
    pub fn rate(&self) -> Tensor<1> {
        self.rate.clone()
    }
    /// `base` to the power of the step count: `[1]` `f32`, multiplied out as `f32::powi` does.
    pub fn power(&self, base: f32) -> Tensor<1> {
        super::power::power(base, self.steps.clone())
    }
}

/// The update of one parameter in one step.
pub(crate) struct Update<const D: usize, L> {
    optimizer: OptimizerId,
    lr: f64,
    dtype: DType,
    /// The state before the step; `None` in the first.
    old: Option<StateData>,
    clock: u64,
    /// The count this step makes.
    steps: Steps,
    /// Where nothing changes: condition, and the parameter before the step.
    skip: Option<(Tensor<1, Bool>, Tensor<D>)>,
    /// With a count on the device: whether this is the first step that counts.
    first: Option<Tensor<1, Bool>>,
    leaves: Vec<(&'static str, AnyTensor)>,
    layout: core::marker::PhantomData<fn() -> L>,
}

impl<const D: usize, L: Layout> Update<D, L> {
    /// Begin the update of `param` by `optimizer` at rate `lr`.
    pub fn begin(
        optimizer: OptimizerId,
        lr: f64,
        param: &Tensor<D>,
        state: Option<OptimizerState<D, L>>,
    ) -> Self {
        let mask = context::skip_mask();
        let old = state.map(|state| state.data);
        let fresh;
        let known = match &old {
            Some(data) => data,
            None => {
                fresh = StateData::new::<L>(Steps::Host(0), Vec::new());
                &fresh
            }
        };
        let clock = known.clock;
        let counted_on_device = |before: Tensor<1>| {
            let first = before.clone().equal_scalar(0.0);
            (Steps::Device(before.add_scalar(1.0)), Some(first))
        };
        let (steps, first) = match (&known.steps, &mask) {
            (Steps::Host(before), None) => (Steps::Host(before + 1), None),
            (Steps::Host(before), Some(_)) => {
                counted_on_device(Tensor::full([1], *before as f32, &param.device()))
            }
            (Steps::Device(before), _) => counted_on_device(before.clone()),
        };
        Self {
            optimizer,
            lr,
            dtype: param.dtype(),
            clock,
            steps,
            skip: mask.map(|mask| (mask, param.clone())),
            first,
            old,
            leaves: Vec::new(),
            layout: core::marker::PhantomData,
        }
    }

    /// The learning rate.
    pub fn lr(&self) -> Scalar {
        self.rate("lr", |lr| lr)
    }

    /// A scalar that depends on the learning rate alone. `name` tells it from the optimizer's others.
    pub fn rate(
        &self,
        name: &'static str,
        value: impl Fn(f64) -> f64 + Send + Sync + 'static,
    ) -> Scalar {
        self.slot(name, self.dtype, None, move |lr, _| value(lr))
    }

    /// A scalar that depends on the step count (this step included) and the learning rate: `host` computes it, as Burn
    /// does; `device` does where the count is on the device, in `f32`.
    pub fn timed(
        &self,
        name: &'static str,
        host: impl Fn(f64, usize) -> f64 + Send + Sync + 'static,
        device: impl FnOnce(&DeviceTime) -> Tensor<1>,
    ) -> Scalar {
        match &self.steps {
            Steps::Host(steps) => self.slot(name, self.dtype, Some(*steps), move |lr, steps| {
                host(lr, steps as usize)
            }),
            Steps::Device(steps) => {
                let rate = match self.slot("lr.f32", DType::F32, None, |lr, _| lr) {
                    Scalar::Device(rate) => rate,
                    Scalar::Host(rate) => Tensor::full([1], rate as f32, &steps.device()),
                };
                Scalar::Device(device(&DeviceTime {
                    steps: steps.clone(),
                    rate,
                }))
            }
        }
    }

    fn slot(
        &self,
        name: &'static str,
        dtype: DType,
        steps: Option<u64>,
        value: impl Fn(f64, u64) -> f64 + Send + Sync + 'static,
    ) -> Scalar {
        let plain = value(self.lr, steps.unwrap_or(0));
        let slot = context::scalar(Request {
            optimizer: self.optimizer.0,
            name,
            dtype,
            rate: self.lr,
            clock: steps.map(|steps| (self.clock, steps)),
            value: Arc::new(value),
        });
        slot.map_or(Scalar::Host(plain), Scalar::Device)
    }

    /// A tensor of the state before the step, in the type of the update: a record is loaded in the device's default type.
    fn old(&self, leaf: &'static str) -> Option<Tensor<D>> {
        let leaves = self.old.as_ref().map(|data| &data.leaves)?;
        let found = leaves.iter().find(|(name, _)| *name == leaf);
        found.map(|(_, tensor)| cast(tensor.clone().into_float::<D>(), self.dtype))
    }

    /// What the update takes from a tensor of the state as it was before the step: `first` where there is none yet, else
    /// `next` of it. Changes nothing; to be asked for before the tensor evolves.
    ///
    /// With the step count on the device both are computed, and the device picks.
    pub fn read(
        &self,
        leaf: &'static str,
        first: impl FnOnce() -> Tensor<D>,
        next: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Tensor<D> {
        match (&self.first, self.old(leaf)) {
            (None, None) => first(),
            (None, Some(old)) => next(old),
            (Some(is_first), old) => pick(is_first, old, first, next).0,
        }
    }

    /// The new value of a tensor of the state: `first` of it where there is none yet, else `next` of the old one.
    ///
    /// With the step count on the device both are computed, and the device picks.
    pub fn evolve(
        &mut self,
        leaf: &'static str,
        first: impl FnOnce() -> Tensor<D>,
        next: impl FnOnce(Tensor<D>) -> Tensor<D>,
    ) -> Tensor<D> {
        let (new, kept) = match (&self.first, self.old(leaf)) {
            (None, None) => {
                let new = first();
                (new.clone(), new)
            }
            (None, Some(old)) => {
                // Gone from the old state: what is left is the only handle, and the update may be in place.
                if let Some(data) = &mut self.old {
                    data.leaves.retain(|(name, _)| *name != leaf);
                }
                let new = next(old);
                (new.clone(), new)
            }
            (Some(is_first), old) => {
                let (new, old) = pick(is_first, old, first, next);
                let kept = match &self.skip {
                    Some((skip, _)) => {
                        let skip = spread(skip, &new);
                        new.clone().mask_where(skip, old)
                    }
                    None => new.clone(),
                };
                (new, kept)
            }
        };
        self.leaves.push((leaf, AnyTensor::from_float(kept)));
        new
    }

    /// Put the update off, to be made by a kernel together with those of other parameters. `None` when it is to be made
    /// now, by Burn's operations: nobody collects updates, or no kernel makes this one.
    ///
    /// `names` are those of the state, in the order of the method.
    #[cfg(feature = "cubecl-backend")]
    pub fn put_off(
        &self,
        method: Method,
        penalty: Option<f32>,
        [param, grad]: [&Tensor<D>; 2],
        scalars: &[&Scalar],
        names: &[&'static str],
    ) -> Option<(Tensor<D>, Option<OptimizerState<D, L>>)> {
        let any = |tensor: &Tensor<D>| AnyTensor::from_float(tensor.clone());
        let plain = self.skip.is_none() && self.first.is_none();
        let single = param.dtype() == DType::F32 && grad.dtype() == DType::F32;
        if !plain || !single || !collect::collects(&any(param), &any(grad)) {
            return None;
        }
        let scalars = (scalars.iter())
            .map(|scalar| match scalar {
                Scalar::Device(slot) => Some(slot.clone()),
                Scalar::Host(_) => None,
            })
            .collect::<Option<Vec<_>>>()?;
        let old: Vec<Tensor<D>> = names.iter().filter_map(|name| self.old(name)).collect();
        let fits = |leaf: &Tensor<D>| leaf.dims() == param.dims();
        let first = old.is_empty();
        if !(first || old.len() == names.len() && old.iter().all(fits)) {
            return None;
        }
        let entry = Entry {
            rule: Rule {
                method,
                penalty: penalty.map(Constant::new),
                first,
            },
            param: any(param),
            grad: any(grad),
            leaves: old.iter().map(any).collect(),
            scalars,
        };
        let state = StateData {
            clock: self.clock,
            timed: L::TIME.is_some(),
            steps: self.steps.clone(),
            leaves: Vec::new(),
        };
        Some(collect::put_off(entry, state, names))
    }

    /// The parameter and the state after the step; `updated` is the parameter were it not skipped.
    pub fn finish(self, updated: Tensor<D>) -> (Tensor<D>, Option<OptimizerState<D, L>>) {
        let (param, steps) = match (self.skip, self.steps) {
            (Some((skip, before)), Steps::Device(steps)) => {
                let spread = spread(&skip, &updated);
                let taken = steps.clone().sub_scalar(1.0);
                (
                    updated.mask_where(spread, before),
                    Steps::Device(steps.mask_where(skip, taken)),
                )
            }
            (_, steps) => (updated, steps),
        };
        let data = StateData {
            clock: self.clock,
            timed: L::TIME.is_some(),
            steps,
            leaves: self.leaves,
        };
        (param, Some(OptimizerState::new(data)))
    }
}
