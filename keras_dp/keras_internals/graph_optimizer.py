"""Set options of TensorFlow's graph optimizer for some calls of functions."""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.eager import context

_TOGGLES = rewriter_config_pb2.RewriterConfig


@contextlib.contextmanager
def graph_optimizer(**options: bool) -> Iterator[None]:
    """Sets options of TensorFlow's graph optimizer for the functions that this thread calls inside the `with` block.

    The options of `tf.config.optimizer` stay as they are: they are those of all threads, and one that was set cannot be unset.
    TensorFlow prepares each function anew for other options, and the random operations in it then begin again.

    Args:
        **options: options of `tf.config.optimizer.set_experimental_options`.
    """
    tensorflow = context.context()
    usual = tensorflow.function_call_options
    own = copy.copy(usual)
    own.config_proto_serialized = _with_options(usual.config_proto_serialized, tuple(options.items()))
    tensorflow.function_call_options = own
    try:
        yield
    finally:
        tensorflow.function_call_options = usual


@functools.cache
def _with_options(serialized: bytes, options: tuple[tuple[str, bool], ...]) -> Any:
    config = tf.compat.v1.ConfigProto.FromString(serialized)
    rewriting = config.graph_options.rewrite_options
    for name, value in options:
        is_bool = isinstance(getattr(rewriting, name), bool)
        setattr(rewriting, name, value if is_bool else _TOGGLES.ON if value else _TOGGLES.OFF)
    return config
