"""Losses normalized by the global batch.

Every tower computes the model's loss L_i and weights it with its share of the rows, b_i / B. The weighted losses of all towers
add up to the loss of the global batch, because the three parts of L_i are made so:

- a compiled loss, split by rows, is sum_i / D * B / b_i, with the true global denominator D (elements, valid mask entries
  or sum of sample weights, as the loss's reduction says);
- a compiled loss on the gathered batch is the whole batch's loss on every tower;
- weight regularizers have the same value on every tower, activity regularizers are means over rows, and `add_loss` is taken
  for such a mean if it is given a scalar, and for a sum over rows if it is given a value for each.
"""

import inspect
from typing import Any

import keras
import tensorflow as tf

from keras_dp import keras_seams
from keras_dp.towers import cross_tower_sum, gather_rows, tower_in_trace

Tensor = Any

# Circle compares the rows of a batch with each other, Dice and Tversky reduce over them, the hinges decide by all labels of the
# batch whether these are 0 and 1, and the generalized crossentropy pairs all labels with all rows.
_COUPLE_ROWS = {
    *("Circle", "Dice", "Tversky", "Hinge", "SquaredHinge", "CategoricalGeneralizedCrossEntropy"),
    *("circle", "dice", "tversky", "hinge", "squared_hinge", "categorical_generalized_cross_entropy"),
}
_ROWWISE = {value for name, value in vars(keras.losses).items() if callable(value) and value.__name__ not in _COUPLE_ROWS}


class NotSplitByRowsError(Exception):
    """A loss turned out to have no value for each row, so that it needs the gathered batch."""


def split_by_rows(model: keras.Model) -> bool:
    """Whether every compiled loss is known to compute each row's value from that row alone.

    True for almost all losses of Keras under the default `compute_loss`. What users write themselves may couple the rows of
    a batch without showing it: an in-batch contrastive loss returns one value for each row, too.
    """
    if overrides_compute_loss(model):
        return False
    return all(_is_rowwise(loss) for loss in keras.tree.flatten(model.loss) if loss is not None)


def overrides_compute_loss(model: keras.Model) -> bool:
    """Whether the model computes its loss in a way of its own."""
    return getattr(model.compute_loss, "__func__", None) is not keras.Model.compute_loss


def _is_rowwise(loss: Any) -> bool:
    if isinstance(loss, str):
        return loss.lower() in ("crossentropy", "ce") or _is_rowwise(keras.losses.get(loss))
    if not isinstance(loss, keras.losses.Loss):
        return inspect.isfunction(loss) and loss in _ROWWISE
    return type(loss) in _ROWWISE and loss.reduction not in (None, "none") and keras_seams.reduces_last_axis(loss)


def rowwise_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Tensor:
    """The tower's part of the global loss, from its own rows. Over all towers the results add up to the loss.

    Raises:
        NotSplitByRowsError: if a loss has no value for each row.
    """
    with keras_seams.replaced_loss_reduction(_reduce_over_global_batch):
        return _weighted_with_share(model, x, y, y_pred, sample_weight, training)


def tower_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Tensor:
    """As `rowwise_loss`, but a loss without a value for each row is taken for a mean over the tower's rows."""

    def reduce_or_keep(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        try:
            return _reduce_over_global_batch(values, *args, **kwargs)
        except NotSplitByRowsError:
            kept = keras_seams.reduce_weighted_values(values, *args, **kwargs)
            if kept.shape.rank != 0:
                raise ValueError(
                    'loss_scope="tower" takes a loss that is not reduced over the rows for a mean of them. Give the loss a '
                    f'reduction, or use loss_scope="auto". Received: a loss of shape {kept.shape}'
                ) from None
            return kept

    with keras_seams.replaced_loss_reduction(reduce_or_keep):
        return _weighted_with_share(model, x, y, y_pred, sample_weight, training)


def gathered_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool) -> Tensor:
    """The tower's part of the global loss, from all B rows, for losses that need them. Same arguments as `rowwise_loss`."""
    if overrides_compute_loss(model):
        x = _gather(x)
    return _weighted_with_share(model, x, _gather(y), _gather(y_pred), _gather(sample_weight), training)


def _gather(batch: Any) -> Any:
    def gather(leaf: Any) -> Any:
        notes = {name: gather_rows(note) for name, note in keras_seams.annotations(leaf).items()}
        return keras_seams.annotate(gather_rows(leaf), notes)

    return keras.tree.map_structure(lambda leaf: None if leaf is None else gather(leaf), batch)


def _weighted_with_share(model: keras.Model, *batch: Any) -> Tensor:
    """The model's loss times b / B; for what layers gave to `add_loss`, too."""
    with keras_seams.replaced_added_loss(_added_loss):
        loss = keras_seams.call_compute_loss(model, *batch)
    return loss * tower_in_trace().share(loss.dtype)


def _added_loss(values: Tensor) -> Tensor:
    """What Keras takes `add_loss(values)` for, their sum; times B / b if there is a value for each row."""
    if not values.dtype.is_floating:
        values = tf.cast(values, keras.config.floatx())
    total = tf.reduce_sum(values)
    has_rows = values.shape.rank != 0 and values.shape[0] is None
    return tf.math.divide_no_nan(total, tower_in_trace().share(total.dtype)) if has_rows else total


def _reduce_over_global_batch(
    values: Tensor,
    sample_weight: Tensor | None = None,
    mask: Tensor | None = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: str | None = None,
) -> Tensor:
    """Keras's `reduce_weighted_values` with global denominators, times B / b.

    Numerators and denominators are Keras's own sums, so that shapes broadcast and masks merge with weights as there.
    """
    values = tf.convert_to_tensor(values)
    if values.shape.rank == 0 or values.shape[0] is not None or reduction in (None, "none"):
        raise NotSplitByRowsError
    if sample_weight is not None and _differ_in_rank(values, tf.convert_to_tensor(sample_weight)):
        raise NotSplitByRowsError  # Rows then meet other axes, which Keras refuses unless they happen to be as long.
    local_sum = keras_seams.reduce_weighted_values

    def ones_like(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tf.ones_like(tensor, dtype=values.dtype)

    total = local_sum(values, sample_weight=sample_weight, mask=mask, reduction="sum", dtype=dtype)
    factor = tf.ones((), total.dtype)
    if reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
        merged, mask = (sample_weight, mask) if sample_weight is not None else (mask, None)
        denominator = cross_tower_sum(local_sum(merged, mask=mask, reduction="sum", dtype=dtype))
    elif reduction != "sum":
        weights = ones_like(sample_weight if sample_weight is not None else mask)
        denominator = cross_tower_sum(local_sum(ones_like(values), sample_weight=weights, reduction="sum", dtype=dtype))
        if mask is not None:
            entries = cross_tower_sum(tf.cast(tf.size(mask), total.dtype))
            factor = tf.math.divide_no_nan(entries, cross_tower_sum(tf.reduce_sum(tf.cast(mask, total.dtype))))
    else:
        denominator = tf.ones((), total.dtype)
    return tf.math.divide_no_nan(total * factor, denominator * tower_in_trace().share(total.dtype))


def _differ_in_rank(values: Tensor, sample_weight: Tensor) -> bool:
    """Whether one has an axis more than the other that Keras does not squeeze."""
    longer, shorter = sorted((values.shape, sample_weight.shape), key=len, reverse=True)
    return bool(len(longer) != len(shorter) and not (len(longer) == len(shorter) + 1 and longer[-1] == 1))
