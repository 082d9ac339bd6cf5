//! What `burn_train` shows of a training where there is no terminal to draw on: a line for each epoch.
//!
//! Burn's own renderer for that case prints a line for every batch.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::warm_start::Watching;
use burn_train::LearnerSummary;
use burn_train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn_train::metric::{MetricDefinition, MetricId};
use burn_train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};

/// Prints each epoch's metrics, as they stood at its end, or nothing at all.
#[derive(Default)]
pub struct LineRenderer {
    quiet: bool,
    /// Until the first item is done.
    tuning: Option<Watching>,
    epoch: usize,
    started: Option<Instant>,
    /// How long the training part of the epoch took, in seconds.
    trained_s: Option<f64>,
    names: BTreeMap<String, String>,
    latest: BTreeMap<(&'static str, String), String>,
}

impl LineRenderer {
    /// A line for each epoch, on standard output.
    pub fn new() -> Self {
        Self::default()
    }

    /// A line for each epoch, and `tuning` while the first step runs.
    pub fn tuning(tuning: Watching) -> Self {
        Self {
            tuning: Some(tuning),
            ..Self::default()
        }
    }

    /// Nothing.
    pub fn quiet() -> Self {
        Self {
            quiet: true,
            ..Self::default()
        }
    }

    fn note(&mut self, split: &'static str, state: MetricState) {
        let (MetricState::Generic(entry) | MetricState::Numeric(entry, _)) = state;
        let id = key(&entry.metric_id);
        let name = self.names.get(&id).cloned().unwrap_or(id);
        let shown = entry.serialized_entry.formatted;
        // Burn's text has the epoch's value and the last batch's.
        let epoch = shown.split(" - batch").next().unwrap_or(&shown);
        let epoch = epoch.strip_prefix("epoch ").unwrap_or(epoch);
        self.latest.insert((split, name), epoch.to_string());
    }
}

fn key(id: &MetricId) -> String {
    format!("{id:?}")
}

impl MetricsRendererTraining for LineRenderer {
    fn update_train(&mut self, state: MetricState) {
        drop(self.tuning.take());
        self.note("train", state);
    }
    fn update_valid(&mut self, state: MetricState) {
        self.note("valid", state);
    }
    fn on_train_end(
        &mut self,
        summary: Option<LearnerSummary>,
    ) -> Result<(), Box<dyn core::error::Error>> {
        if let (false, Some(summary)) = (self.quiet, summary) {
            println!("{summary}");
        }
        Ok(())
    }
}

impl TrainingProgressLogger for LineRenderer {
    fn start(&mut self, _epochs: usize, first: usize, _items: Option<usize>, _label: Option<&str>) {
        self.epoch = first;
    }
    fn start_split(&mut self, split: &str, _items: usize) {
        self.started = (split == "train").then(Instant::now);
    }
    fn update_split(&mut self, _items: usize) {}
    fn update_epoch(&mut self, epoch: usize) {
        if !self.quiet {
            let metrics: Vec<String> = (self.latest.iter())
                .map(|((split, name), value)| format!("{split} {name} {value}"))
                .collect();
            let took = self.trained_s.unwrap_or_default();
            println!(
                "epoch {epoch:>3}: trained in {took:.3} s, {}",
                metrics.join(", ")
            );
        }
        self.epoch = epoch + 1;
    }
    fn end_split(&mut self) {
        if let Some(started) = self.started.take() {
            self.trained_s = Some(started.elapsed().as_secs_f64());
        }
    }
    fn end(&mut self) {}
    fn log_event_training(&mut self, _event: String) {}
}

impl EvaluationProgressLogger for LineRenderer {
    fn start_global_progress(&mut self, _tests: usize) {}
    fn start_test(&mut self, _name: &str, _items: usize) {}
    fn update_test_progress(&mut self, _items: usize) {}
    fn end_test(&mut self) {}
    fn end_global_progress(&mut self) {}
    fn log_event_evaluation(&mut self, _event: String) {}
}

impl MetricsRendererEvaluation for LineRenderer {
    fn update_test(&mut self, _name: EvaluationName, state: MetricState) {
        self.note("test", state);
    }
}

impl MetricsRenderer for LineRenderer {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, definition: MetricDefinition) {
        let name = definition.name.to_string();
        self.names.insert(key(&definition.metric_id), name);
    }
}
