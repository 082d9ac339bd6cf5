//! The implementation, from the fields.

use crate::{attributes, bounds};
use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Data, DeriveInput, Error, Fields, Member, Path, Result, Type, parse_quote};

/// The implementation of `TensorTree` for `input`.
///
/// # Errors
///
/// For a union, and for attributes that have no meaning.
pub(crate) fn tensor_tree(mut input: DeriveInput) -> Result<TokenStream> {
    if let Data::Union(data) = &input.data {
        return Err(Error::new_spanned(
            data.union_token,
            "`TensorTree` cannot be derived for a union: nothing says which of its fields is held. Use an enum",
        ));
    }
    let root = attributes::crate_path(&input)?;
    let tree: Path = parse_quote!(#root::TensorTree);
    bounds::add(&mut input.generics, &input.data, &tree);

    let arms = arms(&input.data);
    let names = Names::new();
    let visit = arms.iter().map(|arm| arm.visit(&tree, &names.tensor));
    let map = arms.iter().map(|arm| arm.map(&tree, &names.tensor));
    let host = arms.iter().map(|arm| arm.host(&root, &tree, &names.field));
    // A reference to an enum without variants cannot be matched with no arms; the enum itself can.
    let this = match arms.is_empty() {
        true => quote!(*self),
        false => quote!(self),
    };

    let Names { tensor, field } = &names;
    let name = &input.ident;
    let (parameters, arguments, where_clause) = input.generics.split_for_impl();
    Ok(quote! {
        #[automatically_derived]
        impl #parameters #tree for #name #arguments #where_clause {
            fn visit_tensors(&self, #tensor: &mut dyn ::core::ops::FnMut(#root::AnyTensor)) {
                match #this { #(#visit)* }
            }

            fn map_tensors(
                &self,
                #tensor: &mut dyn ::core::ops::FnMut(#root::AnyTensor) -> #root::AnyTensor,
            ) -> Self {
                match #this { #(#map)* }
            }

            fn visit_host_fields(&self, #field: &mut dyn ::core::ops::FnMut(#root::HostField)) {
                match #this { #(#host)* }
            }
        }
    })
}

/// The parameters of the methods, invisible to the user's locals and they to them. Hygiene ends at items: a parameter by
/// the name of a static of the user's is an error, hence the underscores.
struct Names {
    tensor: Ident,
    field: Ident,
}

impl Names {
    fn new() -> Self {
        Self {
            tensor: Ident::new("__tensor", Span::mixed_site()),
            field: Ident::new("__field", Span::mixed_site()),
        }
    }
}

/// A struct, or a variant of an enum.
struct Arm<'a> {
    /// `Self` or `Self::Variant`.
    constructor: TokenStream,
    variant: Option<&'a Ident>,
    fields: Vec<Field<'a>>,
}

struct Field<'a> {
    member: Member,
    bound: Ident,
    ty: &'a Type,
}

fn arms(data: &Data) -> Vec<Arm<'_>> {
    match data {
        Data::Struct(data) => vec![Arm {
            constructor: quote!(Self),
            variant: None,
            fields: fields(&data.fields),
        }],
        Data::Enum(data) => data
            .variants
            .iter()
            .map(|variant| {
                let name = &variant.ident;
                Arm {
                    constructor: quote!(Self::#name),
                    variant: Some(name),
                    fields: fields(&variant.fields),
                }
            })
            .collect(),
        Data::Union(_) => Vec::new(), // refused before
    }
}

fn fields(fields: &Fields) -> Vec<Field<'_>> {
    let members = fields.members().zip(fields).enumerate();
    members
        .map(|(index, (member, field))| Field {
            member,
            bound: format_ident!("__field_{index}", span = Span::mixed_site()),
            ty: &field.ty,
        })
        .collect()
}

impl Arm<'_> {
    fn visit(&self, tree: &Path, tensor: &Ident) -> TokenStream {
        let calls = self
            .fields
            .iter()
            .map(|field| field.call(tree, "visit_tensors", tensor));
        let pattern = self.pattern();
        quote!(#pattern => { #(#calls;)* })
    }

    fn map(&self, tree: &Path, tensor: &Ident) -> TokenStream {
        let values = self.fields.iter().map(|field| {
            let (member, call) = (&field.member, field.call(tree, "map_tensors", tensor));
            quote!(#member: #call)
        });
        let (pattern, constructor) = (self.pattern(), &self.constructor);
        quote!(#pattern => #constructor { #(#values,)* },)
    }

    fn host(&self, root: &Path, tree: &Path, into: &Ident) -> TokenStream {
        let variant = self.variant.map(|variant| {
            let name = variant.unraw().to_string();
            quote!(#into(#root::HostField::Text(::core::convert::From::from(#name)));)
        });
        let calls = self
            .fields
            .iter()
            .map(|field| field.call(tree, "visit_host_fields", into));
        let pattern = self.pattern();
        quote!(#pattern => { #variant #(#calls;)* })
    }

    /// With braces and members, which is a pattern of tuples and units too.
    fn pattern(&self) -> TokenStream {
        let bindings = self
            .fields
            .iter()
            .map(|Field { member, bound, .. }| quote!(#member: #bound));
        let constructor = &self.constructor;
        quote!(#constructor { #(#bindings,)* })
    }
}

impl Field<'_> {
    /// A call of the trait's `method` on the field.
    ///
    /// The trait and the type stand at the field's type alone: a type that is no `TensorTree` is reported there, in the
    /// same words for each method, of which rustc prints one.
    fn call(&self, tree: &Path, method: &str, argument: &Ident) -> TokenStream {
        let Self { bound, ty, .. } = self;
        let span = ty.span();
        let tree = respanned(tree.to_token_stream(), span);
        let method = Ident::new(method, span);
        let of_field = quote_spanned!(span=> <#ty as #tree>::#method);
        quote!(#of_field(#bound, #argument))
    }
}

fn respanned(tokens: TokenStream, span: Span) -> TokenStream {
    let at = |mut token: TokenTree| {
        token.set_span(span);
        token
    };
    tokens.into_iter().map(at).collect()
}
