//! Getting at an optimizer that somebody else keeps.
//!
//! `burn_train::Learner` keeps its optimizer to itself, and what it does with it in public is one step. So a step it is, on
//! a copy, with this thread listening: each optimizer of ours that is asked to update a parameter says who it is and what
//! state it has, and changes nothing. Gradient clipping happens before an optimizer is asked; it is told by what it makes of
//! gradients of known size.

use super::state::{OptimizerState, StateData, inject, parameters, record_of_all};
use super::update::OptimizerId;
use crate::error::FallbackReason;
use crate::tensor::AnyTensor;
use burn::grad_clipping::GradientClipping;
use burn::module::{Module, ModuleVisitor, Param, ParamGroup, ParamId};
use burn::optim::{GradientsParams, LearningRate, ModuleOptimizer, Optimizer};
use burn::tensor::{DType, Device, Tensor};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

/// Adds an optimizer to a module's, for a group, with its clipping; makes the module's where there is none yet.
type AddTo =
    Box<dyn Fn(Option<ModuleOptimizer>, ParamGroup, Option<GradientClipping>) -> ModuleOptimizer>;

/// An optimizer that was asked to update a parameter.
struct Heard {
    id: OptimizerId,
    add_to: AddTo,
    grad: AnyTensor,
    state: Option<StateData>,
}

thread_local! {
    static LISTENING: RefCell<Option<Vec<Heard>>> = const { RefCell::new(None) };
}

/// Whether this thread only listens, so that `optimizer` is to change nothing.
pub(super) fn overheard<O: Optimizer, const D: usize, L>(
    optimizer: &O,
    id: OptimizerId,
    grad: &Tensor<D>,
    state: &Option<OptimizerState<D, L>>,
) -> bool {
    LISTENING.with_borrow_mut(|listening| {
        let Some(heard) = listening else {
            return false;
        };
        let optimizer = optimizer.clone();
        heard.push(Heard {
            id,
            add_to: Box::new(move |module, group, clipping| match module {
                None => match clipping {
                    Some(clipping) => {
                        ModuleOptimizer::from(optimizer.clone()).with_grad_clipping(clipping)
                    }
                    None => ModuleOptimizer::from(optimizer.clone()),
                },
                Some(module) => module.with_group(group, optimizer.clone(), clipping),
            }),
            grad: AnyTensor::from_float(grad.clone()),
            state: state.as_ref().map(|state| state.data.clone()),
        });
        true
    })
}

fn listen(step: impl FnOnce()) -> Vec<Heard> {
    struct Stop;
    impl Drop for Stop {
        fn drop(&mut self) {
            LISTENING.set(None);
        }
    }
    LISTENING.set(Some(Vec::new()));
    let stop = Stop;
    step();
    let heard = LISTENING.take();
    drop(stop);
    heard.unwrap_or_default()
}

/// An optimizer as the one that `step` steps a copy of `model` with: the same optimizers for the same parameters, with the
/// same clipping and state. `plain` is that step with an optimizer that is given.
///
/// # Errors
///
/// Why there is none: it is not one of ours, for all parameters, or clips in a way that could not be told.
pub(crate) fn extract<M: Module>(
    model: &M,
    step: impl Fn(GradientsParams),
    plain: impl Fn(M, &mut ModuleOptimizer, GradientsParams) -> M,
) -> Result<ModuleOptimizer, FallbackReason> {
    let custom = |what: &str| FallbackReason::StockOptimizer {
        replacement: "GraphedStep, with a closure that does what `optimize` does".into(),
        detail: format!(
            "the model's own `TrainStep::optimize` {what}, so its optimizer could not be taken over from the learner"
        ),
    };
    let (mut groups, mut states) = (Vec::<Group>::new(), BTreeMap::new());
    let (mut ours, mut stock, mut unheard) = (0, 0, None);
    for (id, _) in parameters(model) {
        let grads = |sizes: &[f64]| gradient(model, id, sizes);
        // The optimizers that were asked, and the gradients that a plain one is given.
        let ask = |sizes: &[f64]| {
            let answer = || {
                let heard = listen(|| step(grads(sizes)));
                let arrived = GradListener::default();
                let mut optimizer = ModuleOptimizer::from(arrived.clone());
                drop(plain(model.clone(), &mut optimizer, grads(sizes)));
                (heard, arrived.take())
            };
            catch_unwind(AssertUnwindSafe(answer))
                .map_err(|_| custom("panicked when it was given one parameter's gradient"))
        };
        let (heard, arrived) = ask(&[LARGE])?;
        let (Some(first), Some(before)) = (heard.first(), arrived.first()) else {
            match arrived.is_empty() {
                true => unheard = Some(id),
                false => stock += 1,
            }
            continue;
        };
        ours += 1;
        if heard.iter().any(|other| other.id != first.id) {
            return Err(custom("updates one parameter with several optimizers"));
        }
        let clipping = match start(before)? == start(&first.grad)? {
            true => None,
            false => {
                let mut made = vec![(before.clone(), first.grad.clone())];
                let mut probes = vec![vec![LARGE; 2], vec![0.75 * LARGE]];
                if before.spec().num_elements() == 1 {
                    // By norm it is not a number, by value the threshold.
                    probes.push(vec![f64::INFINITY]);
                }
                for sizes in &probes {
                    let (heard, arrived) = ask(sizes)?;
                    let (Some(heard), Some(before)) = (heard.first(), arrived.first()) else {
                        return Err(custom("does not do the same twice"));
                    };
                    made.push((before.clone(), heard.grad.clone()));
                }
                Some(
                    clipping_of(&made)?.ok_or_else(|| FallbackReason::StockOptimizer {
                        replacement: "`with_grad_clipping` of the optimizer's configuration".into(),
                        detail: format!(
                            "how the gradient of parameter {id} is clipped could not be told"
                        ),
                    })?,
                )
            }
        };
        if let Some(state) = &first.state {
            states.insert(id.val(), state.clone());
        }
        let bits = clipping.as_ref().map(clipping_bits);
        match groups
            .iter_mut()
            .find(|group| group.id == first.id && group.bits == bits)
        {
            Some(group) => group.members.push(id),
            None => {
                let first = heard.into_iter().next();
                groups.extend(first.map(|first| Group {
                    id: first.id,
                    add_to: first.add_to,
                    clipping,
                    bits,
                    members: vec![id],
                }));
            }
        }
    }
    if let (1.., Some(id)) = (ours, unheard) {
        return Err(custom(&format!(
            "does not update parameter {id} when it is given its gradient, at the rate the learner begins with"
        )));
    }
    match (ours, stock) {
        (0, _) => Err(FallbackReason::StockOptimizer {
            replacement: "the configuration of the same name in burn_cuda_graph::optim".into(),
            detail: "the learner's optimizer is one of Burn's, which the learner keeps to itself".into(),
        }),
        (_, 0) => {
            let mut module: Option<ModuleOptimizer> = None;
            for group in groups {
                let members = ParamGroup::from_ids(group.members);
                module = Some((group.add_to)(module, members, group.clipping));
            }
            let Some(module) = module else {
                return Err(custom("updates no parameter"));
            };
            let record = record_of_all(model);
            Ok(inject(states, || module.load_record(record)))
        }
        _ => Err(FallbackReason::StockOptimizer {
            replacement: "burn_cuda_graph::optim, for every parameter group".into(),
            detail: "some of the learner's groups have optimizers of burn_cuda_graph::optim, others have Burn's".into(),
        }),
    }
}

/// Parameters that share an optimizer and its clipping.
struct Group {
    id: OptimizerId,
    add_to: AddTo,
    clipping: Option<GradientClipping>,
    bits: Option<(bool, u32)>,
    members: Vec<ParamId>,
}

fn clipping_bits(clipping: &GradientClipping) -> (bool, u32) {
    match clipping {
        GradientClipping::Value(value) => (false, value.to_bits()),
        GradientClipping::Norm(norm) => (true, norm.to_bits()),
    }
}

/// A gradient for parameter `id` of `model` alone: `sizes` for its first elements, and zeros.
fn gradient<M: Module>(model: &M, id: ParamId, sizes: &[f64]) -> GradientsParams {
    struct Gradient<'a> {
        id: ParamId,
        sizes: &'a [f64],
        grads: GradientsParams,
    }
    impl ModuleVisitor for Gradient<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.id != self.id {
                return;
            }
            let value = param.val().inner();
            // Clipping computes in `f32`: a threshold read back in half precision would be rounded.
            let dtype = match value.dtype() {
                DType::F16 | DType::BF16 => DType::F32,
                other => other,
            };
            let (shape, options) = (value.shape(), (&value.device(), dtype));
            let mut flat = Tensor::<1>::zeros([shape.num_elements()], options);
            for (place, size) in self.sizes.iter().enumerate().take(shape.num_elements()) {
                let one = Tensor::<1>::full([1], *size, options);
                flat = flat.slice_assign(place..place + 1, one);
            }
            self.grads.register(self.id, flat.reshape::<D, _>(shape));
        }
    }
    let mut visitor = Gradient {
        id,
        sizes,
        grads: GradientsParams::new(),
    };
    model.visit(&mut visitor);
    visitor.grads
}

/// A power of four that no threshold of a clipping exceeds, and whose square is finite.
const LARGE: f64 = (1u64 << 60) as f64;

/// The bits of the first two elements.
fn start(tensor: &AnyTensor) -> Result<Vec<u8>, FallbackReason> {
    let values = first_two(tensor);
    let data = values
        .read()
        .map_err(|detail| FallbackReason::StockOptimizer {
            replacement: "GraphedStep".into(),
            detail: format!("what the learner's optimizer does could not be read: {detail}"),
        })?;
    Ok(data.as_bytes().to_vec())
}

fn first_two(tensor: &AnyTensor) -> AnyTensor {
    let elements = tensor.spec().num_elements();
    let flat = tensor.clone().into_float::<1>();
    let flat: Tensor<1> = reshaped(flat, elements);
    AnyTensor::from_float(flat.slice(0..elements.min(2)))
}

/// `tensor`, of whatever rank, as a vector.
fn reshaped(tensor: Tensor<1>, elements: usize) -> Tensor<1> {
    tensor.reshape([elements])
}

/// The clipping that makes each second gradient of the first; `None` when there is no such.
fn clipping_of(
    made: &[(AnyTensor, AnyTensor)],
) -> Result<Option<GradientClipping>, FallbackReason> {
    let Some((_, clipped)) = made.first() else {
        return Ok(None);
    };
    let data = first_two(clipped)
        .read()
        .map_err(|detail| FallbackReason::StockOptimizer {
            replacement: "GraphedStep".into(),
            detail: format!("what the learner's optimizer does could not be read: {detail}"),
        })?;
    // A power of two, scaled to the threshold and back, is the threshold: exactly, but for what a device's root and
    // division are off.
    let threshold = data.iter::<f32>().next().unwrap_or_default().abs();
    let near = |off: i32| f32::from_bits(threshold.to_bits().wrapping_add_signed(off));
    let norms = [0, 1, -1, 2, -2, 3, -3, 4, -4].map(|off| GradientClipping::Norm(near(off)));
    for candidate in [GradientClipping::Value(threshold)]
        .into_iter()
        .chain(norms)
    {
        let mut fits = true;
        for (before, after) in made {
            let elements = before.spec().num_elements();
            let flat = reshaped(before.clone().into_float::<1>(), elements);
            let clipped = AnyTensor::from_float(candidate.clip_gradient(flat));
            fits &= start(&clipped)? == start(after)?;
        }
        if fits {
            return Ok(Some(candidate));
        }
    }
    Ok(None)
}

/// An optimizer that changes nothing and notes the gradients it gets.
#[derive(Clone, Default)]
struct GradListener(Arc<Mutex<Vec<AnyTensor>>>);

impl GradListener {
    fn take(&self) -> Vec<AnyTensor> {
        core::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Optimizer for GradListener {
    type State<const D: usize> = ();
    fn step<const D: usize>(
        &self,
        _lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        _state: Option<()>,
    ) -> (Tensor<D>, Option<()>) {
        let mut heard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        heard.push(AnyTensor::from_float(grad));
        (tensor, None)
    }
    fn to_device<const D: usize>(state: (), _device: &Device) {
        state
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::optim::{AdamConfig, SgdConfig};
    use burn::nn::{Linear, LinearConfig};

    fn weights(model: &Linear) -> Vec<u32> {
        let bias = model.bias.as_ref().expect("has a bias").val();
        let mut all: Vec<f32> = model.weight.val().into_data().iter().collect();
        all.extend(bias.into_data().iter::<f32>());
        all.into_iter().map(f32::to_bits).collect()
    }

    /// A gradient of `size` for every element of every parameter.
    fn grads(model: &Linear, size: f64) -> GradientsParams {
        let mut grads = GradientsParams::new();
        let bias = model.bias.as_ref().expect("has a bias");
        grads.register(model.weight.id, model.weight.val().inner().full_like(size));
        grads.register(bias.id, bias.val().inner().full_like(size));
        grads
    }

    fn taken(
        model: &Linear,
        optimizer: &ModuleOptimizer,
    ) -> Result<ModuleOptimizer, FallbackReason> {
        extract(
            model,
            |grads| drop(optimizer.clone().step(0.0, model.clone(), grads)),
            |model, optimizer, grads| optimizer.step(0.0, model, grads),
        )
    }

    /// What is taken over clips as the learner's does, by bits, one-element parameters and gradients that are not finite
    /// included, and goes on from the learner's state.
    #[test]
    fn clipping_and_state_are_taken_over() {
        let device = Device::flex().autodiff();
        for clipping in [
            None,
            Some(GradientClipping::Value(0.3)),
            Some(GradientClipping::Norm(1.0)),
            Some(GradientClipping::Norm(0.1)),
        ] {
            let model = LinearConfig::new(5, 1).init(&device);
            let mut theirs = AdamConfig::new().init();
            if let Some(clipping) = &clipping {
                theirs = theirs.with_grad_clipping(clipping.clone());
            }
            let model = theirs.step(0.01, model.clone(), grads(&model, 7.0));
            let mut ours = taken(&model, &theirs).expect("is one of ours");
            let bits = clipping.as_ref().map(clipping_bits);
            for size in [41.0, 0.01, 1e-4, f64::INFINITY] {
                let expected = theirs.step(0.01, model.clone(), grads(&model, size));
                let found = ours.step(0.01, model.clone(), grads(&model, size));
                assert_eq!(
                    weights(&found),
                    weights(&expected),
                    "{bits:?}, gradient {size}"
                );
            }
        }
    }

    /// A stock optimizer, and a model whose `optimize` leaves a parameter out, are not taken over.
    #[test]
    fn what_cannot_be_told_is_refused() {
        let device = Device::flex().autodiff();
        let model = LinearConfig::new(5, 1).init(&device);
        let stock = burn::optim::SgdConfig::new().init();
        let reason = taken(&model, &stock).map(|_| ()).expect_err("is Burn's");
        assert_eq!(reason.name(), "stock-optimizer");
        let ours = SgdConfig::new().init();
        let without_bias =
            |model: Linear, optimizer: &mut ModuleOptimizer, mut grads: GradientsParams| {
                drop(grads.remove::<1>(model.bias.as_ref().expect("has a bias").id));
                optimizer.step(0.0, model, grads)
            };
        let reason = extract(
            &model,
            |grads| drop(without_bias(model.clone(), &mut ours.clone(), grads)),
            without_bias,
        );
        let reason = reason
            .map(|_| ())
            .expect_err("leaves the bias out")
            .to_string();
        assert!(reason.contains("does not update parameter"), "{reason}");
    }
}
