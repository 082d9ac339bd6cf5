#![deny(warnings)]

use burn_cuda_graph::tensor::{Bool, Int, Tensor};
use burn_cuda_graph::{AnyTensor, HostField, TensorTree};

#[derive(TensorTree, Debug, PartialEq)]
struct Named {
    a: Tensor<4>,
    b: Tensor<1, Int>,
    r#type: Tensor<2, Bool>,
    count: usize,
    name: &'static str,
}

#[derive(TensorTree, Debug, PartialEq)]
struct Unnamed(Tensor<1>, Named, (Tensor<1>, Vec<Tensor<2>>), [Box<Tensor<1>>; 2]);

#[derive(TensorTree, Debug, PartialEq)]
struct Unit;

#[derive(TensorTree, Debug, PartialEq)]
struct NoFields {}

#[derive(TensorTree, Debug, PartialEq)]
struct Children {
    value: Tensor<1>,
    children: Vec<Children>,
    next: Option<Box<Self>>,
}

pub fn tensors(tree: &impl TensorTree) -> Vec<i64> {
    let mut found = Vec::new();
    tree.visit_tensors(&mut |tensor| found.push(tensor.0));
    found
}

pub fn mapped<T: TensorTree>(tree: &T) -> (T, Vec<i64>) {
    let mut found = Vec::new();
    let tree = tree.map_tensors(&mut |tensor| {
        found.push(tensor.0);
        AnyTensor(-tensor.0)
    });
    (tree, found)
}

pub fn host(tree: &impl TensorTree) -> Vec<HostField> {
    let mut found = Vec::new();
    tree.visit_host_fields(&mut |field| found.push(field));
    found
}

fn named(sign: i64) -> Named {
    Named {
        a: Tensor::new(2 * sign),
        b: Tensor::new(3 * sign),
        r#type: Tensor::new(4 * sign),
        count: 9,
        name: "train",
    }
}

fn unnamed(sign: i64) -> Unnamed {
    let tensor = |id| Tensor::new(id * sign);
    Unnamed(
        tensor(1),
        named(sign),
        (tensor(5), vec![Tensor::new(6 * sign), Tensor::new(7 * sign)]),
        [Box::new(tensor(8)), Box::new(tensor(9))],
    )
}

fn main() {
    let ids = vec![1, 2, 3, 4, 5, 6, 7, 8, 9];
    assert_eq!(tensors(&unnamed(1)), ids);
    assert_eq!(mapped(&unnamed(1)), (unnamed(-1), ids));
    assert_eq!(
        host(&unnamed(1)),
        [HostField::Int(9), HostField::Text("train".into()), HostField::Int(2)]
    );

    assert_eq!(mapped(&(Unit, NoFields {})), ((Unit, NoFields {}), vec![]));
    assert_eq!(host(&(Unit, NoFields {})), []);

    let leaf = |id| Children { value: Tensor::new(id), children: vec![], next: None };
    let tree = Children {
        value: Tensor::new(1),
        children: vec![leaf(2), leaf(3)],
        next: Some(Box::new(leaf(4))),
    };
    assert_eq!(tensors(&tree), [1, 2, 3, 4]);
}
