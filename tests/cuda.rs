//! Tier 2: the same bodies on CUDA. With the feature on, a missing device fails.

mod common;

use burn::tensor::Device;
use common::{BnNet, Mlp, bodies};
use serial_test::serial;

fn device() -> Device {
    let device = Device::cuda(0);
    assert_eq!(
        burn_cuda_graph::support(&device),
        burn_cuda_graph::Support::Hardware
    );
    device
}

include!("common/list.rs");
