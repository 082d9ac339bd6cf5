//! What is registered at the start of a program.

/// Why what was asked for at the start of the program was not set up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SetupError {
    /// Burn's fusion runs already, and takes no optimizations any more.
    #[error(
        "{caller} came too late: call burn_cuda_graph::device(..), register_random() or register_kernels() at the start of \
         the program, before the first tensor operation; found one already ran"
    )]
    FusionRunning {
        /// The call that came too late.
        caller: &'static str,
    },
    /// The backend is not part of this build.
    #[error("{caller} needs the backend: build burn-cuda-graph with the feature `{feature}`")]
    FeatureMissing {
        /// The call that needs it.
        caller: &'static str,
        /// The feature to turn on.
        feature: &'static str,
    },
}

impl SetupError {
    /// A short name, stable across releases.
    pub fn name(&self) -> &'static str {
        match self {
            SetupError::FusionRunning { .. } => "fusion-running",
            SetupError::FeatureMissing { .. } => "feature-missing",
        }
    }
}

/// Have the operations that leave a GPU idle computed by kernels with more threads, for the whole process.
///
/// | operation, in `f32` | what is done |
/// | --- | --- |
/// | `sum_dim`, `sum_dims` along neighbouring axes | a column's rows, or a line's elements, are dealt to many threads |
/// | `matmul` with a result of few tiles, with what Burn fuses behind it | the contraction is cut and summed (split-K) |
/// | `select_assign` with addition along the first axis: an embedding's gradient | each index is summed by itself, in order |
/// | `conv2d` and its two gradients, one group | one product over the image laid out as columns (im2col) |
///
/// CubeCL's tuning picks among our kernels and Burn's for each shape, once, and keeps the choice with its others; the third is
/// chosen by its size. It concerns eager steps as well as graphed ones, so that both run the same kernels: a replay leaves
/// what the process's eager step leaves.
///
/// **Results differ from those of a process without it in their last bits**: sums are taken in another order (not for the
/// third). Chains of additions are shorter, so they are seldom farther from the true sum.
///
/// **Memory**: the columns of a convolution, up to 512 MiB; above that it is Burn's.
///
/// Call it at the start of the program. Later calls change nothing. Without a graph backend (features `cuda`, `wgpu`) there
/// is nothing to register.
///
/// # Errors
///
/// [`SetupError::FusionRunning`] when a tensor operation ran before the first call. The process works on without.
pub fn register_kernels() -> Result<(), SetupError> {
    #[cfg(feature = "cubecl-backend")]
    if !crate::kernels::register() {
        return Err(SetupError::FusionRunning {
            caller: "register_kernels()",
        });
    }
    Ok(())
}
