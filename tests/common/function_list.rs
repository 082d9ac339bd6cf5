// One test per body of `function_bodies`, the same list for every device.

#[test]
#[serial]
fn evaluation_beside_training() {
    function_bodies::evaluation_beside_training(&device())
}

#[test]
#[serial]
fn two_steps_over_one_state() {
    function_bodies::two_steps_over_one_state(&device())
}

#[test]
#[serial]
fn every_function_follows_a_changed_state() {
    function_bodies::every_function_follows_a_changed_state(&device())
}

#[test]
#[serial]
fn inference_replays() {
    function_bodies::inference_replays(&device())
}

#[test]
#[serial]
fn evaluation_leaves_random_numbers_alone() {
    function_bodies::evaluation_leaves_random_numbers_alone(&device())
}
