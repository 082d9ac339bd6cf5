// Included by the tests of both tiers; `device()` is theirs.

#[test]
#[serial]
fn a_kernel_computes_burns_update() {
    fused_bodies::a_kernel_computes_burns_update(&device())
}

#[test]
#[serial]
fn fused_updates_replay() {
    fused_bodies::fused_updates_replay(&device())
}

#[test]
#[serial]
fn old_values_outlive_a_fused_update() {
    fused_bodies::old_values_outlive_a_fused_update(&device())
}

#[test]
#[serial]
fn updates_that_are_not_fused() {
    fused_bodies::updates_that_are_not_fused(&device())
}

#[test]
#[serial]
fn a_fused_clipping() {
    fused_bodies::a_fused_clipping(&device())
}

#[test]
#[serial]
fn few_launches_update_all() {
    fused_bodies::few_launches_update_all(&device())
}

#[test]
#[serial]
fn a_resumed_update_of_a_transposed_parameter() {
    fused_bodies::a_resumed_update_of_a_transposed_parameter(&device())
}

#[test]
#[serial]
fn eager_steps_in_a_row_keep_their_rates() {
    fused_bodies::eager_steps_in_a_row_keep_their_rates(&device());
    // Opening the generator's scope waits for the queue, which hides what is looked for.
    if !common::unregistered() {
        common::in_a_process_without_random("eager_steps_in_a_row_keep_their_rates");
    }
}

#[test]
#[serial]
fn replays_keep_their_order() {
    fused_bodies::replays_keep_their_order(&device())
}
