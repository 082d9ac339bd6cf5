//! What the derive accepts, and what it says to those whom it refuses.
//!
//! The expected words are in `ui/fail/*.stderr`; some are rustc's own and differ between its versions. After a change,
//! `TRYBUILD=overwrite cargo test --release -p burn-cuda-graph-derive` writes them anew: read the difference.

/// A user whose batch is refused in words that do not say which field, or what to do, is stuck.
///
/// A case in `pass` fails when it does not compile, when rustc warns, and when its own assertions do. One test, not one
/// for each folder: trybuild builds what the cases depend on once for each.
#[test]
fn every_shape_of_type_derives_and_each_refusal_says_what_to_do() {
    let cases = trybuild::TestCases::new();
    cases.pass("tests/ui/pass/*.rs");
    cases.compile_fail("tests/ui/fail/*.rs");
}
