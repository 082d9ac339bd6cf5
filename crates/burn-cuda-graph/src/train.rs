//! Models that implement `burn_train::TrainStep`.

use crate::config::GraphConfig;
use crate::context::StepRate;
use crate::error::StepError;
use crate::state::Training;
use crate::step::GraphedStep;
use crate::tree::TensorTree;
use burn::module::Module;
use burn_train::TrainStep;

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
    /// # Errors
    ///
    /// As [`GraphedStep::new`].
    pub fn from_train_step(training: Training<M>, config: GraphConfig) -> Result<Self, StepError> {
        Self::new(training, config, |training, batch, lr| {
            let output = training.model().step(batch);
            training.update(|model, optimizer| model.optimize(optimizer, lr.into(), output.grads));
            output.item
        })
    }
}
