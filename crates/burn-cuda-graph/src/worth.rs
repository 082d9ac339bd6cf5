//! Whether the replays of a shape key will pay for its recording, and which graph is worth least.
//!
//! What is known of the future is how often a key came by so far. As many calls are expected to follow as were made, so a
//! key that is too rare for a graph early in a training may earn one later.

/// Calls that are expected to follow at least.
const HORIZON: u64 = 1000;

/// How often a key came by, counted in calls of the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Calls with the key.
    pub seen: u64,
    /// All calls before the first of them, and up to the last of them.
    pub calls_before: u64,
    pub last_call: u64,
}

impl Usage {
    /// The key came by in the call of this number.
    pub fn note(&mut self, call: u64) {
        if self.seen == 0 {
            self.calls_before = call.saturating_sub(1);
        }
        self.seen += 1;
        self.last_call = call;
    }

    /// The key's share of the `calls` since it was first seen. The first time is left out, since the count begins with it:
    /// a key that was seen once has no share yet.
    pub fn share(&self, calls: u64) -> f64 {
        let since = calls.saturating_sub(self.calls_before).max(1);
        self.seen.saturating_sub(1) as f64 / since as f64
    }

    /// Calls with the key that are expected from here on.
    pub fn expected(&self, calls: u64) -> u64 {
        (self.share(calls) * calls.max(HORIZON) as f64) as u64
    }

    /// The share, or less for a key that has not been seen for longer than its share lets expect.
    pub fn rate(&self, calls: u64) -> f64 {
        let idle = calls.saturating_sub(self.last_call) + 1;
        self.share(calls).min(1.0 / idle as f64)
    }
}

/// What a graph of `bytes` is worth whose replays save `gain_ms` each, at this rate: time saved per call and byte.
pub(crate) fn worth(rate: f64, gain_ms: Option<f64>, bytes: u64) -> f64 {
    rate * gain_ms.unwrap_or(1.0).max(0.0) / bytes.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(calls: impl IntoIterator<Item = u64>) -> Usage {
        let mut usage = Usage::default();
        calls.into_iter().for_each(|call| usage.note(call));
        usage
    }

    /// A key that was seen once expects nothing, however early it came: recording it would be a bet on a single sight.
    #[test]
    fn one_sight_expects_nothing() {
        assert_eq!(usage([1]).expected(1), 0);
        assert_eq!(usage([5000]).expected(5000), 0);
    }

    /// A key that is all there is since it came expects to go on, also late in a training.
    #[test]
    fn a_settled_key_expects_to_go_on() {
        assert_eq!(usage(1..=4).expected(4), 750);
        assert_eq!(usage(10_001..=10_004).expected(10_004), 7503);
    }

    /// One call in a hundred is ten in the thousand expected at least, and as many as there were once there were more.
    #[test]
    fn a_rare_key_earns_its_graph_in_time() {
        let rare = |calls: u64| usage((1..=calls).filter(|call| call % 100 == 1)).expected(calls);
        assert_eq!(rare(1000), 9);
        assert_eq!(rare(10_000), 99);
    }

    /// What has not come by for long is worth less than its share, and large graphs less than small ones.
    #[test]
    fn idle_and_large_graphs_are_worth_less() {
        let (early, late) = (usage(1..=50), usage(51..=100));
        assert!(early.rate(100) < late.rate(100));
        assert!(worth(0.5, None, 200) < worth(0.5, None, 100));
        assert!(worth(0.5, Some(1.0), 100) < worth(0.5, Some(3.0), 100));
        assert!(worth(0.5, Some(1.0), 0).is_finite());
    }
}
