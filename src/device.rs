//! The device a program runs on: chosen by flag, or the best one that opens.
//!
//! Listing devices is safe on a machine without a driver or an adapter, opening one is not: Burn panics where the driver,
//! its compiler or the adapter turns out unusable. So a device counts as open only after it has computed something, and
//! a failure moves the automatic choice on to the next device instead of ending the program.

use burn::prelude::*;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use burn::tensor::DeviceType;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use burn_dispatch::DispatchDevice;
#[cfg(any(feature = "cuda", feature = "wgpu"))]
use burn_dispatch::devices::CubeDevice;
#[cfg(feature = "wgpu")]
use burn_dispatch::devices::WgpuDeviceKind;
use clap::ValueEnum;
use thiserror::Error;

/// Which device to open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    /// The first that opens: CUDA, a hardware wgpu adapter, the CPU
    #[default]
    Auto,
    /// The first CUDA device
    Cuda,
    /// A wgpu adapter: hardware if there is one, else a software rasteriser
    Wgpu,
    /// The CPU, through Burn's Flex backend
    Cpu,
}

/// What does the arithmetic of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hardware {
    /// A graphics card.
    Gpu,
    /// The CPU, behind a software rasteriser such as llvmpipe.
    SoftwareRasteriser,
    /// The CPU.
    Cpu,
}

/// Why no device was opened. The message names what was tried and the remedy.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The program was built without the feature that the choice needs.
    #[error(
        "this program was built without the feature `{feature}`: build it with --features {feature}"
    )]
    NotBuilt {
        /// The missing feature.
        feature: &'static str,
    },
    /// The chosen device is not there, or it does not work.
    #[error("{0}")]
    Unusable(String),
    /// No device of any enabled feature opened.
    #[error(
        "no device to run on: {0}; build with one of the features `cuda`, `wgpu` and `flex` (`flex` runs on any CPU)"
    )]
    Nothing(String),
}

/// Opens the chosen device and says in one sentence which one it is and why.
///
/// The device is a plain one; call [`Device::autodiff`] on it to train. Opening runs one small kernel and waits for it.
///
/// # Errors
/// [`DeviceError`]; another choice can be opened afterwards.
pub fn open(choice: DeviceChoice) -> Result<(Device, String), DeviceError> {
    let opened = match choice {
        DeviceChoice::Auto => return open_best(),
        DeviceChoice::Cuda => open_cuda(),
        DeviceChoice::Wgpu => open_wgpu(Adapters::Any),
        DeviceChoice::Cpu => open_cpu(),
    };
    match opened {
        Ok((device, name)) => Ok((device, format!("{name}, as asked for."))),
        Err(DeviceError::Unusable(reason)) => Err(DeviceError::Unusable(format!(
            "{reason}; `--device auto` takes the best device that works"
        ))),
        Err(error) => Err(error),
    }
}

/// What does the arithmetic of `device`; autodiff makes no difference. Does not open it.
///
/// A software rasteriser is known by its kind, which every device that [`open`] or [`Device::enumerate`] gives has. The
/// unresolved default device of wgpu counts as a graphics card.
pub fn hardware(device: &Device) -> Hardware {
    match device.clone().inner().as_dispatch() {
        #[cfg(feature = "wgpu")]
        DispatchDevice::Cube(CubeDevice::Wgpu(wgpu)) if wgpu.kind == WgpuDeviceKind::Cpu => {
            Hardware::SoftwareRasteriser
        }
        #[cfg(any(feature = "cuda", feature = "wgpu"))]
        DispatchDevice::Cube(CubeDevice::Cuda(_) | CubeDevice::Wgpu(_)) => Hardware::Gpu,
        _ => Hardware::Cpu,
    }
}

fn open_best() -> Result<(Device, String), DeviceError> {
    type Opener = fn() -> Result<(Device, String), DeviceError>;
    let openers: [Opener; 3] = [open_cuda, || open_wgpu(Adapters::Hardware), open_cpu];
    let mut passed_over = Vec::new();
    for opener in openers {
        match opener() {
            Ok((device, name)) if passed_over.is_empty() => {
                return Ok((device, format!("{name}, the first choice.")));
            }
            Ok((device, name)) => {
                return Ok((
                    device,
                    format!("{name}, because {}.", passed_over.join(", and ")),
                ));
            }
            Err(DeviceError::NotBuilt { feature }) => {
                passed_over.push(format!("the feature `{feature}` is off"));
            }
            Err(error) => passed_over.push(error.to_string()),
        }
    }
    Err(DeviceError::Nothing(passed_over.join(", and ")))
}

/// Which wgpu adapters may be opened.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Adapters {
    Hardware,
    Any,
}

#[cfg(feature = "cuda")]
fn open_cuda() -> Result<(Device, String), DeviceError> {
    // Without a driver the list is empty; with a broken one it may panic.
    let listed = crate::panics::catch(|| Device::enumerate(DeviceType::Cuda).into_vec());
    match listed.map(|devices| devices.into_iter().next()) {
        Ok(Some(device)) => name_after_work(&device)
            .map(|name| (device, format!("CUDA on {name}")))
            .map_err(|reason| unusable("the CUDA device does not open", &reason)),
        Ok(None) => Err(DeviceError::Unusable("there is no CUDA device".to_string())),
        Err(reason) => Err(unusable("the CUDA driver does not answer", &reason)),
    }
}

#[cfg(not(feature = "cuda"))]
fn open_cuda() -> Result<(Device, String), DeviceError> {
    Err(DeviceError::NotBuilt { feature: "cuda" })
}

#[cfg(feature = "wgpu")]
fn open_wgpu(adapters: Adapters) -> Result<(Device, String), DeviceError> {
    let listed = crate::panics::catch(|| Device::enumerate(DeviceType::Wgpu).into_vec())
        .map_err(|reason| unusable("wgpu does not list its adapters", &reason))?;
    let rank = |device: &Device| match device.as_dispatch() {
        DispatchDevice::Cube(CubeDevice::Wgpu(wgpu)) => match wgpu.kind {
            WgpuDeviceKind::DiscreteGpu(_) => 0,
            WgpuDeviceKind::IntegratedGpu(_) => 1,
            WgpuDeviceKind::Cpu => 3,
            _ => 2,
        },
        _ => 4,
    };
    let Some(device) = listed.into_iter().min_by_key(rank) else {
        return Err(DeviceError::Unusable(
            "there is no wgpu adapter".to_string(),
        ));
    };
    let software = hardware(&device) == Hardware::SoftwareRasteriser;
    if software && adapters == Adapters::Hardware {
        return Err(DeviceError::Unusable(
            "the only wgpu adapter is a software rasteriser (--device wgpu uses it)".to_string(),
        ));
    }
    let kind = if software {
        "wgpu on the software rasteriser"
    } else {
        "wgpu on"
    };
    name_after_work(&device)
        .map(|name| (device, format!("{kind} {name}")))
        .map_err(|reason| unusable("the wgpu adapter does not open", &reason))
}

#[cfg(not(feature = "wgpu"))]
fn open_wgpu(_adapters: Adapters) -> Result<(Device, String), DeviceError> {
    Err(DeviceError::NotBuilt { feature: "wgpu" })
}

#[cfg(feature = "flex")]
fn open_cpu() -> Result<(Device, String), DeviceError> {
    Ok((Device::flex(), "the CPU (Burn's Flex backend)".to_string()))
}

#[cfg(not(feature = "flex"))]
fn open_cpu() -> Result<(Device, String), DeviceError> {
    Err(DeviceError::NotBuilt { feature: "flex" })
}

/// Lets `device` compute 1 + 1, and gives its name: only this shows that driver, compiler and memory work.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn name_after_work(device: &Device) -> Result<String, String> {
    crate::panics::catch(|| {
        let two = (Tensor::<1>::ones([1], device) + 1.0)
            .try_into_scalar::<f32>()
            .map_err(|error| error.to_string())?;
        if two != 2.0 {
            return Err(format!("it computes 1 + 1 = {two}"));
        }
        let identity = device.identity();
        Ok(identity.map_or_else(|| "a device without a name".to_string(), |id| id.name))
    })
    .flatten()
}

/// The first line of a driver's message; the rest is a backtrace or a dump of all adapters.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
fn unusable(what: &str, reason: &str) -> DeviceError {
    let line = reason.lines().next().unwrap_or_default();
    let line: String = line.chars().take(200).collect();
    DeviceError::Unusable(format!("{what} ({line})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_automatic_choice_opens_whatever_is_there() {
        match open(DeviceChoice::Auto) {
            Ok((device, sentence)) => {
                assert!(sentence.ends_with('.'), "{sentence}");
                assert_ne!(
                    hardware(&device),
                    Hardware::SoftwareRasteriser,
                    "a software rasteriser is never chosen unasked: {sentence}"
                );
            }
            Err(error) => {
                // The CPU always opens where its backend is built in.
                let text = error.to_string();
                assert_eq!(
                    (cfg!(feature = "flex"), text.contains("`flex`")),
                    (false, true),
                    "{text}"
                );
            }
        }
    }

    #[cfg(feature = "flex")]
    #[test]
    fn the_cpu_is_the_cpu_with_and_without_autodiff() {
        let (device, sentence) = open(DeviceChoice::Cpu).unwrap();
        assert!(sentence.contains("CPU"), "{sentence}");
        assert_eq!(hardware(&device), Hardware::Cpu);
        assert_eq!(hardware(&device.autodiff()), Hardware::Cpu);
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_choice_that_was_not_built_names_its_feature() {
        let error = open(DeviceChoice::Cuda).unwrap_err().to_string();
        assert!(error.contains("--features cuda"), "{error}");
    }
}
