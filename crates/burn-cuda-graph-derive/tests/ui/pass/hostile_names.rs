//! Nothing that the user's module calls its things changes what is generated.
#![deny(warnings)]
#![no_implicit_prelude]
#![allow(dead_code, non_camel_case_types, non_upper_case_globals)]

mod std {}
mod core {}
mod burn_cuda_graph {}
struct Option;
struct String;
struct Vec;
struct AnyTensor;
struct HostField;
trait FnMut {}
trait TensorTree {}
static tensor: u8 = 0;
static field: u8 = 0;

/// Methods of the user's own by the names of the trait's.
struct Tree(::burn_cuda_graph::tensor::Tensor<1>);

impl Tree {
    fn visit_tensors(&self) {}
    fn map_tensors(&self) {}
    fn visit_host_fields(&self) {}
}

impl ::burn_cuda_graph::TensorTree for Tree {
    fn visit_tensors(&self, visit: &mut dyn ::core::ops::FnMut(::burn_cuda_graph::AnyTensor)) {
        ::burn_cuda_graph::TensorTree::visit_tensors(&self.0, visit)
    }
    fn map_tensors(
        &self,
        map: &mut dyn ::core::ops::FnMut(::burn_cuda_graph::AnyTensor) -> ::burn_cuda_graph::AnyTensor,
    ) -> Self {
        Tree(::burn_cuda_graph::TensorTree::map_tensors(&self.0, map))
    }
}

#[derive(::burn_cuda_graph::TensorTree)]
struct Fields<tensor> {
    tensor: Tree,
    field: tensor,
    visit: Tree,
    map: Tree,
    r#match: Tree,
}

#[derive(::burn_cuda_graph::TensorTree)]
enum Variants {
    Some(Tree),
    None,
    Ok { tensor: Tree, field: ::core::primitive::u8 },
}

fn main() {}
