//! Updates put off until an optimizer has been through all parameters, to be made together.
//!
//! Burn's optimizers are asked for one parameter at a time and answer with its new value. While a thread collects, ours
//! answer with the gradient in its place and note what is to be done; whoever collects makes the updates and puts their
//! results where the gradients are. So collecting is for those who look at nothing in between.

use super::state::{Layout, OptimizerState, StateData};
use crate::multi::Entry;
use crate::tensor::AnyTensor;
use burn::tensor::Tensor;
use std::cell::RefCell;

/// An update that was put off.
pub(crate) struct Collected {
    pub entry: Entry,
    /// The number of the state that waits for it.
    pub clock: u64,
    /// The number of the tensor in the place of the results.
    pub placeholder: u64,
}

thread_local! {
    static COLLECTED: RefCell<Option<Vec<Collected>>> = const { RefCell::new(None) };
}

/// Run `f`, putting updates off; its result, and the updates that were. A call within `f` would end the collection.
pub(crate) fn collecting<R>(f: impl FnOnce() -> R) -> (R, Vec<Collected>) {
    struct Stop;
    impl Drop for Stop {
        fn drop(&mut self) {
            COLLECTED.set(None);
        }
    }
    COLLECTED.set(Some(Vec::new()));
    let stop = Stop;
    let result = f();
    let collected = COLLECTED.take().unwrap_or_default();
    drop(stop);
    (result, collected)
}

/// Whether the update of a parameter by a gradient is put off.
pub(super) fn collects(param: &AnyTensor, grad: &AnyTensor) -> bool {
    crate::context::fuses_updates()
        && COLLECTED.with_borrow(Option::is_some)
        && crate::multi::serves(param, grad)
}

/// Put an update off: what stands in for the parameter, and for its state.
pub(super) fn put_off<const D: usize, L: Layout>(
    entry: Entry,
    mut state: StateData,
    names: &[&'static str],
) -> (Tensor<D>, Option<OptimizerState<D, L>>) {
    let stand_in = entry.grad.clone();
    state.leaves = (names.iter())
        .map(|name| (*name, stand_in.clone()))
        .collect();
    let collected = Collected {
        placeholder: crate::pool::id(&stand_in),
        clock: state.clock,
        entry,
    };
    COLLECTED.with_borrow_mut(|all| all.get_or_insert_default().push(collected));
    (stand_in.into_float(), Some(OptimizerState::new(state)))
}
