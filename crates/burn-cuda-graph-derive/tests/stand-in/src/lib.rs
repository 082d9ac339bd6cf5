//! `burn_cuda_graph` as the UI tests see it: the real trait with its real messages, over tensors without a backend.
//!
//! trybuild compiles what the cases depend on once more, in a target directory and a profile of its own. Burn would be
//! more than a hundred crates of that, and no message of the derive depends on one of them. That the derive fits the crate
//! itself is tested by `tests/derive.rs` of the workspace.
#![cfg(not(test))] // the tests of `tree.rs` are for Burn's tensors
#![allow(missing_docs)]

extern crate self as burn; // `tree.rs` names its tensors `burn::tensor::Tensor`

#[allow(dead_code)]
#[path = "../../../../burn-cuda-graph/src/tree.rs"]
mod tree;

pub use burn_cuda_graph_derive::TensorTree;
pub use shape_key::HostField;
pub use tensor::AnyTensor;
pub use tree::TensorTree;

pub mod tensor {
    use core::marker::PhantomData;

    #[derive(Debug, Clone, PartialEq)]
    pub struct Float;
    #[derive(Debug, Clone, PartialEq)]
    pub struct Int;
    #[derive(Debug, Clone, PartialEq)]
    pub struct Bool;

    /// A tensor that is a number.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Tensor<const D: usize, K = Float>(pub i64, PhantomData<K>);

    impl<const D: usize, K> Tensor<D, K> {
        pub fn new(id: i64) -> Self {
            Self(id, PhantomData)
        }
    }

    #[derive(Debug, Clone, PartialEq)]
    pub struct AnyTensor(pub i64);

    macro_rules! kind {
        ($kind:ty, $from:ident, $into:ident) => {
            impl AnyTensor {
                pub fn $from<const D: usize>(tensor: Tensor<D, $kind>) -> Self {
                    Self(tensor.0)
                }
                pub fn $into<const D: usize>(self) -> Tensor<D, $kind> {
                    Tensor::new(self.0)
                }
            }
        };
    }

    kind!(Float, from_float, into_float);
    kind!(Int, from_int, into_int);
    kind!(Bool, from_bool, into_bool);
}

mod shape_key {
    #[derive(Debug, Clone, PartialEq)]
    pub enum HostField {
        Bool(bool),
        Int(i64),
        Bits(u64),
        Text(String),
    }
}

pub mod error {
    #[derive(Debug)]
    pub enum StepError {
        TreeMismatch {
            place: String,
            visited: usize,
            mapped: usize,
        },
    }
}
