//! The derive macro of [`burn-cuda-graph`], which re-exports it beside the trait. Depend on that crate, not on this one.
//!
//! [`burn-cuda-graph`]: https://docs.rs/burn-cuda-graph
//!
//! Forces behind what it generates:
//!
//! - A tensor that is visited but not mapped would keep its recorded values in every replay, and one that is mapped in
//!   another order would get those of another tensor. All methods are made from one list of fields.
//! - A host value that a step reads but the shape key does not hold would be frozen into the graph. There is no way to
//!   leave a field out.
//! - The user reads the errors. Each one points at a field, a key or a keyword, never at the derive.
#![deny(unsafe_code)]
#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

mod attributes;
mod bounds;
mod expand;

use proc_macro::TokenStream;
use syn::{DeriveInput, parse_macro_input};

/// Implements `burn_cuda_graph::TensorTree` for a struct or an enum whose fields implement it.
///
/// The tensors of the fields are visited and mapped in the order in which the fields are declared, and their host values
/// become part of the shape key in the same order. Of an enum, the name of the variant held comes first, so that a step
/// that branches on it is captured once for each.
///
/// A type parameter that occurs in a field gets the bound `TensorTree`. Lifetimes, const parameters, bounds and `where`
/// clauses stay as they are.
///
/// # Attributes
///
/// `#[tensor_tree(crate = "path")]` on the type: where `burn_cuda_graph` is found, for a crate that re-exports it.
///
/// A field cannot be skipped. What is passed to the step but is not in the shape key would be frozen into the recording:
/// let the step's closure own it, or pass it as a host value.
///
/// # Errors
///
/// It does not compile for a union, for an attribute that is not the one above, and for a field whose type is not a
/// `TensorTree`.
#[proc_macro_derive(TensorTree, attributes(tensor_tree))]
pub fn derive_tensor_tree(input: TokenStream) -> TokenStream {
    expand::tensor_tree(parse_macro_input!(input as DeriveInput))
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}
