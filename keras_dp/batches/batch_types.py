"""Hold the types of batches, and make a batch of them."""

import dataclasses
from typing import Any

import tensorflow as tf

from keras_dp.batches.nesting import flatten, map_leaves
from keras_dp.batches.slicing import BATCH_SIZE, Slice, own_spec, row_spec, traced_spec
from keras_dp.partition.tensorflow_internals import HOST


@dataclasses.dataclass(frozen=True)
class BatchTypes:
    """Holds the types of the batches of a step.

    Attributes:
        slices: the types of a slice's tensors, nested as in the batch; None for objects that are not tensors.
        is_whole: for each of them, whether it is not cut.
        batch_rows: B; None if the batches have any number of rows.
    """

    slices: Any
    is_whole: list[bool]
    batch_rows: int | None

    @classmethod
    def of(cls, part: Slice) -> "BatchTypes":
        """Returns the types of the batch of which there is a slice."""
        return cls(map_leaves(own_spec, part.data), part.whole.of(part.data), part.batch.shape[0])

    def of_batch(self) -> Any:
        """Returns the types of the batch's tensors, nested as in the batch."""
        stays = iter(self.is_whole)
        return map_leaves(lambda spec: spec if next(stays) else traced_spec(spec, self.batch_rows), self.slices)

    def stand_in(self, batch_rows: int | None = None) -> Any:
        """Returns a batch of these types: floating-point numbers are 1, all other numbers 0, and texts are empty.

        Args:
            batch_rows: the number of rows if these types do not say it; None for Keras's default.

        Raises:
            ValueError: if a size is not known, a tensor is not dense, or one that stays whole holds integers.
        """
        for spec, is_whole in zip(flatten(self.slices), self.is_whole, strict=True):
            # Zeros could be the sizes of other tensors.
            if is_whole and isinstance(spec, tf.TensorSpec) and spec.dtype.is_integer:
                raise ValueError(
                    "No batch can be made up if a tensor that stays whole holds integers, which may be sizes, or rows to look "
                    f"up: pass a batch. Received: {spec}"
                )
        rows = self.batch_rows or batch_rows or BATCH_SIZE
        stays = iter(self.is_whole)
        return map_leaves(lambda spec: _numbers(spec if next(stays) else row_spec(spec, rows)), self.slices)


def _numbers(spec: tf.TypeSpec | None) -> Any:
    if spec is None:
        return None
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.is_fully_defined():
        raise ValueError(f"No batch can be made up if sizes differ, or tensors are not dense: pass a batch. Received: {spec}")
    with tf.device(HOST):
        return (tf.ones if spec.dtype.is_floating else tf.zeros)(spec.shape, spec.dtype)
