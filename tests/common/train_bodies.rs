//! Bodies of the tests of `graph_strategy`: the same training by Burn's single-device strategy and by ours, compared by the
//! bits of the model and by what the metrics logged.

use crate::common::{BnNet, Mlp, Net, assert_same, assert_same_or_moved, bits};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::grad_clipping::{GradientClipping, GradientClippingConfig};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::{ModuleLearningRate, ModuleLrScheduler};
use burn::module::{Module, ModuleDisplay, Param, ParamGroup};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, ExecutionError, Int, Tensor, TensorData};
use burn_cuda_graph::optim::{AdamConfig, AdamWConfig, RmsPropConfig, SgdConfig};
use burn_cuda_graph::{AnyTensor, GraphConfig, GraphStrategy, Support, TensorTree, graph_strategy};
use burn_cuda_graph_suite::renderer::LineRenderer;
use burn_train::checkpoint::KeepLastNCheckpoints;
use burn_train::logger::MetricLogger;
use burn_train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn_train::metric::{
    Adaptor, LossInput, LossMetric, Metric, MetricDefinition, MetricMetadata, MetricName,
    NumericEntry, SerializedEntry,
};
use burn_train::{
    ExecutionStrategy, InferenceStep, Interrupter, ItemLazy, Learner, LearnerModel, LearningResult,
    MetricEarlyStoppingStrategy, StoppingCondition, SupervisedTraining, TrainOutput, TrainStep,
    TrainingStrategy,
};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

/// How far SGD's parameters may be from Burn's on a hardware graph, after some thirty steps: fusion cuts the queues into other
/// kernels (see `CUT_TOLERANCE`), and each step carries the last bits on.
const SGD_MOVED: f64 = 1e-5;

/// A net that a learner trains, with BatchNorm or not.
#[derive(Module, Debug)]
pub struct Student<N: Module> {
    net: N,
    /// What its own `optimize` does.
    #[module(skip)]
    own: Own,
}

/// An `optimize` of the model's own.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Own {
    /// Burn's.
    #[default]
    None,
    /// Half the rate, and weights kept small.
    HalvedAndClamped,
}

impl<N: Module> Student<N> {
    fn new(net: N) -> Self {
        Self {
            net,
            own: Own::None,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Sample {
    x: Vec<f32>,
    y: i32,
}

#[derive(Clone, Debug)]
pub struct Samples {
    x: Tensor<2>,
    y: Tensor<1, Int>,
}

impl TensorTree for Samples {
    fn visit_tensors(&self, visit: &mut dyn FnMut(AnyTensor)) {
        self.x.visit_tensors(visit);
        self.y.visit_tensors(visit);
    }
    fn map_tensors(&self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        Self {
            x: self.x.map_tensors(map),
            y: self.y.map_tensors(map),
        }
    }
}

/// An output that is not `Clone`, as most of Burn's.
#[derive(Debug)]
pub struct Outcome {
    loss: Tensor<1>,
}

impl TensorTree for Outcome {
    fn visit_tensors(&self, visit: &mut dyn FnMut(AnyTensor)) {
        self.loss.visit_tensors(visit);
    }
    fn map_tensors(&self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        Self {
            loss: self.loss.map_tensors(map),
        }
    }
}

impl ItemLazy for Outcome {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(self)
    }
}

impl Adaptor<LossInput> for Outcome {
    fn adapt(&self) -> LossInput {
        LossInput::new(self.loss.clone())
    }
}

impl<N: Net + ModuleDisplay> Student<N> {
    fn outcome(&self, batch: Samples) -> Outcome {
        let loss = CrossEntropyLossConfig::new().init(&batch.x.device());
        Outcome {
            loss: loss.forward(self.net.run(batch.x), batch.y),
        }
    }
}

impl<N: Net + ModuleDisplay> TrainStep for Student<N> {
    type Input = Samples;
    type Output = Outcome;

    fn step(&self, batch: Samples) -> TrainOutput<Outcome> {
        let outcome = self.outcome(batch);
        TrainOutput::new(self, outcome.loss.backward(), outcome)
    }

    fn optimize(
        self,
        optimizer: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        grads: GradientsParams,
    ) -> Self {
        match self.own {
            Own::None => optimizer.step(lr, self, grads),
            Own::HalvedAndClamped => {
                struct Clamp;
                impl burn::module::ModuleMapper for Clamp {
                    fn map_float<const D: usize>(
                        &mut self,
                        param: Param<Tensor<D>>,
                    ) -> Param<Tensor<D>> {
                        let (id, tensor, mapper) = param.consume();
                        let tensor = Tensor::from_inner(tensor.inner().clamp(-0.2, 0.2));
                        Param::from_mapped_value(id, tensor.require_grad(), mapper)
                    }
                }
                let updated = optimizer.step(lr.base() * 0.5, self, grads);
                updated.map(&mut Clamp)
            }
        }
    }
}

impl<N: Net + ModuleDisplay> InferenceStep for Student<N> {
    type Input = Samples;
    type Output = Outcome;

    fn step(&self, batch: Samples) -> Outcome {
        self.outcome(batch)
    }
}

#[derive(Clone)]
struct Stack;

impl Batcher<Sample, Samples> for Stack {
    fn batch(&self, items: Vec<Sample>, device: &Device) -> Samples {
        let count = items.len();
        let y: Vec<i32> = items.iter().map(|item| item.y).collect();
        let x: Vec<f32> = items.into_iter().flat_map(|item| item.x).collect();
        Samples {
            x: Tensor::from_data(TensorData::new(x, [count, 32]), device),
            y: Tensor::from_data(TensorData::new(y, [count]), device),
        }
    }
}

/// Batches of 16 of `samples`, the last one smaller where they do not divide.
fn loader(samples: usize, first: usize, workers: usize) -> Arc<dyn DataLoader<Samples>> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64 ^ first as u64;
    let mut next = move || {
        state = (state.wrapping_mul(6364136223846793005)).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let items = (0..samples)
        .map(|_| {
            let x: Vec<f32> = (0..32).map(|_| next()).collect();
            let y = ((x[0] + 0.5) * 7.99) as i32;
            Sample { x, y }
        })
        .collect();
    DataLoaderBuilder::new(Stack)
        .batch_size(16)
        .num_workers(workers)
        .build(InMemDataset::new(items))
}

/// Every numeric entry that is logged, in order: split, epoch, metric, value.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    /// What was logged of the metrics of this name, item by item.
    fn of(&self, name: &str) -> Vec<String> {
        let lines = self.0.lock().expect("no logger panicked");
        let item = |line: &&String| line.contains(name) && !line.ends_with(",final");
        let named = lines.iter().filter(item);
        named.cloned().collect()
    }
}

impl MetricLogger for Log {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        let mut lines = self.0.lock().expect("no logger panicked");
        for entry in update.entries_numeric {
            let text = &entry.entry.serialized_entry;
            let id = format!("{:?}", entry.entry.metric_id);
            lines.push(format!("{split} {epoch} {id} {}", text.serialized));
        }
    }
    fn read_numeric(&mut self, _: &str, _: usize, _: &Split) -> Result<Vec<NumericEntry>, String> {
        Err("this log is read by tests alone".into())
    }
    fn log_metric_definition(&mut self, _definition: MetricDefinition) {}
    fn log_epoch_summary(&mut self, _summary: EpochSummary) {}
}

/// A folder that is gone when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("burn-cuda-graph-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a folder for checkpoints");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("the folder is removed");
    }
}

/// A training that is run twice.
struct Course<'a> {
    optimizer: &'a dyn Fn() -> ModuleOptimizer,
    schedule: &'a dyn Fn() -> ModuleLrScheduler,
    epochs: usize,
    samples: usize,
    accumulate: Option<usize>,
    workers: usize,
}

impl Default for Course<'_> {
    fn default() -> Self {
        Self {
            optimizer: &|| SgdConfig::new().init(),
            schedule: &|| ModuleLrScheduler::new(0.05),
            epochs: 3,
            samples: 16 * 8 + 6,
            accumulate: None,
            workers: 0,
        }
    }
}

impl Course<'_> {
    fn training<M>(&self, log: &Log) -> SupervisedTraining<M>
    where
        M: LearnerModel + TrainStep<Input = Samples, Output = Outcome>,
        M: InferenceStep<Input = Samples, Output = Outcome>,
    {
        let (train, valid) = (loader(self.samples, 1, self.workers), loader(40, 2, 0));
        let training = SupervisedTraining::new(std::env::temp_dir(), train, valid)
            .num_epochs(self.epochs)
            .with_metric_logger(log.clone())
            .metrics((LossMetric::new(),))
            .with_application_logger(None)
            .renderer(Box::new(LineRenderer::quiet()));
        match self.accumulate {
            Some(micro_batches) => training.grads_accumulation(micro_batches),
            None => training,
        }
    }

    fn learner<M: LearnerModel>(&self, model: &M) -> Learner<M> {
        // Containers of its own: trainings must not share BatchNorm statistics.
        let model = model.valid().train();
        Learner::new(model, (self.optimizer)(), (self.schedule)())
    }

    /// By Burn, and by us; both models and logs, and our strategy.
    fn both<N: Net + ModuleDisplay>(
        &self,
        device: &Device,
        own: Own,
        graphed_validation: bool,
    ) -> Outcomes<Student<N>> {
        let device = device.clone().autodiff();
        device.seed(11);
        let mut model = Student::new(N::make(&device));
        model.own = own;
        let single = || TrainingStrategy::from(ExecutionStrategy::single(device.clone()));
        // The first run tunes kernels, and may round otherwise while it does.
        let log = Log::default();
        let tuned = Course {
            epochs: 1,
            ..Course { ..*self }
        };
        (tuned.training(&log).with_training_strategy(single())).launch(tuned.learner(&model));

        let theirs_log = Log::default();
        let theirs = (self.training(&theirs_log).with_training_strategy(single()))
            .launch(self.learner(&model));
        let mut strategy = GraphStrategy::new(device.clone());
        if graphed_validation {
            strategy = strategy.with_graphed_validation();
        }
        let ours_log = Log::default();
        let training = self
            .training(&ours_log)
            .metric_train_numeric(strategy.replay_rate_metric())
            .metric_train_numeric(strategy.step_time_metric())
            .metric_train_numeric(strategy.speed_up_metric())
            .with_training_strategy(strategy.clone().into());
        let ours = training.launch(self.learner(&model));
        for result in [&theirs, &ours] {
            assert!(result.error.is_none(), "{:?}", result.error);
        }
        // On a hardware graph plain Burn may round otherwise, since it drains its queue elsewhere. What a replay must equal
        // there is the same engine that never records.
        // Clipping by a norm takes `Tensor::sum`, which may add by atomics there: several runs show whether that one repeats
        // its own bits.
        let runs = match burn_cuda_graph::support(&device) {
            Support::Hardware => 4,
            _ => 0,
        };
        let unrecorded = (0..runs).map(|_| {
            let never = GraphStrategy::new(device.clone())
                .with_config(GraphConfig::new().with_warmup(u32::MAX));
            let training = self.training(&Log::default());
            let result = (training.with_training_strategy(never.clone().into()))
                .launch(self.learner(&model));
            let report = never.report().expect("steps were taken");
            assert_eq!(report.replayed, 0, "{report}");
            bits(&result.model)
        });
        Outcomes {
            theirs,
            ours,
            own: unrecorded.collect(),
            theirs_log,
            ours_log,
            strategy,
        }
    }
}

struct Outcomes<M: LearnerModel> {
    theirs: LearningResult<M>,
    ours: LearningResult<M>,
    /// The models of the same engine, never recording, run several times; on a hardware graph.
    own: Vec<Vec<Vec<u32>>>,
    theirs_log: Log,
    ours_log: Log,
    strategy: GraphStrategy<M>,
}

/// `ours` has the bits of `runs`, which never recorded. Where those differ among themselves, eager steps do not repeat their own
/// bits and a replay has none to equal: then it is to be as near as sums in another order are.
#[track_caller]
fn assert_one_of(ours: &[Vec<u32>], runs: &[Vec<Vec<u32>>], when: &str) {
    const ANOTHER_ORDER: f32 = 1e-6;
    let [first, others @ ..] = runs else {
        panic!("{when}: there is no run to compare with");
    };
    if others.iter().all(|other| other == first) {
        assert_same(ours, first, format!("{when}, and the same unrecorded"));
        return;
    }
    let apart = |theirs: &Vec<Vec<u32>>| {
        let pairs = ours.iter().flatten().zip(theirs.iter().flatten());
        pairs
            .map(|(a, b)| (f32::from_bits(*a) - f32::from_bits(*b)).abs())
            .fold(0.0, f32::max)
    };
    let nearest = runs.iter().map(apart).fold(f32::INFINITY, f32::min);
    println!("{when}: unrecorded runs differ among themselves; the nearest is {nearest:e} apart");
    assert!(
        nearest <= ANOTHER_ORDER,
        "{when}: unrecorded runs differ, and the nearest is {nearest:e} apart"
    );
}

impl<M: LearnerModel> Outcomes<M> {
    /// Model and losses are equal; on a hardware graph parameters may be apart from Burn's by `moved`, and are those of the
    /// same engine that never records.
    #[track_caller]
    fn assert_equal(&self, device: &Device, moved: f64, when: &str) {
        let (ours, theirs) = (bits(&self.ours.model), bits(&self.theirs.model));
        assert_same_or_moved(device, &ours, &theirs, moved, when);
        if !self.own.is_empty() {
            assert_one_of(&ours, &self.own, when);
        }
        let (ours, theirs) = (self.ours_log.of("Loss"), self.theirs_log.of("Loss"));
        assert_eq!(ours.len(), theirs.len(), "{when}");
        assert!(!ours.is_empty(), "{when}: nothing was logged");
        if burn_cuda_graph::support(device) == burn_cuda_graph::Support::Software {
            assert_eq!(ours, theirs, "{when}");
        }
    }

    /// Of `steps` steps, at most `eager` were eager.
    #[track_caller]
    fn assert_replayed(&self, steps: u64, eager: u64, when: &str) {
        let report = self.strategy.report().expect("steps were taken");
        assert_eq!(report.steps(), steps, "{when}: {report}");
        assert!(report.eager <= eager, "{when}: {report}");
        assert!(report.replayed > 0, "{when}: {report}");
    }
}

/// Metrics, schedule, validation and a smaller last batch: as Burn's single-device strategy, for a net with and one without
/// BatchNorm, with three optimizers.
pub fn a_learner_trains_as_burns_strategy(device: &Device) {
    let cosine = || {
        let config = CosineAnnealingLrSchedulerConfig::new(0.05, 30);
        config.init().expect("a valid schedule")
    };
    let course = Course {
        schedule: &cosine,
        ..Course::default()
    };
    let outcomes = course.both::<Mlp>(device, Own::None, false);
    outcomes.assert_equal(device, SGD_MOVED, "SGD, cosine");
    // Nine steps an epoch, of two shapes; the smaller one comes once an epoch, and is not recorded before the fourth.
    outcomes.assert_replayed(27, 3 + 3, "SGD, cosine");
    let rates = outcomes.ours_log.of("Replay rate");
    assert_eq!(rates.len(), 27, "one for each step");
    let text = rates.last().expect("there are rates");
    let last: f64 = text
        .rsplit(' ')
        .next()
        .and_then(|value| value.split(',').next()?.parse().ok())
        .unwrap_or_else(|| panic!("{text} ends with no number"));
    assert!(last > 60.0 && last < 100.0, "{text}");
    assert!(!outcomes.ours_log.of("Step time").is_empty());
    let timed = outcomes.ours_log.of("Speed-up");
    assert!(
        timed.iter().all(|line| line.ends_with("N/A")),
        "no step was timed: {timed:?}"
    );
    let explained = outcomes.strategy.explain().expect("steps were taken");
    assert!(explained.to_string().contains("is a graph"), "{explained}");

    let adam = || AdamConfig::new().init();
    let course = Course {
        optimizer: &adam,
        schedule: &|| ModuleLrScheduler::new(0.001),
        ..Course::default()
    };
    let outcomes = course.both::<BnNet>(device, Own::None, false);
    outcomes.assert_equal(device, 0.001 * 27.0 * 2.0, "Adam, BatchNorm");
    outcomes.assert_replayed(27, 4 + 3, "Adam, BatchNorm");
}

/// Steps that are timed are run eagerly now and then, and leave what a replay would.
pub fn a_learner_times_its_steps(device: &Device) {
    let device = device.clone().autodiff();
    device.seed(13);
    let model = Student::new(Mlp::make(&device));
    let course = Course {
        epochs: 6,
        samples: 16 * 8,
        ..Course::default()
    };
    let run = |samples: Option<u32>| {
        let mut strategy = GraphStrategy::new(device.clone());
        if let Some(every) = samples {
            strategy = strategy.with_speed_up_samples(every);
        }
        let log = Log::default();
        let result = course
            .training(&log)
            .metric_train_numeric(strategy.speed_up_metric())
            .with_training_strategy(strategy.clone().into())
            .launch(course.learner(&model));
        assert!(result.error.is_none(), "{:?}", result.error);
        (bits(&result.model), log.of("Speed-up"), strategy)
    };
    run(None);
    let (plain, none, _) = run(None);
    assert!(none.iter().all(|line| line.ends_with("N/A")), "{none:?}");
    let (timed, speed_ups, strategy) = run(Some(24));
    assert_same_or_moved(&device, &timed, &plain, SGD_MOVED, "timed");
    let report = strategy.report().expect("steps were taken");
    // Of 44 steps that could be replayed, eight in each of two blocks were not.
    assert_eq!(report.fallbacks.get("timed"), Some(&16), "{report}");
    assert!(!speed_ups.is_empty() && !speed_ups.iter().all(|line| line.ends_with("N/A")));
}

/// Validation replays too, on the live parameters, and changes nothing of the training.
pub fn a_learner_validates_by_graph(device: &Device) {
    let course = Course {
        optimizer: &|| AdamConfig::new().init(),
        schedule: &|| ModuleLrScheduler::new(0.001),
        epochs: 6,
        ..Course::default()
    };
    let outcomes = course.both::<BnNet>(device, Own::None, true);
    outcomes.assert_equal(device, 0.001 * 54.0 * 2.0, "graphed validation");
    // One more than without: the windows of the validation make the rehearsal of the rare shape stale.
    outcomes.assert_replayed(54, 4 + 5, "graphed validation");
}

/// Gradient accumulation, with a remainder at the end of an epoch: as Burn's.
pub fn a_learner_accumulates(device: &Device) {
    let course = Course {
        optimizer: &|| SgdConfig::new().init(),
        accumulate: Some(4),
        epochs: 4,
        samples: 16 * 10,
        ..Course::default()
    };
    let outcomes = course.both::<Mlp>(device, Own::None, false);
    outcomes.assert_equal(device, SGD_MOVED, "accumulation");
    outcomes.assert_replayed(40, 16, "accumulation");
}

/// A model's own `optimize` is what updates it.
pub fn a_models_own_optimize_is_honoured(device: &Device) {
    let outcomes = Course::default().both::<Mlp>(device, Own::HalvedAndClamped, false);
    outcomes.assert_equal(device, SGD_MOVED, "own optimize");
    let report = outcomes.strategy.report().expect("steps were taken");
    assert!(report.replayed > 10, "{report}");
}

/// Stock optimizers stay with Burn: the training is Burn's, and the report says what to import.
pub fn a_stock_optimizer_trains_eagerly(device: &Device) {
    let course = Course {
        optimizer: &|| burn::optim::AdamConfig::new().init(),
        schedule: &|| ModuleLrScheduler::new(0.001),
        accumulate: Some(2),
        ..Course::default()
    };
    let outcomes = course.both::<BnNet>(device, Own::None, true);
    let (ours, theirs) = (bits(&outcomes.ours.model), bits(&outcomes.theirs.model));
    assert_same(&ours, &theirs, "stock Adam");
    let report = outcomes.strategy.report().expect("steps were taken");
    assert_eq!((report.eager, report.replayed), (27, 0), "{report}");
    let explained = outcomes.strategy.explain().expect("steps were taken");
    let explained = explained.to_string();
    assert!(explained.contains("burn_cuda_graph::optim"), "{explained}");
}

/// Groups of optimizers, each with a clipping of its own, are taken over from the learner as they are.
pub fn a_learners_groups_and_clipping_are_taken_over(device: &Device) {
    let (value, norm) = (GradientClipping::Value(0.003), GradientClipping::Norm(0.03));
    let clippings = [
        (None, None),
        (Some(value.clone()), Some(norm.clone())),
        (Some(norm), None),
        (Some(GradientClipping::Norm(1e9)), Some(value)),
    ];
    for (index, (all, head)) in clippings.into_iter().enumerate() {
        let optimizer = || {
            let base = ModuleOptimizer::from(SgdConfig::new().build());
            let base = match &all {
                Some(clipping) => base.with_grad_clipping(clipping.clone()),
                None => base,
            };
            let group = ParamGroup::from_predicate("net.output");
            base.with_group(group, RmsPropConfig::new().build(), head.clone())
        };
        let course = Course {
            optimizer: &optimizer,
            schedule: &|| ModuleLrScheduler::new(0.01),
            epochs: 2,
            ..Course::default()
        };
        // The first run tunes: kernels that are tried out in it sum in another order than the one that is chosen.
        course.both::<Mlp>(device, Own::None, false);
        let outcomes = course.both::<Mlp>(device, Own::None, false);
        let when = format!("clipping {index}");
        outcomes.assert_equal(device, 0.01 * 18.0 * 10.0, &when);
        outcomes.assert_replayed(18, 4 + 2, &when);
    }
    // From a configuration, too.
    let clipped = || {
        let clipping = Some(GradientClippingConfig::Norm(0.5));
        (AdamWConfig::new().with_grad_clipping(clipping)).init()
    };
    let course = Course {
        optimizer: &clipped,
        schedule: &|| ModuleLrScheduler::new(0.001),
        epochs: 2,
        ..Course::default()
    };
    let outcomes = course.both::<Mlp>(device, Own::None, false);
    outcomes.assert_equal(device, 0.001 * 18.0 * 2.0, "clipped AdamW");
}

/// Checkpoints resume: ours in ours and in Burn's, Burn's in ours.
pub fn a_learner_resumes(device: &Device) {
    let device = device.clone().autodiff();
    device.seed(12);
    let model = Student::new(BnNet::make(&device));
    let schedule = || {
        let config = CosineAnnealingLrSchedulerConfig::new(0.01, 40);
        config.init().expect("a valid schedule")
    };
    let course = |epochs| Course {
        optimizer: &|| AdamConfig::new().init(),
        schedule: &schedule,
        epochs,
        ..Course::default()
    };
    let strategy = |graphed: bool| match graphed {
        true => graph_strategy(device.clone()),
        false => TrainingStrategy::from(ExecutionStrategy::single(device.clone())),
    };
    let run = |epochs: usize, graphed: bool, folder: Option<(&Folder, Option<usize>)>| {
        let (course, log) = (course(epochs), Log::default());
        let (train, valid) = (loader(course.samples, 1, 0), loader(40, 2, 0));
        let path = folder.map_or_else(std::env::temp_dir, |(folder, _)| folder.0.clone());
        let mut training = SupervisedTraining::new(path, train, valid)
            .num_epochs(epochs)
            .with_metric_logger(log)
            .metrics((LossMetric::new(),))
            .with_application_logger(None)
            .renderer(Box::new(LineRenderer::quiet()))
            .with_training_strategy(strategy(graphed));
        if let Some((_, from)) = folder {
            training = training
                .with_default_checkpointers()
                .with_checkpointing_strategy(KeepLastNCheckpoints::new(9));
            if let Some(epoch) = from {
                training = training.checkpoint(epoch);
            }
        }
        let result = training.launch(course.learner(&model));
        assert!(result.error.is_none(), "{:?}", result.error);
        bits(&result.model)
    };
    run(1, false, None);
    let moved = 0.01 * 36.0 * 2.0;
    let whole = run(4, false, None);
    for (first, second) in [(true, true), (true, false), (false, true)] {
        let when = format!("begun graphed: {first}, resumed graphed: {second}");
        let folder = Folder::new(&format!("resume-{first}-{second}"));
        run(2, first, Some((&folder, None)));
        let resumed = run(4, second, Some((&folder, Some(2))));
        assert_same_or_moved(&device, &resumed, &whole, moved, when);
    }
}

/// A metric that asks for an end after so many items.
#[derive(Clone)]
struct StopAfter {
    items: usize,
    seen: usize,
    interrupter: Interrupter,
}

impl Metric for StopAfter {
    type Input = ();
    fn name(&self) -> MetricName {
        Arc::new("stop".to_string())
    }
    fn update(
        &mut self,
        _item: &(),
        _metadata: &MetricMetadata,
    ) -> Result<SerializedEntry, burn::tensor::TensorReadError> {
        self.seen += 1;
        if self.seen == self.items {
            self.interrupter.stop(Some("enough"));
        }
        Ok(SerializedEntry::new("ok".into(), "ok".into()))
    }
    fn compute(&mut self) -> Result<SerializedEntry, burn::tensor::TensorReadError> {
        Ok(SerializedEntry::new("ok".into(), "ok".into()))
    }
    fn clear(&mut self) {}
}

/// Interruption and early stopping end a training, and the model is that of the last step.
pub fn a_learner_stops(device: &Device) {
    let device = device.clone().autodiff();
    let model = Student::new(Mlp::make(&device));
    let course = Course {
        epochs: 50,
        ..Course::default()
    };
    let interrupter = Interrupter::new();
    let stop = StopAfter {
        items: 14,
        seen: 0,
        interrupter: interrupter.clone(),
    };
    let strategy = GraphStrategy::new(device.clone());
    let result = course
        .training(&Log::default())
        .with_interrupter(interrupter)
        .metric_train(stop)
        .with_training_strategy(strategy.clone().into())
        .launch(course.learner(&model));
    let interruption = result.interrupted.expect("was interrupted");
    assert_eq!(interruption.reason.as_deref(), Some("enough"));
    let report = strategy.report().expect("steps were taken");
    assert!((14..60).contains(&report.steps()), "{report}");

    // Validation losses that only rise: the rate is negative.
    let course = Course {
        schedule: &|| ModuleLrScheduler::new(-0.05),
        epochs: 50,
        ..Course::default()
    };
    let strategy = GraphStrategy::new(device);
    let stopping = MetricEarlyStoppingStrategy::new(
        &LossMetric::new(),
        burn_train::metric::store::Aggregate::Mean,
        burn_train::metric::store::Direction::Lowest,
        Split::Valid,
        StoppingCondition::NoImprovementSince { n_epochs: 2 },
    );
    let folder = Folder::new("early");
    let (train, valid) = (loader(course.samples, 1, 0), loader(40, 2, 0));
    SupervisedTraining::new(folder.0.clone(), train, valid)
        .num_epochs(course.epochs)
        .metrics((LossMetric::new(),))
        .with_application_logger(None)
        .renderer(Box::new(LineRenderer::quiet()))
        .early_stopping(stopping)
        .with_training_strategy(strategy.clone().into())
        .launch(course.learner(&model));
    let report = strategy.report().expect("steps were taken");
    assert!(report.steps() <= 9 * 6, "{report}");
}

/// Loader threads make the batches.
pub fn a_learner_trains_beside_loader_threads(device: &Device) {
    let device = device.clone().autodiff();
    let model = Student::new(BnNet::make(&device));
    let course = Course {
        optimizer: &|| AdamConfig::new().init(),
        schedule: &|| ModuleLrScheduler::new(0.001),
        epochs: 4,
        samples: 16 * 20,
        workers: 2,
        ..Course::default()
    };
    let strategy = GraphStrategy::new(device).with_config(GraphConfig::new().with_warmup(2));
    let result = course
        .training(&Log::default())
        .with_training_strategy(strategy.clone().into())
        .launch(course.learner(&model));
    assert!(result.error.is_none(), "{:?}", result.error);
    let report = strategy.report().expect("steps were taken");
    assert_eq!(report.steps(), 80, "{report}");
    assert!(report.replayed >= 70, "{report}");
}
