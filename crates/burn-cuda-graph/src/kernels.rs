//! Kernels for what Burn's leave the device idle in.
//!
//! A replay is as long as its kernels, and in a training step many of Burn's have few threads that each work for long: a
//! gradient that is a sum over a thousand rows and has a few hundred columns, a product whose contraction is long and whose
//! result is small, the gradient of an embedding. Where [`register_kernels`] was called, such operations of the process are
//! computed with more threads at once.
//!
//! | operation | what is done | bits |
//! | --- | --- | --- |
//! | sum over the rows of a matrix, and its like of any rank | a column is summed by many units | other order of additions |
//! | product with a small result | the contraction is cut, the pieces are multiplied in one batch by Burn's kernels and summed | other order |
//! | `select_assign` with addition along the first axis: an embedding's gradient | each row that is written is summed by threads of its own, in the order of the indices | the same |
//! | product of matrices or of batches of them, up to 2^32 multiplications | which of CubeK's kernels is chosen anew; operands with rows farther apart than batches are read as they lie | other order |
//! | softmax along the last axis | one kernel, where Burn's fusion has three | other order |
//! | 2D convolution, its two gradients | one kernel lays the image out as columns, Burn's matrix products do the rest; no layout is changed before or after | other order |
//!
//! Each is one operation of Burn's fusion, taken only where Burn's fusion would have run it alone; a product also with the
//! operations on elements behind it, where Burn's fusion of both is a candidate. Except for the third, which is chosen by its
//! size, what Burn runs is among the candidates, and CubeCL's tuning picks the fastest for the shape, on a device that waits
//! for no launch. So whether a graph is replayed or a step runs eagerly, the same kernels run.
//!
//! All are for `f32`, accumulated in `f32`; everything else is Burn's.

mod columns;
mod conv;
mod followed;
mod fusion;
mod matmul;
mod occupy;
mod products;
mod select;
mod softmax;
mod sum;
#[cfg(all(test, feature = "wgpu"))]
mod tests;

pub(crate) use fusion::register;
use occupy::occupy;

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::tune::AutotuneKey;
use cubecl::zspace::Strides;
use cubecl::zspace::metadata::Metadata;
use serde::{Deserialize, Serialize};

/// What a choice among candidates is remembered by: everything that their times depend on, exactly.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct KernelKey {
    operation: String,
    sizes: Vec<usize>,
    strides: Vec<usize>,
}

impl KernelKey {
    fn new(operation: &str, sizes: impl Into<Vec<usize>>, tensors: &[&CubeTensor]) -> Self {
        let strides = tensors.iter().flat_map(|tensor| {
            let shape = tensor.meta.shape().iter();
            // The stride of an axis of one is arbitrary.
            shape
                .zip(tensor.meta.strides().iter())
                .map(|(size, stride)| if *size == 1 { 0 } else { *stride })
        });
        Self {
            operation: operation.into(),
            sizes: sizes.into(),
            strides: strides.collect(),
        }
    }
}

impl core::fmt::Display for KernelKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} {:?} {:?}", self.operation, self.sizes, self.strides)
    }
}

impl AutotuneKey for KernelKey {}

/// Whether the kernels here take the tensor.
fn plain(tensor: &CubeTensor) -> bool {
    tensor.dtype == DType::F32 && tensor.qparams.is_none() && !tensor.meta.is_tiled()
}

/// The same memory seen with another shape and strides, in elements, from the first element on.
fn view<const D: usize>(tensor: &CubeTensor, shape: [usize; D], strides: [usize; D]) -> CubeTensor {
    let mut seen = tensor.clone();
    *seen.meta = Metadata::new(Shape::from(shape), Strides::new(&strides));
    seen
}

/// A tensor without holes, in another shape of as many elements.
fn shaped(tensor: CubeTensor, sizes: Vec<usize>) -> CubeTensor {
    let mut strides = vec![1; sizes.len()];
    for at in (0..sizes.len().saturating_sub(1)).rev() {
        strides[at] = strides[at + 1] * sizes[at + 1];
    }
    let mut tensor = tensor;
    *tensor.meta = Metadata::new(Shape::from(sizes), Strides::new(&strides));
    tensor
}

/// The tensor, in a buffer that nobody else holds.
fn unshared(tensor: CubeTensor) -> CubeTensor {
    match tensor.can_mut() {
        true => tensor,
        false => tensor.copy(),
    }
}

/// Uninitialized memory for a tensor of `f32` without holes, beside `like`.
fn empty<const D: usize>(like: &CubeTensor, shape: [usize; D]) -> CubeTensor {
    burn_cubecl::ops::numeric::empty_device_contiguous_dtype(
        like.client.clone(),
        like.device.clone(),
        Shape::from(shape),
        DType::F32,
    )
}

/// Multiprocessors of the device. Where it does not say (wgpu), a number like that of a small card.
fn processors(tensor: &CubeTensor) -> usize {
    let hardware = &tensor.client.properties().hardware;
    hardware.num_streaming_multiprocessors.unwrap_or(32) as usize
}

/// A candidate that does not apply to the shape.
fn declined<T>(why: &str) -> Result<T, String> {
    Err(why.to_string())
}
