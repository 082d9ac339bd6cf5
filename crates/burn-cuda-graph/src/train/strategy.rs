//! Training a `burn_train::Learner` by graphed steps.
//!
//! `SupervisedTraining` hands a custom strategy the learner, the loaders and everything that watches a training, and
//! leaves the loop to it. This loop is that of Burn's single-device strategy, event by event; what differs is who takes the
//! step. The learner keeps its optimizer to itself, so it is taken over once at the start (`optim::extract`), and the
//! learner is brought up to date for each checkpoint.

use super::metric::{Monitor, ReplayRateMetric, SpeedUpMetric, StepTimeMetric};
use super::{hands_its_rate_on, optimize};
use crate::config::{GraphConfig, Policy};
use crate::context::{LearningRates, StepRate};
use crate::error::{FallbackReason, StepError};
use crate::explain::Explanation;
use crate::function::GraphedFn;
use crate::graphed_state::GraphedState;
use crate::optim;
use crate::report::Report;
use crate::shape_key::HostField;
use crate::state::Training;
use crate::step::StepPath;
use crate::tensor::AnyTensor;
use crate::tree::TensorTree;
use burn::data::dataloader::Progress;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsAccumulator, OptimizerRecord};
use burn::tensor::Device;
use burn_train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingComponents, TrainingError, TrainingItem, TrainingStrategy, ValidLoader,
    train::WorkerFailure,
};
use std::sync::Arc;
use std::time::Instant;

/// Train on one device, by graphed steps: what to give to `SupervisedTraining::with_training_strategy`.
///
/// ```ignore
/// let training = SupervisedTraining::new(directory, train, valid)
///     .metrics((AccuracyMetric::new(), LossMetric::new()))
///     .with_training_strategy(graph_strategy(device)); // the one line that is new
/// ```
///
/// [`GraphStrategy`] is the same with settings, metrics and a report.
pub fn graph_strategy<M>(device: Device) -> TrainingStrategy<M>
where
    M: LearnerModel,
    <M as TrainStep>::Input: TensorTree,
    <M as TrainStep>::Output: TensorTree,
{
    GraphStrategy::new(device).into()
}

/// A strategy of `burn_train` that trains by graphed steps on one device, as Burn's single-device strategy would: metrics,
/// validation, checkpoints and resuming, early stopping, interruption, gradient accumulation, learning rates and rendering
/// included.
///
/// The batches and outputs of the model's [`TrainStep`] are [`TensorTree`]s. The learner's optimizer comes from
/// [`optim`](crate::optim). Where it does not, or where the device has no graphs, every step runs eagerly, with Burn's own
/// result, and the [`report`](Self::report) says why; so does one line to `log`.
///
/// A model's own [`TrainStep::optimize`] is called as in Burn.
///
/// `SupervisedTraining::gradient_checkpointing` does not reach a custom strategy: give it a device that has it
/// (`device.autodiff().gradient_checkpointing()`).
///
/// Gradient accumulation needs micro-batches that all reach the same parameters, as
/// [`Training::accumulate`] does, and panics where they do not.
///
/// The learner keeps its own copy of the model beside the one that is trained; for a checkpoint it is brought up to date, with
/// a copy of the optimizer's tensors for as long as that takes.
///
/// Validation runs eagerly, on a copy of the model, unless [`with_graphed_validation`](Self::with_graphed_validation) is
/// called.
///
/// Clones share their report.
pub struct GraphStrategy<M: LearnerModel> {
    device: Device,
    config: GraphConfig,
    monitor: Monitor,
    samples: Option<u32>,
    validation: fn(&GraphConfig) -> Box<dyn Validate<M>>,
}

impl<M: LearnerModel> Clone for GraphStrategy<M> {
    fn clone(&self) -> Self {
        Self {
            device: self.device.clone(),
            config: self.config.clone(),
            monitor: self.monitor.clone(),
            samples: self.samples,
            validation: self.validation,
        }
    }
}

impl<M: LearnerModel> core::fmt::Debug for GraphStrategy<M> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("GraphStrategy")
            .field("device", &self.device)
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl<M: LearnerModel> GraphStrategy<M> {
    /// Training on `device`, with or without autodiff.
    pub fn new(device: Device) -> Self {
        Self {
            device: match device.is_autodiff() {
                true => device,
                false => device.autodiff(),
            },
            config: GraphConfig::new(),
            monitor: Monitor::default(),
            samples: None,
            validation: |_| Box::new(EagerValidation),
        }
    }

    /// Use `config` for the training step, and for a graphed validation.
    pub fn with_config(mut self, config: GraphConfig) -> Self {
        self.config = config;
        self
    }

    /// Time eager steps against replayed ones, for the [`speed_up_metric`](Self::speed_up_metric): of every so many steps that
    /// could be replayed, at least 24, eight run eagerly, so that memory and kernels are as in a training without graphs, and
    /// four replays after them are waited for. The second half of the former and the last three of the latter are timed. Off
    /// by default.
    ///
    /// An eager step needs its own memory beside the graph's, and may round otherwise in the last bits on CUDA. None is taken
    /// under [`Policy::RequireGraph`].
    pub fn with_speed_up_samples(mut self, every: u32) -> Self {
        self.samples = Some(every.clamp(24, 1 << 20));
        self
    }

    /// Record the validation step as well. It then reads the live parameters in the graph's buffers; each shape of a
    /// validation batch holds a graph of its own.
    pub fn with_graphed_validation(mut self) -> Self
    where
        <M as InferenceStep>::Input: TensorTree,
        <M as InferenceStep>::Output: TensorTree,
    {
        self.validation = |config| {
            Box::new(GraphedValidation {
                function: GraphedFn::read_only(config.clone(), validation_step::<M>),
            })
        };
        self
    }

    /// The share of training steps that a graph executed, in percent, as a metric of the training.
    pub fn replay_rate_metric(&self) -> ReplayRateMetric {
        ReplayRateMetric::new(self.monitor.clone())
    }

    /// The time from one training step to the next, in milliseconds, as a metric of the training.
    pub fn step_time_metric(&self) -> StepTimeMetric {
        StepTimeMetric::new(self.monitor.clone())
    }

    /// The time of an eager step over that of a replayed one, as a metric of the training.
    pub fn speed_up_metric(&self) -> SpeedUpMetric {
        SpeedUpMetric::new(self.monitor.clone())
    }

    /// What the training steps did, up to some steps ago; `None` before the first.
    pub fn report(&self) -> Option<Report> {
        self.monitor.read(|seen| seen.report.clone())
    }

    /// For each shape key of the training step, whether it is a graph, why not, and what to do about it, as of some steps ago;
    /// `None` before the first.
    pub fn explain(&self) -> Option<Explanation> {
        self.monitor.read(|seen| seen.explanation.clone())
    }
}

impl<M> From<GraphStrategy<M>> for TrainingStrategy<M>
where
    M: LearnerModel,
    <M as TrainStep>::Input: TensorTree,
    <M as TrainStep>::Output: TensorTree,
{
    fn from(strategy: GraphStrategy<M>) -> Self {
        TrainingStrategy::Custom(Arc::new(strategy))
    }
}

/// What a step does with its gradients. Part of the shape key: each is a recording of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gradients {
    /// Updates the model with them.
    Apply,
    /// Adds them to those of the micro-batches before.
    Accumulate,
    /// Adds them, and updates the model with the sums.
    AccumulateAndApply,
}

impl TensorTree for Gradients {
    fn visit_tensors(&self, _visit: &mut dyn FnMut(AnyTensor)) {}
    fn map_tensors(&self, _map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        *self
    }
    fn visit_host_fields(&self, field: &mut dyn FnMut(HostField)) {
        let text = match self {
            Gradients::Apply => return,
            Gradients::Accumulate => "accumulate",
            Gradients::AccumulateAndApply => "accumulate and apply",
        };
        field(HostField::Text(text.into()));
    }
}

type Batch<M> = (<M as TrainStep>::Input, Gradients);
type StepFn<M> = fn(&mut Training<M>, Batch<M>, StepRate) -> <M as TrainStep>::Output;

/// The training step of a model: Burn's, with `rate` for what the model's `optimize` is given.
fn training_step<M: Module + TrainStep>(
    training: &mut Training<M>,
    (batch, gradients): Batch<M>,
    rate: impl Fn() -> ModuleLearningRate,
) -> M::Output {
    let output = training.model().step(batch);
    let grads = match gradients {
        Gradients::Apply => output.grads,
        Gradients::Accumulate => {
            training.accumulate(output.grads);
            return output.item;
        }
        Gradients::AccumulateAndApply => {
            training.accumulate(output.grads);
            training.take_accumulated()
        }
    };
    optimize(training, rate(), grads);
    output.item
}

fn validation_step<M: LearnerModel>(
    training: &Training<M>,
    batch: <M as InferenceStep>::Input,
) -> <M as InferenceStep>::Output {
    InferenceStep::step(&training.model().valid(), batch)
}

/// Takes validation steps.
trait Validate<M: LearnerModel> {
    /// Whether [`step`](Self::step) would open a window.
    fn would_record(&self, by: &Run<M>, batch: &<M as InferenceStep>::Input) -> bool;
    /// One step.
    fn step(
        &mut self,
        by: &mut Run<M>,
        model: &mut Option<M>,
        batch: <M as InferenceStep>::Input,
    ) -> Result<<M as InferenceStep>::Output, StepError>;
}

/// On a copy of the model.
struct EagerValidation;

impl<M: LearnerModel> Validate<M> for EagerValidation {
    fn would_record(&self, _by: &Run<M>, _batch: &<M as InferenceStep>::Input) -> bool {
        false
    }
    fn step(
        &mut self,
        by: &mut Run<M>,
        model: &mut Option<M>,
        batch: <M as InferenceStep>::Input,
    ) -> Result<<M as InferenceStep>::Output, StepError> {
        let model = model.get_or_insert_with(|| by.model().valid());
        Ok(InferenceStep::step(model, batch))
    }
}

struct GraphedValidation<M: LearnerModel, F> {
    function: GraphedFn<Training<M>, <M as InferenceStep>::Input, <M as InferenceStep>::Output, F>,
}

impl<M, F> Validate<M> for GraphedValidation<M, F>
where
    M: LearnerModel,
    <M as InferenceStep>::Input: TensorTree,
    <M as InferenceStep>::Output: TensorTree,
    F: Fn(&mut Training<M>, <M as InferenceStep>::Input, StepRate) -> <M as InferenceStep>::Output,
{
    fn would_record(&self, by: &Run<M>, batch: &<M as InferenceStep>::Input) -> bool {
        let state = by.graphed.as_ref().map(|graphed| &graphed.state);
        state.is_some_and(|state| self.function.would_record(state, batch, 0.0))
    }
    fn step(
        &mut self,
        by: &mut Run<M>,
        model: &mut Option<M>,
        batch: <M as InferenceStep>::Input,
    ) -> Result<<M as InferenceStep>::Output, StepError> {
        match &mut by.graphed {
            Some(graphed) => Ok(self.function.call(&mut graphed.state, batch)?.output),
            None => EagerValidation.step(by, model, batch),
        }
    }
}

/// A training by graphed steps.
struct Graphed<M: LearnerModel> {
    // Before the state: graphs go before the buffers they replay against.
    function: GraphedFn<Training<M>, Batch<M>, <M as TrainStep>::Output, StepFn<M>>,
    state: GraphedState<Training<M>>,
}

/// One training.
struct Run<M: LearnerModel> {
    /// The schedule; and, where steps are not graphed, model and optimizer.
    learner: Learner<M>,
    graphed: Option<Graphed<M>>,
    /// Why they are not.
    reason: Option<FallbackReason>,
    /// Eager steps taken for that reason.
    eager: u64,
    accumulator: GradientsAccumulator<M>,
    monitor: Monitor,
    /// Of every so many steps that could be replayed, some are timed.
    samples: Option<u32>,
    /// Such steps.
    replayable: u32,
    /// Steps since the monitor saw the report.
    unreported: u32,
}

/// What of a step is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sample {
    None,
    /// Eagerly: the state leaves the graph's buffers, pages are allocated.
    Eager,
    EagerTimed,
    /// A replay that is waited for.
    ReplayTimed,
}

/// Steps between two reports.
const REPORTED_EVERY: u32 = 64;

impl<M> Run<M>
where
    M: LearnerModel,
    <M as TrainStep>::Input: TensorTree,
    <M as TrainStep>::Output: TensorTree,
{
    fn new(learner: Learner<M>, strategy: &GraphStrategy<M>) -> Result<Self, StepError> {
        let config = &strategy.config;
        let model = learner.model();
        let taken = optim::extract(
            &model,
            |grads| learner.clone().optimizer_step(grads),
            |model, optimizer, grads| model.optimize(optimizer, learner.lr_current(), grads),
        );
        let (graphed, reason) = match taken {
            Ok(optimizer) => {
                let step: StepFn<M> = match hands_its_rate_on(&model) {
                    true => |training, batch, lr| training_step(training, batch, || lr.tracked()),
                    false => |training, batch, lr| training_step(training, batch, || lr.module()),
                };
                let state = GraphedState::new(Training::new(model, optimizer))?;
                let function = GraphedFn::new(config.clone(), step);
                (Some(Graphed { function, state }), None)
            }
            Err(reason) if config.policy == Policy::RequireGraph => {
                return Err(StepError::GraphRequired { reason });
            }
            Err(reason) => {
                log::warn!("training stays eager: {reason}");
                (None, Some(reason))
            }
        };
        Ok(Self {
            learner,
            graphed,
            reason,
            eager: 0,
            accumulator: GradientsAccumulator::new(),
            monitor: strategy.monitor.clone(),
            // A step that is timed eagerly is a fallback.
            samples: strategy
                .samples
                .filter(|_| config.policy == Policy::Fallback),
            replayable: 0,
            unreported: 0,
        })
    }

    /// Whether the step would open a window.
    fn would_record(&self, batch: &Batch<M>) -> bool {
        let graphed = self.graphed.as_ref();
        graphed.is_some_and(|graphed| {
            let rates = self.rates(batch.1);
            graphed.function.would_record(&graphed.state, batch, rates)
        })
    }

    /// The rates of a step.
    fn rates(&self, gradients: Gradients) -> LearningRates {
        match gradients {
            // Not used; that of the schedule may not be there yet.
            Gradients::Accumulate => 0.0.into(),
            _ => self.learner.lr_current().into(),
        }
    }

    /// One training step. The schedule has advanced where it is to.
    fn step(
        &mut self,
        (batch, gradients): Batch<M>,
    ) -> Result<<M as TrainStep>::Output, StepError> {
        let batch = (batch, gradients);
        let (sample, rates) = (self.sample(&batch), self.rates(gradients));
        let Some(graphed) = &mut self.graphed else {
            return Ok(self.plain_step(batch.0, batch.1));
        };
        let stay = matches!(sample, Sample::Eager | Sample::EagerTimed);
        let stay = stay.then_some(FallbackReason::Timed);
        let timed = matches!(sample, Sample::EagerTimed | Sample::ReplayTimed);
        let waited = |state: &GraphedState<Training<M>>| {
            let waiting = |error: burn::tensor::ExecutionError| StepError::Device {
                doing: "waiting for a step that is timed".into(),
                detail: error.to_string(),
            };
            state.device().sync().map_err(waiting)?;
            Ok::<_, StepError>(Instant::now())
        };
        let started = timed.then(|| waited(&graphed.state)).transpose()?;
        let taken = (graphed.function).run_or_stay(&mut graphed.state, batch, rates, stay)?;
        if let Some(started) = started {
            let time = waited(&graphed.state)? - started;
            self.monitor.timed(taken.path.is_graph(), time);
        }
        let replayed = taken.path == StepPath::Replayed;
        self.stepped(taken.path.is_graph(), !replayed);
        Ok(taken.output)
    }

    /// What to time of this step.
    fn sample(&mut self, batch: &Batch<M>) -> Sample {
        let (Some(every), Some(graphed)) = (self.samples, &self.graphed) else {
            return Sample::None;
        };
        let replays = || {
            let rates = self.rates(batch.1);
            (graphed.function).would_replay(&graphed.state, batch, rates)
        };
        if batch.1 != Gradients::Apply || !replays() {
            return Sample::None;
        }
        self.replayable = self.replayable.wrapping_add(1);
        // The first block early, so that a short training has its samples too.
        match self.replayable.wrapping_add(every - 4) % every {
            0..4 => Sample::Eager,
            4..8 => Sample::EagerTimed,
            // It copies the state back in.
            8 => Sample::None,
            9..12 => Sample::ReplayTimed,
            _ => Sample::None,
        }
    }

    /// Burn's own step.
    fn plain_step(
        &mut self,
        batch: <M as TrainStep>::Input,
        gradients: Gradients,
    ) -> <M as TrainStep>::Output {
        let output = self.learner.train_step(batch);
        match gradients {
            Gradients::Apply => self.learner.optimizer_step(output.grads),
            Gradients::Accumulate => {
                (self.accumulator).accumulate(&self.learner.model(), output.grads);
            }
            Gradients::AccumulateAndApply => {
                (self.accumulator).accumulate(&self.learner.model(), output.grads);
                self.learner.optimizer_step(self.accumulator.grads());
            }
        }
        self.eager += 1;
        self.stepped(false, self.eager == 1);
        output.item
    }

    /// A step was taken; `news`: the report is to show it now.
    fn stepped(&mut self, by_graph: bool, news: bool) {
        self.monitor.stepped(by_graph);
        self.unreported += 1;
        if news || self.unreported >= REPORTED_EVERY {
            self.report();
        }
    }

    /// Drop what was accumulated and not applied: an epoch ended.
    fn discard_accumulated(&mut self) -> Result<(), StepError> {
        self.accumulator = GradientsAccumulator::new();
        match &mut self.graphed {
            Some(graphed) => graphed.state.update(Training::without_accumulated),
            None => Ok(()),
        }
    }

    /// Have the monitor show the report as of now.
    fn report(&mut self) {
        self.unreported = 0;
        let (report, explanation) = match (&self.graphed, &self.reason) {
            (Some(graphed), _) => (
                graphed.function.report(),
                graphed.function.explain(&graphed.state),
            ),
            (None, Some(reason)) => {
                let report = Report::eager_only(self.eager, reason);
                let explanation = Explanation::of_reason(reason);
                (report, explanation)
            }
            (None, None) => return,
        };
        self.monitor.write(|seen| {
            seen.report = Some(report);
            seen.explanation = Some(explanation);
        });
    }
}

impl<M: LearnerModel> Run<M> {
    /// A copy of the live model.
    fn model(&self) -> M {
        match &self.graphed {
            Some(graphed) => graphed.state.model(),
            None => self.learner.model(),
        }
    }

    /// The learner, with model and optimizer as they are now.
    fn up_to_date(&mut self) -> &Learner<M> {
        if let Some(graphed) = &self.graphed {
            let (model, optimizer) = graphed.state.state().into_parts();
            let states = optim::states(&optimizer);
            let record = optim::record_of_all(&model);
            self.learner.load_model(model.into_record());
            optim::inject(states, || self.learner.load_optim(record));
        }
        &self.learner
    }

    /// Let go of the copy of the optimizer's tensors that a checkpoint was made from.
    fn forget_checkpoint(&mut self) {
        if self.graphed.is_some() {
            self.learner.load_optim(OptimizerRecord::default());
        }
    }

    fn into_model(self) -> M {
        match self.graphed {
            Some(Graphed { function, state }) => {
                drop(function);
                state.into_state().into_model()
            }
            None => self.learner.model(),
        }
    }
}

impl<M> SupervisedLearningStrategy<M> for GraphStrategy<M>
where
    M: LearnerModel,
    <M as TrainStep>::Input: TensorTree,
    <M as TrainStep>::Output: TensorTree,
{
    fn fit(
        &self,
        components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let train = train.to_device(&self.device);
        let valid = valid.to_device(&self.device.clone().inner());
        learner.fork(&self.device);
        let TrainingComponents {
            num_epochs,
            mut checkpointer,
            grad_accumulation,
            interrupter,
            mut early_stopping,
            mut event_processor,
            event_store,
            ..
        } = components;
        self.monitor.write(|seen| *seen = Default::default());
        let kept = learner.model();
        let mut run = match Run::new(learner, self) {
            Ok(run) => run,
            Err(error) => {
                interrupter.fail(training_error(&error));
                return (kept, event_processor);
            }
        };
        drop(kept);
        let mut validation = (self.validation)(&self.config);

        for epoch in starting_epoch..=num_epochs {
            interrupter.fail_on_error(event_processor.process_train(LearnerEvent::StartSplit {
                epoch_number: epoch,
                total_items: train.num_items(),
            }));
            train_epoch(
                &mut run,
                &train,
                grad_accumulation,
                &mut event_processor,
                &interrupter,
            );
            interrupter.fail_on_error(event_processor.process_train(LearnerEvent::EndSplit(epoch)));
            run.report();
            if interrupter.should_stop() {
                if let Some(interruption) = interrupter.interruption() {
                    let reason = interruption.reason.as_deref().unwrap_or("reason unknown");
                    log::info!("Training interrupted: {reason}");
                }
                break;
            }

            interrupter.fail_on_error(event_processor.process_valid(LearnerEvent::StartSplit {
                epoch_number: epoch,
                total_items: valid.num_items(),
            }));
            valid_epoch(
                &mut run,
                validation.as_mut(),
                &valid,
                &mut event_processor,
                &interrupter,
            );
            interrupter.fail_on_error(event_processor.process_valid(LearnerEvent::EndSplit(epoch)));
            interrupter.fail_on_error(event_processor.process_train(LearnerEvent::EndEpoch(epoch)));
            if checkpointer.is_some() || early_stopping.is_some() {
                interrupter.fail_on_error(event_processor.flush());
            }
            if interrupter.should_stop() {
                break;
            }
            if let Some(checkpointer) = &mut checkpointer {
                checkpointer.checkpoint(run.up_to_date(), epoch, &event_store);
                run.forget_checkpoint();
            }
            if let Some(early_stopping) = &mut early_stopping
                && early_stopping.should_stop(epoch, &event_store)
            {
                break;
            }
        }

        drop(validation);
        run.report();
        if let Some(report) = self.report() {
            log::info!("graphed training:\n{report}");
        }
        (run.into_model(), event_processor)
    }
}

fn train_epoch<M>(
    run: &mut Run<M>,
    loader: &TrainLoader<M>,
    accumulation: Option<usize>,
    processor: &mut SupervisedTrainingEventProcessor<M>,
    interrupter: &Interrupter,
) where
    M: LearnerModel,
    <M as TrainStep>::Input: TensorTree,
    <M as TrainStep>::Output: TensorTree,
{
    let mut iterator = loader.iter();
    let (mut iteration, mut accumulated) = (0, 0);
    run.monitor.epoch_begins();
    while let Some(item) = iterator.next() {
        let batch = match item {
            Ok(batch) => batch,
            Err(error) => {
                interrupter.fail(error);
                break;
            }
        };
        iteration += 1;
        let progress: Progress = iterator.progress();
        let gradients = match accumulation {
            None => Gradients::Apply,
            Some(micro_batches) => {
                accumulated += 1;
                match micro_batches <= accumulated || progress.is_completed() {
                    true => Gradients::AccumulateAndApply,
                    false => Gradients::Accumulate,
                }
            }
        };
        if gradients != Gradients::Accumulate {
            accumulated = 0;
            run.learner.lr_step();
        }
        let batch = (batch, gradients);
        if run.would_record(&batch) {
            // The thread that computes metrics reads outputs of earlier steps, and a read fails while a window is open.
            interrupter.fail_on_error(processor.flush());
        }
        let output = match run.step(batch) {
            Ok(output) => output,
            Err(error) => {
                interrupter.fail(training_error(&error));
                break;
            }
        };
        let rate = Some(run.learner.lr_current());
        let item = TrainingItem::new(output, progress, Some(iteration), rate);
        interrupter.fail_on_error(processor.process_train(LearnerEvent::ProcessedItem(item)));
        if interrupter.should_stop() {
            break;
        }
    }
    if accumulated > 0
        && let Err(error) = run.discard_accumulated()
    {
        interrupter.fail(training_error(&error));
    }
}

fn valid_epoch<M: LearnerModel>(
    run: &mut Run<M>,
    validation: &mut dyn Validate<M>,
    loader: &ValidLoader<M>,
    processor: &mut SupervisedTrainingEventProcessor<M>,
    interrupter: &Interrupter,
) {
    let mut iterator = loader.iter();
    let (mut iteration, mut model) = (0, None);
    while let Some(item) = iterator.next() {
        let batch = match item {
            Ok(batch) => batch,
            Err(error) => {
                interrupter.fail(error);
                break;
            }
        };
        iteration += 1;
        let progress: Progress = iterator.progress();
        if validation.would_record(run, &batch) {
            interrupter.fail_on_error(processor.flush());
        }
        let output = match validation.step(run, &mut model, batch) {
            Ok(output) => output,
            Err(error) => {
                interrupter.fail(training_error(&error));
                break;
            }
        };
        let item = TrainingItem::new(output, progress, Some(iteration), None);
        interrupter.fail_on_error(processor.process_valid(LearnerEvent::ProcessedItem(item)));
        if interrupter.should_stop() {
            break;
        }
    }
}

/// A step's error as a training's, which has no kind for it: the one for a step that failed.
fn training_error(error: &StepError) -> TrainingError {
    TrainingError::Workers(vec![WorkerFailure {
        device_id: 0,
        message: error.to_string(),
    }])
}
