//! Copying many tensors with few launches.
//!
//! What a replay moves are many small tensors (BatchNorm statistics, a batch, a loss) and a few large ones. One launch
//! each costs more than the bytes do, so a launch takes as many pairs as the device has bindings for: every position
//! finds its pair by halving the list of where they start.

// The macro's expansion names its arguments without need.
#![allow(clippy::too_many_arguments, missing_docs)]

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::*;

#[cube(launch)]
fn copy_many<E: Numeric, N: Size>(
    src: &Sequence<Box<[Vector<E, N>]>>,
    dst: &mut Sequence<Box<[Vector<E, N>]>>,
    starts: &Sequence<u32>,
    total: u32,
    #[comptime] count: usize,
    #[define(E)] _elem: ElemType,
) {
    let position = u32::cast_from(ABSOLUTE_POS);
    if position < total {
        copy_among::<E, N>(src, dst, starts, position, 0usize, count);
    }
}

/// Copy one element of the pairs `low..high`, which `position` is known to be in.
#[cube]
fn copy_among<E: Numeric, N: Size>(
    src: &Sequence<Box<[Vector<E, N>]>>,
    dst: &mut Sequence<Box<[Vector<E, N>]>>,
    starts: &Sequence<u32>,
    position: u32,
    #[comptime] low: usize,
    #[comptime] high: usize,
) {
    if comptime!(high - low == 1) {
        let index = usize::cast_from(position - starts[low]);
        copy_line::<E, N>(&src[low], &mut dst[low], index);
    } else {
        let middle = comptime!((low + high) / 2);
        if position < starts[middle] {
            copy_among::<E, N>(src, dst, starts, position, low, middle);
        } else {
            copy_among::<E, N>(src, dst, starts, position, middle, high);
        }
    }
}

#[cube]
fn copy_line<E: Numeric, N: Size>(src: &[Vector<E, N>], dst: &mut [Vector<E, N>], index: usize) {
    dst[index] = src[index];
}

/// Most bytes of a kernel's parameters that a driver of any age takes: four for the start of a pair, and twelve for each
/// buffer (its address and its length).
const PARAMETER_BYTES: usize = 4096 - 256;

/// Groups of `buffers` buffers and a start that one launch takes, beside `more` buffers.
pub(crate) fn groups_per_launch(client: &Client, buffers: usize, more: usize) -> usize {
    // One binding is for the kernel's own metadata.
    let bindings = client.properties().hardware.max_bindings as usize;
    let by_bindings = bindings.saturating_sub(1 + more) / buffers;
    by_bindings.min(PARAMETER_BYTES / (4 + 12 * buffers)).max(1)
}

/// Elements that one vector holds, of those that a copy or an update moves at once.
pub(crate) const LINE: usize = 4;

/// Where each of the groups of the given lengths starts, and the end of the last.
pub(crate) fn starts(lengths: impl Iterator<Item = usize>) -> (SequenceArg<u32>, u32) {
    let mut starts = SequenceArg::new();
    let mut total = 0u32;
    for length in lengths {
        starts.push(total);
        total += length as u32;
    }
    (starts, total)
}

/// Most positions of one launch, so that they fit 32 bits with room for the last cube.
pub(crate) const MAX_POSITIONS: usize = 1 << 31;

/// Whether the tensor's elements fill its buffer, in whatever order.
pub(crate) fn packed(tensor: &CubeTensor) -> bool {
    tensor.is_nonoverlapping()
        && !tensor.meta.is_tiled()
        && tensor.handle.size_in_used() == bytes(tensor)
}

/// Whether both tensors lie in memory the same way without holes, so that copying their bytes copies them.
pub(crate) fn same_layout(src: &CubeTensor, dst: &CubeTensor) -> bool {
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
        match same_layout(src, dst) && words(src, element(src)) < MAX_POSITIONS {
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

/// Launches that copying each of `tensors` from or to one of the same layout takes.
pub(crate) fn launches(tensors: &[CubeTensor]) -> u64 {
    let Some(client) = tensors.first().map(|tensor| &tensor.client) else {
        return 0;
    };
    let (mut tensors, apart): (Vec<&CubeTensor>, Vec<&CubeTensor>) =
        tensors.iter().partition(|tensor| packed(tensor));
    tensors.sort_by_key(|tensor| element(tensor).size());
    let of_element = |tensors: &[&CubeTensor]| {
        let elem = element(tensors[0]);
        let most = groups_per_launch(client, 2, 0);
        launch_groups(client, elem.size(), tensors, most, |tensor| {
            words(tensor, elem)
        })
        .len() as u64
    };
    (tensors.chunk_by(|a, b| element(a) == element(b)))
        .map(of_element)
        .sum::<u64>()
        + apart.len() as u64
}

/// `items`, by launch, with the elements of the vectors that it moves: those whose elements fill vectors apart from the
/// others, and at most `most` in one. Items without elements are left out.
pub(crate) fn launch_groups<'a, T>(
    client: &Client,
    element_bytes: usize,
    items: &'a [T],
    most: usize,
    elements: impl Fn(&T) -> usize,
) -> Vec<(usize, Vec<&'a T>)> {
    let mut sizes = client.io_optimized_vector_sizes(element_bytes);
    let lines = sizes.any(|size| size == LINE);
    let (wide, narrow): (Vec<&T>, Vec<&T>) = (items.iter())
        .filter(|item| elements(item) > 0)
        .partition(|item| lines && elements(item).is_multiple_of(LINE));
    let mut groups = Vec::new();
    for (width, items) in [(LINE, wide), (1, narrow)] {
        let (mut group, mut positions) = (Vec::new(), 0);
        for item in items {
            let own = elements(item) / width;
            let full = group.len() == most || positions + own >= MAX_POSITIONS;
            if full && !group.is_empty() {
                groups.push((width, core::mem::take(&mut group)));
                positions = 0;
            }
            positions += own;
            group.push(item);
        }
        if !group.is_empty() {
            groups.push((width, group));
        }
    }
    groups
}

/// Whether both tensors are the same range of the same buffer.
pub(crate) fn same_buffer(src: &CubeTensor, dst: &CubeTensor) -> bool {
    src.handle.clone().binding().claim_key() == dst.handle.clone().binding().claim_key()
}

/// Whether both tensors are ranges, maybe different ones, of the same allocation.
pub(crate) fn same_memory(src: &CubeTensor, dst: &CubeTensor) -> bool {
    src.handle.clone().binding().claim_key().0 == dst.handle.clone().binding().claim_key().0
}

fn launch_flat(pairs: &[&(CubeTensor, CubeTensor)], elem: ElemType) -> u64 {
    let Some(client) = pairs.first().map(|pair| pair.0.client.clone()) else {
        return 0;
    };
    let most = groups_per_launch(&client, 2, 0);
    let groups = launch_groups(&client, elem.size(), pairs, most, |pair| {
        words(&pair.0, elem)
    });
    for (width, pairs) in &groups {
        launch(&client, pairs, elem, *width);
    }
    groups.len() as u64
}

fn launch(client: &Client, pairs: &[&&(CubeTensor, CubeTensor)], elem: ElemType, width: usize) {
    let lengths = pairs.iter().map(|pair| words(&pair.0, elem) / width);
    let (starts, total) = starts(lengths);
    let dim = CubeDim::new(client, total as usize);
    let count = calculate_cube_count_elemwise(client, total as usize, dim);
    copy_many::launch(
        client,
        count,
        dim,
        width,
        pairs.iter().map(|pair| arg(&pair.0, elem)).collect(),
        pairs.iter().map(|pair| arg(&pair.1, elem)).collect(),
        starts,
        total,
        pairs.len(),
        elem,
    );
}
