"""What towers are given of the variables, what they hand back, and what becomes of it for the global batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_dp import keras_seams, metrics
from keras_dp.batches import Slice
from keras_dp.collectives import Collectives
from keras_dp.towers import Common

Tensor = Any


class Variables(NamedTuple):
    """The Keras variables that a tower sees, each in place of which it gets a tensor.

    Attributes:
        weights: the K trainable weights.
        state: all other variables of the model.
        seeds: states of random generators.
        metrics: the variables of all metrics.
    """

    weights: list[keras.Variable]
    state: list[keras.Variable]
    seeds: list[keras.Variable]
    metrics: list[keras.Variable]

    @classmethod
    def of(cls, model: keras.Model) -> "Variables":
        """The variables of a built model."""
        weights = _unique(model.trainable_weights)
        seeds = _unique(keras_seams.seed_states(model))
        taken = {id(variable) for variable in weights + seeds}
        state = [variable for variable in _unique(model.variables) if id(variable) not in taken]
        return cls(weights, state, seeds, _unique(v for metric in model.metrics for v in metric.variables))

    def native(self) -> list[tf.Variable]:
        """The `tf.Variable`s behind all of them."""
        return [variable.value for kind in self for variable in kind]

    def read(self, model: keras.Model) -> dict[str, list[Tensor]]:
        """The variables' values, each read once, where it lives. Metrics whose states add up start from zero."""
        from_zero = {id(v) for metric in model.metrics if metrics.is_additive(metric) for v in metric.variables}
        with tf.name_scope("weights"):
            weights = [_read(variable) for variable in self.weights]
        return {
            "weights": weights,
            "state": [_read(variable) for variable in self.state],
            "seeds": [_read(variable) for variable in self.seeds],
            "metrics": [tf.zeros(v.shape, v.dtype) if id(v) in from_zero else _read(v) for v in self.metrics],
        }


class TowerResult(NamedTuple):
    """What one tower hands back; parts that a step does not have are None or empty.

    Attributes:
        y_pred: the model's outputs for the slice.
        annotations: what Keras knows about each of them, see `keras_seams.annotations`.
        loss: the tower's part of the loss of the global batch.
        gradients: K gradients of that part.
        weights: new values of the K trainable weights, None where unchanged, which is the rule: weighted with the tower's share
            of the rows.
        state: new values of the state variables, None where unchanged: weighted as well if they are floats.
        seeds: new values of the seeds, None where unchanged.
        metrics: what to add to the metrics' variables, None where nothing.
    """

    y_pred: Any
    annotations: Any = None
    loss: Tensor | None = None
    gradients: Sequence[Any] = ()
    weights: Sequence[Tensor | None] = ()
    state: Sequence[Tensor | None] = ()
    seeds: Sequence[Tensor | None] = ()
    metrics: Sequence[Tensor | None] = ()


def combine(variables: Variables, towers: list[TowerResult], slices: Sequence[Slice], collectives: Collectives) -> TowerResult:
    """What the global batch does to losses, state, seeds and metrics, each where its variable lives.

    Args:
        variables: those of the model.
        towers: the results of the N towers of this worker.
        slices: the N slices that they were given.
        collectives: of the workers.
    """

    def of_kind(kind: str) -> list[Any]:
        combined = []
        for variable, *values in zip(getattr(variables, kind), *(getattr(tower, kind) for tower in towers), strict=True):
            with tf.device(variable.value.device):
                combined.append(_combine_values(values, slices))
        return combined

    own = TowerResult(
        y_pred=None,
        loss=_combine_values([tower.loss for tower in towers], slices),
        weights=of_kind("weights"),
        state=of_kind("state"),
        metrics=of_kind("metrics"),
    )
    leaves = tf.nest.flatten(own)
    sums = collectives.sum_all([None if isinstance(leaf, Common) else leaf for leaf in leaves])
    totals = [leaf.value if isinstance(leaf, Common) else total for leaf, total in zip(leaves, sums, strict=True)]
    # Every tower leaves the seeds as one device would.
    return tf.nest.pack_sequence_as(own, totals)._replace(seeds=towers[0].seeds)


def _combine_values(values: Sequence[Any], slices: Sequence[Slice]) -> Any:
    """Shares add up; whole numbers and flags, which are not shared out, are those of the tower that has the last rows."""
    first, last = values[0], values[-1]
    if first is None or isinstance(first, Common):
        return first
    if first.dtype.is_floating:
        return tf.add_n(values)
    return of_last_rows(last, slices)


def of_last_rows(value: Tensor, slices: Sequence[Slice]) -> Tensor:
    """A value of this worker's last tower, if that has the last rows of the global batch; 0 on all other workers."""
    has_last = tf.logical_and(slices[-1].rows > 0, slices[-1].begin + slices[-1].rows == slices[-1].batch_rows)
    return tf.where(has_last, value, tf.zeros_like(value))


def assign(variables: Variables, total: TowerResult) -> None:
    """Updates the variables that the towers updated."""
    updated = variables.weights + variables.state + variables.seeds
    for variable, value in zip(updated, [*total.weights, *total.state, *total.seeds], strict=True):
        if value is not None:
            variable.assign(value)


def all_or_nothing(updates: Any) -> Any:
    """The same nested tensors, each where it is, once all are computed: a step that fails half-way changes no weight."""

    def hold(leaf: Tensor | None) -> Tensor | None:
        if leaf is None:
            return None
        with tf.device(leaf.device):
            return tf.identity(leaf)

    leaves = tf.nest.flatten(updates, expand_composites=True)
    with tf.control_dependencies([tf.group(*(leaf for leaf in leaves if leaf is not None))]):
        return tf.nest.map_structure(hold, updates, expand_composites=True)


def _read(variable: keras.Variable) -> Tensor:
    with tf.device(variable.value.device):
        return variable.value.read_value()


def _unique(variables: Any) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())
