//! Padding batches to a few shapes, so that a handful of graphs serves every length.
//!
//! The padded batch is the batch: its shape key is made of it, and an eager step gets it as well, so that a step is the same
//! function of it whether or not it is replayed.

use crate::tensor::{AnyTensor, TensorKind, TensorSpec};
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Axes that a padded tensor may have.
const MAX_RANK: usize = 8;

/// Sizes that a length is padded up to, ascending.
///
/// ```
/// use burn_cuda_graph::Buckets;
///
/// # fn main() -> Result<(), burn_cuda_graph::BucketingError> {
/// let buckets = Buckets::powers_of_two(16, 128)?;
/// assert_eq!(buckets.sizes(), [16, 32, 64, 128]);
/// assert_eq!(buckets.bucket_of(33), Some(64));
/// assert_eq!(buckets.bucket_of(129), None);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "SavedBuckets")]
pub struct Buckets {
    sizes: Vec<usize>,
}

/// Buckets as they are read back, by hand written ones among them.
#[derive(Deserialize)]
struct SavedBuckets {
    sizes: Vec<usize>,
}

impl TryFrom<SavedBuckets> for Buckets {
    type Error = BucketingError;

    fn try_from(saved: SavedBuckets) -> Result<Self, Self::Error> {
        Self::list(saved.sizes)
    }
}

impl Buckets {
    /// `min`, and each power of two above it, up to `max`, which is the last one.
    ///
    /// # Errors
    ///
    /// [`BucketingError::Sizes`] when `min` is 0 or more than `max`.
    pub fn powers_of_two(min: usize, max: usize) -> Result<Self, BucketingError> {
        let mut sizes = vec![min];
        let mut next = min
            .checked_add(1)
            .and_then(usize::checked_next_power_of_two);
        while let Some(size) = next.filter(|size| *size < max) {
            sizes.push(size);
            next = size.checked_mul(2);
        }
        if min < max {
            sizes.push(max);
        }
        Self::checked(sizes, min <= max)
    }

    /// The multiples of `step` below `max`, and `max`.
    ///
    /// # Errors
    ///
    /// [`BucketingError::Sizes`] when `step` is 0 or more than `max`.
    pub fn multiples_of(step: usize, max: usize) -> Result<Self, BucketingError> {
        let mut sizes: Vec<usize> = (step..max).step_by(step.max(1)).collect();
        sizes.push(max);
        Self::checked(sizes, step > 0 && step <= max)
    }

    /// These sizes, in any order.
    ///
    /// # Errors
    ///
    /// [`BucketingError::Sizes`] when there is none, or one is 0.
    pub fn list(sizes: impl IntoIterator<Item = usize>) -> Result<Self, BucketingError> {
        let mut sizes: Vec<usize> = sizes.into_iter().collect();
        sizes.sort_unstable();
        sizes.dedup();
        Self::checked(sizes, true)
    }

    fn checked(sizes: Vec<usize>, valid: bool) -> Result<Self, BucketingError> {
        match valid && sizes.first().is_some_and(|first| *first > 0) {
            true => Ok(Self { sizes }),
            false => Err(BucketingError::Sizes { sizes }),
        }
    }

    /// The sizes, ascending.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }

    /// The smallest size that holds `length`; `None` above the largest.
    pub fn bucket_of(&self, length: usize) -> Option<usize> {
        let index = self.sizes.partition_point(|size| *size < length);
        self.sizes.get(index).copied()
    }
}

/// What padding is filled with.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Fill {
    /// For a float tensor.
    Float(f64),
    /// For an int tensor, or a float one.
    Int(i64),
    /// For a bool tensor.
    Bool(bool),
}

impl From<f64> for Fill {
    fn from(value: f64) -> Self {
        Fill::Float(value)
    }
}

impl From<i64> for Fill {
    fn from(value: i64) -> Self {
        Fill::Int(value)
    }
}

impl From<bool> for Fill {
    fn from(value: bool) -> Self {
        Fill::Bool(value)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Axis {
    tensor: usize,
    axis: usize,
    fill: Option<Fill>,
}

/// Which axes of a batch's tensors are padded up to the next bucket.
///
/// Tensors are named by their place in the batch's [`TensorTree`](crate::TensorTree): for a tuple or a derived struct the
/// order of its fields. All axes named in one `Bucketing` have the same length in a batch and go to the same bucket. Where
/// two lengths vary (rows and positions), give [`GraphConfig::with_bucketing`](crate::GraphConfig::with_bucketing) one for
/// each.
///
/// A float or an int is padded with 0, a bool with `true`, which is Burn's convention for a padding mask: a mask that is part
/// of the batch marks its own padding. The step has to leave padding out of what it computes; [`masked_mean`] is the usual
/// means.
///
/// A batch whose length is above the largest bucket keeps it: nothing is ever cut off. It has a shape key of its own, and is
/// counted in [`Report::above_buckets`](crate::Report::above_buckets).
///
/// ```
/// use burn_cuda_graph::{Bucketing, Buckets, GraphConfig};
///
/// # fn main() -> Result<(), burn_cuda_graph::BucketingError> {
/// // A batch of (tokens [rows, positions], targets [rows, positions], mask [rows, positions]).
/// let lengths = Bucketing::new(Buckets::powers_of_two(16, 512)?)
///     .pad(0, 1)
///     .pad_with(1, 1, 0i64)
///     .pad(2, 1);
/// let config = GraphConfig::new().with_bucketing(lengths);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bucketing {
    buckets: Buckets,
    /// The first axis of every tensor.
    rows: bool,
    axes: Vec<Axis>,
}

impl Bucketing {
    /// No axis yet; [`pad`](Self::pad) names them.
    pub fn new(buckets: Buckets) -> Self {
        Self {
            buckets,
            rows: false,
            axes: Vec::new(),
        }
    }

    /// The first axis of every tensor: batches of any number of rows up to the largest bucket run as few graphs. With one
    /// bucket they run as one.
    ///
    /// [`pad_with`](Self::pad_with) with an axis of 0 changes what a tensor is filled with. The batch carries a bool tensor
    /// `[rows]` of `false`, which is filled with `true`, for the step to tell rows from padding.
    pub fn rows(buckets: Buckets) -> Self {
        Self {
            rows: true,
            ..Self::new(buckets)
        }
    }

    /// Pad axis `axis` of tensor `tensor`: with 0, or `true` for a bool.
    pub fn pad(self, tensor: usize, axis: usize) -> Self {
        self.with(tensor, axis, None)
    }

    /// Pad axis `axis` of tensor `tensor` with `fill`.
    pub fn pad_with(self, tensor: usize, axis: usize, fill: impl Into<Fill>) -> Self {
        self.with(tensor, axis, Some(fill.into()))
    }

    fn with(mut self, tensor: usize, axis: usize, fill: Option<Fill>) -> Self {
        let new = Axis { tensor, axis, fill };
        let same = |old: &&mut Axis| (old.tensor, old.axis) == (tensor, axis);
        match self.axes.iter_mut().find(same) {
            Some(old) => *old = new,
            None => self.axes.push(new),
        }
        self
    }

    /// The buckets.
    pub fn buckets(&self) -> &Buckets {
        &self.buckets
    }

    /// The axes to pad in a batch of so many tensors.
    fn axes_of(&self, tensors: usize) -> Result<Cow<'_, [Axis]>, BucketingError> {
        if !self.rows {
            return Ok(Cow::Borrowed(&self.axes));
        }
        if let Some(other) = self.axes.iter().find(|axis| axis.axis != 0) {
            return Err(BucketingError::RowsAxis {
                tensor: other.tensor,
                axis: other.axis,
            });
        }
        if let Some(beyond) = self.axes.iter().find(|axis| axis.tensor >= tensors) {
            return Err(BucketingError::NoTensor {
                tensor: beyond.tensor,
                tensors,
            });
        }
        let named = |tensor: usize| self.axes.iter().find(|axis| axis.tensor == tensor);
        let axis = |tensor| Axis {
            tensor,
            axis: 0,
            fill: named(tensor).and_then(|axis| axis.fill),
        };
        Ok((0..tensors).map(axis).collect())
    }

    /// What is to be done to a batch of these tensors, whose specs become those of the padded ones.
    fn plan(&self, specs: &mut [TensorSpec], plan: &mut Plan) -> Result<(), BucketingError> {
        let tensors = specs.len();
        let axes = self.axes_of(tensors)?;
        let mut length: Option<(usize, usize)> = None;
        for Axis { tensor, axis, fill } in axes.iter() {
            let spec = (specs.get(*tensor)).ok_or(BucketingError::NoTensor {
                tensor: *tensor,
                tensors,
            })?;
            let own = *spec.shape.get(*axis).ok_or(BucketingError::NoAxis {
                tensor: *tensor,
                axis: *axis,
                rank: spec.shape.len(),
            })?;
            if spec.shape.len() > MAX_RANK {
                return Err(BucketingError::Rank {
                    tensor: *tensor,
                    rank: spec.shape.len(),
                });
            }
            filling(*tensor, spec, *fill)?;
            if !plan.named.contains(tensor) {
                plan.named.push(*tensor);
            }
            match length {
                Some((first, length)) if length != own => {
                    return Err(BucketingError::Lengths {
                        first,
                        length,
                        second: *tensor,
                        other: own,
                    });
                }
                _ => length = length.or(Some((*tensor, own))),
            }
        }
        let Some((_, length)) = length else {
            return Ok(());
        };
        // An empty batch is somebody else's to refuse.
        let size = match self.buckets.bucket_of(length) {
            _ if length == 0 => return Ok(()),
            Some(size) => size,
            None => {
                let largest = self.buckets.sizes.last().copied().unwrap_or(0);
                plan.above.get_or_insert((length, largest));
                return Ok(());
            }
        };
        for Axis { tensor, axis, fill } in axes.iter() {
            let Some(spec) = specs.get_mut(*tensor) else {
                continue;
            };
            let fill = filling(*tensor, spec, *fill)?;
            spec.shape[*axis] = size;
            if size > length {
                plan.pads.push(Pad {
                    tensor: *tensor,
                    axis: *axis,
                    by: size - length,
                    fill,
                });
            }
        }
        Ok(())
    }
}

/// What a tensor of this spec is filled with.
fn filling(tensor: usize, spec: &TensorSpec, fill: Option<Fill>) -> Result<Fill, BucketingError> {
    let (kind, dtype) = (spec.kind, spec.dtype);
    if matches!(dtype, DType::QFloat(_)) {
        return Err(BucketingError::Quantized { tensor });
    }
    let fill = match (kind, fill) {
        (TensorKind::Float, None) => Fill::Float(0.0),
        (TensorKind::Int, None) => Fill::Int(0),
        (TensorKind::Bool, None) => Fill::Bool(true),
        (TensorKind::Float, Some(Fill::Int(value))) => Fill::Float(value as f64),
        (TensorKind::Float, Some(fill @ Fill::Float(_)))
        | (TensorKind::Int, Some(fill @ Fill::Int(_)))
        | (TensorKind::Bool, Some(fill @ Fill::Bool(_))) => fill,
        (kind, Some(fill)) => return Err(BucketingError::Kind { tensor, kind, fill }),
    };
    match holds(dtype, fill) {
        true => Ok(fill),
        false => Err(BucketingError::Value {
            tensor,
            dtype,
            fill,
        }),
    }
}

/// Whether a number of type `dtype` can be `fill`, rounding aside.
fn holds(dtype: DType, fill: Fill) -> bool {
    match fill {
        Fill::Float(value) => {
            let largest = dtype.finfo().map_or(f64::MAX, |info| info.max);
            !value.is_finite() || value.abs() <= largest
        }
        Fill::Int(value) => match dtype {
            DType::I32 => i32::try_from(value).is_ok(),
            DType::I16 => i16::try_from(value).is_ok(),
            DType::I8 => i8::try_from(value).is_ok(),
            DType::U64 => u64::try_from(value).is_ok(),
            DType::U32 => u32::try_from(value).is_ok(),
            DType::U16 => u16::try_from(value).is_ok(),
            DType::U8 => u8::try_from(value).is_ok(),
            _ => true,
        },
        Fill::Bool(_) => true,
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Pad {
    tensor: usize,
    axis: usize,
    by: usize,
    fill: Fill,
}

/// What is to be done to one batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Plan {
    pads: Vec<Pad>,
    /// Tensors that bucketing names.
    named: Vec<usize>,
    /// A length above the largest bucket, and that bucket.
    pub above: Option<(usize, usize)>,
    /// Elements of the tensors that bucketing names, and how many of them are padding.
    pub elements: u64,
    pub padding: u64,
}

impl Plan {
    /// What `bucketing` does to a batch of these tensors, whose specs become those of the padded ones.
    ///
    /// # Errors
    ///
    /// A [`BucketingError`] when it does not fit the batch.
    pub fn new(bucketing: &[Bucketing], specs: &mut [TensorSpec]) -> Result<Self, BucketingError> {
        let mut plan = Self::default();
        let before: Vec<usize> = specs.iter().map(TensorSpec::num_elements).collect();
        for bucketing in bucketing {
            bucketing.plan(specs, &mut plan)?;
        }
        for tensor in &plan.named {
            let elements = specs[*tensor].num_elements();
            plan.elements += elements as u64;
            plan.padding += elements.saturating_sub(before[*tensor]) as u64;
        }
        Ok(plan)
    }

    /// Whether something is padded.
    pub fn pads(&self) -> bool {
        !self.pads.is_empty()
    }

    /// Pad `tensors`.
    pub fn apply(&self, tensors: &mut [AnyTensor]) {
        for pad in &self.pads {
            if let Some(tensor) = tensors.get_mut(pad.tensor) {
                *tensor = padded(tensor, pad);
            }
        }
    }
}

/// What padding came to over the calls of a function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Padding {
    pub calls: u64,
    pub above: u64,
    /// Whether the log has that a length was above the buckets.
    pub warned: bool,
    pub elements: u64,
    pub padding: u64,
}

impl Padding {
    pub fn count(&mut self, plan: &Plan) {
        self.calls += u64::from(plan.pads());
        self.above += u64::from(plan.above.is_some());
        self.elements += plan.elements;
        self.padding += plan.padding;
    }

    /// The share of padding in the tensors that bucketing names.
    pub fn share(&self) -> Option<f64> {
        (self.elements > 0).then(|| self.padding as f64 / self.elements as f64)
    }
}

/// `tensor` with `pad` behind it, off the tape and with its autodiff association.
fn padded(tensor: &AnyTensor, pad: &Pad) -> AnyTensor {
    let inner = tensor.clone().inner();
    let mut spec = inner.spec();
    let rank = spec.shape.len();
    spec.shape[pad.axis] = pad.by;
    let device = inner.device();
    macro_rules! ranks {
        ($($rank:literal),*) => {
            match rank {
                $($rank => at_rank::<$rank>(inner, &spec, pad, &device),)*
                // Refused by the plan.
                _ => inner,
            }
        };
    }
    let result = ranks!(1, 2, 3, 4, 5, 6, 7, 8);
    AnyTensor::lifted_like(result, tensor)
}

fn at_rank<const D: usize>(
    inner: AnyTensor,
    spec: &TensorSpec,
    pad: &Pad,
    device: &Device,
) -> AnyTensor {
    let shape: [usize; D] = core::array::from_fn(|axis| spec.shape[axis]);
    let options: (&Device, DType) = (device, spec.dtype);
    let axis = pad.axis;
    match pad.fill {
        Fill::Float(fill) => {
            let tail = Tensor::<D>::full(shape, fill, options);
            AnyTensor::from_float(Tensor::cat(vec![inner.into_float::<D>(), tail], axis))
        }
        Fill::Int(fill) => {
            let tail = Tensor::<D, Int>::full(shape, fill, options);
            AnyTensor::from_int(Tensor::cat(vec![inner.into_int::<D>(), tail], axis))
        }
        Fill::Bool(fill) => {
            let tail = Tensor::<D, Bool>::full(shape, fill, options);
            AnyTensor::from_bool(Tensor::cat(vec![inner.into_bool::<D>(), tail], axis))
        }
    }
}

/// A batch that its bucketing does not fit, or sizes that are none.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BucketingError {
    /// Sizes of buckets that are none.
    #[error(
        "buckets of {sizes:?}: give at least one size, from 1 up, the least before the largest"
    )]
    Sizes {
        /// The sizes.
        sizes: Vec<usize>,
    },
    /// The batch has no such tensor.
    #[error(
        "bucketing names tensor {tensor}, and the batch has {tensors}: count the tensors in the order of the batch's fields, \
         from 0"
    )]
    NoTensor {
        /// The tensor named.
        tensor: usize,
        /// Tensors of the batch.
        tensors: usize,
    },
    /// The tensor has no such axis.
    #[error(
        "bucketing names axis {axis} of tensor {tensor}, which has rank {rank}: count its axes from 0"
    )]
    NoAxis {
        /// The tensor.
        tensor: usize,
        /// The axis named.
        axis: usize,
        /// The tensor's rank.
        rank: usize,
    },
    /// Axes of one bucketing differ in length.
    #[error(
        "bucketing pads axes of one length, and that of tensor {first} is {length} long, that of tensor {second} {other}: \
         give each length a Bucketing of its own"
    )]
    Lengths {
        /// The first tensor.
        first: usize,
        /// Its length.
        length: usize,
        /// The other one.
        second: usize,
        /// Its length.
        other: usize,
    },
    /// A tensor of more axes than padding is made for.
    #[error(
        "bucketing names tensor {tensor}, of rank {rank}: ranks up to 8 are padded; reshape it"
    )]
    Rank {
        /// The tensor.
        tensor: usize,
        /// Its rank.
        rank: usize,
    },
    /// A value of another kind than the tensor's.
    #[error(
        "bucketing fills tensor {tensor}, of kind {kind:?}, with {fill:?}: give a value of its kind"
    )]
    Kind {
        /// The tensor.
        tensor: usize,
        /// Its kind.
        kind: TensorKind,
        /// The value.
        fill: Fill,
    },
    /// A value that the tensor's type cannot hold.
    #[error(
        "bucketing fills tensor {tensor}, of dtype {dtype:?}, with {fill:?}, which it cannot hold: give another value"
    )]
    Value {
        /// The tensor.
        tensor: usize,
        /// Its dtype.
        dtype: DType,
        /// The value.
        fill: Fill,
    },
    /// A quantized tensor.
    #[error(
        "bucketing names tensor {tensor}, which is quantized, and quantized tensors are not padded: dequantize it, or do not \
         name it (`Bucketing::rows` names all)"
    )]
    Quantized {
        /// The tensor.
        tensor: usize,
    },
    /// Another axis named where rows are padded.
    #[error(
        "Bucketing::rows pads axis 0 of every tensor, and names axis {axis} of tensor {tensor}: give other axes a Bucketing of \
         their own"
    )]
    RowsAxis {
        /// The tensor.
        tensor: usize,
        /// The axis named.
        axis: usize,
    },
}

/// The padding mask of sequences of these lengths, as Burn's attention takes it: `true` at padding.
///
/// Made on the device, of a tensor that is an input of the step: a replay follows it.
///
/// # Shapes
///
/// - lengths: `[batch]`
/// - output: `[batch, size]`
///
/// ```
/// # use burn::tensor::{Device, Tensor, Int};
/// use burn_cuda_graph::padding_mask;
///
/// # let device = Device::flex();
/// let lengths = Tensor::<1, Int>::from_data([1, 3], &device);
/// let mask = padding_mask(lengths, 3);
/// assert_eq!(mask.into_data().iter::<bool>().collect::<Vec<_>>(), [false, true, true, false, false, false]);
/// ```
pub fn padding_mask(lengths: Tensor<1, Int>, size: usize) -> Tensor<2, Bool> {
    let [batch] = lengths.dims();
    let options: (&Device, DType) = (&lengths.device(), lengths.dtype());
    // Positions from 1 up. `arange` would take them from the host, which a recording freezes.
    let ends = Tensor::<2, Int>::ones([1, size], options).cumsum(1);
    let lengths = lengths.reshape([batch, 1]).expand([batch, size]);
    ends.expand([batch, size]).greater(lengths)
}

/// The mean of the values where `mask` is `false`; 0 where there is none.
///
/// What stands at a masked position, a NaN included, does not reach the mean, and the gradient of `values` is exactly 0 there.
/// Operations before it may still make a NaN of 0 and an infinity: keep padded inputs finite.
///
/// # Shapes
///
/// - values, mask: the same, of any rank
/// - output: `[1]`
///
/// ```
/// # use burn::tensor::{Bool, Device, Tensor};
/// use burn_cuda_graph::masked_mean;
///
/// # let device = Device::flex();
/// let values = Tensor::<1>::from_data([1.0, 3.0, f32::NAN], &device);
/// let mask = Tensor::<1, Bool>::from_data([false, false, true], &device);
/// assert_eq!(masked_mean(values, mask).into_scalar::<f32>(), 2.0);
/// ```
pub fn masked_mean<const D: usize>(values: Tensor<D>, mask: Tensor<D, Bool>) -> Tensor<1> {
    // `Tensor::sum` may add by atomics on CUDA, in an order that changes; sums along an axis repeat their bits.
    fn sum<const D: usize>(values: Tensor<D>) -> Tensor<1> {
        let elements = values.shape().num_elements();
        values.reshape([elements]).sum_dim(0)
    }
    let dtype = values.dtype();
    let count = sum(mask.clone().bool_not().float().cast(dtype));
    sum(values.mask_fill(mask, 0.0)) / count.clamp_min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(shape: &[usize], kind: TensorKind) -> TensorSpec {
        TensorSpec {
            shape: shape.to_vec(),
            dtype: match kind {
                TensorKind::Float => DType::F32,
                TensorKind::Int => DType::I32,
                TensorKind::Bool => DType::U32,
            },
            kind,
        }
    }

    /// A bucket that is too small would cut a batch off, one larger than need be wastes memory and time: for every length,
    /// the least size that holds it.
    #[test]
    fn every_length_gets_the_least_bucket_that_holds_it() {
        let buckets = [
            Buckets::powers_of_two(16, 100),
            Buckets::powers_of_two(3, 64),
            Buckets::powers_of_two(8, 8),
            Buckets::multiples_of(24, 100),
            Buckets::multiples_of(25, 100),
            Buckets::list([64, 7, 7, 30]),
        ];
        for buckets in buckets {
            let buckets = buckets.expect("valid");
            let sizes = buckets.sizes();
            assert!(sizes.is_sorted_by(|a, b| a < b), "{sizes:?}");
            for length in 0..=130 {
                let least = sizes.iter().copied().find(|size| *size >= length);
                assert_eq!(buckets.bucket_of(length), least, "{length} in {sizes:?}");
            }
        }
        let sizes = |buckets: Result<Buckets, BucketingError>| buckets.expect("valid").sizes;
        assert_eq!(sizes(Buckets::powers_of_two(16, 100)), [16, 32, 64, 100]);
        assert_eq!(sizes(Buckets::powers_of_two(3, 64)), [3, 4, 8, 16, 32, 64]);
        assert_eq!(sizes(Buckets::multiples_of(25, 100)), [25, 50, 75, 100]);
    }

    /// Sizes that are none are refused when they are given, not when a batch comes.
    #[test]
    fn sizes_that_are_none_are_refused() {
        for buckets in [
            Buckets::powers_of_two(0, 8),
            Buckets::powers_of_two(9, 8),
            Buckets::multiples_of(0, 8),
            Buckets::multiples_of(9, 8),
            Buckets::list([]),
            Buckets::list([0, 4]),
        ] {
            assert!(matches!(buckets, Err(BucketingError::Sizes { .. })));
        }
    }

    fn lengths() -> Bucketing {
        Bucketing::new(Buckets::list([4, 8]).expect("valid"))
    }

    /// Two bucketings compose, a fitting length is left alone, and what is padding is counted.
    #[test]
    fn rows_and_lengths_compose() {
        use TensorKind::{Bool, Float, Int};
        let rows = Bucketing::rows(Buckets::list([2]).expect("valid")).pad_with(1, 0, -1i64);
        let both = [lengths().pad(0, 1).pad(2, 1), rows];
        let batch = [
            spec(&[1, 3, 5], Float),
            spec(&[1], Int),
            spec(&[1, 3], Bool),
        ];
        let mut specs = batch.clone();
        let plan = Plan::new(&both, &mut specs).expect("fits");
        let shapes: Vec<&[usize]> = specs.iter().map(|spec| spec.shape.as_slice()).collect();
        assert_eq!(shapes, [&[2, 4, 5][..], &[2], &[2, 4]]);
        assert_eq!((plan.elements, plan.padding), (40 + 2 + 8, 25 + 1 + 5));
        let fills: Vec<Fill> = plan.pads.iter().map(|pad| pad.fill).collect();
        let (zero, one) = (Fill::Float(0.0), Fill::Bool(true));
        assert_eq!(fills, [zero, one, zero, Fill::Int(-1), one]);
        let mut fits = [
            spec(&[2, 8, 5], Float),
            spec(&[2], Int),
            spec(&[2, 8], Bool),
        ];
        let plan = Plan::new(&both, &mut fits).expect("fits");
        assert!(!plan.pads() && plan.padding == 0 && plan.above.is_none());
        let mut long = [
            spec(&[2, 9, 5], Float),
            spec(&[2], Int),
            spec(&[2, 9], Bool),
        ];
        let plan = Plan::new(&both, &mut long).expect("fits");
        assert_eq!((plan.above, long[0].shape[1]), (Some((9, 8)), 9));
    }

    /// The share of padding is that of all calls, those above the buckets among them.
    #[test]
    fn calls_above_the_buckets_count_as_unpadded() {
        let mut padding = Padding::default();
        let bucketing = [Bucketing::new(Buckets::list([4]).expect("valid")).pad(0, 1)];
        for length in [12, 2] {
            let mut specs = [spec(&[1, length], TensorKind::Float)];
            padding.count(&Plan::new(&bucketing, &mut specs).expect("fits"));
            let share = if length == 12 { 0.0 } else { 2.0 / 16.0 };
            assert_eq!(padding.share(), Some(share));
        }
        assert_eq!((padding.calls, padding.above), (1, 1));
    }

    /// Buckets come back from a file as they were; sizes that are none are refused there as well.
    #[test]
    fn saved_buckets_are_checked() {
        let buckets = Buckets::multiples_of(24, 100).expect("valid");
        let saved = serde_json::to_string(&buckets).expect("serializes");
        assert_eq!(
            serde_json::from_str::<Buckets>(&saved).expect("is valid"),
            buckets
        );
        let shuffled = serde_json::from_str::<Buckets>(r#"{"sizes":[64,16]}"#).expect("is valid");
        assert_eq!(shuffled.sizes(), [16, 64]);
        for none in [r#"{"sizes":[]}"#, r#"{"sizes":[64,16,0]}"#] {
            let error = serde_json::from_str::<Buckets>(none).expect_err("is none");
            assert!(error.to_string().contains("at least one size"), "{error}");
        }
    }

    /// A value that the dtype cannot hold would be a panic of Burn's, or an infinity, in the middle of a step.
    #[test]
    fn values_that_a_dtype_cannot_hold_are_refused() {
        let (least, most) = (i64::from(i8::MIN), i64::from(i8::MAX));
        for (dtype, fill, fits) in [
            (DType::U32, Fill::Int(-1), false),
            (DType::U32, Fill::Int(i64::from(u32::MAX)), true),
            (DType::U64, Fill::Int(-1), false),
            (DType::I64, Fill::Int(i64::MIN), true),
            (DType::I32, Fill::Int(1 << 31), false),
            (DType::I8, Fill::Int(least), true),
            (DType::I8, Fill::Int(most + 1), false),
            (DType::U8, Fill::Int(256), false),
            (DType::U16, Fill::Int(65_536), false),
            (DType::I16, Fill::Int(-32_769), false),
            (DType::F16, Fill::Float(65_504.0), true),
            (DType::F16, Fill::Int(70_000), false),
            (DType::F32, Fill::Float(-1e39), false),
            (DType::F32, Fill::Float(f64::NEG_INFINITY), true),
            (DType::BF16, Fill::Float(1e38), true),
            (DType::F64, Fill::Float(f64::MAX), true),
        ] {
            let kind = match dtype.is_float() {
                true => TensorKind::Float,
                false => TensorKind::Int,
            };
            let spec = TensorSpec {
                shape: vec![1],
                dtype,
                kind,
            };
            let filled = filling(3, &spec, Some(fill));
            assert_eq!(filled.is_ok(), fits, "{fill:?} in {dtype:?}: {filled:?}");
            let refused = matches!(filled, Err(BucketingError::Value { tensor: 3, .. }));
            assert_eq!(refused, !fits);
        }
    }

    /// What does not fit the batch is named before anything runs.
    #[test]
    fn bucketing_that_does_not_fit_is_an_error() {
        use TensorKind::{Float, Int};
        let plan = |bucketing: Bucketing| {
            let mut specs = [spec(&[2, 3], Float), spec(&[2, 5], Int)];
            Plan::new(&[bucketing], &mut specs).map(|_| ())
        };
        assert_eq!(plan(lengths().pad(0, 1)), Ok(()));
        let none = BucketingError::NoTensor {
            tensor: 2,
            tensors: 2,
        };
        assert_eq!(plan(lengths().pad(2, 0)), Err(none));
        assert!(matches!(
            plan(lengths().pad(1, 2)),
            Err(BucketingError::NoAxis { rank: 2, .. })
        ));
        assert!(matches!(
            plan(lengths().pad(0, 1).pad(1, 1)),
            Err(BucketingError::Lengths {
                length: 3,
                other: 5,
                ..
            })
        ));
        assert!(matches!(
            plan(lengths().pad_with(1, 0, 0.5)),
            Err(BucketingError::Kind { tensor: 1, .. })
        ));
        // Whatever the length, so that the first batch tells.
        for size in [1, 5] {
            let buckets = Buckets::list([size]).expect("valid");
            assert!(matches!(
                plan(Bucketing::new(buckets).pad_with(1, 1, true)),
                Err(BucketingError::Kind { tensor: 1, .. })
            ));
        }
        let mut quantized = [spec(&[2, 8], Float)];
        quantized[0].dtype = DType::QFloat(Default::default());
        assert_eq!(
            Plan::new(&[lengths().pad(0, 1)], &mut quantized),
            Err(BucketingError::Quantized { tensor: 0 })
        );
        let rows = || Bucketing::rows(Buckets::list([4]).expect("valid"));
        assert!(matches!(
            plan(rows().pad(0, 1)),
            Err(BucketingError::RowsAxis { .. })
        ));
        assert!(matches!(
            plan(rows().pad_with(7, 0, 1i64)),
            Err(BucketingError::NoTensor { tensor: 7, .. })
        ));
    }
}
