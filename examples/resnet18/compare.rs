//! `--mode eager` and `--mode compare`: the same training without graphs, and both side by side.

use std::error::Error;
use std::fmt;
use std::time::Instant;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_cuda_graph::{GraphConfig, StepPath, Support, support};
use burn_cuda_graph_suite::data::Batch;
use burn_cuda_graph_suite::models::ResNet18;
use serde::Serialize;

use crate::{Graphed, Trainer, loss_and_grads};

/// Steps left out of the medians where nothing was replayed.
const STEPS_NOT_COUNTED: usize = 3;

/// Training with plain Burn.
pub struct Eager {
    /// `None` only inside a step: the optimizer takes the model and gives it back.
    model: Option<ResNet18>,
    optim: ModuleOptimizer,
    lr: f64,
}

impl Eager {
    pub fn new(model: ResNet18, lr: f64) -> Self {
        Self {
            model: Some(model),
            optim: SgdConfig::new().init(),
            lr,
        }
    }
}

impl Trainer for Eager {
    fn step(&mut self, batch: Batch) -> Result<Tensor<1>, Box<dyn Error>> {
        let model = self.model.take().ok_or("an earlier step did not finish")?;
        let (loss, grads) = loss_and_grads(&model, batch);
        self.model = Some(self.optim.step(self.lr, model, grads));
        Ok(loss)
    }

    fn model(&self) -> ResNet18 {
        self.model
            .clone()
            .expect("a step that has ended gave the model back")
    }
}

/// An eager and a graphed net that start alike and see the same batches.
pub struct SideBySide {
    eager: Eager,
    graphed: Graphed,
    /// The graphed step, never recorded. On CUDA plain Burn may round otherwise: it drains its queue elsewhere, so fusion
    /// cuts other kernels, and a net at this learning rate carries last bits far in a few steps. What replays must equal is
    /// this one.
    unrecorded: Option<Graphed>,
    device: Device,
    times: Vec<StepTimes>,
}

/// How long one step took on both sides, up to the device being idle again.
struct StepTimes {
    eager_ms: f64,
    graphed_ms: f64,
    replayed: bool,
}

impl SideBySide {
    pub fn new(model: ResNet18, lr: f64, device: &Device) -> Result<Self, Box<dyn Error>> {
        // A clone would share BatchNorm's running statistics, and each side would disturb the other's.
        let twin = || model.valid().train();
        let never = GraphConfig::new().with_warmup(u32::MAX);
        let unrecorded = (support(device) == Support::Hardware)
            .then(|| Graphed::with_config(twin(), lr, never))
            .transpose()?;
        Ok(Self {
            eager: Eager::new(twin(), lr),
            unrecorded,
            graphed: Graphed::new(model, lr)?,
            device: device.clone(),
            times: Vec::new(),
        })
    }

    /// The graphed side.
    pub fn graphed(&self) -> &Graphed {
        &self.graphed
    }

    /// What the steps so far show. Reads all values of both nets.
    pub fn compare(&self) -> Result<Comparison, Box<dyn Error>> {
        // Replays where there are any: warm-up and recording are paid once. The first steps compile and tune kernels.
        let replayed = self.times.iter().any(|times| times.replayed);
        let counted: Vec<&StepTimes> = match replayed {
            true => self.times.iter().filter(|times| times.replayed).collect(),
            false => self.times.iter().skip(STEPS_NOT_COUNTED).collect(),
        };
        let eager_ms = median(counted.iter().map(|times| times.eager_ms));
        let graphed_ms = median(counted.iter().map(|times| times.graphed_ms));

        let eager = values(&self.eager.model())?;
        let graphed = values(&self.graphed.model())?;
        if eager.len() != graphed.len() {
            let (eager, graphed) = (eager.len(), graphed.len());
            return Err(format!("the nets have {eager} and {graphed} values").into());
        }
        let unrecorded = match &self.unrecorded {
            Some(unrecorded) => Some(values(&unrecorded.model())?),
            None => None,
        };
        let different = |one: &[f32], other: &[f32]| {
            let pairs = one.iter().zip(other);
            pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count()
        };
        let pairs = || eager.iter().zip(&graphed);
        Ok(Comparison {
            steps: counted.len(),
            replayed,
            eager_ms,
            graphed_ms,
            ratio: eager_ms
                .zip(graphed_ms)
                .map(|(eager, graphed)| eager / graphed),
            values: eager.len(),
            different_bits: different(&eager, &graphed),
            different_bits_unrecorded: unrecorded.map(|other| different(&other, &graphed)),
            not_finite: pairs()
                .filter(|(a, b)| !(a.is_finite() && b.is_finite()))
                .count(),
            largest_difference: pairs().map(|(a, b)| (a - b).abs()).fold(0.0, f32::max),
        })
    }
}

impl Trainer for SideBySide {
    fn step(&mut self, batch: Batch) -> Result<Tensor<1>, Box<dyn Error>> {
        let (eager_ms, graphed_ms, loss);
        if let Some(unrecorded) = &mut self.unrecorded {
            unrecorded.step(batch.clone())?;
        }
        // The sides take turns at going first, so that neither always finds the device warmer than the other.
        if self.times.len().is_multiple_of(2) {
            (_, eager_ms) = timed(&self.device, || self.eager.step(batch.clone()))?;
            (loss, graphed_ms) = timed(&self.device, || self.graphed.step(batch))?;
        } else {
            (loss, graphed_ms) = timed(&self.device, || self.graphed.step(batch.clone()))?;
            (_, eager_ms) = timed(&self.device, || self.eager.step(batch))?;
        }
        self.times.push(StepTimes {
            eager_ms,
            graphed_ms,
            replayed: matches!(self.graphed.last_path, Some(StepPath::Replayed)),
        });
        Ok(loss)
    }

    fn model(&self) -> ResNet18 {
        self.graphed.model()
    }
}

/// How an eager and a graphed training compare.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Steps in the medians.
    pub steps: usize,
    /// Whether those are the replayed steps; otherwise both sides ran eagerly.
    pub replayed: bool,
    pub eager_ms: Option<f64>,
    pub graphed_ms: Option<f64>,
    /// Eager over graphed.
    pub ratio: Option<f64>,
    /// Parameters and BatchNorm statistics of one net.
    pub values: usize,
    pub different_bits: usize,
    /// Values that differ from those of the same step over the same engine, never recorded; where that was trained too.
    pub different_bits_unrecorded: Option<usize>,
    /// Places where either net is not finite; `largest_difference` leaves those out.
    pub not_finite: usize,
    pub largest_difference: f32,
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.eager_ms, self.graphed_ms, self.ratio) {
            (Some(eager_ms), Some(graphed_ms), Some(ratio)) => {
                let kind = match self.replayed {
                    true => "replayed",
                    false => "not replayed, so both are eager",
                };
                writeln!(f, "Step time, median of {} steps ({kind}):", self.steps)?;
                writeln!(f, "  eager    {eager_ms:>9.3} ms")?;
                writeln!(f, "  graphed  {graphed_ms:>9.3} ms")?;
                writeln!(f, "  ratio    {ratio:>9.2} (eager / graphed)")?;
            }
            _ => writeln!(f, "Too few steps to time any.")?,
        }
        write!(
            f,
            "Parameters and BatchNorm statistics: largest absolute difference {:e} over {} values; ",
            self.largest_difference, self.values
        )?;
        match self.different_bits {
            0 => write!(f, "all bits are equal.")?,
            count => write!(f, "{count} values differ in their bits.")?,
        }
        match self.not_finite {
            0 => {}
            count => write!(f, " {count} are not finite: lower --lr.")?,
        }
        match self.different_bits_unrecorded {
            None => Ok(()),
            Some(0) => write!(
                f,
                "\nAgainst the same step, never recorded: all bits are equal."
            ),
            Some(count) => write!(
                f,
                "\nAgainst the same step, never recorded: {count} values differ in their bits."
            ),
        }
    }
}

/// Runs one step between two waits for the device; gives its loss and its time in milliseconds.
fn timed(
    device: &Device,
    step: impl FnOnce() -> Result<Tensor<1>, Box<dyn Error>>,
) -> Result<(Tensor<1>, f64), Box<dyn Error>> {
    device.sync()?;
    let started = Instant::now();
    let loss = step()?;
    device.sync()?;
    Ok((loss, started.elapsed().as_secs_f64() * 1e3))
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// All parameters and BatchNorm statistics of `model`, one after another.
fn values(model: &ResNet18) -> Result<Vec<f32>, Box<dyn Error>> {
    struct Reader {
        values: Vec<f32>,
        error: Option<Box<dyn Error>>,
    }

    impl ModuleVisitor for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            match param.val().try_into_vec_as::<f32>() {
                Ok(values) => self.values.extend(values),
                Err(error) => self.error = Some(error.into()),
            }
        }
    }

    let mut reader = Reader {
        values: Vec::new(),
        error: None,
    };
    // BatchNorm keeps its last update apart until it is next used; `valid` brings it in.
    model.valid().visit(&mut reader);
    match reader.error {
        None => Ok(reader.values),
        Some(error) => Err(error),
    }
}
