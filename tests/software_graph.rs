//! Tier 1: real recordings and replays on Burn's wgpu device, over software Vulkan where there is no GPU.
#![cfg(feature = "wgpu")]

mod common;

use burn::tensor::Device;
use common::{BnNet, Mlp, bodies};
use serial_test::serial;

fn device() -> Device {
    let device = Device::wgpu(Default::default());
    assert_eq!(
        burn_cuda_graph::support(&device),
        burn_cuda_graph::Support::Software
    );
    device
}

include!("common/list.rs");
