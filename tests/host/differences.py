"""List the tests of Keras that pass as they are and fail wrapped, with a reason for each."""

_CLASS = "clone_model takes these arguments for models of Keras's own classes; a wrapper passes its inner model's configuration"
_PRIVATE_OF_MODEL = "reads private attributes, which the model inside the wrapper has"
_PRIVATE_OF_OPTIMIZER = "reads or replaces private attributes, which the optimizer inside the wrapper has"
_ATTRIBUTES = "lists the attributes of an optimizer and of its copy; the copy of a wrapper is a plain optimizer"

_CONFIGURATION = "serializes a wrapper as a part of something else; `save`, `to_json` and `get_config` give the inner model's"

REASONS = {
    "functional_test::test_serialization": _CONFIGURATION,
    "sequential_test::test_serialization": _CONFIGURATION,
    "optimizer_test::test_tf_checkpointing": (
        "gives tf.train.Checkpoint the wrapped optimizer beside the model, whose checkpoint has the optimizer inside"
    ),
    "swap_ema_weights_test::test_swap_ema_weights_with_tf_distribute": "runs in a tf.distribute scope, which is refused",
    **dict.fromkeys(
        (
            "cloning_test::test_call_fn",
            "cloning_test::test_custom_clone_function_cnn_functional",
            "cloning_test::test_custom_clone_function_mlp_functional",
            "cloning_test::test_custom_clone_function_sequential",
            "cloning_test::test_input_tensors_cnn_functional",
            "cloning_test::test_input_tensors_cnn_sequential",
            "cloning_test::test_input_tensors_cnn_sequential_noinputlayer",
            "cloning_test::test_recursive",
            "cloning_test::test_recursive_multi_level",
            "cloning_test::test_structured_io_cloning",
        ),
        _CLASS,
    ),
    **dict.fromkeys(
        (
            "functional_test::test_layer_getters",
            "sequential_test::test_basic_flow_deferred",
            "sequential_test::test_basic_flow_with_functional_model_as_first_layer",
            "sequential_test::test_basic_flow_with_input",
            "sequential_test::test_basic_flow_with_sequential_model_as_first_layer",
            "sequential_test::test_legacy_flow_with_input_shape",
            "trainer_test::test_metric_tracking",
            "trainer_test::test_multiple_compiles",
            "trainer_test::test_nested_trainer_metrics",
            "trainer_test::test_nested_trainer_metrics_without_compile",
            "trainer_test::test_symbolic_build",
            "variable_mapping_test::test_basics",
        ),
        _PRIVATE_OF_MODEL,
    ),
    **dict.fromkeys(
        (
            "adam_test::test_ema",
            "adam_test::test_ema_overwrite_frequency",
            "multi_optimizer_test::test_default_fallback",
            "multi_optimizer_test::test_swap_ema_weights_with_multi_optimizer",
            "muon_test::test_adamw_weight_decay",
            "muon_test::test_should_use_adamw",
            "nadam_test::test_build_with_empty_var_list",
            "optimizer_sparse_test::test_sparse_gradients_adamw",
            "optimizer_sparse_test::test_sparse_gradients_adamw_amsgrad",
            "optimizer_sparse_test::test_sparse_gradients_loss_scale_optimizer_sgd",
            "optimizer_test::test_ema",
            "optimizer_test::test_ema_with_model_fit",
            "optimizer_test::test_gradient_accumulation",
            "optimizer_test::test_overwrite_with_gradient_with_gradient_accumulation",
        ),
        _PRIVATE_OF_OPTIMIZER,
    ),
    **dict.fromkeys(
        (
            f"{name}_test::test_config"
            for name in (
                *(
                    "adadelta",
                    "adafactor",
                    "adagrad",
                    "adam",
                    "adamax",
                    "adamw",
                    "ftrl",
                    "lamb",
                    "lion",
                    "loss_scale_optimizer",
                ),
                *("muon", "nadam", "rmsprop", "schedule_free_adamw", "sgd"),
            )
        ),
        _ATTRIBUTES,
    ),
}
