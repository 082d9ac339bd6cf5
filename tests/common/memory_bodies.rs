//! Bodies of the tests of memory: what evictions give back, and that nothing grows over long runs.

use crate::common::{LR, Mlp, assert_same, batch, bits, graphed, required, twins_for, word};
use burn::tensor::{Device, Tensor};
#[cfg(feature = "cuda")]
use burn_cuda_graph::{GraphConfig, Policy};
use burn_cuda_graph::{Support, device_memory, support};

/// Bytes of memory that this process holds, where the system says so.
fn resident_bytes() -> Option<u64> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = pages.split(' ').nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

/// Bytes that the device's driver has given out.
fn used_bytes(device: &Device) -> Option<u64> {
    device.clone().inner().sync().expect("syncs");
    device_memory(device).map(|memory| memory.total_bytes - memory.free_bytes)
}

const MIB: u64 = 1 << 20;

/// Graphs that are evicted, and those that are released, give their memory back to the driver, by its own count.
pub fn evicted_graphs_give_memory_back(device: &Device) {
    let sizes = [4096, 3072, 2048, 1024];
    let (device, model, _) = twins_for::<Mlp>(device, &sizes);
    assert_eq!(
        device_memory(&device).is_some(),
        support(&device) == Support::Hardware
    );
    let run = |model: Mlp, max_graphs: usize| {
        let config = required().with_max_graphs(max_graphs);
        let mut step = graphed(model, config, &device);
        let before = used_bytes(&device);
        for (block, size) in sizes.iter().enumerate() {
            for index in 0..5 {
                step.run(batch(&device, block * 8 + index, *size), LR)
                    .expect("runs");
            }
        }
        let held = used_bytes(&device);
        let report = step.report();
        let grown = held
            .zip(before)
            .map(|(held, before)| held.saturating_sub(before));
        step.release();
        assert_eq!(step.report().bytes_held, 0);
        let left = used_bytes(&device).zip(before);
        if let Some((left, before)) = left {
            assert!(left <= before + 64 * MIB, "{left} after, {before} before");
        }
        (report, grown)
    };
    let (all, all_grown) = run(model.clone(), 4);
    let (one, one_grown) = run(model, 1);
    assert_eq!((all.graphs_held, all.evictions), (4, 0), "{all}");
    assert_eq!((one.graphs_held, one.evictions), (1, 3), "{one}");
    assert!(one.bytes_held < all.bytes_held, "{one}\n{all}");
    if let Some((all, one)) = all_grown.zip(one_grown) {
        assert!(one < all, "one graph: {one} bytes, four: {all}");
    }
}

/// Many replays, and many captures and evictions: no growth of the host's or the device's memory, and the bits of a run that
/// does the same again.
pub fn long_runs_do_not_grow(device: &Device) {
    let (replays, captures) = match support(device) {
        Support::Hardware => (100_000, 1000),
        _ => (2000, 24),
    };
    let (device, model, twin) = twins_for::<Mlp>(device, &[64, 48]);
    let batches = |size: usize| -> Vec<_> { (0..8).map(|i| batch(&device, i, size)).collect() };
    let (large, small) = (batches(64), batches(48));

    let soak = |model: Mlp| {
        let mut step = graphed(model, required(), &device);
        let mut marks = Vec::new();
        let mut last: Option<Tensor<1>> = None;
        for index in 0..replays {
            last = Some(step.run(large[index % 8].clone(), LR).expect("runs").output);
            if (index + 1) % (replays / 8) == 0 {
                marks.push((used_bytes(&device), resident_bytes()));
            }
        }
        let loss = last.map(|loss| loss.into_scalar::<f32>().to_bits());
        assert_eq!(step.report().replayed as usize, replays - 4);
        (bits(&step.model()), loss, marks)
    };
    let (first, first_loss, marks) = soak(model.clone());
    assert_no_growth(&marks, "replays");
    let (again, again_loss, _) = soak(twin);
    assert_same(&first, &again, "the same replays again");
    assert_eq!(first_loss, again_loss);

    let mut step = graphed(model, required().with_max_graphs(1), &device);
    let mut marks = Vec::new();
    for block in 0..captures {
        let batches = if block % 2 == 0 { &large } else { &small };
        // The first time a key warms up; one that was evicted is rehearsed once.
        let steps = if block < 2 { 5 } else { 3 };
        let paths: Vec<_> = (0..steps)
            .map(|index| word(&step.run(batches[index].clone(), LR).expect("runs")))
            .collect();
        assert_eq!(paths.last(), Some(&"replayed"), "block {block}: {paths:?}");
        if (block + 1) % (captures / 8) == 0 {
            marks.push((used_bytes(&device), resident_bytes()));
        }
    }
    let report = step.report();
    assert_eq!(
        (report.captures, report.evictions),
        (captures as u64, captures as u64 - 1),
        "{report}"
    );
    assert_no_growth(&marks, "captures and evictions");
}

/// From the third mark on, when everything that is kept has been made.
#[track_caller]
fn assert_no_growth(marks: &[(Option<u64>, Option<u64>)], when: &str) {
    println!("{when}: {marks:?}");
    let settled = marks[2];
    let last = marks[marks.len() - 1];
    let grown = |settled: Option<u64>, last: Option<u64>| {
        settled
            .zip(last)
            .map_or(0, |(settled, last)| last.saturating_sub(settled))
    };
    let (on_device, on_host) = (grown(settled.0, last.0), grown(settled.1, last.1));
    assert!(
        on_device <= 4 * MIB,
        "{when}: the device, by {on_device} bytes: {marks:?}"
    );
    assert!(
        on_host <= 32 * MIB,
        "{when}: the host, by {on_host} bytes: {marks:?}"
    );
}

/// With the device's memory taken by others, a step that does not fit beside the graphs has them make room, one that does not
/// fit as a graph stays eager and says why, one that does not fit at all is an error that leaves the state alone, and none is
/// lost: the parameters are those of a run with room.
#[cfg(feature = "cuda")]
pub fn short_memory_costs_graphs_and_no_step(device: &Device) {
    use burn_cuda_graph::StepError;
    use cudarc::driver::{CudaContext, CudaSlice};

    if device_memory(device).is_none() {
        return; // No driver says how much there is to take: the engine's own tests run the decisions.
    }
    let (device, model, twin) = twins_for::<Mlp>(device, &[64, 16384]);
    let small: Vec<_> = (0..6).map(|index| batch(&device, index, 64)).collect();
    let large: Vec<_> = (6..14).map(|index| batch(&device, index, 16384)).collect();
    let run = |model: Mlp, spare: Option<u64>| {
        let config = GraphConfig::new().with_policy(Policy::Fallback);
        let mut step = graphed(model, config, &device);
        let mut words = Vec::new();
        for batch in &small {
            words.push(word(&step.run(batch.clone(), LR).expect("runs")));
        }
        used_bytes(&device);
        let mut ballast: Vec<CudaSlice<u8>> = Vec::new();
        let stream = CudaContext::new(0).expect("a context").default_stream();
        if let Some(spare) = spare {
            let mut chunk = 8 << 30;
            while chunk >= MIB {
                let free = device_memory(&device).map_or(0, |memory| memory.free_bytes);
                let take = free.saturating_sub(spare).min(chunk);
                let taken = match take >= MIB {
                    true => stream.alloc_zeros(take as usize).ok(),
                    false => None,
                };
                match taken {
                    Some(slice) => ballast.push(slice),
                    None => chunk /= 2,
                }
            }
            stream.synchronize().expect("syncs");
        }
        for batch in &large {
            let output = match step.run(batch.clone(), LR) {
                Err(StepError::Uncomputed { .. }) => {
                    words.push("uncomputed");
                    // Whatever took the memory lets it go; the driver has it back when its stream is waited for.
                    ballast.clear();
                    stream.synchronize().expect("syncs");
                    step.run(batch.clone(), LR)
                }
                taken => taken,
            };
            words.push(word(&output.expect("runs")));
        }
        let report = step.report();
        println!("{spare:?} bytes left: {words:?}\n{report}");
        drop(ballast);
        stream.synchronize().expect("syncs");
        (bits(&step.model()), report)
    };
    run(model.clone(), None);
    let (roomy, report) = run(model.clone(), None);
    assert_eq!((report.steps(), report.captures), (14, 2), "{report}");
    for spare in [512, 128, 64, 32, 8] {
        let (short, report) = run(twin.clone(), Some(spare * MIB));
        assert_same(&short, &roomy, format_args!("{spare} MiB left"));
        assert_eq!(report.steps(), 14, "{report}");
    }
}

#[cfg(not(feature = "cuda"))]
pub fn short_memory_costs_graphs_and_no_step(device: &Device) {
    assert!(device_memory(device).is_none());
}
