//! Graph-captured execution of [Burn](https://burn.dev) training steps.
//!
//! [`GraphedStep`] takes a model, an optimizer and a closure that runs one training step. It runs the
//! step eagerly until its shapes and operations are stable, records the launches of one step (forward,
//! backward, optimizer) into a CUDA graph, and from then on replays that graph as one launch. When a
//! step cannot be replayed it runs eagerly and says why.
//!
//! **The law**: a graphed step leaves exactly the state the eager step would have left, or it says that
//! it did not run as a graph and why.
//!
//! It sits on seams that Burn and CubeCL leave open for extensions and touches no fork of either: the
//! graph primitives of `burn_backend::Backend`, the fusion observer, and one backend extension that
//! duplicates tensors. See `ARCHITECTURE.md` for the flow of a step.
//!
//! ```no_run
#![doc = include_str!("../examples/quickstart.rs")]
//! ```
//!
//! # Feature flags
//!
//! - `cuda`: hardware graphs on NVIDIA GPUs, through `burn-cuda`.
//! - `wgpu`: software graphs (re-encoded dispatches) on Vulkan, Metal and WebGPU.
//! - `flex`: Burn's CPU backend, which has no graphs: every step runs eagerly and says so.
//! - `nvtx`: ranges for Nsight Systems around what each call does; turns `cuda` on.
//! - `train`: [`GraphedStep::from_train_step`] for models that implement `burn_train::TrainStep`.
#![deny(unsafe_code)]
#![warn(missing_docs, missing_debug_implementations)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

mod bucketing;
mod cache;
mod config;
mod context;
mod driver;
mod engine;
mod error;
mod explain;
mod function;
mod graphed_state;
mod lifecycle;
pub mod optim;
mod random;
mod report;
mod setup;
mod shape_key;
mod state;
mod step;
mod support;
mod tensor;
mod tree;
mod trial;
mod update_rule;
mod worth;

#[cfg(feature = "cubecl-backend")]
mod copy;
#[cfg(feature = "cubecl-backend")]
mod fingerprint;
#[cfg(feature = "cubecl-backend")]
mod host;
#[cfg(not(feature = "cubecl-backend"))]
#[path = "host_eager.rs"]
mod host;
#[cfg(feature = "cubecl-backend")]
mod kernels;
#[cfg(feature = "cubecl-backend")]
mod multi;
#[cfg(feature = "cubecl-backend")]
mod neighbours;
#[cfg(feature = "cubecl-backend")]
mod pool;
#[cfg(feature = "cubecl-backend")]
mod ranges;
#[cfg(feature = "cubecl-backend")]
mod replay;
#[cfg(feature = "cubecl-backend")]
mod scalars;
#[cfg(feature = "train")]
mod train;
#[cfg(feature = "train")]
mod train_outputs;

pub use bucketing::{Bucketing, BucketingError, Buckets, Fill, masked_mean, padding_mask};
pub use burn_cuda_graph_derive::TensorTree;
pub use config::{GraphConfig, Policy};
pub use context::{LearningRates, StepRate, UpdateRate};
pub use driver::{CudaLibraries, DeviceMemory, cuda_libraries, device_memory, tolerate_captures};
pub use error::{FallbackReason, Mismatch, StepError};
pub use explain::{Explanation, KeyExplanation};
pub use function::GraphedFn;
pub use graphed_state::GraphedState;
#[cfg(feature = "wgpu")]
pub use random::wgpu_device;
pub use random::{device, register_random, with_random};
pub use report::{EntryReport, Report};
pub use setup::{SetupError, register_kernels};
pub use shape_key::{HostField, ShapeKey};
pub use state::{Inference, StepState, Training};
pub use step::{GraphedStep, StepOutput, StepPath};
pub use support::{Support, support};
pub use tensor::{AnyTensor, TensorKind, TensorSpec};
#[cfg(feature = "train")]
pub use train::{
    GraphStrategy, ReplayRateMetric, SpeedUpMetric, StepTimeMetric, TrainStepFn, graph_strategy,
};
pub use tree::TensorTree;
