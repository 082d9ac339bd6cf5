//! Whether the replays of a graph pay, as a pure state machine.
//!
//! Right after a graph is sealed, a few of its steps run eagerly and a few are replayed, each kind in a block so that what
//! one leaves behind (pages, queues) does not weigh on the other, and the first of a block is not timed.

use crate::report::median_ms;
use std::time::Duration;

/// How the next step of a trial runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turn {
    pub replay: bool,
    /// Wait for the device on both sides, and take the time.
    pub timed: bool,
}

/// Eager steps of a trial, and those of them that are not timed.
const EAGER: usize = 8;
const EAGER_UNTIMED: usize = 3;
/// Replays of a trial; the first is not timed.
const REPLAYS: usize = 6;

/// A replay has to be faster by this share at least.
const MARGIN: f64 = 0.02;

/// A trial that is under way.
#[derive(Debug, Clone, Default)]
pub(crate) struct Trial {
    taken: usize,
    eager: Vec<Duration>,
    replays: Vec<Duration>,
}

/// What a trial found: medians, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Found {
    pub eager_ms: f64,
    pub replay_ms: f64,
}

impl Found {
    /// Whether replays are faster than noise.
    pub fn pays(&self) -> bool {
        self.replay_ms < self.eager_ms * (1.0 - MARGIN)
    }

    /// What a replay saves.
    pub fn gain_ms(&self) -> f64 {
        self.eager_ms - self.replay_ms
    }

    /// Replays after which a capture of this length is earned back; `None` where it never is.
    pub fn break_even(&self, capture_ms: f64) -> Option<u64> {
        let gain = self.gain_ms();
        (gain > 0.0).then(|| (capture_ms / gain).ceil() as u64)
    }
}

impl Trial {
    /// How the next step runs; `None` when the trial is over.
    pub fn turn(&self) -> Option<Turn> {
        match self.taken {
            taken if taken < EAGER => Some(Turn {
                replay: false,
                timed: taken >= EAGER_UNTIMED,
            }),
            taken if taken < EAGER + REPLAYS => Some(Turn {
                replay: true,
                timed: taken > EAGER,
            }),
            _ => None,
        }
    }

    /// A step ran as [`turn`](Self::turn) said, in this time.
    pub fn took(&mut self, turn: Turn, time: Duration) {
        self.taken += 1;
        if turn.timed {
            match turn.replay {
                true => self.replays.push(time),
                false => self.eager.push(time),
            }
        }
    }

    /// What it found, once it is over.
    pub fn found(&self) -> Option<Found> {
        self.turn().is_none().then(|| Found {
            eager_ms: median_ms(&self.eager).unwrap_or_default(),
            replay_ms: median_ms(&self.replays).unwrap_or_default(),
        })
    }
}

/// How often a key comes by, from where it was last decided about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frequency {
    /// Its share of the calls when it was decided about.
    share: f64,
    /// All calls, and those of the key, when the stretch that is looked at began.
    calls: u64,
    seen: u64,
}

/// Calls after which a share is looked at again.
const STRETCH: u64 = 256;

impl Frequency {
    /// The key was seen in `seen` of `calls` calls.
    pub fn new(calls: u64, seen: u64) -> Self {
        Self {
            share: seen as f64 / calls.max(1) as f64,
            calls,
            seen,
        }
    }

    /// Whether the key comes by at least twice as often, or at most half as often, as when it was decided about.
    pub fn changed(&mut self, calls: u64, seen: u64) -> bool {
        let stretch = calls - self.calls;
        if stretch < STRETCH {
            return false;
        }
        let now = (seen - self.seen) as f64 / stretch as f64;
        (self.calls, self.seen) = (calls, seen);
        now >= 2.0 * self.share || now <= 0.5 * self.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(eager_ms: u64, replay_ms: u64) -> Found {
        let mut trial = Trial::default();
        let mut kinds = Vec::new();
        while let Some(turn) = trial.turn() {
            assert_eq!(trial.found(), None);
            kinds.push(turn.replay);
            // What is not timed is slow, and must not show.
            let ms = match (turn.timed, turn.replay) {
                (false, _) => 1000,
                (true, false) => eager_ms,
                (true, true) => replay_ms,
            };
            trial.took(turn, Duration::from_millis(ms));
        }
        assert!(kinds.is_sorted(), "each kind in one block: {kinds:?}");
        trial.found().expect("over")
    }

    #[test]
    fn faster_replays_pay_and_equal_ones_do_not() {
        assert!(run(100, 50).pays());
        assert!(!run(100, 99).pays());
        assert!(!run(100, 120).pays());
        assert_eq!(run(100, 50).break_even(200.0), Some(4));
        assert_eq!(run(100, 100).break_even(200.0), None);
    }

    /// A share is looked at over whole stretches, and only a large change counts.
    #[test]
    fn a_frequency_changes_by_a_factor_of_two() {
        let mut frequency = Frequency::new(100, 10);
        assert!(!frequency.changed(200, 110), "too few calls");
        assert!(frequency.changed(100 + STRETCH, 10 + STRETCH / 4));
        let mut frequency = Frequency::new(100, 10);
        assert!(!frequency.changed(100 + STRETCH, 10 + STRETCH / 8));
        // The next stretch begins where this one ended.
        assert!(frequency.changed(100 + 2 * STRETCH, 10 + STRETCH / 8));
    }
}
