"""Convert tensors to dtypes that TensorFlow's collectives take, and back."""

from typing import Any

import tensorflow as tf

Tensor = Any

_SENT_AS_THEY_ARE = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_SENT_AS = {**dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32), tf.uint32: tf.int64}
_SEEN_AS = {tf.uint64: tf.int64, tf.complex64: tf.float32, tf.complex128: tf.float64}


def as_sent(x: Tensor) -> Tensor:
    """Converts a tensor to a dtype that collectives take."""
    if x.dtype in _SENT_AS_THEY_ARE:
        return x
    if x.dtype in _SENT_AS:
        return tf.cast(x, _SENT_AS[x.dtype])
    if x.dtype in _SEEN_AS:
        return tf.bitcast(x, _SEEN_AS[x.dtype])
    raise TypeError(
        "Workers can send each other numbers only. Convert the tensor to numbers in the dataset or in the model. "
        f"Received: a tensor of {x.dtype.name}"
    )


def as_numbers(strings: Tensor) -> list[Tensor]:
    """Returns the lengths of strings, and the bytes of all of them, one after the other."""
    return [tf.strings.length(strings), tf.io.decode_raw(tf.strings.reduce_join(tf.reshape(strings, [-1])), tf.uint8)]


def as_strings(lengths: Tensor, characters: Tensor) -> Tensor:
    """Returns strings from their lengths and bytes: the inverse of `as_numbers`."""
    every_byte = tf.constant([bytes([byte]) for byte in range(256)])
    text = tf.strings.reduce_join(tf.gather(every_byte, tf.cast(characters, tf.int32)))
    sizes = tf.reshape(lengths, [-1])
    return tf.reshape(tf.strings.substr(text, tf.cumsum(sizes, exclusive=True), sizes), tf.shape(lengths))


def as_received(sent: Tensor, x: Tensor) -> Tensor:
    """Converts a received tensor back to the dtype of `x`."""
    return tf.bitcast(sent, x.dtype) if x.dtype in _SEEN_AS else tf.cast(sent, x.dtype)
