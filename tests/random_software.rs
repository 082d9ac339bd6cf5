//! Tier 1: a step's own random numbers, on Burn's wgpu device, over software Vulkan where there is no GPU.
#![cfg(feature = "wgpu")]

#[path = "common/random_bodies.rs"]
mod random_bodies;

use burn::tensor::Device;
use serial_test::serial;

fn device() -> Device {
    // Before the first tensor operation of the process.
    burn_cuda_graph::wgpu_device(Default::default()).expect("no operation ran before")
}

include!("common/random_list.rs");
