"""Set options of TensorFlow's graph optimizer temporarily."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def graph_optimizer(**options: bool) -> Iterator[None]:
    """Sets options of TensorFlow's graph optimizer for functions that run for the first time inside the `with` block.

    Args:
        **options: options of `tf.config.optimizer.set_experimental_options`, each with the opposite of its default.
    """
    before = tf.config.optimizer.get_experimental_options()
    changed = {name: value for name, value in options.items() if before.get(name, not value) != value}
    tf.config.optimizer.set_experimental_options(changed)
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({name: not value for name, value in changed.items()})
