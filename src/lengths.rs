//! What the benchmark `lengths` trains on and writes down: sentences of varying length, its rows, the table and the plot.
//!
//! Everything here is computed from numbers that were measured elsewhere, so it is tested without a device.

use crate::bench::measured_on;
use crate::environment::Environment;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde::Serialize;
use std::fmt::Write;

/// The sentences of a text, a number for each character.
#[derive(Debug, Clone)]
pub struct Sentences {
    codes: Vec<Vec<i32>>,
    /// Characters that there are, and one for padding, which is 0.
    pub vocabulary: usize,
}

impl Sentences {
    /// Of `text`: what ends in one of `.!?;:`, with at least two characters.
    pub fn of(text: &str) -> Self {
        let mut alphabet: Vec<char> = text.chars().collect();
        alphabet.sort_unstable();
        alphabet.dedup();
        let code = |c: char| {
            alphabet
                .binary_search(&c)
                .map_or(0, |index| index as i32 + 1)
        };
        let codes = text
            .split_inclusive(['.', '!', '?', ';', ':'])
            .map(|sentence| sentence.trim().chars().map(code).collect::<Vec<i32>>())
            .filter(|codes| codes.len() >= 2)
            .collect();
        Self {
            codes,
            vocabulary: alphabet.len() + 1,
        }
    }

    /// Those of at most so many characters to predict.
    pub fn up_to(mut self, length: usize) -> Self {
        self.codes.retain(|codes| codes.len() <= length + 1);
        self
    }

    /// Characters to predict in the longest sentence: all but its first.
    pub fn longest(&self) -> usize {
        let longest = self.codes.iter().map(Vec::len).max();
        longest.unwrap_or(0).saturating_sub(1)
    }

    /// The batches of an epoch: `rows` sentences each, shuffled, what is left over dropped.
    pub fn epoch(&self, rows: usize, seed: u64) -> Vec<TextBatch<'_>> {
        let mut order: Vec<&[i32]> = self.codes.iter().map(Vec::as_slice).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed));
        let batches = order.chunks_exact(rows.max(1));
        batches
            .map(|rows| TextBatch {
                rows: rows.to_vec(),
            })
            .collect()
    }
}

/// Sentences that are trained on together.
#[derive(Debug, Clone)]
pub struct TextBatch<'a> {
    rows: Vec<&'a [i32]>,
}

/// A [`TextBatch`] as tensors hold it, row by row.
#[derive(Debug, Clone, PartialEq)]
pub struct PaddedText {
    /// Rows and positions.
    pub shape: [usize; 2],
    /// A character at each position; 0 is padding.
    pub tokens: Vec<i32>,
    /// The character that follows.
    pub targets: Vec<i32>,
    /// Whether a position is padding.
    pub padding: Vec<bool>,
}

impl TextBatch<'_> {
    /// Characters to predict in its longest row.
    pub fn length(&self) -> usize {
        let longest = self.rows.iter().map(|row| row.len()).max();
        longest.unwrap_or(0).saturating_sub(1)
    }

    /// Characters to predict, padding left out.
    pub fn tokens(&self) -> usize {
        self.rows
            .iter()
            .map(|row| row.len().saturating_sub(1))
            .sum()
    }

    /// Padded to `length`, which is at least its own.
    pub fn padded(&self, length: usize) -> PaddedText {
        let length = length.max(self.length());
        let mut padded = PaddedText {
            shape: [self.rows.len(), length],
            tokens: Vec::new(),
            targets: Vec::new(),
            padding: Vec::new(),
        };
        for row in &self.rows {
            for position in 0..length {
                let next = row.get(position + 1);
                padded.tokens.push(next.map_or(0, |_| row[position]));
                padded.targets.push(next.copied().unwrap_or(0));
                padded.padding.push(next.is_none());
            }
        }
        padded
    }
}

/// How one way of training on the sentences went. `benches/results/README.md` says what each field is.
#[derive(Debug, Clone, Serialize)]
pub struct Way {
    /// What it is.
    pub name: String,
    /// Steps of an epoch.
    pub steps: usize,
    /// Seconds of each epoch, the first included.
    pub epoch_s: Vec<f64>,
    /// Characters predicted per second, padding left out: median of the epochs but the first.
    pub tokens_per_s: f64,
    /// The same, padding counted.
    pub positions_per_s: f64,
    /// Milliseconds per step, steps queued, median of the epochs but the first.
    pub step_ms: f64,
    /// Graphs held at the end.
    pub graphs: usize,
    /// Bytes that they hold.
    pub bytes_held: u64,
    /// Graphs recorded in each epoch.
    pub captures: Vec<u64>,
    /// Bytes that the device's pools reserved after each epoch, for this way and those that ran in turns with it.
    pub reserved: Vec<u64>,
}

/// The graphs after a step.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Moment {
    /// Length of the step's batch.
    pub length: usize,
    /// Whether it was replayed.
    pub replayed: bool,
    /// Graphs recorded so far.
    pub captures: u64,
    /// Graphs held.
    pub graphs: usize,
    /// Bytes that they hold.
    pub bytes_held: u64,
}

/// What came of steps whose lengths never come again.
#[derive(Debug, Clone, Serialize)]
pub struct Unsettled {
    /// Lengths, each of which one step had.
    pub lengths: usize,
    /// Milliseconds of the steps of a block, queued, over those of plain Burn on the same lengths: one for each block of
    /// each run, in the order of the steps.
    pub ratios: Vec<Vec<f64>>,
    /// Steps of a block.
    pub block: usize,
    /// Their median, all blocks.
    pub median_ratio: f64,
    /// The same over blocks in which all keys were left unwatched.
    pub median_ratio_settled: f64,
    /// Graphs recorded.
    pub captures: u64,
    /// Steps by the reason for which they were eager.
    pub fallbacks: std::collections::BTreeMap<String, u64>,
}

/// All of a run.
#[derive(Debug, Clone, Serialize)]
pub struct Lengths {
    /// Sentences of a batch.
    pub rows: usize,
    /// The buckets.
    pub buckets: Vec<usize>,
    /// The share of padding that they made.
    pub padding_share: f64,
    /// Steps after which the parameters were compared, on the same padded batches.
    pub equality_steps: usize,
    /// Whether they equal, bit by bit, those of the same step that never records.
    pub equals_own_eager: bool,
    /// Whether they equal plain Burn's.
    pub parameters_equal: bool,
    /// Their largest difference from plain Burn's.
    pub largest_difference: f32,
    /// The ways, plain Burn's first.
    pub ways: Vec<Way>,
    /// The graphs over the steps of the comparison, from the first on.
    pub moments: Vec<Moment>,
    /// Steps whose lengths never come again.
    pub unsettled: Unsettled,
}

/// The median of some numbers, of an even number the upper of the middle two; `NaN` of none.
pub fn median(samples: impl IntoIterator<Item = f64>) -> f64 {
    let samples: Vec<f64> = samples.into_iter().collect();
    crate::bench::Summary::of(&samples).median
}

/// A Markdown table of the ways, and what else was found.
pub fn markdown(environment: &Environment, run: &Lengths) -> String {
    let mut text = format!(
        "{}, commit {}\n\n",
        measured_on(environment),
        environment.commit
    );
    text.push_str(
        "| way | tokens/s | with padding | ms per step | graphs | MiB held | recorded, by epoch |\n| --- | --: | --: | --: | --: \
         | --: | --- |\n",
    );
    for way in &run.ways {
        let captures: Vec<String> = way.captures.iter().map(u64::to_string).collect();
        // A String takes whatever is written to it.
        let _ = writeln!(
            text,
            "| {} | {:.0} | {:.0} | {:.3} | {} | {:.1} | {} |",
            way.name,
            way.tokens_per_s,
            way.positions_per_s,
            way.step_ms,
            way.graphs,
            way.bytes_held as f64 / f64::from(1 << 20),
            captures.join(", ")
        );
    }
    let unrecorded = match run.equals_own_eager {
        true => "the same bits",
        false => "OTHER BITS",
    };
    let plain = match run.parameters_equal {
        true => "the same bits".to_string(),
        false => format!("{:.2e} apart at most", run.largest_difference),
    };
    let _ = writeln!(
        text,
        "\n{} sentences a batch, buckets {:?}, {:.1} % of the positions padding. Parameters after {} steps, against the same step \
         unrecorded on the same padded batches: {unrecorded}; against plain Burn: {plain}.\n\nLengths that never come again, \
         over plain Burn: {:.3} of its time, {:.3} once keys are left unwatched.",
        run.rows,
        run.buckets,
        100.0 * run.padding_share,
        run.equality_steps,
        run.unsettled.median_ratio,
        run.unsettled.median_ratio_settled
    );
    text
}

/// An SVG: tokens per second of each way, and graphs recorded, held, and their bytes over the steps.
///
/// # Errors
/// When plotters cannot draw it.
pub fn plot(
    environment: &Environment,
    run: &Lengths,
) -> Result<String, Box<dyn std::error::Error>> {
    const WIDTH: i32 = 960;
    const LEFT: i32 = 300;
    const RIGHT: i32 = 90;
    const TOP: i32 = 56;
    const BAR: i32 = 24;
    const LINES: i32 = 110;
    const GAP: i32 = 40;
    let bars = TOP + run.ways.len() as i32 * BAR;
    let height = bars + 3 * (LINES + GAP) + 20;
    let mut svg = String::new();
    {
        let root =
            SVGBackend::with_string(&mut svg, (WIDTH as u32, height as u32)).into_drawing_area();
        root.fill(&WHITE)?;
        let text = |words: String, at: (i32, i32), size: i32, horizontal| {
            let style = TextStyle::from(("sans-serif", size).into_font()).color(&BLACK);
            root.draw(&Text::new(
                words,
                at,
                style.pos(Pos::new(horizontal, VPos::Center)),
            ))
        };
        let title = format!(
            "Sentences of varying length, characters per second: {}, commit {}",
            measured_on(environment),
            environment.commit
        );
        text(title, (12, 20), 18, HPos::Left)?;
        let most = run
            .ways
            .iter()
            .map(|way| way.tokens_per_s)
            .fold(1.0, f64::max);
        for (index, way) in run.ways.iter().enumerate() {
            let y = TOP + index as i32 * BAR;
            let width = (way.tokens_per_s / most * f64::from(WIDTH - LEFT - RIGHT)).max(1.0) as i32;
            let color = match way.graphs {
                0 => RGBColor(140, 140, 140),
                _ => RGBColor(30, 100, 180),
            };
            let corners = [(LEFT, y + 3), (LEFT + width, y + BAR - 3)];
            root.draw(&Rectangle::new(corners, color.filled()))?;
            text(way.name.clone(), (LEFT - 8, y + BAR / 2), 15, HPos::Right)?;
            let label = format!("{:.0}", way.tokens_per_s);
            text(label, (LEFT + width + 6, y + BAR / 2), 15, HPos::Left)?;
        }
        let of = |value: fn(&Moment) -> f64| run.moments.iter().map(value).collect::<Vec<f64>>();
        let lines = [
            (
                "graphs recorded so far",
                of(|moment| moment.captures as f64),
            ),
            ("graphs held", of(|moment| moment.graphs as f64)),
            (
                "MiB that they hold",
                of(|moment| moment.bytes_held as f64 / f64::from(1 << 20)),
            ),
        ];
        for (index, (name, values)) in lines.into_iter().enumerate() {
            let top = bars + GAP + index as i32 * (LINES + GAP);
            let bottom = top + LINES;
            let most = values.iter().copied().fold(1.0, f64::max);
            text(
                name.to_string(),
                (LEFT - 8, top + LINES / 2),
                15,
                HPos::Right,
            )?;
            text(format!("{most:.0}"), (LEFT - 8, top), 13, HPos::Right)?;
            text("0".to_string(), (LEFT - 8, bottom), 13, HPos::Right)?;
            let axes = vec![(LEFT, top), (LEFT, bottom), (WIDTH - RIGHT, bottom)];
            root.draw(&PathElement::new(axes, BLACK.mix(0.5)))?;
            let across = f64::from(WIDTH - LEFT - RIGHT) / values.len().max(1) as f64;
            let points = values.iter().enumerate().map(|(step, value)| {
                let x = LEFT + (across * (step + 1) as f64) as i32;
                (x, bottom - (value / most * f64::from(LINES)) as i32)
            });
            let points: Vec<(i32, i32)> = points.collect();
            root.draw(&PathElement::new(
                points,
                RGBColor(30, 100, 180).stroke_width(2),
            ))?;
            let label = format!("step {}", values.len());
            text(label, (WIDTH - RIGHT, bottom + 12), 13, HPos::Right)?;
        }
        root.present()?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "A rose. To be, or not! So;\nx: y";

    /// Every character but the first of each sentence is predicted once in an epoch, from those before it and from nothing
    /// of its padding, however far it is padded.
    #[test]
    fn padded_sentences_hold_each_character_once() {
        let sentences = Sentences::of(TEXT);
        assert_eq!(sentences.longest(), "To be, or not!".len() - 1);
        assert_eq!(sentences.clone().up_to(7).longest(), "A rose.".len() - 1);
        let epoch = sentences.epoch(2, 3);
        assert_eq!(epoch.len(), 2);
        for batch in epoch {
            for length in [0, batch.length(), batch.length() + 5] {
                let PaddedText {
                    shape,
                    tokens,
                    targets,
                    padding,
                } = batch.padded(length);
                assert_eq!(shape, [2, length.max(batch.length())]);
                assert_eq!(tokens.len(), shape[0] * shape[1]);
                let real = padding.iter().filter(|padding| !**padding).count();
                assert_eq!(real, batch.tokens());
                for (row, codes) in batch.rows.iter().enumerate() {
                    let start = row * shape[1];
                    for position in 0..shape[1] {
                        let at = start + position;
                        let inside = position + 1 < codes.len();
                        assert_eq!(padding[at], !inside);
                        let expected = match inside {
                            true => (codes[position], codes[position + 1]),
                            false => (0, 0),
                        };
                        assert_eq!((tokens[at], targets[at]), expected);
                    }
                }
            }
        }
    }

    /// Ways are compared on the same batches: an epoch is the same for the same seed, and another for another.
    #[test]
    fn an_epoch_follows_its_seed() {
        let sentences = Sentences::of(include_str!("../examples/data/sonnets.txt"));
        let lengths = |seed| {
            let epoch = sentences.epoch(8, seed);
            epoch.iter().map(TextBatch::length).collect::<Vec<_>>()
        };
        assert_eq!(lengths(1), lengths(1));
        assert_ne!(lengths(1), lengths(2));
        assert!(sentences.vocabulary > 40, "{}", sentences.vocabulary);
    }
}
