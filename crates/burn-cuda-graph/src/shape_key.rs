//! What two steps must share to be replays of the same graph.

use crate::tensor::TensorSpec;
use serde::{Deserialize, Serialize};

/// A host value that is part of the shape key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum HostField {
    /// A flag.
    Bool(bool),
    /// An integer.
    Int(i64),
    /// The bits of a float: compared exactly.
    Bits(u64),
    /// A tag.
    Text(String),
}

impl core::fmt::Display for HostField {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            HostField::Bool(value) => write!(f, "{value}"),
            HostField::Int(value) => write!(f, "{value}"),
            HostField::Bits(bits) => write!(f, "{}", f64::from_bits(*bits)),
            HostField::Text(text) => write!(f, "{text:?}"),
        }
    }
}

/// The cache key of a sealed graph: the ordered shapes and dtypes of the batch, its host values, and what of the
/// learning rates the launches of a step have baked in.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ShapeKey {
    /// The batch's tensors, in the order of its `TensorTree`.
    pub tensors: Vec<TensorSpec>,
    /// The batch's host values.
    pub host: Vec<HostField>,
    /// Which parameters have equal rates in this step: a class for each. Empty when all have the same.
    pub rate_classes: Vec<u16>,
    /// The bits of the learning rate of each class, for a step whose launches hold it as a constant; `None` for one that
    /// reads its rates from the device.
    pub learning_rate_bits: Option<Vec<u64>>,
}

impl ShapeKey {
    /// The learning rate of the key, the base rate where there are several; `None` for a step that any rate can replay.
    pub fn learning_rate(&self) -> Option<f64> {
        let bits = self.learning_rate_bits.as_ref()?;
        bits.first().map(|bits| f64::from_bits(*bits))
    }

    /// This key for a step whose launches hold rates of these bits.
    pub(crate) fn baked(&self, learning_rate_bits: Vec<u64>) -> Self {
        Self {
            learning_rate_bits: Some(learning_rate_bits),
            ..self.clone()
        }
    }

    /// Whether `other` differs in a baked-in learning rate alone.
    pub(crate) fn differs_in_rate_only(&self, other: &ShapeKey) -> bool {
        self.learning_rate_bits != other.learning_rate_bits
            && self.tensors == other.tensors
            && self.host == other.host
    }
}

impl core::fmt::Display for ShapeKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for spec in &self.tensors {
            write!(f, "{spec} ")?;
        }
        for field in &self.host {
            write!(f, "{field} ")?;
        }
        match &self.learning_rate_bits {
            None => write!(f, "lr=any"),
            Some(bits) => {
                let rates: Vec<String> = bits
                    .iter()
                    .map(|bits| f64::from_bits(*bits).to_string())
                    .collect();
                write!(f, "lr={}", rates.join(","))
            }
        }
    }
}
