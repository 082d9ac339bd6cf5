//! How the step that the calling thread is in gets its rates and its optimizer scalars.
//!
//! A recording freezes every scalar of a launch. So inside a graphed step the scalars that move from step to step (the
//! learning rate, what an optimizer derives from it and from its step count) are tensors: *slots* of one small device
//! buffer, which is written before each replay. What a slot holds is a function of rate and step count, kept with the
//! recording, since a replay calls no optimizer.
//!
//! A rate reaches an optimizer as a plain `f64`, through code that is not ours. To know which one arrives, a recording
//! passes *marked* rates: quiet NaNs whose payload numbers the rate. Nothing executes while a window is open, so no
//! result is ever computed from one. A marked rate that arrives anywhere but at one of our optimizers shows up as a
//! scalar that the rehearsal did not have, and the recording is given up for one that has the rate baked in.

use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::module::{ParamGroup, ParamId};
use burn::tensor::{Bool, DType, Tensor};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The learning rates of a step: one for all parameters, or one for each group of them.
///
/// Made from an `f64`, or from the [`ModuleLearningRate`] that a
/// [`ModuleLrScheduler`](burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler) answers.
#[derive(Clone)]
pub struct LearningRates {
    source: RateSource,
}

#[derive(Clone)]
enum RateSource {
    Uniform(f64),
    Module(ModuleLearningRate),
}

impl core::fmt::Debug for LearningRates {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match &self.source {
            RateSource::Uniform(rate) => write!(f, "{rate}"),
            RateSource::Module(rates) => write!(f, "{} and groups", rates.base()),
        }
    }
}

impl From<f64> for LearningRates {
    fn from(rate: f64) -> Self {
        Self {
            source: RateSource::Uniform(rate),
        }
    }
}

impl From<ModuleLearningRate> for LearningRates {
    fn from(rates: ModuleLearningRate) -> Self {
        Self {
            source: RateSource::Module(rates),
        }
    }
}

impl From<&ModuleLearningRate> for LearningRates {
    fn from(rates: &ModuleLearningRate) -> Self {
        rates.clone().into()
    }
}

/// The rates of one step, by class: parameters whose rates are equal in this step share one.
#[derive(Debug, Clone)]
pub(crate) struct Rates {
    given: LearningRates,
    /// The rate of each class; class 0 is the base rate.
    pub classes: Vec<f64>,
    /// The class of each parameter, and the parameter; empty when all are of class 0.
    members: Vec<(ParamId, u16)>,
    /// What was given holds for every parameter that classes were made for, and for no other.
    pub exact: bool,
}

impl Rates {
    /// Sort `parameters` by their rates.
    pub fn new(given: LearningRates, parameters: &[(ParamId, String)]) -> Self {
        let (mut classes, mut members) = (Vec::new(), Vec::new());
        match &given.source {
            RateSource::Uniform(rate) => classes.push(*rate),
            RateSource::Module(rates) => {
                classes.push(rates.base());
                for (id, path) in parameters {
                    let rate = rates.lr_from_param(*id, Some(path));
                    let known = classes
                        .iter()
                        .position(|class| class.to_bits() == rate.to_bits());
                    let class = known.unwrap_or_else(|| {
                        classes.push(rate);
                        classes.len() - 1
                    });
                    members.push((*id, class as u16));
                }
                if members.iter().all(|(_, class)| *class == 0) {
                    members.clear();
                }
            }
        }
        Self {
            exact: matches!(given.source, RateSource::Uniform(_)) || !parameters.is_empty(),
            given,
            classes,
            members,
        }
    }

    /// The rate that a uniform schedule gives.
    pub fn base(&self) -> f64 {
        self.classes.first().copied().unwrap_or_default()
    }

    /// The bits of every class.
    pub fn bits(&self) -> Vec<u64> {
        self.classes.iter().map(|rate| rate.to_bits()).collect()
    }

    /// Which parameter is of which class; empty when all are of the first.
    pub fn partition(&self) -> Vec<u16> {
        self.members.iter().map(|(_, class)| *class).collect()
    }

    /// A value that is not finite.
    pub fn not_finite(&self) -> Option<f64> {
        self.classes.iter().copied().find(|rate| !rate.is_finite())
    }

    /// Each parameter at what `rate_of` answers for its class.
    fn module_rate(&self, rate_of: impl Fn(u16) -> f64) -> ModuleLearningRate {
        if self.members.is_empty() {
            return rate_of(0).into();
        }
        let mut schedulers = ModuleLrScheduler::new(rate_of(0));
        for class in 1..self.classes.len() as u16 {
            let ids = self.members.iter().filter(|(_, of)| *of == class);
            let group = ParamGroup::from_ids(ids.map(|(id, _)| *id).collect());
            schedulers = schedulers.with_group(group, rate_of(class));
        }
        schedulers.step()
    }
}

/// The learning rate of the step, as its closure gets it.
///
/// Hand it on to [`Training::optimize`](crate::Training::optimize) and its siblings; `lr * 0.1` is a rate that follows this
/// one. Used in these ways with the optimizers of [`optim`](crate::optim), a new rate needs no new recording.
/// [`value`](Self::value) and [`module`](Self::module) give numbers; a step that asks for them has the rate baked in, and
/// each rate its own graph.
///
/// Valid during the step it was made for. One made from an `f64` is that number, for calling a step's closure outside of
/// a step.
#[derive(Debug, Clone, Copy)]
pub struct StepRate {
    /// A number of its own; `None` for the rate of the step.
    number: Option<f64>,
    scale: f64,
}

impl From<f64> for StepRate {
    fn from(number: f64) -> Self {
        Self {
            number: Some(number),
            scale: 1.0,
        }
    }
}

impl StepRate {
    pub(crate) fn new() -> Self {
        Self {
            number: None,
            scale: 1.0,
        }
    }

    /// The number: the base rate where there are several. The step's rate is then part of its shape key.
    pub fn value(self) -> f64 {
        if let Some(number) = self.number {
            return number * self.scale;
        }
        with_context(|context| {
            context.rate_read = true;
            context.rates.base() * self.scale
        })
        .unwrap_or(f64::NAN)
    }

    /// The rates as Burn's optimizers take them: numbers, so that, as after [`value`](Self::value), the step's rates are part
    /// of its shape key. [`Training::optimize`](crate::Training::optimize) takes the rate itself.
    pub fn module(self) -> ModuleLearningRate {
        self.rates(|context, scale| {
            context.rate_read = true;
            context.number_rate(scale)
        })
    }

    /// The rates, marked while they are tracked. They must reach an optimizer as they are.
    pub(crate) fn tracked(self) -> ModuleLearningRate {
        self.rates(Context::module_rate)
    }

    fn rates(
        self,
        of_step: impl FnOnce(&mut Context, f64) -> ModuleLearningRate,
    ) -> ModuleLearningRate {
        match self.number {
            Some(number) => (number * self.scale).into(),
            None => with_context(|context| of_step(context, self.scale))
                .unwrap_or_else(|| f64::NAN.into()),
        }
    }
}

impl core::ops::Mul<f64> for StepRate {
    type Output = StepRate;
    fn mul(self, scale: f64) -> StepRate {
        StepRate {
            scale: self.scale * scale,
            ..self
        }
    }
}

impl core::ops::Mul<StepRate> for f64 {
    type Output = StepRate;
    fn mul(self, rate: StepRate) -> StepRate {
        rate * self
    }
}

impl core::ops::Div<f64> for StepRate {
    type Output = StepRate;
    fn div(self, by: f64) -> StepRate {
        StepRate {
            scale: self.scale / by,
            ..self
        }
    }
}

/// The number, as [`StepRate::value`] gives it.
impl From<StepRate> for LearningRates {
    fn from(rate: StepRate) -> Self {
        rate.value().into()
    }
}

impl From<StepRate> for ModuleLearningRate {
    fn from(rate: StepRate) -> Self {
        rate.module()
    }
}

/// The rate of an update: that of the step, or one of the caller's own.
#[derive(Clone)]
pub struct UpdateRate(pub(crate) UpdateRateKind);

#[derive(Clone)]
pub(crate) enum UpdateRateKind {
    Step(StepRate),
    Own(ModuleLearningRate),
}

impl core::fmt::Debug for UpdateRate {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match &self.0 {
            UpdateRateKind::Step(rate) => rate.fmt(f),
            UpdateRateKind::Own(rates) => write!(f, "{}", rates.base()),
        }
    }
}

impl From<StepRate> for UpdateRate {
    fn from(rate: StepRate) -> Self {
        Self(UpdateRateKind::Step(rate))
    }
}

impl From<f64> for UpdateRate {
    fn from(rate: f64) -> Self {
        Self(UpdateRateKind::Own(rate.into()))
    }
}

impl From<ModuleLearningRate> for UpdateRate {
    fn from(rates: ModuleLearningRate) -> Self {
        Self(UpdateRateKind::Own(rates))
    }
}

impl UpdateRate {
    /// As an optimizer takes it.
    pub(crate) fn tracked(self) -> ModuleLearningRate {
        match self.0 {
            UpdateRateKind::Step(rate) => rate.tracked(),
            UpdateRateKind::Own(rates) => rates,
        }
    }
}

/// How the step runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// As plain Burn: scalars are launch arguments.
    Plain,
    /// Watched: scalars are slots, written as they are asked for.
    Watched,
    /// Recorded. `tracked`: rates are marked; else they are numbers, which the recording freezes.
    Recording { tracked: bool },
}

/// Where slots are.
pub(crate) trait SlotSource: Send {
    /// The `[1]` tensor of slot `index`, in `dtype`; `None` when there is no room.
    fn tensor(&mut self, index: usize, dtype: DType) -> Option<Tensor<1>>;
    /// Write the slot, before any operation that is launched from now on: the queue is to hold none that reads it.
    fn write(&mut self, index: usize, dtype: DType, value: f64);
}

/// What a slot holds, as a function of rate and step count.
pub(crate) type SlotValue = Arc<dyn Fn(f64, u64) -> f64 + Send + Sync>;

/// Where the rate in a slot's value comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum SlotRate {
    /// A number of the step's own.
    Constant(f64),
    /// That of a class, scaled.
    Class { class: u16, scale: f64 },
}

/// One slot of a recording.
#[derive(Clone)]
pub(crate) struct Slot {
    pub dtype: DType,
    pub rate: SlotRate,
    /// The count it reads, and the step counters that showed it: parameters whose counts are equal share a slot.
    pub steps: Option<u64>,
    pub clocks: Vec<u64>,
    pub value: SlotValue,
}

impl core::fmt::Debug for Slot {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Slot")
            .field("dtype", &self.dtype)
            .field("rate", &self.rate)
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

/// What two requests must share to be the same slot.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct SlotKey {
    optimizer: u64,
    name: &'static str,
    dtype: DType,
    rate: u64,
    steps: Option<u64>,
}

/// A scalar that an optimizer asks for.
pub(crate) struct Request {
    /// The optimizer's number: two with other hyper-parameters have other scalars of the same name.
    pub optimizer: u64,
    pub name: &'static str,
    pub dtype: DType,
    /// The rate as it arrived.
    pub rate: f64,
    /// The step counter and the count, where the value depends on them.
    pub clock: Option<(u64, u64)>,
    pub value: SlotValue,
}

/// The context of one step.
pub(crate) struct Context {
    pub mode: Mode,
    pub rates: Rates,
    source: Option<Box<dyn SlotSource>>,
    /// Rates handed out: class and scale, by the number in their mark.
    marks: Vec<(u16, f64)>,
    pub slots: Vec<Slot>,
    known: HashMap<SlotKey, usize>,
    /// The closure asked for a number, so the rate must be in the key.
    pub rate_read: bool,
    /// Updates of all parameters are made together.
    pub fused_updates: bool,
    /// Tensors of the state that an update may overwrite, by their number: nothing reads the old value after it.
    pub overwritten: HashSet<u64>,
}

/// Quiet NaNs with this in their upper half are marked rates.
const MARK: u64 = 0x7ff8_b06c_0000_0000;

/// Whether `scalar` may be a marked rate, as it was handed out or after arithmetic, which need not keep a NaN's payload.
pub(crate) fn is_marked(scalar: f64) -> bool {
    scalar.is_nan()
}

impl Context {
    pub fn new(mode: Mode, rates: Rates, source: Option<Box<dyn SlotSource>>) -> Self {
        Self {
            mode,
            rates,
            source,
            marks: Vec::new(),
            slots: Vec::new(),
            known: HashMap::new(),
            rate_read: false,
            fused_updates: false,
            overwritten: HashSet::new(),
        }
    }

    fn module_rate(&mut self, scale: f64) -> ModuleLearningRate {
        let first = self.marks.len() as u64;
        let classes = self.rates.classes.len() as u16;
        self.marks.extend((0..classes).map(|class| (class, scale)));
        match self.mode {
            Mode::Recording { tracked: true } => self
                .rates
                .module_rate(|class| f64::from_bits(MARK | (first + u64::from(class)))),
            _ => self.number_rate(scale),
        }
    }

    fn number_rate(&self, scale: f64) -> ModuleLearningRate {
        match scale {
            1.0 => match &self.rates.given.source {
                RateSource::Uniform(rate) => (*rate).into(),
                RateSource::Module(rates) => rates.clone(),
            },
            _ => self
                .rates
                .module_rate(|class| self.rates.classes[class as usize] * scale),
        }
    }

    /// What `rate` is, and a number that tells it from other rates.
    fn rate(&mut self, rate: f64) -> (SlotRate, u64) {
        let bits = rate.to_bits();
        if bits & 0xffff_ffff_0000_0000 == MARK
            && let Some((class, scale)) = self.marks.get((bits & 0xffff_ffff) as usize)
        {
            let (class, scale) = (*class, *scale);
            // The number it had in the rehearsal, which told slots apart there.
            let number = self.rates.classes[class as usize] * scale;
            return (SlotRate::Class { class, scale }, number.to_bits());
        }
        if !matches!(self.mode, Mode::Recording { tracked: true }) {
            // Told by the number. One of the closure's own that happens to be equal is found out when rates are marked.
            let handed = |(class, scale): &&(u16, f64)| {
                (self.rates.classes[*class as usize] * scale).to_bits() == bits
            };
            if let Some((class, scale)) = self.marks.iter().find(handed) {
                let (class, scale) = (*class, *scale);
                return (SlotRate::Class { class, scale }, bits);
            }
        }
        (SlotRate::Constant(rate), bits)
    }

    fn scalar(&mut self, request: Request) -> Option<Tensor<1>> {
        if self.mode == Mode::Plain {
            return None;
        }
        let (rate, number) = self.rate(request.rate);
        let key = SlotKey {
            optimizer: request.optimizer,
            name: request.name,
            dtype: request.dtype,
            rate: number,
            steps: request.clock.map(|(_, steps)| steps),
        };
        let source = self.source.as_mut()?;
        if let Some(index) = self.known.get(&key) {
            // A marked rate that shares its slot with another one would follow that one.
            if self.slots[*index].rate == rate {
                let clocks = &mut self.slots[*index].clocks;
                clocks.extend(
                    request
                        .clock
                        .map(|(clock, _)| clock)
                        .filter(|clock| !clocks.contains(clock)),
                );
                return source.tensor(*index, request.dtype);
            }
            self.rate_read = true;
        }
        let index = self.slots.len();
        let Some(tensor) = source.tensor(index, request.dtype) else {
            // What the value makes of a marked rate may not look like one: this step has its rate baked in.
            self.rate_read = true;
            return None;
        };
        if self.mode == Mode::Watched {
            let steps = request.clock.map_or(0, |(_, steps)| steps);
            let value = (request.value)(request.rate, steps);
            source.write(index, request.dtype, value);
        }
        self.slots.push(Slot {
            dtype: request.dtype,
            rate,
            steps: request.clock.map(|(_, steps)| steps),
            clocks: request.clock.map(|(clock, _)| clock).into_iter().collect(),
            value: request.value,
        });
        self.known.insert(key, index);
        Some(tensor)
    }
}

thread_local! {
    static CONTEXT: RefCell<Option<Context>> = const { RefCell::new(None) };
    static SKIP: RefCell<Option<Tensor<1, Bool>>> = const { RefCell::new(None) };
}

fn with_context<R>(f: impl FnOnce(&mut Context) -> R) -> Option<R> {
    CONTEXT.with_borrow_mut(|context| context.as_mut().map(f))
}

/// The slot of a scalar; `None` outside a graphed step, and where there is no room.
pub(crate) fn scalar(request: Request) -> Option<Tensor<1>> {
    with_context(|context| context.scalar(request)).flatten()
}

/// Whether updates of all parameters are made together in the step that the thread is in.
#[cfg_attr(not(feature = "cubecl-backend"), allow(dead_code))]
pub(crate) fn fuses_updates() -> bool {
    with_context(|context| context.fused_updates).unwrap_or(false)
}

/// Whether an update may overwrite the tensor of this number, whoever holds it.
#[cfg_attr(not(feature = "cubecl-backend"), allow(dead_code))]
pub(crate) fn overwrites(tensor: u64) -> bool {
    with_context(|context| context.overwritten.contains(&tensor)).unwrap_or(false)
}

/// Run `f` in `context`; the context as `f` left it, whether or not it panics.
pub(crate) fn enter<R>(context: Context, f: impl FnOnce() -> R) -> (R, Context) {
    struct Restore(Option<Context>);
    impl Drop for Restore {
        fn drop(&mut self) {
            let outer = self.0.take();
            CONTEXT.with_borrow_mut(|context| *context = outer);
        }
    }
    let fallback = Context::new(Mode::Plain, context.rates.clone(), None);
    let outer = CONTEXT.with_borrow_mut(|current| current.replace(context));
    let restore = Restore(outer);
    let result = f();
    let left = CONTEXT.with_borrow_mut(Option::take).unwrap_or(fallback);
    drop(restore);
    (result, left)
}

/// Where it holds, updates of parameters and optimizer state do not happen.
pub(crate) fn skip_mask() -> Option<Tensor<1, Bool>> {
    SKIP.with_borrow(Clone::clone)
}

/// Run `f` with updates masked out where `skip` holds.
pub(crate) fn with_skip_mask<R>(skip: Tensor<1, Bool>, f: impl FnOnce() -> R) -> R {
    struct Restore(Option<Tensor<1, Bool>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            let outer = self.0.take();
            SKIP.with_borrow_mut(|skip| *skip = outer);
        }
    }
    let _restore = Restore(SKIP.with_borrow_mut(|current| current.replace(skip)));
    f()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(rate: f64) -> Rates {
        Rates::new(rate.into(), &[])
    }

    /// A marked rate is recognised after it went through Burn's own types, scaled ones too, and a number is not
    /// mistaken for one.
    #[test]
    fn marked_rates_are_recognised() {
        let context = Context::new(Mode::Recording { tracked: true }, rates(0.05), None);
        let ((), mut left) = enter(context, || {
            let rate = StepRate::new();
            let plain = rate.tracked();
            let halved = (rate * 0.5).tracked();
            let id = ParamId::new();
            let (plain, halved) = (
                plain.lr_from_param(id, None),
                halved.lr_from_param(id, Some("a")),
            );
            assert!(plain.is_nan() && halved.is_nan());
            let seen = with_context(|context| (context.rate(plain).0, context.rate(halved).0));
            let class = |scale| SlotRate::Class { class: 0, scale };
            assert_eq!(seen, Some((class(1.0), class(0.5))));
        });
        let marked = f64::from_bits(MARK | 3);
        assert!(is_marked(marked) && is_marked(marked * 0.5 + 1.0) && !is_marked(0.05));
        assert_eq!(left.rate(0.05).0, SlotRate::Constant(0.05));
        assert!(matches!(left.rate(f64::NAN).0, SlotRate::Constant(_)));
        assert!(!left.rate_read);
    }

    /// Asking for the number is noticed, in every mode.
    #[test]
    fn a_read_rate_is_noticed() {
        for mode in [Mode::Watched, Mode::Recording { tracked: true }] {
            for read in [
                |rate: StepRate| rate.value(),
                |rate: StepRate| rate.module().base(),
            ] {
                let (value, left) = enter(Context::new(mode, rates(0.25), None), || {
                    read(StepRate::new() * 2.0)
                });
                assert_eq!(value, 0.5);
                assert!(left.rate_read);
            }
        }
    }

    /// Parameters of equal rates share a class, and a group keeps its rate through the marks.
    #[test]
    fn rates_of_groups_keep_their_parameters() {
        let ids: Vec<ParamId> = (0..3).map(|_| ParamId::new()).collect();
        let parameters: Vec<(ParamId, String)> =
            ids.iter().map(|id| (*id, String::new())).collect();
        let given = ModuleLrScheduler::new(0.1)
            .with_group(ParamGroup::from_ids(vec![ids[1]]), 0.2)
            .step();
        let rates = Rates::new(given.into(), &parameters);
        assert_eq!(rates.classes, [0.1, 0.2]);
        assert_eq!(rates.partition(), [0, 1, 0]);
        let context = Context::new(Mode::Recording { tracked: true }, rates, None);
        let ((), _) = enter(context, || {
            let marked = StepRate::new().tracked();
            let classes: Vec<SlotRate> = ids
                .iter()
                .filter_map(|id| {
                    with_context(|context| context.rate(marked.lr_from_param(*id, None)).0)
                })
                .collect();
            let class = |class| SlotRate::Class { class, scale: 1.0 };
            assert_eq!(classes, [class(0), class(1), class(0)]);
        });
    }

    /// A panic in the step leaves no context behind.
    #[test]
    fn a_panic_leaves_no_context() {
        let panicked = std::panic::catch_unwind(|| {
            enter(Context::new(Mode::Watched, rates(0.1), None), || {
                panic!("scripted")
            })
        });
        assert!(panicked.is_err());
        assert!(with_context(|_| ()).is_none());
    }
}
