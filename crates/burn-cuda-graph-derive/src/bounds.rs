//! Which bounds a generic type needs.
//!
//! The bound goes on the parameter, not on the type of the field: a bound on the field of a type that holds itself, as a
//! tree does, is a cycle that rustc gives up on.

use proc_macro2::Ident;
use quote::ToTokens;
use std::collections::HashSet;
use syn::visit::Visit;
use syn::{Data, Generics, Path, Type, TypePath, WhereClause, parse_quote};

/// Add `TensorTree` for the type parameters that occur in a field, and for their associated types that do.
pub(crate) fn add(generics: &mut Generics, data: &Data, tree: &Path) {
    let mut found = Found {
        parameters: generics.type_params().map(|it| it.ident.clone()).collect(),
        seen: HashSet::new(),
        bounded: Vec::new(),
    };
    if found.parameters.is_empty() {
        return;
    }
    found.visit_data(data);
    if found.bounded.is_empty() {
        return;
    }
    let WhereClause { predicates, .. } = generics.make_where_clause();
    for bounded in found.bounded {
        predicates.push(parse_quote!(#bounded: #tree));
    }
}

struct Found {
    parameters: HashSet<Ident>,
    seen: HashSet<String>,
    bounded: Vec<TypePath>,
}

impl Found {
    fn add(&mut self, path: &TypePath) {
        if self.seen.insert(path.to_token_stream().to_string()) {
            self.bounded.push(path.clone());
        }
    }

    fn is_parameter(&self, path: &Path) -> bool {
        path.leading_colon.is_none()
            && path
                .segments
                .first()
                .is_some_and(|first| self.parameters.contains(&first.ident))
    }
}

impl<'a> Visit<'a> for Found {
    fn visit_field(&mut self, field: &'a syn::Field) {
        self.visit_type(&field.ty); // not what an attribute or a visibility names
    }

    fn visit_variant(&mut self, variant: &'a syn::Variant) {
        self.visit_fields(&variant.fields); // not a discriminant
    }

    fn visit_type_path(&mut self, path: &'a TypePath) {
        let on_parameter = match &path.qself {
            None => self.is_parameter(&path.path),
            Some(qself) => match &*qself.ty {
                Type::Path(inner) => inner.qself.is_none() && self.is_parameter(&inner.path),
                _ => false,
            },
        };
        let phantom = path
            .path
            .segments
            .last()
            .is_some_and(|it| it.ident == "PhantomData");
        match on_parameter {
            true => self.add(path), // `T`, `T::Item`, `<T as Trait>::Item`
            false if phantom => {}
            false => syn::visit::visit_type_path(self, path),
        }
    }
}
