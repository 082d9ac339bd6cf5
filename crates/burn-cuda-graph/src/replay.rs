//! A replay as one operation of the stream's queue.
//!
//! What surrounds a graph (the launch that copies the batch into the static inputs and writes the scalars it carries, the copy
//! of the outputs to the caller) and the graph itself are enqueued by the fusion server's thread, one after the other. The
//! caller hands the operation over and goes on: nothing is waited for.

use crate::copy::{self, copy_all, copy_and_write};
use crate::driver::SealedGraph;
use crate::pool::{Pinned, Runtime, empty_like, from_fusion, fusion_tensor};
use crate::ranges::{Phase, range};
use crate::scalars::{self, SlotWriter};
use crate::tensor::{AnyTensor, TensorKind};
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::fusion::CubeFusionHandle;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::ExecutionError;
use burn_fusion::FusionTensor;
use burn_fusion::client::GlobalFusionClient;
use burn_fusion::custom::{CustomOpIr, HandleContainer, OperationIr, TensorIr};
use burn_fusion::stream::StreamId;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};

type Client = GlobalFusionClient<Runtime>;

/// Replays handed over and not enqueued before the caller waits for the fusion server: they hold their batches.
const MOST_IN_FLIGHT: usize = 16;

/// The replays of one state that are not on the device's stream yet.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    in_flight: AtomicUsize,
    /// Replays that could not be enqueued, and what the device said of the first.
    failed: AtomicU64,
    failure: Mutex<Option<String>>,
    /// Replays handed over, those of them that were sent to the fusion server, and those it is done with.
    handed: AtomicU64,
    sent: AtomicU64,
    done: AtomicU64,
}

impl Queue {
    /// One more was handed over.
    ///
    /// Burn's client collects what it is given, and a flush has the next caller wait until the server took it, which is until
    /// it is done with what it had before: here the launch of a graph, hundreds of microseconds. So what is handed over while
    /// the server works is sent when it is done ([`one_done`](Self::one_done)).
    fn one_handed(&self, client: &Client) {
        let handed = self.handed.fetch_add(1, Ordering::SeqCst) + 1;
        if self.done.load(Ordering::SeqCst) >= self.sent.load(Ordering::SeqCst) {
            self.sent.fetch_max(handed, Ordering::SeqCst);
            client.flush_queue();
        }
    }

    /// The server is done with one.
    fn one_done(self: &Arc<Self>, client: &Client) {
        let done = self.done.fetch_add(1, Ordering::SeqCst) + 1;
        let waiting = self.handed.load(Ordering::SeqCst) > done;
        if waiting && done >= self.sent.load(Ordering::SeqCst) {
            send_soon(self.clone(), client.clone());
        }
    }

    fn send(&self, client: &Client) {
        let handed = self.handed.load(Ordering::SeqCst);
        self.sent.fetch_max(handed, Ordering::SeqCst);
        client.flush_queue();
    }

    /// Whether some are to be waited for before something else works on their buffers from this thread.
    pub fn is_busy(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) > 0
    }

    /// Whether so many are that the caller is to wait.
    pub fn is_full(&self) -> bool {
        self.in_flight.load(Ordering::Acquire) >= MOST_IN_FLIGHT
    }

    /// What kept replays from running since this was last asked.
    pub fn failure(&self) -> Option<String> {
        let detail = (self.failure.lock())
            .unwrap_or_else(PoisonError::into_inner)
            .take()?;
        match self.failed.swap(0, Ordering::AcqRel) {
            0 | 1 => Some(detail),
            count => Some(format!(
                "{count} replays did not run, the first because: {detail}"
            )),
        }
    }

    /// The same, left for whoever asks next.
    pub fn peek(&self) -> Option<String> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.clone()
    }

    fn fail(&self, detail: String) {
        self.failed.fetch_add(1, Ordering::AcqRel);
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(detail);
    }
}

/// Have a thread send what waits in `queue`: the server's own cannot, since it may not flush itself.
fn send_soon(queue: Arc<Queue>, client: Client) {
    type Waiting = mpsc::Sender<(Arc<Queue>, Client)>;
    static SENDER: OnceLock<Option<Waiting>> = OnceLock::new();
    let sender = SENDER.get_or_init(|| {
        let (sender, waiting) = mpsc::channel::<(Arc<Queue>, Client)>();
        let work = move || {
            waiting
                .iter()
                .for_each(|(queue, client)| queue.send(&client))
        };
        let thread = std::thread::Builder::new().name("graph-sender".into());
        match thread.spawn(work) {
            Ok(_) => Some(sender),
            Err(error) => {
                log::warn!("replays may be sent a call later, for want of a thread: {error}");
                None
            }
        }
    });
    if let Some(sender) = sender {
        // It ends with the process.
        drop(sender.send((queue, client)));
    }
}

/// What a replay of one graph works on. An operation that holds the last of it drops it on the fusion server's thread, so
/// there is no tensor of Burn's fusion in it, whose drop would call that server.
#[derive(Debug)]
pub(crate) struct Replay {
    graph: SealedGraph,
    inputs: Vec<CubeTensor>,
    outputs: Vec<CubeTensor>,
    scalars: Option<SlotWriter>,
    /// Of the outputs.
    kinds: Vec<TensorKind>,
}

/// Launches before and after a graph of so many inputs and outputs, with slots of the given types.
pub(crate) fn launches_around(
    inputs: &Pinned,
    outputs: &Pinned,
    slots: Option<impl Iterator<Item = DType>>,
) -> u64 {
    let carried = slots.and_then(scalars::carried).unwrap_or(0);
    copy::launches(inputs.buffers(), carried) + copy::launches(outputs.buffers(), 0)
}

/// What ties the replays of a state to each other. Burn's fusion orders operations by the tensors they share, and sees nothing
/// of what a graph works on: so each replay takes a tensor that the one before it gave.
#[derive(Debug, Default)]
pub(crate) struct Token(Option<AnyTensor>);

impl Token {
    /// Begin anew: the last replay did not run.
    pub fn renew(&mut self) {
        self.0 = None;
    }
}

/// One call's replay.
pub(crate) struct Call<'a> {
    pub device: &'a Device,
    pub queue: &'a Arc<Queue>,
    pub token: &'a mut Token,
    /// How many replays of this graph its counters do not show yet.
    pub pending: &'a Arc<AtomicU64>,
    pub random: [u32; 4],
    pub values: Vec<(DType, f64)>,
    pub batch: &'a [AnyTensor],
}

impl Replay {
    pub fn new(
        graph: SealedGraph,
        inputs: &Pinned,
        outputs: &Pinned,
        scalars: Option<SlotWriter>,
    ) -> Arc<Self> {
        Arc::new(Self {
            graph,
            inputs: inputs.buffers().to_vec(),
            outputs: outputs.buffers().to_vec(),
            scalars,
            kinds: outputs.tensors.iter().map(AnyTensor::kind).collect(),
        })
    }

    /// The graph alone.
    pub fn graph(&self) -> &SealedGraph {
        &self.graph
    }

    /// Hand a replay over, with the values of its scalars and its batch. The answer is copies of its outputs.
    ///
    /// # Errors
    ///
    /// When a tensor or the device is not one of CubeCL's; nothing was handed over.
    pub fn enqueue(self: &Arc<Self>, call: Call<'_>) -> Result<Vec<AnyTensor>, String> {
        let elsewhere = || "a tensor or the device is not one of CubeCL's".to_string();
        let device = crate::pool::cube_device(call.device).ok_or_else(elsewhere)?;
        let client = Client::load(&device);
        let token = call.token.0.take().unwrap_or_else(|| {
            AnyTensor::from_float(Tensor::<1>::empty([1], &call.device.clone().inner()))
        });
        let mut inputs = (call.batch.iter().map(fusion_tensor))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(elsewhere)?;
        let shape = Shape::new([1]);
        inputs.push(fusion_tensor(&token).ok_or_else(elsewhere)?);
        drop(token);
        let kinds: Vec<TensorKind> = call.batch.iter().map(AnyTensor::kind).collect();
        let inputs: Vec<TensorIr> = inputs.into_iter().map(FusionTensor::into_ir).collect();
        let outputs = self
            .outputs
            .iter()
            .map(|buffer| (buffer.meta.shape().clone(), buffer.dtype));
        let outputs: Vec<TensorIr> = (outputs.chain([(shape, DType::F32)]))
            .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype))
            .collect();
        let description = CustomOpIr::new("burn_cuda_graph_replay", &inputs, &outputs);
        call.queue.in_flight.fetch_add(1, Ordering::AcqRel);
        let operation = ReplayOperation {
            replay: self.clone(),
            description: description.clone(),
            kinds,
            random: call.random,
            values: call.values,
            queue: call.queue.clone(),
            pending: call.pending.clone(),
            ran: AtomicBool::new(false),
            client: client.clone(),
        };
        let custom = OperationIr::Custom(description);
        let outputs = client.register(StreamId::current(), custom, operation);
        call.queue.one_handed(&client);
        let kinds = self.kinds.iter().copied().chain([TensorKind::Float]);
        let mut outputs: Vec<AnyTensor> = outputs
            .into_iter()
            .zip(kinds)
            .map(|(tensor, kind)| from_fusion(tensor, kind))
            .collect();
        call.token.0 = outputs.pop();
        Ok(outputs)
    }
}

struct ReplayOperation {
    replay: Arc<Replay>,
    description: CustomOpIr,
    /// Of the batch's tensors.
    kinds: Vec<TensorKind>,
    random: [u32; 4],
    values: Vec<(DType, f64)>,
    queue: Arc<Queue>,
    pending: Arc<AtomicU64>,
    ran: AtomicBool,
    client: Client,
}

impl core::fmt::Debug for ReplayOperation {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("ReplayOperation")
            .field("description", &self.description)
            .finish_non_exhaustive()
    }
}

impl ReplayOperation {
    /// The step is not taken.
    fn fail(&self, detail: String) {
        self.pending.fetch_sub(1, Ordering::AcqRel);
        self.queue.fail(detail);
    }
}

impl burn_fusion::stream::Operation<Runtime> for ReplayOperation {
    fn execute(
        &self,
        handles: &mut HandleContainer<CubeFusionHandle>,
    ) -> Result<(), ExecutionError> {
        self.ran.store(true, Ordering::Release);
        let Replay {
            graph,
            inputs,
            outputs,
            scalars,
            ..
        } = &*self.replay;
        let copy_in = range(Phase::CopyIn);
        let words = (scalars.as_ref()).and_then(|slots| slots.words(self.random, &self.values));
        if let (Some(scalars), None) = (scalars, &words) {
            scalars.write_all(self.random, &self.values);
        }
        let batch =
            (self.description.inputs.iter().zip(&self.kinds)).map(|(ir, kind)| match kind {
                TensorKind::Float => handles.get_float_tensor::<CubeBackend>(ir),
                TensorKind::Int => handles.get_int_tensor::<CubeBackend>(ir),
                TensorKind::Bool => handles.get_bool_tensor::<CubeBackend>(ir),
            });
        let pairs: Vec<(CubeTensor, CubeTensor)> = batch.zip(inputs.iter().cloned()).collect();
        let token = self.description.inputs.last();
        let token = token.map(|ir| handles.get_float_tensor::<CubeBackend>(ir));
        match &words {
            Some(words) => copy_and_write(&pairs, words),
            None => copy_all(&pairs),
        };
        copy_in.end();
        let replay = range(Phase::Replay);
        if let Err(detail) = graph.replay_here() {
            self.fail(detail.clone());
            return Err(ExecutionError::WithContext { reason: detail });
        }
        replay.end();
        let copied_out = range(Phase::CopyOut);
        let copies: Vec<(CubeTensor, CubeTensor)> = (outputs.iter())
            .map(|output| (output.clone(), empty_like(output)))
            .collect();
        copy_all(&copies);
        let given = copies.into_iter().map(|(_, copy)| copy).chain(token);
        for (ir, tensor) in self.description.outputs.iter().zip(given) {
            handles.register_handle(ir.id, tensor.into());
        }
        copied_out.end();
        Ok(())
    }
}

impl Drop for ReplayOperation {
    fn drop(&mut self) {
        if !self.ran.load(Ordering::Acquire) {
            let detail = "it was passed over, since a tensor of its batch, or the replay before it, could not be computed";
            self.fail(detail.into());
        }
        self.queue.in_flight.fetch_sub(1, Ordering::AcqRel);
        self.queue.one_done(&self.client);
    }
}
