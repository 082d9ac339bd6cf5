use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Int, Tensor};
use burn_cuda_graph::optim::AdamConfig; // in place of burn::optim::AdamConfig
use burn_cuda_graph::{GraphConfig, GraphedStep, StepRate, Training};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::default().autodiff();
    let training = Training::new(
        LinearConfig::new(784, 10).init(&device),
        AdamConfig::new().init(),
    );
    let loss = CrossEntropyLossConfig::new().init(&device);
    let step =
        move |t: &mut Training<Linear>, (x, y): (Tensor<2>, Tensor<1, Int>), lr: StepRate| {
            let loss = loss.forward(t.model().forward(x), y);
            t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
            loss
        };
    let mut step = GraphedStep::new(training, GraphConfig::new(), step)?;
    for index in 0..10 {
        let lr = 0.01 / (1.0 + index as f64); // any schedule
        let (x, y) = (
            Tensor::ones([64, 784], &device),
            Tensor::zeros([64], &device),
        );
        println!("{}", step.run((x, y), lr)?.path);
    }
    println!("{}", step.report());
    Ok(())
}
