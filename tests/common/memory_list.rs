// One test per body of `memory_bodies`, the same list for every device.

#[test]
#[serial]
fn evicted_graphs_give_memory_back() {
    memory_bodies::evicted_graphs_give_memory_back(&device())
}

#[test]
#[serial]
fn long_runs_do_not_grow() {
    memory_bodies::long_runs_do_not_grow(&device())
}

#[test]
#[serial]
fn short_memory_costs_graphs_and_no_step() {
    memory_bodies::short_memory_costs_graphs_and_no_step(&device())
}
