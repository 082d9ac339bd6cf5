//! How a step is captured.

use crate::bucketing::Bucketing;
use serde::{Deserialize, Serialize};

/// What to do when a step cannot run as a graph.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Policy {
    /// Run it eagerly and give the reason in [`StepPath::Eager`](crate::StepPath::Eager). Once a recording was measured, a
    /// further key is recorded only when it comes by often enough for its replays to earn that time back, and not in the
    /// place of graphs that are worth more.
    #[default]
    Fallback,
    /// Do not run it: return [`StepError::GraphRequired`](crate::StepError::GraphRequired), the state left as
    /// it was. Warm-up steps still run eagerly: they are how a graph comes to be. For benches and tests.
    RequireGraph,
    /// As [`Fallback`](Self::Fallback), and a graph is kept only where it pays. After a graph is sealed, the next 14 steps of
    /// its key are a trial: eight run eagerly and six are replayed, most of them waited for and timed. Where replays are not
    /// at least 2 % faster (a step that the device limits), or where a graph was evicted before its replays earned its
    /// recording back, the key stays eager, with the reason in the report and its memory given back. It is tried again when
    /// the key's share of the calls has doubled or halved.
    Adaptive,
}

/// Settings of a [`GraphedStep`](crate::GraphedStep).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GraphConfig {
    /// Consecutive steps of one key that must run the same operations before it is recorded. Default 3, at
    /// least 2: one step has nothing to be compared with.
    pub warmup: u32,
    /// Sealed graphs held at once. Above it the one worth least is evicted: whose replays save the least time per call and
    /// byte held, which a graph that was not used for long does whatever its replays save. Default 8.
    pub max_graphs: usize,
    /// Bytes that graphs may hold together (static inputs, outputs, guarded pages); above it, those worth least are
    /// evicted, the newest never. Default: [`memory_share`](Self::memory_share) of what the device has.
    pub max_bytes: Option<u64>,
    /// The share of the device's memory that graphs of the step may hold where [`max_bytes`](Self::max_bytes) does not say.
    /// Default 0.5. Without effect on a device whose driver does not say what it has
    /// ([`device_memory`](crate::device_memory)).
    #[serde(default = "default_memory_share")]
    pub memory_share: f64,
    /// What to do when a step cannot run as a graph. Default: fall back to eager.
    pub policy: Policy,
    /// How often a window refused for room is tried again, each time with a larger headroom reserve.
    /// Default 3.
    pub room_retries: u32,
    /// Wait for the device inside [`GraphedStep::run`](crate::GraphedStep::run), so that the report's times
    /// are those of the device and not of enqueueing. Slower; for measuring. Default off.
    pub synced_timing: bool,
    /// Update all parameters of a [`Training`](crate::Training) by a few launches for all of them together, in place where
    /// nothing reads their old values, rather than by Burn's operations for each. Default off. For `f32` parameters and
    /// [`optim`](crate::optim)'s SGD, Adam and AdamW without AMSGrad, cautious decay or loss scaling; other updates stay as
    /// they are. Also [`clip_by_global_norm`](crate::optim::clip_by_global_norm).
    ///
    /// The arithmetic of an update is Burn's, operation by operation. But the kernel of a gradient is then not fused with
    /// its update, and may be tuned to sum in another order, so trained parameters may differ from plain Burn's in their
    /// last bits. Eager and replayed steps of one configuration agree.
    pub fused_updates: bool,
    /// How batches are padded to a few shapes, one after the other. Default: not at all.
    #[serde(default)]
    pub bucketing: Vec<Bucketing>,
    /// Every so many replays of the step, run the step eagerly as well, from a snapshot, and compare state and output. A
    /// difference is [`StepError::Verification`](crate::StepError::Verification). Default: never. A verified step costs
    /// an eager step, a copy of the state, and reading both states back.
    pub verify: Option<u32>,
    /// How far a verified value may be off, relative to the larger of 1 and its own magnitude. Default 0: the same bits,
    /// which is what a replay leaves on kernels that repeat their own results. Some add with atomics, in an order that
    /// changes from run to run (convolutions at batch 1, say): give their steps a tolerance.
    pub verify_tolerance: f32,
}

fn default_memory_share() -> f64 {
    0.5
}

impl Default for GraphConfig {
    fn default() -> Self {
        Self {
            warmup: 3,
            max_graphs: 8,
            max_bytes: None,
            memory_share: default_memory_share(),
            policy: Policy::default(),
            room_retries: 3,
            synced_timing: false,
            fused_updates: false,
            bucketing: Vec::new(),
            verify: None,
            verify_tolerance: 0.0,
        }
    }
}

impl GraphConfig {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Set [`warmup`](Self::warmup), raised to 2 where it is less.
    pub fn with_warmup(mut self, warmup: u32) -> Self {
        self.warmup = warmup.max(2);
        self
    }

    /// Set [`max_graphs`](Self::max_graphs), raised to 1 where it is 0.
    pub fn with_max_graphs(mut self, max_graphs: usize) -> Self {
        self.max_graphs = max_graphs.max(1);
        self
    }

    /// Set [`max_bytes`](Self::max_bytes).
    pub fn with_max_bytes(mut self, max_bytes: u64) -> Self {
        self.max_bytes = Some(max_bytes);
        self
    }

    /// Set [`memory_share`](Self::memory_share), between 0 and 1; what is no number stands for 0.
    pub fn with_memory_share(mut self, share: f64) -> Self {
        self.memory_share = if share > 0.0 { share.min(1.0) } else { 0.0 };
        self
    }

    /// Set [`policy`](Self::policy).
    pub fn with_policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Set [`room_retries`](Self::room_retries).
    pub fn with_room_retries(mut self, room_retries: u32) -> Self {
        self.room_retries = room_retries;
        self
    }

    /// Set [`synced_timing`](Self::synced_timing).
    pub fn with_synced_timing(mut self, synced: bool) -> Self {
        self.synced_timing = synced;
        self
    }

    /// Set [`fused_updates`](Self::fused_updates).
    pub fn with_fused_updates(mut self, fused: bool) -> Self {
        self.fused_updates = fused;
        self
    }

    /// Pad batches by `bucketing`, after those that were given before.
    pub fn with_bucketing(mut self, bucketing: Bucketing) -> Self {
        self.bucketing.push(bucketing);
        self
    }

    /// Set [`verify`](Self::verify) to every `replays`-th replay, raised to 1 where it is 0.
    pub fn verify(mut self, replays: u32) -> Self {
        self.verify = Some(replays.max(1));
        self
    }

    /// Set [`verify_tolerance`](Self::verify_tolerance).
    pub fn with_verify_tolerance(mut self, tolerance: f32) -> Self {
        self.verify_tolerance = tolerance;
        self
    }
}
