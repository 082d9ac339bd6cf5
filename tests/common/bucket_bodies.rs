//! Bodies of the tests of padding to buckets: sequences of many lengths, batches of many sizes.

use crate::common::{assert_same, bits};
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_cuda_graph::optim::{AdamConfig, SgdConfig};
use burn_cuda_graph::{
    Bucketing, BucketingError, Buckets, GraphConfig, GraphedStep, Report, StepError, StepPath,
    StepRate, Training, masked_mean, padding_mask,
};

const WIDTH: usize = 6;
const ROWS: usize = 3;
const LR: f64 = 0.01;

/// Inputs `[rows, positions, WIDTH]`, targets and padding mask `[rows, positions]`.
type Sequences = (Tensor<3>, Tensor<2>, Tensor<2, Bool>);

#[derive(Module, Debug)]
struct Tagger {
    hidden: Linear,
    out: Linear,
}

impl Tagger {
    fn new(device: &Device) -> Self {
        device.seed(5);
        Self {
            hidden: LinearConfig::new(WIDTH, 8).init(device),
            out: LinearConfig::new(8, 1).init(device),
        }
    }

    fn loss(&self, (x, y, mask): Sequences) -> Tensor<1> {
        let [rows, positions, _] = x.dims();
        let hidden = self.hidden.forward(x).tanh();
        let out = self.out.forward(hidden).reshape([rows, positions]);
        let error = out - y;
        masked_mean(error.clone() * error, mask)
    }
}

fn step(training: &mut Training<Tagger>, batch: Sequences, lr: StepRate) -> Tensor<1> {
    let loss = training.model().loss(batch);
    let grads = GradientsParams::from_grads(loss.backward(), training.model());
    training.optimize(lr, grads);
    loss
}

/// A reproducible number below `n`.
fn number(state: &mut u64, n: usize) -> usize {
    *state = (state.wrapping_mul(6364136223846793005)).wrapping_add(1442695040888963407);
    ((*state >> 33) % n as u64) as usize
}

/// A batch of `rows` sequences of `length`, padded to `rows_to` and `length_to` with `fill`.
fn sequences(
    device: &Device,
    seed: u64,
    [rows, length]: [usize; 2],
    [rows_to, length_to]: [usize; 2],
    fill: f32,
) -> Sequences {
    let mut state = seed ^ 0x9E37_79B9_7F4A_7C15;
    let mut value = || number(&mut state, 2001) as f32 / 1000.0 - 1.0;
    let (mut x, mut y, mut mask) = (Vec::new(), Vec::new(), Vec::new());
    // Values in the order of the batch that is not padded, whatever it is padded to.
    for row in 0..rows_to {
        for position in 0..length_to {
            let padding = row >= rows || position >= length;
            for _ in 0..WIDTH {
                x.push(if padding { fill } else { value() });
            }
            y.push(if padding { fill } else { value() });
            mask.push(padding);
        }
    }
    (
        Tensor::from_data(TensorData::new(x, [rows_to, length_to, WIDTH]), device),
        Tensor::from_data(TensorData::new(y, [rows_to, length_to]), device),
        Tensor::from_data(TensorData::new(mask, [rows_to, length_to]), device),
    )
}

fn lengths(sizes: &[usize], fill: f64) -> Bucketing {
    let buckets = Buckets::list(sizes.iter().copied()).expect("valid sizes");
    Bucketing::new(buckets)
        .pad_with(0, 1, fill)
        .pad_with(1, 1, fill)
        .pad(2, 1)
}

fn scalar(loss: &Tensor<1>) -> u32 {
    loss.clone().inner().into_scalar::<f32>().to_bits()
}

/// What a training left.
struct Trained {
    bits: Vec<Vec<u32>>,
    losses: Vec<u32>,
    report: Report,
}

/// Train on batches of these sizes, which the configuration pads.
fn train(device: &Device, config: GraphConfig, sizes: &[[usize; 2]], fill: f32) -> Trained {
    train_on(device, config, sizes, |size| size, fill)
}

/// The same on batches that are padded by hand, never recorded.
fn train_eagerly(
    device: &Device,
    sizes: &[[usize; 2]],
    padded: impl Fn([usize; 2]) -> [usize; 2],
    fill: f32,
) -> Trained {
    let config = GraphConfig::new().with_warmup(u32::MAX);
    train_on(device, config, sizes, padded, fill)
}

fn train_on(
    device: &Device,
    config: GraphConfig,
    sizes: &[[usize; 2]],
    padded: impl Fn([usize; 2]) -> [usize; 2],
    fill: f32,
) -> Trained {
    let device = device.clone().autodiff();
    let training = Training::new(Tagger::new(&device), AdamConfig::new().init());
    let mut graphed = GraphedStep::new(training, config, step).expect("the state is on one device");
    let losses = sizes.iter().enumerate().map(|(seed, size)| {
        let batch = sequences(&device, seed as u64, *size, padded(*size), fill);
        graphed.run(batch, LR).expect("runs").output
    });
    let losses: Vec<Tensor<1>> = losses.collect();
    Trained {
        bits: bits(&graphed.model()),
        losses: losses.iter().map(scalar).collect(),
        report: graphed.report(),
    }
}

fn shuffled(count: usize, longest: usize) -> Vec<[usize; 2]> {
    let mut state = 7;
    (0..count)
        .map(|_| [ROWS, 1 + number(&mut state, longest)])
        .collect()
}

/// Sequences of every length, shuffled: a graph for each bucket and no more, and the bits of eager steps on batches that were
/// padded by hand.
pub fn a_handful_of_graphs_serves_every_length(device: &Device) {
    let sizes = shuffled(60, 64);
    let buckets = [16, 32, 64];
    let config = || GraphConfig::new().with_bucketing(lengths(&buckets, 0.0));
    let to = |[rows, length]: [usize; 2]| {
        let bucket = buckets.iter().copied().find(|size| *size >= length);
        [rows, bucket.expect("none is longer")]
    };
    // The first runs tune.
    train(device, config(), &sizes, 0.0);
    train_eagerly(device, &sizes, to, 0.0);
    let ours = train(device, config(), &sizes, 0.0);
    let theirs = train_eagerly(device, &sizes, to, 0.0);
    assert_eq!(theirs.report.replayed, 0);
    assert_same(&ours.bits, &theirs.bits, "padded by buckets and by hand");
    assert_eq!(ours.losses, theirs.losses);
    let report = ours.report;
    assert_eq!(report.entries.len(), 3, "{report}");
    assert!(report.captures <= 3 && report.replayed > 30, "{report}");
    let full = sizes.iter().filter(|size| to(**size) == **size).count() as u64;
    assert_eq!(report.padded_calls, 60 - full, "{report}");
    let (all, used) = sizes.iter().fold((0, 0), |(all, used), size| {
        (all + to(*size)[1], used + size[1])
    });
    let share = report.padding_share.expect("batches were padded");
    assert!((share - (all - used) as f64 / all as f64).abs() < 1e-12);
}

/// What stands in the padding reaches neither a loss nor a parameter.
pub fn what_is_in_the_padding_does_not_matter(device: &Device) {
    let sizes = shuffled(24, 16);
    let run = |fill: f64| {
        let config = GraphConfig::new().with_bucketing(lengths(&[8, 16], fill));
        train(device, config, &sizes, 0.0)
    };
    run(0.0);
    let (zeros, others) = (run(0.0), run(3e4));
    assert!(zeros.report.replayed > 8, "{}", zeros.report);
    assert_same(&zeros.bits, &others.bits, "padding of 0 and of 30,000");
    assert_eq!(zeros.losses, others.losses);
}

/// With numbers whose sums are exact, losses and updates are those of the batches that are not padded, bit for bit, eager
/// and replayed.
pub fn padding_changes_no_exact_sum(device: &Device) {
    #[derive(Module, Debug)]
    struct Line {
        weight: Param<Tensor<1>>,
    }
    let device = device.clone().autodiff();
    let line = || Line {
        weight: Param::from_tensor(Tensor::from_data([2.0, -3.0], &device)),
    };
    let loss = |line: &Line, (x, mask): (Tensor<3>, Tensor<2, Bool>)| {
        let [rows, positions, width] = x.dims();
        let weight = line.weight.val().reshape([1, 1, width]);
        let product = (x * weight).sum_dim(2).reshape([rows, positions]);
        masked_mean(product, mask)
    };
    // Small integers, and means over a power of two of them: the gradients are multiples of 1/8 below 2, the weights, after
    // steps at a rate of 1/8, multiples of 1/64, and everything is exact in 24 bits.
    const STEPS: usize = 16;
    let batch = |index: usize| {
        let length = [4, 2][index % 2];
        let x: Vec<f32> = (0..4 * length)
            .map(|at| ((at * 7 + index * 3) % 5) as f32 - 2.0)
            .collect();
        let x = Tensor::<3>::from_data(TensorData::new(x, [2, length, 2]), &device);
        let mask = TensorData::new(vec![false; 2 * length], [2, length]);
        (x, Tensor::<2, Bool>::from_data(mask, &device))
    };
    let buckets = Buckets::list([8]).expect("valid sizes");
    let config = GraphConfig::new().with_bucketing(Bucketing::new(buckets).pad(0, 1).pad(1, 1));
    let training = Training::new(line(), SgdConfig::new().init());
    let graphed_loss = loss;
    let mut graphed = GraphedStep::new(
        training,
        config,
        move |t: &mut Training<Line>, batch: (Tensor<3>, Tensor<2, Bool>), lr: StepRate| {
            let loss = graphed_loss(t.model(), batch);
            let grads = GradientsParams::from_grads(loss.backward(), t.model());
            t.optimize(lr, grads);
            loss
        },
    )
    .expect("the state is on one device");
    let mut optimizer: ModuleOptimizer = burn::optim::SgdConfig::new().init();
    let mut eager = line();
    for index in 0..STEPS {
        let rate = 0.125;
        let theirs = loss(&eager, batch(index));
        let grads = GradientsParams::from_grads(theirs.backward(), &eager);
        eager = optimizer.step(rate, eager, grads);
        let ours = graphed.run(batch(index), rate).expect("runs");
        assert_eq!(scalar(&ours.output), scalar(&theirs), "loss {index}");
        let weights = [bits(&graphed.model()), bits(&eager)];
        assert_same(&weights[0], &weights[1], format_args!("weights {index}"));
    }
    let report = graphed.report();
    assert_eq!(report.padded_calls, STEPS as u64, "{report}");
    assert!(report.replayed > 8, "{report}");
}

/// What was computed at a masked position, were it not a number, reaches neither the mean nor a gradient; the mean of nothing
/// is 0.
pub fn a_masked_mean_takes_nothing_of_masked_positions(device: &Device) {
    let device = device.clone().autodiff();
    let mean = |values: [f32; 6], mask: [bool; 6]| {
        let values = Tensor::<1>::from_data(values, &device).require_grad();
        let mask = Tensor::<1, Bool>::from_data(mask, &device).reshape([2, 3]);
        let mean = masked_mean(values.clone().reshape([2, 3]), mask);
        let gradient = values.grad(&mean.backward()).expect("is tracked");
        let gradient = gradient.into_data().iter::<f32>().collect::<Vec<_>>();
        (mean.into_scalar::<f32>(), gradient)
    };
    let values = [1.0, f32::NAN, 3.0, f32::INFINITY, f32::NEG_INFINITY, 5.0];
    let mask = [false, true, false, true, true, true];
    assert_eq!(
        mean(values, mask),
        (2.0, vec![0.5, 0.0, 0.5, 0.0, 0.0, 0.0])
    );
    assert_eq!(mean(values, [true; 6]), (0.0, vec![0.0; 6]));
}

/// Batches of 1 to 8 rows run as one graph, and leave what eager steps on the padded ones do.
pub fn a_graph_serves_every_number_of_rows(device: &Device) {
    let mut state = 3;
    let sizes: Vec<[usize; 2]> = (0..40).map(|_| [1 + number(&mut state, 8), 5]).collect();
    let config = || {
        let buckets = Buckets::list([8]).expect("valid sizes");
        GraphConfig::new().with_bucketing(Bucketing::rows(buckets))
    };
    let to = |[_, length]: [usize; 2]| [8, length];
    train(device, config(), &sizes, 0.0);
    train_eagerly(device, &sizes, to, 0.0);
    let ours = train(device, config(), &sizes, 0.0);
    let theirs = train_eagerly(device, &sizes, to, 0.0);
    assert_same(
        &ours.bits,
        &theirs.bits,
        "rows padded by buckets and by hand",
    );
    assert_eq!(ours.losses, theirs.losses);
    let report = ours.report;
    assert_eq!((report.captures, report.entries.len()), (1, 1), "{report}");
    // Adam makes its state in the first step, which so differs from the second.
    assert_eq!((report.eager, report.replayed), (4, 35), "{report}");
}

/// A length above the largest bucket is neither cut off nor lost: it runs as it is, and the report says so. What does not fit
/// the batch is an error, and no step.
pub fn lengths_above_the_buckets_run_as_they_are(device: &Device) {
    let sizes = [[ROWS, 5], [ROWS, 11], [ROWS, 6], [ROWS, 11]];
    let config = GraphConfig::new().with_bucketing(lengths(&[8], 0.0));
    let ours = train(device, config, &sizes, 0.0);
    let to = |[rows, length]: [usize; 2]| [rows, if length > 8 { length } else { 8 }];
    let theirs = train_eagerly(device, &sizes, to, 0.0);
    assert_same(&ours.bits, &theirs.bits, "above the buckets");
    let report = ours.report;
    assert_eq!(
        (report.above_buckets, report.padded_calls),
        (2, 2),
        "{report}"
    );
    assert!(report.to_string().contains("above the largest bucket"));
    // Also where no call is within the buckets.
    let config = GraphConfig::new().with_bucketing(lengths(&[8], 0.0));
    let report = train(device, config, &[[ROWS, 9]; 3], 0.0).report;
    assert_eq!(report.padding_share, Some(0.0), "{report}");
    assert!(
        report
            .to_string()
            .contains("3 calls above the largest bucket")
    );

    let device = device.clone().autodiff();
    let training = Training::new(Tagger::new(&device), AdamConfig::new().init());
    let config = GraphConfig::new().with_bucketing(lengths(&[8], 0.0).pad(7, 1));
    let mut graphed = GraphedStep::new(training, config, step).expect("the state is on one device");
    let before = bits(&graphed.model());
    let error = graphed.run(sequences(&device, 0, [2, 3], [2, 3], 0.0), LR);
    let error = error.map(|_| ()).expect_err("there is no tensor 7");
    assert!(error.is_retryable(), "{error}");
    let none = BucketingError::NoTensor {
        tensor: 7,
        tensors: 3,
    };
    assert_eq!(error, StepError::Bucketing(none));
    assert_same(&bits(&graphed.model()), &before, "no step was taken");
    assert_eq!(graphed.report().steps(), 0);
}

/// A mask that the step makes of lengths follows them when it is replayed.
pub fn masks_follow_their_lengths(device: &Device) {
    let inner = device.clone().inner();
    let state = burn_cuda_graph::GraphedState::new(burn_cuda_graph::Inference::new(
        LinearConfig::new(2, 2).init(&inner),
    ));
    let mut state = state.expect("the state is on one device");
    let mut masked = burn_cuda_graph::GraphedFn::read_only(
        GraphConfig::new(),
        |_: &burn_cuda_graph::Inference<Linear>, (x, lengths): (Tensor<2>, Tensor<1, Int>)| {
            let [_, size] = x.dims();
            masked_mean(x, padding_mask(lengths, size))
        },
    );
    let mut path = None;
    for index in 0..8 {
        let lengths = [1 + index % 6, 6 - index % 4];
        let x: Vec<f32> = (0..12).map(|at| at as f32).collect();
        let x = Tensor::<2>::from_data(TensorData::new(x, [2, 6]), &inner);
        let given = Tensor::<1, Int>::from_data(TensorData::from(lengths), &inner);
        let output = masked.call(&mut state, (x, given)).expect("runs");
        let sum = |start: usize, length: usize| (start..start + length).sum::<usize>() as f32;
        let (a, b) = (lengths[0] as usize, lengths[1] as usize);
        let mean = (sum(0, a) + sum(6, b)) / (a + b) as f32;
        let ours = output.output.into_scalar::<f32>();
        assert!((ours - mean).abs() < 1e-5, "{index}: {ours} {mean}");
        path = Some(output.path);
    }
    assert_eq!(path, Some(StepPath::Replayed));
}
