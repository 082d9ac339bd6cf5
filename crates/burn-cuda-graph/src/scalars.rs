//! The scalars of a step on the device.
//!
//! A launch that is recorded has its scalars baked in, but reads the buffers it is given anew each time. So the scalars
//! that move lie in one small buffer, a slot each, at the alignment that the device asks of a binding. A replay refreshes
//! those of its graph by a launch that carries them, with the batch if one is copied, or by one write of the used part where
//! they are too many. Either is in order with the launches of the stream: a replay that is still running keeps its values.
//! Operations that are registered and not launched yet do not, so who writes from another place than the stream's queue sees
//! to it first that the queue is empty.
//!
//! The first slot holds the key and the step count of the random generator.

use crate::context::SlotSource;
use crate::copy::{MOST_WORDS, Words};
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

    /// What a launch carries to write the same bits as [`write_all`](Self::write_all) into all that is read of the slots;
    /// `None` for more than a launch is to carry.
    pub fn words(&self, random: [u32; 4], values: &[(DType, f64)]) -> Option<Words> {
        let count = carried(values.iter().map(|(dtype, _)| *dtype))?;
        let mut words = Vec::with_capacity(count);
        let mut places = Vec::with_capacity(count);
        words.extend(random);
        places.extend(0..random.len() as u32);
        for (index, (dtype, value)) in values.iter().enumerate() {
            let bytes = encoded(*dtype, *value).unwrap_or_default();
            let place = (self.offset(index) / WORD_BYTES as u64) as u32;
            let (own, _) = bytes.as_chunks::<WORD_BYTES>();
            for (place, bytes) in (place..).zip(&own[..words_of(*dtype)]) {
                words.push(u32::from_le_bytes(*bytes));
                places.push(place);
            }
        }
        Some(Words {
            client: self.client.clone(),
            buffer: self.handle.clone(),
            values: words,
            places,
        })
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

const WORD_BYTES: usize = size_of::<u32>();

/// Words that hold a number of type `dtype`: a half fills one with zeros.
fn words_of(dtype: DType) -> usize {
    dtype.size().div_ceil(WORD_BYTES)
}

/// Words that the random generator's four and slots of these types are; `None` for more than a launch is to carry.
pub(crate) fn carried(slots: impl Iterator<Item = DType>) -> Option<usize> {
    let words = 4 + slots.map(words_of).sum::<usize>();
    (words <= MOST_WORDS).then_some(words)
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

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;
    use crate::copy::{copy_all, copy_and_write, launches};
    use crate::pool::empty_like;
    use burn::tensor::{Bool, Int, TensorData};
    use burn_cubecl::tensor::CubeTensor;
    use cubecl::zspace::metadata::Metadata;

    const RANDOM: [u32; 4] = [0x8000_0001, 0, u32::MAX, 0x0102_0304];

    fn device() -> Device {
        Device::wgpu(Default::default())
    }

    fn buffer(tensor: AnyTensor) -> CubeTensor {
        resolve(&tensor).expect("is on the device")
    }

    fn floats(length: usize) -> CubeTensor {
        let values: Vec<f32> = (0..length).map(|value| value as f32 + 0.5).collect();
        let data = TensorData::new(values, [length]);
        buffer(AnyTensor::from_float(Tensor::<1>::from_data(
            data,
            &device(),
        )))
    }

    fn scalars(client: &Client) -> SlotWriter {
        let scalars = DeviceScalars::new(&device(), client).expect("has a buffer");
        lock(&scalars).writer().clone()
    }

    /// Bytes of the first `slots` slots and the random words.
    fn used(writer: &SlotWriter, slots: usize) -> Vec<u8> {
        let bytes = read(&writer.client, &writer.handle);
        bytes[..writer.offset(slots) as usize].to_vec()
    }

    fn read(client: &Client, handle: &Handle) -> Vec<u8> {
        client
            .read_one(handle.clone())
            .expect("can be read")
            .to_vec()
    }

    /// Pairs of sources and fresh destinations.
    fn pairs(sources: Vec<CubeTensor>) -> Vec<(CubeTensor, CubeTensor)> {
        let pair = |source: CubeTensor| (source.clone(), empty_like(&source));
        sources.into_iter().map(pair).collect()
    }

    fn assert_copied(pairs: &[(CubeTensor, CubeTensor)]) {
        for (index, (src, dst)) in pairs.iter().enumerate() {
            let bytes = [src, dst].map(|tensor| read(&tensor.client, &tensor.handle));
            assert_eq!(bytes[0], bytes[1], "pair {index}");
        }
    }

    /// Floats that fill vectors, floats and integers and bools that do not.
    fn batch() -> Vec<CubeTensor> {
        let ints = Tensor::<1, Int>::from_data([7, -3, i32::MAX], &device());
        let bools = Tensor::<1, Bool>::from_data([true, false, true, true, false], &device());
        vec![
            floats(1),
            floats(4096),
            buffer(AnyTensor::from_int(ints)),
            floats(12),
            buffer(AnyTensor::from_bool(bools)),
            floats(1023),
        ]
    }

    fn mixed(slots: usize, salt: f64) -> Vec<(DType, f64)> {
        let dtypes = [
            DType::F32,
            DType::F64,
            DType::F16,
            DType::BF16,
            DType::Flex32,
        ];
        (0..slots)
            .map(|slot| {
                let value = [0.1, -1e-3, f64::NAN, 1.0 / 3.0, -0.0, 65_504.0, 1e-40][slot % 7];
                (dtypes[slot % dtypes.len()], value * salt)
            })
            .collect()
    }

    /// Steps must see the same scalars whether a launch or a transfer brings them: a word at another place, of another half,
    /// or left as it was, trains wrongly in silence.
    #[test]
    fn a_launch_writes_the_bits_that_a_write_does() {
        let client = floats(1).client;
        for sources in [Vec::new(), batch()] {
            // The last are as many as a launch carries: six words for five slots.
            for slots in [0, 1, 2, 5, 20, 76] {
                let (launched, written) = (scalars(&client), scalars(&client));
                for salt in [1.0, -3.7] {
                    let values = mixed(slots, salt);
                    let random = RANDOM.map(|word| word.rotate_left(slots as u32));
                    let words = launched.words(random, &values).expect("are few");
                    let pairs = pairs(sources.clone());
                    assert_eq!(copy_and_write(&pairs, &words), 1, "{slots} slots");
                    written.write_all(random, &values);
                    let bits = used(&launched, slots);
                    assert_eq!(bits, used(&written, slots), "{slots} slots");
                    assert!(bits.iter().any(|byte| *byte != 0));
                    assert_copied(&pairs);
                }
            }
        }
    }

    /// A slot that held a wider number before is read as the number that it holds now.
    #[test]
    fn a_slot_of_another_type_than_before_holds_its_number() {
        let client = floats(1).client;
        let writer = scalars(&client);
        writer.write_all(RANDOM, &[(DType::F64, f64::MAX); 4]);
        let values = mixed(4, 1.0);
        let words = writer.words(RANDOM, &values).expect("are few");
        copy_and_write(&[], &words);
        let bytes = used(&writer, values.len());
        for (index, (dtype, value)) in values.into_iter().enumerate() {
            let offset = writer.offset(index) as usize;
            let expected = encoded(dtype, value).expect("is a scalar's type");
            let size = dtype.size();
            assert_eq!(bytes[offset..offset + size], expected[..size], "{dtype:?}");
        }
    }

    /// More slots than a launch's parameters take are left to the transfer: a launch that is refused by the driver would
    /// leave the step without its scalars.
    #[test]
    fn too_many_slots_are_no_launchs() {
        let writer = scalars(&floats(1).client);
        let of = |dtype, slots| writer.words(RANDOM, &vec![(dtype, 0.5); slots]).is_some();
        assert!(of(DType::F32, MOST_WORDS - 4));
        assert!(!of(DType::F32, MOST_WORDS - 3));
        assert!(of(DType::BF16, MOST_WORDS - 4));
        assert!(!of(DType::BF16, MOST_WORDS - 3));
        assert!(of(DType::F64, (MOST_WORDS - 4) / 2));
        assert!(!of(DType::F64, (MOST_WORDS - 4) / 2 + 1));
        let slots = vec![DType::F64; MOST_WORDS];
        assert_eq!(carried(slots.into_iter()), None);
    }

    /// Copies of more tensors than one launch takes are all made, the words are written once, and the launches are as many
    /// as the report says.
    #[test]
    fn many_tensors_take_as_many_launches_as_are_counted() {
        let client = floats(1).client;
        let writer = scalars(&client);
        let slots = MOST_WORDS - 4;
        let values = vec![(DType::F32, 0.25); slots];
        for count in [1, 2, 40, 300] {
            let sources: Vec<CubeTensor> = (0..count).map(|index| floats(1 + index % 9)).collect();
            let pairs = pairs(sources.clone());
            let words = writer.words(RANDOM, &values).expect("are few");
            let launched = copy_and_write(&pairs, &words);
            assert_eq!(launched, launches(&sources, MOST_WORDS), "{count} tensors");
            assert_copied(&pairs);
            let alone = pairs.iter().map(|(src, _)| src.clone()).collect();
            let pairs = self::pairs(alone);
            assert_eq!(copy_all(&pairs), launches(&sources, 0), "{count} tensors");
            assert_copied(&pairs);
        }
        let written = scalars(&client);
        written.write_all(RANDOM, &values);
        assert_eq!(used(&writer, slots), used(&written, slots));
    }

    /// Rows with holes between them, as CubeCL lays some tensors, are copied with the others, by one launch, and counted so;
    /// what follows the last row in the buffer is not touched.
    #[test]
    fn rows_with_holes_are_copied_with_the_others() {
        let client = floats(1).client;
        // The last elements are beyond the tensor's.
        let holed = |length: usize, shape: [usize; 2], stride: usize| {
            let mut tensor = floats(length);
            *tensor.meta = Metadata::new(shape, [stride, 1]);
            tensor
        };
        let zeros = |length: usize, like: &CubeTensor| {
            let zeros = Tensor::<1>::zeros([length], &device());
            let mut tensor = buffer(AnyTensor::from_float(zeros));
            tensor.meta = like.meta.clone();
            tensor
        };
        for (length, shape, stride) in [(24, [3, 5], 8), (17, [2, 7], 9), (9, [1, 4], 100)] {
            let src = holed(length, shape, stride);
            let dst = zeros(length, &src);
            let plain = floats(64);
            let pairs = [
                (src.clone(), dst.clone()),
                (plain.clone(), empty_like(&plain)),
            ];
            assert_eq!(copy_all(&pairs), 1, "{shape:?}");
            assert_eq!(launches(&[src.clone(), plain], 0), 1);
            assert_copied(&pairs[1..]);
            let floats = |tensor: &CubeTensor| {
                let bytes = read(&client, &tensor.handle);
                let (words, _) = bytes.as_chunks::<4>();
                words
                    .iter()
                    .map(|word| f32::from_le_bytes(*word))
                    .collect::<Vec<_>>()
            };
            let (from, to) = (floats(&src), floats(&dst));
            let [rows, columns] = shape;
            for row in 0..rows {
                let row = row * stride..row * stride + columns;
                assert_eq!(to[row.clone()], from[row], "{shape:?}");
            }
            let end = (rows - 1) * stride + columns;
            assert!(to[end..].iter().all(|value| *value == 0.0), "{to:?}");
        }
        // A buffer that is too short for the place of its last element is no such tensor.
        assert_eq!(launches(&[holed(20, [3, 5], 8)], 0), 1);
    }

    /// A batch that lies in memory otherwise than the static inputs takes launches of its own; the scalars still arrive.
    #[test]
    fn a_transposed_batch_brings_its_scalars() {
        let client = floats(1).client;
        let (launched, written) = (scalars(&client), scalars(&client));
        let mut transposed = floats(12);
        *transposed.meta = Metadata::new([4, 3], [1, 4]);
        let mut fixed = empty_like(&floats(12));
        *fixed.meta = Metadata::new([4, 3], [3, 1]);
        let pair = (transposed, fixed);
        let values = mixed(3, 1.0);
        let words = launched.words(RANDOM, &values).expect("are few");
        assert_eq!(copy_and_write(std::slice::from_ref(&pair), &words), 2);
        written.write_all(RANDOM, &values);
        assert_eq!(used(&launched, 3), used(&written, 3));
        let rows = (0..4).flat_map(|row| (0..3).map(move |column| (column * 4 + row) as f32 + 0.5));
        let expected: Vec<u8> = rows.flat_map(f32::to_le_bytes).collect();
        assert_eq!(read(&client, &pair.1.handle), expected);
    }
}
