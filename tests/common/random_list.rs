// One test per body, the same list for every device. `Device::seed` is the process's: serial.

macro_rules! bodies {
    ($($name:ident),* $(,)?) => {$(
        #[test]
        #[serial]
        fn $name() {
            random_bodies::$name(&device())
        }
    )*};
}

bodies!(
    every_element_is_the_references,
    a_matrix_is_filled_in_order,
    normals_are_the_references,
    numbers_depend_on_key_step_and_place,
    fusion_around_a_draw_does_not_matter,
    cached_plans_keep_their_parameters,
    dropout_keeps_its_share,
    distributions_keep_their_bounds,
    other_dtypes_follow,
    burns_generator_is_untouched,
    scopes_nest,
    an_empty_draw_is_empty,
    statistics_are_those_of_chance,
);

/// Setting up again is fine after operations ran.
#[test]
#[serial]
fn set_up_again_after_operations() {
    let device = device();
    let _ = burn::tensor::Tensor::<1>::ones([3], &device).into_data();
    burn_cuda_graph::register_random().expect("registered before");
    assert_eq!(self::device(), device);
}
