//! `#[derive(TensorTree)]` on Burn's tensors, and what a graphed step makes of derived batches.
//!
//! What the derive accepts and refuses is tested in its own crate, against tensors without a backend.
#![cfg(feature = "flex")]

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_cuda_graph::{AnyTensor, HostField, TensorKind, TensorTree};

#[derive(TensorTree)]
struct Batch<T> {
    images: Tensor<4>,
    labels: Labels,
    weights: Option<Tensor<1>>,
    views: Vec<(Tensor<2>, Tensor<2, Bool>)>,
    extra: T,
    crop: usize,
}

#[derive(TensorTree)]
enum Labels {
    Hard(Tensor<1, Int>),
    Soft {
        probabilities: Tensor<2>,
        temperature: f64,
    },
    None,
}

#[derive(TensorTree)]
struct Noise(Tensor<1>, &'static str);

fn float<const D: usize>(value: f32, shape: [usize; D]) -> Tensor<D> {
    Tensor::full(shape, value, &Device::flex())
}

fn batch(labels: Labels, weights: Option<Tensor<1>>) -> Batch<[Noise; 2]> {
    let mask = |value: f32| float(value, [1, 2]).greater_elem(3.5);
    Batch {
        images: float(1.0, [2, 3, 4, 5]),
        labels,
        weights,
        views: vec![
            (float(2.0, [1, 1]), mask(3.0)),
            (float(4.0, [1, 1]), mask(5.0)),
        ],
        extra: [Noise(float(6.0, [1]), "a"), Noise(float(7.0, [1]), "b")],
        crop: 32,
    }
}

fn soft() -> Labels {
    Labels::Soft {
        probabilities: float(0.5, [2, 2]),
        temperature: 2.0,
    }
}

fn hard() -> Labels {
    Labels::Hard(Tensor::from_ints([8, 9], &Device::flex()))
}

fn read(tensor: AnyTensor) -> TensorData {
    match tensor.kind() {
        TensorKind::Float => tensor.into_float::<1>().into_data(),
        TensorKind::Int => tensor.into_int::<1>().into_data(),
        TensorKind::Bool => tensor.into_bool::<1>().into_data(),
    }
}

fn visited<T: TensorTree>(tree: &T) -> Vec<TensorData> {
    let mut tensors = Vec::new();
    tree.visit_tensors(&mut |tensor| tensors.push(read(tensor)));
    tensors
}

fn host<T: TensorTree>(tree: &T) -> Vec<HostField> {
    let mut fields = Vec::new();
    tree.visit_host_fields(&mut |field| fields.push(field));
    fields
}

fn text(text: &str) -> HostField {
    HostField::Text(text.into())
}

/// The order of the fields is that of the declaration, through every kind of nesting: the static inputs of a graph are
/// numbered by it, and a tensor in another place would be copied into another tensor's buffer.
#[test]
fn a_batch_is_visited_and_mapped_in_the_order_of_its_declaration() {
    let batch = batch(soft(), Some(float(0.25, [2])));
    let expected = [
        batch.images.to_data(),
        float(0.5, [2, 2]).to_data(),
        float(0.25, [2]).to_data(),
        batch.views[0].0.to_data(),
        batch.views[0].1.to_data(),
        batch.views[1].0.to_data(),
        batch.views[1].1.to_data(),
        float(6.0, [1]).to_data(),
        float(7.0, [1]).to_data(),
    ];
    assert_eq!(visited(&batch), expected);

    let mut mapped = Vec::new();
    let copy = batch.map_tensors(&mut |tensor| {
        mapped.push(read(tensor.clone()));
        match tensor.kind() {
            TensorKind::Float => AnyTensor::from_float(tensor.into_float::<1>().neg()),
            _ => tensor,
        }
    });
    assert_eq!(mapped, expected);
    assert_eq!(host(&copy), host(&batch));
    assert_eq!(copy.images.to_data(), batch.images.clone().neg().to_data());
    assert_eq!(copy.views[1].0.to_data(), float(-4.0, [1, 1]).to_data());
    assert_eq!(copy.views[1].1.to_data(), batch.views[1].1.to_data());
    assert_eq!(copy.extra[1].0.to_data(), float(-7.0, [1]).to_data());
    assert_eq!((copy.extra[1].1, copy.crop), ("b", 32));
}

/// What a step can branch on without a tensor of its own is in the shape key, or the graph of one branch would be
/// replayed for another.
#[test]
fn variants_lengths_and_host_values_are_host_fields() {
    let rest = |weights| {
        let noise = [text("a"), text("b"), HostField::Int(32)];
        [HostField::Bool(weights), HostField::Int(2)]
            .into_iter()
            .chain(noise)
    };
    let temperature = HostField::Bits(2.0f64.to_bits());
    let fields = |labels: &[HostField], weights| {
        labels
            .iter()
            .cloned()
            .chain(rest(weights))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        host(&batch(soft(), Some(float(0.25, [2])))),
        fields(&[text("Soft"), temperature], true)
    );
    assert_eq!(host(&batch(hard(), None)), fields(&[text("Hard")], false));
    assert_eq!(
        host(&batch(Labels::None, None)),
        fields(&[text("None")], false)
    );
}

/// Two variants of the same shapes are two graphs, each replayed for its own; without the variant in the key, the first
/// one recorded would be replayed for both, and half of the steps would go the wrong way in silence. The outputs of
/// replays are made by the derive as well.
#[cfg(feature = "wgpu")]
#[test]
#[serial_test::serial]
fn a_graph_is_replayed_for_the_variant_that_it_was_recorded_for() {
    use burn::nn::{Initializer, Linear, LinearConfig};
    use burn::optim::{GradientsParams, SgdConfig};
    use burn_cuda_graph::{GraphConfig, GraphedStep, StepPath, StepRate, Training};

    #[derive(TensorTree)]
    enum Direction {
        Down(Tensor<2>),
        Up { x: Tensor<2> },
    }

    #[derive(TensorTree)]
    struct Output {
        sum: Tensor<1>,
        direction: &'static str,
    }

    let device = Device::wgpu(Default::default()).autodiff();
    let model = LinearConfig::new(2, 1)
        .with_bias(false)
        .with_initializer(Initializer::Ones)
        .init(&device);
    let training = Training::new(model, SgdConfig::new().init());
    let step = |training: &mut Training<Linear>, batch: Direction, lr: StepRate| {
        let (x, sign, direction) = match batch {
            Direction::Down(x) => (x, 1.0, "down"),
            Direction::Up { x } => (x, -1.0, "up"),
        };
        let sum = training.model().forward(x).sum();
        let grads = (sum.clone() * sign).backward();
        training.optimize(lr, GradientsParams::from_grads(grads, training.model()));
        Output { sum, direction }
    };
    let mut step = GraphedStep::new(training, GraphConfig::new(), step).expect("has a state");

    let mut weight = 1.0;
    for index in 0..24 {
        let x = Tensor::ones([4, 2], &device);
        // Thrice down, once up.
        let (batch, direction) = match index % 4 {
            3 => (Direction::Up { x }, "up"),
            _ => (Direction::Down(x), "down"),
        };
        let taken = step.run(batch, 0.25).expect("runs");
        if index >= 20 {
            assert_eq!(taken.path, StepPath::Replayed, "step {index}");
        }
        // Exact: small integers and a quarter. Of the eight ones in `x`, each weight meets four.
        let sum: f32 = taken.output.sum.into_scalar();
        assert_eq!(
            (sum, taken.output.direction),
            (8.0 * weight, direction),
            "step {index}"
        );
        weight += if direction == "up" { 1.0 } else { -1.0 };
    }
    let report = step.report();
    assert_eq!(report.captures, 2, "{report}");
    let mut fields: Vec<_> = report.entries.into_iter().map(|it| it.key.host).collect();
    fields.sort_by_key(|fields| format!("{fields:?}"));
    assert_eq!(fields, [[text("Down")], [text("Up")]]);
}
