use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_cuda_graph::optim::AdamConfig;
use burn_cuda_graph::{GraphConfig, GraphedStep, HostTensor, StepRate, Training, Uploader};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::default().autodiff();
    let model = LinearConfig::new(784, 10).init(&device);
    let training = Training::new(model, AdamConfig::new().init());
    let loss = CrossEntropyLossConfig::new().init(&device);
    let step =
        move |t: &mut Training<Linear>, (x, y): (Tensor<2>, Tensor<1, Int>), lr: StepRate| {
            let loss = loss.forward(t.model().forward(x), y);
            t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
            loss
        };
    let mut step = GraphedStep::new(training, GraphConfig::new(), step)?;
    // Any iterator that can be sent: it runs on a thread of its own, and may give errors.
    let batches = (0..100).map(|index| -> Result<_, std::io::Error> {
        let images = vec![index as f32 / 100.0; 64 * 784];
        let labels = vec![index % 10; 64];
        Ok([
            HostTensor::float(TensorData::new(images, [64, 784])),
            HostTensor::int(TensorData::new(labels, [64])),
        ])
    });
    for batch in Uploader::new(&device).prefetch(batches, 2) {
        let mut batch = batch?;
        step.run((batch.float()?, batch.int()?), 0.01)?;
    }
    println!("{}", step.report());
    Ok(())
}
