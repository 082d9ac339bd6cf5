use burn_cuda_graph::TensorTree;

#[derive(TensorTree)]
#[tensor_tree(crate = burn_cuda_graph)]
struct Unquoted;

#[derive(TensorTree)]
#[tensor_tree(crate = "not a path")]
struct NoPath;

#[derive(TensorTree)]
#[tensor_tree(crate = "burn_cuda_graph", crate = "burn_cuda_graph")]
struct Twice;

#[derive(TensorTree)]
#[tensor_tree]
struct Bare;

fn main() {}
