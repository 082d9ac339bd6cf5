//! What the user sees: a bar while an epoch runs (where somebody watches), a line when it is done, the final report.

use std::io::{self, IsTerminal};

use burn_cuda_graph::{Report, Support};
use burn_cuda_graph_suite::data::Dataset;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::compare::Comparison;
use crate::options::{Mode, Settings};

/// The progress of one epoch.
pub struct Progress {
    bar: ProgressBar,
    epoch: usize,
}

impl Progress {
    pub fn new(epoch: usize, steps: usize) -> Self {
        let bar = if io::stdout().is_terminal() && io::stderr().is_terminal() {
            let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len}  {msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
            ProgressBar::new(steps as u64)
                .with_style(style)
                .with_prefix(format!("epoch {epoch:>3}"))
        } else {
            ProgressBar::hidden()
        };
        Self { bar, epoch }
    }

    /// A loss that was just read, and the time of a step so far.
    pub fn show(&self, loss: f64, step_ms: f64) {
        self.bar
            .set_message(format!("loss {loss:.3}  {step_ms:.1} ms/step"));
    }

    /// A line above the bar.
    pub fn print(&self, line: &str) {
        self.bar.suspend(|| println!("{line}"));
    }

    pub fn advance(&self) {
        self.bar.inc(1);
    }

    pub fn finish(self, outcome: &Epoch) {
        self.bar.finish_and_clear();
        println!(
            "epoch {:>3}: {:>4} steps, loss {:.3}, {:>7.1} ms/step, validation accuracy {:.1} %",
            self.epoch,
            outcome.steps,
            outcome.loss,
            outcome.step_ms,
            outcome.validation_accuracy * 100.0,
        );
    }
}

/// What one epoch came to.
#[derive(Clone, Debug, Serialize)]
pub struct Epoch {
    pub steps: usize,
    /// Mean of the losses that were read, one in `STEPS_PER_LOSS`.
    pub loss: f64,
    /// Wall time of the epoch's training part over its steps; the first step of a run, which compiles and tunes
    /// kernels, is left out where there are others. In `--mode compare` a step is one of each net.
    pub step_ms: f64,
    pub validation_accuracy: f64,
}

/// The final report: what ran where, and how it came out.
#[derive(Debug, Serialize)]
pub struct Outcome {
    device: String,
    graphs: String,
    mode: Mode,
    data: &'static str,
    settings: Settings,
    pub epochs: Vec<Epoch>,
    pub summary: String,
    pub steps: Option<Report>,
    pub comparison: Option<Comparison>,
}

impl Outcome {
    pub fn new(
        mode: Mode,
        device: &str,
        support: &Support,
        data: &Dataset,
        settings: &Settings,
    ) -> Self {
        Self {
            device: device.to_string(),
            graphs: support.to_string(),
            mode,
            data: data.name(),
            settings: settings.clone(),
            epochs: Vec::new(),
            summary: String::new(),
            steps: None,
            comparison: None,
        }
    }

    pub fn print(&self) {
        if let Some(report) = &self.steps {
            println!("\n{report}");
        }
        if let Some(comparison) = &self.comparison {
            println!("\n{comparison}");
        }
        println!("\n{}", self.summary);
    }
}
