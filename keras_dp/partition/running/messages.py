"""Join tensors in one message, and split it again."""

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from keras_dp.partition.building.writing import GraphWriter

# GPUs have kernels that join floating-point numbers. These integers, such as the counters of random numbers, travel as numbers
# of the same bits, and truth values as 0 and 1. On a GPU, int32 stays in the host's memory.
_SENT_AS = {tf.int64: tf.float64, tf.uint64: tf.float64, tf.uint32: tf.float32, tf.bool: tf.float32}

PREFIX = "packed/"  # of the names of nodes that join and split messages


def sent_as(dtype: tf.DType) -> tf.DType | None:
    """Returns the dtype in which messages hold numbers of a dtype; None if they do not."""
    return dtype if dtype.is_floating else _SENT_AS.get(dtype)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Describes how tensors stand in a message: one after the other, along its last axis.

    Tensors of one rank, whose sizes are 1 but for the last axis, are joined as they are. Others are made vectors before.

    Attributes:
        specs: the types of the tensors, of known shapes and of dtypes that are sent as the same one.
    """

    specs: tuple[tf.TensorSpec, ...]

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the message."""
        return sent_as(self.specs[0].dtype)

    @property
    def _rank(self) -> int:
        """The rank of the message."""
        ranks = {spec.shape.rank for spec in self.specs}
        alike = len(ranks) == 1 and all(math.prod(spec.shape[:-1]) == 1 for spec in self.specs)
        return max(1, *ranks) if alike else 1

    @property
    def shape(self) -> list[int]:
        """The shape of the message."""
        return [*[1] * (self._rank - 1), self.size]

    @property
    def size(self) -> int:
        """The number of entries of the message."""
        return sum(math.prod(spec.shape) for spec in self.specs)

    def join(self, written: GraphWriter, tensors: Sequence[str], device: str) -> str:
        """Writes the message on a device, and returns its node."""
        rank = self._rank
        parts = []
        for tensor, spec in zip(tensors, self.specs, strict=True):
            part = as_dtype(written, tensor, spec.dtype, self.dtype, device)
            parts.append(self._reshaped(written, part, spec.shape.rank, [-1], rank, device))
        if len(parts) == 1:
            return written.add("Identity", parts, device, f"{PREFIX}message", T=self.dtype)
        inputs = [*parts, written.constant(rank - 1, device=device)]
        return written.add("ConcatV2", inputs, device, f"{PREFIX}message", N=len(parts), T=self.dtype, Tidx=tf.int32)

    def split(self, written: GraphWriter, message: str, device: str) -> list[str]:
        """Writes the tensors of a message on a device, and returns their names."""
        return self._split(written, message, [], device)

    def split_stack(self, written: GraphWriter, messages: Sequence[str], device: str) -> list[str]:
        """Stacks messages on a device, and returns the names of the stacks of their tensors, along a first axis."""
        count = len(messages)
        stack = written.add("Pack", messages, device, f"{PREFIX}stack", N=count, T=self.dtype, axis=0)
        return self._split(written, stack, [count], device)

    def _split(self, written: GraphWriter, message: str, leading: list[int], device: str) -> list[str]:
        rank = self._rank
        sizes = [math.prod(spec.shape) for spec in self.specs]
        if len(sizes) == 1:
            (spec,) = self.specs
            restored = self._reshaped(written, message, spec.shape.rank, [*leading, *spec.shape], rank, device)
            return [as_dtype(written, restored, self.dtype, spec.dtype, device)]
        inputs = [message, written.constant(sizes, device=device), written.constant(len(leading) + rank - 1, device=device)]
        split = written.add("SplitV", inputs, device, f"{PREFIX}received", num_split=len(sizes), T=self.dtype, Tlen=tf.int32)
        made = []
        for i, spec in enumerate(self.specs):
            shape = [*leading, *spec.shape.as_list()]
            restored = self._reshaped(written, f"{split}:{i}", spec.shape.rank, shape, rank, device)
            made.append(as_dtype(written, restored, self.dtype, spec.dtype, device))
        return made

    def _reshaped(self, written: GraphWriter, tensor: str, own_rank: int, shape: Sequence[int], rank: int, device: str) -> str:
        """Reshapes a tensor to its own shape, or to a vector, unless it has the rank of the message."""
        if own_rank == rank:
            return tensor
        inputs = [tensor, written.constant(shape, device=device)]
        return written.add("Reshape", inputs, device, f"{PREFIX}reshape", T=self.dtype, Tshape=tf.int32)


@dataclasses.dataclass(frozen=True)
class Message:
    """Describes a message that one device sends another.

    Attributes:
        node: the node that joins its tensors.
        number: its round.
        layout: how its tensors stand in it.
        source: the device that sends it.
        joined: the names of its tensors on this device, inside the function.
        destination: the device that receives it.
        received: the names of its tensors on that device, inside the function.
    """

    node: str
    number: int
    layout: Layout
    source: str
    joined: Sequence[str]
    destination: str
    received: Sequence[str]


def as_dtype(written: GraphWriter, tensor: str, before: tf.DType, after: tf.DType, device: str) -> str:
    """Takes the bits of a tensor, or its truth values, as numbers of another dtype, if the dtypes differ."""
    if before == after:
        return tensor
    if tf.bool in (before, after):
        return written.add("Cast", [tensor], device, f"{PREFIX}truth", SrcT=before, DstT=after)
    return written.add("Bitcast", [tensor], device, f"{PREFIX}bits", T=before, type=after)
