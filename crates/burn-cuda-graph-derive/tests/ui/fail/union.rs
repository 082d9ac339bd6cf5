use burn_cuda_graph::TensorTree;

#[derive(TensorTree)]
union Batch {
    count: u32,
    scale: f32,
}

fn main() {}
