//! A tensor of any rank and kind, as the engine handles it.
//!
//! A user's structs hold `Tensor<2>`, `Tensor<1, Int>` and so on; the engine walks all of them in one list.
//! What it must not lose on the way is the autodiff association of a float tensor (tracked or not, its
//! gradient-checkpointing strategy), because a parameter that comes back without it stops training.

use burn::backend::{DispatchTensor, TensorMetadata};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};

/// The kind of a Burn tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TensorKind {
    /// `Tensor<D>`.
    Float,
    /// `Tensor<D, Int>`.
    Int,
    /// `Tensor<D, Bool>`.
    Bool,
}

/// Shape, dtype and kind of a tensor: what the shape key holds of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Float, int or bool.
    pub kind: TensorKind,
}

impl TensorSpec {
    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of the elements, packed.
    pub fn num_bytes(&self) -> u64 {
        (self.num_elements() * self.dtype.size()) as u64
    }
}

impl core::fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let dtype = format!("{:?}", self.dtype).to_lowercase();
        write!(f, "{dtype}{:?}", self.shape)
    }
}

/// A tensor of any rank and kind.
///
/// Made from a `Tensor` with [`from_float`](Self::from_float), [`from_int`](Self::from_int) or
/// [`from_bool`](Self::from_bool) and turned back with [`into_float`](Self::into_float) and its siblings.
/// Cloning shares the buffer.
#[derive(Debug, Clone)]
pub struct AnyTensor {
    pub(crate) dispatch: DispatchTensor,
    kind: TensorKind,
}

impl AnyTensor {
    /// Wrap a float tensor.
    pub fn from_float<const D: usize>(tensor: Tensor<D>) -> Self {
        Self {
            dispatch: tensor.into_dispatch(),
            kind: TensorKind::Float,
        }
    }

    /// Wrap an int tensor.
    pub fn from_int<const D: usize>(tensor: Tensor<D, Int>) -> Self {
        Self {
            dispatch: tensor.into_dispatch(),
            kind: TensorKind::Int,
        }
    }

    /// Wrap a bool tensor.
    pub fn from_bool<const D: usize>(tensor: Tensor<D, Bool>) -> Self {
        Self {
            dispatch: tensor.into_dispatch(),
            kind: TensorKind::Bool,
        }
    }

    /// The float tensor of rank `D`.
    ///
    /// # Panics
    ///
    /// When the tensor is of another kind, which a [`TensorTree`](crate::TensorTree) implementation that
    /// maps each tensor to one of the same kind never meets.
    pub fn into_float<const D: usize>(self) -> Tensor<D> {
        Tensor::from_dispatch(self.dispatch)
    }

    /// The int tensor of rank `D`.
    ///
    /// # Panics
    ///
    /// When the tensor is of another kind.
    pub fn into_int<const D: usize>(self) -> Tensor<D, Int> {
        Tensor::from_dispatch(self.dispatch)
    }

    /// The bool tensor of rank `D`.
    ///
    /// # Panics
    ///
    /// When the tensor is of another kind.
    pub fn into_bool<const D: usize>(self) -> Tensor<D, Bool> {
        Tensor::from_dispatch(self.dispatch)
    }

    /// Shape, dtype and kind.
    pub fn spec(&self) -> TensorSpec {
        TensorSpec {
            shape: self.dispatch.shape().iter().copied().collect(),
            dtype: self.dispatch.dtype(),
            kind: self.kind,
        }
    }

    /// Float, int or bool.
    pub fn kind(&self) -> TensorKind {
        self.kind
    }

    /// The device the tensor is on, without autodiff.
    pub fn device(&self) -> Device {
        match self.kind {
            TensorKind::Float => self.clone().into_float::<1>().device().inner(),
            TensorKind::Int => self.clone().into_int::<1>().device().inner(),
            TensorKind::Bool => self.clone().into_bool::<1>().device().inner(),
        }
    }

    /// `self + grad`, or `grad` where `fresh`, a `[1]` condition, holds.
    pub(crate) fn accumulate(&self, grad: AnyTensor, fresh: &Tensor<1, Bool>) -> Self {
        fn at<const D: usize>(
            sum: Tensor<D>,
            grad: Tensor<D>,
            fresh: &Tensor<1, Bool>,
        ) -> Tensor<D> {
            let fresh = fresh.clone().reshape([1; D]).expand(grad.dims());
            (sum + grad.clone()).mask_where(fresh, grad)
        }
        let (sum, rank) = (self.clone(), self.spec().shape.len());
        macro_rules! ranks {
            ($($rank:literal),*) => {
                match rank {
                    $($rank => Self::from_float(at::<$rank>(sum.into_float(), grad.into_float(), fresh)),)*
                    _ => panic!("accumulate: a parameter of rank {rank}; up to 8 is supported"),
                }
            };
        }
        ranks!(1, 2, 3, 4, 5, 6, 7, 8)
    }

    /// The tensor on `device`, off the autodiff tape; itself when it is there.
    pub(crate) fn to_device(&self, device: &Device) -> Self {
        let inner = self.clone().inner();
        match self.kind {
            TensorKind::Float => Self::from_float(inner.into_float::<1>().to_device(device)),
            TensorKind::Int => Self::from_int(inner.into_int::<1>().to_device(device)),
            TensorKind::Bool => Self::from_bool(inner.into_bool::<1>().to_device(device)),
        }
    }

    /// The values, read back.
    ///
    /// # Errors
    ///
    /// The device's words.
    pub(crate) fn read(&self) -> Result<TensorData, String> {
        let inner = self.clone().inner();
        match self.kind {
            TensorKind::Float => inner.into_float::<1>().try_into_data(),
            TensorKind::Int => inner.into_int::<1>().try_into_data(),
            TensorKind::Bool => inner.into_bool::<1>().try_into_data(),
        }
        .map_err(|err| err.to_string())
    }

    /// Whether the tensor is on `device`, with or without autodiff.
    pub(crate) fn is_on(&self, device: &Device) -> bool {
        self.dispatch.device() == *device.as_dispatch()
    }

    /// The same values off the autodiff tape, sharing the buffer.
    pub(crate) fn inner(self) -> Self {
        match self.kind {
            TensorKind::Float => Self::from_float(self.into_float::<1>().inner()),
            TensorKind::Int => Self::from_int(self.into_int::<1>().inner()),
            TensorKind::Bool => Self::from_bool(self.into_bool::<1>().inner()),
        }
    }

    /// `inner`, with the autodiff association of `like`: the device association, the gradient-checkpointing
    /// strategy, and whether it is a leaf that requires gradients.
    pub(crate) fn lifted_like(inner: AnyTensor, like: &AnyTensor) -> Self {
        match like.kind {
            TensorKind::Float => {
                let like = like.clone().into_float::<1>();
                let Some(strategy) = like.gradient_checkpointing_strategy() else {
                    return inner;
                };
                let lifted = Tensor::<1>::from_inner(inner.into_float())
                    .with_gradient_checkpointing_strategy(strategy);
                Self::from_float(match like.is_require_grad() {
                    true => lifted.require_grad(),
                    false => lifted,
                })
            }
            TensorKind::Int => {
                let like = like.clone().into_int::<1>();
                match like.gradient_checkpointing_strategy() {
                    Some(strategy) => Self::from_int(
                        Tensor::<1, Int>::from_inner(inner.into_int())
                            .with_gradient_checkpointing_strategy(strategy),
                    ),
                    None => inner,
                }
            }
            TensorKind::Bool => {
                let like = like.clone().into_bool::<1>();
                match like.gradient_checkpointing_strategy() {
                    Some(strategy) => Self::from_bool(
                        Tensor::<1, Bool>::from_inner(inner.into_bool())
                            .with_gradient_checkpointing_strategy(strategy),
                    ),
                    None => inner,
                }
            }
        }
    }

    /// A leaf with this tensor's values and autodiff association, off any tape.
    pub(crate) fn as_leaf(&self) -> Self {
        Self::lifted_like(self.clone().inner(), self)
    }
}
