use burn_cuda_graph::TensorTree;
use burn_cuda_graph::tensor::Tensor;

#[derive(TensorTree)]
#[tensor_tree(krate = "burn_cuda_graph")]
enum Batch {
    #[tensor_tree(rename = "a")]
    A(#[tensor_tree(some::host)] Tensor<1>),
    #[tensor_tree(crate = "burn_cuda_graph")]
    B,
}

fn main() {}
