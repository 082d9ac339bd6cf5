//! Graph-owned tensors.
//!
//! A graph has addresses baked in. So every tensor it reads or writes from outside is one that the engine owns and
//! never lets go of: the state, the static inputs, the outputs. Users get duplicates, or they would see a value they
//! kept change under their hands at the next replay.
//!
//! Nothing may be allocated while a window is open, so a reserve is taken and dropped just before it, which leaves
//! the pools holding that many empty pages (the *headroom reserve*).

use crate::copy::{copy_all, packed, same_buffer, same_memory};
use crate::shape_key::ShapeKey;
use crate::tensor::{AnyTensor, TensorKind};
use burn::backend::tensor::{BoolTensor, FloatTensor, IntTensor};
use burn::backend::{
    BackendTensor, Dispatch, DispatchAutodiffContext, DispatchDevice, DispatchTensor,
    DispatchTensorKind, backend_extension,
};
use burn::tensor::{DType, Device, Shape};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_fusion::stream::StreamId;
use burn_fusion::{FusionBackend, FusionTensor};
use cubecl::client::Client;
use cubecl_runtime::memory_management::{MemoryPoolKind, MemoryReport, MemoryScope};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) type Runtime = <CubeBackend as FusionBackend>::FusionRuntime;

/// Duplicating a tensor without changing how it lies in memory.
///
/// A kernel's choice, and with it the last bits of a sum, may depend on strides: a parameter made contiguous on its
/// way into the pool could train differently from one that stayed as it was.
#[backend_extension(Cube, Fusion)]
pub(crate) trait PoolOps: burn::backend::Backend {
    /// The same values and layout in a buffer of its own.
    #[fusion(dtype = src, shape = src)]
    fn graph_duplicate_float(src: FloatTensor<Self>) -> FloatTensor<Self>;
    /// The same values and layout in a buffer of its own.
    #[fusion(dtype = src, shape = src)]
    fn graph_duplicate_int(src: IntTensor<Self>) -> IntTensor<Self>;
    /// The same values and layout in a buffer of its own.
    #[fusion(dtype = src, shape = src)]
    fn graph_duplicate_bool(src: BoolTensor<Self>) -> BoolTensor<Self>;
    /// One element of type `dtype`, `offset` bytes into `buffer`: a view of the same memory.
    #[fusion(dtype = *dtype, shape = Shape::new([1]))]
    fn graph_slot(buffer: FloatTensor<Self>, offset: u64, dtype: DType) -> FloatTensor<Self>;
}

impl PoolOps for CubeBackend {
    fn graph_duplicate_float(src: FloatTensor<Self>) -> FloatTensor<Self> {
        duplicate_cube(src)
    }
    fn graph_duplicate_int(src: IntTensor<Self>) -> IntTensor<Self> {
        duplicate_cube(src)
    }
    fn graph_duplicate_bool(src: BoolTensor<Self>) -> BoolTensor<Self> {
        duplicate_cube(src)
    }
    fn graph_slot(buffer: FloatTensor<Self>, offset: u64, dtype: DType) -> FloatTensor<Self> {
        let size = buffer.handle.size_in_used();
        let end = size.saturating_sub(offset + SLOT_BYTES);
        let handle = buffer.handle.clone().offset_start(offset).offset_end(end);
        CubeTensor::new_contiguous(
            buffer.client.clone(),
            buffer.device.clone(),
            Shape::new([1]),
            handle,
            dtype,
        )
    }
}

/// Bytes of a slot that are used, whatever its type.
pub(crate) const SLOT_BYTES: u64 = 16;

fn duplicate_cube(src: CubeTensor) -> CubeTensor {
    let src = burn_cubecl::kernel::untile(src);
    let copy = empty_like(&src);
    copy_all(&[(src, copy.clone())]);
    copy
}

/// A buffer for values of the same shape and type, laid out as `tensor`, holes between its rows included: which kernel takes a
/// tensor depends on its strides. Only where elements share a place (an expanded axis) is it contiguous.
pub(crate) fn empty_like(tensor: &CubeTensor) -> CubeTensor {
    if !tensor.is_nonoverlapping() || tensor.meta.is_tiled() {
        return empty_contiguous(tensor);
    }
    let (client, device, dtype) = (tensor.client.clone(), tensor.device.clone(), tensor.dtype);
    let handle = client.empty(spanned(tensor).max(1) * dtype.size());
    CubeTensor::new(client, handle, (*tensor.meta).clone(), device, dtype)
}

/// The same without holes, for kernels that take buffers from end to end.
pub(crate) fn empty_packed(tensor: &CubeTensor) -> CubeTensor {
    match packed(tensor) {
        true => empty_like(tensor),
        false => empty_contiguous(tensor),
    }
}

fn empty_contiguous(tensor: &CubeTensor) -> CubeTensor {
    let (client, device, dtype) = (tensor.client.clone(), tensor.device.clone(), tensor.dtype);
    let shape = tensor.meta.shape().clone();
    let handle = client.empty(shape.num_elements() * dtype.size());
    CubeTensor::new_contiguous(client, device, shape, handle, dtype)
}

/// Elements from the first to the last place of a tensor whose elements have a place each, the holes between them included.
fn spanned(tensor: &CubeTensor) -> usize {
    let places = tensor.meta.shape().iter().zip(tensor.meta.strides().iter());
    places
        .map(|(size, stride)| size * stride)
        .max()
        .unwrap_or(1)
}

/// The same values in a buffer of its own, off any tape. Lazy, like any operation.
pub(crate) fn duplicate(tensor: &AnyTensor) -> AnyTensor {
    let inner = tensor.clone().inner();
    let dispatch = inner.dispatch.clone();
    match inner.kind() {
        TensorKind::Float => AnyTensor::from_float(burn::tensor::Tensor::<1>::from_dispatch(
            <Dispatch as PoolOps>::graph_duplicate_float(dispatch),
        )),
        TensorKind::Int => {
            AnyTensor::from_int(burn::tensor::Tensor::<1, burn::tensor::Int>::from_dispatch(
                <Dispatch as PoolOps>::graph_duplicate_int(dispatch),
            ))
        }
        TensorKind::Bool => AnyTensor::from_bool(
            burn::tensor::Tensor::<1, burn::tensor::Bool>::from_dispatch(
                <Dispatch as PoolOps>::graph_duplicate_bool(dispatch),
            ),
        ),
    }
}

/// A user's copy of `tensor`: its own buffer, the same autodiff association.
pub(crate) fn duplicate_like(tensor: &AnyTensor) -> AnyTensor {
    AnyTensor::lifted_like(duplicate(tensor), tensor)
}

/// The tensor as the fusion server knows it, off any tape.
pub(crate) fn fusion_tensor(tensor: &AnyTensor) -> Option<FusionTensor<Runtime>> {
    match tensor.clone().inner().dispatch.kind {
        DispatchTensorKind::Cube(
            BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor),
        ) => Some(tensor),
        _ => None,
    }
}

/// The tensor that the fusion server knows as `tensor`: the way back from [`fusion_tensor`].
pub(crate) fn from_fusion(tensor: FusionTensor<Runtime>, kind: TensorKind) -> AnyTensor {
    let dispatch = |tensor| DispatchTensor {
        kind: DispatchTensorKind::Cube(tensor),
        autodiff: DispatchAutodiffContext::Disabled,
    };
    match kind {
        TensorKind::Float => AnyTensor::from_float(burn::tensor::Tensor::<1>::from_dispatch(
            dispatch(BackendTensor::Float(tensor)),
        )),
        TensorKind::Int => {
            AnyTensor::from_int(burn::tensor::Tensor::<1, burn::tensor::Int>::from_dispatch(
                dispatch(BackendTensor::Int(tensor)),
            ))
        }
        TensorKind::Bool => AnyTensor::from_bool(
            burn::tensor::Tensor::<1, burn::tensor::Bool>::from_dispatch(dispatch(
                BackendTensor::Bool(tensor),
            )),
        ),
    }
}

/// The fusion server's id of the tensor.
pub(crate) fn id(tensor: &AnyTensor) -> u64 {
    fusion_tensor(tensor).map_or(u64::MAX, |tensor| tensor.id.value())
}

/// The stream the tensor was made on.
pub(crate) fn home(tensor: &AnyTensor) -> Option<StreamId> {
    let DispatchTensorKind::Cube(
        BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor),
    ) = &tensor.dispatch.kind
    else {
        // On the tape: the inner tensor is a clone, which keeps its stream where it is this thread's.
        return fusion_tensor(tensor).map(|tensor| tensor.stream);
    };
    Some(tensor.stream)
}

/// The device buffer of the tensor, once everything registered so far on its stream has been launched.
pub(crate) fn resolve(tensor: &AnyTensor) -> Option<CubeTensor> {
    let kind = tensor.kind();
    let tensor = fusion_tensor(tensor)?;
    let client = tensor.client.clone();
    Some(match kind {
        TensorKind::Float => client.resolve_tensor_float::<CubeBackend>(tensor),
        TensorKind::Int => client.resolve_tensor_int::<CubeBackend>(tensor),
        TensorKind::Bool => client.resolve_tensor_bool::<CubeBackend>(tensor),
    })
}

/// The buffers of `tensors`, in order.
pub(crate) fn resolve_all(tensors: &[AnyTensor]) -> Result<Vec<CubeTensor>, String> {
    tensors
        .iter()
        .map(|tensor| {
            resolve(tensor)
                .ok_or_else(|| format!("a tensor is not on the step's device: {}", tensor.spec()))
        })
        .collect()
}

/// Tensors at fixed addresses.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pinned {
    /// As Burn sees them, off autodiff. Held, so that none of Burn's operations writes them in place.
    pub tensors: Vec<AnyTensor>,
    buffers: Vec<CubeTensor>,
}

impl Pinned {
    /// Duplicates of `tensors`.
    pub fn duplicate(tensors: &[AnyTensor]) -> Result<Self, String> {
        Self::hold(tensors.iter().map(duplicate).collect())
    }

    /// `tensors` themselves.
    pub fn hold(tensors: Vec<AnyTensor>) -> Result<Self, String> {
        let buffers = resolve_all(&tensors)?;
        Ok(Self { tensors, buffers })
    }

    /// The buffers, in order.
    pub fn buffers(&self) -> &[CubeTensor] {
        &self.buffers
    }

    /// Overwrite the buffers with the values of `tensors`. Answers the number of launches.
    pub fn write(&self, tensors: &[AnyTensor]) -> Result<u64, String> {
        if tensors.len() != self.buffers.len() {
            return Err(format!(
                "{} tensors where {} are held",
                tensors.len(),
                self.buffers.len()
            ));
        }
        let pairs: Vec<(CubeTensor, CubeTensor)> = resolve_all(tensors)?
            .into_iter()
            .zip(self.buffers.iter().cloned())
            .collect();
        for (index, (src, dst)) in pairs.iter().enumerate() {
            if src.dtype != dst.dtype || src.meta.shape() != dst.meta.shape() {
                return Err(format!(
                    "tensor {index} became {:?} {:?} where {:?} {:?} is held",
                    src.dtype,
                    src.meta.shape(),
                    dst.dtype,
                    dst.meta.shape()
                ));
            }
        }
        // A value computed from the buffer of another one (two tensors swapped, say) must be read before that
        // buffer is overwritten, so it goes through a buffer of its own.
        let crossed = pairs.iter().any(|(src, dst)| {
            !same_buffer(src, dst) && self.buffers.iter().any(|held| same_memory(src, held))
        });
        if !crossed {
            return Ok(copy_all(&pairs));
        }
        let staged: Vec<(CubeTensor, CubeTensor)> = pairs
            .into_iter()
            .map(|(src, dst)| match same_buffer(&src, &dst) {
                true => (src, dst),
                false => (duplicate_cube(src), dst),
            })
            .collect();
        Ok(staged.len() as u64 + copy_all(&staged))
    }

    /// Whether `tensor` lies in one of the buffers.
    pub fn shares_memory(&self, tensor: &AnyTensor) -> bool {
        resolve(tensor)
            .is_some_and(|buffer| self.buffers.iter().any(|held| same_memory(&buffer, held)))
    }

    /// Bytes of the buffers.
    pub fn bytes(&self) -> u64 {
        self.buffers
            .iter()
            .map(|buffer| buffer.handle.size_in_used())
            .sum()
    }
}

/// What one step needed of the memory pools, as pages to have ready.
#[derive(Debug, Clone, Default)]
pub(crate) struct PageNeeds(Vec<PageNeed>);

#[derive(Debug, Clone, Copy)]
struct PageNeed {
    /// Bytes of one reservation.
    chunk: u64,
    /// Reservations that fill a page.
    per_page: u64,
    /// Pages held after the step.
    pages: u64,
}

/// Bytes of one primed staging slice: the metadata of a launch with many tensors.
const STAGED_BYTES: usize = 1024;

/// Empty pages beyond what the rehearsal held: the window also holds the copies in and out.
const SPARE_PAGES: u64 = 2;

impl PageNeeds {
    /// Read off the pools right after a step that began with no empty page: what is held now is what the step
    /// needed at its peak.
    pub fn after_step(report: &MemoryReport) -> Self {
        let mut needs = Vec::new();
        for pool in report
            .streams
            .iter()
            .flat_map(|stream| &stream.pools.dynamic)
        {
            let (chunk, per_page) = match pool.kind {
                // Pages sized after the largest allocation: one reservation of a page's size takes an empty page.
                MemoryPoolKind::Adaptive { page_size, .. } => (page_size, 1),
                // Many small slices share a page; a slice of the largest size is all the pool takes at once.
                MemoryPoolKind::Sliced {
                    page_size,
                    max_slice_size,
                } if max_slice_size < page_size && max_slice_size > 0 => {
                    (max_slice_size, page_size / max_slice_size)
                }
                MemoryPoolKind::Exclusive { max_alloc_size } if max_alloc_size > 0 => {
                    (max_alloc_size, 1)
                }
                _ => continue,
            };
            if pool.pages > 0 {
                needs.push(PageNeed {
                    chunk,
                    per_page: per_page.max(1),
                    pages: pool.pages,
                });
            }
        }
        Self(needs)
    }

    /// The chunks to reserve for the given attempt: half as much again each time.
    fn chunks(&self, attempt: u32) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().map(move |need| {
            let grown = (0..attempt).fold(need.pages, |pages, _| pages + pages.div_ceil(2));
            (need.chunk, (grown + SPARE_PAGES) * need.per_page)
        })
    }

    /// Bytes that the reserve of `attempt` takes.
    pub fn bytes(&self, attempt: u32) -> u64 {
        self.chunks(attempt)
            .map(|(chunk, count)| chunk * count)
            .sum()
    }

    /// Take the reserve and drop it, which leaves its pages empty and held.
    ///
    /// # Errors
    ///
    /// The device's words when it cannot serve the reserve.
    pub fn reserve(&self, client: &Client, attempt: u32) -> Result<u64, String> {
        let mut held = Vec::new();
        for (chunk, count) in self.chunks(attempt) {
            held.extend((0..count).map(|_| client.empty(chunk as usize)));
        }
        (client.check(&held)).map_err(|err| causes(&err.to_string()))?;
        drop(held);
        client.flush().map_err(|err| err.to_string())?;
        Ok(self.bytes(attempt))
    }
}

/// The causes among CubeCL's words, once each: they come with a paragraph for each buffer.
fn causes(words: &str) -> String {
    const FRAME: [&str; 6] = [
        "Several failures",
        "Caused by",
        "The bytes were never written",
        "skipped",
        "No backtrace",
        "Asked at",
    ];
    let mut causes: Vec<&str> = Vec::new();
    for line in words.lines().map(str::trim) {
        let frame = FRAME.iter().any(|frame| line.starts_with(frame));
        if !frame && !line.is_empty() && !causes.contains(&line) {
            causes.push(line);
        }
    }
    match causes.is_empty() {
        true => words.to_string(),
        false => causes.join(": "),
    }
}

/// A graph's share of the bytes held.
#[derive(Debug)]
pub(crate) struct Held {
    pub bytes: u64,
    total: Arc<AtomicU64>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.total.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The graph-owned tensors of one step, and the device they are on.
pub(crate) struct Pool {
    pub client: Client,
    device: Device,
    /// The state that graphs read and write.
    pub state: Option<Pinned>,
    /// Bytes that the sealed graphs over this pool hold.
    held: Arc<AtomicU64>,
    /// What the rehearsals of each key found.
    rehearsals: HashMap<StepKey, Rehearsal>,
}

/// A function over the pool's state, and a shape key of it.
pub(crate) type StepKey = (u64, ShapeKey);

/// What a rehearsal leaves for the window that follows it.
#[derive(Debug, Clone)]
pub(crate) struct Rehearsal {
    /// Pages the step needed.
    pub needs: PageNeeds,
    /// Launches it made: how many metadata buffers a window may have to stage.
    pub launches: u64,
    /// Bytes of pages that the step took beyond the tensors alive before it: what a graph of it will have guarded.
    pub step_bytes: u64,
    /// The trim count at its end. A trim also drops the metadata buffers that a rehearsal leaves cached, which a
    /// window could then only stage anew.
    trims: u64,
}

/// How often metadata buffers were dropped, by a trim of any pool of the process, which reaches every stream of a
/// device, or with a graph.
static TRIMS: AtomicU64 = AtomicU64::new(0);

/// What a rehearsal left cached may be gone: windows are to be rehearsed again.
pub(crate) fn note_dropped_metadata() {
    TRIMS.fetch_add(1, Ordering::Relaxed);
}

impl core::fmt::Debug for Pool {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Pool")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// The pool of `device`; `None` where the device is not one of CubeCL's.
    pub fn new(device: &Device) -> Option<Self> {
        let client = cube_device(device)?.client();
        Some(Self {
            client,
            device: device.clone(),
            state: None,
            held: Arc::default(),
            rehearsals: HashMap::new(),
        })
    }

    /// What the current stream's memory holds.
    pub fn report(&self) -> MemoryReport {
        self.client.memory_report(MemoryScope::CurrentStream)
    }

    /// Bytes of the tensors alive on the current stream.
    pub fn bytes_in_use(&self) -> u64 {
        self.report().usage().bytes_in_use
    }

    /// Count `bytes` as held by a graph for as long as what this returns lives.
    pub fn hold(&self, bytes: u64) -> Held {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        Held {
            bytes,
            total: self.held.clone(),
        }
    }

    /// Give empty pages back to the driver.
    pub fn trim(&self) {
        note_dropped_metadata();
        if let Err(err) = self.client.memory_cleanup() {
            log::debug!("memory is not trimmed now: {err}");
        }
    }

    /// What the last rehearsal of this key found, however long ago.
    pub fn rehearsal(&self, key: &StepKey) -> Option<&Rehearsal> {
        self.rehearsals.get(key)
    }

    /// The same, when what it left warm still is.
    pub fn fresh_rehearsal(&self, key: &StepKey) -> Option<Rehearsal> {
        self.rehearsal(key)
            .filter(|rehearsal| rehearsal.trims == TRIMS.load(Ordering::Relaxed))
            .cloned()
    }

    /// Note what a step that just ran under preparation left behind. `in_use`: bytes of the tensors alive before
    /// it, when the pools were trimmed for it; else an earlier rehearsal's measurements stand.
    pub fn rehearsed(&mut self, key: StepKey, launches: u64, in_use: Option<u64>) {
        let trims = TRIMS.load(Ordering::Relaxed);
        let report = self.report();
        // The pages of graphs sealed before are held as well, and are not this step's.
        let held = self.held.load(Ordering::Relaxed);
        let taken = |in_use: u64| report.usage().bytes_reserved.saturating_sub(in_use + held);
        let measured = match (self.rehearsals.remove(&key), in_use) {
            (Some(earlier), None) => Rehearsal {
                launches,
                trims,
                ..earlier
            },
            (_, in_use) => Rehearsal {
                needs: PageNeeds::after_step(&report),
                launches,
                step_bytes: taken(in_use.unwrap_or(0)),
                trims,
            },
        };
        self.rehearsals.insert(key, measured);
    }

    /// Forget the graph-owned state and give memory back.
    pub fn clear(&mut self) {
        self.state = None;
        self.rehearsals.clear();
        self.trim();
    }

    /// Whether the values of `tensors` could be computed, as far as the device knows now.
    ///
    /// # Errors
    ///
    /// Its words for what could not.
    pub fn check(&self, tensors: &[AnyTensor]) -> Result<(), String> {
        self.check_buffers(&resolve_all(tensors)?)
    }

    /// The same of buffers.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn check_buffers<'a>(
        &self,
        buffers: impl IntoIterator<Item = &'a CubeTensor>,
    ) -> Result<(), String> {
        let handles = buffers.into_iter().map(|buffer| &buffer.handle);
        (self.client.check(handles)).map_err(|err| causes(&err.to_string()))
    }

    /// Have pinned staging ready for metadata that the rehearsal did not see: a copy recorded inside a window needs a
    /// slice of its own, and none can be allocated there. On a prepared stream the slices are held until the window
    /// opens, so each upload makes one more.
    pub fn prime_staging(&self, slices: u64) {
        let metadata = [0u8; STAGED_BYTES];
        let held: Vec<_> = (0..slices)
            .map(|_| self.client.create_from_slice(&metadata))
            .collect();
        drop(held);
    }

    /// Tensors to drop after a step's last operation, before its queue is drained: one for each tensor of the state.
    ///
    /// Plain Burn drops the old parameters there, after the update that replaces them, and that is what has the fusion
    /// server take the last operations of the queue into a fused kernel rather than launch them one by one. The two
    /// round differently (a fused multiply-add rounds once), so a recorded step without it would leave the last
    /// parameter a bit off the eager one now and then. The engine keeps the old parameters, so it drops these instead.
    pub fn step_end(&self, state: &[AnyTensor]) -> Vec<AnyTensor> {
        let empty = || AnyTensor::from_float(burn::tensor::Tensor::<1>::empty([1], &self.device));
        let markers = state.iter().map(|_| empty()).collect();
        self.drain();
        markers
    }

    /// Launch everything registered so far on the current stream.
    pub fn drain(&self) {
        if let Some(device) = cube_device(&self.device) {
            burn_fusion::client::GlobalFusionClient::<Runtime>::load(&device).sync(|| ());
        }
    }

    /// Have the fusion server take in everything sent so far, without launching what it holds back.
    pub fn settle_queue(&self) {
        if let Some(device) = cube_device(&self.device) {
            drop(burn_fusion::client::GlobalFusionClient::<Runtime>::load(&device).run(|| ()));
        }
    }
}

/// The device as CubeCL knows it.
pub(crate) fn cube_device(device: &Device) -> Option<CubeDevice> {
    match device.clone().inner().as_dispatch() {
        DispatchDevice::Cube(device) => Some(device.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl_runtime::memory_management::{
        MemoryPoolReport, MemoryPoolsReport, MemoryUsage, StreamMemoryReport,
    };

    fn pool(kind: MemoryPoolKind, pages: u64) -> MemoryPoolReport {
        MemoryPoolReport {
            kind,
            usage: MemoryUsage::default(),
            pages,
            pages_peak: pages,
            pages_unmapped: 0,
            largest_alloc: 0,
        }
    }

    /// A failure of many buffers is told once, by what caused it.
    #[test]
    fn causes_are_told_once() {
        let words = "Several failures at once\nCaused by:\n  The bytes were never written (failure #1)\nCaused by:\n  An IO \
                     error happened\nCaused by:\n  out of device memory\nNo backtrace available\nCaused by:\n  An IO error \
                     happened\nCaused by:\n  out of device memory";
        assert_eq!(causes(words), "An IO error happened: out of device memory");
        assert_eq!(causes("Caused by:"), "Caused by:");
    }

    /// The reserve fills as many whole pages as the step needed, and grows with each refusal: one too small refuses
    /// the window, which costs a step.
    #[test]
    fn the_reserve_follows_the_measured_pages_and_grows() {
        let mib = 1u64 << 20;
        let report = MemoryReport {
            streams: vec![StreamMemoryReport {
                stream: StreamId { value: 0 },
                pools: MemoryPoolsReport {
                    dynamic: vec![
                        pool(MemoryPoolKind::Exclusive { max_alloc_size: 0 }, 1),
                        pool(
                            MemoryPoolKind::Sliced {
                                page_size: 8 * mib,
                                max_slice_size: mib / 16,
                            },
                            1,
                        ),
                        pool(
                            MemoryPoolKind::Adaptive {
                                page_size: 5 * mib,
                                outdated_pages: 0,
                            },
                            10,
                        ),
                    ],
                    persistent: pool(MemoryPoolKind::Persistent, 4),
                    dedicated: pool(MemoryPoolKind::Direct, 4),
                },
                auxiliary: vec![],
            }],
        };
        let needs = PageNeeds::after_step(&report);
        let chunks: Vec<(u64, u64)> = needs.chunks(0).collect();
        assert_eq!(chunks, vec![(mib / 16, 3 * 128), (5 * mib, 12)]);
        let chunks: Vec<(u64, u64)> = needs.chunks(2).collect();
        assert_eq!(chunks, vec![(mib / 16, 5 * 128), (5 * mib, 25)]);
        assert!(needs.bytes(1) > needs.bytes(0));
    }
}
