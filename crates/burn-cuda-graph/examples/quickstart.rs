use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Int, Tensor};
use burn_cuda_graph::{GraphConfig, GraphedStep, Training};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::default().autodiff();
    let training = Training::new(
        LinearConfig::new(784, 10).init(&device),
        SgdConfig::new().init(),
    );
    let loss = CrossEntropyLossConfig::new().init(&device);
    let step = move |t: &mut Training<Linear>, (x, y): (Tensor<2>, Tensor<1, Int>), lr: f64| {
        let loss = loss.forward(t.model().forward(x), y);
        t.optimize(lr, GradientsParams::from_grads(loss.backward(), t.model()));
        loss
    };
    let mut step = GraphedStep::new(training, GraphConfig::new(), step)?;
    for _ in 0..10 {
        let (x, y) = (
            Tensor::ones([64, 784], &device),
            Tensor::zeros([64], &device),
        );
        println!("{}", step.run((x, y), 0.01)?.path);
    }
    println!("{}", step.report());
    Ok(())
}
