// One test per body of `train_bodies`, the same list for every device.

#[test]
#[serial]
fn a_learner_trains_as_burns_strategy() {
    train_bodies::a_learner_trains_as_burns_strategy(&device())
}

#[test]
#[serial]
fn a_learner_validates_by_graph() {
    train_bodies::a_learner_validates_by_graph(&device())
}

#[test]
#[serial]
fn a_learner_accumulates() {
    train_bodies::a_learner_accumulates(&device())
}

#[test]
#[serial]
fn a_models_own_optimize_is_honoured() {
    train_bodies::a_models_own_optimize_is_honoured(&device())
}

#[test]
#[serial]
fn a_stock_optimizer_trains_eagerly() {
    train_bodies::a_stock_optimizer_trains_eagerly(&device())
}

#[test]
#[serial]
fn a_learners_groups_and_clipping_are_taken_over() {
    train_bodies::a_learners_groups_and_clipping_are_taken_over(&device())
}

#[test]
#[serial]
fn a_learner_resumes() {
    train_bodies::a_learner_resumes(&device())
}

#[test]
#[serial]
fn a_learner_stops() {
    train_bodies::a_learner_stops(&device())
}

#[test]
#[serial]
fn a_learner_trains_beside_loader_threads() {
    train_bodies::a_learner_trains_beside_loader_threads(&device())
}

#[test]
#[serial]
fn a_learner_times_its_steps() {
    train_bodies::a_learner_times_its_steps(&device())
}
