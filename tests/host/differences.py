"""List the tests of Keras that pass as they are and fail wrapped, with a reason for each, and the error that each raises."""

_BY_REASON = {
    ("compares the names of a wrapper with those of its copy, which is a plain model", AssertionError): """
        functional_test::test_serialization
        sequential_test::test_serialization
    """,
    ("runs in a tf.distribute scope, which is refused", ValueError): """
        swap_ema_weights_test::test_swap_ema_weights_with_tf_distribute
    """,
}
# The reason and the error, by the test's file and name.
DIFFERENCES = {test: difference for difference, tests in _BY_REASON.items() for test in tests.split()}
