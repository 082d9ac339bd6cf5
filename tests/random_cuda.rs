//! Tier 2: a step's own random numbers on CUDA. With the feature on, a missing device fails.

#[path = "common/random_bodies.rs"]
mod random_bodies;

use burn::tensor::Device;
use serial_test::serial;

fn device() -> Device {
    // Before the first tensor operation of the process.
    burn_cuda_graph::device(0).expect("no operation ran before")
}

include!("common/random_list.rs");
