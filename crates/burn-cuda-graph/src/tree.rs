//! Walking the tensors of a user's batch or output.

use crate::error::StepError;
use crate::shape_key::HostField;
use crate::tensor::AnyTensor;
use burn::tensor::{Bool, Int, Tensor};
use core::marker::PhantomData;

/// A value made of tensors (a batch, an output) and of plain host values.
///
/// Implemented for tensors of every kind and rank, `()`, tuples, `Vec`, `Option`, arrays, `Box`, `PhantomData`, for host
/// values (integers, floats, `bool`, `char`, `String`, `&'static str`) and, with the feature `train`, for the outputs of
/// `burn_train`. Host values become part of the shape key: a step captured with `("train", x)` is not replayed for
/// `("eval", x)`.
///
/// Derive it for your own structs and enums:
///
/// ```
/// use burn::tensor::{Int, Tensor};
/// use burn_cuda_graph::TensorTree;
///
/// #[derive(TensorTree)]
/// struct Batch {
///     images: Tensor<4>,
///     targets: Tensor<1, Int>,
/// }
/// ```
///
/// By hand, visit and map each field in the same order; the engine checks the count:
///
/// ```
/// # use burn_cuda_graph::{AnyTensor, HostField, TensorTree};
/// # use burn::tensor::{Int, Tensor};
/// struct Batch { images: Tensor<4>, targets: Tensor<1, Int> }
///
/// impl TensorTree for Batch {
///     fn visit_tensors(&self, visit: &mut dyn FnMut(AnyTensor)) {
///         self.images.visit_tensors(visit);
///         self.targets.visit_tensors(visit);
///     }
///     fn map_tensors(&self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
///         Batch { images: self.images.map_tensors(map), targets: self.targets.map_tensors(map) }
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be part of a batch or an output of a graphed step",
    label = "not a `TensorTree`",
    note = "for a struct or an enum of your own: #[derive(burn_cuda_graph::TensorTree)]",
    note = "what is neither tensors nor a host value that the shape key can hold belongs outside of the batch: let the \
            step's closure own it if it never changes"
)]
pub trait TensorTree: Sized {
    /// Hand every tensor to `visit`, in a fixed order. Cloning a tensor shares its buffer.
    fn visit_tensors(&self, visit: &mut dyn FnMut(AnyTensor));

    /// A value with what `map` returns for every tensor, in the order of [`visit_tensors`](Self::visit_tensors), and
    /// with the same host values. `map` returns a tensor of the same kind and rank.
    fn map_tensors(&self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self;

    /// Hand every host value that shapes the step to `field`; it becomes part of the shape key. Lengths of
    /// containers and which variant of an enum is held belong here too. Default: none.
    fn visit_host_fields(&self, field: &mut dyn FnMut(HostField)) {
        let _ = field;
    }
}

macro_rules! tensor_tree {
    ($tensor:ty, $from:ident, $into:ident) => {
        impl<const D: usize> TensorTree for $tensor {
            fn visit_tensors(&self, visit: &mut dyn FnMut(AnyTensor)) {
                visit(AnyTensor::$from(self.clone()));
            }
            fn map_tensors(&self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
                map(AnyTensor::$from(self.clone())).$into()
            }
        }
    };
}

tensor_tree!(Tensor<D>, from_float, into_float);
tensor_tree!(Tensor<D, Int>, from_int, into_int);
tensor_tree!(Tensor<D, Bool>, from_bool, into_bool);

macro_rules! tuple_tree {
    ($($name:ident . $index:tt),*) => {
        impl<$($name: TensorTree),*> TensorTree for ($($name,)*) {
            fn visit_tensors(&self, visit: &mut dyn FnMut(AnyTensor)) {
                let _ = &visit;
                $(self.$index.visit_tensors(visit);)*
            }
            fn map_tensors(&self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
                let _ = &map;
                ($(self.$index.map_tensors(map),)*)
            }
            fn visit_host_fields(&self, field: &mut dyn FnMut(HostField)) {
                let _ = &field;
                $(self.$index.visit_host_fields(field);)*
            }
        }
    };
}

impl TensorTree for () {
    fn visit_tensors(&self, _visit: &mut dyn FnMut(AnyTensor)) {}
    fn map_tensors(&self, _map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {}
}
tuple_tree!(A.0);
tuple_tree!(A.0, B.1);
tuple_tree!(A.0, B.1, C.2);
tuple_tree!(A.0, B.1, C.2, D.3);
tuple_tree!(A.0, B.1, C.2, D.3, E.4);
tuple_tree!(A.0, B.1, C.2, D.3, E.4, F.5);

impl<T: TensorTree> TensorTree for Vec<T> {
    fn visit_tensors(&self, visit: &mut dyn FnMut(AnyTensor)) {
        self.iter().for_each(|item| item.visit_tensors(visit));
    }
    fn map_tensors(&self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        self.iter().map(|item| item.map_tensors(map)).collect()
    }
    fn visit_host_fields(&self, field: &mut dyn FnMut(HostField)) {
        field(HostField::Int(self.len() as i64));
        self.iter().for_each(|item| item.visit_host_fields(field));
    }
}

impl<T: TensorTree, const N: usize> TensorTree for [T; N] {
    fn visit_tensors(&self, visit: &mut dyn FnMut(AnyTensor)) {
        self.iter().for_each(|item| item.visit_tensors(visit));
    }
    fn map_tensors(&self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        self.each_ref().map(|item| item.map_tensors(map))
    }
    fn visit_host_fields(&self, field: &mut dyn FnMut(HostField)) {
        self.iter().for_each(|item| item.visit_host_fields(field));
    }
}

impl<T: TensorTree> TensorTree for Option<T> {
    fn visit_tensors(&self, visit: &mut dyn FnMut(AnyTensor)) {
        self.iter().for_each(|item| item.visit_tensors(visit));
    }
    fn map_tensors(&self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        self.as_ref().map(|item| item.map_tensors(map))
    }
    fn visit_host_fields(&self, field: &mut dyn FnMut(HostField)) {
        field(HostField::Bool(self.is_some()));
        self.iter().for_each(|item| item.visit_host_fields(field));
    }
}

impl<T: TensorTree> TensorTree for Box<T> {
    fn visit_tensors(&self, visit: &mut dyn FnMut(AnyTensor)) {
        self.as_ref().visit_tensors(visit);
    }
    fn map_tensors(&self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        Box::new(self.as_ref().map_tensors(map))
    }
    fn visit_host_fields(&self, field: &mut dyn FnMut(HostField)) {
        self.as_ref().visit_host_fields(field);
    }
}

impl<T: ?Sized> TensorTree for PhantomData<T> {
    fn visit_tensors(&self, _visit: &mut dyn FnMut(AnyTensor)) {}
    fn map_tensors(&self, _map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
        PhantomData
    }
}

macro_rules! host_tree {
    ($($host:ty => $field:expr),* $(,)?) => {
        $(impl TensorTree for $host {
            fn visit_tensors(&self, _visit: &mut dyn FnMut(AnyTensor)) {}
            fn map_tensors(&self, _map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
                self.clone()
            }
            fn visit_host_fields(&self, field: &mut dyn FnMut(HostField)) {
                let into: fn(&$host) -> HostField = $field;
                field(into(self));
            }
        })*
    };
}

host_tree!(
    bool => |v| HostField::Bool(*v),
    char => |v| HostField::Int(i64::from(u32::from(*v))),
    i8 => |v| HostField::Int(i64::from(*v)),
    i16 => |v| HostField::Int(i64::from(*v)),
    i32 => |v| HostField::Int(i64::from(*v)),
    i64 => |v| HostField::Int(*v),
    isize => |v| HostField::Int(*v as i64),
    u8 => |v| HostField::Int(i64::from(*v)),
    u16 => |v| HostField::Int(i64::from(*v)),
    u32 => |v| HostField::Int(i64::from(*v)),
    u64 => |v| HostField::Bits(*v),
    usize => |v| HostField::Int(*v as i64),
    f32 => |v| HostField::Bits(u64::from(v.to_bits())),
    f64 => |v| HostField::Bits(v.to_bits()),
    String => |v| HostField::Text(v.clone()),
    &'static str => |v| HostField::Text((*v).to_string()),
);

/// The tensors of `tree`, in order.
pub(crate) fn tensors_of<T: TensorTree>(tree: &T) -> Vec<AnyTensor> {
    let mut tensors = Vec::new();
    tree.visit_tensors(&mut |tensor| tensors.push(tensor));
    tensors
}

/// A tree as `tree`, with `tensors` for its tensors, in order.
///
/// # Errors
///
/// [`StepError::TreeMismatch`] when it maps another number of tensors than it visits.
pub(crate) fn with_tensors<T: TensorTree>(
    tree: &T,
    tensors: &[AnyTensor],
    place: &str,
) -> Result<T, StepError> {
    let mut mapped = 0;
    let tree = tree.map_tensors(&mut |tensor| {
        mapped += 1;
        tensors.get(mapped - 1).cloned().unwrap_or(tensor)
    });
    match mapped == tensors.len() {
        true => Ok(tree),
        false => Err(StepError::TreeMismatch {
            place: place.to_string(),
            visited: tensors.len(),
            mapped,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch that visits a tensor it does not map would replay with that tensor's recorded values for ever.
    #[cfg(feature = "flex")]
    #[test]
    fn a_tree_that_maps_less_than_it_visits_is_an_error() {
        struct Half(Tensor<1>, Tensor<1>);
        impl TensorTree for Half {
            fn visit_tensors(&self, visit: &mut dyn FnMut(AnyTensor)) {
                self.0.visit_tensors(visit);
                self.1.visit_tensors(visit);
            }
            fn map_tensors(&self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
                Half(self.0.map_tensors(map), self.1.clone())
            }
        }
        let tensor = || Tensor::<1>::ones([2], &burn::tensor::Device::flex());
        let half = Half(tensor(), tensor());
        let tensors = tensors_of(&half);
        let error = with_tensors(&half, &tensors, "batch")
            .map(|_| ())
            .expect_err("maps one of two");
        assert_eq!(
            error,
            StepError::TreeMismatch {
                place: "batch".into(),
                visited: 2,
                mapped: 1
            }
        );
    }

    /// A host value in the batch must separate two keys, or a graph captured for one branch of the step
    /// would be replayed for the other.
    #[test]
    fn host_values_lengths_and_absence_become_host_fields() {
        let mut fields = Vec::new();
        ("train", vec![1i64, 2], None::<bool>, [true, false], 1.5f64)
            .visit_host_fields(&mut |field| fields.push(field));
        assert_eq!(
            fields,
            vec![
                HostField::Text("train".into()),
                HostField::Int(2),
                HostField::Int(1),
                HostField::Int(2),
                HostField::Bool(false),
                HostField::Bool(true),
                HostField::Bool(false),
                HostField::Bits(1.5f64.to_bits()),
            ]
        );
    }
}
