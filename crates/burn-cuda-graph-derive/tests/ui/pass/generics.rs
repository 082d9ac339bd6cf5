#![deny(warnings)]

use burn_cuda_graph::TensorTree;
use burn_cuda_graph::tensor::Tensor;
use std::marker::PhantomData;

trait Source {
    type Item;
    type Key;
}

struct File; // not a `TensorTree`

impl Source for File {
    type Item = Tensor<2>;
    type Key = u32;
}

#[derive(TensorTree)]
struct Pair<A, B = A> {
    a: A,
    b: Option<Vec<B>>,
}

#[derive(TensorTree)]
struct Ranked<T: Clone, const D: usize>
where
    T: Default,
{
    x: Tensor<D>,
    rest: [T; D],
}

/// Only what a field holds gets a bound: not the source, not what is a marker.
#[derive(TensorTree)]
struct Loaded<S: Source, M> {
    item: S::Item,
    key: <S as Source>::Key,
    marker: PhantomData<M>,
}

/// As types are written by a `macro_rules!`.
macro_rules! batch {
    ($name:ident<$parameter:ident>, $field:ty) => {
        #[derive(TensorTree)]
        struct $name<$parameter>($field, Vec<$parameter>);
    };
}
batch!(Made<T>, Option<T>);

struct Borrowing<'a>(PhantomData<&'a ()>);

impl TensorTree for Borrowing<'_> {
    fn visit_tensors(&self, _: &mut dyn FnMut(burn_cuda_graph::AnyTensor)) {}
    fn map_tensors(
        &self,
        _: &mut dyn FnMut(burn_cuda_graph::AnyTensor) -> burn_cuda_graph::AnyTensor,
    ) -> Self {
        Borrowing(PhantomData)
    }
}

#[derive(TensorTree)]
struct Outer<'a, T: 'a> {
    inner: Borrowing<'a>,
    value: T,
}

fn count<T: TensorTree>(tree: &T) -> usize {
    let mut count = 0;
    tree.visit_tensors(&mut |_| count += 1);
    count
}

fn main() {
    let x = Tensor::<2>::new(1);
    assert_eq!(count(&Pair { a: x.clone(), b: Some(vec![1u8]) }), 1);
    assert_eq!(count(&Ranked { x: x.clone(), rest: [1i64, 2] }), 1);
    assert_eq!(count(&Loaded::<File, File> { item: x.clone(), key: 1, marker: PhantomData }), 1);
    assert_eq!(count(&Made(Some(x.clone()), vec![])), 1);
    assert_eq!(count(&Outer { inner: Borrowing(PhantomData), value: x }), 1);
}
