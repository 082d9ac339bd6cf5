//! The README shows what is compiled.

/// The README's example is the file that the build compiles and the crate's documentation includes.
#[test]
fn the_readme_shows_the_example_that_is_compiled() {
    let readme = include_str!("../README.md");
    let example = include_str!("../crates/burn-cuda-graph/examples/quickstart.rs");
    assert!(
        readme.contains(example),
        "README.md differs from quickstart.rs"
    );
}
