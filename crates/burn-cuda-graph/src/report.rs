//! What happened: counts, times, bytes.

use crate::error::FallbackReason;
use crate::shape_key::ShapeKey;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

#[derive(Debug, Clone, Default)]
pub(crate) struct Counters {
    pub eager: u64,
    pub recorded: u64,
    pub replayed: u64,
    pub captures: u64,
    pub evictions: u64,
    pub invalidations: u64,
    refusals: BTreeMap<String, u64>,
    last_refusal: Option<FallbackReason>,
    fallbacks: BTreeMap<String, u64>,
    last_fallback: Option<FallbackReason>,
}

impl Counters {
    pub fn refuse(&mut self, reason: &FallbackReason) {
        self.last_refusal = Some(reason.clone());
        *self.refusals.entry(reason.name().to_string()).or_default() += 1;
    }
    pub fn fall_back(&mut self, reason: &FallbackReason) {
        self.last_fallback = Some(reason.clone());
        *self.fallbacks.entry(reason.name().to_string()).or_default() += 1;
    }
}

/// The last so many durations.
#[derive(Debug)]
pub(crate) struct Samples(VecDeque<Duration>);

impl Samples {
    const KEPT: usize = 512;

    pub fn new() -> Self {
        Self(VecDeque::new())
    }
    pub fn add(&mut self, elapsed: Duration) {
        if self.0.len() == Self::KEPT {
            self.0.pop_front();
        }
        self.0.push_back(elapsed);
    }
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    pub fn median_ms(&self) -> Option<f64> {
        median_ms(&self.0)
    }
}

/// The median in milliseconds, the upper of the middle two; `None` of nothing.
pub(crate) fn median_ms<'a>(times: impl IntoIterator<Item = &'a Duration>) -> Option<f64> {
    let mut times: Vec<Duration> = times.into_iter().copied().collect();
    let middle = times.len() / 2;
    // Asked at each call of a key that is left eager: no more is sorted than the middle takes.
    (!times.is_empty()).then(|| times.select_nth_unstable(middle).1.as_secs_f64() * 1e3)
}

/// One shape key's share of a [`Report`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EntryReport {
    /// The key.
    pub key: ShapeKey,
    /// `warming`, `ready`, `sealed` or `refused`.
    pub phase: String,
    /// Device bytes its graph holds: static inputs, outputs, and the pages CubeCL guards for it.
    pub bytes: u64,
    /// Steps of this key that ran eagerly.
    pub eager: u64,
    /// Replays of its graph.
    pub replayed: u64,
    /// Why it is refused, when it is.
    pub refusal: Option<FallbackReason>,
    /// Why its last eager step was eager.
    pub last_fallback: Option<FallbackReason>,
}

/// What a [`GraphedStep`](crate::GraphedStep) did so far.
///
/// `eager + recorded + replayed` is the number of steps taken. `Display` prints it for people, serde for
/// machines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Report {
    /// Steps run eagerly, warm-up included.
    pub eager: u64,
    /// Steps recorded and executed by their graph's first replay.
    pub recorded: u64,
    /// Steps replayed after that.
    pub replayed: u64,
    /// Graphs sealed.
    pub captures: u64,
    /// Graphs dropped to respect a bound.
    pub evictions: u64,
    /// Graphs dropped because the state was changed from outside the step.
    pub invalidations: u64,
    /// Refusals, by [`FallbackReason::name`].
    pub refusals: BTreeMap<String, u64>,
    /// The last refusal, in full.
    pub last_refusal: Option<FallbackReason>,
    /// Eager steps, by [`FallbackReason::name`].
    pub fallbacks: BTreeMap<String, u64>,
    /// Why the last eager step was eager, in full.
    pub last_fallback: Option<FallbackReason>,
    /// Sealed graphs held now.
    pub graphs_held: usize,
    /// Device bytes that sealed graphs hold now, together.
    pub bytes_held: u64,
    /// Median time of a call that ran eagerly. Time to enqueue, unless
    /// [`GraphConfig::synced_timing`](crate::GraphConfig::synced_timing) is on.
    pub median_eager_ms: Option<f64>,
    /// Those calls were warm-up steps, which are watched, and some of which compile kernels: plain ones take less.
    pub eager_in_warmup: bool,
    /// Median time of a call that replayed; the same remark.
    pub median_replay_ms: Option<f64>,
    /// Median time of a call that recorded: window, sealing and first replay.
    pub median_capture_ms: Option<f64>,
    /// Kernel launches of an eager step.
    pub launches_per_eager_step: Option<u64>,
    /// Launches of a call that replays: the graph, and the copies in and out.
    pub launches_per_replay: Option<u64>,
    /// The difference of the two.
    pub launches_saved_per_step: Option<u64>,
    /// Calls whose batch was padded ([`GraphConfig::bucketing`](crate::GraphConfig::bucketing)).
    #[serde(default)]
    pub padded_calls: u64,
    /// The share of padding in the elements of the tensors that bucketing names, over all calls.
    #[serde(default)]
    pub padding_share: Option<f64>,
    /// Calls with a length above the largest bucket, which was left as it is.
    #[serde(default)]
    pub above_buckets: u64,
    /// Per key, most used first.
    pub entries: Vec<EntryReport>,
}

impl Report {
    pub(crate) fn new(
        counters: &Counters,
        entries: Vec<EntryReport>,
        (eager, eager_in_warmup): (&Samples, bool),
        replay: &Samples,
        capture: &Samples,
        launches_eager: Option<u64>,
        launches_replay: Option<u64>,
    ) -> Self {
        Self {
            eager: counters.eager,
            recorded: counters.recorded,
            replayed: counters.replayed,
            captures: counters.captures,
            evictions: counters.evictions,
            invalidations: counters.invalidations,
            refusals: counters.refusals.clone(),
            last_refusal: counters.last_refusal.clone(),
            fallbacks: counters.fallbacks.clone(),
            last_fallback: counters.last_fallback.clone(),
            graphs_held: entries
                .iter()
                .filter(|entry| entry.phase == "sealed")
                .count(),
            bytes_held: entries.iter().map(|entry| entry.bytes).sum(),
            median_eager_ms: eager.median_ms(),
            eager_in_warmup,
            median_replay_ms: replay.median_ms(),
            median_capture_ms: capture.median_ms(),
            launches_per_eager_step: launches_eager,
            launches_per_replay: launches_replay,
            launches_saved_per_step: launches_eager
                .zip(launches_replay)
                .map(|(eager, replay)| eager.saturating_sub(replay)),
            padded_calls: 0,
            padding_share: None,
            above_buckets: 0,
            entries,
        }
    }

    /// Of `steps` that all ran eagerly, for one reason.
    #[cfg(feature = "train")]
    pub(crate) fn eager_only(steps: u64, reason: &FallbackReason) -> Self {
        let mut counters = Counters {
            eager: steps,
            last_fallback: Some(reason.clone()),
            ..Counters::default()
        };
        counters.fallbacks.insert(reason.name().to_string(), steps);
        let none = Samples::new();
        Self::new(
            &counters,
            Vec::new(),
            (&none, false),
            &none,
            &none,
            None,
            None,
        )
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.eager + self.recorded + self.replayed
    }
}

impl core::fmt::Display for Report {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let ms = |value: Option<f64>| value.map_or("-".to_string(), |v| format!("{v:.3} ms"));
        let count = |value: Option<u64>| value.map_or("-".to_string(), |v| v.to_string());
        writeln!(
            f,
            "steps      {} = {} eager + {} recorded + {} replayed",
            self.steps(),
            self.eager,
            self.recorded,
            self.replayed
        )?;
        writeln!(
            f,
            "graphs     {} held, {} captured, {} evicted, {} invalidated, {:.1} MiB held",
            self.graphs_held,
            self.captures,
            self.evictions,
            self.invalidations,
            self.bytes_held as f64 / (1 << 20) as f64
        )?;
        writeln!(
            f,
            "call time  eager {}{}, replay {}, capture {} (medians)",
            ms(self.median_eager_ms),
            match self.eager_in_warmup {
                true => " in warm-up",
                false => "",
            },
            ms(self.median_replay_ms),
            ms(self.median_capture_ms)
        )?;
        write!(
            f,
            "launches   {} per eager step, {} per replay, {} saved",
            count(self.launches_per_eager_step),
            count(self.launches_per_replay),
            count(self.launches_saved_per_step)
        )?;
        if let Some(share) = self.padding_share {
            write!(
                f,
                "\npadding    {} calls padded, {:.1} % of the elements, {} calls above the largest bucket",
                self.padded_calls,
                100.0 * share,
                self.above_buckets
            )?;
        }
        for (name, steps) in &self.fallbacks {
            write!(f, "\neager      {steps} steps: {name}")?;
        }
        for (name, times) in &self.refusals {
            write!(f, "\nrefused    {times} times: {name}")?;
        }
        if let Some(reason) = &self.last_refusal {
            write!(f, "\nrefused    last: {reason}")?;
        }
        for entry in self.entries.iter().take(8) {
            write!(
                f,
                "\nkey        [{}] {}: {} eager, {} replayed, {:.1} MiB",
                entry.key,
                entry.phase,
                entry.eager,
                entry.replayed,
                entry.bytes as f64 / (1 << 20) as f64
            )?;
        }
        if self.entries.len() > 8 {
            write!(f, "\nkey        ... and {} more", self.entries.len() - 8)?;
        }
        Ok(())
    }
}
