//! Decides what each call does, and keeps the counts.
//!
//! Generic over the host that runs, records and replays steps, so that the whole of it is tested against a
//! scripted one: whatever refusals, panics and keys come by, every call takes exactly one step.

use crate::cache::{Cache, CacheEntry};
use crate::config::{GraphConfig, Policy};
use crate::error::{FallbackReason, Mismatch, StepError};
use crate::lifecycle::{Decision, Lifecycle, Refusal, Verdict};
use crate::report::{Counters, EntryReport, Report, Samples};
use crate::shape_key::ShapeKey;
use crate::step::StepPath;
use crate::trial::{Found, Frequency, Trial};
use crate::worth::{Usage, worth};
use std::time::Instant;

/// Different keys seen without a graph sealing before keys seen once are no longer watched.
const UNSETTLED_KEYS: usize = 16;

/// Replays that a key has to let expect, then, to be watched.
const UNSETTLED_NEED: u64 = 16;

/// How many times what a graph held is worth a new one has to be worth to take its place: keys that take turns are not to
/// evict each other for ever.
const DISPLACES: f64 = 1.5;

/// How an eager step is to be run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Watch {
    /// As plain Burn would.
    Off,
    /// As plain Burn would, and waited for behind.
    Waited,
    /// Watching its operations.
    On,
    /// Watching, with the stream prepared for capture: the last step before a window.
    Rehearse,
}

impl Watch {
    /// Whether nobody watches.
    pub fn is_off(self) -> bool {
        matches!(self, Self::Off | Self::Waited)
    }
}

/// A stream that shares one of the device's with another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Neighbour {
    /// Its number.
    pub stream: u64,
    /// Streams that the device has for all.
    pub streams: u64,
}

/// What an attempt to record a step came to. When it is not sealed, the state is what it was before.
pub(crate) enum Attempt<G, O> {
    /// Recorded, and executed by the first replay.
    Sealed { graph: G, output: O },
    /// The window gave no graph.
    Refused(Refusal),
    /// No window was opened: another is open on the device.
    Busy,
    /// A thread that shares the device's stream with the step is at work: no window was opened, or what it gave was
    /// dropped.
    Shared(Neighbour),
    /// No window was opened: what the rehearsal left warm is gone, so the step is to be rehearsed again.
    Stale,
    /// The step uses its learning rate as a number, so what was recorded would hold for one rate only.
    RateBaked,
    /// The state no longer fits the buffers that the graphs share; nothing was recorded.
    Misfit(String),
}

/// Why a sealed graph was not replayed.
#[derive(Debug)]
pub(crate) enum NoReplay {
    /// The state no longer fits the graphs' buffers; nothing was enqueued and the state is as it was.
    Misfit(String),
    /// The device refused.
    Failed(String),
    /// It ran, and left something else than the eager step, which is what the state is now.
    Wrong(Box<Mismatch>),
}

/// Runs steps for the engine.
pub(crate) trait StepHost {
    /// What a watched step showed.
    type Fingerprint;
    /// A sealed graph and the tensors it owns.
    type Graph;
    /// What a step returns.
    type Output;

    /// Run the step eagerly. On a panic in the user's closure the state is put back before it goes on unwinding.
    fn eager(
        &mut self,
        watch: Watch,
    ) -> Result<(Self::Output, Option<Self::Fingerprint>), StepError>;
    /// Compare a step with the one before of the same key.
    fn compare(before: Option<&Self::Fingerprint>, now: &Self::Fingerprint) -> Verdict;
    /// Record the step, which must do what `rehearsed` did, and run its first replay. Puts the state back when it gives no
    /// graph or unwinds.
    fn record(
        &mut self,
        attempt: u32,
        rehearsed: Option<&Self::Fingerprint>,
    ) -> Result<Attempt<Self::Graph, Self::Output>, StepError>;
    /// Replay a sealed graph.
    /// With `verify`, compare it with the eager step.
    fn replay(&mut self, graph: &Self::Graph, verify: bool) -> Result<Self::Output, NoReplay>;
    /// From now on the learning rate is part of the key: this step's key with it.
    fn bake_rate(&mut self) -> ShapeKey;
    /// Every graph is gone: let go of what they shared.
    fn reset(&mut self);
    /// Bytes a sealed graph holds.
    fn bytes(graph: &Self::Graph) -> u64;
    /// Device launches: of the watched step, and of a call that replays.
    fn launches(fingerprint: &Self::Fingerprint) -> Option<u64>;
    fn launches_per_replay(graph: &Self::Graph) -> Option<u64>;
    /// A graph was dropped: give its memory back.
    fn released(&mut self);
    /// Wait for the device.
    fn wait(&mut self) -> Result<(), StepError>;
    /// Bytes that a graph of this step is expected to hold, as its rehearsal showed.
    fn expected_bytes(&self) -> Option<u64>;
    /// Bytes of memory that the device has, where its driver says so.
    fn device_bytes(&self) -> Option<u64>;
}

#[derive(Debug)]
struct Entry<F, G> {
    lifecycle: Lifecycle,
    fingerprint: Option<F>,
    graph: Option<G>,
    bytes: u64,
    eager: u64,
    replays: u64,
    /// Why its last eager step was eager.
    last: Option<FallbackReason>,
    /// How often it came by.
    usage: Usage,
    /// Replays of the graph it has.
    earned: u64,
    /// Whether its graph pays is being found out.
    trial: Option<Trial>,
    /// What the last trial found.
    found: Option<Found>,
    /// How often it came by when it was left eager because its graph does not pay.
    left: Option<Frequency>,
}

impl<F, G> Entry<F, G> {
    fn new(warmup: u32, room_retries: u32) -> Self {
        Self {
            lifecycle: Lifecycle::new(warmup, room_retries),
            fingerprint: None,
            graph: None,
            bytes: 0,
            eager: 0,
            replays: 0,
            last: None,
            usage: Usage::default(),
            earned: 0,
            trial: None,
            found: None,
            left: None,
        }
    }
}

impl<F, G> CacheEntry for Entry<F, G> {
    fn sealed_bytes(&self) -> Option<u64> {
        self.graph.as_ref().map(|_| self.bytes)
    }
}

/// The engine of one step.
#[derive(Debug)]
pub(crate) struct Engine<F, G> {
    config: GraphConfig,
    cache: Cache<Entry<F, G>>,
    counters: Counters,
    eager_times: Samples,
    /// Watched steps; they stand in for eager ones where there are no others.
    warmup_times: Samples,
    replay_times: Samples,
    capture_times: Samples,
    last_key: Option<ShapeKey>,
    /// Different keys since the last seal.
    unsettled: usize,
    warned_unsettled: bool,
    launches_eager: Option<u64>,
    launches_replay: Option<u64>,
    /// The bound on bytes where the configuration has none; not known before the first graph.
    default_bytes: Option<Option<u64>>,
    /// Calls that looked for an entry.
    calls: u64,
}

impl<F, G> Engine<F, G> {
    pub fn new(config: GraphConfig) -> Self {
        Self {
            config,
            cache: Cache::new(),
            counters: Counters::default(),
            eager_times: Samples::new(),
            warmup_times: Samples::new(),
            replay_times: Samples::new(),
            capture_times: Samples::new(),
            last_key: None,
            unsettled: 0,
            warned_unsettled: false,
            launches_eager: None,
            launches_replay: None,
            default_bytes: None,
            calls: 0,
        }
    }

    /// The sealed graph of `key`, left as recently used as it was.
    pub fn sealed(&self, key: &ShapeKey) -> Option<&G> {
        self.cache.get(key).and_then(|entry| entry.graph.as_ref())
    }

    /// Whether the next step of `key` would open a window.
    pub fn would_record(&self, key: &ShapeKey) -> bool {
        let entry = self.cache.get(key);
        entry.is_some_and(|entry| matches!(entry.lifecycle.decide(), Decision::Record { .. }))
    }

    pub fn config(&self) -> &GraphConfig {
        &self.config
    }

    /// Take one step.
    ///
    /// `blocked` is a reason found before any of it, which keeps the step from being a graph whatever its entry
    /// says.
    pub fn step<H>(
        &mut self,
        key: ShapeKey,
        blocked: Option<FallbackReason>,
        host: &mut H,
    ) -> Result<(H::Output, StepPath), StepError>
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        if let Some(reason) = blocked {
            return self.stay(None, reason, host);
        }

        self.calls += 1;
        if let Some(entry) = self.cache.touch(&key) {
            entry.usage.note(self.calls);
            match (&entry.graph, &entry.trial) {
                // The hot path: nothing to decide.
                (Some(_), None) => return self.replay(key, host),
                (Some(_), Some(_)) => return self.try_out(key, host),
                (None, _) => {}
            }
            let (usage, frequency) = (entry.usage, entry.left.as_mut());
            let since = self.calls - usage.calls_before;
            if frequency.is_some_and(|left| left.changed(since, usage.seen)) {
                entry.left = None;
                entry.lifecycle.restart();
            }
        }

        let moved = self.rate_moved(&key);
        let new = !self.cache.contains(&key);
        let unsettled = self.unsettled >= UNSETTLED_KEYS;
        if new {
            self.unsettled += 1;
        }
        let (warmup, retries) = (self.config.warmup, self.config.room_retries);
        let calls = self.calls;
        let entry = self.cache.entry(&key, || Entry::new(warmup, retries));
        if new {
            entry.usage.note(calls);
        }
        // Among keys that come and go, one is watched when it comes by as often as a graph needs.
        let unsettled_now = unsettled && entry.usage.expected(calls) < UNSETTLED_NEED;
        let decision = entry.lifecycle.decide();
        self.last_key = Some(key.clone());

        match decision {
            Decision::Warm { .. } if unsettled_now => {
                let reason = moved.unwrap_or(FallbackReason::NeverSettles {
                    keys: self.unsettled,
                });
                self.require(&reason)?;
                if !self.warned_unsettled {
                    self.warned_unsettled = true;
                    log::warn!("steps stay eager: {reason}");
                }
                // A key that hardly ever comes back is not worth the watching.
                let started = Instant::now();
                let (output, _) = host.eager(Watch::Off)?;
                self.count_eager(Some(&key), started, &reason);
                Ok((output, StepPath::Eager(reason)))
            }
            Decision::Warm { rehearse } => self.warm(key, rehearse, moved, host),
            Decision::Record { attempt } => match self.not_worth_it(&key, host) {
                Some(reason) => self.stay(Some(&key), reason, host),
                None => self.record(key, attempt, host),
            },
            Decision::Replay => self.replay(key, host),
            Decision::Stay(reason) => self.stay(Some(&key), reason, host),
        }
    }

    /// Replays that earn a recording back, from what was measured; `None` before anything was.
    fn break_even(&self, entry: &Entry<F, G>) -> Option<u64> {
        let capture_ms = self.capture_times.median_ms()?;
        entry.found.or_else(|| self.found())?.break_even(capture_ms)
    }

    /// What the calls of all keys took, for a key that had no trial of its own.
    fn found(&self) -> Option<Found> {
        let watched = || self.warmup_times.median_ms();
        Some(Found {
            eager_ms: self.eager_times.median_ms().or_else(watched)?,
            replay_ms: self.replay_times.median_ms()?,
        })
    }

    /// What the graph of an entry is worth, or one of `bytes` would be.
    fn worth(&self, entry: &Entry<F, G>, bytes: u64) -> f64 {
        let gain = entry.found.map(|found| found.gain_ms());
        worth(entry.usage.rate(self.calls), gain, bytes)
    }

    fn max_bytes(&self) -> Option<u64> {
        self.config.max_bytes.or(self.default_bytes.flatten())
    }

    /// Why the stable key is not recorded now.
    fn not_worth_it<H>(&self, key: &ShapeKey, host: &H) -> Option<FallbackReason>
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        if self.config.policy == Policy::RequireGraph {
            return None;
        }
        let entry = self.cache.get(key)?;
        let expected = entry.usage.expected(self.calls);
        if let Some(needed) = self.break_even(entry).filter(|needed| expected < *needed) {
            return Some(FallbackReason::TooRare { expected, needed });
        }
        let (graphs, held) = (self.cache.sealed_count(), self.cache.sealed_bytes());
        let bytes = host.expected_bytes().unwrap_or(0);
        let over = |graphs: usize, held: u64| {
            graphs + 1 > self.config.max_graphs
                || self.max_bytes().is_some_and(|max| held + bytes > max)
        };
        // The graphs that would have to go, the one worth least first, and whether each is worth less than this one.
        let mut others: Vec<(f64, u64)> = (self.cache.iter())
            .filter_map(|(_, entry)| Some((entry, entry.sealed_bytes()?)))
            .map(|(entry, bytes)| (self.worth(entry, bytes), bytes))
            .collect();
        others.sort_by(|(a, _), (b, _)| a.total_cmp(b));
        let own = self.worth(entry, bytes);
        let (mut left, mut left_bytes) = (graphs, held);
        for (other, other_bytes) in others {
            if !over(left, left_bytes) {
                break;
            }
            if own < other * DISPLACES {
                return Some(FallbackReason::CacheFull {
                    graphs,
                    bytes: held,
                });
            }
            left -= 1;
            left_bytes -= other_bytes;
        }
        None
    }

    fn stay<H>(
        &mut self,
        key: Option<&ShapeKey>,
        reason: FallbackReason,
        host: &mut H,
    ) -> Result<(H::Output, StepPath), StepError>
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        self.require(&reason)?;
        let started = Instant::now();
        let (output, _) = host.eager(Watch::Off)?;
        self.count_eager(key, started, &reason);
        Ok((output, StepPath::Eager(reason)))
    }

    fn warm<H>(
        &mut self,
        key: ShapeKey,
        rehearse: bool,
        moved: Option<FallbackReason>,
        host: &mut H,
    ) -> Result<(H::Output, StepPath), StepError>
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        let watch = match rehearse {
            true => Watch::Rehearse,
            false => Watch::On,
        };
        let started = Instant::now();
        let taken = match host.eager(watch) {
            // It took no step. Graphs of other keys may hold the memory that it lacked.
            Err(StepError::Uncomputed { detail }) if self.make_room(u64::MAX, &key, host) => {
                log::warn!("[{key}] the other graphs are dropped, since a step failed: {detail}");
                host.eager(watch)
            }
            taken => taken,
        };
        let (output, fingerprint) = taken?;
        self.warmup_times.add(started.elapsed());
        let Some(entry) = self.cache.get_mut(&key) else {
            return Ok((output, StepPath::Eager(FallbackReason::CaptureBusy)));
        };
        entry.eager += 1;
        self.counters.eager += 1;
        let mut reason = match fingerprint {
            Some(now) => {
                if let Some(launches) = H::launches(&now) {
                    self.launches_eager = Some(launches);
                }
                let verdict = H::compare(entry.fingerprint.as_ref(), &now);
                if let Verdict::RateBaked { before, after } = verdict {
                    let path = self.rate_baked(key, now, (before, after), host);
                    return Ok((output, path));
                }
                entry.fingerprint = Some(now);
                let reason = entry.lifecycle.watched(verdict);
                if entry.lifecycle.refusal().is_some() {
                    self.counters.refuse(&reason);
                    log::warn!("[{key}] stays eager: {reason}");
                }
                reason
            }
            None => FallbackReason::CaptureBusy,
        };
        if let (Some(moved), FallbackReason::WarmingUp { done: 1, .. }) = (moved, &reason) {
            reason = moved;
        }
        if let Some(entry) = self.cache.get_mut(&key) {
            entry.last = Some(reason.clone());
        }
        self.counters.fall_back(&reason);
        Ok((output, StepPath::Eager(reason)))
    }

    /// The state no longer fits the buffers that the graphs share: drop them, and run this step eagerly.
    fn misfit<H>(
        &mut self,
        key: &ShapeKey,
        detail: String,
        host: &mut H,
    ) -> Result<(H::Output, StepPath), StepError>
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        let reason = FallbackReason::Refused { detail };
        log::warn!("[{key}] graphs dropped, warming up anew: {reason}");
        self.counters.refuse(&reason);
        self.invalidate();
        host.reset();
        self.stay(None, reason, host)
    }

    /// A watched step showed that its launches hold the learning rate: begin again under a key that has it.
    fn rate_baked<H>(
        &mut self,
        key: ShapeKey,
        now: F,
        (before, after): (f64, f64),
        host: &mut H,
    ) -> StepPath
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        let key = self.move_entry(&key, host);
        let mut reason = FallbackReason::CaptureBusy;
        if let Some(entry) = self.cache.get_mut(&key) {
            entry.lifecycle.restart();
            reason = entry.lifecycle.watched(Verdict::First);
            entry.fingerprint = Some(now);
        }
        if before != after {
            reason = FallbackReason::LearningRateMoved { before, after };
        }
        if let Some(entry) = self.cache.get_mut(&key) {
            entry.last = Some(reason.clone());
        }
        self.counters.fall_back(&reason);
        StepPath::Eager(reason)
    }

    /// Move the entry of `key` to the key that has the learning rate in it.
    fn move_entry<H>(&mut self, key: &ShapeKey, host: &mut H) -> ShapeKey
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        log::info!(
            "[{key}] uses its learning rate as a number: each rate needs a graph of its own"
        );
        let baked = host.bake_rate();
        let (warmup, retries) = (self.config.warmup, self.config.room_retries);
        let entry = self
            .cache
            .remove(key)
            .unwrap_or_else(|| Entry::new(warmup, retries));
        self.cache.entry(&baked, || entry);
        self.last_key = Some(baked.clone());
        baked
    }

    fn record<H>(
        &mut self,
        key: ShapeKey,
        attempt: u32,
        host: &mut H,
    ) -> Result<(H::Output, StepPath), StepError>
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        let started = Instant::now();
        // Borrowed, not taken: a panic in the step must leave it for the next attempt.
        let rehearsed = self
            .cache
            .get_mut(&key)
            .and_then(|entry| entry.fingerprint.as_ref());
        let attempted = host.record(attempt, rehearsed);
        let reason = match attempted? {
            Attempt::Sealed { graph, output } => {
                self.capture_times.add(started.elapsed());
                let bytes = H::bytes(&graph);
                self.launches_replay = H::launches_per_replay(&graph);
                if let Some(entry) = self.cache.get_mut(&key) {
                    entry.graph = Some(graph);
                    entry.bytes = bytes;
                    entry.lifecycle.sealed();
                    entry.earned = 0;
                    // What one trial found holds for the next graph of the key.
                    let adaptive = self.config.policy == Policy::Adaptive;
                    entry.trial = (adaptive && entry.found.is_none()).then(Trial::default);
                }
                self.counters.recorded += 1;
                self.counters.captures += 1;
                let share = self.config.memory_share;
                self.default_bytes
                    .get_or_insert_with(|| Some((host.device_bytes()? as f64 * share) as u64));
                self.unsettled = 0;
                log::info!(
                    "[{key}] captured in {:.1} ms, holding {bytes} bytes",
                    started.elapsed().as_secs_f64() * 1e3
                );
                self.evict(&key, host);
                return Ok((output, StepPath::Recorded));
            }
            Attempt::Refused(Refusal::Memory { needed_bytes, .. })
                if self.make_room(needed_bytes, &key, host) =>
            {
                return self.record(key, attempt, host);
            }
            Attempt::Refused(refusal) => {
                let reason = match self.cache.get_mut(&key) {
                    Some(entry) => entry.lifecycle.refused(refusal),
                    None => FallbackReason::CaptureBusy,
                };
                self.counters.refuse(&reason);
                log::warn!("[{key}] not captured: {reason}");
                reason
            }
            Attempt::Busy => FallbackReason::CaptureBusy,
            Attempt::Shared(Neighbour { stream, streams }) => FallbackReason::StreamShared {
                neighbour: stream,
                streams,
            },
            Attempt::Misfit(detail) => return self.misfit(&key, detail, host),
            Attempt::RateBaked => {
                let key = self.move_entry(&key, host);
                return self.record(key, attempt, host);
            }
            Attempt::Stale => {
                if let Some(entry) = self.cache.get_mut(&key) {
                    entry.lifecycle.rehearse_again();
                }
                return self.warm(key, true, None, host);
            }
        };
        self.require(&reason)?;
        let started = Instant::now();
        let (output, _) = host.eager(Watch::Off)?;
        self.count_eager(Some(&key), started, &reason);
        Ok((output, StepPath::Eager(reason)))
    }

    fn replay<H>(&mut self, key: ShapeKey, host: &mut H) -> Result<(H::Output, StepPath), StepError>
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        let started = Instant::now();
        let Some(entry) = self.cache.get_mut(&key) else {
            return self.stay(None, FallbackReason::CaptureBusy, host);
        };
        let Some(graph) = entry.graph.as_ref() else {
            entry.lifecycle.evicted();
            return self.stay(Some(&key), FallbackReason::CaptureBusy, host);
        };
        // A verified replay takes an eager step as well, which would be timed with it.
        let verify = entry
            .trial
            .is_none()
            .then_some(self.config.verify)
            .flatten();
        let verify = verify.is_some_and(|every| {
            self.counters
                .replayed
                .wrapping_add(1)
                .is_multiple_of(u64::from(every))
        });
        match host.replay(graph, verify) {
            Ok(output) => {
                entry.replays += 1;
                entry.earned += 1;
                self.counters.replayed += 1;
                self.replay_times.add(started.elapsed());
                Ok((output, StepPath::Replayed))
            }
            Err(NoReplay::Misfit(detail)) => self.misfit(&key, detail, host),
            Err(NoReplay::Wrong(mismatch)) => {
                log::error!("[{key}] stays eager: {mismatch}");
                entry.graph = None;
                let reason = FallbackReason::NotVerified(mismatch.clone());
                entry.lifecycle.refuse(reason.clone());
                entry.bytes = 0;
                // The eager step is the one that was taken.
                entry.eager += 1;
                self.counters.eager += 1;
                self.counters.fall_back(&reason);
                self.counters.refuse(&reason);
                host.released();
                Err(StepError::Verification(mismatch))
            }
            Err(NoReplay::Failed(detail)) => {
                log::error!("[{key}] replay failed: {detail}");
                Err(StepError::Replay {
                    key: Box::new(key),
                    detail,
                })
            }
        }
    }

    /// The next step of a trial, and what follows from it when it was the last.
    fn try_out<H>(
        &mut self,
        key: ShapeKey,
        host: &mut H,
    ) -> Result<(H::Output, StepPath), StepError>
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        let entry = self.cache.get_mut(&key);
        let turn = entry.and_then(|entry| entry.trial.as_ref().and_then(Trial::turn));
        let Some(turn) = turn else {
            return self.replay(key, host);
        };
        if turn.timed {
            host.wait()?;
        }
        let started = Instant::now();
        let taken = match turn.replay {
            true => self.replay(key.clone(), host)?,
            false => {
                let reason = FallbackReason::Timed;
                let watch = match turn.timed {
                    true => Watch::Waited,
                    false => Watch::Off,
                };
                let (output, _) = host.eager(watch)?;
                self.count_eager(Some(&key), started, &reason);
                (output, StepPath::Eager(reason))
            }
        };
        // The step is taken, whatever the device says now: it will say so again at the next call.
        let waited = !turn.timed || host.wait().is_ok();
        let Some(entry) = self.cache.get_mut(&key) else {
            return Ok(taken);
        };
        if !waited {
            entry.trial = None;
        }
        let Some(trial) = entry.trial.as_mut() else {
            return Ok(taken);
        };
        trial.took(turn, started.elapsed());
        if let Some(found) = trial.found() {
            entry.trial = None;
            entry.found = Some(found);
            if !found.pays() {
                let reason = FallbackReason::ReplayDoesNotPay {
                    eager_ms: found.eager_ms,
                    replay_ms: found.replay_ms,
                };
                // A later trial is to look again.
                entry.found = None;
                self.leave(&key, reason);
                host.released();
            }
        }
        Ok(taken)
    }

    /// Drop the graph of `key` and stay eager until the key comes by more or less often.
    fn leave(&mut self, key: &ShapeKey, reason: FallbackReason) {
        log::info!("[{key}] stays eager: {reason}");
        self.counters.refuse(&reason);
        let calls = self.calls;
        if let Some(entry) = self.cache.get_mut(key) {
            entry.graph = None;
            entry.bytes = 0;
            entry.left = Some(Frequency::new(
                calls - entry.usage.calls_before,
                entry.usage.seen,
            ));
            entry.lifecycle.refuse(reason);
        }
    }

    fn evict<H>(&mut self, keep: &ShapeKey, host: &mut H)
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        while let Some(victim) =
            self.cache
                .over_bounds(self.config.max_graphs, self.max_bytes(), keep, |entry| {
                    self.worth(entry, entry.bytes)
                })
        {
            self.evict_one(&victim, host);
        }
    }

    /// Evict graphs of other keys than `keep`, those worth least first, until as many bytes are given back. Answers
    /// whether there was one.
    fn make_room<H>(&mut self, bytes: u64, keep: &ShapeKey, host: &mut H) -> bool
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        let mut given_back = 0;
        let mut any = false;
        while given_back < bytes.max(1) {
            let least = (self.cache).least(keep, |entry| self.worth(entry, entry.bytes));
            let Some(victim) = least else {
                break;
            };
            given_back += self.evict_one(&victim, host);
            any = true;
        }
        any
    }

    /// Drop the graph of `victim`; the bytes that it held.
    fn evict_one<H>(&mut self, victim: &ShapeKey, host: &mut H) -> u64
    where
        H: StepHost<Fingerprint = F, Graph = G>,
    {
        let capture_ms = self.capture_times.median_ms();
        let (mut too_rare, mut bytes) = (None, 0);
        if let Some(entry) = self.cache.get_mut(victim) {
            entry.graph = None;
            entry.lifecycle.evicted();
            bytes = core::mem::take(&mut entry.bytes);
            log::info!("[{victim}] evicted, giving back {bytes} bytes");
            // One that was evicted in its trial begins that anew.
            entry.trial = None;
            let needed = (entry.found.zip(capture_ms))
                .and_then(|(found, capture_ms)| found.break_even(capture_ms));
            too_rare = needed
                .filter(|needed| entry.earned < *needed)
                .map(|needed| FallbackReason::NotAmortised {
                    replays: entry.earned,
                    needed,
                });
        }
        if let Some(reason) = too_rare {
            self.leave(victim, reason);
        }
        self.counters.evictions += 1;
        host.released();
        bytes
    }

    /// Forget every entry: the state was changed from outside, or the step is to warm up anew.
    pub fn invalidate(&mut self) -> usize {
        let sealed = self.cache.clear();
        self.counters.invalidations += sealed as u64;
        self.last_key = None;
        self.unsettled = 0;
        sealed
    }

    fn require(&self, reason: &FallbackReason) -> Result<(), StepError> {
        match self.config.policy {
            Policy::Fallback | Policy::Adaptive => Ok(()),
            Policy::RequireGraph => Err(StepError::GraphRequired {
                reason: reason.clone(),
            }),
        }
    }

    /// An unwatched eager step, whose time counts: watching costs time that plain steps do not pay.
    fn count_eager(&mut self, key: Option<&ShapeKey>, started: Instant, reason: &FallbackReason) {
        self.counters.eager += 1;
        self.counters.fall_back(reason);
        self.eager_times.add(started.elapsed());
        if let Some(entry) = key.and_then(|key| self.cache.get_mut(key)) {
            entry.eager += 1;
            entry.last = Some(reason.clone());
        }
    }

    /// The rate of the last step that was not a replay, when this one differs in that alone.
    fn rate_moved(&self, key: &ShapeKey) -> Option<FallbackReason> {
        let last = self.last_key.as_ref()?;
        let (before, after) = (last.learning_rate()?, key.learning_rate()?);
        (key.differs_in_rate_only(last) && !self.cache.contains(key))
            .then_some(FallbackReason::LearningRateMoved { before, after })
    }

    pub fn report(&self) -> Report {
        let mut entries: Vec<EntryReport> = self
            .cache
            .iter()
            .map(|(key, entry)| EntryReport {
                key: key.clone(),
                phase: entry.lifecycle.name().to_string(),
                bytes: entry.sealed_bytes().unwrap_or(0),
                eager: entry.eager,
                replayed: entry.replays,
                refusal: entry.lifecycle.refusal().cloned(),
                last_fallback: entry.last.clone(),
            })
            .collect();
        entries.sort_by_key(|entry| core::cmp::Reverse((entry.replayed, entry.eager)));
        debug_assert!(
            self.cache
                .iter()
                .all(|(_, entry)| entry.lifecycle.is_sealed() == entry.graph.is_some())
        );
        Report::new(
            &self.counters,
            entries,
            match self.eager_times.is_empty() {
                true => (&self.warmup_times, !self.warmup_times.is_empty()),
                false => (&self.eager_times, false),
            },
            &self.replay_times,
            &self.capture_times,
            self.launches_eager,
            self.launches_replay,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// A host whose state is a counter: right means one more after every call that returns, whatever path it took.
    #[derive(Default)]
    struct Scripted {
        value: u64,
        /// Consumed front to back by `record`.
        windows: Vec<Outcome>,
        panics_eager: bool,
        misfits: bool,
        operations: u64,
        live_graphs: std::rc::Rc<std::cell::Cell<i64>>,
        released: u64,
        waits: u64,
        device_bytes: Option<u64>,
        /// Graphs that fit beside a step, and calls for which a step's own memory is short.
        fits: Option<i64>,
        /// How long an eager step and a replay take.
        eager_takes: std::time::Duration,
        replay_takes: std::time::Duration,
        record_takes: std::time::Duration,
        opened: u64,
        /// The key of the call without its rate, and the keys whose steps hold theirs.
        free: Option<ShapeKey>,
        baked: std::collections::HashSet<ShapeKey>,
        watched_rate: bool,
        wrong: bool,
    }

    #[derive(Clone, Copy, Debug)]
    enum Outcome {
        Seal,
        Room,
        Other,
        Final,
        Memory,
        Busy,
        Stale,
        RateBaked,
        Panic,
    }

    struct Graph(std::rc::Rc<std::cell::Cell<i64>>);
    impl Drop for Graph {
        fn drop(&mut self) {
            self.0.set(self.0.get() - 1);
        }
    }

    impl StepHost for Scripted {
        type Fingerprint = u64;
        type Graph = Graph;
        type Output = u64;

        fn eager(&mut self, watch: Watch) -> Result<(u64, Option<u64>), StepError> {
            assert!(!self.panics_eager, "scripted");
            let short = self.fits.is_some_and(|fits| self.live_graphs.get() > fits);
            if short && !watch.is_off() {
                let detail = "out of memory".into();
                return Err(StepError::Uncomputed { detail });
            }
            std::thread::sleep(self.eager_takes);
            self.value += 1;
            let baked = self
                .free
                .as_ref()
                .is_none_or(|key| self.baked.contains(key));
            let operations = match self.watched_rate && !baked {
                true => READS_RATE,
                false => self.operations,
            };
            Ok((self.value, (!watch.is_off()).then_some(operations)))
        }
        fn compare(before: Option<&u64>, now: &u64) -> Verdict {
            match before {
                _ if *now == READS_RATE => Verdict::RateBaked {
                    before: 0.1,
                    after: 0.2,
                },
                None => Verdict::First,
                // The same step, which is asked for its rate under a key that has it.
                Some(before) if before == now || *before == READS_RATE => Verdict::Same,
                Some(_) => Verdict::Differs(FallbackReason::UnstableOperations {
                    index: 0,
                    before: "a".into(),
                    after: "b".into(),
                }),
            }
        }
        fn record(
            &mut self,
            _attempt: u32,
            rehearsed: Option<&u64>,
        ) -> Result<Attempt<Graph, u64>, StepError> {
            assert!(rehearsed.is_some(), "recorded without a rehearsal");
            std::thread::sleep(self.record_takes);
            self.opened += 1;
            let outcome = match self.windows.is_empty() {
                true => Outcome::Seal,
                false => self.windows.remove(0),
            };
            Ok(match outcome {
                Outcome::Seal => {
                    self.value += 1;
                    self.live_graphs.set(self.live_graphs.get() + 1);
                    Attempt::Sealed {
                        graph: Graph(self.live_graphs.clone()),
                        output: self.value,
                    }
                }
                Outcome::Room => Attempt::Refused(Refusal::Room {
                    reserve_bytes: 1,
                    detail: "No room".into(),
                }),
                Outcome::Other => Attempt::Refused(Refusal::Other {
                    detail: "other".into(),
                }),
                Outcome::Final => Attempt::Refused(Refusal::Final(FallbackReason::HostRead {
                    detail: "read".into(),
                })),
                Outcome::Memory => Attempt::Refused(Refusal::Memory {
                    needed_bytes: 1,
                    detail: "out of memory".into(),
                }),
                Outcome::Busy => Attempt::Busy,
                Outcome::Stale => Attempt::Stale,
                Outcome::RateBaked => match &self.free {
                    Some(key) if !self.baked.contains(key) => Attempt::RateBaked,
                    _ => Attempt::Busy,
                },
                Outcome::Panic => panic!("scripted"),
            })
        }
        fn replay(&mut self, _graph: &Graph, verify: bool) -> Result<u64, NoReplay> {
            if self.misfits {
                return Err(NoReplay::Misfit("another shape".into()));
            }
            std::thread::sleep(self.replay_takes);
            self.value += 1;
            match verify && self.wrong {
                true => Err(NoReplay::Wrong(Box::new(mismatch()))),
                false => Ok(self.value),
            }
        }
        fn bake_rate(&mut self) -> ShapeKey {
            let free = self.free.clone().expect("a key");
            self.baked.insert(free.clone());
            free.baked(vec![1])
        }
        fn reset(&mut self) {
            assert_eq!(
                self.live_graphs.get(),
                0,
                "graphs go before what they share"
            );
        }
        fn bytes(_graph: &Graph) -> u64 {
            100
        }
        fn launches(_fingerprint: &u64) -> Option<u64> {
            Some(50)
        }
        fn launches_per_replay(_graph: &Graph) -> Option<u64> {
            Some(3)
        }
        fn released(&mut self) {
            self.released += 1;
        }
        fn wait(&mut self) -> Result<(), StepError> {
            self.waits += 1;
            Ok(())
        }
        fn expected_bytes(&self) -> Option<u64> {
            Some(100)
        }
        fn device_bytes(&self) -> Option<u64> {
            self.device_bytes
        }
    }

    fn key(id: u64) -> ShapeKey {
        ShapeKey {
            tensors: vec![],
            host: vec![crate::HostField::Int(id as i64)],
            rate_classes: vec![],
            learning_rate_bits: None,
        }
    }

    /// The operations of a step that reads its rate.
    const READS_RATE: u64 = u64::MAX;

    fn mismatch() -> Mismatch {
        Mismatch {
            name: "weight".into(),
            index: 0,
            differing: 1,
            elements: 1,
            largest: 1.0,
            first_index: 0,
            first_operation: "Add".into(),
            last_index: 0,
            last_operation: "Add".into(),
        }
    }

    /// Take a step as `GraphedStep` does: under the key that has the rate where the step holds it.
    fn take(
        engine: &mut Engine<u64, Graph>,
        id: u64,
        host: &mut Scripted,
    ) -> Result<(u64, StepPath), StepError> {
        let free = key(id);
        let key = match host.baked.contains(&free) {
            true => free.baked(vec![1]),
            false => free.clone(),
        };
        host.free = Some(free);
        engine.step(key, None, host)
    }

    /// A small reproducible generator: the programs must be the same on every machine.
    struct Lcg(u64);
    impl Lcg {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (self.0 >> 33) % n
        }
    }

    /// Random programs of keys, refusals, busy windows, panics, evictions and invalidations: every call that
    /// returns took exactly one step, the counts sum to the steps, and no graph outlives its entry.
    #[test]
    fn every_call_takes_one_step_whatever_happens() {
        for seed in 0..300u64 {
            let mut random = Lcg(seed);
            let config = GraphConfig::new()
                .with_max_graphs(1 + random.below(3) as usize)
                .with_warmup(2 + random.below(3) as u32)
                .with_room_retries(random.below(3) as u32)
                .verify(1 + random.below(3) as u32)
                .with_policy(match random.below(2) {
                    0 => Policy::Fallback,
                    _ => Policy::Adaptive,
                });
            let max_graphs = config.max_graphs;
            let mut engine = Engine::new(config);
            let mut host = Scripted::default();
            let (mut steps, mut panics) = (0u64, 0u64);
            for _ in 0..200 {
                if random.below(4) == 0 {
                    let outcome = [
                        Outcome::Seal,
                        Outcome::Room,
                        Outcome::Other,
                        Outcome::Final,
                        Outcome::Memory,
                        Outcome::Busy,
                        Outcome::Stale,
                        Outcome::RateBaked,
                        Outcome::Panic,
                    ][random.below(9) as usize];
                    host.windows = vec![outcome];
                }
                host.panics_eager = random.below(25) == 0;
                host.misfits = random.below(40) == 0;
                host.operations = u64::from(random.below(30) == 0);
                host.watched_rate = random.below(50) == 0;
                host.wrong = random.below(30) == 0;
                if random.below(60) == 0 {
                    engine.invalidate();
                }
                let before = host.value;
                let id = random.below(5);
                match catch_unwind(AssertUnwindSafe(|| take(&mut engine, id, &mut host))) {
                    Ok(result) => {
                        steps += 1;
                        assert_eq!(host.value, before + 1, "seed {seed}");
                        match result {
                            Ok((output, _)) => assert_eq!(output, host.value),
                            Err(error) => {
                                assert!(matches!(error, StepError::Verification(_)) && host.wrong);
                            }
                        }
                    }
                    Err(_) => {
                        panics += 1;
                        assert_eq!(
                            host.value, before,
                            "a panicking call takes no step, seed {seed}"
                        );
                    }
                }
                let report = engine.report();
                assert_eq!(
                    report.eager + report.recorded + report.replayed,
                    steps,
                    "seed {seed}"
                );
                assert!(report.graphs_held <= max_graphs, "seed {seed}");
                assert_eq!(
                    host.live_graphs.get(),
                    report.graphs_held as i64,
                    "seed {seed}"
                );
                assert_eq!(report.bytes_held, 100 * report.graphs_held as u64);
            }
            assert!(steps + panics == 200);
            drop(engine);
            assert_eq!(host.live_graphs.get(), 0);
        }
    }

    /// Ten steps with a warm-up of three are three eager ones, one recorded and six replayed: a capture is not
    /// counted as a replay.
    #[test]
    fn a_recording_is_not_counted_as_a_replay() {
        let mut engine = Engine::new(GraphConfig::new());
        let mut host = Scripted::default();
        for _ in 0..10 {
            engine.step(key(0), None, &mut host).expect("runs");
        }
        let report = engine.report();
        assert_eq!((report.eager, report.recorded, report.replayed), (3, 1, 6));
        assert_eq!(report.captures, 1);
        assert_eq!(report.launches_saved_per_step, Some(47));
    }

    /// A step whose key never settles: a reason, one entry per key at most, no window, no replay.
    #[test]
    fn a_never_settling_stream_of_keys_is_named() {
        let mut engine = Engine::new(GraphConfig::new());
        let mut host = Scripted::default();
        for id in 0..100 {
            let (_, path) = engine.step(key(id), None, &mut host).expect("runs");
            match (id as usize) < UNSETTLED_KEYS {
                true => assert!(matches!(
                    path,
                    StepPath::Eager(FallbackReason::WarmingUp { .. })
                )),
                false => assert!(matches!(
                    path,
                    StepPath::Eager(FallbackReason::NeverSettles { .. })
                )),
            }
        }
        assert_eq!((host.opened, engine.report().replayed), (0, 0));
        // A key that does stay is still recorded.
        for _ in 0..4 {
            engine.step(key(1000), None, &mut host).expect("runs");
        }
        let (_, path) = engine.step(key(1000), None, &mut host).expect("runs");
        assert!(matches!(path, StepPath::Recorded), "{path:?}");
    }

    /// A required graph that cannot be had is an error, and the step is not taken.
    #[test]
    fn require_graph_takes_no_step_it_cannot_replay() {
        let mut engine = Engine::new(GraphConfig::new().with_policy(Policy::RequireGraph));
        let mut host = Scripted {
            windows: vec![Outcome::Final],
            ..Default::default()
        };
        for _ in 0..3 {
            engine
                .step(key(0), None, &mut host)
                .expect("warm-up is allowed");
        }
        for _ in 0..2 {
            let error = engine
                .step(key(0), None, &mut host)
                .map(|_| ())
                .expect_err("no graph");
            assert!(matches!(
                error,
                StepError::GraphRequired {
                    reason: FallbackReason::HostRead { .. }
                }
            ));
            assert!(error.is_retryable());
            assert_eq!(host.value, 3);
        }
    }

    /// An engine that keeps what pays, and a host with these times of a step.
    fn adaptive(eager_ms: u64, replay_ms: u64) -> (Engine<u64, Graph>, Scripted) {
        let config = GraphConfig::new()
            .with_policy(Policy::Adaptive)
            .with_max_graphs(1);
        let host = Scripted {
            eager_takes: std::time::Duration::from_millis(eager_ms),
            replay_takes: std::time::Duration::from_millis(replay_ms),
            ..Default::default()
        };
        (Engine::new(config), host)
    }

    /// A graph whose replays are faster outlives its trial; the trial's steps are all taken.
    #[test]
    fn a_graph_that_pays_is_kept() {
        let (mut engine, mut host) = adaptive(4, 0);
        for step in 1..=30 {
            let (value, _) = engine.step(key(0), None, &mut host).expect("runs");
            assert_eq!(value, step);
        }
        let report = engine.report();
        assert_eq!(report.fallbacks["timed"], 8);
        assert_eq!((report.graphs_held, report.replayed), (1, 30 - 3 - 1 - 8));
        assert_eq!(host.waits, 2 * (5 + 5));
    }

    /// One whose replays are not is dropped, with its times in the reason, and tried again once the key comes by half as
    /// often.
    #[test]
    fn a_graph_that_does_not_pay_is_left_and_tried_again() {
        let (mut engine, mut host) = adaptive(1, 3);
        for _ in 0..3 + 1 + 14 {
            engine.step(key(0), None, &mut host).expect("runs");
        }
        assert_eq!((host.live_graphs.get(), host.released), (0, 1));
        let (_, path) = engine.step(key(0), None, &mut host).expect("runs");
        let StepPath::Eager(FallbackReason::ReplayDoesNotPay {
            eager_ms,
            replay_ms,
        }) = path
        else {
            panic!("{path:?}")
        };
        assert!(
            eager_ms < replay_ms && eager_ms >= 1.0,
            "{eager_ms} {replay_ms}"
        );
        (host.eager_takes, host.replay_takes) = Default::default();
        // As often as before: left alone.
        for _ in 0..600 {
            engine.step(key(0), None, &mut host).expect("runs");
        }
        assert_eq!(engine.report().captures, 1);
        for step in 0..1200 {
            engine.step(key(step % 4), None, &mut host).expect("runs");
        }
        assert!(engine.report().captures > 1);
    }

    /// A graph that is evicted before its recording is earned back is not recorded again.
    #[test]
    fn a_key_too_rare_for_its_graph_stays_eager() {
        let (mut engine, mut host) = adaptive(2, 1);
        host.record_takes = std::time::Duration::from_millis(80);
        for id in [0, 1] {
            for _ in 0..3 + 1 + 14 {
                engine.step(key(id), None, &mut host).expect("runs");
            }
        }
        let (_, path) = engine.step(key(0), None, &mut host).expect("runs");
        let StepPath::Eager(FallbackReason::NotAmortised { replays, needed }) = path else {
            panic!("{path:?}")
        };
        assert_eq!(replays, 6);
        assert!(needed > 6, "{needed}");
    }

    /// A key that comes by now and then is not recorded while its replays cannot earn that back, and is once they can.
    #[test]
    fn a_rare_key_is_recorded_when_it_pays() {
        let mut engine = Engine::new(GraphConfig::new());
        let mut host = Scripted {
            record_takes: std::time::Duration::from_millis(20),
            ..Default::default()
        };
        let eager = std::time::Duration::from_micros(500);
        let mut recorded = None;
        // Warm and recorded at once, and so measured; eager steps are timed where they are not watched.
        for call in 1..=3000u64 {
            // One call in fifty: 20 in the thousand that are expected at least.
            let id = u64::from(call % 50 == 49);
            host.eager_takes = if id == 1 { eager } else { Default::default() };
            let (_, path) = engine.step(key(id), None, &mut host).expect("runs");
            match (id, path) {
                (1, StepPath::Recorded) => recorded = Some(call),
                (1, StepPath::Eager(FallbackReason::TooRare { expected, needed })) => {
                    assert!(expected < needed);
                }
                _ => {}
            }
        }
        // A recording takes some 20 ms and a replay saves some 0.5 ms: 40 or more replays have to be expected.
        assert!(
            recorded.is_none_or(|call| call > 1000),
            "recorded in call {recorded:?}"
        );
        let rare = engine.report();
        let rare = (rare.entries.iter()).find(|entry| entry.key == key(1));
        let last = rare.and_then(|entry| entry.last_fallback.as_ref());
        assert!(
            recorded.is_some() || matches!(last, Some(FallbackReason::TooRare { .. })),
            "{last:?}"
        );
    }

    /// Keys that take turns in a cache that is too small for all of them do not evict each other for ever.
    #[test]
    fn keys_that_take_turns_do_not_thrash() {
        let mut engine = Engine::new(GraphConfig::new().with_max_graphs(2));
        let mut host = Scripted::default();
        for call in 0..600 {
            engine
                .step(key(call % 3), None, &mut host)
                .expect("steps run");
        }
        let report = engine.report();
        assert!(report.captures <= 4, "{report}");
        assert!(report.fallbacks["cache-full"] > 100, "{report}");
        assert_eq!(report.graphs_held, 2);
        // The third takes the place of one that does not come by any more.
        for _ in 0..600 {
            for id in [1, 2] {
                engine.step(key(id), None, &mut host).expect("steps run");
            }
        }
        let (_, one) = engine.step(key(1), None, &mut host).expect("steps run");
        let (_, two) = engine.step(key(2), None, &mut host).expect("steps run");
        assert_eq!((one, two), (StepPath::Replayed, StepPath::Replayed));
    }

    /// Without a bound of its own a cache takes its share of the device, and not more.
    #[test]
    fn a_share_of_the_device_bounds_the_bytes() {
        let mut engine = Engine::new(GraphConfig::new().with_memory_share(0.25));
        let mut host = Scripted {
            device_bytes: Some(1000),
            ..Default::default()
        };
        for id in 0..5 {
            for _ in 0..6 {
                engine.step(key(id), None, &mut host).expect("runs");
            }
        }
        let report = engine.report();
        assert_eq!((report.graphs_held, report.bytes_held), (2, 200));
        assert!(report.evictions >= 3, "{report}");
    }

    /// A recording that the memory does not suffice for takes the place of graphs that are worth less, and the step of the
    /// call is taken; without any to drop it stays eager and says so.
    #[test]
    fn out_of_memory_evicts_and_retries_and_then_stays_eager() {
        let mut engine = Engine::new(GraphConfig::new());
        let mut host = Scripted::default();
        for _ in 0..6 {
            engine.step(key(0), None, &mut host).expect("runs");
        }
        for _ in 0..3 {
            engine.step(key(1), None, &mut host).expect("runs");
        }
        host.windows = vec![Outcome::Memory];
        let (value, path) = engine.step(key(1), None, &mut host).expect("runs");
        assert_eq!((value, path), (10, StepPath::Recorded));
        assert_eq!((host.live_graphs.get(), host.released), (1, 1));
        // Alone, and out of memory.
        engine.invalidate();
        for _ in 0..3 {
            engine.step(key(2), None, &mut host).expect("runs");
        }
        host.windows = vec![Outcome::Memory];
        for value in 14..18 {
            let (taken, path) = engine.step(key(2), None, &mut host).expect("runs");
            let StepPath::Eager(FallbackReason::OutOfMemory { .. }) = path else {
                panic!("{path:?}")
            };
            assert_eq!(taken, value);
        }
    }

    /// A watched step that fails for lack of memory is taken again without the graphs that hold it; alone it is an error,
    /// and no step.
    #[test]
    fn a_warm_up_that_lacks_memory_drops_the_graphs() {
        let mut engine = Engine::new(GraphConfig::new());
        let mut host = Scripted::default();
        for _ in 0..6 {
            engine.step(key(0), None, &mut host).expect("runs");
        }
        host.fits = Some(0);
        let (value, _) = engine.step(key(1), None, &mut host).expect("runs");
        assert_eq!((value, host.live_graphs.get()), (7, 0));
        host.fits = Some(-1);
        let error = engine.step(key(1), None, &mut host).map(|_| ());
        assert!(matches!(error, Err(StepError::Uncomputed { .. })));
        assert_eq!((host.value, engine.report().steps()), (7, 7));
    }

    /// A learning rate that moves is named as such, not as a warm-up without end.
    #[test]
    fn a_moving_learning_rate_is_named() {
        let mut engine = Engine::new(GraphConfig::new());
        let mut host = Scripted::default();
        let mut at = |rate: f64| {
            let key = ShapeKey {
                learning_rate_bits: Some(vec![rate.to_bits()]),
                ..key(0)
            };
            engine.step(key, None, &mut host).expect("runs").1
        };
        at(0.1);
        assert_eq!(
            at(0.2),
            StepPath::Eager(FallbackReason::LearningRateMoved {
                before: 0.1,
                after: 0.2
            })
        );
    }

    /// A step that reads its rate begins again under a key that has it, once, and each rate is recorded by itself.
    #[test]
    fn a_step_that_reads_its_rate_is_recorded_under_it() {
        let mut engine = Engine::new(GraphConfig::new());
        let mut host = Scripted {
            watched_rate: true,
            ..Default::default()
        };
        let mut paths = Vec::new();
        for _ in 0..6 {
            paths.push(take(&mut engine, 0, &mut host).expect("runs").1);
        }
        let moved = FallbackReason::LearningRateMoved {
            before: 0.1,
            after: 0.2,
        };
        assert_eq!(paths[0], StepPath::Eager(moved));
        assert_eq!(
            paths[3..],
            [StepPath::Recorded, StepPath::Replayed, StepPath::Replayed]
        );
        // Found when it is recorded, it is recorded in the same step.
        let mut engine = Engine::new(GraphConfig::new());
        let mut host = Scripted {
            windows: vec![Outcome::RateBaked],
            ..Default::default()
        };
        for _ in 0..3 {
            take(&mut engine, 0, &mut host).expect("runs");
        }
        assert_eq!(
            take(&mut engine, 0, &mut host).expect("runs").1,
            StepPath::Recorded
        );
        assert_eq!(
            take(&mut engine, 0, &mut host).expect("runs").1,
            StepPath::Replayed
        );
        assert_eq!((host.opened, engine.report().entries.len()), (2, 1));
    }

    /// A replay that is found wrong is an error once; the key stays eager, and the step that was taken is counted.
    #[test]
    fn a_wrong_replay_is_an_error_and_the_last_one() {
        let mut engine = Engine::new(GraphConfig::new().verify(2));
        let mut host = Scripted {
            wrong: true,
            ..Default::default()
        };
        let outcomes: Vec<bool> = (0..8)
            .map(|_| take(&mut engine, 0, &mut host).is_ok())
            .collect();
        assert_eq!(outcomes, [true, true, true, true, true, false, true, true]);
        let report = engine.report();
        assert_eq!(
            (report.steps(), host.value, host.live_graphs.get()),
            (8, 8, 0)
        );
        assert_eq!(report.entries[0].phase, "refused");
    }
}
