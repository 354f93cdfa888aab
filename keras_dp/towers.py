"""The current tower, and `cross_tower_sum`: the only way towers talk to each other."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_dp.batches import Slice
from keras_dp.partition.own import own_part

Tensor = Any

# A large odd step between the seeds of the towers, so that they do not meet those of other generators.
SEED_STEP = 0x632BE5AB

NOT_AT_TOP_LEVEL = (
    "cross_tower_sum() was called inside a tf.cond branch, a loop, a nested tf.function or vectorized_map. The towers cannot "
    "meet there: whether and how often each one gets there may differ. Move the call to the top level of the model's call() or "
    "of the loss."
)

_local = threading.local()


class Common:
    """A tensor that is the same on all towers, of which the first one computes it."""

    def __init__(self, value: Tensor):
        self.value = value


class Tower:
    """The tower that is being traced.

    Attributes:
        index: which of the N towers this is, an int32 scalar tensor.
        slice: the tower's `Slice` of the global batch.
        marks: names of the operations in the tower's graph that stamping turns into sums over the towers.
        derived: names of those that only say what the gradient of a tensor is, and are not stamped; with the gradients.
        common: names of the results of the tower that only the first tower needs to compute.
    """

    def __init__(self, index: Tensor, batch_slice: Slice):
        self.index = index
        self.slice = batch_slice
        self.marks: list[str] = []
        self.derived: dict[str, Callable[[Tensor], Tensor]] = {}
        self.common: set[str] = set()
        self._is_common: dict[str, bool] = {}
        self._graph = tf.compat.v1.get_default_graph()
        self._graph._keras_dp_tower = self
        self._casts: dict[tuple[str, tf.DType], Tensor] = {}

    def alive(self, dtype: tf.DType) -> Tensor:
        """1 if the tower has rows of its own, 0 if its slice is empty and it works on a borrowed row."""
        return self._cast("alive", tf.minimum(self.slice.rows, 1), dtype)

    def share(self, dtype: tf.DType) -> Tensor:
        """The tower's share of the rows of the global batch; the shares of all towers add up to 1."""
        return self._cast("share", tf.cast(self.slice.rows, tf.float64) / tf.cast(self.slice.batch_rows, tf.float64), dtype)

    def _cast(self, name: str, value: Tensor, dtype: tf.DType) -> Tensor:
        key = (name, tf.as_dtype(dtype))
        if key not in self._casts:
            self._casts[key] = tf.cast(value, dtype)
        return self._casts[key]

    def mark(self, x: Tensor) -> Tensor:
        """The identity, noted as a sum over the towers. Its gradient is again a sum over the towers."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise RuntimeError(f"{NOT_AT_TOP_LEVEL} Received: x={x}")
        marked = tf.raw_ops.Snapshot(input=x, name="cross_tower_sum")
        self.marks.append(marked.op.name)
        return marked

    def is_common(self, x: Tensor) -> bool:
        """Whether `x` is the same on all towers: it comes from shared values, constants and sums over the towers alone."""
        leaves = tf.nest.flatten((self.index, self.slice), expand_composites=True)
        own = {leaf.op.name for leaf in leaves if tf.is_tensor(leaf)}
        waiting = [x.op]
        while waiting:
            operation = waiting[-1]
            inputs = self._inputs(operation)
            unknown = [other for other in inputs if other.name not in self._is_common]
            waiting += unknown
            if not unknown:
                waiting.pop()
                is_own = operation.name in own or operation.op_def.is_stateful
                self._is_common[operation.name] = not is_own and all(self._is_common[other.name] for other in inputs)
        return self._is_common[x.op.name]

    def _inputs(self, operation: tf.Operation) -> list[tf.Operation]:
        if operation.name in self.marks:
            return []
        inputs = [tensor.op for tensor in operation.inputs]
        return inputs[:1] if operation.name in self.derived else inputs

    def only_first(self, x: Tensor) -> Tensor:
        """The identity, for a result that `is_common`: noted as one that the first tower alone needs to compute."""
        x = tf.identity(x)
        self.common.add(x.name)
        return x

    def derive(self, y: Tensor, x: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
        """`y`, as a function of `x` alone whose gradient, from that of the result, is what `gradient` says.

        As `tf.custom_gradient`, but kept no longer than the tower's graph.
        """
        derived = tf.raw_ops.InplaceUpdate(x=y, i=tf.zeros((0,), tf.int32), v=x)
        self.derived[derived.op.name] = gradient
        return derived


def _gradient_of_mark(operation: tf.Operation, upstream: Tensor) -> Tensor:
    tower = getattr(operation.outputs[0].graph, "_keras_dp_tower", None)
    return own_part(upstream) if tower is None else tower.mark(upstream)


def _gradient_of_derived(operation: tf.Operation, upstream: Tensor) -> tuple[None, None, Tensor]:
    (derived,) = operation.outputs
    return None, None, derived.graph._keras_dp_tower.derived[derived.op.name](upstream)


# Nothing else in TensorFlow's Python makes these operations, neither has a gradient, and none is stamped as it is. A
# tf.custom_gradient would be registered for good, and would keep the tower's graph with it. A module that is imported once more
# finds its gradients registered.
with contextlib.suppress(KeyError):
    tf.RegisterGradient("Snapshot")(_gradient_of_mark)
    tf.RegisterGradient("InplaceUpdate")(_gradient_of_derived)


def current_tower() -> Tower | None:
    """The tower that is being traced on this thread, or None outside of towers."""
    return getattr(_local, "tower", None)


def tower_in_trace() -> Tower:
    """The tower that is being traced; for code that only towers run."""
    tower = current_tower()
    if tower is None:
        raise RuntimeError("There is no tower: this is computed only while a tower is traced.")
    return tower


@contextlib.contextmanager
def enter_tower(tower: Tower) -> Iterator[Tower]:
    """Makes `tower` the current one."""
    if current_tower() is not None:
        raise RuntimeError("A tower cannot be traced inside another tower: is the inner model a DataParallelModel?")
    _local.tower = tower
    try:
        yield tower
    finally:
        _local.tower = None


def cross_tower_sum(x: Any) -> Any:
    """The sum of `x` over all towers, on every tower; the identity outside of towers.

    A tower whose slice of the global batch is empty adds nothing. The gradient is exact: the sum over the towers of the
    gradients with respect to their results. Use it in your own layers and losses wherever the whole global batch counts:

    >>> import keras_dp, numpy as np
    >>> rows = np.float32(3.0)
    >>> float(keras_dp.cross_tower_sum(rows))
    3.0

    Args:
        x: a tensor of numbers, with the same shape on every tower.

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        RuntimeError: if called on a tower inside a `tf.cond`, a loop, a nested `tf.function` or `vectorized_map`.
        TypeError: if `x` is not a dense tensor of numbers.
    """
    tower = current_tower()
    if tower is None or isinstance(x, keras.KerasTensor):
        return x
    x = keras.ops.convert_to_tensor(x)
    if not isinstance(x, tf.Tensor) or not (x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_complex):
        raise TypeError(f"cross_tower_sum() takes a dense tensor of numbers. Received: x={x}")
    return tower.mark(x * tower.alive(x.dtype))


def gather_rows(x: Any) -> Any:
    """All rows of the global batch, on every tower, from each tower's rows `x`; with exact gradients.

    Each tower pads its rows with zeros at its place in the global batch; the sum over the towers is the whole. `x` has b rows,
    or a multiple of them; a scalar, as one of a model's outputs may be, becomes the mean over the rows.
    """
    tower = current_tower()
    if tower is None or x is None:
        return x
    if not isinstance(x, tf.Tensor):
        raise TypeError(f"Only dense tensors can be gathered from the towers. Received: {x}")
    if x.dtype == tf.bool:
        return tf.cast(gather_rows(tf.cast(x, tf.int32)), tf.bool)
    if x.shape.rank == 0:
        return cross_tower_sum(x * tower.share(x.dtype))
    _, begin, rows, batch_rows = tower.slice
    rows = tf.maximum(rows, 1)  # An empty slice has borrowed one.
    multiple = tf.shape(x)[0] // rows
    before, after = begin * multiple, (batch_rows - begin - rows) * multiple
    paddings = tf.concat([[[before, after]], tf.zeros([x.shape.rank - 1, 2], tf.int32)], axis=0)
    gathered = cross_tower_sum(tf.pad(x, paddings))
    gathered.set_shape([None, *x.shape[1:]])
    return gathered
