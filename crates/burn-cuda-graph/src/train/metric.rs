//! What a graphed training does, as metrics of `burn_train`.

use crate::explain::Explanation;
use crate::report::{Report, median_ms};
use burn::tensor::TensorReadError;
use burn_train::metric::state::{FormatOptions, NumericMetricState};
use burn_train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a training tells its metrics, which run on another thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct Monitor(Arc<Mutex<Seen>>);

#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub report: Option<Report>,
    pub explanation: Option<Explanation>,
    steps: u64,
    by_graph: u64,
    /// The end of the last step of this epoch.
    last: Option<Instant>,
    step_time: Option<Duration>,
    /// Times of steps that were waited for, before and after: eager ones and replays.
    eager: VecDeque<Duration>,
    replayed: VecDeque<Duration>,
}

/// Step times kept for a median.
const KEPT: usize = 128;

impl Monitor {
    pub fn read<R>(&self, read: impl FnOnce(&Seen) -> R) -> R {
        read(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn write(&self, write: impl FnOnce(&mut Seen)) {
        write(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// An epoch begins: what went on since the last step is not of a step.
    pub fn epoch_begins(&self) {
        self.write(|seen| seen.last = None);
    }

    /// A step was taken, by a graph or not.
    pub fn stepped(&self, by_graph: bool) {
        let now = Instant::now();
        self.write(|seen| {
            seen.steps += 1;
            seen.by_graph += u64::from(by_graph);
            seen.step_time = seen.last.map(|last| now - last);
            seen.last = Some(now);
        });
    }

    /// A step took so long, from one wait for the device to the next.
    pub fn timed(&self, by_graph: bool, time: Duration) {
        self.write(|seen| {
            let times = match by_graph {
                true => &mut seen.replayed,
                false => &mut seen.eager,
            };
            if times.len() == KEPT {
                times.pop_front();
            }
            times.push_back(time);
        });
    }
}

impl Seen {
    fn replay_rate(&self) -> Option<f64> {
        (self.steps > 0).then(|| 100.0 * self.by_graph as f64 / self.steps as f64)
    }

    fn step_time_ms(&self) -> Option<f64> {
        self.step_time.map(|time| time.as_secs_f64() * 1e3)
    }

    fn speed_up(&self) -> Option<f64> {
        Some(median_ms(&self.eager)? / median_ms(&self.replayed)?)
    }
}

macro_rules! graph_metric {
    ($(#[$doc:meta])* $name:ident, $title:literal, $unit:literal, higher_is_better: $better:literal, $of:ident) => {
        $(#[$doc])*
        #[derive(Clone)]
        pub struct $name {
            name: MetricName,
            monitor: Monitor,
            state: NumericMetricState,
            known: bool,
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_struct(stringify!($name)).field("value", &self.monitor.read(Seen::$of)).finish()
            }
        }

        impl $name {
            pub(crate) fn new(monitor: Monitor) -> Self {
                Self {
                    name: Arc::new($title.to_string()),
                    monitor,
                    state: NumericMetricState::default(),
                    known: false,
                }
            }

            fn format(&self) -> FormatOptions {
                FormatOptions::new(self.name.clone()).unit($unit).precision(2)
            }
        }

        impl Metric for $name {
            type Input = ();

            fn update(&mut self, _item: &(), _metadata: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
                let Some(value) = self.monitor.read(Seen::$of) else {
                    return Ok(SerializedEntry::not_available(Some($unit)));
                };
                self.known = true;
                self.state.update(value, 1);
                Ok(self.state.compute_update(self.format()))
            }

            fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
                Ok(match self.known {
                    true => self.state.compute_final(self.format()),
                    false => SerializedEntry::not_available(Some($unit)),
                })
            }

            fn clear(&mut self) {
                self.state.reset();
                self.known = false;
            }

            fn name(&self) -> MetricName {
                self.name.clone()
            }

            fn attributes(&self) -> MetricAttributes {
                NumericAttributes { unit: Some($unit.to_string()), higher_is_better: $better }.into()
            }
        }

        impl Numeric for $name {
            fn value(&self) -> Option<NumericEntry> {
                self.known.then(|| self.state.current_value())
            }
            fn running_value(&self) -> Option<NumericEntry> {
                self.known.then(|| self.state.running_value())
            }
            fn final_value(&self) -> NumericEntry {
                self.state.final_value()
            }
        }
    };
}

graph_metric!(
    /// Share of the training's steps so far that a graph executed, in percent.
    ///
    /// Made by [`GraphStrategy::replay_rate_metric`](crate::GraphStrategy::replay_rate_metric). Register it with
    /// `metric_train_numeric`. Metrics are computed on a thread of their own, so a value may be some steps ahead of the item
    /// that it is shown with.
    ReplayRateMetric, "Replay rate", "%", higher_is_better: true, replay_rate
);

graph_metric!(
    /// Time from the end of one training step to the end of the next, in milliseconds: loading the batch and waiting for
    /// the device included, validation and checkpoints not.
    ///
    /// Made by [`GraphStrategy::step_time_metric`](crate::GraphStrategy::step_time_metric). Register it with
    /// `metric_train_numeric`. The mean that Burn shows for an epoch counts the capture in.
    StepTimeMetric, "Step time", "ms", higher_is_better: false, step_time_ms
);

graph_metric!(
    /// Median time of an eager step over that of a replayed one, both from one wait for the device to the next.
    ///
    /// Made by [`GraphStrategy::speed_up_metric`](crate::GraphStrategy::speed_up_metric). Register it with
    /// `metric_train_numeric`. Not available without
    /// [`GraphStrategy::with_speed_up_samples`](crate::GraphStrategy::with_speed_up_samples), since steps that replay show
    /// nothing of what they would have taken.
    SpeedUpMetric, "Speed-up", "x", higher_is_better: true, speed_up
);
