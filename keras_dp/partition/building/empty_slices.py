"""Keep the borrowed row of a tower without rows out of every result."""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_dp.partition.building.construction import Construction
from keras_dp.partition.tracing.names import Output, name_of

Otherwise = Callable[[str, int], str]


class EmptySlices:
    """Writes the parts or rows that towers give to an exchange. A tower with a borrowed row gives nothing.

    Args:
        construction: the state of the partitioned graph.
    """

    def __init__(self, construction: Construction):
        self._construction = construction
        self._graph, self._feeds = construction.graph, construction.feeds

    def parts(self, output: Output, reduction: str) -> list[str]:
        """Returns the N parts of a reduction. The part of a tower without rows does not change the result."""
        static = self._construction.propagation.static(output)
        dtype, shape = static.dtype, static.shape
        if reduction not in ("sum", "prod"):
            return self._parts_of_extreme(output, reduction, dtype)

        def neutral(dead: str, tower: int) -> str:
            if reduction == "sum" and shape is not None and all(isinstance(size, int) for size in shape):
                what = ("nothing", dtype, *shape, tower, self._graph.depth(dead))
                return str(self._graph.once(what, lambda: self._zeros(shape, tower, dtype)))
            if reduction == "prod":
                # TensorFlow's graph optimizer takes OnesLike of unsigned integers for zeros.
                return self._filled(dead, 1, tower, dtype)
            return self._graph.add("ZerosLike", [dead], self._device(tower), "nothing", tower, T=dtype)

        return list(self._graph.once(("parts", output, reduction), lambda: self._of_towers(output, dtype, neutral)))

    def _parts_of_extreme(self, output: Output, reduction: str, dtype: tf.DType) -> list[str]:
        def neutral(dead: str, tower: int) -> str:
            if self._construction.across is None:
                # It is another tower's part, and a second copy of a part does not change the result.
                return dead
            return self._filled(dead, _neutral_element(reduction, dtype), tower, dtype)

        last = len(self._construction.devices) - 1
        is_alone = self._construction.across is None
        return self._of_towers(output, dtype, neutral, self._construction.instances.part(output, last) if is_alone else None)

    def rows(self, output: Output, axis: int) -> list[str]:
        """Returns the N slices of rows along an axis. The rank of the tensor must be known."""
        static = self._construction.propagation.static(output)
        rank, dtype = static.rank, static.dtype
        assert rank is not None

        def none(dead: str, tower: int) -> str:
            device = self._device(tower)
            begins = self._graph.constant([0] * rank, device=device)
            sizes = self._graph.constant([0 if i == axis else -1 for i in range(rank)], device=device)
            return self._graph.add("Slice", [dead, begins, sizes], device, "nothing", tower, T=dtype, Index=tf.int32)

        return self._of_towers(output, dtype, none)

    def _device(self, tower: int) -> str:
        return self._construction.devices[tower]

    def _zeros(self, shape: list[int], tower: int, dtype: tf.DType) -> str:
        """Writes the zeros of a tower that has no rows of its own."""
        device = self._device(tower)
        dead = self._switch(self._graph.constant(0, dtype, device), tower, dtype)
        sizes = self._graph.constant(shape, tf.int32, device)
        return self._graph.add("Fill", [sizes, dead], device, "nothing", tower, T=dtype, index_type=tf.int32)

    def _filled(self, tensor: str, value: Any, tower: int, dtype: tf.DType) -> str:
        """Writes a tensor of the shape of another one, each of whose entries has the same value."""
        device = self._device(tower)
        shape = self._graph.add("Shape", [tensor], device, "shape", tower, T=dtype, out_type=tf.int32)
        inputs = [shape, self._graph.constant(value, dtype, device)]
        return self._graph.add("Fill", inputs, device, "nothing", tower, T=dtype, index_type=tf.int32)

    def _of_towers(self, output: Output, dtype: tf.DType, otherwise: Otherwise, other: str | None = None) -> list[str]:
        """Returns each tower's tensor; for a tower without rows, `otherwise` makes it from `other` or the tower's tensor.

        Switch and Merge pass a tensor on without a copy.
        """
        made = []
        for tower in range(len(self._construction.devices)):
            part = self._construction.instances.part(output, tower)
            if self._construction.surely_has_none(tower):
                nothing = otherwise(other or part, tower)
                # A worker without rows makes the same exchanges as others, with the same tensors in one message.
                self._graph.count_after(nothing, part)
                part = nothing
            elif not self._construction.surely_has_rows(tower):
                dead = otherwise(self._switch(other or part, tower, dtype), tower)
                inputs = [dead, name_of(self._switch(part, tower, dtype), 1)]
                part = self._graph.add("Merge", inputs, self._device(tower), "own", tower, N=2, T=dtype)
            made.append(part)
        return made

    def _switch(self, tensor: str, tower: int, dtype: tf.DType) -> str:
        """Passes a tensor to its first output on a tower without rows, and to its second one on others."""
        if self._construction.surely_has_none(tower):
            return tensor
        inputs = [tensor, self._feeds.is_alive[tower]]
        return str(
            self._graph.once(
                ("switch", tensor, tower),
                lambda: self._graph.add("Switch", inputs, self._device(tower), "alive", tower, T=dtype),
            )
        )


def _neutral_element(reduction: str, dtype: tf.DType) -> Any:
    """Returns the neutral element of a maximum, a minimum, "all" or "any"."""
    if reduction in ("all", "any"):
        return reduction == "all"
    if dtype.is_floating:
        return -math.inf if reduction == "max" else math.inf
    return dtype.min if reduction == "max" else dtype.max
