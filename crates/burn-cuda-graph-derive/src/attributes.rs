//! `#[tensor_tree(...)]`: one key, on the type. Everything else is refused with what to do instead.

use syn::meta::ParseNestedMeta;
use syn::{Attribute, Data, DeriveInput, Error, Expr, ExprLit, Lit, Path, Result, parse_quote};

const NAME: &str = "tensor_tree";

const SKIP: &str = "a field cannot be skipped: a value that is passed to the step but is not in the shape key would be \
     frozen into the recorded graph, and replays would go on with the recorded value. Take it out of the type and let \
     the step's closure own it, or make it a host value (a number, `bool`, `char`, `String`), which becomes part of the \
     shape key";

/// The path to `burn_cuda_graph` that `input` names, the crate itself if none.
///
/// # Errors
///
/// Every attribute that has no meaning, on the type, its variants and its fields, in one error.
pub(crate) fn crate_path(input: &DeriveInput) -> Result<Path> {
    let mut path = None;
    let mut errors = None;
    collect(&input.attrs, &mut errors, |meta| {
        if !meta.path.is_ident("crate") {
            return Err(refused(&meta));
        }
        if path.is_some() {
            return Err(meta.error("`crate` is given twice"));
        }
        path = Some(quoted_path(&meta)?);
        Ok(())
    });
    for attributes in inner_attributes(&input.data) {
        collect(attributes, &mut errors, |meta| {
            Err(match meta.path.is_ident("crate") {
                true => meta.error("`crate` belongs on the type, not on a field or a variant"),
                false => refused(&meta),
            })
        });
    }
    match errors {
        Some(errors) => Err(errors),
        None => Ok(path.unwrap_or_else(|| parse_quote!(::burn_cuda_graph))),
    }
}

fn quoted_path(meta: &ParseNestedMeta) -> Result<Path> {
    let value: Expr = meta.value()?.parse()?;
    let path = match &value {
        Expr::Lit(ExprLit {
            lit: Lit::Str(path),
            ..
        }) => path.parse().ok(),
        _ => None,
    };
    path.ok_or_else(|| {
        Error::new_spanned(
            value,
            "`crate` takes a path in quotes, such as `crate = \"my_crate::graphs\"`",
        )
    })
}

fn refused(meta: &ParseNestedMeta) -> Error {
    if meta.path.is_ident("skip") {
        return meta.error(SKIP);
    }
    let key = meta.path.get_ident().map(ToString::to_string);
    let key = key.map(|key| format!(" `{key}`")).unwrap_or_default();
    meta.error(format!(
        "unknown key{key}: `{NAME}` knows `crate = \"path\"`, on the type"
    ))
}

fn collect(
    attributes: &[Attribute],
    errors: &mut Option<Error>,
    mut key: impl FnMut(ParseNestedMeta) -> Result<()>,
) {
    for attribute in attributes.iter().filter(|it| it.path().is_ident(NAME)) {
        if let Err(error) = attribute.parse_nested_meta(&mut key) {
            match errors {
                Some(errors) => errors.combine(error),
                None => *errors = Some(error),
            }
        }
    }
}

/// The attributes of variants and of fields, in the order of the source.
fn inner_attributes(data: &Data) -> Vec<&[Attribute]> {
    fn of(fields: &syn::Fields) -> impl Iterator<Item = &[Attribute]> {
        fields.iter().map(|field| field.attrs.as_slice())
    }
    match data {
        Data::Struct(data) => of(&data.fields).collect(),
        Data::Enum(data) => data
            .variants
            .iter()
            .flat_map(|variant| {
                core::iter::once(variant.attrs.as_slice()).chain(of(&variant.fields))
            })
            .collect(),
        Data::Union(_) => Vec::new(),
    }
}
