#![deny(warnings)]

mod facade {
    pub mod graphs {
        pub use burn_cuda_graph::{AnyTensor, HostField, TensorTree, tensor};
    }
}

/// The name in the prelude of crates leads elsewhere.
use std as burn_cuda_graph;

use facade::graphs::{TensorTree, tensor::Tensor};

#[derive(TensorTree)]
#[tensor_tree(crate = "crate::facade::graphs")]
struct Batch<T> {
    x: Tensor<1>,
    rest: T,
}

#[derive(TensorTree)]
#[tensor_tree(crate = "facade::graphs")]
enum Either {
    A(Tensor<1>),
    B(u8),
}

fn main() {
    fn is_tree<T: TensorTree>(_: T) {}
    is_tree(Batch { x: Tensor::new(1), rest: Either::A(Tensor::new(1)) });
    is_tree(Either::B(1));
    let _ = burn_cuda_graph::mem::size_of::<u8>();
}
