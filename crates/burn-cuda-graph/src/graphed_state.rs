//! The state that graphed functions work on, in buffers that they share.

use crate::error::{FallbackReason, StepError};
use crate::host::HostCore;
use crate::random;
use crate::state::{self, Inference, StepState, Training};
use crate::support::{Support, support};
use crate::tensor::AnyTensor;
use burn::module::{Module, ParamId};
use burn::tensor::{DType, Device};

/// A state that [`GraphedFn`](crate::GraphedFn)s work on: a model and its optimizer, two of them, or a model alone.
///
/// Its tensors live in buffers that the sealed graphs of all its functions share, so that an evaluation graph reads the
/// parameters that a training graph just updated. Not the functions' graphs themselves: each function owns its own, and
/// dropping one leaves those of the others sound.
pub struct GraphedState<S> {
    state: S,
    device: Device,
    support: Support,
    /// What keeps any step over this state from being a graph.
    blocked: Option<FallbackReason>,
    pub(crate) core: HostCore,
    /// The parameters that rates are given for.
    parameters: Vec<(ParamId, String)>,
    /// Steps taken, and by an earlier run before.
    pub(crate) steps: u64,
    /// The key of the step's random numbers.
    pub(crate) random_key: u64,
}

impl<S> core::fmt::Debug for GraphedState<S> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("GraphedState")
            .field("device", &self.device)
            .field("support", &self.support)
            .finish_non_exhaustive()
    }
}

impl<S: StepState> GraphedState<S> {
    /// Take `state` over. Nothing is run; lazy parameters are initialised.
    ///
    /// # Errors
    ///
    /// [`StepError::StateDevices`] when the state is spread over devices, [`StepError::EmptyState`] when it holds no
    /// tensor, [`StepError::TreeMismatch`] when it visits and maps different tensors.
    pub fn new(state: S) -> Result<Self, StepError> {
        let device = state_device(&state)?;
        let support = support(&device);
        let core = HostCore::new(&device, &support);
        let state = taken_over(state, &core)?;
        let random_key = match (&support, random::registered()) {
            (Support::None { .. }, _) | (_, false) => 0,
            _ => random::key_from_device(&device).map_err(|detail| StepError::Device {
                doing: "drawing the key of the random numbers".into(),
                detail,
            })?,
        };
        Ok(Self {
            blocked: blocked_by_state(&support, &state),
            parameters: state.parameters(),
            steps: 0,
            random_key,
            state,
            core,
            device,
            support,
        })
    }

    /// A copy of the live state, the caller's own: later steps do not change it. Settled, so that BatchNorm statistics
    /// are those of the last step.
    pub fn state(&self) -> S {
        self.core.pinned(|| {
            self.core.warn_of_failures();
            let live = state::tensors_of(&self.state);
            let mut copies = live.iter().map(|tensor| self.core.user_copy(tensor));
            // Copies keep the autodiff association of the live tensors, which the independent containers may lack.
            let mut copy = self
                .state
                .independent()
                .map_state(&mut |old| copies.next().unwrap_or(old));
            copy.advance_clocks(&|clock| self.core.pending(clock));
            copy
        })
    }

    /// The live state, by value. Drop its functions before: their graphs work on the same buffers.
    pub fn into_state(self) -> S {
        let Self {
            mut state, core, ..
        } = self;
        core.pinned(|| {
            core.warn_of_failures();
            state.settle();
            state.advance_clocks(&|clock| core.pending(clock));
        });
        drop(core);
        state
    }

    /// Change the state from outside: load weights, freeze layers, swap in an average, move to another device. Every
    /// function drops its graphs at its next call, since what they recorded may no longer be what it does, and warms up
    /// anew.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); the state is then what it was before.
    pub fn update(&mut self, update: impl FnOnce(S) -> S) -> Result<(), StepError> {
        self.replace(update, || {})
    }

    /// Replace the state, after `drop_graphs`, which is called once nothing can go wrong any more.
    pub(crate) fn replace(
        &mut self,
        update: impl FnOnce(S) -> S,
        drop_graphs: impl FnOnce(),
    ) -> Result<(), StepError> {
        let updated = update(self.state());
        let device = state_device(&updated)?;
        let new_support = support(&device);
        let core = HostCore::new(&device, &new_support);
        let updated = taken_over(updated, &core)?;
        drop_graphs();
        self.blocked = blocked_by_state(&new_support, &updated);
        self.parameters = updated.parameters();
        self.state = updated;
        self.support = new_support;
        self.device = device;
        // The old one gives its memory back as it drops.
        self.core = core;
        Ok(())
    }

    /// Whether an update that panicked took the state along.
    pub(crate) fn is_lost(&self) -> bool {
        self.state.is_lost()
    }

    /// Let the graph-owned buffers go; every function drops its graphs at its next call and warms up anew. The state
    /// stays.
    pub fn release(&mut self) {
        self.release_after(|| {});
    }

    pub(crate) fn release_after(&mut self, drop_graphs: impl FnOnce()) {
        if self.core.owns_state() {
            let state = self.state();
            self.state = state;
        }
        drop_graphs();
        self.core.forget();
    }

    /// Move to the calling thread's stream, when it is another one than before.
    ///
    /// A graph holds the stream it was captured on, and the thread that owns that stream may be using it: its work would
    /// land in our windows, or ours in its.
    pub(crate) fn follow_thread(&mut self, drop_graphs: impl FnOnce()) -> Result<(), StepError> {
        if self.core.is_at_home() {
            return Ok(());
        }
        let state = self.state();
        let moving = |detail| StepError::Device {
            doing: "moving to another thread".into(),
            detail,
        };
        self.core.pinned(|| self.core.sync()).map_err(moving)?;
        let core = HostCore::new(&self.device, &self.support);
        self.state = taken_over(state, &core)?;
        drop_graphs();
        self.core = core;
        Ok(())
    }

    /// Give the random numbers of steps another key, as if `Device::seed` had been called before the state was made.
    /// Graphs follow.
    ///
    /// Where [`register_random`](crate::register_random) was called, the random operations of a step draw numbers that
    /// depend on this key, on the count of steps, on the place of the operation in the step and on the element. The key
    /// is drawn from the device's generator when the state is made, so [`Device::seed`] before that decides it.
    pub fn seed(&mut self, key: u64) {
        self.random_key = key;
    }

    /// The key of the random numbers: what a checkpoint keeps for [`seed`](Self::seed).
    pub fn random_key(&self) -> u64 {
        self.random_key
    }

    /// Steps taken by functions that update the state, those of [`resume_at`](Self::resume_at) included: what a checkpoint
    /// keeps for it.
    pub fn steps_taken(&self) -> u64 {
        self.steps
    }

    /// Count `steps` as taken before, so that a resumed run draws the random numbers that the interrupted one would have
    /// drawn. Its key is set with [`seed`](Self::seed).
    pub fn resume_at(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// What a graph is on the state's device.
    pub fn support(&self) -> &Support {
        &self.support
    }

    /// The state's device, without autodiff.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn parameters(&self) -> &[(ParamId, String)] {
        &self.parameters
    }

    pub(crate) fn blocked(&self) -> Option<&FallbackReason> {
        self.blocked.as_ref()
    }

    /// The live state and what runs it.
    pub(crate) fn parts(&mut self) -> (&mut S, &mut HostCore) {
        (&mut self.state, &mut self.core)
    }
}

impl<M: Module> GraphedState<Training<M>> {
    /// A copy of the live model, the caller's own: validate it, save it, keep it. Later steps do not change it.
    pub fn model(&self) -> M {
        self.state().into_model()
    }
}

impl<M: Module> GraphedState<Inference<M>> {
    /// A copy of the model, the caller's own.
    pub fn model(&self) -> M {
        self.state().into_model()
    }
}

fn state_device<S: StepState>(state: &S) -> Result<Device, StepError> {
    let mut devices: Vec<Device> = Vec::new();
    state.visit_state(&mut |tensor| {
        let device = tensor.device();
        if !devices.contains(&device) {
            devices.push(device);
        }
    });
    match devices.len() {
        0 => Err(StepError::EmptyState),
        1 => Ok(devices.remove(0)),
        _ => Err(StepError::StateDevices {
            devices: devices.iter().map(|d| format!("{d:?}")).collect(),
        }),
    }
}

/// The state as the engine keeps it: settled, in containers that share nothing mutable with the caller's, on the core's
/// stream, after its `visit` and `map` were found to walk the same tensors.
fn taken_over<S: StepState>(state: S, core: &HostCore) -> Result<S, StepError> {
    core.pinned(|| {
        let live = state::tensors_of(&state);
        let mut mapped = 0;
        let state = state.independent().map_state(&mut |old| {
            mapped += 1;
            live.get(mapped - 1)
                .map_or(old, |tensor| core.adopt(tensor))
        });
        match live.len() == mapped {
            true => Ok(state),
            false => Err(StepError::TreeMismatch {
                place: "state".into(),
                visited: live.len(),
                mapped,
            }),
        }
    })
}

pub(crate) fn quantized(place: &str, index: usize, tensor: &AnyTensor) -> Option<FallbackReason> {
    match tensor.spec().dtype {
        dtype @ DType::QFloat(_) => Some(FallbackReason::Quantized {
            place: place.to_string(),
            index,
            dtype: format!("{dtype:?}"),
        }),
        _ => None,
    }
}

/// What keeps any step over this state from being a graph.
fn blocked_by_state<S: StepState>(support: &Support, state: &S) -> Option<FallbackReason> {
    if let Support::None { reason } = support {
        return Some(FallbackReason::Unsupported {
            backend: reason.clone(),
        });
    }
    let (mut index, mut found) = (0, state.blocked());
    state.visit_state(&mut |tensor| {
        found = found.take().or_else(|| quantized("state", index, &tensor));
        index += 1;
    });
    found
}
