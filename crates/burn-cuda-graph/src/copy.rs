//! Copying many tensors with few launches.
//!
//! What a replay moves are many small tensors (BatchNorm statistics, a batch, a loss) and a few large ones. One launch
//! each costs more than the bytes do, so a launch takes as many pairs as the device has bindings for: every position
//! finds its pair by halving the list of where they start.
//!
//! A step's scalars are a few words that the host has. Copied by themselves, they are a transfer, and the device waits where
//! its copy engine and its kernels take turns. So the launch that copies a batch carries them in its parameters.

// The macro's expansion names its arguments without need. Conditions of the compilation stand apart from those of a unit.
#![allow(clippy::too_many_arguments, clippy::collapsible_if, missing_docs)]

use burn::tensor::Shape;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::zspace::{Tiling, strides};

#[cube(launch)]
fn copy_many<E: Numeric, N: Size>(
    wide_src: &Sequence<Box<[Vector<E, N>]>>,
    wide_dst: &mut Sequence<Box<[Vector<E, N>]>>,
    src: &Sequence<Box<[E]>>,
    dst: &mut Sequence<Box<[E]>>,
    // Where the words go: one buffer, or none.
    slots: &mut Sequence<Box<[u32]>>,
    words: &Sequence<u32>,
    places: &Sequence<u32>,
    starts: &Sequence<u32>,
    total: u32,
    #[comptime] wide: usize,
    #[comptime] count: usize,
    #[comptime] carried: usize,
    #[define(E)] _elem: ElemType,
) {
    let position = u32::cast_from(ABSOLUTE_POS);
    // Nested, so that what is not there is not looked for: there may be no buffer of slots, and no pair.
    if comptime!(carried > 0) {
        if position == 0 {
            write_words(&mut slots[0usize], words, places, carried);
        }
    }
    if comptime!(count > 0) {
        if position < total {
            copy_among::<E, N>(
                wide_src, wide_dst, src, dst, starts, position, wide, 0usize, count,
            );
        }
    }
}

/// A store each, by one unit: they depend on nothing, so that it does not wait between them.
#[cube]
fn write_words(
    slots: &mut [u32],
    words: &Sequence<u32>,
    places: &Sequence<u32>,
    #[comptime] carried: usize,
) {
    #[unroll]
    for index in 0..carried {
        slots[usize::cast_from(places[index])] = words[index];
    }
}

/// Copy one element, or vector, of the pairs `low..high`, which `position` is known to be in. The first `wide` are the wide
/// ones.
#[cube]
fn copy_among<E: Numeric, N: Size>(
    wide_src: &Sequence<Box<[Vector<E, N>]>>,
    wide_dst: &mut Sequence<Box<[Vector<E, N>]>>,
    src: &Sequence<Box<[E]>>,
    dst: &mut Sequence<Box<[E]>>,
    starts: &Sequence<u32>,
    position: u32,
    #[comptime] wide: usize,
    #[comptime] low: usize,
    #[comptime] high: usize,
) {
    if comptime!(high - low == 1) {
        let index = usize::cast_from(position - starts[low]);
        if comptime!(low < wide) {
            copy_line::<E, N>(&wide_src[low], &mut wide_dst[low], index);
        } else {
            let narrow = comptime!(low - wide);
            copy_one::<E>(&src[narrow], &mut dst[narrow], index);
        }
    } else {
        let middle = comptime!((low + high) / 2);
        if position < starts[middle] {
            copy_among::<E, N>(
                wide_src, wide_dst, src, dst, starts, position, wide, low, middle,
            );
        } else {
            copy_among::<E, N>(
                wide_src, wide_dst, src, dst, starts, position, wide, middle, high,
            );
        }
    }
}

#[cube]
fn copy_one<E: Numeric>(src: &[E], dst: &mut [E], index: usize) {
    dst[index] = src[index];
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
    groups_beside(client, buffers, more, 0)
}

/// The same, where `parameters` bytes are taken by something else.
fn groups_beside(client: &Client, buffers: usize, more: usize, parameters: usize) -> usize {
    // One binding is for the kernel's own metadata.
    let bindings = client.properties().hardware.max_bindings as usize;
    let by_bindings = bindings.saturating_sub(1 + more) / buffers;
    let bytes = PARAMETER_BYTES.saturating_sub(parameters);
    by_bindings.min(bytes / (4 + 12 * buffers)).max(1)
}

/// Pairs that one launch takes which carries so many words.
fn pairs_per_launch(client: &Client, carried: usize) -> usize {
    match carried {
        0 => groups_beside(client, 2, 0, 0),
        _ => groups_beside(client, 2, 1, 12 + 8 * carried),
    }
}

/// Most words that a launch carries: with their places they take 768 bytes of its parameters, and one unit writes them.
pub(crate) const MOST_WORDS: usize = 96;

/// Numbers that a launch takes along and writes, beside the pairs that it copies.
///
/// Where they go (CubeCL 0.11.3): a launch's metadata is its scalars, then the lengths of its buffers, then the shapes and
/// strides of its tensors (`InfoBuilder::finish`). On CUDA the first two are the kernel's last parameter, by value, and only
/// the third, `data[dynamic_metadata_offset..]`, is a buffer, which is uploaded and kept in a cache by its content
/// (`launch_checked` and `info_buffer` in cubecl-cuda, from compute capability 7.0 on). A slice has a length and neither shape
/// nor strides. So **this kernel takes slices only**: there is no third part, and words that differ at each replay upload
/// nothing and leave nothing in that cache. A single argument that is a `Tensor` would not change that, since scalars are in
/// the first part all the same, but it would cost a look-up.
///
/// Elsewhere (wgpu, HIP) all three parts are one buffer, uploaded and cached by content. So each replay uploads it, as it would
/// upload the words by themselves, and the cache, of 512 buffers on wgpu, passes over to such buffers what was not used for as
/// many replays. What a graph recorded stays: it is pinned. The kernel is used there too, so that what is tested on wgpu is what
/// runs on CUDA.
pub(crate) struct Words {
    pub client: Client,
    /// A buffer of words.
    pub buffer: Handle,
    /// At most [`MOST_WORDS`].
    pub values: Vec<u32>,
    /// The index of each in the buffer.
    pub places: Vec<u32>,
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

/// Whether copying the first buffer from its first element to its last copies the tensor: both lie in memory the same way, and
/// holes between rows, which the copy takes along, are nobody's in the second.
fn laid_alike(src: &CubeTensor, dst: &CubeTensor) -> bool {
    src.dtype == dst.dtype
        && src.meta.shape() == dst.meta.shape()
        && src.meta.strides() == dst.meta.strides()
        && spans_its_buffer(src)
        && spans_its_buffer(dst)
}

/// Whether the tensor's elements have a place each, in its buffer.
fn spans_its_buffer(tensor: &CubeTensor) -> bool {
    tensor.is_nonoverlapping()
        && !tensor.meta.is_tiled()
        && extent(tensor) <= tensor.handle.size_in_used()
}

fn bytes(tensor: &CubeTensor) -> u64 {
    (tensor.meta.shape().num_elements() * tensor.dtype.size()) as u64
}

/// Bytes from the first element to the last, holes between rows included.
fn extent(tensor: &CubeTensor) -> u64 {
    let places = tensor.meta.shape().iter().zip(tensor.meta.strides().iter());
    let last: usize = places
        .map(|(size, stride)| size.saturating_sub(1) * stride)
        .sum();
    ((last + 1) * tensor.dtype.size()) as u64
}

/// The element a copy moves: a 32-bit word where the bytes allow it, else the tensor's own.
fn element(tensor: &CubeTensor) -> ElemType {
    match extent(tensor) % 4 {
        0 => ElemType::UInt(UIntKind::U32),
        _ => burn::backend::cubecl::dtype_to_storage_type(tensor.dtype),
    }
}

fn length(tensor: &CubeTensor, elem: ElemType) -> usize {
    extent(tensor) as usize / elem.size()
}

/// A flat view of a buffer of `length` elements. What bounds the kernel is the size of the handle.
fn flat(handle: &Handle, length: usize) -> BufferArg {
    TensorBinding {
        handle: handle.clone().binding(),
        strides: strides![1],
        shape: Shape::new([length]),
        tiling: Tiling::UNTILED,
    }
    .into_buffer_arg()
}

/// Copy each source into the buffer of its destination, on the current stream. Answers the number of launches.
///
/// Shapes and dtypes of a pair must be equal; layouts may differ, at the price of a launch for that pair. A pair
/// that already shares its buffer is left out, and so is an empty one. Destinations are buffers that this crate made for
/// one tensor: what lies in holes between their rows is overwritten.
pub(crate) fn copy_all(pairs: &[(CubeTensor, CubeTensor)]) -> u64 {
    let Some((first, _)) = pairs.first() else {
        return 0;
    };
    copy(&first.client, pairs, None)
}

/// The same, and write `words`: with the first launch that copies, or by themselves.
pub(crate) fn copy_and_write(pairs: &[(CubeTensor, CubeTensor)], words: &Words) -> u64 {
    copy(&words.client, pairs, Some(words))
}

fn copy(client: &Client, pairs: &[(CubeTensor, CubeTensor)], words: Option<&Words>) -> u64 {
    let mut launches = 0;
    let mut alike: Vec<&(CubeTensor, CubeTensor)> = Vec::with_capacity(pairs.len());
    for pair in pairs {
        let (src, dst) = pair;
        if same_buffer(src, dst) || bytes(src) == 0 {
            continue;
        }
        match laid_alike(src, dst) && length(src, element(src)) < MAX_POSITIONS {
            true => alike.push(pair),
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
    let carried = words.map_or(0, |words| words.values.len());
    let groups = copy_groups(client, alike, |pair| &pair.0, carried);
    let mut words = words.filter(|words| !words.values.is_empty());
    for group in &groups {
        launch(client, group, words.take());
        launches += 1;
    }
    if words.is_some() {
        launch(client, &CopyGroup::default(), words);
        launches += 1;
    }
    launches
}

/// Launches that copying each of `tensors` from or to one of the same layout takes, and writing so many words beside.
pub(crate) fn launches(tensors: &[CubeTensor], carried: usize) -> u64 {
    let (alike, apart): (Vec<&CubeTensor>, Vec<&CubeTensor>) = (tensors.iter())
        .filter(|tensor| bytes(tensor) > 0)
        .partition(|tensor| spans_its_buffer(tensor));
    let groups = alike.first().map_or(0, |first| {
        copy_groups(&first.client, alike.clone(), |tensor| tensor, carried).len() as u64
    });
    let alone = u64::from(carried > 0 && groups == 0);
    groups + alone + apart.len() as u64
}

/// What one launch copies: the first `wide` items by vectors.
struct CopyGroup<T> {
    elem: ElemType,
    wide: usize,
    items: Vec<T>,
}

impl<T> Default for CopyGroup<T> {
    fn default() -> Self {
        Self {
            elem: ElemType::UInt(UIntKind::U32),
            wide: 0,
            items: Vec::new(),
        }
    }
}

/// `items` by launch, each of which carries so many words.
fn copy_groups<T>(
    client: &Client,
    items: Vec<T>,
    tensor: impl Fn(&T) -> &CubeTensor,
    carried: usize,
) -> Vec<CopyGroup<T>> {
    let most = pairs_per_launch(client, carried);
    let mut items: Vec<(ElemType, usize, T)> = (items.into_iter())
        .map(|item| {
            let elem = element(tensor(&item));
            let length = length(tensor(&item), elem);
            let mut sizes = client.io_optimized_vector_sizes(elem.size());
            let wide = length.is_multiple_of(LINE) && sizes.any(|size| size == LINE);
            (elem, if wide { LINE } else { 1 }, item)
        })
        .collect();
    items.sort_by_key(|(elem, width, _)| (elem.size(), core::cmp::Reverse(*width)));
    let mut groups: Vec<CopyGroup<T>> = Vec::new();
    let mut positions = 0;
    for (elem, width, item) in items {
        let own = length(tensor(&item), elem) / width;
        let fits = |group: &CopyGroup<T>| {
            group.elem == elem && group.items.len() < most && positions + own < MAX_POSITIONS
        };
        if !groups.last().is_some_and(fits) {
            groups.push(CopyGroup {
                elem,
                ..CopyGroup::default()
            });
            positions = 0;
        }
        positions += own;
        if let Some(group) = groups.last_mut() {
            group.wide += usize::from(width == LINE);
            group.items.push(item);
        }
    }
    groups
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

fn launch(client: &Client, group: &CopyGroup<&(CubeTensor, CubeTensor)>, words: Option<&Words>) {
    let CopyGroup { elem, wide, items } = group;
    let (wides, narrows) = items.split_at(*wide);
    let length = |tensor: &CubeTensor| length(tensor, *elem);
    let lengths = (wides.iter().map(|pair| length(&pair.0) / LINE))
        .chain(narrows.iter().map(|pair| length(&pair.0)));
    let (starts, total) = starts(lengths);
    let arg = |tensor: &CubeTensor| flat(&tensor.handle, length(tensor));
    let mut slots = SequenceArg::new();
    if let Some(words) = words {
        let length = words.buffer.size_in_used() as usize / size_of::<u32>();
        slots.push(flat(&words.buffer, length));
    }
    let units = (total as usize).max(1);
    let dim = CubeDim::new(client, units);
    let count = calculate_cube_count_elemwise(client, units, dim);
    copy_many::launch(
        client,
        count,
        dim,
        if *wide > 0 { LINE } else { 1 },
        wides.iter().map(|pair| arg(&pair.0)).collect(),
        wides.iter().map(|pair| arg(&pair.1)).collect(),
        narrows.iter().map(|pair| arg(&pair.0)).collect(),
        narrows.iter().map(|pair| arg(&pair.1)).collect(),
        slots,
        (words.iter().flat_map(|words| words.values.iter().copied())).collect(),
        (words.iter().flat_map(|words| words.places.iter().copied())).collect(),
        starts,
        total,
        *wide,
        items.len(),
        words.map_or(0, |words| words.values.len()),
        *elem,
    );
}
