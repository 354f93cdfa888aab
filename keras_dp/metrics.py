"""Exact metrics over towers: states that add up are summed, all others are updated once with the whole batch."""

from typing import Any

import keras

from keras_dp import keras_seams

Tensor = Any

# The hinges decide by all labels of a batch whether these are 0 and 1; a user's function may do anything with its batch.
_COUPLE_ROWS = {"Metric", "MeanMetricWrapper", "Hinge", "SquaredHinge"}
_ADDITIVE = {
    value
    for name, value in vars(keras.metrics).items()
    if isinstance(value, type) and issubclass(value, keras.metrics.Metric) and value.__name__ not in _COUPLE_ROWS
}


def is_additive(metric: keras.metrics.Metric) -> bool:
    """Whether the states of a metric over parts of a batch add up to its state over the batch: so for those of Keras."""
    return type(metric) in _ADDITIVE and keras_seams.reduces_last_axis(metric)


def overrides_compute_metrics(model: keras.Model) -> bool:
    """Whether the model computes its metrics in a way of its own."""
    return getattr(model.compute_metrics, "__func__", None) is not keras.Model.compute_metrics


def add_up(model: keras.Model, y_pred: Any) -> bool:
    """Whether all compiled metrics may be updated on each tower's own rows.

    Outputs of rank 1 leave the functions of Keras, which reduce the last axis, with no value for each row.
    """
    if overrides_compute_metrics(model):
        return False
    compiled = keras_seams.compile_metrics(model)
    if compiled is None:
        return True
    ranks = [output.shape.rank for output in keras.tree.flatten(y_pred)]
    return min(ranks) > 1 and all(is_additive(metric) for metric in compiled.metrics)
