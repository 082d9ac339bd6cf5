//! Bodies of the tests of threads that share the device's stream with a step.

use crate::common::{Eager, LR, Mlp, assert_same, batch, bits, closure, graphed, twins, word};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, TensorData};
use burn_backend::StreamId;
use burn_cuda_graph::{GraphConfig, GraphedStep, Training};
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

/// A stream that CubeCL folds onto the same one of the device as the calling thread's.
fn stream_beside_this_one() -> StreamId {
    let streams = u64::from(CubeClRuntimeConfig::get().streaming.max_streams);
    StreamId {
        value: StreamId::current().value + streams,
    }
}

/// A thread that shares the device's stream with a step works on: nothing is recorded until it is quiet, and both get what they
/// would have got alone.
pub fn a_step_is_recorded_when_its_neighbour_is_quiet(device: &Device) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, GraphConfig::new(), &device);
    let neighbour = stream_beside_this_one();
    let work = |index: usize| {
        let device = device.clone().inner();
        let thread = std::thread::spawn(move || {
            burn_cuda_graph::tolerate_captures();
            neighbour.executes(|| {
                let x = Tensor::<1>::from_data([index as f32, 1.5], &device);
                (x * 2.0).into_data().try_into_vec::<f32>()
            })
        });
        let doubled = thread.join().expect("works").expect("is not poisoned");
        assert_eq!(doubled, [2.0 * index as f32, 3.0]);
    };
    let mut index = 0;
    let mut both = || {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        eager.step(batch(&device, index, 64), LR);
        assert_same(&bits(&step.model()), &bits(&eager.model), index);
        index += 1;
        word(&out)
    };
    for call in 0..8 {
        work(call);
        let path = both();
        let expected = if call < 3 {
            "warming-up"
        } else {
            "stream-shared"
        };
        assert_eq!(path, expected, "call {call}");
    }
    let started = Instant::now();
    loop {
        std::thread::sleep(Duration::from_millis(250));
        match both() {
            "stream-shared" => assert!(started.elapsed() < Duration::from_secs(30)),
            path => {
                assert_eq!(path, "recorded");
                break;
            }
        }
    }
    // Replays are nobody's recording.
    for call in 0..4 {
        work(call);
        assert_eq!(both(), "replayed");
    }
}

/// A neighbour that begins while a window is open: the recording is dropped, the step is taken all the same, and what the
/// neighbour launched was run once, or is an error when it is read.
pub fn a_neighbour_in_a_window_costs_the_recording(device: &Device) {
    const RECORDING: usize = 3;
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let neighbour = stream_beside_this_one();
    let inner = device.clone().inner();
    let work = |x: &Tensor<1>| x.clone() * 2.0 + 1.0;
    let x = Tensor::<1>::from_data(TensorData::new(vec![1.25f32; 512], [512]), &inner);
    drop(work(&x).into_data());
    let calls = Cell::new(0);
    let kept = RefCell::new(None);
    let hook = |_: &Tensor<1>| {
        if calls.replace(calls.get() + 1) == RECORDING {
            let (x, inner) = (x.clone(), inner.clone());
            let thread = std::thread::spawn(move || {
                burn_cuda_graph::tolerate_captures();
                neighbour.executes(|| {
                    let doubled = work(&x);
                    inner.flush().expect("flushes");
                    doubled
                })
            });
            kept.replace(Some(thread.join().expect("works")));
        }
    };
    let mut step = GraphedStep::new(
        Training::new(model, SgdConfig::new().init()),
        GraphConfig::new(),
        closure(&device, &hook),
    )
    .expect("one device");
    for index in 0..6 {
        let out = step.run(batch(&device, index, 64), LR).expect("runs");
        let expected = match index {
            0..RECORDING => "warming-up",
            _ => "stream-shared",
        };
        assert_eq!(word(&out), expected, "call {index}: {}", out.path);
        eager.step(batch(&device, index, 64), LR);
        assert_same(&bits(&step.model()), &bits(&eager.model), index);
    }
    let kept = kept.take().expect("the neighbour worked");
    let found = neighbour.executes(|| kept.try_into_data());
    match found {
        Ok(data) => assert_eq!(data.try_into_vec::<f32>().expect("f32"), [3.5; 512]),
        Err(error) => println!("the neighbour's work is an error when it is read: {error}"),
    }
}
