// One test per body of `neighbour_bodies`, the same list for every device.

#[test]
#[serial]
fn a_step_is_recorded_when_its_neighbour_is_quiet() {
    neighbour_bodies::a_step_is_recorded_when_its_neighbour_is_quiet(&device())
}

#[test]
#[serial]
fn a_neighbour_in_a_window_costs_the_recording() {
    neighbour_bodies::a_neighbour_in_a_window_costs_the_recording(&device())
}
