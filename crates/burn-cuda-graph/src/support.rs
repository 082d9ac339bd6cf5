//! What a graph is on a device.

use burn::tensor::Device;
use serde::{Deserialize, Serialize};

/// What a recorded step becomes on a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Support {
    /// A graph executable that the driver launches at once (CUDA, HIP).
    Hardware,
    /// A list of dispatches that the runtime re-encodes at each replay (wgpu).
    Software,
    /// Nothing: steps run eagerly.
    None {
        /// The device, and what it lacks.
        reason: String,
    },
}

impl core::fmt::Display for Support {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Support::Hardware => write!(f, "hardware graph: one driver launch per replay"),
            Support::Software => write!(f, "software graph: dispatches re-encoded at each replay"),
            Support::None { reason } => write!(f, "no graph: {reason}"),
        }
    }
}

/// What a recorded step becomes on `device`. Does not open the device.
pub fn support(device: &Device) -> Support {
    let device = device.clone().inner();
    #[cfg(feature = "cubecl-backend")]
    if let burn::backend::DispatchDevice::Cube(device) = device.as_dispatch() {
        use burn_cubecl::CubeDevice;
        return match device {
            CubeDevice::Cuda(_) | CubeDevice::Hip(_) => Support::Hardware,
            CubeDevice::Wgpu(_) => Support::Software,
            other => Support::None {
                reason: format!("{other:?} records no graphs"),
            },
        };
    }
    Support::None {
        reason: format!("{:?} records no graphs", device.as_dispatch()),
    }
}

#[cfg(test)]
mod tests {
    /// The CPU backend is named as having no graphs, so that a user who runs there is told why.
    #[cfg(feature = "flex")]
    #[test]
    fn the_cpu_backend_is_named() {
        let support = super::support(&burn::tensor::Device::flex().autodiff());
        assert!(
            matches!(&support, super::Support::None { reason } if reason.contains("Flex")),
            "{support}"
        );
    }
}
