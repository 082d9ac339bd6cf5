//! Optimizers whose steps replay.
//!
//! Each is Burn's optimizer of the same name: the same configuration, defaults, operations and records. Outside a
//! [`GraphedStep`](crate::GraphedStep) they run the operations that Burn's run. Inside one, the scalars that move from
//! step to step (learning rate, bias corrections) are read from the device, and the tensors they keep are part of the
//! step's state, so that a replay does what the eager step would have done.
//!
//! To use them, import the configuration from here:
//!
//! ```
//! use burn_cuda_graph::optim::AdamConfig; // in place of burn::optim::AdamConfig
//! let optimizer = AdamConfig::new().with_epsilon(1e-8).init();
//! ```
//!
//! Where Burn clips by the norm of one parameter's gradient, [`clip_by_global_norm`] clips by that of all of them.
//!
//! # Not here
//!
//! Burn's [`LBFGS`](burn::optim::LBFGS). Its line search runs forward and backward as often as the losses that it reads
//! on the host demand, and reads inner products of its history there, so one step has no fixed sequence of operations
//! to record. Outside a graphed step use Burn's.

/// Leave a step where the thread only listens to which optimizers it asks (see `extract`).
macro_rules! overhear {
    ($self:ident, $id:expr, $tensor:ident, $grad:ident, $state:ident) => {
        #[cfg(feature = "train")]
        if super::extract::overheard($self, $id, &$grad, &$state) {
            return ($tensor, $state);
        }
    };
}
use overhear;

/// Leave a step whose update is put off, to be made together with others (see `collect`).
macro_rules! put_off {
    ($update:ident, $method:expr, $penalty:expr, $tensor:ident, $grad:ident, $scalars:expr, $names:expr) => {
        #[cfg(feature = "cubecl-backend")]
        if let Some(later) =
            $update.put_off($method, $penalty, [&$tensor, &$grad], $scalars, $names)
        {
            return later;
        }
    };
}
use put_off;

mod adafactor;
mod adagrad;
mod adam;
mod adamw;
mod adan;
mod clip;
#[cfg(feature = "cubecl-backend")]
mod collect;
#[cfg(feature = "train")]
mod extract;
pub(crate) mod gradients;
mod lamb;
mod lion;
mod momentum;
mod muon;
mod power;
mod rmsprop;
mod scaler;
mod sgd;
mod state;
#[cfg(all(test, feature = "flex"))]
mod tests;
mod update;

pub use adafactor::{Adafactor, AdafactorConfig, AdafactorLayout, AdafactorState};
pub use adagrad::{AdaGrad, AdaGradConfig, AdaGradLayout, AdaGradState};
pub use adam::{Adam, AdamConfig, AdamLayout, AdamState};
pub use adamw::{AdamW, AdamWConfig, AdamWState};
pub use adan::{Adan, AdanConfig, AdanLayout, AdanState};
pub use clip::clip_by_global_norm;
pub use lamb::{Lamb, LambConfig, LambLayout, LambState};
pub use lion::{Lion, LionConfig, LionLayout, LionState};
pub use muon::{Muon, MuonConfig, MuonLayout, MuonState};
pub use rmsprop::{RmsProp, RmsPropConfig, RmsPropLayout, RmsPropState};
pub use scaler::{LossScaler, LossScalerConfig};
pub use sgd::{Sgd, SgdConfig, SgdLayout, SgdState};
pub use state::{Layout, Leaf, OptimizerState};

#[cfg(feature = "cubecl-backend")]
pub(crate) use collect::{Collected, collecting};
#[cfg(feature = "train")]
pub(crate) use extract::extract;
pub(crate) use state::{StateData, Steps, ours, parameters, states, with_states};
#[cfg(feature = "train")]
pub(crate) use state::{arriving_rates, inject, record_of_all};

/// The configuration to import from here in place of the stock optimizer that `optimizer` is, told by what it keeps;
/// `None` where it keeps nothing. Reads its tensors.
pub(crate) fn replacement(optimizer: &ModuleOptimizer) -> Option<&'static str> {
    let bytes = optimizer.into_bytes().ok()?;
    let holds = |leaf: &str| {
        bytes
            .windows(leaf.len())
            .any(|window| window == leaf.as_bytes())
    };
    let known = [
        ("exp_avg_diff", "burn_cuda_graph::optim::AdanConfig"),
        ("square_avg", "burn_cuda_graph::optim::RmsPropConfig"),
        ("lr_decay", "burn_cuda_graph::optim::AdaGradConfig"),
        ("second_moment", "burn_cuda_graph::optim::AdafactorConfig"),
        (
            "momentum.moment_1",
            "burn_cuda_graph::optim::AdamConfig (or AdamWConfig)",
        ),
        ("moment_1", "burn_cuda_graph::optim::LambConfig"),
        (
            "momentum.velocity",
            "burn_cuda_graph::optim::SgdConfig (or MuonConfig)",
        ),
        (".momentum", "burn_cuda_graph::optim::LionConfig"),
    ];
    known
        .into_iter()
        .find_map(|(leaf, name)| holds(leaf).then_some(name))
}

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::{ModuleOptimizer, Optimizer};
use burn::tensor::Tensor;
use update::{Scalar, Update};

/// The optimizer of a whole module, with gradient clipping where it is configured.
fn with_clipping(
    optimizer: impl Optimizer,
    clipping: &Option<GradientClippingConfig>,
) -> ModuleOptimizer {
    let optimizer = ModuleOptimizer::from(optimizer);
    match clipping {
        Some(config) => optimizer.with_grad_clipping(config.init()),
        None => optimizer,
    }
}

/// `grad` with an L2 penalty on `param`, as Burn's `WeightDecay` applies it.
fn decayed<const D: usize>(grad: Tensor<D>, param: &Tensor<D>, penalty: Option<f32>) -> Tensor<D> {
    match penalty {
        Some(penalty) => param.clone().mul_scalar(penalty).add(grad),
        None => grad,
    }
}

/// `param` after decoupled weight decay: times `1 - lr * decay`.
///
/// Burn's AdamW, Adan and Lion leave the product out in a step whose rate is zero. It is there in every step here, since
/// what runs must not depend on the value of a rate, and the bits are the same: a factor of one changes none.
fn shrunk<const D: usize, L: Layout>(
    update: &Update<D, L>,
    param: Tensor<D>,
    decay: f32,
) -> Tensor<D> {
    kept(update, decay).times(param)
}

/// What decoupled weight decay leaves of a parameter.
fn kept<const D: usize, L: Layout>(update: &Update<D, L>, decay: f32) -> Scalar {
    update.rate("kept", move |lr| 1.0 - lr * f64::from(decay))
}

/// `1 - beta^steps`: what a moving average that began at zero is divided by.
fn correction<const D: usize, L: Layout>(
    update: &Update<D, L>,
    name: &'static str,
    beta: f32,
) -> Scalar {
    update.timed(
        name,
        move |_, steps| f64::from(1.0 - beta.powi(steps as i32)),
        |time| -time.power(beta) + 1.0,
    )
}
