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
use std::sync::atomic::{AtomicU64, Ordering};
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
            streams,
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

/// No stream was heard on this one of the device; else one was, whose number follows from this; or several.
const NOBODY: u64 = 0;
const SEVERAL: u64 = u64::MAX;

/// What the fusion server is listened to with. Nearly every stream has one of the device to itself, and each operation of the
/// process comes by here: a stream that is alone is told by one load.
struct Listener {
    streams: u64,
    alone: [AtomicU64; 256],
    heard: Mutex<Heard>,
}

impl Listener {
    fn new(streams: u8) -> Self {
        let streams = u64::from(streams).max(1);
        Self {
            streams,
            alone: [const { AtomicU64::new(NOBODY) }; 256],
            heard: Mutex::new(Heard::new(streams)),
        }
    }

    fn note(&self, stream: StreamId) {
        let own = stream.value.saturating_add(1);
        let alone = &self.alone[(stream.value % self.streams) as usize];
        let known = alone.load(Ordering::Relaxed);
        let alone_still = known == own
            || known == NOBODY
                && (alone.compare_exchange(NOBODY, own, Ordering::Relaxed, Ordering::Relaxed))
                    .is_ok();
        if alone_still && own != SEVERAL {
            return;
        }
        let first = alone.swap(SEVERAL, Ordering::Relaxed);
        let now = Instant::now();
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        if ![NOBODY, SEVERAL, own].contains(&first) {
            // When it worked last is not known.
            heard.note(StreamId { value: first - 1 }, now);
        }
        heard.note(stream, now);
    }

    fn neighbour(&self, stream: StreamId) -> Option<(Neighbour, Instant)> {
        let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let (neighbour, at) = heard.neighbour(stream)?;
        let neighbour = Neighbour {
            stream: neighbour.value,
            streams: self.streams,
        };
        Some((neighbour, at))
    }
}

static LISTENER: LazyLock<Listener> =
    LazyLock::new(|| Listener::new(CubeClRuntimeConfig::get().streaming.max_streams));

struct Observer;

impl FusionObserver for Observer {
    fn registered(&self, _operation: &OperationIr) {
        LISTENER.note(StreamId::current());
    }
    /// A queue that somebody waits for is run without another registration.
    fn block_starts(&self, _block: BlockOperations<'_>) {
        LISTENER.note(StreamId::current());
    }
    fn block_ran(&self) {}
}

/// Listen from now on, for the life of the process.
pub(crate) fn listen() {
    static LISTENING: OnceLock<FusionObservation> = OnceLock::new();
    LazyLock::force(&LISTENER);
    LISTENING.get_or_init(|| FusionObservation::new(Arc::new(Observer)));
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
    LISTENER.neighbour(StreamId::current())
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

    /// A stream that is alone is known as nobody's neighbour; from the first time that another one is heard on, each is the
    /// other's, the first one too, which may be silent from then on.
    #[test]
    fn the_first_stream_is_the_seconds_neighbour() {
        let stream = |value| StreamId { value };
        let listener = Listener::new(128);
        let number = |of: u64| {
            let (neighbour, _) = listener.neighbour(stream(of))?;
            Some((neighbour.stream, neighbour.streams))
        };
        for value in [0, 1, 0, 127, 1] {
            listener.note(stream(value));
        }
        assert_eq!([number(0), number(1), number(127)], [None; 3]);
        listener.note(stream(128));
        assert_eq!((number(0), number(128)), (Some((128, 128)), Some((0, 128))));
        assert_eq!([number(1), number(127)], [None; 2]);
        // Task streams may have any number.
        listener.note(stream(u64::MAX));
        listener.note(stream(u64::MAX));
        assert_eq!(number(127), Some((u64::MAX, 128)));
        assert_eq!(number(u64::MAX), Some((127, 128)));
        // One for all.
        let few = Listener::new(0);
        few.note(stream(3));
        few.note(stream(4));
        assert!(few.neighbour(stream(3)).is_some());
    }
}
