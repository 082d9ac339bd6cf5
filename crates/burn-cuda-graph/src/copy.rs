//! Copying many tensors with few launches.
//!
//! What a replay moves are many small tensors (BatchNorm statistics, biases, a batch, a loss) and a few large ones.
//! One launch each costs more than the bytes do, so a launch takes up to sixteen pairs: every position finds its
//! pair by the running sum of the lengths. The number of pairs per launch is bounded by the device's bindings.

// The macro's expansion names its arguments without need.
#![allow(clippy::too_many_arguments, missing_docs)]

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::*;

#[cube]
fn copy_element<E: Numeric>(src: &[E], dst: &mut [E], position: usize, start: usize) {
    if position >= start {
        let index = position - start;
        if index < src.len() {
            dst[index] = src[index];
        }
    }
}

#[cube(launch)]
fn copy_1<E: Numeric>(src0: &[E], dst0: &mut [E], #[define(E)] _elem: ElemType) {
    let position = ABSOLUTE_POS;
    copy_element(src0, dst0, position, 0);
}

#[cube(launch)]
fn copy_2<E: Numeric>(
    src0: &[E],
    dst0: &mut [E],
    src1: &[E],
    dst1: &mut [E],
    #[define(E)] _elem: ElemType,
) {
    let position = ABSOLUTE_POS;
    copy_element(src0, dst0, position, 0);
    let start1 = src0.len();
    copy_element(src1, dst1, position, start1);
}

#[cube(launch)]
fn copy_4<E: Numeric>(
    src0: &[E],
    dst0: &mut [E],
    src1: &[E],
    dst1: &mut [E],
    src2: &[E],
    dst2: &mut [E],
    src3: &[E],
    dst3: &mut [E],
    #[define(E)] _elem: ElemType,
) {
    let position = ABSOLUTE_POS;
    copy_element(src0, dst0, position, 0);
    let start1 = src0.len();
    copy_element(src1, dst1, position, start1);
    let start2 = start1 + src1.len();
    copy_element(src2, dst2, position, start2);
    let start3 = start2 + src2.len();
    copy_element(src3, dst3, position, start3);
}

#[cube(launch)]
fn copy_16<E: Numeric>(
    src0: &[E],
    dst0: &mut [E],
    src1: &[E],
    dst1: &mut [E],
    src2: &[E],
    dst2: &mut [E],
    src3: &[E],
    dst3: &mut [E],
    src4: &[E],
    dst4: &mut [E],
    src5: &[E],
    dst5: &mut [E],
    src6: &[E],
    dst6: &mut [E],
    src7: &[E],
    dst7: &mut [E],
    src8: &[E],
    dst8: &mut [E],
    src9: &[E],
    dst9: &mut [E],
    src10: &[E],
    dst10: &mut [E],
    src11: &[E],
    dst11: &mut [E],
    src12: &[E],
    dst12: &mut [E],
    src13: &[E],
    dst13: &mut [E],
    src14: &[E],
    dst14: &mut [E],
    src15: &[E],
    dst15: &mut [E],
    #[define(E)] _elem: ElemType,
) {
    let position = ABSOLUTE_POS;
    copy_element(src0, dst0, position, 0);
    let start1 = src0.len();
    copy_element(src1, dst1, position, start1);
    let start2 = start1 + src1.len();
    copy_element(src2, dst2, position, start2);
    let start3 = start2 + src2.len();
    copy_element(src3, dst3, position, start3);
    let start4 = start3 + src3.len();
    copy_element(src4, dst4, position, start4);
    let start5 = start4 + src4.len();
    copy_element(src5, dst5, position, start5);
    let start6 = start5 + src5.len();
    copy_element(src6, dst6, position, start6);
    let start7 = start6 + src6.len();
    copy_element(src7, dst7, position, start7);
    let start8 = start7 + src7.len();
    copy_element(src8, dst8, position, start8);
    let start9 = start8 + src8.len();
    copy_element(src9, dst9, position, start9);
    let start10 = start9 + src9.len();
    copy_element(src10, dst10, position, start10);
    let start11 = start10 + src10.len();
    copy_element(src11, dst11, position, start11);
    let start12 = start11 + src11.len();
    copy_element(src12, dst12, position, start12);
    let start13 = start12 + src12.len();
    copy_element(src13, dst13, position, start13);
    let start14 = start13 + src13.len();
    copy_element(src14, dst14, position, start14);
    let start15 = start14 + src14.len();
    copy_element(src15, dst15, position, start15);
}

/// Pairs one launch takes, largest first.
const ARITIES: [usize; 4] = [16, 4, 2, 1];

/// Whether both tensors lie in memory the same way without holes, so that copying their bytes copies them.
fn same_layout(src: &CubeTensor, dst: &CubeTensor) -> bool {
    let packed = |tensor: &CubeTensor| {
        tensor.is_nonoverlapping()
            && !tensor.meta.is_tiled()
            && tensor.handle.size_in_used() == bytes(tensor)
    };
    src.dtype == dst.dtype
        && src.meta.shape() == dst.meta.shape()
        && src.meta.strides() == dst.meta.strides()
        && packed(src)
        && packed(dst)
}

fn bytes(tensor: &CubeTensor) -> u64 {
    (tensor.meta.shape().num_elements() * tensor.dtype.size()) as u64
}

/// The element a copy moves: a 32-bit word where the bytes allow it, else the tensor's own.
fn element(tensor: &CubeTensor) -> ElemType {
    match bytes(tensor) % 4 {
        0 => ElemType::UInt(UIntKind::U32),
        _ => burn::backend::cubecl::dtype_to_storage_type(tensor.dtype),
    }
}

fn words(tensor: &CubeTensor, elem: ElemType) -> usize {
    bytes(tensor) as usize / elem.size()
}

fn arg(tensor: &CubeTensor, elem: ElemType) -> BufferArg {
    // A flat view of the same buffer; its length is what bounds the kernel. The dtype only names the element size.
    let dtype = match elem {
        ElemType::UInt(UIntKind::U32) => DType::U32,
        _ => tensor.dtype,
    };
    CubeTensor::new_contiguous(
        tensor.client.clone(),
        tensor.device.clone(),
        Shape::new([words(tensor, elem)]),
        tensor.handle.clone(),
        dtype,
    )
    .into_buffer_arg()
}

/// Copy each source into the buffer of its destination, on the current stream. Answers the number of launches.
///
/// Shapes and dtypes of a pair must be equal; layouts may differ, at the price of a launch for that pair. A pair
/// that already shares its buffer is left out, and so is an empty one.
pub(crate) fn copy_all(pairs: &[(CubeTensor, CubeTensor)]) -> u64 {
    let mut launches = 0;
    let mut flat: Vec<(ElemType, &(CubeTensor, CubeTensor))> = Vec::new();
    for pair in pairs {
        let (src, dst) = pair;
        if same_buffer(src, dst) || bytes(src) == 0 {
            continue;
        }
        match same_layout(src, dst) {
            true => flat.push((element(src), pair)),
            false => {
                let src = burn_cubecl::kernel::untile(src.clone());
                let dtype = burn::backend::cubecl::dtype_to_storage_type(src.dtype);
                cubecl::std::tensor::copy_into(
                    &dst.client,
                    src.clone().binding(),
                    dst.clone().binding(),
                    dtype,
                );
                launches += 1;
            }
        }
    }
    flat.sort_by_key(|(elem, _)| elem.size());
    for group in flat.chunk_by(|(a, _), (b, _)| a == b) {
        let elem = group[0].0;
        let pairs: Vec<&(CubeTensor, CubeTensor)> = group.iter().map(|(_, pair)| *pair).collect();
        launches += launch_flat(&pairs, elem);
    }
    launches
}

/// Whether both tensors are the same range of the same buffer.
pub(crate) fn same_buffer(src: &CubeTensor, dst: &CubeTensor) -> bool {
    src.handle.clone().binding().claim_key() == dst.handle.clone().binding().claim_key()
}

/// Whether both tensors are ranges, maybe different ones, of the same allocation.
pub(crate) fn same_memory(src: &CubeTensor, dst: &CubeTensor) -> bool {
    src.handle.clone().binding().claim_key().0 == dst.handle.clone().binding().claim_key().0
}

fn launch_flat(mut pairs: &[&(CubeTensor, CubeTensor)], elem: ElemType) -> u64 {
    let Some(client) = pairs.first().map(|pair| pair.0.client.clone()) else {
        return 0;
    };
    // Two buffers a pair, and one for the kernel's own metadata.
    let bindings = client.properties().hardware.max_bindings as usize;
    let mut launches = 0;
    while !pairs.is_empty() {
        let arity = ARITIES
            .into_iter()
            .find(|arity| *arity <= pairs.len() && 2 * arity < bindings)
            .unwrap_or(1);
        let (now, rest) = pairs.split_at(arity);
        launch(&client, now, elem);
        launches += 1;
        pairs = rest;
    }
    launches
}

fn launch(client: &Client, pairs: &[&(CubeTensor, CubeTensor)], elem: ElemType) {
    let total: usize = pairs.iter().map(|pair| words(&pair.0, elem)).sum();
    let dim = CubeDim::new(client, total);
    let count = calculate_cube_count_elemwise(client, total, dim);
    match pairs.len() {
        16 => copy_16::launch(
            client,
            count,
            dim,
            arg(&pairs[0].0, elem),
            arg(&pairs[0].1, elem),
            arg(&pairs[1].0, elem),
            arg(&pairs[1].1, elem),
            arg(&pairs[2].0, elem),
            arg(&pairs[2].1, elem),
            arg(&pairs[3].0, elem),
            arg(&pairs[3].1, elem),
            arg(&pairs[4].0, elem),
            arg(&pairs[4].1, elem),
            arg(&pairs[5].0, elem),
            arg(&pairs[5].1, elem),
            arg(&pairs[6].0, elem),
            arg(&pairs[6].1, elem),
            arg(&pairs[7].0, elem),
            arg(&pairs[7].1, elem),
            arg(&pairs[8].0, elem),
            arg(&pairs[8].1, elem),
            arg(&pairs[9].0, elem),
            arg(&pairs[9].1, elem),
            arg(&pairs[10].0, elem),
            arg(&pairs[10].1, elem),
            arg(&pairs[11].0, elem),
            arg(&pairs[11].1, elem),
            arg(&pairs[12].0, elem),
            arg(&pairs[12].1, elem),
            arg(&pairs[13].0, elem),
            arg(&pairs[13].1, elem),
            arg(&pairs[14].0, elem),
            arg(&pairs[14].1, elem),
            arg(&pairs[15].0, elem),
            arg(&pairs[15].1, elem),
            elem,
        ),
        4 => copy_4::launch(
            client,
            count,
            dim,
            arg(&pairs[0].0, elem),
            arg(&pairs[0].1, elem),
            arg(&pairs[1].0, elem),
            arg(&pairs[1].1, elem),
            arg(&pairs[2].0, elem),
            arg(&pairs[2].1, elem),
            arg(&pairs[3].0, elem),
            arg(&pairs[3].1, elem),
            elem,
        ),
        2 => copy_2::launch(
            client,
            count,
            dim,
            arg(&pairs[0].0, elem),
            arg(&pairs[0].1, elem),
            arg(&pairs[1].0, elem),
            arg(&pairs[1].1, elem),
            elem,
        ),
        _ => copy_1::launch(
            client,
            count,
            dim,
            arg(&pairs[0].0, elem),
            arg(&pairs[0].1, elem),
            elem,
        ),
    }
}
