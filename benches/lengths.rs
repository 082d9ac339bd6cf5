//! Sentences of varying length: plain Burn against graphs, padded in several ways, in turns in one process.
//!
//! A character transformer trains on the sentences of 28 sonnets, shuffled, with Adam and dropout. The ways:
//!
//! - `plain, own length`: plain Burn, each batch padded to its own longest sentence.
//! - `plain, longest`: plain Burn, each batch padded to the longest sentence of all: one shape.
//! - `graphed, buckets`: a graphed step, batches padded by [`Bucketing`].
//! - `graphed, by hand`: the same shapes, padded on the host: what the difference is, padding on the device costs.
//! - `graphed, longest`: a graphed step of one shape: what a graph does when nothing changes.
//!
//! What it prints, and what it must not be read as:
//!
//! - `tokens/s`: characters predicted, padding left out, over the time of an epoch, batches made on the host and uploaded
//!   included, one wait at its end. The median of the epochs but the first, in which graphs are recorded.
//! - `with padding`: positions computed. What padding costs is the difference.
//! - `unsettled`: steps whose lengths never come again, queued, over plain Burn's on the same lengths, block by block in
//!   turns. Nothing is to be gained there; it must be about 1.0.
//!
//! Before anything is timed, parameters after all epochs with buckets are compared, bit by bit, with those of the same step
//! that never records, on the same batches padded by hand, and with plain Burn's on the same random numbers. Plain Burn's may
//! differ in last bits that training amplifies: its fusion cuts the end of a step otherwise.
//!
//! ```text
//! cargo bench --features cuda --bench lengths -- --device cuda --json benches/results/NAME.json
//! cargo bench --bench lengths -- --device wgpu --quick        # software Vulkan: a check of the harness, no figures
//! ```

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_cuda_graph::{
    Bucketing, Buckets, GraphConfig, GraphedStep, Report, StepPath, StepRate, Training,
    masked_mean, optim as ours, support, with_random,
};
use burn_cuda_graph_suite::device::{self, DeviceChoice};
use burn_cuda_graph_suite::environment::{self, Environment};
use burn_cuda_graph_suite::lengths::{
    self, Lengths, Moment, PaddedText, Sentences, TextBatch, Unsettled, Way, median,
};
use burn_cuda_graph_suite::models::{Gpt, GptConfig};
use clap::Parser;
use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

const TEXT: &str = include_str!("../examples/data/sonnets.txt");
const LR: f64 = 1e-3;
/// Key of the random numbers that twins are compared on.
const KEY: u64 = 7;

#[derive(Parser, Debug)]
struct Args {
    /// Device to measure on.
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceChoice,
    /// Sentences of a batch.
    #[arg(long, default_value_t = 8)]
    rows: usize,
    /// Epochs of each way, in turns; the first is not in the medians.
    #[arg(long, default_value_t = 6)]
    epochs: usize,
    /// Buckets are the multiples of this.
    #[arg(long, default_value_t = 64)]
    bucket: usize,
    /// Lengths that never come again.
    #[arg(long, default_value_t = 192)]
    unsettled: usize,
    /// Runs over them.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Few steps of a small net: checks that the harness works.
    #[arg(long)]
    quick: bool,
    /// Write what was measured, the device and the command as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Write it as a Markdown table.
    #[arg(long)]
    markdown: Option<PathBuf>,
    /// Write it as an SVG.
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Tokens and the tokens that follow `[rows, positions]`, and whether a position is padding.
type Batch = (Tensor<2, Int>, Tensor<2, Int>, Tensor<2, Bool>);
type StepFn = Box<dyn Fn(&mut Training<Gpt>, Batch, StepRate) -> Tensor<1>>;
type Ours = GraphedStep<Training<Gpt>, Batch, Tensor<1>, StepFn>;

fn main() -> Result<(), Box<dyn Error>> {
    env_logger::init();
    let mut args = Args::parse();
    if args.quick {
        (args.epochs, args.bucket, args.unsettled, args.runs) = (2, 16, 24, 1);
    }
    burn_cuda_graph::register_random()?;
    let (device, why) = device::open(args.device)?;
    println!("{why}; {}", support(&device));
    let environment = Environment::of(&device, support(&device).to_string());
    let run = Bench::new(&args, device.autodiff())?.run()?;
    print!("{}", lengths::markdown(&environment, &run));
    if let Some(path) = &args.markdown {
        std::fs::write(path, lengths::markdown(&environment, &run))?;
    }
    if let Some(path) = &args.plot {
        std::fs::write(path, lengths::plot(&environment, &run)?)?;
    }
    if let Some(path) = &args.json {
        environment::save_run(path, environment, &run)?;
    }
    match run.equals_own_eager {
        true => Ok(()),
        false => Err("parameters differ from those of the same step unrecorded".into()),
    }
}

struct Compared {
    equals_own_eager: bool,
    parameters_equal: bool,
    largest_difference: f32,
    moments: Vec<Moment>,
    report: Report,
}

/// Plain Burn's model and optimizer.
struct Plain {
    /// Handed through each step by value, as in plain Burn's loops.
    model: Option<Gpt>,
    optimizer: ModuleOptimizer,
}

impl Plain {
    fn step(&mut self, batch: Batch, causal: &Tensor<2, Bool>) {
        if let Some(model) = self.model.take() {
            let loss = loss(&model, batch, causal);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            self.model = Some(self.optimizer.step(LR, model, grads));
        }
    }
}

/// The mean over what is no padding.
fn loss(model: &Gpt, (tokens, targets, padding): Batch, causal: &Tensor<2, Bool>) -> Tensor<1> {
    let logits = model.forward(tokens, causal);
    let chances = log_softmax(logits, 2).gather(2, targets.unsqueeze_dim(2));
    masked_mean(-chances.squeeze_dim::<2>(2), padding)
}

struct Bench<'a> {
    args: &'a Args,
    device: Device,
    sentences: Sentences,
    buckets: Buckets,
    model: Gpt,
    causal: Tensor<2, Bool>,
}

impl<'a> Bench<'a> {
    fn new(args: &'a Args, device: Device) -> Result<Self, Box<dyn Error>> {
        let sentences = match args.quick {
            true => Sentences::of(TEXT).up_to(48),
            false => Sentences::of(TEXT),
        };
        device.seed(1);
        let window = sentences.longest().max(args.unsettled + 32);
        let config = match args.quick {
            true => GptConfig::new(sentences.vocabulary, window)
                .with_width(16)
                .with_heads(2)
                .with_layers(1),
            false => GptConfig::new(sentences.vocabulary, window),
        };
        Ok(Self {
            args,
            buckets: Buckets::multiples_of(args.bucket, sentences.longest())?,
            model: config.init(&device),
            causal: config.causal_mask(&device),
            sentences,
            device,
        })
    }

    fn run(&self) -> Result<Lengths, Box<dyn Error>> {
        self.tune()?;
        let Compared {
            equals_own_eager,
            parameters_equal,
            largest_difference,
            moments,
            report,
        } = self.compare()?;
        let ways = self.ways()?;
        let unsettled = self.unsettled()?;
        Ok(Lengths {
            rows: self.args.rows,
            buckets: self.buckets.sizes().to_vec(),
            padding_share: report.padding_share.unwrap_or(0.0),
            equality_steps: moments.len(),
            equals_own_eager,
            parameters_equal,
            largest_difference,
            ways,
            moments,
            unsettled,
        })
    }

    fn plain(&self) -> Plain {
        Plain {
            model: Some(self.model.valid().train()),
            optimizer: burn::optim::AdamConfig::new().init(),
        }
    }

    fn graphed(&self, config: GraphConfig) -> Result<Ours, Box<dyn Error>> {
        let training = Training::new(self.model.valid().train(), ours::AdamConfig::new().init());
        let causal = self.causal.clone();
        let step: StepFn = Box::new(move |t, batch, lr| {
            let loss = loss(t.model(), batch, &causal);
            let grads = GradientsParams::from_grads(loss.backward(), t.model());
            t.optimize(lr, grads);
            loss
        });
        let mut step = GraphedStep::new(training, config, step)?;
        step.seed(KEY);
        Ok(step)
    }

    fn bucketed(&self) -> GraphConfig {
        let lengths = Bucketing::new(self.buckets.clone());
        GraphConfig::new().with_bucketing(lengths.pad(0, 1).pad(1, 1).pad(2, 1))
    }

    fn upload(&self, text: PaddedText) -> Batch {
        let PaddedText {
            shape,
            tokens,
            targets,
            padding,
        } = text;
        let ints = |values| Tensor::from_data(TensorData::new(values, shape), &self.device);
        let padding = Tensor::from_data(TensorData::new(padding, shape), &self.device);
        (ints(tokens), ints(targets), padding)
    }

    fn epoch(&self, epoch: usize) -> Vec<TextBatch<'_>> {
        self.sentences.epoch(self.args.rows, epoch as u64)
    }

    fn bucket_of(&self, length: usize) -> usize {
        self.buckets.bucket_of(length).unwrap_or(length)
    }

    fn sync(&self) -> Result<(), Box<dyn Error>> {
        Ok(self.device.clone().inner().sync()?)
    }

    /// Kernels are tuned for every length that comes, and for those of the buckets: queued steps are fused otherwise than
    /// those that are waited for, so both kinds are taken.
    fn tune(&self) -> Result<(), Box<dyn Error>> {
        let started = Instant::now();
        let mut plain = self.plain();
        let unrecorded = GraphConfig::new().with_warmup(u32::MAX);
        let mut graphed = self.graphed(unrecorded)?;
        let mut sizes = self.buckets.sizes().to_vec();
        sizes.push(self.sentences.longest());
        for waited in [true, false] {
            let epochs = 0..self.args.epochs;
            let own = epochs.flat_map(|epoch| self.epoch(epoch));
            let own = own.map(|batch| batch.padded(0));
            let batches = self.epoch(0);
            let first = batches.first().ok_or("there is no batch")?;
            let fixed = sizes.iter().map(|size| first.padded(*size));
            for text in own.chain(fixed) {
                let bucket = self.bucket_of(text.shape[1]);
                let batch = self.upload(text);
                plain.step(batch.clone(), &self.causal);
                if waited {
                    self.sync()?;
                }
                if batch.0.dims()[1] == bucket {
                    graphed.run(batch, LR)?;
                }
            }
            self.sync()?;
        }
        println!("tuned in {:.1} s", started.elapsed().as_secs_f64());
        Ok(())
    }

    /// All epochs with buckets, and the same step unrecorded and plain Burn on the same padded batches.
    fn compare(&self) -> Result<Compared, Box<dyn Error>> {
        let inner = self.device.clone().inner();
        let (mut plain, mut graphed) = (self.plain(), self.graphed(self.bucketed())?);
        let mut unrecorded = self.graphed(GraphConfig::new().with_warmup(u32::MAX))?;
        let mut moments: Vec<Moment> = Vec::new();
        for batch in (0..self.args.epochs).flat_map(|epoch| self.epoch(epoch)) {
            let padded = self.upload(batch.padded(self.bucket_of(batch.length())));
            unrecorded.run(padded.clone(), LR)?;
            with_random(&inner, KEY, moments.len() as u64, || {
                plain.step(padded, &self.causal);
            });
            let taken = graphed.run(self.upload(batch.padded(0)), LR)?;
            let report = graphed.report();
            moments.push(Moment {
                length: batch.length(),
                replayed: taken.path == StepPath::Replayed,
                captures: report.captures,
                graphs: report.graphs_held,
                bytes_held: report.bytes_held,
            });
        }
        let plain = plain.model.ok_or("plain Burn's model is gone")?;
        let (ours, theirs) = (values(&graphed.model()), values(&plain));
        let own = values(&unrecorded.model());
        let equal = |theirs: &[f32]| {
            let mut pairs = ours.iter().zip(theirs);
            ours.len() == theirs.len() && pairs.all(|(a, b)| a.to_bits() == b.to_bits())
        };
        let pairs = ours.iter().zip(&theirs);
        let report = graphed.report();
        println!("{report}");
        Ok(Compared {
            equals_own_eager: equal(&own),
            parameters_equal: equal(&theirs),
            largest_difference: pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max),
            moments,
            report,
        })
    }

    /// Each way's epochs, in turns.
    fn ways(&self) -> Result<Vec<Way>, Box<dyn Error>> {
        let longest = self.sentences.longest();
        let mut own = self.plain();
        let mut padded = self.plain();
        let mut buckets = self.graphed(self.bucketed())?;
        let mut by_hand = self.graphed(GraphConfig::new())?;
        let mut fixed = self.graphed(GraphConfig::new())?;
        let names = [
            "plain, own length",
            "plain, longest",
            "graphed, buckets",
            "graphed, by hand",
            "graphed, longest",
        ];
        let mut ways: Vec<Way> = (names.iter())
            .map(|name| Way {
                name: name.to_string(),
                steps: 0,
                epoch_s: Vec::new(),
                tokens_per_s: 0.0,
                positions_per_s: 0.0,
                step_ms: 0.0,
                graphs: 0,
                bytes_held: 0,
                captures: Vec::new(),
                reserved: Vec::new(),
            })
            .collect();
        let mut counts: Vec<[Vec<usize>; 2]> = vec![Default::default(); ways.len()];
        for epoch in 0..self.args.epochs {
            let batches = self.epoch(epoch);
            for (index, way) in ways.iter_mut().enumerate() {
                let length = |batch: &TextBatch| match index {
                    0 | 2 => 0,
                    3 => self.bucket_of(batch.length()),
                    _ => longest,
                };
                self.sync()?;
                let started = Instant::now();
                for batch in &batches {
                    let batch = self.upload(batch.padded(length(batch)));
                    match index {
                        0 => own.step(batch, &self.causal),
                        1 => padded.step(batch, &self.causal),
                        2 => drop(buckets.run(batch, LR)?),
                        3 => drop(by_hand.run(batch, LR)?),
                        _ => drop(fixed.run(batch, LR)?),
                    }
                }
                self.sync()?;
                way.epoch_s.push(started.elapsed().as_secs_f64());
                way.steps = batches.len();
                let computed = |batch: &TextBatch| match index {
                    0 => batch.length(),
                    2 | 3 => self.bucket_of(batch.length()),
                    _ => longest,
                };
                let rows = self.args.rows;
                counts[index][0].push(batches.iter().map(TextBatch::tokens).sum());
                counts[index][1].push(batches.iter().map(|batch| rows * computed(batch)).sum());
                let report = match index {
                    2 => Some(buckets.report()),
                    3 => Some(by_hand.report()),
                    4 => Some(fixed.report()),
                    _ => None,
                };
                if let Some(report) = report {
                    way.captures
                        .push(report.captures - way.captures.iter().sum::<u64>());
                    (way.graphs, way.bytes_held) = (report.graphs_held, report.bytes_held);
                }
                way.reserved.push(self.reserved());
            }
        }
        for (way, counts) in ways.iter_mut().zip(counts) {
            let per_second = |counts: &[usize]| {
                let epochs = counts.iter().zip(&way.epoch_s).skip(1);
                median(epochs.map(|(count, seconds)| *count as f64 / seconds))
            };
            (way.tokens_per_s, way.positions_per_s) =
                (per_second(&counts[0]), per_second(&counts[1]));
            let steps = way.steps as f64;
            way.step_ms = median(way.epoch_s.iter().skip(1).map(|s| s * 1e3 / steps));
        }
        Ok(ways)
    }

    fn reserved(&self) -> u64 {
        let usage = self.device.clone().inner().memory_pool_usage();
        usage.map_or(0, |usage| usage.bytes_reserved)
    }

    /// Steps each of which has a length of its own, against plain Burn's.
    fn unsettled(&self) -> Result<Unsettled, Box<dyn Error>> {
        const BLOCK: usize = 12;
        let batches = self.epoch(0);
        let text = batches.first().ok_or("there is no batch")?;
        // A row as long as any, cut to the length.
        let cut = |length: usize| {
            let text = text.padded(self.causal.dims()[0]);
            let [rows, positions] = text.shape;
            let rows = 0..rows;
            let of = |values: &[i32]| {
                let row = |row: usize| values[row * positions..][..length].to_vec();
                rows.clone().flat_map(row).collect::<Vec<i32>>()
            };
            PaddedText {
                shape: [rows.end, length],
                tokens: of(&text.tokens),
                targets: of(&text.targets),
                padding: vec![false; rows.end * length],
            }
        };
        let lengths: Vec<usize> = (0..self.args.unsettled).map(|index| 32 + index).collect();
        let (mut ratios, mut captures) = (Vec::new(), 0);
        let mut fallbacks = std::collections::BTreeMap::new();
        // The first run tunes.
        for run in 0..=self.args.runs {
            let (mut plain, mut graphed) = (self.plain(), self.graphed(GraphConfig::new())?);
            let mut first = self.plain();
            let mut blocks = Vec::new();
            for (index, block) in lengths.chunks_exact(BLOCK).enumerate() {
                let batches: Vec<Batch> = block
                    .iter()
                    .map(|length| self.upload(cut(*length)))
                    .collect();
                // The first to have a length pays for what CubeCL keeps of it.
                for batch in batches.clone() {
                    first.step(batch, &self.causal);
                }
                let mut times = [0.0; 2];
                // Each way is first in every other block.
                for way in [index % 2, 1 - index % 2] {
                    let batches = batches.clone();
                    self.sync()?;
                    let started = Instant::now();
                    for batch in batches {
                        match way {
                            0 => plain.step(batch, &self.causal),
                            _ => drop(graphed.run(batch, LR)?),
                        }
                    }
                    self.sync()?;
                    times[way] = started.elapsed().as_secs_f64();
                }
                blocks.push(times[1] / times[0]);
            }
            if run > 0 {
                ratios.push(blocks);
            }
            let report = graphed.report();
            (captures, fallbacks) = (captures + report.captures, report.fallbacks);
        }
        // From the second block on: sixteen keys without a recording, and keys are left unwatched.
        let settled = ratios.iter().flat_map(|blocks| blocks.iter().skip(2));
        Ok(Unsettled {
            lengths: lengths.len(),
            block: BLOCK,
            median_ratio: median(ratios.iter().flatten().copied()),
            median_ratio_settled: median(settled.copied()),
            ratios,
            captures,
            fallbacks,
        })
    }
}

fn values<M: Module>(model: &M) -> Vec<f32> {
    struct Reader(Vec<f32>);
    impl ModuleVisitor for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f32>());
        }
    }
    let mut reader = Reader(Vec::new());
    model.valid().visit(&mut reader);
    reader.0
}
