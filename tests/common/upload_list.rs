// One test per body of `upload_bodies`, the same list for every device.

#[test]
#[serial]
fn uploaded_tensors_are_those_of_from_data() {
    upload_bodies::uploaded_tensors_are_those_of_from_data(&device())
}

#[test]
#[serial]
fn uploaded_batches_train_as_those_of_from_data() {
    upload_bodies::uploaded_batches_train_as_those_of_from_data(&device())
}

#[test]
#[serial]
fn uploaded_batches_come_in_order_each_once() {
    upload_bodies::uploaded_batches_come_in_order_each_once(&device())
}

#[test]
#[serial]
fn an_upload_thread_ends_with_its_consumer() {
    upload_bodies::an_upload_thread_ends_with_its_consumer(&device())
}

#[test]
#[serial]
fn a_failed_source_of_uploads_reaches_the_consumer() {
    upload_bodies::a_failed_source_of_uploads_reaches_the_consumer(&device())
}

#[test]
#[serial]
fn uploads_from_several_threads() {
    upload_bodies::uploads_from_several_threads(&device())
}

#[test]
#[serial]
fn case_12_recording_beside_uploads() {
    upload_bodies::recording_beside_uploads(&device(), 20)
}
