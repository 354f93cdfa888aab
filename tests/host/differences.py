"""List the tests of Keras that pass as they are and fail wrapped, with a reason for each, and the error that each raises."""

import pytest

_BY_REASON = {
    ("reads private attributes, which the model inside the wrapper has", AttributeError): """
        functional_test::test_layer_getters
        sequential_test::test_basic_flow_deferred
        sequential_test::test_basic_flow_with_functional_model_as_first_layer
        sequential_test::test_basic_flow_with_input
        sequential_test::test_basic_flow_with_sequential_model_as_first_layer
        sequential_test::test_legacy_flow_with_input_shape
        trainer_test::test_symbolic_build
    """,
    ("compares the private trackers of the wrapper with the metrics, which are the inner model's", AssertionError): """
        trainer_test::test_metric_tracking
        trainer_test::test_multiple_compiles
        trainer_test::test_nested_trainer_metrics
        trainer_test::test_nested_trainer_metrics_without_compile
    """,
    ("calls a private method that finds the optimizer on the wrapper and on the model inside", ValueError): """
        variable_mapping_test::test_basics
    """,
    ("reads private attributes, which the optimizer inside the wrapper has", AttributeError): """
        adam_test::test_ema
        adam_test::test_ema_overwrite_frequency
        multi_optimizer_test::test_default_fallback
        multi_optimizer_test::test_swap_ema_weights_with_multi_optimizer
        muon_test::test_should_use_adamw
        nadam_test::test_build_with_empty_var_list
        optimizer_test::test_ema
        optimizer_test::test_ema_with_model_fit
        optimizer_test::test_gradient_accumulation
    """,
    ("calls a private method of the wrapper, or reads its private count of steps", AssertionError): """
        muon_test::test_adamw_weight_decay
        optimizer_test::test_overwrite_with_gradient_with_gradient_accumulation
    """,
    ("replaces methods of the wrapper, where the optimizer inside has them", (AssertionError, pytest.fail.Exception)): """
        optimizer_sparse_test::test_sparse_gradients_adamw
        optimizer_sparse_test::test_sparse_gradients_adamw_amsgrad
        optimizer_sparse_test::test_sparse_gradients_loss_scale_optimizer_sgd
    """,
    ("lists the attributes of an optimizer and of its copy; the copy of a wrapper is a plain optimizer", AssertionError): """
        adadelta_test::test_config
        adafactor_test::test_config
        adagrad_test::test_config
        adam_test::test_config
        adamax_test::test_config
        adamw_test::test_config
        ftrl_test::test_config
        lamb_test::test_config
        lion_test::test_config
        loss_scale_optimizer_test::test_config
        muon_test::test_config
        nadam_test::test_config
        rmsprop_test::test_config
        schedule_free_adamw_test::test_config
        sgd_test::test_config
    """,
    ("gives clone_model arguments that it takes for Keras's own classes alone", (TypeError, ValueError)): """
        cloning_test::test_call_fn
        cloning_test::test_custom_clone_function_cnn_functional
        cloning_test::test_custom_clone_function_mlp_functional
        cloning_test::test_custom_clone_function_sequential
        cloning_test::test_input_tensors_cnn_functional
        cloning_test::test_input_tensors_cnn_sequential
        cloning_test::test_input_tensors_cnn_sequential_noinputlayer
        cloning_test::test_recursive
        cloning_test::test_recursive_multi_level
        cloning_test::test_structured_io_cloning
    """,
    ("serializes a wrapper by itself; `save`, `to_json` and `get_config` give the inner model's", TypeError): """
        functional_test::test_serialization
        sequential_test::test_serialization
    """,
    ("gives tf.train.Checkpoint a wrapped optimizer beside a model whose checkpoint has the one inside", ValueError): """
        optimizer_test::test_tf_checkpointing
    """,
    ("runs in a tf.distribute scope, which is refused", ValueError): """
        swap_ema_weights_test::test_swap_ema_weights_with_tf_distribute
    """,
}
# The reason and the error, by the test's file and name.
DIFFERENCES = {test: difference for difference, tests in _BY_REASON.items() for test in tests.split()}
