//! Host data on its way to the device while a step runs.
//!
//! `Tensor::from_data` sends data on the stream of the thread that calls it. On the step's thread the device then copies the
//! batch between two replays, and CubeCL moves it into pinned memory on the thread that all launches go through. On another
//! thread both overlap the step, but Burn's fusion takes the tensors for that thread's: whatever clones or uses one waits for
//! the fusion server. CubeCL has work that uses foreign memory wait for all that its stream was given so far, the next
//! batch's copy too where both share one. And what is submitted alone may lie in CubeCL's queue until somebody waits for it.
//!
//! So data is moved into pinned memory on the calling thread, sent on streams of its own that take turns, and the queue is
//! flushed, which also shows whether the device had the memory. The tensors are registered by the thread that takes them.

use crate::tensor::{AnyTensor, TensorKind, TensorSpec};
use burn::backend::Dispatch;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use std::collections::VecDeque;
use std::error::Error;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

/// Streams that uploads take turns on, at most. One more than there are batches ahead is enough: the batch in use and each
/// that is on its way have their own.
const MOST_LANES: usize = 4;

/// Streams that single uploads take turns on.
const LANES: usize = 2;

/// Why data did not become a tensor.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UploadError {
    /// A graphed step takes no quantized tensors.
    #[error(
        "tensor {index} of the batch is quantized ({dtype:?}), which a graphed step does not take: dequantize it, or make it \
         with Tensor::from_data and run the step eagerly"
    )]
    Quantized {
        /// Its place in the batch.
        index: usize,
        /// Its dtype.
        dtype: DType,
    },
    /// Burn has no tensor of rank 0.
    #[error(
        "tensor {index} of the batch has no dimensions: Burn's tensors have one at least, so give it the shape [1]"
    )]
    NoDimensions {
        /// Its place in the batch.
        index: usize,
    },
    /// The dtype asked for is not one of the tensor's kind.
    #[error(
        "tensor {index} of the batch is to be a tensor of kind {kind} and of dtype {dtype:?}, which is none of that kind: \
         leave `with_dtype` out, or give it a dtype of the kind"
    )]
    WrongDtype {
        /// Its place in the batch.
        index: usize,
        /// Its kind.
        kind: TensorKind,
        /// The dtype asked for.
        dtype: DType,
    },
    /// The data could not be read, or not be converted.
    #[error("tensor {index} of the batch: {from:?} data does not become {to:?}: {detail}")]
    Data {
        /// Its place in the batch.
        index: usize,
        /// Dtype of the data.
        from: DType,
        /// Dtype that the tensor was to have.
        to: DType,
        /// Burn's words.
        detail: String,
    },
    /// The device did not take the batch, most likely for want of memory.
    #[error(
        "the device did not take the batch: {detail}; keep fewer batches ahead, or make them smaller"
    )]
    Device {
        /// Its words.
        detail: String,
    },
    /// The batch has no more tensors.
    #[error(
        "the batch has {found} tensors, and tensor {index} was asked for, of kind {kind} and rank {rank}: upload as many as \
         are taken"
    )]
    Missing {
        /// Place of the tensor that was asked for.
        index: usize,
        /// Tensors of the batch.
        found: usize,
        /// Kind asked for.
        kind: TensorKind,
        /// Rank asked for.
        rank: usize,
    },
    /// The next tensor of the batch is another one than was asked for.
    #[error(
        "tensor {index} of the batch is {found} of kind {} and rank {}, and one of kind {kind} and rank {rank} was asked \
         for: take tensors in the order in which they were uploaded, as what they are", .found.kind, .found.shape.len()
    )]
    Mismatch {
        /// Its place in the batch.
        index: usize,
        /// What it is.
        found: TensorSpec,
        /// Kind asked for.
        kind: TensorKind,
        /// Rank asked for.
        rank: usize,
    },
    /// The source of the batches failed.
    #[error("batch {batch} could not be made: {error}")]
    Source {
        /// Which one, counted from 0.
        batch: usize,
        /// Why.
        #[source]
        error: Box<dyn Error + Send + Sync>,
    },
    /// There is no thread to draw batches on.
    #[error("no thread to draw batches on: {detail}")]
    Thread {
        /// The system's words.
        detail: String,
    },
}

/// Data of one tensor, and what tensor it is to become.
///
/// It is converted as `Tensor::from_data` converts: ints given for a float tensor become floats, and so on. Without
/// [`with_dtype`](Self::with_dtype) the dtype is the device's default for the kind.
#[derive(Debug, Clone)]
pub struct HostTensor {
    data: TensorData,
    kind: TensorKind,
    dtype: Option<DType>,
}

impl HostTensor {
    /// To become a `Tensor<D>`.
    pub fn float(data: impl Into<TensorData>) -> Self {
        Self::of(data.into(), TensorKind::Float)
    }

    /// To become a `Tensor<D, Int>`.
    pub fn int(data: impl Into<TensorData>) -> Self {
        Self::of(data.into(), TensorKind::Int)
    }

    /// To become a `Tensor<D, Bool>`.
    pub fn bool(data: impl Into<TensorData>) -> Self {
        Self::of(data.into(), TensorKind::Bool)
    }

    /// With this dtype, which must be one of the kind. Bool tensors are stored as the device has them all the same.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    fn of(data: TensorData, kind: TensorKind) -> Self {
        Self {
            data,
            kind,
            dtype: None,
        }
    }

    /// In the dtype of its tensor, readable without the device.
    fn converted(
        self,
        index: usize,
        device: &Device,
    ) -> Result<(TensorData, TensorKind), UploadError> {
        let Self { data, kind, dtype } = self;
        let from = data.dtype();
        if matches!(from, DType::QFloat(_)) {
            return Err(UploadError::Quantized { index, dtype: from });
        }
        if data.rank() == 0 {
            return Err(UploadError::NoDimensions { index });
        }
        if let Some(dtype) = dtype.filter(|dtype| !kind.has(*dtype)) {
            return Err(UploadError::WrongDtype { index, kind, dtype });
        }
        let settings = burn_backend::get_or_init_device_settings::<Dispatch>(device.as_dispatch());
        let to = match (kind, dtype) {
            (TensorKind::Bool, _) => settings.bool_dtype.into(),
            (_, Some(dtype)) => dtype,
            (TensorKind::Float, None) => settings.float_dtype.into(),
            (TensorKind::Int, None) => settings.int_dtype.into(),
        };
        let failed = |detail: String| UploadError::Data {
            index,
            from,
            to,
            detail,
        };
        // What was read from a tensor may still be on its device: it is fetched here, by the calling thread.
        #[cfg(feature = "cubecl-backend")]
        if data.bytes().property() == burn::tensor::AllocationProperty::Device {
            let fetched = data.bytes().read(cubecl::bytes::Reader::new());
            fetched.map_err(|error| failed(error.to_string()))?;
        }
        let data = data
            .try_cast(to)
            .map_err(|error| failed(error.to_string()))?;
        Ok((data, kind))
    }
}

/// What a source of batches gives [`Uploader::prefetch`]: the tensors of one batch, or why there are none.
///
/// Implemented for `Vec<HostTensor>`, `[HostTensor; N]`, and for results of both whose error is any error that may be sent.
pub trait HostBatch {
    /// The tensors, in order.
    ///
    /// # Errors
    ///
    /// Whatever kept the source from making the batch. It becomes [`UploadError::Source`] and ends the batches.
    fn into_host(self) -> Result<Vec<HostTensor>, Box<dyn Error + Send + Sync>>;
}

impl HostBatch for Vec<HostTensor> {
    fn into_host(self) -> Result<Vec<HostTensor>, Box<dyn Error + Send + Sync>> {
        Ok(self)
    }
}

impl<const N: usize> HostBatch for [HostTensor; N] {
    fn into_host(self) -> Result<Vec<HostTensor>, Box<dyn Error + Send + Sync>> {
        Ok(self.into())
    }
}

impl<B: HostBatch, E: Into<Box<dyn Error + Send + Sync>>> HostBatch for Result<B, E> {
    fn into_host(self) -> Result<Vec<HostTensor>, Box<dyn Error + Send + Sync>> {
        self.map_err(Into::into)?.into_host()
    }
}

/// Sends host data to a device ahead of the step that uses it, from any thread.
///
/// The data is copied into pinned memory (CUDA) by the calling thread and sent on streams of its own, so that the copy runs
/// beside a replay. The tensors equal those of `Tensor::from_data`, values and layout, and belong to the thread that takes
/// them from [`Uploaded`]: take them on the step's thread. A replay still copies them into its static inputs, on the device.
///
/// On a device that is not CubeCL's (Flex) the data is converted by the calling thread, and nothing else is done ahead.
///
/// Clones take turns on the same streams. There are few of them in the whole process, so that uploads, not steps, wait for
/// each other.
///
/// ```no_run
#[doc = include_str!("../examples/feeding.rs")]
/// ```
#[derive(Debug, Clone)]
pub struct Uploader {
    device: Device,
    turn: Arc<AtomicUsize>,
}

impl Uploader {
    /// An uploader to `device`. On an autodiff device the tensors are on it as well, without gradients.
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            turn: Arc::default(),
        }
    }

    /// The device that tensors get to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Send the tensors of one batch. When this returns they are on their way, and the device has memory for them.
    ///
    /// It waits for what the device's threads were given before, not for the device. A batch that is uploaded takes its
    /// memory until it is dropped; nothing but the caller keeps the number of them down.
    ///
    /// # Errors
    ///
    /// [`UploadError`]: a tensor that Burn or a graphed step would not take, or [`UploadError::Device`]. Nothing is kept of
    /// the batch, and the call can be made again.
    pub fn upload(
        &self,
        batch: impl IntoIterator<Item = HostTensor>,
    ) -> Result<Uploaded, UploadError> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        self.upload_on(turn % LANES, batch)
    }

    fn upload_on(
        &self,
        lane: usize,
        batch: impl IntoIterator<Item = HostTensor>,
    ) -> Result<Uploaded, UploadError> {
        let converted = (batch.into_iter().enumerate())
            .map(|(index, tensor)| tensor.converted(index, &self.device))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Uploaded {
            tensors: places(&self.device, lane, converted)?,
            device: self.device.clone(),
            taken: 0,
        })
    }

    /// Draw batches on a thread of their own and upload them, `ahead` batches before they are asked for.
    ///
    /// Batches come in order, each once. `ahead` is one at least; two keep the device busy when one batch takes longer to make
    /// than others. At most `ahead` batches are uploaded beside the one that was handed out last, and one more is drawn. Memory
    /// of a batch that was handed out is free again when its tensors are dropped and the replays that read them ran.
    ///
    /// The thread ends with the source, at an error, and when what this returns is dropped: then as soon as the source has
    /// given the batch it is making.
    ///
    /// # Errors
    ///
    /// Of each batch: what [`upload`](Self::upload) gives, [`UploadError::Source`] where the source gave an error,
    /// [`UploadError::Thread`]. An error is the last item.
    ///
    /// # Panics
    ///
    /// Where the source panicked, with its panic, in the place of the batch that is missing.
    pub fn prefetch<I>(&self, batches: I, ahead: usize) -> Prefetch
    where
        I: IntoIterator + Send + 'static,
        I::Item: HostBatch,
    {
        let ahead = ahead.max(1);
        let (sender, uploaded) = mpsc::channel();
        let (permits, permitted) = mpsc::channel();
        for _ in 0..ahead {
            permit(&permits);
        }
        let uploader = self.clone();
        let lanes = ahead.saturating_add(1).clamp(LANES, MOST_LANES);
        let thread = std::thread::Builder::new().name("graph-upload".into());
        let worker = thread.spawn(move || {
            // The source may read from the device while a step is recorded.
            crate::driver::tolerate_captures();
            draw(&uploader, batches, lanes, &permitted, &sender);
        });
        let (worker, failed) = match worker {
            Ok(worker) => (Some(worker), None),
            Err(error) => {
                let detail = error.to_string();
                (None, Some(UploadError::Thread { detail }))
            }
        };
        Prefetch {
            uploaded,
            permits,
            worker,
            failed,
        }
    }
}

/// One more batch may be uploaded. Where nobody is left to do it, nobody waits for it.
fn permit(permits: &Sender<()>) {
    permits.send(()).unwrap_or_default();
}

/// The work of a thread that uploads ahead.
fn draw<I>(
    uploader: &Uploader,
    batches: I,
    lanes: usize,
    permitted: &Receiver<()>,
    sender: &Sender<Result<Uploaded, UploadError>>,
) where
    I: IntoIterator,
    I::Item: HostBatch,
{
    for (batch, drawn) in batches.into_iter().enumerate() {
        let uploaded = match drawn.into_host() {
            Err(error) => Err(UploadError::Source { batch, error }),
            Ok(_) if permitted.recv().is_err() => return,
            Ok(tensors) => uploader.upload_on(batch % lanes, tensors),
        };
        let failed = uploaded.is_err();
        if sender.send(uploaded).is_err() || failed {
            return;
        }
    }
}

/// Batches that are uploaded ahead, from [`Uploader::prefetch`].
#[derive(Debug)]
pub struct Prefetch {
    uploaded: Receiver<Result<Uploaded, UploadError>>,
    permits: Sender<()>,
    worker: Option<JoinHandle<()>>,
    failed: Option<UploadError>,
}

impl Iterator for Prefetch {
    type Item = Result<Uploaded, UploadError>;

    /// Waits for the batch to be made and sent, not for the device.
    fn next(&mut self) -> Option<Self::Item> {
        if let Some(error) = self.failed.take() {
            return Some(Err(error));
        }
        match self.uploaded.recv() {
            Ok(batch) => {
                permit(&self.permits);
                Some(batch)
            }
            // The thread is at its end: whether it came there by itself, it says when it is waited for.
            Err(_) => match self.worker.take()?.join() {
                Ok(()) => None,
                Err(panic) => resume_unwind(panic),
            },
        }
    }
}

impl std::iter::FusedIterator for Prefetch {}

/// A batch that was uploaded. It may be sent to another thread; its tensors belong to the one that takes them.
///
/// Take them on the step's thread, outside the step's closure: there they are inputs that the step does not know of.
#[derive(Debug)]
pub struct Uploaded {
    device: Device,
    tensors: VecDeque<(TensorSpec, Place)>,
    taken: usize,
}

/// Where a tensor's values are.
#[derive(Debug)]
enum Place {
    Host(TensorData),
    #[cfg(feature = "cubecl-backend")]
    Buffer(Box<burn_cubecl::tensor::CubeTensor>),
}

impl Uploaded {
    /// The next tensor, a float one of rank `D`. It waits for nothing.
    ///
    /// # Errors
    ///
    /// [`UploadError::Missing`], [`UploadError::Mismatch`]; the tensor stays the next one.
    pub fn float<const D: usize>(&mut self) -> Result<Tensor<D>, UploadError> {
        Ok(self.take(TensorKind::Float, D)?.into_float())
    }

    /// The next tensor, an int one of rank `D`. It waits for nothing.
    ///
    /// # Errors
    ///
    /// As [`float`](Self::float).
    pub fn int<const D: usize>(&mut self) -> Result<Tensor<D, Int>, UploadError> {
        Ok(self.take(TensorKind::Int, D)?.into_int())
    }

    /// The next tensor, a bool one of rank `D`. It waits for nothing.
    ///
    /// # Errors
    ///
    /// As [`float`](Self::float).
    pub fn bool<const D: usize>(&mut self) -> Result<Tensor<D, Bool>, UploadError> {
        Ok(self.take(TensorKind::Bool, D)?.into_bool())
    }

    /// The tensors that were not taken yet, in order.
    pub fn into_tensors(self) -> Vec<AnyTensor> {
        let Self {
            device, tensors, ..
        } = self;
        (tensors.into_iter())
            .map(|(spec, place)| place.into_tensor(spec.kind, &device))
            .collect()
    }

    /// Shape, dtype and kind of each tensor that was not taken yet, in order.
    pub fn specs(&self) -> impl Iterator<Item = &TensorSpec> {
        self.tensors.iter().map(|(spec, _)| spec)
    }

    fn take(&mut self, kind: TensorKind, rank: usize) -> Result<AnyTensor, UploadError> {
        let index = self.taken;
        match self.tensors.pop_front() {
            None => Err(UploadError::Missing {
                index,
                found: index,
                kind,
                rank,
            }),
            Some((spec, place)) if spec.kind == kind && spec.shape.len() == rank => {
                self.taken += 1;
                Ok(place.into_tensor(kind, &self.device))
            }
            Some((found, place)) => {
                self.tensors.push_front((found.clone(), place));
                Err(UploadError::Mismatch {
                    index,
                    found,
                    kind,
                    rank,
                })
            }
        }
    }
}

impl Place {
    fn into_tensor(self, kind: TensorKind, device: &Device) -> AnyTensor {
        match self {
            Self::Host(data) => from_data(data, kind, device),
            #[cfg(feature = "cubecl-backend")]
            Self::Buffer(buffer) => crate::pool::register(*buffer, kind).lifted_onto(device),
        }
    }
}

/// `Tensor::from_data` of any rank, for data in the tensor's dtype.
fn from_data(data: TensorData, kind: TensorKind, device: &Device) -> AnyTensor {
    let device = device.as_dispatch();
    match kind {
        TensorKind::Float => AnyTensor::from_float(Tensor::<1>::from_dispatch(
            Dispatch::float_from_data(data, device),
        )),
        TensorKind::Int => AnyTensor::from_int(Tensor::<1, Int>::from_dispatch(
            Dispatch::int_from_data(data, device),
        )),
        TensorKind::Bool => AnyTensor::from_bool(Tensor::<1, Bool>::from_dispatch(
            Dispatch::bool_from_data(data, device),
        )),
    }
}

type Placed = VecDeque<(TensorSpec, Place)>;

/// Send `tensors` to the device on one of the streams for uploads; where it is not one of CubeCL's, keep them.
fn places(
    device: &Device,
    lane: usize,
    tensors: Vec<(TensorData, TensorKind)>,
) -> Result<Placed, UploadError> {
    let spec = |(data, kind): &(TensorData, TensorKind)| TensorSpec {
        shape: data.shape().iter().copied().collect(),
        dtype: data.dtype(),
        kind: *kind,
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(spec).collect();
    let data = tensors.into_iter().map(|(data, _)| data);
    #[cfg(feature = "cubecl-backend")]
    if let Some(device) = crate::pool::cube_device(device) {
        let buffers = lanes::send(&device, lane, data)?;
        let places = (buffers.into_iter()).map(|buffer| Place::Buffer(Box::new(buffer)));
        return Ok(specs.into_iter().zip(places).collect());
    }
    let _ = (device, lane);
    Ok(specs.into_iter().zip(data.map(Place::Host)).collect())
}

/// The streams that uploads take turns on, and what is sent there.
#[cfg(feature = "cubecl-backend")]
mod lanes {
    use super::{MOST_LANES, UploadError};
    use crate::neighbours;
    use burn::tensor::TensorData;
    use burn_cubecl::CubeDevice;
    use burn_cubecl::tensor::CubeTensor;
    use burn_fusion::stream::StreamId;
    use cubecl::zspace::metadata::Metadata;
    use std::sync::OnceLock;

    /// Send each tensor as `Tensor::from_data` would, but staged by this thread and without anything left in a queue.
    pub(super) fn send(
        device: &CubeDevice,
        lane: usize,
        data: impl Iterator<Item = TensorData>,
    ) -> Result<Vec<CubeTensor>, UploadError> {
        let lane = lane_of(lane);
        // Where there are more threads than streams a step may have the same one: it is then not recorded meanwhile.
        neighbours::hear(lane);
        lane.executes(|| {
            let client = device.client();
            let mut parts: Vec<_> = data.map(TensorData::into_parts).collect();
            let filled = parts.iter_mut().map(|(bytes, ..)| bytes);
            client.staging(filled.filter(|bytes| !bytes.is_empty()), false);
            let tensors: Vec<CubeTensor> = (parts.into_iter())
                .map(|(bytes, shape, dtype)| {
                    let layout = client.create_tensor(bytes, shape.clone(), dtype.size());
                    let metadata = Metadata::new(shape, layout.strides);
                    CubeTensor::new(
                        client.clone(),
                        layout.memory,
                        metadata,
                        device.clone(),
                        dtype,
                    )
                })
                .collect();
            let filled = tensors
                .iter()
                .filter(|tensor| tensor.meta.shape().num_elements() > 0);
            let checked = client.check(filled.map(|tensor| &tensor.handle));
            checked.map_err(|error| UploadError::Device {
                detail: crate::pool::causes(&error.to_string()),
            })?;
            Ok(tensors)
        })
    }

    fn lane_of(lane: usize) -> StreamId {
        static LANES: OnceLock<[StreamId; MOST_LANES]> = OnceLock::new();
        let lanes = LANES.get_or_init(|| {
            choose(
                StreamId::current(),
                neighbours::streams(),
                StreamId::allocate,
            )
        });
        lanes[lane % MOST_LANES]
    }

    /// Streams that share none of the device's with each other or with `own`, as long as there are as many.
    fn choose(
        own: StreamId,
        streams: u64,
        mut allocate: impl FnMut() -> StreamId,
    ) -> [StreamId; MOST_LANES] {
        let mut taken = vec![own.value % streams.max(1)];
        core::array::from_fn(|_| {
            let mut lane = allocate();
            for _ in 0..=MOST_LANES {
                if !taken.contains(&(lane.value % streams.max(1))) {
                    break;
                }
                lane = allocate();
            }
            taken.push(lane.value % streams.max(1));
            lane
        })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        /// An upload on the step's own stream would land in its recording.
        #[test]
        fn lanes_are_apart_from_each_other_and_from_the_caller() {
            let stream = |value| StreamId { value };
            let values = |own, streams, mut next: u64| {
                let lanes = choose(stream(own), streams, || {
                    next += 1;
                    stream(next - 1)
                });
                lanes.map(|lane| lane.value)
            };
            assert_eq!(values(0, 128, 1), [1, 2, 3, 4]);
            assert_eq!(values(3, 128, 130), [130, 132, 133, 134]);
            assert_eq!(values(0, 5, 3), [3, 4, 6, 7]);
            // With too few streams they are shared, and it ends.
            assert_eq!(values(0, 1, 1).len(), MOST_LANES);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<T: core::fmt::Debug>(result: Result<T, UploadError>) -> String {
        result.expect_err("is refused").to_string()
    }

    /// A batch is made on one thread and used on another.
    #[test]
    fn what_is_uploaded_may_cross_threads() {
        fn sent<T: Send>() {}
        fn shared<T: Send + Sync>() {}
        sent::<Uploaded>();
        sent::<Prefetch>();
        shared::<Uploader>();
        shared::<UploadError>();
    }

    #[cfg(feature = "flex")]
    mod plain {
        use super::*;
        use burn::tensor::quantization::{QuantScheme, QuantValue};

        fn uploader() -> Uploader {
            Uploader::new(&Device::flex())
        }

        /// Without graphs the same code trains.
        #[test]
        fn tensors_are_those_of_from_data() {
            let device = Device::flex();
            let floats = TensorData::from([[1.0f64, 2.5], [3.0, 4.0]]);
            let ints = TensorData::from([1u8, 2, 3]);
            let flags = TensorData::from([true, false]);
            let batch = [
                HostTensor::float(floats.clone()),
                HostTensor::int(ints.clone()),
                HostTensor::bool(flags.clone()),
                HostTensor::float(ints.clone()).with_dtype(DType::F64),
            ];
            let mut batch = uploader().upload(batch).expect("uploads");
            assert_eq!(batch.specs().count(), 4);
            let same = |ours: TensorData, theirs: TensorData| {
                assert_eq!(
                    (ours.dtype(), ours.as_bytes()),
                    (theirs.dtype(), theirs.as_bytes())
                );
            };
            same(
                batch.float::<2>().expect("is next").into_data(),
                Tensor::<2>::from_data(floats, &device).into_data(),
            );
            same(
                batch.int::<1>().expect("is next").into_data(),
                Tensor::<1, Int>::from_data(ints.clone(), &device).into_data(),
            );
            same(
                batch.bool::<1>().expect("is next").into_data(),
                Tensor::<1, Bool>::from_data(flags, &device).into_data(),
            );
            same(
                batch.float::<1>().expect("is next").into_data(),
                Tensor::<1>::from_data(ints, (&device, DType::F64)).into_data(),
            );
        }

        /// A batch that is taken apart otherwise than it was put together is named by place, kind and rank, and not lost.
        #[test]
        fn a_tensor_taken_for_another_is_named_and_stays() {
            let given = [HostTensor::float([[1.0f32, 2.0]]), HostTensor::int([3i64])];
            let mut batch = uploader().upload(given).expect("uploads");
            let error = words(batch.float::<1>());
            assert!(
                error.contains("tensor 0 of the batch is f32[1, 2]"),
                "{error}"
            );
            assert!(error.contains("kind float and rank 2, and one of kind float and rank 1"));
            assert!(batch.float::<2>().is_ok());
            assert!(words(batch.bool::<1>()).contains("one of kind bool and rank 1"));
            assert!(batch.int::<1>().is_ok());
            let error = words(batch.int::<1>());
            assert!(error.contains("has 2 tensors, and tensor 2"), "{error}");
            assert!(batch.into_tensors().is_empty());
        }

        /// What cannot be a tensor of the batch is said by the upload, not found in the step.
        #[test]
        fn data_that_is_no_tensor_is_refused_by_name() {
            let upload = |tensor: HostTensor| words(uploader().upload([tensor]));
            let scheme = QuantScheme::default().with_value(QuantValue::Q8S);
            let quantized = TensorData::quantized(vec![1i8, 2], [2], scheme, &[0.5], None);
            let error = upload(HostTensor::float(quantized));
            assert!(
                error.contains("quantized") && error.contains("dequantize"),
                "{error}"
            );
            let none = TensorData::new(vec![1.0f32], Vec::<usize>::new());
            assert!(upload(HostTensor::float(none)).contains("shape [1]"));
            let error = upload(HostTensor::int([1i64]).with_dtype(DType::F32));
            assert!(error.contains("kind int and of dtype F32"), "{error}");
        }

        /// A source that gives an error in place of a batch ends the epoch loudly.
        #[test]
        fn an_error_of_the_source_is_the_last_item() {
            let source = (0..5).map(|index| match index {
                2 => Err("the file ends early"),
                _ => Ok([HostTensor::int([index])]),
            });
            let items: Vec<_> = uploader().prefetch(source, 1).collect();
            assert_eq!(items.len(), 3);
            let error = words(items.into_iter().nth(2).expect("is there"));
            assert_eq!(error, "batch 2 could not be made: the file ends early");
        }
    }
}
