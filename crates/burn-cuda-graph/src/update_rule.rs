//! What a kernel that updates many parameters computes for each element of one.
//!
//! The numbers are held as bits, so that rules can be compared and hashed.

/// An `f32` constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Constant(u32);

impl Constant {
    pub fn new(value: f32) -> Self {
        Self(value.to_bits())
    }
    pub fn value(self) -> f32 {
        f32::from_bits(self.0)
    }
}

/// A velocity that averages gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct VelocityRule {
    pub momentum: Constant,
    /// What a gradient is multiplied by: one minus the dampening.
    pub share: Constant,
    pub nesterov: bool,
}

/// The averages of gradients and of their squares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MomentsRule {
    pub beta_1: Constant,
    /// One minus `beta_1`.
    pub share_1: Constant,
    pub beta_2: Constant,
    /// One minus `beta_2`.
    pub share_2: Constant,
}

impl MomentsRule {
    pub fn new(beta_1: f32, beta_2: f32) -> Self {
        Self {
            beta_1: Constant::new(beta_1),
            share_1: Constant::new(1.0 - beta_1),
            beta_2: Constant::new(beta_2),
            share_2: Constant::new(1.0 - beta_2),
        }
    }
}

/// The optimizer. The scalars that move are given in the order named here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Method {
    /// Scalars: rate. State: the velocity, with one.
    Sgd { velocity: Option<VelocityRule> },
    /// Scalars: rate, factor of the first moment, epsilon. State: both moments.
    Adam { moments: MomentsRule },
    /// Scalars: rate, both corrections, and with `shrinks` the factor of the parameter. State: both moments.
    AdamW {
        moments: MomentsRule,
        epsilon: Constant,
        shrinks: bool,
    },
}

/// The update of one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Rule {
    pub method: Method,
    /// L2 penalty on the parameter.
    pub penalty: Option<Constant>,
    /// There is no state yet.
    pub first: bool,
}

/// What of a rule decides the instructions of its kernel. Its numbers are launch scalars, as in Burn's kernels: a compiler
/// that sees them may factor a sum of products, and round otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    pub method: FormMethod,
    pub penalised: bool,
    pub first: bool,
}

/// The method of a [`Form`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum FormMethod {
    Sgd { velocity: bool, nesterov: bool },
    Adam,
    AdamW { shrinks: bool },
}

/// Places of a rule's numbers.
pub(crate) mod number {
    pub const PENALTY: usize = 0;
    pub const MOMENTUM: usize = 1;
    pub const SHARE: usize = 2;
    pub const BETA_1: usize = 1;
    pub const SHARE_1: usize = 2;
    pub const BETA_2: usize = 3;
    pub const SHARE_2: usize = 4;
    pub const EPSILON: usize = 5;
}

impl Rule {
    /// Tensors of state that one parameter has after the update.
    pub fn leaves(&self) -> usize {
        match self.method {
            Method::Sgd { velocity: None } => 0,
            Method::Sgd { velocity: Some(_) } => 1,
            Method::Adam { .. } | Method::AdamW { .. } => 2,
        }
    }

    /// What decides the instructions.
    pub fn form(&self) -> Form {
        let method = match self.method {
            Method::Sgd { velocity } => FormMethod::Sgd {
                velocity: velocity.is_some(),
                nesterov: velocity.is_some_and(|velocity| velocity.nesterov),
            },
            Method::Adam { .. } => FormMethod::Adam,
            Method::AdamW { shrinks, .. } => FormMethod::AdamW { shrinks },
        };
        Form {
            method,
            penalised: self.penalty.is_some(),
            first: self.first,
        }
    }

    /// Its numbers, at the places of [`number`].
    pub fn numbers(&self) -> Vec<f32> {
        let moments =
            |rule: MomentsRule| vec![rule.beta_1, rule.share_1, rule.beta_2, rule.share_2];
        let of_method = match self.method {
            Method::Sgd { velocity: None } => Vec::new(),
            Method::Sgd {
                velocity: Some(velocity),
            } => vec![velocity.momentum, velocity.share],
            Method::Adam { moments: rule } => moments(rule),
            Method::AdamW {
                moments: rule,
                epsilon,
                ..
            } => {
                let mut numbers = moments(rule);
                numbers.push(epsilon);
                numbers
            }
        };
        let penalty = self.penalty.unwrap_or(Constant::new(0.0));
        ([penalty].into_iter().chain(of_method))
            .map(Constant::value)
            .collect()
    }

    /// Everything in it as numbers, for a description that notices when one changes.
    pub fn description(&self) -> Vec<f64> {
        let Form {
            method,
            penalised,
            first,
        } = self.form();
        let method = match method {
            FormMethod::Sgd { velocity, nesterov } => u8::from(velocity) + u8::from(nesterov),
            FormMethod::Adam => 3,
            FormMethod::AdamW { shrinks } => 4 + u8::from(shrinks),
        };
        let flags = [method, u8::from(penalised), u8::from(first)];
        (flags.into_iter().map(f64::from))
            .chain(self.numbers().into_iter().map(f64::from))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules that differ in anything are told apart by what describes them.
    #[test]
    fn descriptions_tell_rules_apart() {
        let adam = |beta_1, first, penalty: Option<f32>| Rule {
            method: Method::Adam {
                moments: MomentsRule::new(beta_1, 0.999),
            },
            penalty: penalty.map(Constant::new),
            first,
        };
        let sgd = |nesterov| Rule {
            method: Method::Sgd {
                velocity: Some(VelocityRule {
                    momentum: Constant::new(0.9),
                    share: Constant::new(1.0),
                    nesterov,
                }),
            },
            penalty: None,
            first: false,
        };
        let rules = [
            adam(0.9, false, None),
            adam(0.8, false, None),
            adam(0.9, true, None),
            adam(0.9, false, Some(0.1)),
            sgd(false),
            sgd(true),
        ];
        for (index, rule) in rules.iter().enumerate() {
            for other in &rules[..index] {
                assert_ne!(rule.description(), other.description());
            }
        }
        assert_eq!(rules.map(|rule| rule.leaves()), [2, 2, 2, 2, 1, 1]);
        let numbers = rules[3].numbers();
        assert_eq!(numbers[number::PENALTY], 0.1);
        assert_eq!(numbers[number::BETA_1], 0.9);
        assert_eq!(numbers[number::SHARE_2], 1.0 - 0.999);
        assert_eq!(rules[4].numbers()[number::MOMENTUM], 0.9);
    }
}
