//! Random numbers that a replay draws anew.
//!
//! Burn's generator takes its seed on the host and hands it to each kernel as a launch scalar. A recording freezes
//! those, and a replay draws the numbers of the recorded step again: the same dropout mask for ever. So inside a
//! graphed step every random operation runs on another generator, one without state. Its number is a function of four
//! things: the step's key, the step's count, the place of the operation among the step's random operations, and the
//! place of the element. Key and count lie in a device buffer that the kernel reads, so writing a new count into it is
//! all it takes for a replay to draw what the eager step would have drawn.
//!
//! # Layout
//!
//! The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), with
//!
//! - counter: element / 4, operation index, step low, step high;
//! - key: key low, key high.
//!
//! The block of four words serves four consecutive elements, in order. Nothing is mixed, so no two (key, step,
//! operation, block) share a block. The price is the limit of 2³⁴ elements per operation; a larger one runs on Burn's
//! own generator, and is counted as escaped.
//!
//! # Distributions
//!
//! Bounds and defaults are Burn's. All arithmetic is in `f32`, as in Burn's kernels.
//!
//! - Uniform floats: 24 bits as u in [0, 1), then `low + u (high - low)`, cut to the largest value of the dtype below
//!   `high`. The value is computed in `f32`, so half precision rounds it; the cut is what keeps it off `high`.
//! - Normal: Box-Muller on the words (0, 1) and (2, 3); the radius takes 32 bits, so the tails reach 6.7 deviations.
//! - Bernoulli: `u < p`, so 0 is never and 1 is always.
//! - Uniform integers: every integer of `[low, high)`, as `low + ⌊word · count / 2³²⌋`: a value's probability is off
//!   by at most 2⁻³². Burn's kernel cuts a float towards zero instead, which makes zero twice as likely where the
//!   interval spans it. A range of more than 2³² integers has only 2³² of them drawn, evenly spread.
//!
//! # Reach
//!
//! The generator is registered with Burn's fusion as an optimization for one operation, which has to happen before
//! the first tensor operation of the process ([`register_random`]). Outside a step, and on a device without fusion,
//! Burn's generator and `Device::seed` are untouched.

#[cfg(feature = "cubecl-backend")]
mod fusion;
#[cfg(feature = "cubecl-backend")]
mod kernel;
#[cfg(test)]
mod philox;

#[cfg(feature = "cubecl-backend")]
#[allow(unused_imports)]
pub(crate) use fusion::DrawScope;

use crate::setup::SetupError;
use burn::tensor::{Device, Distribution, Int, Tensor};

/// Have the random operations of graphed steps draw new numbers at every replay.
///
/// Does not touch the generator outside graphed steps. Call it at the start of the program, or get the device from
/// [`device`] or `wgpu_device`, which do. Later calls change nothing. Without a graph backend (features `cuda`,
/// `wgpu`) there is nothing to register and nothing to be replayed.
///
/// # Errors
///
/// [`SetupError::FusionRunning`] when a tensor operation ran before the first call. The process works on without:
/// steps that draw random numbers run eagerly.
pub fn register_random() -> Result<(), SetupError> {
    register("register_random()")
}

fn register(caller: &'static str) -> Result<(), SetupError> {
    #[cfg(feature = "cubecl-backend")]
    if !fusion::register() {
        return Err(SetupError::FusionRunning { caller });
    }
    let _ = caller;
    Ok(())
}

/// The CUDA device at `index`, set up for graphed steps that draw random numbers.
///
/// `Device::cuda(index)` after [`register_random`]. Does not touch the GPU yet.
///
/// # Errors
///
/// [`SetupError::FusionRunning`] when a tensor operation ran before anything was set up, and
/// [`SetupError::FeatureMissing`] without the feature `cuda`.
pub fn device(index: usize) -> Result<Device, SetupError> {
    #[cfg(feature = "cuda")]
    {
        register("device(..)")?;
        Ok(Device::cuda(index))
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = index;
        Err(SetupError::FeatureMissing {
            caller: "device(..)",
            feature: "cuda",
        })
    }
}

/// The wgpu device of `kind`, set up for graphed steps that draw random numbers.
///
/// `Device::wgpu(kind)` after [`register_random`].
///
/// # Errors
///
/// [`SetupError::FusionRunning`] when a tensor operation ran before anything was set up.
#[cfg(feature = "wgpu")]
pub fn wgpu_device(kind: burn::tensor::DeviceKind) -> Result<Device, SetupError> {
    register("wgpu_device(..)")?;
    Ok(Device::wgpu(kind))
}

/// Run `f` with the random numbers that a graphed step of this `key` and `step` count draws.
///
/// For eager twins of a graphed step, and for runs resumed at a step. The n-th random operation that `f` registers on
/// this thread gets the numbers of the n-th of the step. Operations of other threads or devices draw Burn's numbers,
/// and so do all of them when [`register_random`] was not called in time, or where there is no fusion.
///
/// Shapes and dtypes are those of the operations · enqueue-only, after one copy of 16 bytes to the device.
///
/// # State
///
/// Leaves Burn's generator where it was: the numbers of later operations do not depend on `f`. The exception is an
/// operation that Burn's fusion runs without offering it to us, which reading tensors in the middle of `f` may cause;
/// it draws from Burn's generator, and a warning is logged.
pub fn with_random<R>(device: &Device, key: u64, step: u64, f: impl FnOnce() -> R) -> R {
    #[cfg(feature = "cubecl-backend")]
    let _scope = cube_device(device)
        .filter(|_| registered())
        .and_then(|cube| {
            let bytes: Vec<u8> = params(key, step)
                .iter()
                .flat_map(|word| word.to_le_bytes())
                .collect();
            DrawScope::open(device, cube.client().create_from_slice(&bytes))
        });
    #[cfg(not(feature = "cubecl-backend"))]
    let _ = (device, key, step);
    f()
}

/// Whether our generator is registered with Burn's fusion in this process.
#[allow(dead_code)]
pub(crate) fn registered() -> bool {
    #[cfg(feature = "cubecl-backend")]
    let registered = fusion::registered();
    #[cfg(not(feature = "cubecl-backend"))]
    let registered = false;
    registered
}

/// What a step's buffer of parameters holds: key low, key high, step low, step high.
#[allow(dead_code)]
pub(crate) fn params(key: u64, step: u64) -> [u32; 4] {
    [
        key as u32,
        (key >> 32) as u32,
        step as u32,
        (step >> 32) as u32,
    ]
}

/// A key drawn from the device's own generator, so that `Device::seed` decides it. Reads the device.
///
/// Must not be called within a draw scope of this stream, which would draw from the scope instead.
#[allow(dead_code)]
pub(crate) fn key_from_device(device: &Device) -> Result<u64, String> {
    // Burn's kernels draw integers through a float of 24 bits, so 16 bits at a time.
    let sixteen_bits = Distribution::Uniform(0.0, 65_536.0);
    let words = Tensor::<1, Int>::random([4], sixteen_bits, &device.clone().inner());
    let data = words.try_into_data().map_err(|error| error.to_string())?;
    Ok(data
        .iter::<i64>()
        .fold(0, |key, word| (key << 16) | (word as u64 & 0xFFFF)))
}

#[cfg(feature = "cubecl-backend")]
fn cube_device(device: &Device) -> Option<burn_cubecl::CubeDevice> {
    match device.clone().inner().as_dispatch() {
        burn::backend::DispatchDevice::Cube(device) => Some(device.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step count above 2³² changes the numbers: both halves reach the counter.
    #[test]
    fn params_hold_both_halves() {
        let words = params(0x1122_3344_5566_7788, 0x99AA_BBCC_DDEE_FF00);
        assert_eq!(words, [0x5566_7788, 0x1122_3344, 0xDDEE_FF00, 0x99AA_BBCC]);
    }

    /// The error names the call to move and where to.
    #[test]
    fn a_late_call_says_what_to_move() {
        let text = SetupError::FusionRunning {
            caller: "device(..)",
        }
        .to_string();
        assert!(text.starts_with("device(..) came too late"), "{text}");
        assert!(text.contains("before the first tensor operation"), "{text}");
    }
}
