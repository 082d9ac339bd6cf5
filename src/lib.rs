//! What the examples, tests and benchmarks of `burn-cuda-graph` share: models, data, the choice of a device, and
//! what a benchmark says.
//!
//! The models and batches are ordinary Burn code that knows nothing of graphs, so that what is measured and compared
//! elsewhere is an unchanged training step. [`example`] has the flags and the closing lines of the small examples.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod bench;
pub mod data;
pub mod device;
pub mod device_trace;
pub mod doctor;
pub mod environment;
pub mod example;
pub mod lengths;
pub mod models;
pub mod renderer;
pub mod timeline;
pub mod warm_start;

#[cfg(any(feature = "cuda", feature = "wgpu", feature = "download"))]
mod panics;

/// The Rust of the guide compiles.
#[cfg(all(doctest, feature = "wgpu", feature = "flex"))]
mod guide {
    #[doc = include_str!("../docs/how-it-works.md")]
    struct HowItWorks;
    #[doc = include_str!("../docs/what-cannot-be-captured.md")]
    struct WhatCannotBeCaptured;
    #[doc = include_str!("../docs/changing-shapes.md")]
    mod changing_shapes {}
    #[doc = include_str!("../docs/migrating.md")]
    struct Migrating;
    #[doc = include_str!("../docs/from-pytorch.md")]
    struct FromPytorch;
    #[doc = include_str!("../docs/troubleshooting.md")]
    struct Troubleshooting;
    #[doc = include_str!("../docs/warm-start.md")]
    struct WarmStart;
    #[doc = include_str!("../docs/nsight.md")]
    struct Nsight;
}
