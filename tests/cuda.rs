//! Tier 2: the same bodies on CUDA. With the feature on, a missing device fails.

#[path = "common/bucket_bodies.rs"]
mod bucket_bodies;
mod common;
#[path = "common/function_bodies.rs"]
mod function_bodies;
#[path = "common/fused_bodies.rs"]
mod fused_bodies;
#[path = "common/memory_bodies.rs"]
mod memory_bodies;
#[path = "common/neighbour_bodies.rs"]
mod neighbour_bodies;
#[path = "common/random_bodies.rs"]
mod random_bodies;
#[path = "common/train_bodies.rs"]
mod train_bodies;

use burn::tensor::Device;
use common::{BnNet, Mlp, bodies, frozen_bodies, state_bodies};
use serial_test::serial;

fn device() -> Device {
    let device = match common::unregistered() {
        true => Device::cuda(0),
        false => burn_cuda_graph::device(0).expect("no operation ran before"),
    };
    assert_eq!(
        burn_cuda_graph::support(&device),
        burn_cuda_graph::Support::Hardware
    );
    device
}

include!("common/list.rs");
include!("common/random_list.rs");
include!("common/function_list.rs");
include!("common/fused_list.rs");
include!("common/train_list.rs");
include!("common/bucket_list.rs");
include!("common/memory_list.rs");
include!("common/neighbour_list.rs");
