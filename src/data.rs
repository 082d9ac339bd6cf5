//! Image data sets in host memory, split, shuffled and cut into batches.
//!
//! A graph is recorded for the shapes of one batch, so what matters here is that batches come in known shapes and in an
//! order that can be repeated: the split depends on the seed alone, the order of an epoch on the seed and the epoch.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use burn::prelude::*;
use flate2::read::GzDecoder;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use thiserror::Error;

/// Height and width of the images that [`digits`] and [`cifar10`] give, in pixels.
pub const SIDE: usize = 32;
const PIXELS: usize = SIDE * SIDE;

/// Images `[n, channels, side, side]`, float32, and their labels `[n]`, int, on one device.
pub type Batch = (Tensor<4>, Tensor<1, Int>);

/// Images and labels in host memory, with a train and a validation part.
///
/// Images are float32 `[n, channels, side, side]`, `side` 32 but for [`small_digits`], each channel normalised to mean 0 and deviation 1 over the training part
/// (CIFAR-10: by the published statistics).
#[derive(Clone, Debug)]
pub struct Dataset {
    name: &'static str,
    images: Vec<f32>,
    labels: Vec<u8>,
    side: usize,
    channels: usize,
    classes: usize,
    train: Vec<usize>,
    validation: Vec<usize>,
    seed: u64,
}

impl Dataset {
    /// What the data set is called.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Channels of each image.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// How many classes there are; labels count from 0.
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// How many images the training part has.
    pub fn train_len(&self) -> usize {
        self.train.len()
    }

    /// How many images the validation part has.
    pub fn validation_len(&self) -> usize {
        self.validation.len()
    }

    /// Pixels `[channels * side * side]` and label of each image of the training part, in the order of the split.
    pub fn train_samples(&self) -> impl Iterator<Item = (&[f32], u8)> {
        self.samples(&self.train)
    }

    /// Pixels `[channels * side * side]` and label of each image of the validation part, in the order of the split.
    pub fn validation_samples(&self) -> impl Iterator<Item = (&[f32], u8)> {
        self.samples(&self.validation)
    }

    fn samples<'a>(&'a self, part: &'a [usize]) -> impl Iterator<Item = (&'a [f32], u8)> {
        let size = self.channels * self.side * self.side;
        let at = move |index: &usize| {
            let start = index * size;
            (&self.images[start..start + size], self.labels[*index])
        };
        part.iter().map(at)
    }

    /// The training part in batches, in an order that depends on the seed and on `epoch` alone.
    ///
    /// The last batch is smaller where `batch_size` does not divide the part; `drop_last` leaves it out. Each batch is
    /// copied to `device` when it is taken; on an autodiff device its tensors are untracked.
    ///
    /// # Panics
    /// If `batch_size` is 0.
    pub fn train_batches(
        &self,
        epoch: usize,
        batch_size: usize,
        drop_last: bool,
        device: &Device,
    ) -> Batches<'_> {
        let mut order = self.train.clone();
        shuffle(&mut order, self.seed, 1 + epoch as u64);
        Batches::new(self, order, batch_size, drop_last, device)
    }

    /// The validation part in batches, always in the same order; no image is left out.
    ///
    /// # Panics
    /// If `batch_size` is 0.
    pub fn validation_batches(&self, batch_size: usize, device: &Device) -> Batches<'_> {
        Batches::new(self, self.validation.clone(), batch_size, false, device)
    }

    fn batch(&self, indices: &[usize], device: &Device) -> Batch {
        let image_len = self.channels * self.side * self.side;
        let mut images = Vec::with_capacity(indices.len() * image_len);
        let mut labels = Vec::with_capacity(indices.len());
        for &index in indices {
            images.extend_from_slice(&self.images[index * image_len..][..image_len]);
            labels.push(i32::from(self.labels[index]));
        }
        let n = indices.len();
        (
            Tensor::from_data(
                TensorData::new(images, [n, self.channels, self.side, self.side]),
                device,
            ),
            Tensor::from_data(TensorData::new(labels, [n]), device),
        )
    }
}

/// The batches of one pass; made by [`Dataset::train_batches`] and [`Dataset::validation_batches`].
#[derive(Debug)]
pub struct Batches<'a> {
    data: &'a Dataset,
    order: Vec<usize>,
    taken: usize,
    batch_size: usize,
    device: Device,
}

impl<'a> Batches<'a> {
    fn new(
        data: &'a Dataset,
        mut order: Vec<usize>,
        batch_size: usize,
        drop_last: bool,
        device: &Device,
    ) -> Self {
        assert!(batch_size > 0, "a batch holds at least one image");
        if drop_last {
            order.truncate(order.len() / batch_size * batch_size);
        }
        Self {
            data,
            order,
            taken: 0,
            batch_size,
            device: device.clone(),
        }
    }
}

impl Iterator for Batches<'_> {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        let rest = &self.order[self.taken..];
        let indices = &rest[..rest.len().min(self.batch_size)];
        if indices.is_empty() {
            return None;
        }
        self.taken += indices.len();
        Some(self.data.batch(indices, &self.device))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let batches = (self.order.len() - self.taken).div_ceil(self.batch_size);
        (batches, Some(batches))
    }
}

impl ExactSizeIterator for Batches<'_> {}

/// Why a data set could not be loaded. Nothing is left half-loaded; the call can be repeated once the cause is mended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file does not have the length that its format prescribes.
    #[error(
        "{} has {found} bytes where {expected} are expected; it is cut short or another file: unpack the archive again",
        path.display()
    )]
    WrongSize {
        /// The file.
        path: PathBuf,
        /// Bytes that the format prescribes.
        expected: usize,
        /// Bytes that it has.
        found: usize,
    },
    /// A record carries a label outside the classes.
    #[error(
        "{}: record {record} has the label {label} where 0 to 9 are expected; the file is damaged or not CIFAR-10: \
         unpack the archive again, and take the binary version of CIFAR-10",
        path.display()
    )]
    WrongLabel {
        /// The file.
        path: PathBuf,
        /// The record, counted from 0.
        record: usize,
        /// The label found.
        label: u8,
    },
    /// The given folder does not hold CIFAR-10.
    #[error(
        "{} holds neither data_batch_1.bin nor the folder cifar-10-batches-bin; download the binary version of CIFAR-10 \
         from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it and pass its folder",
        dir.display()
    )]
    NoCifar {
        /// The folder that was given.
        dir: PathBuf,
    },
    /// No folder was given, and this build cannot download.
    #[error(
        "CIFAR-10 needs a folder: pass --data-dir with the unpacked binary version, or build with --features download"
    )]
    NoFolder,
    /// Burn's downloader failed, or what it left in its cache is damaged.
    #[error(
        "CIFAR-10 could not be downloaded: {reason}; check the network, delete the folder burn-dataset in the user's \
         cache folder if an earlier download was interrupted, or pass --data-dir"
    )]
    Download {
        /// The downloader's own words.
        reason: String,
    },
    /// The embedded digits are not what this crate shipped.
    #[error("examples/data/digits.csv.gz: {reason}; restore the file and build again")]
    Digits {
        /// What is wrong, and where.
        reason: String,
    },
}

/// 1,797 handwritten digits of the UCI Machine Learning Repository, one channel, ten classes, scaled from 8x8 to 32x32
/// pixels; the data is part of the program.
///
/// A fifth of the images, chosen by `seed`, is the validation part. `examples/data/README.md` names the source and its
/// licence (CC BY 4.0).
///
/// # Errors
/// [`DataError::Digits`] if the file was changed before the build.
pub fn digits(seed: u64) -> Result<Dataset, DataError> {
    parse_digits(DIGITS, SIDE, seed)
}

/// The same digits as [`digits`] in the same order, in the 8x8 pixels that they have.
///
/// # Errors
/// As [`digits`].
pub fn small_digits(seed: u64) -> Result<Dataset, DataError> {
    parse_digits(DIGITS, SMALL, seed)
}

const DIGITS: &[u8] = include_bytes!("../examples/data/digits.csv.gz");
const SMALL: usize = 8;

fn parse_digits(gzipped: &[u8], side: usize, seed: u64) -> Result<Dataset, DataError> {
    let image_len = side * side;
    let broken = |reason: String| DataError::Digits { reason };

    let mut text = String::new();
    GzDecoder::new(gzipped)
        .read_to_string(&mut text)
        .map_err(|source| broken(source.to_string()))?;
    let mut images = Vec::new();
    let mut labels = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line_number = index + 1;
        let values = line
            .split(',')
            .map(str::parse::<u8>)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|source| broken(format!("line {line_number}: {source}")))?;
        match values.split_last() {
            Some((&label, pixels)) if pixels.len() == SMALL * SMALL && label < 10 => {
                images.extend(upscale(pixels, SMALL, side));
                labels.push(label);
            }
            _ => {
                return Err(broken(format!(
                    "line {line_number} is not {} pixels and a label from 0 to 9",
                    SMALL * SMALL
                )));
            }
        }
    }

    let mut train: Vec<usize> = (0..labels.len()).collect();
    shuffle(&mut train, seed, 0);
    let validation = train.split_off(labels.len() - labels.len() / 5);

    let pixels = (train.len() * image_len) as f64;
    let in_train = || {
        train
            .iter()
            .flat_map(|&index| &images[index * image_len..][..image_len])
    };
    let mean = in_train().map(|&p| f64::from(p)).sum::<f64>() / pixels;
    let variance = in_train()
        .map(|&p| (f64::from(p) - mean).powi(2))
        .sum::<f64>()
        / pixels;
    let (mean, deviation) = (mean as f32, variance.sqrt() as f32);
    for pixel in &mut images {
        *pixel = (*pixel - mean) / deviation;
    }
    Ok(Dataset {
        name: "digits",
        images,
        labels,
        side,
        channels: 1,
        classes: 10,
        train,
        validation,
        seed,
    })
}

/// A square image of `from` x `from` pixels, scaled bilinearly to `to` x `to`.
///
/// Pixel centres are aligned (the corners keep their values) as in Burn's and PyTorch's `align_corners = false`.
fn upscale(pixels: &[u8], from: usize, to: usize) -> Vec<f32> {
    // For each target coordinate: the two neighbours in the source and the weight of the second one.
    let taps: Vec<(usize, usize, f32)> = (0..to)
        .map(|target| {
            let source = (target as f32 + 0.5) * from as f32 / to as f32 - 0.5;
            let source = source.clamp(0.0, (from - 1) as f32);
            let low = source as usize;
            (low, (low + 1).min(from - 1), source - low as f32)
        })
        .collect();
    let mut scaled = Vec::with_capacity(to * to);
    for &(top, bottom, down) in &taps {
        for &(left, right, across) in &taps {
            let row = |y: usize| {
                let at = |x: usize| f32::from(pixels[y * from + x]);
                at(left) * (1.0 - across) + at(right) * across
            };
            scaled.push(row(top) * (1.0 - down) + row(bottom) * down);
        }
    }
    scaled
}

/// CIFAR-10: 50,000 training and 10,000 validation images, three channels, ten classes.
///
/// `dir` is the folder of the unpacked *binary version* (`data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`),
/// or the folder around its `cifar-10-batches-bin`. Without `dir`, Burn's downloader fetches the images into the user's
/// cache folder if the crate was built with the feature `download`. `seed` decides the order of the epochs only. Takes
/// about 740 MB of host memory.
///
/// # Errors
/// Any [`DataError`] but [`DataError::Digits`]; each names the file or folder and the remedy.
pub fn cifar10(dir: Option<&Path>, seed: u64) -> Result<Dataset, DataError> {
    match dir {
        Some(dir) => read_cifar10(dir, RECORDS_PER_FILE, seed),
        #[cfg(feature = "download")]
        None => download_cifar10(seed),
        #[cfg(not(feature = "download"))]
        None => Err(DataError::NoFolder),
    }
}

const CIFAR_CHANNELS: usize = 3;
const CIFAR_CLASSES: usize = 10;
const RECORDS_PER_FILE: usize = 10_000;
const TRAIN_FILES: [&str; 5] = [
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
];
const VALIDATION_FILE: &str = "test_batch.bin";

/// Mean and deviation of the training images, red, green and blue, for pixels from 0 to 1.
const CIFAR_STATISTICS: [(f32, f32); CIFAR_CHANNELS] =
    [(0.4914, 0.2470), (0.4822, 0.2435), (0.4465, 0.2616)];

fn read_cifar10(dir: &Path, records_per_file: usize, seed: u64) -> Result<Dataset, DataError> {
    let dir = [dir.to_path_buf(), dir.join("cifar-10-batches-bin")]
        .into_iter()
        .find(|candidate| candidate.join(TRAIN_FILES[0]).is_file())
        .ok_or_else(|| DataError::NoCifar {
            dir: dir.to_path_buf(),
        })?;
    let mut data = empty_cifar10((TRAIN_FILES.len() + 1) * records_per_file, seed);
    for file in TRAIN_FILES {
        read_cifar_file(&dir.join(file), records_per_file, &mut data)?;
    }
    let train_len = data.labels.len();
    read_cifar_file(&dir.join(VALIDATION_FILE), records_per_file, &mut data)?;
    data.train = (0..train_len).collect();
    data.validation = (train_len..data.labels.len()).collect();
    Ok(data)
}

/// A record is one label byte, then the red, the green and the blue pixels, each row by row.
fn read_cifar_file(path: &Path, records: usize, data: &mut Dataset) -> Result<(), DataError> {
    const RECORD: usize = 1 + CIFAR_CHANNELS * PIXELS;
    let bytes = fs::read(path).map_err(|source| DataError::Read {
        path: path.to_path_buf(),
        source,
    })?;
    if bytes.len() != records * RECORD {
        return Err(DataError::WrongSize {
            path: path.to_path_buf(),
            expected: records * RECORD,
            found: bytes.len(),
        });
    }
    for (record, bytes) in bytes.chunks_exact(RECORD).enumerate() {
        let (label, pixels) = (bytes[0], &bytes[1..]);
        if usize::from(label) >= CIFAR_CLASSES {
            return Err(DataError::WrongLabel {
                path: path.to_path_buf(),
                record,
                label,
            });
        }
        push_cifar_image(data, label, |channel, pixel| {
            pixels[channel * PIXELS + pixel]
        });
    }
    Ok(())
}

fn empty_cifar10(capacity: usize, seed: u64) -> Dataset {
    Dataset {
        name: "CIFAR-10",
        images: Vec::with_capacity(capacity * CIFAR_CHANNELS * PIXELS),
        labels: Vec::with_capacity(capacity),
        side: SIDE,
        channels: CIFAR_CHANNELS,
        classes: CIFAR_CLASSES,
        train: Vec::new(),
        validation: Vec::new(),
        seed,
    }
}

fn push_cifar_image(data: &mut Dataset, label: u8, byte: impl Fn(usize, usize) -> u8) {
    for (channel, (mean, deviation)) in CIFAR_STATISTICS.into_iter().enumerate() {
        data.images.extend(
            (0..PIXELS).map(|pixel| (f32::from(byte(channel, pixel)) / 255.0 - mean) / deviation),
        );
    }
    data.labels.push(label);
}

#[cfg(feature = "download")]
fn download_cifar10(seed: u64) -> Result<Dataset, DataError> {
    use burn_dataset::Dataset as _;
    use burn_dataset::vision::{Annotation, CifarDataset, CifarType, PixelData};

    let failed = |reason: String| DataError::Download { reason };
    let (train, validation) = crate::panics::catch(|| {
        let source = CifarDataset::new(CifarType::Cifar10);
        (source.train(), source.test())
    })
    .map_err(failed)?;

    let mut data = empty_cifar10(train.len() + validation.len(), seed);
    for item in train.iter().chain(validation.iter()) {
        let item = item.map_err(|source| failed(source.to_string()))?;
        match (&item.image, &item.annotation) {
            // Unlike the binary version, the three colours of a pixel are neighbours here.
            (PixelData::U8(pixels), &Annotation::Label(label))
                if pixels.len() == CIFAR_CHANNELS * PIXELS && label < CIFAR_CLASSES =>
            {
                push_cifar_image(&mut data, label as u8, |channel, pixel| {
                    pixels[pixel * CIFAR_CHANNELS + channel]
                });
            }
            _ => {
                return Err(failed(format!(
                    "{} is not a labelled 32x32 image with 8-bit colours",
                    item.image_path
                )));
            }
        }
    }
    data.train = (0..train.len()).collect();
    data.validation = (train.len()..data.labels.len()).collect();
    Ok(data)
}

/// Shuffles by `seed` and `stream`; equal numbers in other places (seed 1 of epoch 0, seed 0 of epoch 1) differ.
fn shuffle(indices: &mut [usize], seed: u64, stream: u64) {
    let base = StdRng::seed_from_u64(seed).next_u64();
    indices.shuffle(&mut StdRng::seed_from_u64(base.wrapping_add(stream)));
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    /// A folder of its own for each test, removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!(
                "burn-cuda-graph-suite-{}-{name}",
                std::process::id()
            ));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Records with red = 0, green = 255 and blue = 51, labelled 0, 1, 2 and so on.
    fn records(n: usize) -> Vec<u8> {
        (0..n)
            .flat_map(|label| {
                let colours = [0, 255, 51].map(|colour| vec![colour; PIXELS]).concat();
                [vec![label as u8], colours].concat()
            })
            .collect()
    }

    fn write_cifar(dir: &Path) {
        fs::create_dir_all(dir).unwrap();
        for file in TRAIN_FILES.iter().chain([&VALIDATION_FILE]) {
            fs::write(dir.join(file), records(2)).unwrap();
        }
    }

    #[test]
    fn cifar_is_read_from_the_folder_and_from_the_one_around_it() {
        let folder = Folder::new("good");
        let inner = folder.0.join("cifar-10-batches-bin");
        write_cifar(&inner);
        for dir in [&folder.0, &inner] {
            let data = read_cifar10(dir, 2, 0).unwrap();
            assert_eq!((data.train_len(), data.validation_len()), (10, 2));
            assert_eq!((data.channels(), data.classes()), (3, 10));
            assert_eq!(data.labels[..4], [0, 1, 0, 1]);
            let expected = [
                (0.0 - 0.4914) / 0.2470,
                (1.0 - 0.4822) / 0.2435,
                (0.2 - 0.4465) / 0.2616,
            ];
            for (channel, expected) in expected.into_iter().enumerate() {
                for pixel in [0, PIXELS - 1] {
                    let found: f32 = data.images[channel * PIXELS + pixel];
                    assert!(
                        (found - expected).abs() < 1e-6,
                        "channel {channel}: {found}"
                    );
                }
            }
        }
    }

    #[test]
    fn a_truncated_cifar_file_is_named_with_both_sizes() {
        let folder = Folder::new("truncated");
        write_cifar(&folder.0);
        let path = folder.0.join("data_batch_3.bin");
        fs::write(&path, &records(2)[..6_000]).unwrap();
        let error = read_cifar10(&folder.0, 2, 0).unwrap_err().to_string();
        for part in ["data_batch_3.bin", "6000", "6146", "unpack"] {
            assert!(error.contains(part), "{part} is missing in: {error}");
        }
    }

    #[test]
    fn a_wrong_cifar_label_is_named_with_its_record() {
        let folder = Folder::new("label");
        write_cifar(&folder.0);
        let mut bytes = records(2);
        bytes[3073] = 10;
        fs::write(folder.0.join(VALIDATION_FILE), bytes).unwrap();
        let error = read_cifar10(&folder.0, 2, 0).unwrap_err().to_string();
        for part in ["test_batch.bin", "record 1", "label 10"] {
            assert!(error.contains(part), "{part} is missing in: {error}");
        }
    }

    #[test]
    fn a_missing_cifar_file_and_a_wrong_folder_are_different_errors() {
        let folder = Folder::new("missing");
        assert!(matches!(
            cifar10(Some(&folder.0), 0),
            Err(DataError::NoCifar { .. })
        ));
        write_cifar(&folder.0);
        fs::remove_file(folder.0.join("data_batch_5.bin")).unwrap();
        let error = read_cifar10(&folder.0, 2, 0).unwrap_err();
        assert!(
            matches!(&error, DataError::Read { path, .. } if path.ends_with("data_batch_5.bin")),
            "{error}"
        );
    }

    #[cfg(not(feature = "download"))]
    #[test]
    fn without_a_folder_and_without_the_feature_the_error_says_what_to_do() {
        let error = cifar10(None, 0).unwrap_err().to_string();
        assert!(error.contains("--data-dir") && error.contains("--features download"));
    }

    #[test]
    fn digits_are_complete_and_normalised() {
        let data = digits(0).unwrap();
        assert_eq!((data.train_len(), data.validation_len()), (1_438, 359));
        assert_eq!(data.images.len(), 1_797 * PIXELS);
        let mut all = [data.train.clone(), data.validation.clone()].concat();
        all.sort_unstable();
        assert_eq!(all, (0..1_797).collect::<Vec<_>>());
        let train: Vec<f64> = data
            .train
            .iter()
            .flat_map(|&index| &data.images[index * PIXELS..][..PIXELS])
            .map(|&pixel| f64::from(pixel))
            .collect();
        let mean = train.iter().sum::<f64>() / train.len() as f64;
        let square = train.iter().map(|p| p * p).sum::<f64>() / train.len() as f64;
        assert!(
            mean.abs() < 1e-3 && (square - 1.0).abs() < 1e-3,
            "{mean} {square}"
        );
    }

    /// The two forms are one data set: what is learnt from one is validated on the same split of the other.
    #[test]
    fn small_digits_are_the_same_digits_unscaled() {
        let (large, small) = (digits(1).unwrap(), small_digits(1).unwrap());
        assert_eq!((&large.labels, &large.train), (&small.labels, &small.train));
        assert_eq!(small.images.len(), 1_797 * SMALL * SMALL);
        let mut values: Vec<f32> = small.images.clone();
        values.sort_by(f32::total_cmp);
        values.dedup();
        assert_eq!(values.len(), 17, "pixels are 0 to 16, normalised");
    }

    #[test]
    fn damaged_digits_are_reported_with_their_line() {
        let gzip = |text: &str| {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(text.as_bytes()).unwrap();
            encoder.finish().unwrap()
        };
        let good = format!("{}3", "16,".repeat(64));
        assert!(parse_digits(&gzip(&format!("{good}\n{good}\n")), SIDE, 0).is_ok());
        for bad in ["16,3", &format!("{}10", "16,".repeat(64)), "x"] {
            let error = parse_digits(&gzip(&format!("{good}\n{bad}\n")), SIDE, 0).unwrap_err();
            assert!(error.to_string().contains("line 2"), "{error}");
        }
        assert!(parse_digits(b"not gzip", SIDE, 0).is_err());
    }

    #[test]
    fn upscaling_keeps_corners_and_blends_between_neighbours() {
        let scaled = upscale(&[0, 8, 16, 4], 2, 8);
        assert_eq!(
            [scaled[0], scaled[7], scaled[56], scaled[63]],
            [0.0, 8.0, 16.0, 4.0]
        );
        // The third of eight targets lies at (2 + 0.5) / 4 - 0.5 = 0.125 between the two sources.
        assert_eq!(scaled[2], 1.0);
        assert_eq!(upscale(&[5; 64], 8, 32), vec![5.0; PIXELS]);
    }

    #[test]
    fn split_and_order_depend_on_seed_and_epoch_alone() {
        let order = |seed: u64, epoch: u64| {
            let data = digits(seed).unwrap();
            let mut order = data.train.clone();
            shuffle(&mut order, data.seed, 1 + epoch);
            order
        };
        assert_eq!(order(3, 1), order(3, 1));
        assert_ne!(order(3, 1), order(3, 2));
        assert_ne!(order(3, 1), order(2, 2));
        assert_ne!(digits(3).unwrap().validation, digits(4).unwrap().validation);
    }

    #[cfg(feature = "flex")]
    #[test]
    fn the_last_batch_is_smaller_or_left_out() {
        let device = Device::flex();
        let data = digits(0).unwrap();
        let sizes = |drop_last| {
            let batches = data.train_batches(0, 400, drop_last, &device);
            let announced = batches.len();
            let sizes: Vec<usize> = batches
                .map(|(images, labels)| {
                    assert_eq!(images.dims(), [labels.dims()[0], 1, SIDE, SIDE]);
                    labels.dims()[0]
                })
                .collect();
            assert_eq!(sizes.len(), announced);
            sizes
        };
        assert_eq!(sizes(false), [400, 400, 400, 238]);
        assert_eq!(sizes(true), [400, 400, 400]);
        let validated: usize = data
            .validation_batches(100, &device)
            .map(|(_, labels)| labels.dims()[0])
            .sum();
        assert_eq!(validated, data.validation_len());
    }

    #[cfg(feature = "flex")]
    #[test]
    fn a_batch_holds_the_images_of_its_labels() {
        let data = digits(0).unwrap();
        let indices = [data.train[5], data.validation[1]];
        let (images, labels) = data.batch(&indices, &Device::flex());
        let images = images.try_into_vec_as::<f32>().unwrap();
        let labels = labels.try_into_vec_as::<i32>().unwrap();
        for (place, index) in indices.into_iter().enumerate() {
            assert_eq!(labels[place], i32::from(data.labels[index]));
            assert_eq!(
                images[place * PIXELS..][..PIXELS],
                data.images[index * PIXELS..][..PIXELS]
            );
        }
    }
}
