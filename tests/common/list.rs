// One test per body, the same list for every device. Captures share the process's one window: serial.

#[test]
#[serial]
fn training_equals_eager_mlp() {
    bodies::training_equals_eager::<Mlp>(&device(), 20)
}

#[test]
#[serial]
fn case_06_batch_norm_statistics_equal_eager() {
    bodies::training_equals_eager::<BnNet>(&device(), 10)
}

#[test]
#[serial]
fn case_24_ten_steps_sum_to_ten() {
    bodies::training_equals_eager::<Mlp>(&device(), 10)
}

#[test]
#[serial]
fn case_07_last_smaller_batch() {
    bodies::last_smaller_batch(&device())
}

#[test]
#[serial]
fn alternating_shapes() {
    bodies::alternating_shapes(&device())
}

#[test]
#[serial]
fn case_08_outputs_are_the_callers() {
    bodies::outputs_are_the_callers(&device())
}

#[test]
#[serial]
fn snapshots_are_the_callers() {
    bodies::snapshots_are_the_callers(&device())
}

#[test]
#[serial]
fn case_10_replaced_weights_train_on() {
    bodies::replaced_weights_train_on(&device())
}

#[test]
#[serial]
fn case_12_a_loader_uploads_during_captures() {
    bodies::a_loader_works_during_captures(&device(), 50, true, false)
}

#[test]
#[serial]
fn case_12_a_loader_reads_during_captures() {
    bodies::a_loader_works_during_captures(&device(), 50, true, true)
}

#[test]
#[serial]
fn case_12_an_unannounced_loader_is_not_poisoned() {
    bodies::a_loader_works_during_captures(&device(), 10, false, false)
}

#[test]
#[serial]
fn case_13_two_trainers() {
    bodies::two_trainers(&device())
}

#[test]
#[serial]
fn case_14_canaries_stay_intact() {
    bodies::canaries_stay_intact(&device())
}

#[test]
#[serial]
fn case_16_and_19_a_read_in_the_step_is_refused() {
    bodies::a_read_in_the_step_is_refused(&device())
}

#[test]
#[serial]
fn case_17_a_panic_while_recording() {
    bodies::a_panic_while_recording(&device())
}

#[test]
#[serial]
fn a_panic_in_a_step_that_stays_eager() {
    bodies::a_panic_in_a_step_that_stays_eager(&device())
}

#[test]
#[serial]
fn a_panic_in_an_eager_step() {
    bodies::a_panic_in_an_eager_step(&device())
}

#[test]
#[serial]
fn case_18_refused_captures_leak_nothing() {
    bodies::refused_captures_leak_nothing(&device(), 100)
}

#[test]
#[serial]
fn evictions_give_memory_back() {
    bodies::evictions_give_memory_back(&device(), 10)
}

#[test]
#[serial]
fn case_21_a_never_settling_stream() {
    bodies::a_never_settling_stream(&device())
}

#[test]
#[serial]
fn case_22_replays_need_no_sync() {
    bodies::replays_need_no_sync(&device(), 1000)
}

#[test]
#[serial]
fn random_operations_are_refused() {
    match common::unregistered() {
        true => bodies::random_operations_are_refused(&device()),
        false => common::in_a_process_without_random("random_operations_are_refused"),
    }
}

#[test]
#[serial]
fn stateful_optimizers_are_refused() {
    bodies::stateful_optimizers_are_refused(&device())
}

#[test]
#[serial]
fn a_moving_learning_rate_is_followed() {
    bodies::a_moving_learning_rate_is_followed(&device())
}

#[test]
#[serial]
fn a_hidden_rate_is_refused() {
    bodies::a_hidden_rate_is_refused(&device())
}

#[test]
#[serial]
fn hidden_inputs_are_refused() {
    bodies::hidden_inputs_are_refused(&device())
}

#[test]
#[serial]
fn a_constant_of_the_closure_replays() {
    bodies::a_constant_of_the_closure_replays(&device())
}

#[test]
#[serial]
fn states_that_swap() {
    bodies::states_that_swap(&device())
}

#[test]
#[serial]
fn a_step_moves_between_threads() {
    bodies::a_step_moves_between_threads(&device())
}

#[test]
#[serial]
fn bad_input_is_an_error() {
    bodies::bad_input_is_an_error(&device())
}

#[test]
#[serial]
fn another_dtype_is_another_key() {
    bodies::another_dtype_is_another_key(&device())
}

#[test]
#[serial]
fn a_model_moved_away_falls_back_by_name() {
    bodies::a_model_moved_away_falls_back_by_name(&device())
}

#[test]
#[serial]
fn the_cache_is_bounded() {
    bodies::the_cache_is_bounded(&device())
}

#[test]
#[serial]
fn watched_steps_launch_what_plain_burn_does() {
    bodies::watched_steps_launch_what_plain_burn_does(&device())
}

#[test]
#[serial]
fn recorded_equals_unrecorded() {
    bodies::recorded_equals_unrecorded::<Mlp>(&device(), 20);
    bodies::recorded_equals_unrecorded::<BnNet>(&device(), 20);
}

#[test]
#[serial]
fn case_15_a_cold_process() {
    match std::env::var_os(common::COLD_PROCESS) {
        Some(_) => bodies::the_first_batch_of_a_process(&device()),
        None => common::in_a_cold_process("case_15_a_cold_process"),
    }
}

#[test]
#[serial]
fn two_steps_made_on_one_thread() {
    bodies::two_steps_made_on_one_thread(&device())
}

#[test]
#[serial]
fn an_eager_step_between_replays_hands_out_nothing_owned() {
    bodies::an_eager_step_between_replays_hands_out_nothing_owned(&device())
}

#[test]
#[serial]
fn an_output_that_is_the_old_state() {
    bodies::an_output_that_is_the_old_state(&device())
}

#[test]
#[serial]
fn a_clone_kept_outside_keeps_its_statistics() {
    bodies::a_clone_kept_outside_keeps_its_statistics(&device())
}

#[test]
#[serial]
fn moving_host_values_are_refused() {
    bodies::moving_host_values_are_refused(&device())
}

#[test]
#[serial]
fn a_step_inside_a_step() {
    bodies::a_step_inside_a_step(&device())
}

#[test]
#[serial]
fn a_train_step_model_replays() {
    bodies::a_train_step_model_replays(&device())
}

#[test]
#[serial]
fn a_step_that_differs_when_recorded_is_refused() {
    bodies::a_step_that_differs_when_recorded_is_refused(&device())
}

#[test]
#[serial]
fn case_03_adam_replays() {
    bodies::an_optimizer_replays::<Mlp>(
        &device(),
        12,
        true,
        || burn_cuda_graph::optim::AdamConfig::new().init(),
        || burn::optim::AdamConfig::new().init(),
    )
}

#[test]
#[serial]
fn case_04_sgd_follows_a_moving_rate() {
    bodies::an_optimizer_replays::<Mlp>(
        &device(),
        12,
        true,
        || burn_cuda_graph::optim::SgdConfig::new().init(),
        || burn::optim::SgdConfig::new().init(),
    )
}

#[test]
#[serial]
fn case_01_dropout_draws_new_masks() {
    state_bodies::dropout_draws_new_masks(&device(), 200)
}

#[test]
#[serial]
fn case_02_noise_in_the_step() {
    state_bodies::noise_in_the_step(&device(), 100)
}

#[test]
#[serial]
fn a_seed_decides_the_run() {
    state_bodies::a_seed_decides_the_run(&device())
}

#[test]
#[serial]
fn case_04_a_schedule_replays() {
    state_bodies::a_schedule_replays(&device())
}

#[test]
#[serial]
fn rates_by_group_replay() {
    state_bodies::rates_by_group_replay(&device())
}

#[test]
#[serial]
fn scaled_and_read_rates() {
    state_bodies::scaled_and_read_rates(&device())
}

#[test]
#[serial]
fn case_05_changed_hyper_parameters() {
    state_bodies::changed_hyper_parameters(&device())
}

#[test]
#[serial]
fn case_09_accumulation_replays() {
    state_bodies::accumulation_replays(&device())
}

#[test]
#[serial]
fn case_11_checkpoints_resume() {
    for name in ["adam", "sgd-momentum", "adan"] {
        state_bodies::checkpoints_resume(&device(), name);
    }
}

#[test]
#[serial]
fn random_numbers_resume() {
    state_bodies::random_numbers_resume(&device())
}

#[test]
#[serial]
fn case_20_an_overflow_is_skipped() {
    state_bodies::an_overflow_is_skipped(&device(), "adam")
}

#[test]
#[serial]
fn verification_finds_a_frozen_value() {
    state_bodies::verification_finds_a_frozen_value(&device())
}

#[test]
#[serial]
fn parameters_without_gradients() {
    state_bodies::parameters_without_gradients(&device())
}

#[test]
#[serial]
fn case_03_every_optimizer_replays() {
    state_bodies::every_optimizer_replays(&device(), &state_bodies::OPTIMIZERS, 12)
}

#[test]
#[serial]
fn half_precision_trains() {
    for dtype in [burn::tensor::FloatDType::F16, burn::tensor::FloatDType::BF16] {
        state_bodies::half_precision_trains(&device(), dtype);
    }
}

#[test]
#[serial]
fn lbfgs_stays_eager() {
    state_bodies::lbfgs_stays_eager(&device())
}

#[test]
#[serial]
fn global_norm_clipping_replays() {
    state_bodies::global_norm_clipping_replays(&device())
}

#[test]
#[serial]
fn counts_that_part_after_recording() {
    frozen_bodies::counts_that_part_after_recording(&device())
}

#[test]
#[serial]
fn a_part_cloned_over_another() {
    frozen_bodies::a_part_cloned_over_another(&device())
}

#[test]
#[serial]
fn released_graphs_count_once() {
    frozen_bodies::released_graphs_count_once(&device())
}

#[test]
#[serial]
fn an_optimizer_reloaded_in_a_step() {
    frozen_bodies::an_optimizer_reloaded_in_a_step(&device())
}

#[test]
#[serial]
fn an_own_rate_that_moves() {
    frozen_bodies::an_own_rate_that_moves(&device())
}

#[test]
#[serial]
fn arithmetic_on_a_rate() {
    frozen_bodies::arithmetic_on_a_rate(&device())
}

#[test]
#[serial]
fn an_own_optimize_that_halves() {
    frozen_bodies::an_own_optimize_that_halves(&device())
}

#[test]
#[serial]
fn a_batch_on_the_tape() {
    frozen_bodies::a_batch_on_the_tape(&device())
}

#[test]
#[serial]
fn rates_for_nameless_parameters() {
    frozen_bodies::rates_for_nameless_parameters(&device())
}

#[test]
#[serial]
fn a_replay_is_not_held_back() {
    bodies::a_replay_is_not_held_back(&device())
}

#[test]
#[serial]
fn a_trial_takes_ordinary_steps() {
    bodies::a_trial_takes_ordinary_steps(&device())
}
