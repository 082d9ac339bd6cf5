use burn_cuda_graph::TensorTree;
use burn_cuda_graph::tensor::Tensor;
use std::collections::HashMap;

pub struct Tokenizer;

#[derive(TensorTree)]
struct Batch {
    x: Tensor<2>,
    tokenizer: Tokenizer,
    names: HashMap<String, u32>,
    y: Tensor<1>,
}

#[derive(TensorTree)]
enum Either {
    A(Tensor<1>),
    B { nested: Option<Vec<Tokenizer>> },
}

fn main() {}
