//! A number to the power of a step count that is on the device.
//!
//! Bias corrections are `1 - beta^steps`. Burn computes them on the host with `f32::powi`, so the device multiplies in
//! the same order; the difference from one is another operation, lest the compiler contract the two.

use burn::tensor::Tensor;

#[cfg(feature = "cubecl-backend")]
mod kernel {
    use burn::backend::tensor::FloatTensor;
    use burn::backend::{Dispatch, DispatchTensorKind, backend_extension};
    use burn::tensor::Tensor;
    use burn_cubecl::CubeBackend;
    use burn_cubecl::tensor::CubeTensor;
    use cubecl::prelude::*;

    #[backend_extension(Cube, Fusion)]
    pub(crate) trait PowerOps: burn::backend::Backend {
        /// `base` to the power of each element of `steps`.
        #[fusion(dtype = steps, shape = steps)]
        fn graph_power(steps: FloatTensor<Self>, base: f32) -> FloatTensor<Self>;
    }

    #[cube(launch)]
    fn power(steps: &[f32], out: &mut [f32], base: f32) {
        if ABSOLUTE_POS < out.len() {
            let mut left = u32::cast_from(steps[ABSOLUTE_POS]);
            let mut factor = base;
            let mut result = 1.0f32;
            for _ in 0..32u32 {
                if left & 1u32 == 1u32 {
                    result *= factor;
                }
                left >>= 1u32;
                factor *= factor;
            }
            out[ABSOLUTE_POS] = result;
        }
    }

    impl PowerOps for CubeBackend {
        fn graph_power(steps: FloatTensor<Self>, base: f32) -> FloatTensor<Self> {
            let client = steps.client.clone();
            let elements = steps.meta.num_elements();
            let handle = client.empty(elements * steps.dtype.size());
            let out = CubeTensor::new_contiguous(
                client.clone(),
                steps.device.clone(),
                steps.meta.shape().clone(),
                handle,
                steps.dtype,
            );
            power::launch(
                &client,
                CubeCount::Static((elements as u32).div_ceil(32), 1, 1),
                CubeDim::new_1d(32),
                steps.into_buffer_arg(),
                out.clone().into_buffer_arg(),
                base,
            );
            out
        }
    }

    /// `None` on a device without these kernels.
    pub(super) fn run(base: f32, steps: &Tensor<1>) -> Option<Tensor<1>> {
        let dispatch = steps.clone().into_dispatch();
        matches!(dispatch.kind, DispatchTensorKind::Cube(_))
            .then(|| Tensor::from_dispatch(<Dispatch as PowerOps>::graph_power(dispatch, base)))
    }
}

/// `base` to the power of `steps`, `[1]` `f32`, a whole number below 2^24.
pub(crate) fn power(base: f32, steps: Tensor<1>) -> Tensor<1> {
    #[cfg(feature = "cubecl-backend")]
    if let Some(power) = kernel::run(base, &steps) {
        return power;
    }
    steps.full_like(base).powf(steps)
}
