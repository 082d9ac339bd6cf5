//! Why each shape key is a graph, or is not, in sentences.

use crate::error::FallbackReason;
use crate::report::{EntryReport, Report};
use crate::shape_key::ShapeKey;
use crate::support::Support;
use serde::{Deserialize, Serialize};

/// For each shape key that came by, whether it is a graph, why not, and what to do about it.
///
/// `Display` prints one sentence for each key, most used first; serde gives the same to machines.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Explanation {
    /// What holds for all keys: nothing ran yet, the device has no graphs, steps are blocked before they have a key.
    pub general: Option<String>,
    /// One for each key, most used first.
    pub keys: Vec<KeyExplanation>,
}

/// One shape key's part of an [`Explanation`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct KeyExplanation {
    /// The key.
    pub key: ShapeKey,
    /// Whether its steps replay now.
    pub is_graph: bool,
    /// Why, and what to do.
    pub sentence: String,
}

impl Explanation {
    pub(crate) fn new(report: &Report, support: &Support) -> Self {
        Self {
            general: general(report, support),
            keys: (report.entries.iter())
                .map(|entry| KeyExplanation {
                    key: entry.key.clone(),
                    is_graph: entry.phase == "sealed",
                    sentence: sentence(entry),
                })
                .collect(),
        }
    }

    /// Every step is eager, for this reason.
    #[cfg(feature = "train")]
    pub(crate) fn of_reason(reason: &FallbackReason) -> Self {
        Self {
            general: Some(format!("No step is a graph: {reason}.")),
            keys: Vec::new(),
        }
    }
}

fn general(report: &Report, support: &Support) -> Option<String> {
    if let (0, Support::None { reason }) = (report.steps(), support) {
        return Some(format!(
            "No step was taken yet, and none will be a graph: {reason}."
        ));
    }
    if report.steps() == 0 {
        return Some(format!(
            "No step was taken yet. On this device a recorded step is a {support}."
        ));
    }
    let blocked = report
        .entries
        .is_empty()
        .then_some(())
        .and(report.last_fallback.as_ref())?;
    Some(format!("No step is a graph: {blocked}."))
}

fn sentence(entry: &EntryReport) -> String {
    let EntryReport {
        eager, replayed, ..
    } = entry;
    match (entry.phase.as_str(), &entry.refusal, &entry.last_fallback) {
        ("sealed", _, _) => format!(
            "is a graph: {eager} steps ran eagerly, one was recorded, {replayed} were replayed; it holds {:.1} MiB.",
            entry.bytes as f64 / f64::from(1 << 20)
        ),
        ("ready", _, _) => {
            "is not a graph yet: its operations are stable, and its next step is recorded.".into()
        }
        (
            "refused",
            Some(
                reason @ (FallbackReason::ReplayDoesNotPay { .. }
                | FallbackReason::NotAmortised { .. }),
            ),
            _,
        ) => format!("stays eager ({}): {reason}.", reason.name()),
        ("refused", Some(reason), _) => format!(
            "stays eager ({}): {reason}. It is not tried again until the state is changed from outside, or released.",
            reason.name()
        ),
        (_, _, Some(FallbackReason::WarmingUp { done, needed })) => format!(
            "is not a graph yet: {done} of {needed} equal steps are done. There is nothing to do but to go on."
        ),
        (_, _, Some(reason)) => format!("is not a graph yet ({}): {reason}.", reason.name()),
        (_, _, None) => "is not a graph yet: none of its steps has run to its end.".into(),
    }
}

impl core::fmt::Display for Explanation {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let general = self.general.iter().cloned();
        let keys = (self.keys.iter()).map(|key| format!("[{}] {}", key.key, key.sentence));
        let lines: Vec<String> = general.chain(keys).collect();
        write!(f, "{}", lines.join("\n"))
    }
}
