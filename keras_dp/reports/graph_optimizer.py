"""Set options of TensorFlow's graph optimizer for a while."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def graph_optimizer(**options: bool) -> Iterator[None]:
    """Sets options of `tf.config.optimizer.set_experimental_options` inside, for functions that run there for the first time.

    Args:
        **options: each other than its default, to which it returns unless it had been set before.
    """
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options(options)
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: not value for name, value in options.items()} | before)
