//! The scalars of a step on the device.
//!
//! A launch that is recorded has its scalars baked in, but reads the buffers it is given anew each time. So the scalars
//! that move lie in one small buffer, a slot each, at the alignment that the device asks of a binding. One write of its
//! used part refreshes all of them, in order with the launches of the stream: a replay that is still running keeps its
//! values. Operations that are registered and not launched yet do not, so who writes from another place than the stream's
//! queue sees to it first that the queue is empty.
//!
//! The first slot holds the key and the step count of the random generator.

use crate::context::SlotSource;
use crate::pool::{PoolOps, SLOT_BYTES, resolve};
use crate::tensor::AnyTensor;
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Tensor, bf16, f16};
use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::server::Handle;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// Slots there is room for.
const CAPACITY: usize = 512;

/// Writes the buffer of a step's scalars. It holds nothing that belongs to Burn's fusion, whose own thread uses it too.
#[derive(Clone)]
pub(crate) struct SlotWriter {
    client: Client,
    handle: Handle,
    stride: u64,
}

impl core::fmt::Debug for SlotWriter {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SlotWriter").finish_non_exhaustive()
    }
}

impl SlotWriter {
    fn offset(&self, index: usize) -> u64 {
        (index as u64 + 1) * self.stride
    }

    fn write_one(&self, index: usize, dtype: DType, value: f64) {
        let Some(bytes) = encoded(dtype, value) else {
            return;
        };
        let offset = self.offset(index);
        let end = self.handle.size_in_used() - offset - SLOT_BYTES;
        let handle = self.handle.clone().offset_start(offset).offset_end(end);
        self.client
            .write(&handle, Bytes::from_bytes_vec(bytes.to_vec()));
    }

    /// Write the random words and the first slots, as one write. It comes before whatever is launched from now on, which
    /// may be an operation that was registered before.
    pub fn write_all(&self, random: [u32; 4], values: &[(DType, f64)]) {
        let used = self.offset(values.len());
        let mut bytes = vec![0u8; used as usize];
        for (word, place) in random.iter().zip(bytes.chunks_exact_mut(4)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        for (index, (dtype, value)) in values.iter().enumerate() {
            if let Some(encoded) = encoded(*dtype, *value) {
                let offset = self.offset(index) as usize;
                bytes[offset..offset + encoded.len()].copy_from_slice(&encoded);
            }
        }
        let handle = self
            .handle
            .clone()
            .offset_end(self.handle.size_in_used() - used);
        self.client.write(&handle, Bytes::from_bytes_vec(bytes));
    }
}

/// The buffer of a step's scalars, shared by its graphs: each is refreshed before its own replay.
pub(crate) struct DeviceScalars {
    /// Keeps the buffer.
    buffer: Tensor<1>,
    writer: SlotWriter,
    slots: HashMap<(usize, DType), Tensor<1>>,
}

impl core::fmt::Debug for DeviceScalars {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("DeviceScalars")
            .field("slots", &self.slots.len())
            .finish_non_exhaustive()
    }
}

impl DeviceScalars {
    /// An empty buffer on `device`.
    pub fn new(device: &Device, client: &Client) -> Option<Arc<Mutex<Self>>> {
        let stride = client.properties().memory.alignment.max(SLOT_BYTES);
        let words = (stride as usize * (CAPACITY + 1)) / size_of::<f32>();
        let buffer = Tensor::<1>::zeros([words], (&device.clone().inner(), DType::F32));
        let resolved = resolve(&AnyTensor::from_float(buffer.clone()))?;
        Some(Arc::new(Mutex::new(Self {
            writer: SlotWriter {
                client: client.clone(),
                handle: resolved.handle.clone(),
                stride,
            },
            buffer,
            slots: HashMap::new(),
        })))
    }

    /// What writes it.
    pub fn writer(&self) -> &SlotWriter {
        &self.writer
    }

    /// The buffer of the random generator's four words.
    pub fn random(&self) -> Handle {
        let handle = &self.writer.handle;
        let end = handle.size_in_used() - SLOT_BYTES;
        handle.clone().offset_end(end)
    }

    fn tensor(&mut self, index: usize, dtype: DType) -> Option<Tensor<1>> {
        if index >= CAPACITY || encoded(dtype, 0.0).is_none() {
            return None;
        }
        let offset = self.writer.offset(index);
        let buffer = &self.buffer;
        let slot = self.slots.entry((index, dtype)).or_insert_with(|| {
            let buffer = buffer.clone().into_dispatch();
            Tensor::from_dispatch(<Dispatch as PoolOps>::graph_slot(buffer, offset, dtype))
        });
        Some(slot.clone())
    }
}

/// The bytes of `value` in `dtype`, rounded as a launch's scalar is; `None` for a type that no scalar has.
fn encoded(dtype: DType, value: f64) -> Option<[u8; SLOT_BYTES as usize]> {
    let mut bytes = [0u8; SLOT_BYTES as usize];
    match dtype {
        DType::F64 => bytes[..8].copy_from_slice(&value.to_le_bytes()),
        DType::F32 | DType::Flex32 => bytes[..4].copy_from_slice(&(value as f32).to_le_bytes()),
        DType::F16 => bytes[..2].copy_from_slice(&f16::from_f64(value).to_le_bytes()),
        DType::BF16 => bytes[..2].copy_from_slice(&bf16::from_f64(value).to_le_bytes()),
        _ => return None,
    }
    Some(bytes)
}

/// The slots as the optimizers of a step reach them.
pub(crate) struct SharedScalars(pub Arc<Mutex<DeviceScalars>>);

impl SharedScalars {
    fn lock(&self) -> MutexGuard<'_, DeviceScalars> {
        lock(&self.0)
    }
}

/// The scalars, whether or not an earlier holder panicked: every write is whole.
pub(crate) fn lock(scalars: &Mutex<DeviceScalars>) -> MutexGuard<'_, DeviceScalars> {
    scalars
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl SlotSource for SharedScalars {
    fn tensor(&mut self, index: usize, dtype: DType) -> Option<Tensor<1>> {
        self.lock().tensor(index, dtype)
    }
    fn write(&mut self, index: usize, dtype: DType, value: f64) {
        self.lock().writer.write_one(index, dtype, value);
    }
}
