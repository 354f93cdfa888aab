"""Import the batches that a function of the user returns."""

import keras
import tensorflow as tf

from keras_dp.cli import models


def user_batches(name: str) -> tf.data.Dataset | keras.utils.PyDataset:
    """Returns the batches that the function "module:function" returns.

    Raises:
        ValueError: if there is no such function, or it does not return batches that end.
    """
    batches = models.function_named(name)()
    if not isinstance(batches, (tf.data.Dataset, keras.utils.PyDataset)):
        raise ValueError(
            f"{name} must return a tf.data.Dataset of batches, or a keras.utils.PyDataset. Received: {type(batches).__name__}. "
            "Arrays become batches with tf.data.Dataset.from_tensor_slices((x, y)).batch(64)."
        )
    if isinstance(batches, tf.data.Dataset) and batches.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(f"The batches of {name} never end, so that no epoch ends. Leave out repeat(), or add take(n).")
    return batches


def rows_of_first(name: str) -> int:
    """Returns the number of rows in the first batch that "module:function" returns.

    Raises:
        ValueError: as for `user_batches`, or if there is no batch, or it has no rows.
    """
    batches = user_batches(name)
    first = next(iter(batches), None) if isinstance(batches, tf.data.Dataset) else batches[0]
    shapes = [tuple(tensor.shape) for tensor in tf.nest.flatten(first) if tensor is not None]
    rows = next((shape[0] for shape in shapes if shape), None)
    if rows is None:
        seen = f"tensors of shapes {', '.join(map(str, shapes))}. Add .batch(64)" if shapes else "no batch"
        raise ValueError(f"{name} must return batches of rows. Received: {seen}.")
    return int(rows)
