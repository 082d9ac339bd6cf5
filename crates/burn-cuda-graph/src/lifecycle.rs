//! The lifecycle of one cache entry, as a pure state machine.
//!
//! ```text
//!            Same x (warmup - 1)            sealed
//!  Warming ----------------------> Ready ----------> Sealed
//!   |  ^  \                        |  ^ |               |
//!   |  |   \ Never, or Differs     |  | | refused       | evicted, invalidated
//!   |  |    \ too often            |  +-+ (room: again, |
//!   |  |     v                     |      a few times)  |
//!   |  |   Refused <---------------+                    |
//!   |  +------------------------------------------------+
//! ```
//!
//! It decides what the next step of a key does and learns from what the step showed. It touches no device, so
//! random call programs can be run against it.

use crate::error::FallbackReason;

/// What the next step of an entry does.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Decision {
    /// Run eagerly and watch the operations. `rehearse`: the last warm-up step, run with the stream prepared for
    /// capture.
    Warm { rehearse: bool },
    /// Record it; `attempt` windows were refused for room before.
    Record { attempt: u32 },
    /// Replay the sealed graph.
    Replay,
    /// Run eagerly, for this reason.
    Stay(FallbackReason),
}

/// What a watched eager step showed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Verdict {
    /// The first of its key: nothing to compare with.
    First,
    /// The same operations and scalars as the step before.
    Same,
    /// Other operations or scalars than the step before.
    Differs(FallbackReason),
    /// Something no recording can hold.
    Never(FallbackReason),
    /// Launches hold the learning rate, which was `before` in the step before, as a constant; the engine begins again
    /// under a key that has the rate.
    RateBaked { before: f64, after: f64 },
}

/// Why a window gave no graph.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Refusal {
    /// The memory held had no room; a larger reserve may help.
    Room { reserve_bytes: u64, detail: String },
    /// The device has no memory left for it; one of graphs that are worth less may be had.
    Memory { needed_bytes: u64, detail: String },
    /// Something that another try will not change.
    Final(FallbackReason),
    /// Something that may have been a passing neighbour.
    Other { detail: String },
}

#[derive(Debug, Clone, PartialEq)]
enum Phase {
    Warming { stable: u32 },
    Ready,
    Sealed,
    Refused(FallbackReason),
}

/// The state of one entry.
#[derive(Debug, Clone)]
pub(crate) struct Lifecycle {
    phase: Phase,
    warmup: u32,
    room_retries: u32,
    /// Consecutive steps that differed from the one before.
    differences: u32,
    room_refusals: u32,
    other_refusals: u32,
}

/// Windows refused for another reason than room before the refusal is kept.
const OTHER_RETRIES: u32 = 2;

impl Lifecycle {
    pub fn new(warmup: u32, room_retries: u32) -> Self {
        Self {
            phase: Phase::Warming { stable: 0 },
            warmup: warmup.max(2),
            room_retries,
            differences: 0,
            room_refusals: 0,
            other_refusals: 0,
        }
    }

    pub fn decide(&self) -> Decision {
        match &self.phase {
            Phase::Warming { stable } => Decision::Warm {
                rehearse: stable + 1 >= self.warmup,
            },
            Phase::Ready => Decision::Record {
                attempt: self.room_refusals,
            },
            Phase::Sealed => Decision::Replay,
            Phase::Refused(reason) => Decision::Stay(reason.clone()),
        }
    }

    /// Learn from a watched eager step; the reason why that step was eager.
    pub fn watched(&mut self, verdict: Verdict) -> FallbackReason {
        let Phase::Warming { stable } = self.phase else {
            return FallbackReason::WarmingUp {
                done: self.warmup,
                needed: self.warmup,
            };
        };
        match verdict {
            Verdict::First | Verdict::RateBaked { .. } => self.warming(1),
            Verdict::Same => {
                self.differences = 0;
                self.warming(stable + 1)
            }
            Verdict::Differs(reason) => {
                self.differences += 1;
                // The steps of a fresh optimizer may differ once before they settle; ones that go on differing
                // are not going to.
                self.phase = match self.differences >= self.warmup {
                    true => Phase::Refused(reason.clone()),
                    false => Phase::Warming { stable: 1 },
                };
                reason
            }
            Verdict::Never(reason) => {
                self.phase = Phase::Refused(reason.clone());
                reason
            }
        }
    }

    /// Nothing was seen yet.
    pub fn restart(&mut self) {
        self.phase = Phase::Warming { stable: 0 };
        self.differences = 0;
    }

    fn warming(&mut self, stable: u32) -> FallbackReason {
        self.phase = match stable >= self.warmup {
            true => Phase::Ready,
            false => Phase::Warming { stable },
        };
        FallbackReason::WarmingUp {
            done: stable,
            needed: self.warmup,
        }
    }

    pub fn sealed(&mut self) {
        self.phase = Phase::Sealed;
        self.room_refusals = 0;
        self.other_refusals = 0;
    }

    /// Learn that a window gave no graph; the reason why that step was eager.
    pub fn refused(&mut self, refusal: Refusal) -> FallbackReason {
        let (reason, keep) = match refusal {
            Refusal::Room {
                reserve_bytes,
                detail,
            } => {
                self.room_refusals += 1;
                let attempts = self.room_refusals;
                (
                    FallbackReason::NoRoom {
                        attempts,
                        reserve_bytes,
                        detail,
                    },
                    self.room_refusals > self.room_retries,
                )
            }
            Refusal::Memory {
                needed_bytes,
                detail,
            } => (
                FallbackReason::OutOfMemory {
                    needed_bytes,
                    detail,
                },
                true,
            ),
            Refusal::Final(reason) => (reason, true),
            Refusal::Other { detail } => {
                self.other_refusals += 1;
                (
                    FallbackReason::Refused { detail },
                    self.other_refusals > OTHER_RETRIES,
                )
            }
        };
        if keep {
            self.phase = Phase::Refused(reason.clone());
        }
        reason
    }

    /// Whatever it was, it stays eager from now on.
    pub fn refuse(&mut self, reason: FallbackReason) {
        self.phase = Phase::Refused(reason);
    }

    /// What the rehearsal left warm is gone.
    pub fn rehearse_again(&mut self) {
        if self.phase == Phase::Ready {
            self.phase = Phase::Warming {
                stable: self.warmup - 1,
            };
        }
    }

    /// The graph is gone; the key is known to be stable, so one rehearsal is enough before it is recorded again.
    pub fn evicted(&mut self) {
        if self.phase == Phase::Sealed {
            self.phase = Phase::Warming {
                stable: self.warmup - 1,
            };
        }
    }

    pub fn is_sealed(&self) -> bool {
        self.phase == Phase::Sealed
    }

    pub fn refusal(&self) -> Option<&FallbackReason> {
        match &self.phase {
            Phase::Refused(reason) => Some(reason),
            _ => None,
        }
    }

    pub fn name(&self) -> &'static str {
        match self.phase {
            Phase::Warming { .. } => "warming",
            Phase::Ready => "ready",
            Phase::Sealed => "sealed",
            Phase::Refused(_) => "refused",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moving() -> FallbackReason {
        FallbackReason::MovingScalar {
            operation: "MulScalar".into(),
            index: 3,
            before: "0.1".into(),
            after: "0.2".into(),
        }
    }

    fn ready() -> Lifecycle {
        let mut entry = Lifecycle::new(3, 2);
        entry.watched(Verdict::First);
        entry.watched(Verdict::Same);
        entry.watched(Verdict::Same);
        entry
    }

    /// The fourth step is the recorded one with the default warm-up of three, and only the last warm-up step is
    /// the rehearsal.
    #[test]
    fn three_stable_steps_then_a_recording_then_replays() {
        let mut entry = Lifecycle::new(3, 2);
        assert_eq!(entry.decide(), Decision::Warm { rehearse: false });
        assert_eq!(
            entry.watched(Verdict::First),
            FallbackReason::WarmingUp { done: 1, needed: 3 }
        );
        assert_eq!(entry.decide(), Decision::Warm { rehearse: false });
        entry.watched(Verdict::Same);
        assert_eq!(entry.decide(), Decision::Warm { rehearse: true });
        assert_eq!(
            entry.watched(Verdict::Same),
            FallbackReason::WarmingUp { done: 3, needed: 3 }
        );
        assert_eq!(entry.decide(), Decision::Record { attempt: 0 });
        entry.sealed();
        assert_eq!(entry.decide(), Decision::Replay);
    }

    /// A step that differs starts the count anew; one that keeps differing is refused by the last reason.
    #[test]
    fn steps_that_keep_differing_are_refused_by_name() {
        let mut entry = Lifecycle::new(3, 2);
        entry.watched(Verdict::First);
        assert_eq!(entry.watched(Verdict::Differs(moving())), moving());
        assert_eq!(entry.decide(), Decision::Warm { rehearse: false });
        entry.watched(Verdict::Same);
        assert_eq!(entry.decide(), Decision::Warm { rehearse: true });
        for _ in 0..3 {
            entry.watched(Verdict::Differs(moving()));
        }
        assert_eq!(entry.decide(), Decision::Stay(moving()));
        assert_eq!(entry.refusal(), Some(&moving()));
    }

    /// A window refused for room is tried again with a larger reserve, a bounded number of times.
    #[test]
    fn room_is_retried_a_few_times_and_then_kept() {
        let mut entry = ready();
        for attempt in 0..3 {
            assert_eq!(entry.decide(), Decision::Record { attempt });
            let reason = entry.refused(Refusal::Room {
                reserve_bytes: 7,
                detail: "No room".into(),
            });
            assert_eq!(
                reason,
                FallbackReason::NoRoom {
                    attempts: attempt + 1,
                    reserve_bytes: 7,
                    detail: "No room".into()
                }
            );
        }
        assert!(matches!(
            entry.decide(),
            Decision::Stay(FallbackReason::NoRoom { attempts: 3, .. })
        ));
    }

    /// A final refusal is not tried again; an evicted graph needs one rehearsal only.
    #[test]
    fn final_refusals_stay_and_evictions_come_back() {
        let mut entry = ready();
        let read = FallbackReason::HostRead {
            detail: "read".into(),
        };
        entry.refused(Refusal::Final(read.clone()));
        assert_eq!(entry.decide(), Decision::Stay(read));

        let mut entry = ready();
        entry.sealed();
        entry.evicted();
        assert_eq!(entry.decide(), Decision::Warm { rehearse: true });
        entry.watched(Verdict::Same);
        assert_eq!(entry.decide(), Decision::Record { attempt: 0 });
    }
}
