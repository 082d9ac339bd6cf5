//! What keeps the device busy before a candidate is timed.
//!
//! A candidate of several launches, timed on an idle device, is timed with the gaps in which the device waits for the host:
//! some ten microseconds each, where the kernels themselves take five. In a graph there are no such gaps, nor in a queue that
//! is ahead of the device. So before each sample the device is given something that takes longer than the host takes to
//! launch a candidate. CubeCL takes the sample's time on the device, from where that ends.

// The macro's expansion names its arguments without need.
#![allow(missing_docs)]

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeDevice;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use cubecl::client::Client;
use cubecl::prelude::*;

/// Steps, one waiting for the other: some thousand microseconds of a GPU, in which a slow host launches a dozen kernels.
const STEPS: u32 = 200_000;

#[cube(launch)]
fn turn(out: &mut [u32], steps: u32) {
    let mut value = out[0];
    for step in 0..steps {
        value = value * 1_664_525u32 + step;
    }
    out[0] = value;
}

/// Have the device compute for a while, in the current stream.
pub(super) fn occupy(client: &Client, device: &CubeDevice) -> Result<(), String> {
    let (client, device) = (client.clone(), device.clone());
    let out = empty_device_contiguous_dtype(client, device, Shape::from([1]), DType::U32);
    turn::launch(
        &out.client.clone(),
        CubeCount::Static(1, 1, 1),
        CubeDim::new_1d(1),
        out.into_buffer_arg(),
        STEPS,
    );
    Ok(())
}
