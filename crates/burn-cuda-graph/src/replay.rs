//! A replay as one operation of the stream's queue.
//!
//! What surrounds a graph (the write of its scalars, the copy of the batch into the static inputs, the copy of the outputs
//! to the caller) and the graph itself are enqueued by the fusion server's thread, one after the other. The caller hands the
//! operation over and goes on: nothing is waited for.

use crate::copy::copy_all;
use crate::driver::SealedGraph;
use crate::pool::{Pinned, Runtime, empty_like, fusion_tensor};
use crate::ranges::{Phase, range};
use crate::scalars::{self, DeviceScalars};
use crate::tensor::{AnyTensor, TensorKind};
use burn::backend::{BackendTensor, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind};
use burn::tensor::{DType, Device, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::fusion::CubeFusionHandle;
use burn_cubecl::tensor::CubeTensor;
use burn_fusion::ExecutionError;
use burn_fusion::FusionTensor;
use burn_fusion::client::GlobalFusionClient;
use burn_fusion::custom::{CustomOpIr, HandleContainer, OperationIr, TensorIr};
use burn_fusion::stream::StreamId;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Replays handed over and not enqueued before the caller waits for the fusion server: they hold their batches.
const MOST_IN_FLIGHT: usize = 16;

/// The replays of one state that are not on the device's stream yet.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    in_flight: AtomicUsize,
    /// Replays that could not be enqueued, and what the device said of the first.
    failed: AtomicU64,
    failure: Mutex<Option<String>>,
}

impl Queue {
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

    fn fail(&self, detail: String) {
        self.failed.fetch_add(1, Ordering::AcqRel);
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(detail);
    }
}

/// What a replay of one graph works on.
#[derive(Debug)]
pub(crate) struct Replay {
    pub graph: Arc<SealedGraph>,
    pub inputs: Pinned,
    pub outputs: Pinned,
    pub scalars: Option<Arc<Mutex<DeviceScalars>>>,
}

impl Replay {
    /// Hand a replay over, with the values of its scalars and its batch. The answer is copies of its outputs.
    ///
    /// # Errors
    ///
    /// When a tensor or the device is not one of CubeCL's; nothing was handed over.
    pub fn enqueue(
        self: &Arc<Self>,
        device: &Device,
        queue: &Arc<Queue>,
        random: [u32; 4],
        values: Vec<(DType, f64)>,
        batch: &[AnyTensor],
    ) -> Result<Vec<AnyTensor>, String> {
        let elsewhere = || "a tensor or the device is not one of CubeCL's".to_string();
        let device = crate::pool::cube_device(device).ok_or_else(elsewhere)?;
        let client = GlobalFusionClient::<Runtime>::load(&device);
        let inputs = (batch.iter().map(fusion_tensor))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(elsewhere)?;
        let kinds: Vec<TensorKind> = batch.iter().map(AnyTensor::kind).collect();
        let inputs: Vec<TensorIr> = inputs.into_iter().map(FusionTensor::into_ir).collect();
        let outputs: Vec<TensorIr> = (self.outputs.buffers().iter())
            .map(|buffer| {
                let shape = buffer.meta.shape().clone();
                TensorIr::uninit(client.create_empty_handle(), shape, buffer.dtype)
            })
            .collect();
        let description = CustomOpIr::new("burn_cuda_graph_replay", &inputs, &outputs);
        queue.in_flight.fetch_add(1, Ordering::AcqRel);
        let operation = ReplayOperation {
            replay: self.clone(),
            description: description.clone(),
            kinds,
            random,
            values,
            queue: queue.clone(),
            ran: AtomicBool::new(false),
        };
        let outputs = client.register(
            StreamId::current(),
            OperationIr::Custom(description),
            operation,
        );
        let kinds = self.outputs.tensors.iter().map(AnyTensor::kind);
        Ok(outputs.into_iter().zip(kinds).map(any_tensor).collect())
    }
}

fn any_tensor((tensor, kind): (FusionTensor<Runtime>, TensorKind)) -> AnyTensor {
    let dispatch = |tensor| DispatchTensor {
        kind: DispatchTensorKind::Cube(tensor),
        autodiff: DispatchAutodiffContext::Disabled,
    };
    match kind {
        TensorKind::Float => AnyTensor::from_float(Tensor::<1>::from_dispatch(dispatch(
            BackendTensor::Float(tensor),
        ))),
        TensorKind::Int => AnyTensor::from_int(Tensor::<1, burn::tensor::Int>::from_dispatch(
            dispatch(BackendTensor::Int(tensor)),
        )),
        TensorKind::Bool => AnyTensor::from_bool(Tensor::<1, burn::tensor::Bool>::from_dispatch(
            dispatch(BackendTensor::Bool(tensor)),
        )),
    }
}

#[derive(Debug)]
struct ReplayOperation {
    replay: Arc<Replay>,
    description: CustomOpIr,
    /// Of the batch's tensors.
    kinds: Vec<TensorKind>,
    random: [u32; 4],
    values: Vec<(DType, f64)>,
    queue: Arc<Queue>,
    ran: AtomicBool,
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
        } = &*self.replay;
        let copy_in = range(Phase::CopyIn);
        if let Some(scalars) = scalars {
            scalars::lock(scalars).write_all(self.random, &self.values);
        }
        let batch =
            (self.description.inputs.iter().zip(&self.kinds)).map(|(ir, kind)| match kind {
                TensorKind::Float => handles.get_float_tensor::<CubeBackend>(ir),
                TensorKind::Int => handles.get_int_tensor::<CubeBackend>(ir),
                TensorKind::Bool => handles.get_bool_tensor::<CubeBackend>(ir),
            });
        let pairs: Vec<(CubeTensor, CubeTensor)> =
            batch.zip(inputs.buffers().iter().cloned()).collect();
        copy_all(&pairs);
        copy_in.end();
        let replay = range(Phase::Replay);
        if let Err(detail) = graph.replay_here() {
            self.queue.fail(detail.clone());
            return Err(ExecutionError::WithContext { reason: detail });
        }
        replay.end();
        let copied_out = range(Phase::CopyOut);
        let copies: Vec<(CubeTensor, CubeTensor)> = (outputs.buffers().iter())
            .map(|output| (output.clone(), empty_like(output)))
            .collect();
        copy_all(&copies);
        for (ir, (_, copy)) in self.description.outputs.iter().zip(copies) {
            handles.register_handle(ir.id, copy.into());
        }
        copied_out.end();
        Ok(())
    }
}

impl Drop for ReplayOperation {
    fn drop(&mut self) {
        if !self.ran.load(Ordering::Acquire) {
            let detail = "it was passed over, since a tensor of its batch could not be computed";
            self.queue.fail(detail.into());
        }
        self.queue.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}
