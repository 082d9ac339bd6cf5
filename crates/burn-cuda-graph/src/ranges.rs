//! Names for a profiler: NVTX ranges around what a call does.
//!
//! A profile of a replayed step shows one driver call and no kernel launches, so nothing in it tells a warm-up from a
//! replay, or the copies around a replay from the replay. The ranges do. They are pushed and popped on the calling
//! thread, nest, and lie in a domain of their own (`burn-cuda-graph`). Without the feature `nvtx` they compile to
//! nothing. With it, and without the NVTX library or a profiler, a range costs two calls that return at once.
//!
//! They mark the host's time in a phase, not the device's: CubeCL issues launches from a thread of its own, and a
//! replay returns before the device is done. `docs/nsight.md` says how to read them.

/// What a call is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// An eager step whose operations are watched: one of the first of its shape key.
    WarmUp,
    /// The watched step before a window, run with the stream prepared.
    Rehearsal,
    /// Everything from the state's copy into graph-owned buffers to the sealed graph and its first replay.
    Capture,
    /// Before a replay: the scalars, the state if it was outside, the batch.
    CopyIn,
    /// Enqueueing the sealed graph.
    Replay,
    /// After a replay: the outputs, into buffers that the next one does not write.
    CopyOut,
    /// An eager step that nobody watches.
    Eager,
    /// The eager step and the replay that it is compared with, and the comparison.
    Verification,
}

#[cfg(any(feature = "nvtx", test))]
impl Phase {
    /// The name that a profiler shows.
    pub(crate) const fn name(self) -> &'static core::ffi::CStr {
        match self {
            Self::WarmUp => c"warm-up",
            Self::Rehearsal => c"rehearsal",
            Self::Capture => c"capture",
            Self::CopyIn => c"copy-in",
            Self::Replay => c"replay",
            Self::CopyOut => c"copy-out",
            Self::Eager => c"eager fallback",
            Self::Verification => c"verification",
        }
    }

    /// Its colour there, as alpha, red, green and blue: what a steady run repeats is green, what it should not is red.
    pub(crate) const fn argb(self) -> u32 {
        match self {
            Self::WarmUp => 0xffe0_b040,
            Self::Rehearsal => 0xffd0_8030,
            Self::Capture => 0xffa0_60c0,
            Self::CopyIn => 0xff50_a0d0,
            Self::Replay => 0xff40_b060,
            Self::CopyOut => 0xff50_c0c0,
            Self::Eager => 0xffd0_4040,
            Self::Verification => 0xff90_9090,
        }
    }
}

#[cfg(feature = "nvtx")]
pub(crate) use crate::driver::Range;

/// Mark `phase` until the guard drops.
#[cfg(feature = "nvtx")]
pub(crate) fn range(phase: Phase) -> Range {
    Range::new(phase.name(), phase.argb())
}

/// Stands where a range would be; it is nothing.
#[cfg(not(feature = "nvtx"))]
#[must_use]
pub(crate) struct Range;

#[cfg(not(feature = "nvtx"))]
impl Range {
    /// End it here.
    #[inline(always)]
    pub(crate) fn end(self) {}
}

/// Without the feature `nvtx`, nothing.
#[cfg(not(feature = "nvtx"))]
#[inline(always)]
pub(crate) fn range(_phase: Phase) -> Range {
    Range
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const ALL: [Phase; 8] = [
        Phase::WarmUp,
        Phase::Rehearsal,
        Phase::Capture,
        Phase::CopyIn,
        Phase::Replay,
        Phase::CopyOut,
        Phase::Eager,
        Phase::Verification,
    ];

    /// Two phases of one name or colour could not be told apart in a profile.
    #[test]
    fn every_phase_has_its_own_name_and_colour() {
        let names: HashSet<_> = ALL.iter().map(|phase| phase.name()).collect();
        let colours: HashSet<_> = ALL.iter().map(|phase| phase.argb()).collect();
        assert_eq!((names.len(), colours.len()), (ALL.len(), ALL.len()));
        assert!(colours.iter().all(|argb| argb >> 24 == 0xff), "opaque");
    }

    /// Most machines have no NVTX library. A training run there must not end in a panic because of a feature for
    /// profilers.
    #[test]
    fn a_range_is_harmless_without_the_library() {
        let _outer = range(Phase::Verification);
        range(Phase::Replay).end();
    }

    /// What a range costs where nobody looks.
    #[cfg(not(feature = "nvtx"))]
    #[test]
    fn without_the_feature_a_range_is_nothing() {
        assert_eq!(size_of::<Range>(), 0);
        assert!(!std::mem::needs_drop::<Range>());
    }
}
