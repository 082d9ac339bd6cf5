//! A draw that Burn's fusion runs without asking any optimization is reported: it has Burn's numbers, not the step's.
//!
//! The limit that causes it is read from the environment at the start of a process, so the test runs itself again.
#![cfg(feature = "wgpu")]

use burn::tensor::{Distribution, Tensor};
use burn_cuda_graph::{wgpu_device, with_random};
use std::process::Command;

const LIMIT: &str = "BURN_FUSION_MAX_EXPLORATIONS";

/// The run with the limit warns, the one without does not.
#[test]
fn a_draw_outside_fusion_is_reported() {
    if std::env::var_os("RANDOM_UNFUSED_CHILD").is_some() {
        return draw_in_a_scope();
    }
    let warns = |limit: Option<&str>| {
        let mut child = Command::new(std::env::current_exe().expect("has a path"));
        child.args([
            "--exact",
            "a_draw_outside_fusion_is_reported",
            "--nocapture",
        ]);
        child.env("RANDOM_UNFUSED_CHILD", "1").env_remove(LIMIT);
        child.envs(limit.map(|limit| (LIMIT, limit)));
        let output = child.output().expect("runs");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}");
        text.contains("ran outside Burn's fusion")
    };
    assert!(warns(Some("0")));
    assert!(!warns(None));
}

fn draw_in_a_scope() {
    env_logger::builder()
        .filter_level("warn".parse().expect("a level"))
        .init();
    let device = wgpu_device(Default::default()).expect("no operation ran before");
    let data = with_random(&device, 1, 1, || {
        Tensor::<1>::random([8], Distribution::Default, &device).into_data()
    });
    assert_eq!(data.num_elements(), 8);
}
