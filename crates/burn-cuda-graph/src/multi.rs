//! Updating many parameters with one launch.
//!
//! An optimizer's update touches each element once, and a net has many parameters that are small: one launch each costs
//! more than the bytes do. So the updates of a step that follow one rule and read the same scalars are one operation of
//! Burn's fusion, and as many launches as the device's bindings and the driver's bytes of parameters ask for.
//!
//! The kernel works in place. Where a tensor's old value may still be needed, it works on a copy.

// The macro's expansion names its arguments without need.
#![allow(clippy::too_many_arguments, missing_docs)]
// A kernel's variables have a value from the beginning.
#![allow(unused_assignments)]

use crate::context;
use crate::copy::{
    MAX_POSITIONS, copy_all, groups_per_launch, launch_groups, packed, same_layout, starts,
};
use crate::pool::{Runtime, empty_packed, from_fusion, fusion_tensor, id};
use crate::tensor::{AnyTensor, TensorKind};
use crate::update_rule::{Form, FormMethod, Rule, number};
use burn::tensor::{DType, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::fusion::CubeFusionHandle;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::custom::{CustomOpIr, HandleContainer, OperationIr, ScalarIr, TensorIr};
use burn_fusion::stream::StreamId;
use burn_fusion::{ExecutionError, FusionTensor};
use cubecl::calculate_cube_count_elemwise;
use cubecl::client::Client;
use cubecl::prelude::*;

#[cube(launch)]
fn update_many<N: Size>(
    params: &mut Sequence<Box<[Vector<f32, N>]>>,
    grads: &Sequence<Box<[Vector<f32, N>]>>,
    leaves: &mut Sequence<Box<[Vector<f32, N>]>>,
    scalars: &Sequence<Box<[f32]>>,
    numbers: &Sequence<f32>,
    starts: &Sequence<u32>,
    total: u32,
    #[comptime] count: usize,
    #[comptime] form: Form,
) {
    let position = u32::cast_from(ABSOLUTE_POS);
    if position < total {
        update_among::<N>(
            params, grads, leaves, scalars, numbers, starts, position, 0usize, count, form,
        );
    }
}

/// Update one element of the parameters `low..high`, which `position` is known to be in.
#[cube]
fn update_among<N: Size>(
    params: &mut Sequence<Box<[Vector<f32, N>]>>,
    grads: &Sequence<Box<[Vector<f32, N>]>>,
    leaves: &mut Sequence<Box<[Vector<f32, N>]>>,
    scalars: &Sequence<Box<[f32]>>,
    numbers: &Sequence<f32>,
    starts: &Sequence<u32>,
    position: u32,
    #[comptime] low: usize,
    #[comptime] high: usize,
    #[comptime] form: Form,
) {
    if comptime!(high - low == 1) {
        let index = usize::cast_from(position - starts[low]);
        update_line::<N>(params, grads, leaves, scalars, numbers, index, low, form);
    } else {
        let middle = comptime!((low + high) / 2);
        if position < starts[middle] {
            update_among::<N>(
                params, grads, leaves, scalars, numbers, starts, position, low, middle, form,
            );
        } else {
            update_among::<N>(
                params, grads, leaves, scalars, numbers, starts, position, middle, high, form,
            );
        }
    }
}

#[cube]
fn read<N: Size>(from: &[Vector<f32, N>], index: usize) -> Vector<f32, N> {
    from[index]
}

#[cube]
fn write<N: Size>(to: &mut [Vector<f32, N>], index: usize, value: Vector<f32, N>) {
    to[index] = value;
}

#[cube]
fn spread<N: Size>(scalar: &[f32]) -> Vector<f32, N> {
    Vector::new(scalar[0])
}

#[cube]
fn constant<N: Size>(numbers: &Sequence<f32>, #[comptime] place: usize) -> Vector<f32, N> {
    Vector::new(numbers[place])
}

/// The average that `leaf` holds, with `term` taken in.
#[cube]
fn average<N: Size>(
    leaf: &mut [Vector<f32, N>],
    index: usize,
    term: Vector<f32, N>,
    kept: Vector<f32, N>,
    #[comptime] first: bool,
) -> Vector<f32, N> {
    let new = if comptime!(first) {
        term
    } else {
        leaf[index] * kept + term
    };
    leaf[index] = new;
    new
}

/// The operations of Burn's optimizers, in their order.
#[cube]
fn update_line<N: Size>(
    params: &mut Sequence<Box<[Vector<f32, N>]>>,
    grads: &Sequence<Box<[Vector<f32, N>]>>,
    leaves: &mut Sequence<Box<[Vector<f32, N>]>>,
    scalars: &Sequence<Box<[f32]>>,
    numbers: &Sequence<f32>,
    index: usize,
    #[comptime] which: usize,
    #[comptime] form: Form,
) {
    let param = read::<N>(&params[which], index);
    let given = read::<N>(&grads[which], index);
    let rate = spread::<N>(&scalars[0]);
    let grad = if comptime!(form.penalised) {
        param * constant::<N>(numbers, number::PENALTY) + given
    } else {
        given
    };
    let first = comptime!(form.first);
    match comptime!(form.method) {
        FormMethod::Sgd { velocity, nesterov } => {
            let direction = if comptime!(velocity) {
                let momentum = constant::<N>(numbers, number::MOMENTUM);
                // The order of a sum's operands decides which product a fused multiply-add does not round.
                let new = if comptime!(first) {
                    grad
                } else {
                    grad * constant::<N>(numbers, number::SHARE)
                        + read::<N>(&leaves[which], index) * momentum
                };
                write::<N>(&mut leaves[which], index, new);
                if comptime!(nesterov) {
                    new * momentum + grad
                } else {
                    new
                }
            } else {
                grad
            };
            write::<N>(&mut params[which], index, param - direction * rate);
        }
        FormMethod::Adam => {
            let term_1 = grad * constant::<N>(numbers, number::SHARE_1);
            let term_2 = grad * grad * constant::<N>(numbers, number::SHARE_2);
            let kept_1 = constant::<N>(numbers, number::BETA_1);
            let kept_2 = constant::<N>(numbers, number::BETA_2);
            let (leaf_1, leaf_2) = comptime!((2 * which, 2 * which + 1));
            let moment_1 = average::<N>(&mut leaves[leaf_1], index, term_1, kept_1, first);
            let moment_2 = average::<N>(&mut leaves[leaf_2], index, term_2, kept_2, first);
            let factor = spread::<N>(&scalars[1]);
            let epsilon = spread::<N>(&scalars[2]);
            let direction = moment_1 * factor / (moment_2.sqrt() + epsilon);
            write::<N>(&mut params[which], index, param - direction * rate);
        }
        FormMethod::AdamW { shrinks } => {
            let term_1 = grad * constant::<N>(numbers, number::SHARE_1);
            let term_2 = grad * grad * constant::<N>(numbers, number::SHARE_2);
            let kept_1 = constant::<N>(numbers, number::BETA_1);
            let kept_2 = constant::<N>(numbers, number::BETA_2);
            let (leaf_1, leaf_2) = comptime!((2 * which, 2 * which + 1));
            let moment_1 = average::<N>(&mut leaves[leaf_1], index, term_1, kept_1, first);
            let moment_2 = average::<N>(&mut leaves[leaf_2], index, term_2, kept_2, first);
            let root = (moment_2 / spread::<N>(&scalars[2])).sqrt();
            let bounded = root + constant::<N>(numbers, number::EPSILON);
            let direction = moment_1 / spread::<N>(&scalars[1]) / bounded;
            let decayed = if comptime!(shrinks) {
                param * spread::<N>(&scalars[3])
            } else {
                param
            };
            write::<N>(&mut params[which], index, decayed - direction * rate);
        }
    }
}

/// Units of a cube that adds up.
const UNITS: usize = 256;
/// Most cubes that add up one launch's gradients, and elements that are worth one.
const MOST_CUBES: usize = 512;
const WORTH_A_CUBE: usize = UNITS * 8;

/// The squares of all elements, added up by cube.
#[cube(launch)]
fn square_many<N: Size>(
    grads: &Sequence<Box<[Vector<f32, N>]>>,
    partials: &mut [f32],
    starts: &Sequence<u32>,
    total: u32,
    #[comptime] count: usize,
    #[comptime] units: usize,
) {
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let step = u32::cast_from(CUBE_COUNT * comptime!(units));
    let mut position = u32::cast_from(ABSOLUTE_POS);
    while position < total {
        let value = read_among::<N>(grads, starts, position, 0usize, count);
        sum += value * value;
        position += step;
    }
    let mut own = 0.0f32;
    #[unroll]
    for lane in 0..N::value() {
        own += sum.extract(lane);
    }
    let whole = add_up(own, units);
    if UNIT_POS == 0 {
        partials[CUBE_POS] = whole;
    }
}

/// The sum of every unit's number, in an order that is always the same.
#[cube]
fn add_up(own: f32, #[comptime] units: usize) -> f32 {
    let mut shared = Shared::<[f32]>::new_slice(units);
    let unit = UNIT_POS as usize;
    shared[unit] = own;
    sync_cube();
    let mut half = comptime!(units / 2).runtime();
    while half > 0 {
        if unit < half {
            let other = shared[unit + half];
            shared[unit] += other;
        }
        half /= 2;
        sync_cube();
    }
    shared[0]
}

/// One element of the tensors `low..high`, which `position` is known to be in.
#[cube]
fn read_among<N: Size>(
    tensors: &Sequence<Box<[Vector<f32, N>]>>,
    starts: &Sequence<u32>,
    position: u32,
    #[comptime] low: usize,
    #[comptime] high: usize,
) -> Vector<f32, N> {
    if comptime!(high - low == 1) {
        read::<N>(&tensors[low], usize::cast_from(position - starts[low]))
    } else {
        let middle = comptime!((low + high) / 2);
        let mut value = Vector::<f32, N>::new(0.0f32);
        if position < starts[middle] {
            value = read_among::<N>(tensors, starts, position, low, middle);
        } else {
            value = read_among::<N>(tensors, starts, position, middle, high);
        }
        value
    }
}

/// The norm from the sums of the cubes, and what gradients are to be multiplied by.
#[cube(launch)]
fn finish_norm(
    partials: &[f32],
    norm: &mut [f32],
    factor: &mut [f32],
    max_norm: f32,
    epsilon: f32,
    #[comptime] units: usize,
) {
    let mut own = 0.0f32;
    let mut position = UNIT_POS as usize;
    while position < partials.len() {
        own += partials[position];
        position += comptime!(units);
    }
    let whole = add_up(own, units).sqrt();
    if UNIT_POS == 0 {
        norm[0] = whole;
        let bounded = max_norm / (whole + epsilon);
        // A comparison with NaN is false, so a norm that is no number makes the gradients none either.
        factor[0] = select(bounded > 1.0f32, 1.0f32, bounded);
    }
}

#[cube(launch)]
fn scale_many<N: Size>(
    src: &Sequence<Box<[Vector<f32, N>]>>,
    dst: &mut Sequence<Box<[Vector<f32, N>]>>,
    factor: &[f32],
    starts: &Sequence<u32>,
    total: u32,
    #[comptime] count: usize,
) {
    let position = u32::cast_from(ABSOLUTE_POS);
    if position < total {
        scale_among::<N>(src, dst, factor, starts, position, 0usize, count);
    }
}

#[cube]
fn scale_among<N: Size>(
    src: &Sequence<Box<[Vector<f32, N>]>>,
    dst: &mut Sequence<Box<[Vector<f32, N>]>>,
    factor: &[f32],
    starts: &Sequence<u32>,
    position: u32,
    #[comptime] low: usize,
    #[comptime] high: usize,
) {
    if comptime!(high - low == 1) {
        let index = usize::cast_from(position - starts[low]);
        let scaled = read::<N>(&src[low], index) * spread::<N>(factor);
        write::<N>(&mut dst[low], index, scaled);
    } else {
        let middle = comptime!((low + high) / 2);
        if position < starts[middle] {
            scale_among::<N>(src, dst, factor, starts, position, low, middle);
        } else {
            scale_among::<N>(src, dst, factor, starts, position, middle, high);
        }
    }
}

/// The name of the operation.
pub(crate) const UPDATE: &str = "burn_cuda_graph_update";

/// The update of one parameter. All its tensors are `f32`, of one shape.
#[derive(Debug)]
pub(crate) struct Entry {
    pub rule: Rule,
    pub param: AnyTensor,
    pub grad: AnyTensor,
    /// State before the update; none with [`Rule::first`].
    pub leaves: Vec<AnyTensor>,
    pub scalars: Vec<Tensor<1>>,
}

/// A parameter and its state after the update.
#[derive(Debug)]
pub(crate) struct Updated {
    pub param: AnyTensor,
    pub leaves: Vec<AnyTensor>,
}

type Device = FusionTensor<Runtime>;

/// An entry as the fusion server knows it.
struct Registered {
    param: Device,
    grad: Device,
    leaves: Vec<Device>,
}

/// Whether a parameter and its gradient can be handed to [`update`].
pub(crate) fn serves(param: &AnyTensor, grad: &AnyTensor) -> bool {
    let (Some(param), Some(grad)) = (fusion_tensor(param), fusion_tensor(grad)) else {
        return false;
    };
    param.client.device() == grad.client.device()
        && param.shape == grad.shape
        && param.shape.num_elements() < MAX_POSITIONS
}

/// Make all updates, one operation for those that share rule and scalars. The results are in the order of `entries`.
///
/// Whoever holds a parameter or a tensor of state beside its entry keeps the old value.
pub(crate) fn update(entries: Vec<Entry>) -> Vec<Updated> {
    let count = entries.len();
    // In the order of their first entries, so that every step registers them alike.
    let mut groups: Vec<Group> = Vec::new();
    for (index, entry) in entries.into_iter().enumerate() {
        let scalars: Vec<u64> = (entry.scalars.iter())
            .map(|scalar| id(&AnyTensor::from_float(scalar.clone())))
            .collect();
        let same = |group: &&mut Group| group.rule == entry.rule && group.scalars == scalars;
        match groups.iter_mut().find(same) {
            Some(group) => group.entries.push((index, entry)),
            None => groups.push(Group {
                rule: entry.rule,
                scalars,
                entries: vec![(index, entry)],
            }),
        }
    }
    let mut results: Vec<Option<Updated>> = (0..count).map(|_| None).collect();
    for group in groups {
        let (places, entries): (Vec<usize>, Vec<Entry>) = group.entries.into_iter().unzip();
        for (place, updated) in places.into_iter().zip(update_group(group.rule, entries)) {
            results[place] = Some(updated);
        }
    }
    results.into_iter().flatten().collect()
}

/// Updates of one rule that read the same scalars, with their places.
struct Group {
    rule: Rule,
    scalars: Vec<u64>,
    entries: Vec<(usize, Entry)>,
}

/// The updates that read the scalars of the first entry.
fn update_group(rule: Rule, entries: Vec<Entry>) -> Vec<Updated> {
    let stream = StreamId::current();
    let device = |tensor: AnyTensor| fusion_tensor(&tensor);
    let scalars: Vec<Device> = (entries.first().into_iter())
        .flat_map(|entry| entry.scalars.clone())
        .filter_map(|scalar| device(AnyTensor::from_float(scalar)))
        .collect();
    let Some(client) = scalars.first().map(|scalar| scalar.client.clone()) else {
        return Vec::new();
    };
    // An entry's own handle is the last one where nobody else has one: only then may the buffer be overwritten.
    let entries: Vec<Registered> = (entries.into_iter())
        .filter_map(|entry| {
            Some(Registered {
                param: device(entry.param)?,
                grad: device(entry.grad)?,
                leaves: entry.leaves.into_iter().filter_map(device).collect(),
            })
        })
        .collect();
    let mut overwrites = Vec::new();
    let mut outputs = Vec::new();
    for entry in &entries {
        let mut output = |like: &Device| {
            let id = client.create_empty_handle();
            outputs.push(TensorIr::uninit(id, like.shape.clone(), like.dtype));
        };
        output(&entry.param);
        (0..rule.leaves()).for_each(|_| output(&entry.param));
        for tensor in [&entry.param].into_iter().chain(&entry.leaves) {
            overwrites.push(context::overwrites(tensor.id.value()));
        }
    }
    let (scalar_count, count) = (scalars.len(), entries.len());
    let mut inputs: Vec<TensorIr> = scalars.into_iter().map(FusionTensor::into_ir).collect();
    for entry in entries {
        let tensors = [entry.param, entry.grad].into_iter().chain(entry.leaves);
        inputs.extend(tensors.map(FusionTensor::into_ir));
    }
    let constants = rule
        .description()
        .into_iter()
        .map(ScalarIr::Float)
        .collect();
    let description = CustomOpIr::with_scalars(UPDATE, &inputs, &outputs, constants);
    let operation = UpdateOperation {
        description: description.clone(),
        rule,
        scalars: scalar_count,
        count,
        overwrites,
    };
    let outputs = client.register(stream, OperationIr::Custom(description), operation);
    let mut outputs = outputs.into_iter().map(float);
    (0..count)
        .filter_map(|_| {
            Some(Updated {
                param: outputs.next()?,
                leaves: outputs.by_ref().take(rule.leaves()).collect(),
            })
        })
        .collect()
}

#[derive(Debug)]
struct UpdateOperation {
    description: CustomOpIr,
    rule: Rule,
    scalars: usize,
    count: usize,
    /// For the parameter and the state of each entry: whether its buffer is to be overwritten, whoever holds it.
    overwrites: Vec<bool>,
}

impl burn_fusion::stream::Operation<Runtime> for UpdateOperation {
    fn execute(
        &self,
        handles: &mut HandleContainer<CubeFusionHandle>,
    ) -> Result<(), ExecutionError> {
        let mut inputs = self.description.inputs.iter();
        let mut next = || {
            let tensor = inputs
                .next()
                .map(|ir| handles.get_float_tensor::<CubeBackend>(ir));
            tensor.map(burn_cubecl::kernel::untile)
        };
        let mut overwrites = self.overwrites.iter().copied();
        let scalars: Vec<CubeTensor> = (0..self.scalars).filter_map(|_| next()).collect();
        let mut copies = Vec::new();
        // A tensor to work on in place, laid out as `form`: this one, or a copy.
        let mut own = |tensor: CubeTensor, form: Option<&CubeTensor>| {
            let overwritten = overwrites.next().unwrap_or(false);
            let fits = form.map_or(packed(&tensor), |form| same_layout(&tensor, form));
            if fits && (overwritten || tensor.can_mut()) {
                return tensor;
            }
            let own = empty_packed(form.unwrap_or(&tensor));
            copies.push((tensor, own.clone()));
            own
        };
        let leaves = self.rule.leaves();
        let mut updates = Vec::with_capacity(self.count);
        for _ in 0..self.count {
            let (Some(param), Some(grad)) = (next(), next()) else {
                break;
            };
            let param = own(param, None);
            let leaves: Vec<CubeTensor> = match self.rule.first {
                true => (0..leaves).map(|_| empty_packed(&param)).collect(),
                false => (0..leaves)
                    .filter_map(|_| next())
                    .map(|leaf| own(leaf, Some(&param)))
                    .collect(),
            };
            updates.push(Tensors {
                param,
                grad,
                leaves,
            });
        }
        for update in &mut updates {
            if !same_layout(&update.grad, &update.param) {
                let laid = empty_packed(&update.param);
                copies.push((update.grad.clone(), laid.clone()));
                update.grad = laid;
            }
        }
        copy_all(&copies);
        launch_all(&updates, &scalars, self.rule);
        let mut outputs = self.description.outputs.iter();
        for update in updates {
            for tensor in [update.param].into_iter().chain(update.leaves) {
                if let Some(output) = outputs.next() {
                    handles.register_float_tensor::<CubeBackend>(&output.id, tensor);
                }
            }
        }
        Ok(())
    }
}

/// The tensors of one update.
struct Tensors {
    param: CubeTensor,
    grad: CubeTensor,
    leaves: Vec<CubeTensor>,
}

fn launch_all(updates: &[Tensors], scalars: &[CubeTensor], rule: Rule) {
    let Some(client) = updates.first().map(|update| update.param.client.clone()) else {
        return;
    };
    let elements = |update: &Tensors| update.param.meta.shape().num_elements();
    let most = groups_per_launch(&client, 2 + rule.leaves(), scalars.len());
    for (width, updates) in launch_groups(&client, size_of::<f32>(), updates, most, elements) {
        launch(&client, &updates, scalars, rule, width);
    }
}

fn launch(client: &Client, updates: &[&Tensors], scalars: &[CubeTensor], rule: Rule, width: usize) {
    let lengths = (updates.iter()).map(|update| update.param.meta.shape().num_elements() / width);
    let (starts, total) = starts(lengths);
    let dim = CubeDim::new(client, total as usize);
    let count = calculate_cube_count_elemwise(client, total as usize, dim);
    let arg = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();
    update_many::launch(
        client,
        count,
        dim,
        width,
        updates.iter().map(|update| arg(&update.param)).collect(),
        updates.iter().map(|update| arg(&update.grad)).collect(),
        (updates.iter())
            .flat_map(|update| update.leaves.iter().map(arg))
            .collect(),
        scalars.iter().map(arg).collect(),
        rule.numbers().into_iter().collect(),
        starts,
        total,
        updates.len(),
        rule.form(),
    );
}

/// `grads`, all of them `f32`, scaled so that the norm of all together is at most `max_norm`, and that norm `[1]` before.
/// `None` when they are not of one device of CubeCL's, or one is too large for a launch.
pub(crate) fn clip(
    grads: &[AnyTensor],
    max_norm: f32,
    epsilon: f32,
) -> Option<(Vec<AnyTensor>, AnyTensor)> {
    let inputs = grads
        .iter()
        .map(fusion_tensor)
        .collect::<Option<Vec<_>>>()?;
    let client = inputs.first()?.client.clone();
    let elsewhere = |input: &Device| input.client.device() != client.device();
    let large = |input: &Device| input.shape.num_elements() >= MAX_POSITIONS;
    if inputs.iter().any(|input| elsewhere(input) || large(input)) {
        return None;
    }
    let shapes = (inputs.iter().map(|input| input.shape.clone())).chain([Shape::new([1])]);
    let outputs: Vec<TensorIr> = shapes
        .map(|shape| TensorIr::uninit(client.create_empty_handle(), shape, DType::F32))
        .collect();
    let inputs: Vec<TensorIr> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let constants = [max_norm, epsilon].map(|value| ScalarIr::Float(value.into()));
    let description = CustomOpIr::with_scalars(
        "burn_cuda_graph_clip",
        &inputs,
        &outputs,
        constants.to_vec(),
    );
    let operation = ClipOperation {
        description: description.clone(),
        max_norm,
        epsilon,
    };
    let custom = OperationIr::Custom(description);
    let outputs = client.register(StreamId::current(), custom, operation);
    let mut outputs: Vec<AnyTensor> = outputs.into_iter().map(float).collect();
    let norm = outputs.pop()?;
    Some((outputs, norm))
}

fn float(tensor: Device) -> AnyTensor {
    from_fusion(tensor, TensorKind::Float)
}

#[derive(Debug)]
struct ClipOperation {
    description: CustomOpIr,
    max_norm: f32,
    epsilon: f32,
}

impl burn_fusion::stream::Operation<Runtime> for ClipOperation {
    fn execute(
        &self,
        handles: &mut HandleContainer<CubeFusionHandle>,
    ) -> Result<(), ExecutionError> {
        let mut copies = Vec::new();
        let pairs: Vec<(CubeTensor, CubeTensor)> = (self.description.inputs.iter())
            .map(|ir| {
                let grad = handles.get_float_tensor::<CubeBackend>(ir);
                let grad = burn_cubecl::kernel::untile(grad);
                let scaled = empty_packed(&grad);
                if packed(&grad) {
                    return (grad, scaled);
                }
                // Laid out without holes first, and scaled from there.
                let laid = empty_packed(&grad);
                copies.push((grad, laid.clone()));
                (laid, scaled)
            })
            .collect();
        copy_all(&copies);
        let norm = norm_and_scale(&pairs, self.max_norm, self.epsilon);
        let scaled = pairs.into_iter().map(|(_, scaled)| scaled);
        for (ir, tensor) in (self.description.outputs.iter()).zip(scaled.chain(norm)) {
            handles.register_float_tensor::<CubeBackend>(&ir.id, tensor);
        }
        Ok(())
    }
}

/// Write the scaled gradients; the norm before.
fn norm_and_scale(
    pairs: &[(CubeTensor, CubeTensor)],
    max_norm: f32,
    epsilon: f32,
) -> Option<CubeTensor> {
    let (first, _) = pairs.first()?;
    let client = first.client.clone();
    let vector = |length: usize| {
        CubeTensor::new_contiguous(
            client.clone(),
            first.device.clone(),
            Shape::new([length]),
            client.empty(length * size_of::<f32>()),
            DType::F32,
        )
    };
    let elements = |pair: &(CubeTensor, CubeTensor)| pair.0.meta.shape().num_elements();
    let groups = |most: usize| launch_groups(&client, size_of::<f32>(), pairs, most, elements);
    let total = |width: usize, pairs: &[&(CubeTensor, CubeTensor)]| {
        starts(pairs.iter().map(|pair| elements(pair) / width))
    };
    let arg = |tensor: &CubeTensor| tensor.clone().into_buffer_arg();

    let units = CubeDim::new_1d(UNITS as u32);
    // A launch writes as many sums as it has cubes, from an offset on that a binding may begin at.
    let aligned = (client.properties().memory.alignment as usize).div_ceil(size_of::<f32>());
    let launches: Vec<_> = (groups(groups_per_launch(&client, 1, 1)).into_iter())
        .map(|(width, pairs)| {
            let (starts, total) = total(width, &pairs);
            let cubes = (total as usize).div_ceil(WORTH_A_CUBE).clamp(1, MOST_CUBES);
            (width, pairs, starts, total, cubes.next_multiple_of(aligned))
        })
        .collect();
    let sums = vector((launches.iter().map(|launch| launch.4).sum::<usize>()).max(1));
    let mut before = 0;
    for (width, pairs, starts, total, cubes) in launches {
        let bytes = |count: usize| (count * size_of::<f32>()) as u64;
        let end = sums.handle.size_in_used() - bytes(before + cubes);
        let handle = sums
            .handle
            .clone()
            .offset_start(bytes(before))
            .offset_end(end);
        let own = CubeTensor::new_contiguous(
            client.clone(),
            first.device.clone(),
            Shape::new([cubes]),
            handle,
            DType::F32,
        );
        square_many::launch(
            &client,
            CubeCount::Static(cubes as u32, 1, 1),
            units,
            width,
            pairs.iter().map(|pair| arg(&pair.0)).collect(),
            arg(&own),
            starts,
            total,
            pairs.len(),
            UNITS,
        );
        before += cubes;
    }
    let (norm, factor) = (vector(1), vector(1));
    finish_norm::launch(
        &client,
        CubeCount::Static(1, 1, 1),
        units,
        arg(&sums),
        arg(&norm),
        arg(&factor),
        max_norm,
        epsilon,
        UNITS,
    );
    for (width, pairs) in groups(groups_per_launch(&client, 2, 1)) {
        let (starts, total) = total(width, &pairs);
        let dim = CubeDim::new(&client, total as usize);
        let count = calculate_cube_count_elemwise(&client, total as usize, dim);
        scale_many::launch(
            &client,
            count,
            dim,
            width,
            pairs.iter().map(|pair| arg(&pair.0)).collect(),
            pairs.iter().map(|pair| arg(&pair.1)).collect(),
            arg(&factor),
            starts,
            total,
            pairs.len(),
        );
    }
    Some(norm)
}
