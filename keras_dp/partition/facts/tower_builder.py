"""Define the tools with which a rule makes a tower's instance of a node."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf


class Writer(Protocol):
    """Writes nodes; see `GraphWriter`."""

    def add(
        self, operation: str, inputs: Sequence[str], device: str, name: str, tower: int | None = None, **attributes: Any
    ) -> str:
        """Writes a new node, and returns its name."""

    def constant(self, value: Any, dtype: tf.DType = ..., device: str | None = None) -> str:
        """Writes a constant, once on each device, and returns its name."""

    def binary(self, operation: str, a: str, b: str, dtype: tf.DType = ..., device: str | None = None) -> str:
        """Writes a node with two operands of the same dtype, unless it exists, and returns its name."""

    def cast(self, tensor: str, source: tf.DType, target: tf.DType, device: str | None = None) -> str:
        """Casts a tensor to another dtype, once on each device, and returns its name."""


class TowerBuilder(Protocol):
    """Builds the partitioned graph; see `Builder`.

    Attributes:
        devices: the devices of the N towers.
    """

    devices: list[str]

    @property
    def graph(self) -> Writer:
        """The graph so far."""

    @property
    def begins(self) -> Sequence[str]:
        """For each tower, the index of its first row, int32."""

    @property
    def rows(self) -> Sequence[str]:
        """For each tower, the number of rows that it computes with, int32; at least 1."""

    def copy(self, definition: Any, tower: int, inputs: Sequence[str], operation: str | None = None) -> str:
        """Copies a traced node to a tower, with other inputs, after the nodes that it waits for."""

    def count(self, sizes: Sequence[Any], name: str, axes: Sequence[int], dtype: tf.DType, tower: int | None = None) -> str:
        """Counts the entries along some axes of a node's first input, as an int64 scalar on the host."""

    def read(self, name: str, resource: str, dtype: tf.DType) -> str:
        """Reads the value of a variable, once for all towers."""

    def own_mean(self, part: str, tower: int, dtype: tf.DType) -> str:
        """Returns the mean of a tower's rows, from its part of the mean of all rows."""


# Makes a tower's instance of a node, as instance(builder, node, tower, inputs), and returns its name.
InstanceMaker = Callable[[TowerBuilder, Any, int, list[str]], str]
