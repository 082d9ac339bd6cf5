// One test per body of `bucket_bodies`, the same list for every device.

#[test]
#[serial]
fn a_handful_of_graphs_serves_every_length() {
    bucket_bodies::a_handful_of_graphs_serves_every_length(&device())
}

#[test]
#[serial]
fn what_is_in_the_padding_does_not_matter() {
    bucket_bodies::what_is_in_the_padding_does_not_matter(&device())
}

#[test]
#[serial]
fn padding_changes_no_exact_sum() {
    bucket_bodies::padding_changes_no_exact_sum(&device())
}

#[test]
#[serial]
fn a_masked_mean_takes_nothing_of_masked_positions() {
    bucket_bodies::a_masked_mean_takes_nothing_of_masked_positions(&device())
}

#[test]
#[serial]
fn a_graph_serves_every_number_of_rows() {
    bucket_bodies::a_graph_serves_every_number_of_rows(&device())
}

#[test]
#[serial]
fn lengths_above_the_buckets_run_as_they_are() {
    bucket_bodies::lengths_above_the_buckets_run_as_they_are(&device())
}

#[test]
#[serial]
fn masks_follow_their_lengths() {
    bucket_bodies::masks_follow_their_lengths(&device())
}
