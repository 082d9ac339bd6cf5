use burn_cuda_graph::TensorTree;
use burn_cuda_graph::tensor::Tensor;

#[derive(TensorTree)]
struct Batch {
    x: Tensor<2>,
    #[tensor_tree(skip)]
    epoch: usize,
}

fn main() {}
