//! What a program is told that sets up random numbers too late: a process of its own, for it spoils the process.
#![cfg(feature = "wgpu")]

use burn::tensor::{Device, Distribution, Tensor};
use burn_cuda_graph::{SetupError, register_random, with_random};

/// The call fails and says so, and the program goes on with Burn's generator.
#[test]
fn a_late_registration_is_refused() {
    let device = Device::wgpu(Default::default());
    let draw = || Tensor::<1>::random([8], Distribution::Default, &device).into_data();
    device.seed(1);
    let first = draw();
    let error = register_random().expect_err("an operation ran before");
    assert!(matches!(error, SetupError::FusionRunning { .. }), "{error}");
    assert!(error.to_string().contains("register_random()"), "{error}");
    assert!(burn_cuda_graph::wgpu_device(Default::default()).is_err());
    device.seed(1);
    assert_eq!(with_random(&device, 1, 1, draw), first);
}
