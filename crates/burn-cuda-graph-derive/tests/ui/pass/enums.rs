#![deny(warnings)]

use burn_cuda_graph::tensor::{Int, Tensor};
use burn_cuda_graph::{AnyTensor, HostField, TensorTree};

#[derive(TensorTree, Debug, PartialEq)]
enum Batch {
    Named { x: Tensor<2>, scale: f64 },
    Unnamed(Tensor<2>, Tensor<1, Int>),
    Unit,
    r#Raw(Option<Box<Batch>>),
    Empty {},
}

#[derive(TensorTree)]
#[allow(dead_code)]
enum Never {}

#[derive(TensorTree)]
#[allow(dead_code)]
enum Number {
    One = 1,
    Two,
}

fn check(batch: Batch, ids: &[i64], fields: &[HostField]) {
    let (mut visited, mut mapped, mut host) = (vec![], vec![], vec![]);
    batch.visit_tensors(&mut |tensor| visited.push(tensor.0));
    batch.visit_host_fields(&mut |field| host.push(field));
    let same = batch.map_tensors(&mut |tensor| {
        mapped.push(tensor.0);
        AnyTensor(tensor.0)
    });
    assert_eq!((same, visited.as_slice(), mapped.as_slice()), (batch, ids, ids));
    assert_eq!(host, fields);
}

fn main() {
    let text = |text: &str| HostField::Text(text.into());
    let bits = HostField::Bits(0.5f64.to_bits());
    check(Batch::Named { x: Tensor::new(1), scale: 0.5 }, &[1], &[text("Named"), bits]);
    check(Batch::Unnamed(Tensor::new(1), Tensor::new(2)), &[1, 2], &[text("Unnamed")]);
    check(Batch::Unit, &[], &[text("Unit")]);
    check(Batch::Empty {}, &[], &[text("Empty")]);
    assert_eq!(Number::Two.map_tensors(&mut |tensor| tensor) as u8, 2);
    let inner = Batch::Unnamed(Tensor::new(1), Tensor::new(2));
    check(
        Batch::Raw(Some(Box::new(inner))),
        &[1, 2],
        &[text("Raw"), HostField::Bool(true), text("Unnamed")],
    );
}
