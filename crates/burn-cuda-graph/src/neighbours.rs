//! Who else works on the device's stream that a window is opened on.
//!
//! CubeCL folds the streams of threads onto a few of the device (`id % max_streams`, 128 of them by default), so from the
//! 129th thread on two may share one. A window on a shared stream has the other thread's writes and reads refused, and
//! its launches land in the recording: they do not run when they should, and run again with each replay. CubeCL does not say
//! which of its streams are in use, so the fusion server is listened to: it hears every operation under the stream that
//! it came from.

use crate::engine::Neighbour;
use burn_fusion::observer::{BlockOperations, FusionObservation, FusionObserver};
use burn_fusion::stream::StreamId;
use burn_ir::OperationIr;
use cubecl_runtime::config::{CubeClRuntimeConfig, RuntimeConfig};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long a neighbour must have been silent before a window is opened.
const QUIET: Duration = Duration::from_secs(5);

/// When streams were last heard, by the device's stream that they share: of each the two heard last, of which one at most is
/// the one that asks.
#[derive(Debug)]
struct Heard {
    streams: u64,
    last: HashMap<u64, [Option<(StreamId, Instant)>; 2]>,
}

impl Heard {
    fn new(streams: u64) -> Self {
        Self {
            streams: streams.max(1),
            last: HashMap::new(),
        }
    }

    fn note(&mut self, stream: StreamId, now: Instant) {
        let [newest, other] = self.last.entry(stream.value % self.streams).or_default();
        if newest.is_some_and(|(heard, _)| heard != stream) {
            core::mem::swap(newest, other);
        }
        *newest = Some((stream, now));
    }

    /// The neighbour of `stream` that was heard last.
    fn neighbour(&self, stream: StreamId) -> Option<(StreamId, Instant)> {
        let heard = self.last.get(&(stream.value % self.streams))?;
        let mut others = heard.iter().flatten();
        others.find(|(other, _)| *other != stream).copied()
    }
}

static HEARD: LazyLock<Mutex<Heard>> = LazyLock::new(|| {
    let streams = CubeClRuntimeConfig::get().streaming.max_streams;
    Mutex::new(Heard::new(u64::from(streams)))
});

struct Listener;

impl Listener {
    fn note() {
        let mut heard = HEARD.lock().unwrap_or_else(PoisonError::into_inner);
        heard.note(StreamId::current(), Instant::now());
    }
}

impl FusionObserver for Listener {
    fn registered(&self, _operation: &OperationIr) {
        Self::note();
    }
    /// A queue that somebody waits for is run without another registration.
    fn block_starts(&self, _block: BlockOperations<'_>) {
        Self::note();
    }
    fn block_ran(&self) {}
}

/// Listen from now on, for the life of the process.
pub(crate) fn listen() {
    static LISTENING: OnceLock<FusionObservation> = OnceLock::new();
    LazyLock::force(&HEARD);
    LISTENING.get_or_init(|| FusionObservation::new(Arc::new(Listener)));
}

/// A neighbour of the calling thread's stream that was heard within the last seconds.
pub(crate) fn lately() -> Option<Neighbour> {
    let (neighbour, at) = last()?;
    (at.elapsed() < QUIET).then_some(neighbour)
}

/// A neighbour of the calling thread's stream that was heard after `start`.
pub(crate) fn since(start: Instant) -> Option<Neighbour> {
    let (neighbour, at) = last()?;
    (at >= start).then_some(neighbour)
}

fn last() -> Option<(Neighbour, Instant)> {
    let heard = HEARD.lock().unwrap_or_else(PoisonError::into_inner);
    let (stream, at) = heard.neighbour(StreamId::current())?;
    let neighbour = Neighbour {
        stream: stream.value,
        streams: heard.streams,
    };
    Some((neighbour, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Own work is nobody else's, however much of it there is, and a neighbour that was heard in between is not forgotten for
    /// it; streams that share nothing do not disturb each other.
    #[test]
    fn a_neighbour_is_heard_behind_own_work() {
        let stream = |value| StreamId { value };
        let mut heard = Heard::new(8);
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        heard.note(stream(3), at(0));
        heard.note(stream(4), at(1));
        assert_eq!(heard.neighbour(stream(3)), None);
        heard.note(stream(11), at(2));
        for ms in 3..20 {
            heard.note(stream(3), at(ms));
        }
        assert_eq!(heard.neighbour(stream(3)), Some((stream(11), at(2))));
        assert_eq!(heard.neighbour(stream(11)), Some((stream(3), at(19))));
        // A third one, whose words are the last.
        heard.note(stream(19), at(20));
        heard.note(stream(3), at(21));
        assert_eq!(heard.neighbour(stream(3)), Some((stream(19), at(20))));
        assert_eq!(heard.neighbour(stream(4)), None);
    }
}
