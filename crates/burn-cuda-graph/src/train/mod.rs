//! Models that implement `burn_train::TrainStep`: as a step, and under a `burn_train::Learner`.

mod metric;
mod strategy;

pub use metric::{ReplayRateMetric, SpeedUpMetric, StepTimeMetric};
pub use strategy::{GraphStrategy, graph_strategy};

use crate::config::GraphConfig;
use crate::context::StepRate;
use crate::error::StepError;
use crate::optim::arriving_rates;
use crate::state::Training;
use crate::step::GraphedStep;
use crate::tree::TensorTree;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn_train::TrainStep;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The step of a [`TrainStep`] model, as [`GraphedStep::from_train_step`] makes it.
pub type TrainStepFn<M> =
    fn(&mut Training<M>, <M as TrainStep>::Input, StepRate) -> <M as TrainStep>::Output;

impl<M> GraphedStep<Training<M>, M::Input, M::Output, TrainStepFn<M>>
where
    M: Module + TrainStep,
    M::Input: TensorTree,
    M::Output: TensorTree,
{
    /// A step that calls the model's own [`TrainStep::step`] and [`TrainStep::optimize`], an overridden one included.
    ///
    /// An `optimize` that hands its rate on as it is, as Burn's own does, is recorded once for every rate. One that
    /// computes with it is recorded for each rate by itself. Which it is is found by calling it with rates from 1e-30 to
    /// 1e30, on a copy of the model and an optimizer that changes nothing.
    ///
    /// # Errors
    ///
    /// As [`GraphedStep::new`].
    pub fn from_train_step(training: Training<M>, config: GraphConfig) -> Result<Self, StepError> {
        let step: TrainStepFn<M> = match hands_its_rate_on(training.model()) {
            true => |training, batch, lr| step_at(training, batch, || lr.tracked()),
            false => |training, batch, lr| step_at(training, batch, || lr.module()),
        };
        Self::new(training, config, step)
    }
}

fn step_at<M>(
    training: &mut Training<M>,
    batch: M::Input,
    rate: impl Fn() -> ModuleLearningRate,
) -> M::Output
where
    M: Module + TrainStep,
{
    let output = training.model().step(batch);
    optimize(training, rate(), output.grads);
    output.item
}

/// The model's own `optimize`.
fn optimize<M: Module + TrainStep>(
    training: &mut Training<M>,
    rate: ModuleLearningRate,
    grads: GradientsParams,
) {
    training.update(|model, optimizer| model.optimize(optimizer, rate, grads));
}

/// Whether every rate that the model's `optimize` is given arrives at the optimizer as it is.
fn hands_its_rate_on<M: Module + TrainStep>(model: &M) -> bool {
    let rates = [
        1e-30, 1e-12, 1e-8, 3e-7, 1e-6, 2e-5, 1e-4, 4e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.4, 1.0,
        7.0, 1e3, 1e30,
    ];
    rates.into_iter().all(|rate: f64| {
        let arrived = || {
            arriving_rates(model, |model, optimizer, grads| {
                model.optimize(optimizer, rate.into(), grads)
            })
        };
        catch_unwind(AssertUnwindSafe(arrived)).is_ok_and(|arrived| {
            let same = |one: &f64| one.to_bits() == rate.to_bits();
            !arrived.is_empty() && arrived.iter().all(same)
        })
    })
}
