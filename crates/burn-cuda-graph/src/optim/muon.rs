//! Muon.

use super::momentum::{Momentum, momentum_leaf};
use super::state::{Layout, Leaf, OptimizerState};
use super::update::{OptimizerId, Update};
use burn::config::Config;
use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdjustLrFn, LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{Device, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// Configuration of [`Muon`]. As Burn's [`MuonConfig`](burn::optim::MuonConfig).
#[derive(Config, Debug)]
pub struct MuonConfig {
    /// Decoupled weight decay: a step multiplies parameters by one minus this times the learning rate.
    weight_decay: Option<WeightDecayConfig>,
    /// Momentum, which Muon always has.
    #[config(default = "MomentumConfig { momentum: 0.95, dampening: 0.0, nesterov: true }")]
    momentum: MomentumConfig,
    /// Coefficients of the Newton-Schulz iteration.
    #[config(default = "(3.4445, -4.775, 2.0315)")]
    ns_coefficients: (f32, f32, f32),
    /// The least norm that a momentum is divided by.
    #[config(default = 1e-7)]
    epsilon: f32,
    /// Newton-Schulz iterations.
    #[config(default = 5)]
    ns_steps: usize,
    /// How the learning rate depends on the shape of the matrix.
    #[config(default = "AdjustLrFn::Original")]
    adjust_lr_fn: AdjustLrFn,
}

/// Muon, for matrices: momentum made orthogonal by a Newton-Schulz iteration. A replay follows its learning rate. As
/// Burn's [`Muon`](burn::optim::Muon), records included.
///
/// Every other parameter takes another optimizer:
///
/// ```
/// use burn::module::ParamGroup;
/// use burn_cuda_graph::optim::{AdamWConfig, MuonConfig};
/// let weights = ParamGroup::from_paths(vec!["hidden.weight", "output.weight"]);
/// let optimizer = AdamWConfig::new().init();
/// let optimizer = optimizer.with_group(weights, MuonConfig::new().build(), None);
/// ```
///
/// [Muon: An optimizer for hidden layers in neural networks](https://kellerjordan.github.io/posts/muon/),
/// [Muon is Scalable for LLM Training](https://arxiv.org/abs/2502.16982).
#[derive(Clone, Debug)]
pub struct Muon {
    ids: RatioIds,
    momentum: Momentum,
    coefficients: (f32, f32, f32),
    iterations: usize,
    epsilon: f32,
    adjust_lr_fn: AdjustLrFn,
    weight_decay: Option<f32>,
}

/// What [`Muon`]'s state holds.
#[derive(Debug)]
pub struct MuonLayout;

impl Layout for MuonLayout {
    const TIME: Option<&'static str> = None;
    const LEAVES: &'static [Leaf] = &[Leaf::required(momentum_leaf::VELOCITY)];
}

/// State of [`Muon`].
pub type MuonState<const D: usize> = OptimizerState<D, MuonLayout>;

/// One optimizer's scalars are told apart by name, rate and step count. Muon's learning rate depends on the shape of the
/// parameter too, so it has a number for each ratio that it meets.
#[derive(Clone, Debug, Default)]
struct RatioIds(Arc<Mutex<Vec<(u64, OptimizerId)>>>);

impl RatioIds {
    /// The optimizer itself, whatever the ratio.
    #[cfg(feature = "train")]
    fn whole(&self) -> OptimizerId {
        self.of(f64::NAN)
    }

    fn of(&self, ratio: f64) -> OptimizerId {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ratio = ratio.to_bits();
        match known.iter().find(|(of, _)| *of == ratio) {
            Some((_, id)) => *id,
            None => {
                let id = OptimizerId::new();
                known.push((ratio, id));
                id
            }
        }
    }
}

impl MuonConfig {
    /// The bare optimizer, for [`ModuleOptimizer::with_group`]. [`init`](Self::init) makes the whole-module one, of a
    /// module that has only matrices.
    pub fn build(&self) -> Muon {
        Muon {
            ids: RatioIds::default(),
            momentum: Momentum::new(&self.momentum),
            coefficients: self.ns_coefficients,
            iterations: self.ns_steps,
            epsilon: self.epsilon,
            adjust_lr_fn: self.adjust_lr_fn,
            weight_decay: self.weight_decay.as_ref().map(|decay| decay.penalty),
        }
    }

    /// The optimizer of a whole module.
    pub fn init(&self) -> ModuleOptimizer {
        ModuleOptimizer::from(self.build())
    }
}

/// What the learning rate of a `rows` by `columns` matrix is multiplied with.
fn ratio(adjust: AdjustLrFn, rows: usize, columns: usize) -> f64 {
    let (rows, columns) = (rows as f64, columns as f64);
    match adjust {
        AdjustLrFn::Original => (rows / columns).max(1.0).sqrt(),
        AdjustLrFn::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
    }
}

impl Muon {
    /// The orthogonal matrix near `grad`, by Newton-Schulz iteration.
    fn orthogonal<const D: usize>(&self, grad: Tensor<D>) -> Tensor<D> {
        let (a, b, c) = self.coefficients;
        let shape = grad.shape();
        // The product of the iteration is of the shorter side.
        let tall = shape[D - 2] > shape[D - 1];
        let turned = |x: Tensor<D>| match tall {
            true => x.swap_dims(D - 2, D - 1),
            false => x,
        };
        let mut x = turned(grad);
        let square = x.clone().powf_scalar(2.0).sum();
        let norm = square.sqrt().clamp_min(self.epsilon).unsqueeze();
        x = x.div(norm);
        for _ in 0..self.iterations {
            let gram = x.clone().matmul(x.clone().swap_dims(D - 2, D - 1));
            let squared = gram.clone().matmul(gram.clone());
            let factor = gram.mul_scalar(b).add(squared.mul_scalar(c));
            // This clone outlives the product, as in Burn: what is still alive decides what fusion compiles.
            x = x.clone().mul_scalar(a).add(factor.matmul(x.clone()));
        }
        turned(x)
    }
}

impl Optimizer for Muon {
    type State<const D: usize> = MuonState<D>;

    /// # Panics
    ///
    /// When the parameter is not a matrix.
    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        super::overhear!(self, self.ids.whole(), tensor, grad, state);
        assert!(
            D == 2,
            "Muon updates matrices, and was given a parameter of rank {D}; give parameters of other ranks another \
             optimizer, with ModuleOptimizer::with_group"
        );
        let shape = tensor.shape();
        let ratio = ratio(self.adjust_lr_fn, shape[0], shape[1]);
        let mut update = Update::begin(self.ids.of(ratio), lr, &tensor, state);
        let grad = (self.momentum).transform(momentum_leaf::VELOCITY, grad, &mut update);
        let direction = self.orthogonal(grad);
        let decayed = match self.weight_decay {
            Some(penalty) => super::shrunk(&update, tensor, penalty),
            None => tensor,
        };
        let adjusted = update.rate("adjusted_lr", move |lr| lr * ratio);
        let delta = adjusted.times(direction);
        update.finish(decayed - delta)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        state.to_device(device)
    }
}
