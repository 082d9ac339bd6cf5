//! What the benchmark `steps` measures and writes down: its cases, its rows, the rows of peers, the table and the plot.
//!
//! Everything here is computed from numbers that were measured elsewhere, so it is tested without a device.

use crate::environment::Environment;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use serde::{Deserialize, Serialize};
use std::fmt::{self, Write};
use std::str::FromStr;
use thiserror::Error;

/// A net to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Net {
    /// [`Mlp`](crate::models::Mlp), 784-256-256-256-10.
    Mlp,
    /// [`ResNet18`](crate::models::ResNet18) on images of 32 x 32.
    ResNet18,
    /// [`Gpt`](crate::models::Gpt): six layers of width 256, eight heads, 128 of 512 tokens, dropout 0.1.
    Gpt,
    /// [`LstmClassifier`](crate::models::LstmClassifier): two layers of 128 over 32 steps in time of 64 features.
    Lstm,
    /// A perceptron so wide that the arithmetic is the limit, which must gain nothing.
    Control,
}

impl Net {
    const ALL: [Net; 5] = [Net::Mlp, Net::ResNet18, Net::Gpt, Net::Lstm, Net::Control];

    /// Its name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Net::Mlp => "mlp",
            Net::ResNet18 => "resnet18",
            Net::Gpt => "gpt",
            Net::Lstm => "lstm",
            Net::Control => "control",
        }
    }

    /// Whether a training step of it draws random numbers.
    pub fn draws_random(self) -> bool {
        self == Net::Gpt
    }
}

/// An optimizer, at its defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerKind {
    /// SGD without momentum.
    Sgd,
    /// Adam.
    Adam,
}

impl OptimizerKind {
    const ALL: [OptimizerKind; 2] = [OptimizerKind::Sgd, OptimizerKind::Adam];

    /// Its name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            OptimizerKind::Sgd => "sgd",
            OptimizerKind::Adam => "adam",
        }
    }
}

/// A training step to measure, written `NAME:BATCH` or `NAME:BATCH:OPTIMIZER`; SGD where none is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BenchCase {
    /// The net.
    pub net: Net,
    /// Samples of a batch, at least one.
    pub batch: usize,
    /// The optimizer.
    pub optimizer: OptimizerKind,
}

/// Why a case was not understood.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CaseError {
    /// Not two or three parts.
    #[error("{given}: expected NAME:BATCH or NAME:BATCH:OPTIMIZER")]
    Form {
        /// What was given.
        given: String,
    },
    /// No such net.
    #[error("no net {name}: mlp, resnet18, gpt, lstm, control")]
    Net {
        /// The name given.
        name: String,
    },
    /// Not a positive number.
    #[error("{batch} is no batch size: a number from 1 on")]
    Batch {
        /// What was given for it.
        batch: String,
    },
    /// No such optimizer.
    #[error("no optimizer {name}: sgd, adam")]
    Optimizer {
        /// The name given.
        name: String,
    },
}

impl FromStr for BenchCase {
    type Err = CaseError;

    fn from_str(given: &str) -> Result<Self, CaseError> {
        let parts: Vec<&str> = given.trim().split(':').collect();
        let (name, size, optimizer) = match parts[..] {
            [name, size] => (name, size, OptimizerKind::Sgd.name()),
            [name, size, optimizer] => (name, size, optimizer),
            _ => {
                return Err(CaseError::Form {
                    given: given.to_string(),
                });
            }
        };
        let net = Net::ALL.into_iter().find(|net| net.name() == name);
        let kind = OptimizerKind::ALL
            .into_iter()
            .find(|kind| kind.name() == optimizer);
        Ok(Self {
            net: net.ok_or_else(|| CaseError::Net {
                name: name.to_string(),
            })?,
            batch: match size.parse() {
                Ok(batch) if batch > 0 => batch,
                _ => {
                    return Err(CaseError::Batch {
                        batch: size.to_string(),
                    });
                }
            },
            optimizer: kind.ok_or_else(|| CaseError::Optimizer {
                name: optimizer.to_string(),
            })?,
        })
    }
}

impl fmt::Display for BenchCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (net, optimizer) = (self.net.name(), self.optimizer.name());
        write!(f, "{net}:{}:{optimizer}", self.batch)
    }
}

/// Median and least of some samples; `NaN` and infinity of none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Median; of an even number, the upper of the middle two.
    pub median: f64,
    /// Least.
    pub min: f64,
    /// How many there were.
    pub samples: usize,
}

impl Summary {
    /// Of `samples`.
    pub fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        Self {
            median: sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN),
            min: sorted.first().copied().unwrap_or(f64::INFINITY),
            samples: sorted.len(),
        }
    }
}

/// Steps after which a recording has paid for itself; `None` where a graphed step is not faster, and it never does.
pub fn break_even_steps(capture_ms: f64, eager_ms: f64, graphed_ms: f64) -> Option<f64> {
    let saved_ms = eager_ms - graphed_ms;
    (saved_ms > 0.0).then(|| capture_ms / saved_ms)
}

/// The share of `step_ms` in which a GPU that was busy for `busy_ms` of it was idle; never less than none.
pub fn idle_share(busy_ms: f64, step_ms: f64) -> f64 {
    (1.0 - busy_ms / step_ms).max(0.0)
}

/// A kernel's part in a replayed step.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct KernelShare {
    /// Its name, or `copy` or `fill`.
    pub name: String,
    /// How often it runs.
    pub per_step: f64,
    /// Microseconds of all of them.
    pub us_per_step: f64,
}

/// How far a parameter ends from plain Burn's.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Difference {
    /// Its path in the module.
    pub parameter: String,
    /// The largest difference of its elements.
    pub largest: f32,
    /// Which of its elements, in memory's order.
    pub element: usize,
}

/// What was measured of one case. `benches/results/README.md` says what each field is, and what it is not.
#[derive(Clone, Debug, Default, Serialize)]
#[allow(missing_docs)]
pub struct Row {
    pub case: String,
    pub batch: usize,
    pub optimizer: String,
    pub random_numbers: bool,
    pub random_registered: bool,
    pub first_step_s: f64,
    pub eager_sync_ms: f64,
    pub eager_min_ms: f64,
    pub graphed_sync_ms: f64,
    pub graphed_min_ms: f64,
    pub bare_sync_ms: f64,
    pub bare_min_ms: f64,
    pub samples: usize,
    pub eager_async_ms: f64,
    pub eager_async_min_ms: f64,
    pub graphed_async_ms: f64,
    pub graphed_async_min_ms: f64,
    pub bare_async_ms: f64,
    pub bare_async_min_ms: f64,
    pub samples_async: usize,
    pub ratio_sync: f64,
    pub speed_up_sync: f64,
    pub speed_up_async: f64,
    pub layer_over_bare_us: f64,
    pub layer_over_bare_percent: f64,
    pub eager_host_us: f64,
    pub replay_host_us: f64,
    pub bare_host_us: f64,
    pub samples_host: usize,
    pub launches_plain: u64,
    pub launches_eager: Option<u64>,
    pub launches_replay: Option<u64>,
    pub capture_ms: Option<f64>,
    pub break_even_steps: Option<f64>,
    pub bytes_held: u64,
    pub eager_gpu_busy_ms: Option<f64>,
    pub eager_gpu_idle_share: Option<f64>,
    pub gpu_busy_ms: Option<f64>,
    pub gpu_idle_share: Option<f64>,
    pub fused_updates: bool,
    /// Whether this crate's kernels were registered, for all steps of the row.
    #[serde(default)]
    pub own_kernels: bool,
    /// Blocks of operations that Burn's fusion looked at together; 5 unless configured.
    #[serde(default)]
    pub fusion_blocks: usize,
    pub kernels: Vec<KernelShare>,
    pub replayed: u64,
    pub equality_steps: usize,
    pub losses_equal: bool,
    pub parameters_equal: bool,
    pub largest_difference: f32,
    /// The parameters that end furthest from plain Burn's, at most five.
    pub furthest: Vec<Difference>,
    pub equals_own_eager: bool,
    pub own_eager_repeats_itself: Option<bool>,
    pub eager_repeats_itself: bool,
    pub eager_largest_difference: f32,
    pub atomic_kernels: Vec<String>,
    pub memory: Option<Memory>,
    pub peers: Vec<Peer>,
}

/// Bytes reserved over many replays and captures.
#[derive(Clone, Debug, Default, Serialize)]
#[allow(missing_docs)]
pub struct Memory {
    pub replays: usize,
    pub reserved_before_replays: u64,
    pub reserved_after_replays: u64,
    pub captures: usize,
    pub reserved_per_capture: Vec<u64>,
}

impl Row {
    /// `mlp 64 adam`.
    pub fn name(&self) -> String {
        format!("{} {} {}", self.case, self.batch, self.optimizer)
    }

    /// How the parameters compare with plain Burn's: `bits`, or the largest difference. `own` behind it: they equal those
    /// of the same step never recorded. `any`: that step, or plain Burn, does not repeat its own bits.
    pub fn equality(&self) -> String {
        let repeats = self.eager_repeats_itself && self.own_eager_repeats_itself != Some(false);
        match (self.parameters_equal, self.equals_own_eager) {
            (true, _) => "bits".to_string(),
            (false, true) => format!("{:.1e} (own)", self.largest_difference),
            (false, false) if !repeats => format!("{:.1e} (any)", self.largest_difference),
            (false, false) => format!("{:.1e}", self.largest_difference),
        }
    }
}

/// A training step that another framework took, as its program printed it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Peer {
    /// Framework and version.
    pub peer: String,
    /// How it ran the step: `eager`, `graph`, `compile`.
    pub mode: String,
    /// The case, named as ours.
    pub case: String,
    /// Samples of a batch.
    pub batch: usize,
    /// The optimizer, named as ours.
    pub optimizer: String,
    /// One step and a wait for the device, median.
    pub sync_ms: Option<f64>,
    /// The least of them.
    pub sync_min_ms: Option<f64>,
    /// Many steps and one wait, per step, median of the rounds.
    pub async_ms: Option<f64>,
    /// The least of them.
    pub async_min_ms: Option<f64>,
    /// Time of a step in which the GPU computes or copies.
    pub busy_ms: Option<f64>,
    /// Kernels of a step.
    pub kernels: Option<f64>,
    /// Single steps timed.
    pub samples: Option<usize>,
    /// `high` (TF32) or `highest` (float32).
    pub matmul_precision: Option<String>,
    /// The card.
    pub card: Option<String>,
    /// Why there are no times.
    pub error: Option<String>,
}

/// A line of peers' rows that is no such row.
#[derive(Debug, Error)]
#[error("line {line} is no row of a peer: {source}")]
pub struct PeersError {
    /// The line, counted from 1.
    pub line: usize,
    /// What is wrong with it.
    pub source: serde_json::Error,
}

/// The rows of peers in `text`, one JSON object a line. Lines that do not begin as one are what else the program printed.
///
/// # Errors
/// [`PeersError`] for a line that begins as an object and is none, or lacks what a row needs.
pub fn peers_of(text: &str) -> Result<Vec<Peer>, PeersError> {
    let lines = text.lines().enumerate();
    let objects = lines.filter(|(_, line)| line.trim_start().starts_with('{'));
    objects
        .map(|(index, line)| {
            serde_json::from_str(line).map_err(|source| PeersError {
                line: index + 1,
                source,
            })
        })
        .collect()
}

/// Put each peer's row into the row of the same case, batch and optimizer, and return those that have none.
pub fn match_peers(rows: &mut [Row], peers: Vec<Peer>) -> Vec<Peer> {
    let mut unmatched = Vec::new();
    for peer in peers {
        let same = |row: &&mut Row| {
            (&row.case, row.batch, &row.optimizer) == (&peer.case, peer.batch, &peer.optimizer)
        };
        match rows.iter_mut().find(same) {
            Some(row) => row.peers.push(peer),
            None => unmatched.push(peer),
        }
    }
    unmatched
}

/// One way of taking a step, with its times, as table and plot show it.
struct Way {
    name: String,
    sync: Option<(f64, Option<f64>)>,
    queued: Option<(f64, Option<f64>)>,
    host_us: Option<f64>,
    busy_ms: Option<f64>,
    launches: Option<f64>,
    note: String,
}

fn ways(row: &Row) -> Vec<Way> {
    let ours = |name: &str, sync: (f64, f64), queued: (f64, f64), host_us: f64| Way {
        name: name.to_string(),
        sync: Some((sync.0, Some(sync.1))),
        queued: Some((queued.0, Some(queued.1))),
        host_us: Some(host_us),
        busy_ms: None,
        launches: None,
        note: String::new(),
    };
    let mut ways = vec![
        Way {
            busy_ms: row.eager_gpu_busy_ms,
            launches: Some(row.launches_plain as f64),
            ..ours(
                "Burn, eager",
                (row.eager_sync_ms, row.eager_min_ms),
                (row.eager_async_ms, row.eager_async_min_ms),
                row.eager_host_us,
            )
        },
        ours(
            "bare replay",
            (row.bare_sync_ms, row.bare_min_ms),
            (row.bare_async_ms, row.bare_async_min_ms),
            row.bare_host_us,
        ),
        Way {
            busy_ms: row.gpu_busy_ms,
            launches: row.launches_replay.map(|launches| launches as f64),
            ..ours(
                "burn-cuda-graph",
                (row.graphed_sync_ms, row.graphed_min_ms),
                (row.graphed_async_ms, row.graphed_async_min_ms),
                row.replay_host_us,
            )
        },
    ];
    ways.extend(row.peers.iter().map(|peer| {
        let precision = peer.matmul_precision.as_deref();
        Way {
            name: match precision {
                Some(precision) => format!("{}, {}, {precision}", peer.peer, peer.mode),
                None => format!("{}, {}", peer.peer, peer.mode),
            },
            sync: peer.sync_ms.map(|ms| (ms, peer.sync_min_ms)),
            queued: peer.async_ms.map(|ms| (ms, peer.async_min_ms)),
            host_us: None,
            busy_ms: peer.busy_ms,
            launches: peer.kernels,
            note: peer.error.clone().unwrap_or_default(),
        }
    }));
    ways
}

/// The card's name.
pub(crate) fn measured_on(environment: &Environment) -> &str {
    match environment.card.as_str() {
        "none" => "no NVIDIA card",
        card => card,
    }
}

/// The rows as two Markdown tables: the times of each way of taking a step, peers' included, and what a recording costs.
pub fn markdown(environment: &Environment, rows: &[Row]) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write_markdown(&mut text, environment, rows);
    text
}

fn write_markdown(text: &mut String, environment: &Environment, rows: &[Row]) -> fmt::Result {
    let value = |value: Option<f64>, digits: usize| match value {
        Some(value) => format!("{value:.digits$}"),
        None => "-".to_string(),
    };
    let with_least = |pair: Option<(f64, Option<f64>)>| match pair {
        Some((median, Some(least))) => format!("{median:.3} ({least:.3})"),
        Some((median, None)) => format!("{median:.3}"),
        None => "-".to_string(),
    };
    writeln!(
        text,
        "{}, driver {}, Burn {}, CubeCL {}, commit {}, {}.\n",
        measured_on(environment),
        environment.driver,
        environment.burn,
        environment.cubecl,
        environment.commit,
        environment.date
    )?;
    writeln!(
        text,
        "| step | how | one step, ms | queued, ms | host, us | GPU busy, ms | launches | speed-up, queued |"
    )?;
    writeln!(text, "| --- | --- | --: | --: | --: | --: | --: | --: |")?;
    for row in rows {
        for way in ways(row) {
            // A reason of several lines, or with a bar in it, would end the row.
            let note = way.note.replace(['\n', '\r'], " ").replace('|', "/");
            let note = match note.is_empty() {
                true => note,
                false => format!(" ({note})"),
            };
            writeln!(
                text,
                "| {} | {}{note} | {} | {} | {} | {} | {} | {} |",
                row.name(),
                way.name,
                with_least(way.sync),
                with_least(way.queued),
                value(way.host_us, 1),
                value(way.busy_ms, 3),
                value(way.launches, 0),
                value(way.queued.map(|(ms, _)| row.eager_async_ms / ms), 2),
            )?;
        }
    }
    writeln!(
        text,
        "\nMedians, in brackets the least. *One step*: a step, then a wait for the device. *Queued*: many steps and one \
         wait, per step. *Host*: until a call returns, the device idle when the burst began. *Launches*: of kernels; of a \
         replay also the copies in and out. *Speed-up*: plain Burn's queued time over this one.\n"
    )?;
    writeln!(
        text,
        "| step | samples | capture, ms | break-even, steps | held, MiB | parameters after {} steps |",
        rows.first().map_or(0, |row| row.equality_steps)
    )?;
    writeln!(text, "| --- | --: | --: | --: | --: | --- |")?;
    for row in rows {
        writeln!(
            text,
            "| {} | {} + {} | {} | {} | {:.1} | {} |",
            row.name(),
            row.samples,
            row.samples_async,
            value(row.capture_ms, 1),
            value(row.break_even_steps.map(f64::ceil), 0),
            row.bytes_held as f64 / (1 << 20) as f64,
            row.equality(),
        )?;
    }
    writeln!(
        text,
        "\n*Samples*: single steps + rounds of queued ones. *Break-even*: steps after which a recording has paid for \
         itself; `-` where it never does. *Parameters*: `bits` where all equal plain Burn's, else the largest difference; \
         `own`: they equal those of the same step never recorded; `any`: eager steps do not repeat their own bits."
    )
}

/// The queued times as an SVG: for each case a group of bars, on a logarithmic scale of milliseconds.
///
/// Ways without a time, of a peer that failed, have no bar.
///
/// # Errors
/// When plotters cannot draw it.
pub fn plot(environment: &Environment, rows: &[Row]) -> Result<String, Box<dyn std::error::Error>> {
    const WIDTH: i32 = 960;
    const LEFT: i32 = 300;
    const RIGHT: i32 = 80;
    const TOP: i32 = 56;
    const BAR: i32 = 16;
    const GAP: i32 = 30;
    let groups: Vec<(String, Vec<(String, f64)>)> = rows
        .iter()
        .map(|row| {
            let bars = ways(row).into_iter().filter_map(|way| {
                let (ms, _) = way.queued?;
                (ms.is_finite() && ms > 0.0).then_some((way.name, ms))
            });
            (row.name(), bars.collect())
        })
        .collect();
    let times = || groups.iter().flat_map(|(_, bars)| bars).map(|(_, ms)| *ms);
    // Whole decades, so that the first and the last line of the grid are its ends.
    let low = times()
        .fold(f64::INFINITY, f64::min)
        .min(1.0)
        .log10()
        .floor();
    let high = times().fold(0.0, f64::max).max(1.0).log10().ceil();
    let high = high.max(low + 1.0);
    let bars: usize = groups.iter().map(|(_, bars)| bars.len()).sum();
    let bottom = TOP + bars as i32 * BAR + groups.len() as i32 * GAP;
    let x = |ms: f64| {
        let share = (ms.log10() - low) / (high - low);
        LEFT + (share * f64::from(WIDTH - LEFT - RIGHT)).round() as i32
    };

    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH as u32, bottom as u32 + 40))
            .into_drawing_area();
        root.fill(&WHITE)?;
        let font = |size: i32, horizontal| {
            let style = TextStyle::from(("sans-serif", size).into_font()).color(&BLACK);
            style.pos(Pos::new(horizontal, VPos::Center))
        };
        let text = |words: String, at: (i32, i32), style: TextStyle<'static>| {
            root.draw(&Text::new(words, at, style))
        };
        let title = format!(
            "Milliseconds per step, steps queued (less is better, logarithmic): {}, commit {}",
            measured_on(environment),
            environment.commit
        );
        text(title, (12, 20), font(18, HPos::Left))?;
        for decade in low as i32..=high as i32 {
            let at = x(10f64.powi(decade));
            let line = PathElement::new(vec![(at, TOP - 12), (at, bottom)], BLACK.mix(0.2));
            root.draw(&line)?;
            let label = format!("{} ms", 10f64.powi(decade));
            text(label, (at, bottom + 14), font(15, HPos::Center))?;
        }
        let mut y = TOP;
        for (name, bars) in &groups {
            text(name.clone(), (12, y), font(17, HPos::Left))?;
            y += GAP / 2;
            for (index, (way, ms)) in bars.iter().enumerate() {
                let color = match index {
                    0 => RGBColor(140, 140, 140),
                    1 => RGBColor(150, 190, 230),
                    2 => RGBColor(30, 100, 180),
                    _ => RGBColor(230, 150, 60),
                };
                let corners = [(LEFT, y + 2), (x(*ms).max(LEFT + 1), y + BAR - 2)];
                root.draw(&Rectangle::new(corners, color.filled()))?;
                let middle = y + BAR / 2;
                text(way.clone(), (LEFT - 8, middle), font(15, HPos::Right))?;
                let label = format!("{ms:.3}");
                text(label, (x(*ms) + 6, middle), font(15, HPos::Left))?;
                y += BAR;
            }
            y += GAP / 2;
        }
        root.present()?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment() -> Environment {
        Environment {
            card: "NVIDIA Test".to_string(),
            driver: "1.2".to_string(),
            device: "device".to_string(),
            graph: "none".to_string(),
            burn: "0.22.1",
            cubecl: "0.11.3",
            commit: "abc1234".to_string(),
            command: String::new(),
            date: "2026-01-01".to_string(),
        }
    }

    fn row() -> Row {
        Row {
            case: "mlp".to_string(),
            batch: 64,
            optimizer: "adam".to_string(),
            eager_async_ms: 2.0,
            bare_async_ms: 0.2,
            graphed_async_ms: 0.25,
            capture_ms: Some(10.0),
            break_even_steps: break_even_steps(10.0, 2.0, 0.25),
            parameters_equal: true,
            ..Row::default()
        }
    }

    const PEERS: &str = r#"some other line
{"peer": "pytorch 2.11.0", "mode": "graph", "case": "mlp", "batch": 64, "optimizer": "adam", "sync_ms": 0.2, "async_ms": 0.125, "busy_ms": null, "kernels": 31.0, "cuda": "13.0"}
{"peer": "pytorch 2.11.0", "mode": "compile", "case": "mlp", "batch": 64, "optimizer": "adam", "error": "no | compiler\nhere"}
{"peer": "pytorch 2.11.0", "mode": "eager", "case": "mlp", "batch": 1, "optimizer": "adam", "async_ms": 1.0}
"#;

    #[test]
    fn a_case_is_read_as_it_is_written() {
        let case: BenchCase = "resnet18:16:adam".parse().unwrap();
        assert_eq!(
            case,
            BenchCase {
                net: Net::ResNet18,
                batch: 16,
                optimizer: OptimizerKind::Adam
            }
        );
        assert_eq!(case.to_string(), "resnet18:16:adam");
        for net in Net::ALL {
            let text = format!("{}:1:adam", net.name());
            assert_eq!(text.parse::<BenchCase>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_case_without_an_optimizer_trains_with_sgd() {
        assert_eq!("mlp:64".parse(), "mlp:64:sgd".parse::<BenchCase>());
    }

    #[test]
    fn a_case_that_is_none_says_which_part_is_wrong() {
        let error = |text: &str| text.parse::<BenchCase>().unwrap_err().to_string();
        assert!(error("mlp").contains("NAME:BATCH"));
        assert!(error("mlp:1:sgd:2").contains("NAME:BATCH"));
        assert!(error("vgg:1").contains("vgg"));
        assert!(error("mlp:0").contains('0'));
        assert!(error("mlp:many").contains("many"));
        assert!(error("mlp:1:lion").contains("lion"));
    }

    #[test]
    fn a_recording_that_saves_nothing_never_breaks_even() {
        assert_eq!(break_even_steps(10.0, 2.0, 1.5), Some(20.0));
        assert_eq!(break_even_steps(10.0, 1.5, 1.5), None);
        assert_eq!(break_even_steps(10.0, 1.0, 1.5), None);
    }

    /// Overlapping kernels can add up to more than the step.
    #[test]
    fn the_idle_share_is_never_negative() {
        assert_eq!(idle_share(1.0, 4.0), 0.75);
        assert_eq!(idle_share(5.0, 4.0), 0.0);
    }

    #[test]
    fn a_summary_has_the_median_and_the_least() {
        let summary = Summary::of(&[3.0, 1.0, 2.0]);
        assert_eq!(
            (summary.median, summary.min, summary.samples),
            (2.0, 1.0, 3)
        );
        assert!(Summary::of(&[]).median.is_nan());
    }

    #[test]
    fn peers_are_put_beside_the_row_of_the_same_case() {
        let peers = peers_of(PEERS).unwrap();
        assert_eq!(peers.len(), 3);
        let mut rows = vec![row()];
        let unmatched = match_peers(&mut rows, peers);
        assert_eq!((rows[0].peers.len(), unmatched.len()), (2, 1));
        assert_eq!(rows[0].peers[0].async_ms, Some(0.125));
        assert_eq!(unmatched[0].batch, 1);
    }

    #[test]
    fn a_broken_line_of_a_peer_is_named() {
        let error = peers_of("{\"peer\": \"x\"}").unwrap_err();
        assert_eq!(error.line, 1);
        assert!(peers_of("torch says hello\n").unwrap().is_empty());
    }

    #[test]
    fn the_table_has_a_line_for_each_way_and_survives_a_peers_message() {
        let mut rows = vec![row()];
        match_peers(&mut rows, peers_of(PEERS).unwrap());
        let table = markdown(&environment(), &rows);
        for words in [
            "NVIDIA Test",
            "abc1234",
            "| mlp 64 adam | Burn, eager |",
            "| mlp 64 adam | bare replay |",
            "| mlp 64 adam | burn-cuda-graph |",
            "| mlp 64 adam | pytorch 2.11.0, graph |",
            "| 8.00 |",
            "(no / compiler here)",
            "bits",
        ] {
            assert!(table.contains(words), "{words} is not in\n{table}");
        }
        // Every line of the first table has the same number of cells.
        let lines = || table.lines().filter(|line| line.starts_with("| mlp"));
        assert_eq!(lines().count(), 6);
        assert!(lines().take(5).all(|line| line.matches('|').count() == 9));
    }

    #[test]
    fn the_plot_has_a_bar_for_each_time_and_none_for_a_peer_that_failed() {
        let mut rows = vec![row()];
        match_peers(&mut rows, peers_of(PEERS).unwrap());
        let svg = plot(&environment(), &rows).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for words in [
            "mlp 64 adam",
            "Burn, eager",
            "bare replay",
            "burn-cuda-graph",
            "graph",
        ] {
            assert!(svg.contains(words), "{words} is not in\n{svg}");
        }
        assert!(!svg.contains("compile"), "{svg}");
        // The background and four bars.
        assert_eq!(svg.matches("<rect").count(), 5);
        // A plot of nothing is a plot.
        assert!(plot(&environment(), &[]).unwrap().contains("</svg>"));
    }

    #[test]
    fn a_difference_says_what_repeats() {
        let different = Row {
            largest_difference: 1e-6,
            eager_repeats_itself: true,
            ..Row::default()
        };
        assert_eq!(row().equality(), "bits");
        assert_eq!(different.equality(), "1.0e-6");
        let own = Row {
            equals_own_eager: true,
            ..different.clone()
        };
        assert_eq!(own.equality(), "1.0e-6 (own)");
        let any = Row {
            own_eager_repeats_itself: Some(false),
            ..different
        };
        assert_eq!(any.equality(), "1.0e-6 (any)");
    }
}
