//! The outputs of `burn_train` as trees, so that a step made from a `TrainStep` can return them.
//!
//! They are made whole, by their fields' names: a field that a later version of Burn adds is a compile error here, not a
//! tensor that replays leave at its recorded values.

use crate::shape_key::HostField;
use crate::tensor::AnyTensor;
use crate::tree::TensorTree;
use burn_train::{
    ClassificationOutput, MultiLabelClassificationOutput, RegressionOutput, SequenceOutput,
};

macro_rules! output_tree {
    ($($output:ident { $($field:ident),* }),* $(,)?) => {
        $(impl TensorTree for $output {
            fn visit_tensors(&self, visit: &mut dyn FnMut(AnyTensor)) {
                let Self { $($field),* } = self;
                $($field.visit_tensors(visit);)*
            }
            fn map_tensors(&self, map: &mut dyn FnMut(AnyTensor) -> AnyTensor) -> Self {
                let Self { $($field),* } = self;
                Self { $($field: $field.map_tensors(map)),* }
            }
            fn visit_host_fields(&self, host: &mut dyn FnMut(HostField)) {
                let Self { $($field),* } = self;
                $($field.visit_host_fields(host);)*
            }
        })*
    };
}

output_tree!(
    ClassificationOutput {
        loss,
        output,
        targets
    },
    MultiLabelClassificationOutput {
        loss,
        output,
        targets
    },
    RegressionOutput {
        loss,
        output,
        targets
    },
    SequenceOutput {
        loss,
        logits,
        predictions,
        targets
    },
);

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::tree::{tensors_of, with_tensors};
    use burn::tensor::{Device, Int, Tensor, TensorData};

    fn float<const D: usize>(first: f32, shape: [usize; D]) -> Tensor<D> {
        int(0, shape).float() + first
    }

    fn int<const D: usize>(first: i64, shape: [usize; D]) -> Tensor<D, Int> {
        let count = shape.iter().product::<usize>() as i64;
        Tensor::<1, Int>::arange(first..first + count, &Device::flex()).reshape(shape)
    }

    fn data<T: TensorTree>(tree: &T) -> Vec<TensorData> {
        let read = |tensor: AnyTensor| tensor.read().expect("flex reads back");
        tensors_of(tree).into_iter().map(read).collect()
    }

    fn host<T: TensorTree>(tree: &T) -> Vec<HostField> {
        let mut fields = Vec::new();
        tree.visit_host_fields(&mut |field| fields.push(field));
        fields
    }

    /// The tensors of `output` are those `expected`, in that order; and with those of `other` it is `other`.
    fn check<T: TensorTree>(output: T, other: T, expected: Vec<TensorData>) {
        assert_eq!(data(&output), expected);
        assert_ne!(data(&output), data(&other));
        let mapped =
            with_tensors(&output, &tensors_of(&other), "output").expect("maps all it visits");
        assert_eq!(data(&mapped), data(&other));
        assert_eq!(host(&mapped), host(&output));
    }

    /// A field that were visited and not mapped would show the values of the recorded step for ever.
    #[test]
    fn every_tensor_of_an_output_is_visited_and_mapped() {
        let (loss, output) = (float(1.0, [1]), float(2.0, [2, 3]));
        let other = (float(-1.0, [1]), float(-2.0, [2, 3]));

        let targets = int(3, [2]);
        check(
            ClassificationOutput::new(loss.clone(), output.clone(), targets.clone()),
            ClassificationOutput::new(other.0.clone(), other.1.clone(), int(-3, [2])),
            vec![loss.to_data(), output.to_data(), targets.to_data()],
        );

        let targets = int(3, [2, 3]);
        check(
            MultiLabelClassificationOutput::new(loss.clone(), output.clone(), targets.clone()),
            MultiLabelClassificationOutput::new(other.0.clone(), other.1.clone(), int(-3, [2, 3])),
            vec![loss.to_data(), output.to_data(), targets.to_data()],
        );

        let targets = float(3.0, [2, 3]);
        check(
            RegressionOutput::new(loss.clone(), output.clone(), targets.clone()),
            RegressionOutput::new(other.0.clone(), other.1.clone(), float(-3.0, [2, 3])),
            vec![loss.to_data(), output.to_data(), targets.to_data()],
        );

        let (logits, tokens, targets) = (float(4.0, [2, 2, 3]), int(5, [2, 2]), int(6, [2, 2]));
        let other_logits = float(-4.0, [2, 2, 3]);
        check(
            SequenceOutput::new(
                loss.clone(),
                logits.clone(),
                Some(tokens.clone()),
                targets.clone(),
            ),
            SequenceOutput::new(
                other.0.clone(),
                other_logits.clone(),
                Some(int(-5, [2, 2])),
                int(-6, [2, 2]),
            ),
            vec![
                loss.to_data(),
                logits.to_data(),
                tokens.to_data(),
                targets.to_data(),
            ],
        );
        check(
            SequenceOutput::new(loss.clone(), logits.clone(), None, targets.clone()),
            SequenceOutput::new(other.0, other_logits, None, int(-6, [2, 2])),
            vec![loss.to_data(), logits.to_data(), targets.to_data()],
        );
    }

    /// The metrics are computed from the mapped value: each field must be back where it was.
    #[test]
    fn a_mapped_output_has_its_values_in_their_fields() {
        let output = SequenceOutput::new(
            float(1.0, [1]),
            float(4.0, [2, 2, 3]),
            Some(int(5, [2, 2])),
            int(6, [2, 2]),
        );
        let mapped = output.map_tensors(&mut |tensor| tensor);
        assert_eq!(mapped.loss.to_data(), output.loss.to_data());
        assert_eq!(mapped.logits.to_data(), output.logits.to_data());
        assert_eq!(mapped.targets.to_data(), output.targets.to_data());
        let tokens = |output: SequenceOutput| output.predictions.map(|tokens| tokens.to_data());
        assert_eq!(tokens(mapped), tokens(output));
    }

    /// Without predictions, an output has one tensor less: what is recorded for one is no replay of the other.
    #[test]
    fn absent_predictions_are_a_host_field() {
        let output = |tokens| {
            SequenceOutput::new(
                float(1.0, [1]),
                float(4.0, [2, 2, 3]),
                tokens,
                int(6, [2, 2]),
            )
        };
        assert_eq!(host(&output(None)), [HostField::Bool(false)]);
        assert_eq!(host(&output(Some(int(5, [2, 2])))), [HostField::Bool(true)]);
    }
}
