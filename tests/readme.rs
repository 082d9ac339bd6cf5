//! The README shows what is compiled.

/// The README's examples are the files that the build compiles and the crate's documentation includes.
#[test]
fn the_readme_shows_the_examples_that_are_compiled() {
    let readme = include_str!("../README.md");
    let quickstart = include_str!("../crates/burn-cuda-graph/examples/quickstart.rs");
    assert!(
        readme.contains(quickstart),
        "README.md differs from quickstart.rs"
    );
    let feeding = include_str!("../crates/burn-cuda-graph/examples/feeding.rs");
    let main = feeding.find("    // Any iterator").map(|at| &feeding[at..]);
    let loop_ends = main.and_then(|main| main.find("    println!").map(|end| &main[..end]));
    let shown: String = (loop_ends.expect("feeding.rs has its loop").lines())
        .map(|line| format!("{}\n", line.strip_prefix("    ").unwrap_or(line)))
        .collect();
    assert!(readme.contains(&shown), "README.md differs from feeding.rs");
}
