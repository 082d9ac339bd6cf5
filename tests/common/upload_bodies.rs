//! Bodies of the tests of `Uploader`: host data that is sent ahead of the step.

use crate::common::{
    Batch, Eager, LR, Mlp, assert_same, batch, bits, graphed, host_batch, required, twins, word,
};
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_cuda_graph::{AnyTensor, GraphConfig, HostTensor, UploadError, Uploaded, Uploader};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

fn host(index: usize) -> [HostTensor; 2] {
    let (x, y) = host_batch(index, 64);
    [HostTensor::float(x), HostTensor::int(y)]
}

fn taken(mut batch: Uploaded) -> Batch {
    let batch = (batch.float(), batch.int());
    (batch.0.expect("is next"), batch.1.expect("is next"))
}

/// A batch of one number, told apart from others by it.
fn numbered(index: usize) -> [HostTensor; 1] {
    [HostTensor::int([index as i64, -1])]
}

fn number(mut batch: Uploaded) -> usize {
    let tensor = batch.int::<1>().expect("is next");
    let values: Vec<i64> = tensor.into_data().iter::<i64>().collect();
    assert_eq!(values[1], -1);
    values[0] as usize
}

/// Shape, dtype, values and autodiff association of an uploaded tensor are those that `from_data` gives, for all that a
/// batch may hold: a step that got another tensor would train otherwise, or be another shape key.
pub fn uploaded_tensors_are_those_of_from_data(device: &Device) {
    fn data(shape: &[usize]) -> TensorData {
        let count = shape.iter().product::<usize>();
        let values = (0..count).map(|index| (index % 251) as f32 - 125.0);
        TensorData::new(values.collect::<Vec<f32>>(), shape.to_vec())
    }
    #[track_caller]
    fn same(ours: TensorData, theirs: TensorData) {
        assert_eq!(
            (ours.shape(), ours.dtype(), ours.as_bytes()),
            (theirs.shape(), theirs.dtype(), theirs.as_bytes())
        );
    }
    fn of_rank<const D: usize>(uploader: &Uploader, shape: [usize; D]) {
        let (data, device) = (data(&shape), uploader.device());
        let flags = (0..data.num_elements()).map(|index| (index % 3 == 0) as u8);
        let flags = TensorData::new(flags.collect::<Vec<u8>>(), shape);
        let batch = [
            HostTensor::float(data.clone()),
            HostTensor::int(data.clone()),
            HostTensor::bool(flags.clone()),
            HostTensor::float(data.clone()).with_dtype(DType::F16),
            HostTensor::int(data.clone()).with_dtype(DType::I64),
            HostTensor::float(data.clone().convert_dtype(DType::F64)),
        ];
        let mut batch = uploader.upload(batch).expect("uploads");
        let x = batch.float::<D>().expect("is next");
        assert_eq!(x.device(), *device);
        assert_eq!(x.is_autodiff(), device.is_autodiff());
        assert!(!x.is_require_grad());
        // What computes with it, and not only a read, finds it where it is.
        let theirs = Tensor::<D>::from_data(data.clone(), device);
        same(
            (x.clone() * 2.0).into_data(),
            (theirs.clone() * 2.0).into_data(),
        );
        same(x.into_data(), theirs.into_data());
        let theirs = Tensor::<D, Int>::from_data(data.clone(), device);
        same(
            batch.int::<D>().expect("is next").into_data(),
            theirs.into_data(),
        );
        let flag = batch.bool::<D>().expect("is next");
        assert_eq!(flag.is_autodiff(), device.is_autodiff());
        let theirs = Tensor::<D, Bool>::from_data(flags, device);
        same(flag.into_data(), theirs.into_data());
        let theirs = Tensor::<D>::from_data(data.clone(), (device, DType::F16));
        same(
            batch.float::<D>().expect("is next").into_data(),
            theirs.into_data(),
        );
        let theirs = Tensor::<D, Int>::from_data(data.clone(), (device, DType::I64));
        same(
            batch.int::<D>().expect("is next").into_data(),
            theirs.into_data(),
        );
        let rest = batch.into_tensors();
        assert_eq!(rest.len(), 1);
        let theirs = AnyTensor::from_float(Tensor::<D>::from_data(data, device));
        assert_eq!(rest[0].spec(), theirs.spec());
    }
    for device in [
        device.clone(),
        device.clone().autodiff().gradient_checkpointing(),
    ] {
        let uploader = Uploader::new(&device);
        of_rank(&uploader, [1]);
        of_rank(&uploader, [1023]);
        of_rank(&uploader, [7, 3]);
        of_rank(&uploader, [64, 33]);
        of_rank(&uploader, [5, 1, 129]);
        of_rank(&uploader, [2, 3, 5, 7]);
        // No elements: as from_data, a tensor without a value.
        let mut empty = uploader
            .upload([HostTensor::float(data(&[0, 4])), HostTensor::int([3])])
            .expect("uploads");
        assert_eq!(empty.float::<2>().expect("is next").dims(), [0, 4]);
        assert_eq!(empty.int::<1>().expect("is next").into_scalar::<i64>(), 3);
        // Data that was read from a tensor, before anything looked at it.
        let read = Tensor::<1>::from_data([1.5f32, 2.5], &device).into_data();
        let mut again = uploader.upload([HostTensor::float(read)]).expect("uploads");
        let again = again.float::<1>().expect("is next").into_data();
        assert_eq!(again.iter::<f32>().collect::<Vec<f32>>(), [1.5, 2.5]);
    }
}

/// Forty steps on batches that were uploaded ahead leave the bits of forty steps on those of `from_data`, replays and all.
pub fn uploaded_batches_train_as_those_of_from_data(device: &Device) {
    for ahead in [1, 2, 5] {
        let (device, model, twin) = twins::<Mlp>(device);
        let mut step = graphed(model, required(), &device);
        let mut other = graphed(twin, required(), &device);
        let expected = |index: usize| match index {
            0..3 => "warming-up",
            3 => "recorded",
            _ => "replayed",
        };
        let batches = Uploader::new(&device).prefetch((0..40).map(host), ahead);
        let mut steps = 0;
        for (index, uploaded) in batches.enumerate() {
            let out = step.run(taken(uploaded.expect("uploads")), LR);
            assert_eq!(word(&out.expect("runs")), expected(index), "step {index}");
            steps += 1;
        }
        assert_eq!(steps, 40);
        // Not in turns: a rehearsal of one would make that of the other stale.
        for index in 0..40 {
            let out = other.run(batch(&device, index, 64), LR).expect("runs");
            assert_eq!(word(&out), expected(index), "step {index} on from_data's");
        }
        let (ours, theirs) = (bits(&step.model()), bits(&other.model()));
        assert_same(&ours, &theirs, format_args!("{ahead} ahead"));
    }
}

/// Neither a consumer nor a source that is slow loses a batch or sees one twice, and no more are drawn than were asked for.
pub fn uploaded_batches_come_in_order_each_once(device: &Device) {
    let uploader = Uploader::new(device);
    let pause = || std::thread::sleep(Duration::from_millis(5));
    for (ahead, slow_source) in [(1, true), (3, true), (1, false), (3, false), (0, false)] {
        let drawn = Arc::new(AtomicUsize::new(0));
        let source = (0..30).map({
            let drawn = drawn.clone();
            move |index| {
                drawn.fetch_add(1, Ordering::SeqCst);
                if slow_source {
                    pause();
                }
                numbered(index)
            }
        });
        let batches = uploader.prefetch(source, ahead);
        let mut found = Vec::new();
        for uploaded in batches {
            let uploaded = uploaded.expect("uploads");
            if !slow_source {
                pause();
            }
            found.push(number(uploaded));
            let ahead = drawn.load(Ordering::SeqCst) - found.len();
            assert!(ahead <= 6, "{ahead} batches are drawn ahead");
        }
        assert_eq!(found, (0..30).collect::<Vec<usize>>());
        assert_eq!(drawn.load(Ordering::SeqCst), 30);
    }
}

/// A training that ends early leaves no thread behind that goes on to fill the device.
pub fn an_upload_thread_ends_with_its_consumer(device: &Device) {
    struct Ended(Arc<AtomicBool>);
    impl Drop for Ended {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    for taken in [0, 2] {
        let ended = Arc::new(AtomicBool::new(false));
        let drawn = Arc::new(AtomicUsize::new(0));
        let source = (0..).map({
            let (guard, drawn) = (Ended(ended.clone()), drawn.clone());
            move |index| {
                let _ = &guard;
                drawn.fetch_add(1, Ordering::SeqCst);
                numbered(index)
            }
        });
        let mut batches = Uploader::new(device).prefetch(source, 2);
        for index in 0..taken {
            let uploaded = batches.next().expect("goes on").expect("uploads");
            assert_eq!(number(uploaded), index);
        }
        drop(batches);
        let started = Instant::now();
        while !ended.load(Ordering::SeqCst) {
            assert!(started.elapsed() < Duration::from_secs(20), "it goes on");
            std::thread::sleep(Duration::from_millis(2));
        }
        let drawn = drawn.load(Ordering::SeqCst);
        assert!(drawn <= taken + 3, "{drawn} were drawn for {taken}");
    }
}

/// A source that fails is no short epoch: all batches before come, then its error or its panic.
pub fn a_failed_source_of_uploads_reaches_the_consumer(device: &Device) {
    let uploader = Uploader::new(device);
    let source = (0..9).map(|index| match index {
        4 => Err(std::io::Error::other("the disk is gone")),
        _ => Ok(numbered(index)),
    });
    let mut batches = uploader.prefetch(source, 2);
    for index in 0..4 {
        let uploaded = batches.next().expect("goes on").expect("uploads");
        assert_eq!(number(uploaded), index);
    }
    let error = batches.next().expect("says it").expect_err("is an error");
    assert!(
        matches!(&error, UploadError::Source { batch: 4, .. }),
        "{error:?}"
    );
    assert!(error.to_string().contains("the disk is gone"), "{error}");
    assert!(batches.next().is_none());

    let source = (0..9).map(|index| {
        assert!(index < 3, "no batch {index}");
        numbered(index)
    });
    let mut batches = uploader.prefetch(source, 2);
    for index in 0..3 {
        let uploaded = batches.next().expect("goes on").expect("uploads");
        assert_eq!(number(uploaded), index);
    }
    let panic = catch_unwind(AssertUnwindSafe(|| batches.next())).expect_err("panics");
    let words = panic.downcast_ref::<String>().expect("the source's words");
    assert_eq!(words, "no batch 3");
    assert!(batches.next().is_none());

    // A tensor that is none ends it as well.
    let none = || HostTensor::float([1.0f32]).with_dtype(DType::I32);
    let mut batches = uploader.prefetch(std::iter::once([none()]), 1);
    let error = batches.next().expect("says it").expect_err("is an error");
    assert!(
        matches!(error, UploadError::WrongDtype { index: 0, .. }),
        "{error}"
    );
    assert!(batches.next().is_none());
}

/// Uploads of several threads do not get into each other's tensors.
pub fn uploads_from_several_threads(device: &Device) {
    let uploader = Uploader::new(device);
    let (sender, uploaded) = mpsc::channel();
    let threads: Vec<_> = (0..4)
        .map(|thread: usize| {
            let (uploader, sender) = (uploader.clone(), sender.clone());
            std::thread::spawn(move || {
                for index in 0..25 {
                    let index = thread * 25 + index;
                    let batch = uploader.upload(host(index)).expect("uploads");
                    sender.send((index, batch)).expect("is awaited");
                }
            })
        })
        .collect();
    drop(sender);
    let mut found = [false; 100];
    for (index, batch) in uploaded {
        let (x, y) = taken(batch);
        let (their_x, their_y) = host_batch(index, 64);
        assert_eq!(x.into_data().as_bytes(), their_x.as_bytes(), "{index}");
        let labels: Vec<i64> = y.into_data().iter::<i64>().collect();
        assert_eq!(labels, their_y.iter::<i64>().collect::<Vec<i64>>());
        assert!(!found[index]);
        found[index] = true;
    }
    assert_eq!(found, [true; 100]);
    threads
        .into_iter()
        .for_each(|thread| thread.join().expect("works"));
}

/// A step is recorded while another thread uploads without a pause. Each recording seals, or its step runs eagerly and says
/// why; the state is that of eager steps, and no upload lands in a recording.
pub fn recording_beside_uploads(device: &Device, captures: usize) {
    let (device, model, twin) = twins::<Mlp>(device);
    let mut eager = Eager::new(twin, &device);
    let mut step = graphed(model, GraphConfig::new(), &device);
    let stop = Arc::new(AtomicBool::new(false));
    let uploads = Arc::new(AtomicUsize::new(0));
    let uploading = std::thread::spawn({
        let (stop, uploads, uploader) = (stop.clone(), uploads.clone(), Uploader::new(&device));
        move || {
            let mut kept = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let index = uploads.fetch_add(1, Ordering::Relaxed);
                let uploaded = uploader.upload(host(index)).expect("uploads");
                if index % 16 == 0 {
                    kept.push((index, uploaded));
                }
            }
            kept
        }
    });
    let ahead = Uploader::new(&device).prefetch((0..captures * 5).map(host), 2);
    let (mut sealed, mut steps) = (0, 0);
    for (index, uploaded) in ahead.enumerate() {
        let out = step
            .run(taken(uploaded.expect("uploads")), LR)
            .expect("runs");
        sealed += usize::from(word(&out) == "recorded");
        let expected: &[&str] = match index % 5 {
            0..3 => &["warming-up"],
            3 => &["recorded", "refused", "stream-shared"],
            _ => &["replayed", "recorded", "refused", "stream-shared"],
        };
        assert!(expected.contains(&word(&out)), "{}", out.path);
        eager.step(batch(&device, index, 64), LR);
        if index % 5 == 4 {
            step.release();
        }
        steps += 1;
    }
    stop.store(true, Ordering::Relaxed);
    let kept = uploading.join().expect("uploads are not refused");
    assert_eq!(steps, captures * 5);
    assert_same(&bits(&step.model()), &bits(&eager.model), "at the end");
    for (index, uploaded) in kept {
        let (x, _) = taken(uploaded);
        let theirs = host_batch(index, 64).0;
        assert_eq!(
            x.into_data().as_bytes(),
            theirs.as_bytes(),
            "upload {index}"
        );
    }
    println!(
        "{sealed} of {captures} sealed beside {} uploads",
        uploads.load(Ordering::Relaxed)
    );
    assert!(sealed > 0, "{}", step.report());
}
