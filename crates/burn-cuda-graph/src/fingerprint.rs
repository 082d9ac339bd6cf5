//! What a step did, so that two steps can be compared before one is recorded.
//!
//! A recording freezes everything that is not a device buffer: a host scalar, a seed, a tensor that another one
//! replaces. None of that shows up as an error later, training just goes wrong. So warm-up steps are watched: every
//! operation they register, with shapes, dtypes and scalars, and which tensors they take from outside. Two steps
//! with the same fingerprint differ in the contents of their buffers alone, which is what a replay can follow.
//!
//! The observer is process-wide and hears every thread. A step's own operations are the ones connected, through the
//! tensors they share, to its state, its batch or its output; a loader uploading on another thread is not.

use crate::context::SlotRate;
use crate::error::FallbackReason;
use crate::lifecycle::Verdict;
use crate::shape_key::HostField;
use burn_fusion::observer::FusionObserver;
use burn_ir::{
    BaseOperationIr, FloatOperationIr, IrVisitorMut, NumericOperationIr, OperationIr, ScalarIr,
    TensorId, TensorIr, TensorStatus,
};
use cubecl_runtime::logging::LaunchObserver;
use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// The operation that makes a view of a slot.
const SLOT_OPERATION: &str = "graph_slot";

/// Collects what the fusion server registers and what the device is given, while it is installed.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    operations: Mutex<Vec<OperationIr>>,
    launches: AtomicU64,
}

impl Recorder {
    pub fn take(&self) -> Vec<OperationIr> {
        core::mem::take(&mut *self.operations.lock().unwrap_or_else(|p| p.into_inner()))
    }
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }
}

impl FusionObserver for Recorder {
    fn registered(&self, operation: &OperationIr) {
        // Drops say when the host lets go of a tensor, which may differ between two equal steps. A slot is made in the
        // first step that needs it, and is there for the next.
        let passing = match operation {
            OperationIr::Drop(_) => true,
            OperationIr::Custom(custom) => custom.id.contains(SLOT_OPERATION),
            _ => false,
        };
        if !passing {
            let mut operations = self.operations.lock().unwrap_or_else(|p| p.into_inner());
            operations.push(operation.clone());
        }
    }
    fn block_starts(&self, _block: burn_fusion::observer::BlockOperations<'_>) {}
    fn block_ran(&self) {}
}

impl LaunchObserver for Recorder {
    fn launched(&self, _kernel: &'static str) {
        self.launches.fetch_add(1, Ordering::Relaxed);
    }
}

/// The tensors of a step as the fusion server numbers them.
#[derive(Debug, Default)]
pub(crate) struct StepTensors {
    pub state_before: Vec<u64>,
    pub batch: Vec<u64>,
    pub state_after: Vec<u64>,
    pub outputs: Vec<u64>,
}

/// What one step did.
#[derive(Debug)]
pub(crate) struct Fingerprint {
    /// Its operations, tensors numbered by first appearance.
    operations: Vec<OperationIr>,
    /// Tensors from outside that are neither state nor batch: the server's id, and where it is first used.
    constants: Vec<(u64, usize)>,
    /// Tensors of the state before it.
    pub state_tensors: usize,
    /// The state before it, as numbers.
    state: Vec<u64>,
    /// State and outputs after it, as numbers: which operation result each is.
    results: Vec<u64>,
    pub launches: Option<u64>,
    /// Host values of the state and the output after it: a replay would repeat the recorded ones.
    pub host: Vec<HostField>,
    /// The learning rates of the step, by class.
    pub rates: Vec<f64>,
    /// The step asked for its rate as a number.
    pub rate_read: bool,
    /// Where the rate of each slot comes from.
    pub slots: Vec<SlotRate>,
    /// Random draws that ran on Burn's generator.
    pub escaped: u32,
    /// What to import in place of a stock optimizer that keeps tensors.
    pub replacement: Option<String>,
    pub never: Option<FallbackReason>,
}

impl Fingerprint {
    /// The fingerprint of the step that registered `operations` (and maybe others' operations among them).
    pub fn new(operations: Vec<OperationIr>, tensors: &StepTensors, launches: Option<u64>) -> Self {
        let mut operations = connected(operations, tensors);
        let never = operations.iter().find_map(refused);
        let made: HashSet<u64> = operations
            .iter()
            .flat_map(|operation| operation.outputs().map(|tensor| tensor.id.value()))
            .collect();

        let mut numbers = Numbers::default();
        let state = (tensors.state_before.iter())
            .map(|id| numbers.of(*id))
            .collect();
        for id in &tensors.batch {
            numbers.of(*id);
        }
        let mut constants = Vec::new();
        for (index, operation) in operations.iter_mut().enumerate() {
            for input in operation.inputs() {
                let id = input.id.value();
                if !numbers.known(id) && !made.contains(&id) {
                    constants.push((id, index));
                }
                numbers.of(id);
            }
            operation.visit_mut(&mut numbers);
        }
        let results = tensors
            .state_after
            .iter()
            .chain(&tensors.outputs)
            .map(|id| numbers.of(*id))
            .collect();
        Self {
            operations,
            constants,
            state_tensors: tensors.state_before.len(),
            state,
            results,
            launches,
            host: Vec::new(),
            rates: Vec::new(),
            rate_read: false,
            slots: Vec::new(),
            escaped: 0,
            replacement: None,
            never,
        }
    }

    /// For each tensor of the state: whether the operation that updates it may overwrite it. That is so where nothing
    /// uses the old value any more: every other operation that reads it, or what may be a view of it, is one that the update
    /// waits for, and neither the state nor an output after the step is such a view.
    pub fn overwritable(&self) -> Vec<bool> {
        let updates: Vec<usize> = (self.operations.iter().enumerate())
            .filter(|(_, operation)| is_update(operation))
            .map(|(index, _)| index)
            .collect();
        let waited_for: Vec<HashSet<usize>> = updates
            .iter()
            .map(|update| self.waited_for(*update))
            .collect();
        let overwritable = |number: &u64| {
            let inputs = |index: usize| self.operations[index].inputs().map(|t| t.id.value());
            let uses = |index: usize| inputs(index).filter(|input| input == number).count();
            let mut users = (0..updates.len()).filter(|at| uses(updates[*at]) > 0);
            let (Some(at), None) = (users.next(), users.next()) else {
                return false;
            };
            let (update, waited_for) = (updates[at], &waited_for[at]);
            if uses(update) > 1 || self.state.iter().filter(|other| *other == number).count() > 1 {
                return false;
            }
            let mut views = HashSet::from([*number]);
            for (index, operation) in self.operations.iter().enumerate() {
                if index == update || !inputs(index).any(|input| views.contains(&input)) {
                    continue;
                }
                if !waited_for.contains(&index) && !only_a_view(operation) {
                    return false;
                }
                if may_be_a_view(operation) {
                    views.extend(operation.outputs().map(|output| output.id.value()));
                }
            }
            // A view that the update itself takes would change under its hands.
            let taken = inputs(update).filter(|input| views.contains(input)).count();
            taken == 1 && !self.results.iter().any(|result| views.contains(result))
        };
        self.state.iter().map(overwritable).collect()
    }

    /// The operations whose results reach the operation at `index`.
    fn waited_for(&self, index: usize) -> HashSet<usize> {
        let mut needed: HashSet<u64> = (self.operations[index].inputs())
            .map(|input| input.id.value())
            .collect();
        let mut found = HashSet::new();
        for before in (0..index).rev() {
            let operation = &self.operations[before];
            if operation
                .outputs()
                .any(|output| needed.contains(&output.id.value()))
            {
                needed.extend(operation.inputs().map(|input| input.id.value()));
                found.insert(before);
            }
        }
        found
    }

    /// Compare this step with the one of the same key before it.
    pub fn compare(before: Option<&Fingerprint>, now: &Fingerprint) -> Verdict {
        if let Some(reason) = &now.never {
            return Verdict::Never(reason.clone());
        }
        let base = |fingerprint: &Fingerprint| fingerprint.rates.first().copied().unwrap_or(0.0);
        if now.rate_read {
            let after = base(now);
            let before = before.map_or(after, base);
            return Verdict::RateBaked { before, after };
        }
        if now.escaped > 0 {
            return Verdict::Differs(FallbackReason::RandomEscaped { draws: now.escaped });
        }
        let Some(before) = before else {
            return Verdict::First;
        };
        if let Some(reason) = now.first_difference(before) {
            let scalar = matches!(reason, FallbackReason::MovingScalar { .. });
            if scalar && now.rates != before.rates {
                let (before, after) = (base(before), base(now));
                return Verdict::RateBaked { before, after };
            }
            return Verdict::Differs(now.blamed(reason));
        }
        for (now_constant, before_constant) in now.constants.iter().zip(&before.constants) {
            if now_constant.0 != before_constant.0 {
                let operation = &now.operations[now_constant.1];
                let shape = operation
                    .inputs()
                    .map(|input| input.shape.iter().copied().collect())
                    .next()
                    .unwrap_or_default();
                return Verdict::Differs(now.blamed(FallbackReason::HiddenState {
                    operation: name(operation),
                    shape,
                }));
            }
        }
        Verdict::Same
    }

    /// `reason`, with the name of what to import where a stock optimizer is behind it.
    fn blamed(&self, reason: FallbackReason) -> FallbackReason {
        let hidden = matches!(
            reason,
            FallbackReason::MovingScalar { .. } | FallbackReason::HiddenState { .. }
        );
        match &self.replacement {
            Some(replacement) if hidden => FallbackReason::StockOptimizer {
                replacement: replacement.clone(),
                detail: reason.to_string(),
            },
            _ => reason,
        }
    }

    /// Whether a scalar of its operations is as `found` says.
    pub fn holds(&self, found: fn(f64) -> bool) -> bool {
        self.operations.iter().any(|operation| {
            let mut scalars = Scalars::default();
            operation.clone().visit_mut(&mut scalars);
            let is_found =
                |scalar: &ScalarIr| matches!(scalar, ScalarIr::Float(value) if found(*value));
            scalars.0.iter().any(is_found)
        })
    }

    /// The operations behind the result at place `bad` of state and output that are behind none of those at `good`: the
    /// first and the last, with their places.
    pub fn range(&self, bad: usize, good: &[usize]) -> [(usize, String); 2] {
        let behind = |place: usize| -> HashSet<usize> {
            let makers: HashMap<u64, usize> = (self.operations.iter().enumerate())
                .flat_map(|(index, operation)| {
                    let outputs = operation.outputs();
                    outputs
                        .map(move |tensor| (tensor.id.value(), index))
                        .collect::<Vec<_>>()
                })
                .collect();
            let (mut found, mut open) = (HashSet::new(), Vec::new());
            open.extend(self.results.get(place).copied());
            while let Some(id) = open.pop() {
                if let Some(&index) = makers.get(&id)
                    && found.insert(index)
                {
                    open.extend(self.operations[index].inputs().map(|t| t.id.value()));
                }
            }
            found
        };
        let all = behind(bad);
        let mut own = all.clone();
        for place in good {
            for index in behind(*place) {
                own.remove(&index);
            }
        }
        let suspects = if own.is_empty() { all } else { own };
        let name_of = |index: Option<&usize>| match index {
            Some(index) => (*index, name(&self.operations[*index])),
            None => (0, "none: the step left it as it was".to_string()),
        };
        [
            name_of(suspects.iter().min()),
            name_of(suspects.iter().max()),
        ]
    }

    fn first_difference(&self, before: &Fingerprint) -> Option<FallbackReason> {
        if self.state_tensors != before.state_tensors {
            return Some(FallbackReason::StateGrew {
                before: before.state_tensors,
                after: self.state_tensors,
            });
        }
        let ended = || "the end of the step".to_string();
        for index in 0..self.operations.len().max(before.operations.len()) {
            match (before.operations.get(index), self.operations.get(index)) {
                (Some(old), Some(new)) if old == new => {}
                (Some(old), Some(new)) => {
                    let (mut old_scalars, mut new_scalars) =
                        (Scalars::default(), Scalars::default());
                    let (mut old_bare, mut new_bare) = (old.clone(), new.clone());
                    old_bare.visit_mut(&mut old_scalars);
                    new_bare.visit_mut(&mut new_scalars);
                    if old_bare == new_bare {
                        let moved = old_scalars
                            .0
                            .iter()
                            .zip(&new_scalars.0)
                            .find(|(a, b)| a != b);
                        return Some(FallbackReason::MovingScalar {
                            operation: name(new),
                            index,
                            before: moved.map(|(a, _)| scalar(a)).unwrap_or_default(),
                            after: moved.map(|(_, b)| scalar(b)).unwrap_or_default(),
                        });
                    }
                    return Some(FallbackReason::UnstableOperations {
                        index,
                        before: describe(old),
                        after: describe(new),
                    });
                }
                (old, new) => {
                    return Some(FallbackReason::UnstableOperations {
                        index,
                        before: old.map_or_else(ended, describe),
                        after: new.map_or_else(ended, describe),
                    });
                }
            }
        }
        if let Some(reason) = moved_rate(&before.slots, &self.slots) {
            return Some(reason);
        }
        if self.host != before.host {
            let pairs = before.host.iter().zip(&self.host);
            let moved = pairs.into_iter().find(|(old, new)| old != new);
            let (old, new) = moved.map_or(("none".into(), "more".into()), |(old, new)| {
                (old.to_string(), new.to_string())
            });
            return Some(FallbackReason::UnstableOperations {
                index: self.operations.len(),
                before: format!("host value {old} of the state or output"),
                after: format!("host value {new}"),
            });
        }
        let pairs = before.results.iter().zip(&self.results).enumerate();
        let moved = pairs.clone().find(|(_, (old, new))| old != new);
        let (place, (old, new)) = moved?;
        Some(FallbackReason::UnstableOperations {
            index: self.operations.len(),
            before: format!("state or output tensor {place} was the step's tensor {old}"),
            after: format!("tensor {new}"),
        })
    }
}

/// How the rates behind two steps' slots differ.
fn moved_rate(before: &[SlotRate], now: &[SlotRate]) -> Option<FallbackReason> {
    if before == now {
        return None;
    }
    let told = |rate: Option<&SlotRate>| match rate {
        Some(SlotRate::Constant(rate)) => format!("{rate}"),
        Some(SlotRate::Class { scale, .. }) => format!("the step's, times {scale}"),
        None => "none".to_string(),
    };
    let index = (0..before.len().max(now.len()))
        .find(|index| before.get(*index) != now.get(*index))
        .unwrap_or(0);
    Some(FallbackReason::MovingScalar {
        operation: "a scalar that an optimizer computes from its learning rate".into(),
        index,
        before: told(before.get(index)),
        after: told(now.get(index)),
    })
}

/// A reason why no recording can hold this operation.
fn refused(operation: &OperationIr) -> Option<FallbackReason> {
    let output = operation.outputs().next();
    let shape = || {
        output
            .map(|out| out.shape.iter().copied().collect())
            .unwrap_or_default()
    };
    match operation {
        OperationIr::Float(_, FloatOperationIr::Random(_))
        | OperationIr::NumericFloat(_, NumericOperationIr::IntRandom(_))
        | OperationIr::NumericInt(_, NumericOperationIr::IntRandom(_))
            if !crate::random::registered() =>
        {
            Some(FallbackReason::RandomOperation {
                operation: name(operation),
                shape: shape(),
            })
        }
        OperationIr::Init(_) => Some(FallbackReason::HostData {
            dtype: output
                .map(|out| format!("{:?}", out.dtype))
                .unwrap_or_default(),
            shape: shape(),
        }),
        OperationIr::Distributed(_) => Some(FallbackReason::Refused {
            detail: format!("the step runs a collective operation ({})", name(operation)),
        }),
        _ => None,
    }
}

/// The operations that share tensors, directly or through others, with the step's own tensors.
fn connected(operations: Vec<OperationIr>, tensors: &StepTensors) -> Vec<OperationIr> {
    let mut users: HashMap<u64, Vec<usize>> = HashMap::new();
    for (index, operation) in operations.iter().enumerate() {
        for tensor in operation.inputs().chain(operation.outputs()) {
            users.entry(tensor.id.value()).or_default().push(index);
        }
    }
    let mut reached = vec![false; operations.len()];
    let mut seen: HashSet<u64> = HashSet::new();
    let mut open: Vec<u64> = tensors
        .state_before
        .iter()
        .chain(&tensors.batch)
        .chain(&tensors.state_after)
        .chain(&tensors.outputs)
        .copied()
        .collect();
    while let Some(id) = open.pop() {
        if !seen.insert(id) {
            continue;
        }
        for &index in users.get(&id).into_iter().flatten() {
            if !core::mem::replace(&mut reached[index], true) {
                let operation = &operations[index];
                open.extend(
                    operation
                        .inputs()
                        .chain(operation.outputs())
                        .map(|t| t.id.value()),
                );
            }
        }
    }
    operations
        .into_iter()
        .zip(reached)
        .filter_map(|(operation, reached)| reached.then_some(operation))
        .collect()
}

/// Whether the operation updates tensors of the state.
fn is_update(operation: &OperationIr) -> bool {
    matches!(operation, OperationIr::Custom(custom) if custom.id == crate::multi::UPDATE)
}

/// Whether the operation reads no value: its result is its input, seen otherwise.
fn only_a_view(operation: &OperationIr) -> bool {
    use BaseOperationIr::{Expand, Permute, SwapDims};
    matches!(
        operation,
        OperationIr::BaseFloat(SwapDims(_) | Permute(_) | Expand(_))
    )
}

/// Whether a result of the operation may lie in the memory of an input. Arithmetic and modules write memory of their
/// own; whatever else there is may be a reshape.
fn may_be_a_view(operation: &OperationIr) -> bool {
    !matches!(
        operation,
        OperationIr::NumericFloat(..) | OperationIr::NumericInt(..) | OperationIr::Module(..)
    )
}

/// Numbers tensors by first appearance, and forgets what does not belong to the operation itself.
#[derive(Default)]
struct Numbers(HashMap<u64, u64>);

impl Numbers {
    fn of(&mut self, id: u64) -> u64 {
        let next = self.0.len() as u64;
        *self.0.entry(id).or_insert(next)
    }
    fn known(&self, id: u64) -> bool {
        self.0.contains_key(&id)
    }
}

impl IrVisitorMut for Numbers {
    fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
        tensor.id = TensorId::new(self.of(tensor.id.value()));
        // Whether the host held another handle at this moment; the values are the same either way.
        tensor.status = TensorStatus::ReadOnly;
    }
}

/// Collects an operation's scalars and blanks them.
#[derive(Default)]
struct Scalars(Vec<ScalarIr>);

impl IrVisitorMut for Scalars {
    fn visit_scalar_mut(&mut self, scalar: &mut ScalarIr) {
        self.0.push(core::mem::replace(scalar, ScalarIr::Int(0)));
    }
}

fn scalar(scalar: &ScalarIr) -> String {
    match scalar {
        ScalarIr::Float(value) => format!("{value}"),
        ScalarIr::Int(value) => format!("{value}"),
        ScalarIr::UInt(value) => format!("{value}"),
        ScalarIr::Bool(value) => format!("{value}"),
    }
}

/// The operation's name: the innermost variant, as in `MulScalar` or `Random`.
fn name(operation: &OperationIr) -> String {
    if let OperationIr::Custom(custom) = operation {
        return custom.id.clone();
    }
    let text = format!("{operation:?}");
    let head = text.split(" {").next().unwrap_or_default();
    let mut parts: Vec<&str> = head
        .split(['(', ',', ' '])
        .filter(|part| !part.is_empty())
        .collect();
    // The last part is the name of the description struct, the one before it the variant.
    parts.pop();
    parts
        .last()
        .map_or_else(|| head.to_string(), |part| part.to_string())
}

fn describe(operation: &OperationIr) -> String {
    let shapes: Vec<String> = operation
        .outputs()
        .map(|out| format!("{:?}", out.shape.iter().copied().collect::<Vec<usize>>()))
        .collect();
    format!("{} -> {}", name(operation), shapes.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{DType, Shape};
    use burn_ir::{BinaryOpIr, CustomOpIr, RandomOpIr, ScalarOpIr, SwapDimsOpIr};

    fn tensor(id: u64) -> TensorIr {
        TensorIr {
            id: TensorId::new(id),
            shape: Shape::new([2, 3]),
            status: TensorStatus::ReadWrite,
            dtype: DType::F32,
        }
    }
    fn add(lhs: u64, rhs: u64, out: u64) -> OperationIr {
        OperationIr::NumericFloat(
            DType::F32,
            NumericOperationIr::Add(BinaryOpIr {
                lhs: tensor(lhs),
                rhs: tensor(rhs),
                out: tensor(out),
            }),
        )
    }
    fn scale(lhs: u64, by: f64, out: u64) -> OperationIr {
        OperationIr::NumericFloat(
            DType::F32,
            NumericOperationIr::MulScalar(ScalarOpIr {
                lhs: tensor(lhs),
                rhs: ScalarIr::Float(by),
                out: tensor(out),
            }),
        )
    }
    fn step(state: u64, batch: u64, after: u64, operations: Vec<OperationIr>) -> Fingerprint {
        let tensors = StepTensors {
            state_before: vec![state],
            batch: vec![batch],
            state_after: vec![after],
            outputs: vec![],
        };
        Fingerprint::new(operations, &tensors, None)
    }

    /// Of a state of one tensor, whether its update may overwrite it.
    fn overwritable(operations: Vec<OperationIr>, outputs: Vec<u64>) -> bool {
        let tensors = StepTensors {
            state_before: vec![1],
            batch: vec![2],
            state_after: vec![50],
            outputs,
        };
        Fingerprint::new(operations, &tensors, None).overwritable() == [true]
    }
    fn update(param: u64, grad: u64, out: u64) -> OperationIr {
        let inputs = [tensor(3), tensor(param), tensor(grad)];
        OperationIr::Custom(CustomOpIr::new(
            crate::multi::UPDATE,
            &inputs,
            &[tensor(out)],
        ))
    }
    fn transpose(input: u64, out: u64) -> OperationIr {
        OperationIr::BaseFloat(BaseOperationIr::SwapDims(SwapDimsOpIr {
            input: tensor(input),
            out: tensor(out),
            dim1: 0,
            dim2: 1,
        }))
    }

    /// An update may overwrite a parameter only where nothing else uses the old value, itself or through a view.
    #[test]
    fn an_update_overwrites_what_nobody_reads_any_more() {
        // The gradient 10 is made of the parameter and the batch.
        let used = || add(1, 2, 10);
        assert!(overwritable(vec![used(), update(1, 10, 50)], vec![]));
        // Through a view on the way to the gradient, and a view that nobody reads.
        let views = vec![
            transpose(1, 20),
            add(20, 2, 10),
            transpose(1, 21),
            update(1, 10, 50),
        ];
        assert!(overwritable(views, vec![]));
        // The step after the update, a value that the update does not wait for, the same through a view.
        let later = vec![used(), update(1, 10, 50), scale(1, 2.0, 30)];
        assert!(!overwritable(later, vec![]));
        let beside = vec![used(), scale(1, 2.0, 30), update(1, 10, 50)];
        assert!(!overwritable(beside, vec![]));
        let beside = vec![
            used(),
            transpose(1, 20),
            scale(20, 2.0, 30),
            update(1, 10, 50),
        ];
        assert!(!overwritable(beside, vec![]));
        let later = vec![
            used(),
            transpose(1, 20),
            update(1, 10, 50),
            scale(20, 2.0, 30),
        ];
        assert!(!overwritable(later, vec![]));
        // Handed out, itself or as a view.
        assert!(!overwritable(vec![used(), update(1, 10, 50)], vec![1]));
        let returned = vec![used(), transpose(1, 20), update(1, 10, 50)];
        assert!(!overwritable(returned, vec![20]));
        // Its own gradient is a view of it, or nothing updates it.
        assert!(!overwritable(
            vec![transpose(1, 20), update(1, 20, 50)],
            vec![]
        ));
        assert!(!overwritable(vec![used(), add(1, 10, 50)], vec![]));
    }

    /// The same step on other buffers is the same; a neighbour's operations do not belong to it.
    #[test]
    fn equal_steps_compare_equal_whatever_the_neighbours_do() {
        let first = step(1, 2, 11, vec![scale(2, 0.5, 10), add(1, 10, 11)]);
        let second = step(
            11,
            3,
            21,
            vec![
                scale(900, 7.0, 901),
                scale(3, 0.5, 20),
                add(900, 901, 902),
                add(11, 20, 21),
            ],
        );
        assert_eq!(second.operations.len(), 2);
        assert_eq!(Fingerprint::compare(None, &first), Verdict::First);
        assert_eq!(Fingerprint::compare(Some(&first), &second), Verdict::Same);
    }

    /// Stock Adam's bias correction: the same operations, one scalar further.
    #[test]
    fn a_scalar_that_moves_is_named_with_both_values() {
        let first = step(1, 2, 11, vec![scale(2, 0.5, 10), add(1, 10, 11)]);
        let second = step(11, 3, 21, vec![scale(3, 0.25, 20), add(11, 20, 21)]);
        assert_eq!(
            Fingerprint::compare(Some(&first), &second),
            Verdict::Differs(FallbackReason::MovingScalar {
                operation: "MulScalar".into(),
                index: 0,
                before: "0.5".into(),
                after: "0.25".into(),
            })
        );
    }

    /// A momentum buffer outside the state: each step takes the tensor that the one before made.
    #[test]
    fn a_tensor_carried_over_outside_the_state_is_named() {
        let at = |momentum: u64, base: u64| {
            step(
                base,
                base + 1,
                base + 4,
                vec![
                    add(momentum, base + 1, base + 3),
                    add(base, base + 3, base + 4),
                ],
            )
        };
        let (first, second) = (at(3, 100), at(103, 200));
        assert!(matches!(
            Fingerprint::compare(Some(&first), &second),
            Verdict::Differs(FallbackReason::HiddenState { operation, .. }) if operation == "Add"
        ));
        // A true constant is none.
        let (first, second) = (at(3, 100), at(3, 200));
        assert_eq!(Fingerprint::compare(Some(&first), &second), Verdict::Same);
    }

    /// A branch that runs other operations, and one that keeps another result as the new state.
    #[test]
    fn other_operations_or_other_results_are_named() {
        let first = step(1, 2, 11, vec![scale(2, 0.5, 10), add(1, 10, 11)]);
        let longer = step(
            11,
            3,
            21,
            vec![scale(3, 0.5, 20), add(11, 20, 22), add(22, 20, 21)],
        );
        assert!(matches!(
            Fingerprint::compare(Some(&first), &longer),
            Verdict::Differs(FallbackReason::UnstableOperations { index: 2, .. })
        ));
        let other_result = step(11, 3, 20, vec![scale(3, 0.5, 20), add(11, 20, 21)]);
        assert!(matches!(
            Fingerprint::compare(Some(&first), &other_result),
            Verdict::Differs(FallbackReason::UnstableOperations { .. })
        ));
    }

    /// A random draw whose result reaches the state is refused at the first step; one on another thread is not ours.
    #[test]
    fn random_draws_are_refused_at_once() {
        let draw = |out: u64| {
            OperationIr::Float(
                DType::F32,
                FloatOperationIr::Random(RandomOpIr {
                    out: tensor(out),
                    distribution: burn::tensor::Distribution::Default,
                }),
            )
        };
        let drawn = step(1, 2, 11, vec![draw(10), add(1, 10, 11)]);
        assert!(matches!(
            Fingerprint::compare(None, &drawn),
            Verdict::Never(FallbackReason::RandomOperation { operation, shape }) if operation == "Random" && shape == [2, 3]
        ));
        let neighbour = step(1, 2, 11, vec![draw(500), add(1, 2, 11)]);
        assert_eq!(Fingerprint::compare(None, &neighbour), Verdict::First);
    }
}
