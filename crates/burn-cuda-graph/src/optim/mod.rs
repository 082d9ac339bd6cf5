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

mod adam;
mod momentum;
mod power;
mod scaler;
mod sgd;
mod state;
mod update;

pub use adam::{Adam, AdamConfig, AdamLayout, AdamState};
pub use scaler::{LossScaler, LossScalerConfig};
pub use sgd::{Sgd, SgdConfig, SgdLayout, SgdState};
pub use state::{Layout, Leaf, OptimizerState};

pub(crate) use state::{StateData, Steps, ours, parameters, states, with_states};

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
