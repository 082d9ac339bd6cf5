//! Runs steps in a build without a backend that records graphs: always eagerly.

use crate::context::{self, Context, Mode, Rates, StepRate};
use crate::engine::{Attempt, NoReplay, StepHost, Watch};
use crate::error::StepError;
use crate::lifecycle::Verdict;
use crate::shape_key::ShapeKey;
use crate::state::StepState;
use crate::step::run_eager;
use crate::support::Support;
use crate::tensor::AnyTensor;
use crate::tree::TensorTree;
use burn::tensor::Device;
use std::collections::HashSet;

/// No step is watched in this build.
pub(crate) type Fingerprint = core::convert::Infallible;

/// No graph is sealed in this build.
#[derive(Debug)]
pub(crate) struct Sealed<O>(core::convert::Infallible, core::marker::PhantomData<O>);

impl<O> Sealed<O> {
    pub fn refresh_bare(&self, _core: &HostCore, _rates: &Rates, _random: [u32; 4]) {
        match self.0 {}
    }
    pub fn replay_bare(&self, _core: &mut HostCore) -> Result<(), String> {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct HostCore {
    device: Device,
}

impl HostCore {
    pub fn new(device: &Device, _support: &Support) -> Self {
        Self {
            device: device.clone(),
        }
    }
    pub fn stream(&self) -> Stream {
        Stream
    }
    pub fn pinned<R>(&self, f: impl FnOnce() -> R) -> R {
        f()
    }
    pub fn forget(&mut self) {}
    pub fn trim(&self) {}
    pub fn generation(&self) -> u64 {
        0
    }
    pub fn is_at_home(&self) -> bool {
        true
    }
    pub fn adopt(&self, tensor: &AnyTensor) -> AnyTensor {
        tensor.clone()
    }
    pub fn owns_state(&self) -> bool {
        false
    }
    pub fn warn_of_failures(&self) {}

    pub fn user_copy(&self, tensor: &AnyTensor) -> AnyTensor {
        tensor.clone()
    }
    pub fn pending(&self, _clock: u64) -> u64 {
        0
    }
    pub fn sync(&self) -> Result<(), String> {
        self.device.sync().map_err(|err| err.to_string())
    }
}

/// There are no streams in this build.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream;

impl Stream {
    pub fn run<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }
}

pub(crate) struct Host<'a, S, B, O, F> {
    pub core: &'a mut HostCore,
    pub state: &'a mut S,
    pub step: &'a F,
    pub function: u64,
    pub batch: &'a B,
    pub tensors: &'a [AnyTensor],
    pub rates: &'a Rates,
    pub key: &'a ShapeKey,
    pub baked: &'a mut HashSet<ShapeKey>,
    pub random: [u32; 4],
    pub verify_tolerance: f32,
    pub fused_updates: bool,
    pub synced: bool,
    pub output: core::marker::PhantomData<O>,
}

impl<S, B, O, F> StepHost for Host<'_, S, B, O, F>
where
    S: StepState,
    B: TensorTree,
    O: TensorTree,
    F: Fn(&mut S, B, StepRate) -> O,
{
    type Fingerprint = Fingerprint;
    type Graph = Sealed<O>;
    type Output = O;

    fn eager(&mut self, _watch: Watch) -> Result<(O, Option<Fingerprint>), StepError> {
        let context = Context::new(Mode::Plain, self.rates.clone(), None);
        let run = || run_eager(self.state, self.step, self.batch, false);
        let (output, _) = context::enter(context, run);
        if self.synced {
            let doing = "waiting for a step".to_string();
            self.core
                .sync()
                .map_err(|detail| StepError::Device { doing, detail })?;
        }
        Ok((output, None))
    }
    fn compare(_before: Option<&Fingerprint>, now: &Fingerprint) -> Verdict {
        match *now {}
    }
    fn record(
        &mut self,
        _attempt: u32,
        _rehearsed: Option<&Fingerprint>,
    ) -> Result<Attempt<Sealed<O>, O>, StepError> {
        Ok(Attempt::Busy)
    }
    fn replay(&mut self, graph: &Sealed<O>, _verify: bool) -> Result<O, NoReplay> {
        match graph.0 {}
    }
    fn bake_rate(&mut self) -> ShapeKey {
        self.baked.insert(self.key.clone());
        self.key.baked(self.rates.bits())
    }
    fn reset(&mut self) {}
    fn bytes(graph: &Sealed<O>) -> u64 {
        match graph.0 {}
    }
    fn launches(fingerprint: &Fingerprint) -> Option<u64> {
        match *fingerprint {}
    }
    fn launches_per_replay(graph: &Sealed<O>) -> Option<u64> {
        match graph.0 {}
    }
    fn released(&mut self) {}

    fn expected_bytes(&self) -> Option<u64> {
        None
    }
    fn device_bytes(&self) -> Option<u64> {
        None
    }
    fn wait(&mut self) -> Result<(), StepError> {
        Ok(())
    }
}
