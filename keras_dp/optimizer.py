"""Define DataParallelOptimizer, which applies the user's optimizer once, on the parameter device."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp import choices
from keras_dp.choices import refuse_unknown
from keras_dp.devices import variable_homes
from keras_dp.devices.available import existing_device
from keras_dp.keras_internals import keras_optimizers
from keras_dp.keras_internals.keras_optimizers import innermost
from keras_dp.keras_internals.replacing import replaced
from keras_dp.large_batches.accumulation import AccumulatedRows, scale
from keras_dp.partition.own import own_part, total_of_own
from keras_dp.workers.collectives import OneWorker
from keras_dp.workers.group import current_workers
from keras_dp.wrapping.one_state import Behind, Front, OwnName, own_of, with_state_of
from keras_dp.wrapping.refusals import refuse_keras_2

Tensor = Any
Gradient = Any


class Combining:
    """Applies gradients with an optimizer of the user's, where each variable lives.

    Args:
        inside: the optimizer.
        parameter_device: see `DataParallelOptimizer` for this argument and the next one.
        accumulate: how gradients are averaged.
    """

    def __init__(
        self,
        inside: keras.optimizers.Optimizer,
        parameter_device: str | None = None,
        accumulate: choices.Accumulation = "batches",
    ):
        self.inside = inside
        self.parameter_device = parameter_device
        self.accumulate = accumulate
        self._rows = AccumulatedRows(innermost(inside)) if accumulate == "rows" else None

    @classmethod
    def of(cls, optimizer: keras.optimizers.Optimizer) -> "Combining":
        """Returns how an optimizer applies gradients."""
        return own_of(optimizer) if isinstance(optimizer, DataParallelOptimizer) else cls(optimizer)

    def wrap(self, optimizer: keras.optimizers.Optimizer) -> "DataParallelOptimizer":
        """Returns another optimizer, wrapped with the same arguments."""
        return DataParallelOptimizer(optimizer, self.parameter_device, accumulate=self.accumulate)

    def apply(
        self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None, rows: Tensor | None = None
    ) -> Any:
        """Applies gradients; see `DataParallelOptimizer.apply_tower_gradients`."""
        inside = self.inside
        with variable_homes.beside_inputs(), keras_optimizers.reduced_gradients(inside):
            if self._rows is not None:
                if trainable_variables is not None and not inside.built:
                    inside.build(trainable_variables)
                skips_infinite = isinstance(inside, keras.optimizers.LossScaleOptimizer)
                variables = [None] * len(grads) if trainable_variables is None else trainable_variables
                grads = self._rows.weight(grads, variables, rows, skips_infinite)
            return inside.apply(grads, trainable_variables)

    @contextlib.contextmanager
    def in_step(self, rows: Tensor | None) -> Iterator[None]:
        """Makes a step that is traced apply gradients so, whether it calls the optimizer or the one around it.

        Args:
            rows: B, the number of rows in the global batch, for `accumulate="rows"`.
        """
        own = self.inside.apply

        def apply(grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None) -> Any:
            if trainable_variables is not None:
                grads = [_beside(gradient, variable) for gradient, variable in zip(grads, trainable_variables, strict=True)]
            with replaced(self.inside, "apply", own):
                return self.apply(grads, trainable_variables, rows)

        with replaced(self.inside, "apply", apply):
            yield


class _InFront(Front):
    """Stands in front of the class of the user's optimizer."""

    __slots__ = ()

    @tf.autograph.experimental.do_not_convert
    def apply(
        self, grads: Sequence[Gradient], trainable_variables: Sequence[Any] | None = None, rows: Tensor | None = None
    ) -> Any:
        """Applies gradients with the user's optimizer, where each variable lives; `rows` as in `apply_tower_gradients`."""
        return own_of(self).apply(grads, trainable_variables, rows)


class DataParallelOptimizer(Behind, keras.optimizers.Optimizer):
    """Applies the gradient of the global batch once, on the parameter device, with any Keras optimizer.

    `DataParallelModel.compile` wraps its optimizer in one. In the model's step, the towers' parts of each gradient are summed
    where the variable lives, by the exchange that sums everything else, and `apply` gets the sum. Your own training loop has no
    such step: `apply_tower_gradients` sums the gradients that you computed on each device, and applies them.

    >>> import keras, keras_dp
    >>> weight = keras.Variable([1.0, 2.0])
    >>> optimizer = keras_dp.DataParallelOptimizer(keras.optimizers.SGD(0.5))
    >>> optimizer.apply_tower_gradients([[[1.0, 0.0]], [[1.0, 1.0]]], [weight])
    >>> weight.numpy().tolist()
    [0.0, 1.5]

    The inner optimizer works on the combined gradient as on one device: clipping, accumulation, loss scaling, moving averages
    and weight decay. This optimizer is of its class, too, and all its attributes are the same.

    Args:
        inner_optimizer: a `keras.optimizers.Optimizer`, or its name.
        parameter_device: the device where gradients are summed, such as "GPU:0"; None sums each where its variable lives.
        accumulate: how an optimizer with `gradient_accumulation_steps` averages gradients. "batches" is Keras's own mean over
            the batches, in which a batch with fewer rows counts as much as the others. "rows" is the mean weighted by rows,
            which is the gradient of all rows as one batch, if the loss is a mean over rows. It is not saved with a model.

    Raises:
        ValueError: if `accumulate` is unknown, or is "rows" for an optimizer that does not accumulate.
    """

    _keras_dp: Combining

    def __new__(cls, inner_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes an optimizer of the user's class, too."""
        refuse_keras_2("optimizer", inner_optimizer)
        optimizer = keras.optimizers.get(inner_optimizer)
        if isinstance(optimizer, DataParallelOptimizer):
            raise ValueError("The optimizer is a DataParallelOptimizer already. Wrap the Keras optimizer inside it only once.")
        made = with_state_of(optimizer, _InFront, cls)
        made._keras_dp = Combining(optimizer)
        return made

    def __init__(self, inner_optimizer: Any, parameter_device: str | None = None, accumulate: choices.Accumulation = "batches"):
        refuse_unknown("accumulate", accumulate, choices.Accumulation)
        inside = own_of(self).inside
        if accumulate == "rows" and not innermost(inside).gradient_accumulation_steps:
            raise ValueError(
                'accumulate="rows" weights the batches that one optimizer accumulates. This optimizer accumulates none, or is '
                "made of several. Give a single optimizer with gradient_accumulation_steps. "
                f"Received: inner_optimizer={inside!r}"
            )
        device = None if parameter_device is None else existing_device(parameter_device)
        self._keras_dp = Combining(inside, device, accumulate)

    @OwnName
    def inner_optimizer(self) -> keras.optimizers.Optimizer:
        """The user's optimizer. In mixed precision it is inside a `LossScaleOptimizer`, whose `inner_optimizer` it is, too."""
        return own_of(self).inside

    @OwnName
    def parameter_device(self) -> str | None:
        """The device where gradients are summed; None sums each where its variable lives."""
        return own_of(self).parameter_device

    @OwnName
    def accumulate(self) -> choices.Accumulation:
        """How an optimizer with `gradient_accumulation_steps` averages gradients."""
        return own_of(self).accumulate

    @tf.autograph.experimental.do_not_convert
    def apply_tower_gradients(
        self,
        tower_gradients: Sequence[Sequence[Gradient]],
        variables: Sequence[Any],
        reduction: choices.Reduction = "sum",
        rows: Tensor | None = None,
    ) -> None:
        """Combines the N x K gradients of each worker, and applies them to K variables.

        Args:
            tower_gradients: N lists, one for each tower, of K gradients: tensors, `tf.IndexedSlices`, or None where the
                tower's loss does not depend on the variable.
            variables: K variables, as `keras.Variable` or `tf.Variable`.
            reduction: "sum" for losses that are normalized by the global batch, so that the towers' losses add up to the
                whole, as in `DataParallelModel`. "mean" for losses that are means over a tower's own rows, if all towers have
                equally many rows.
            rows: B, the number of rows in the global batch, for `accumulate="rows"`.

        Raises:
            ValueError: if the lists do not match, the reduction is unknown, or `accumulate="rows"` and `rows` is None.
        """
        own_of(self).apply(DataParallelOptimizer.combine(self, tower_gradients, variables, reduction), variables, rows)

    @tf.autograph.experimental.do_not_convert
    def combine(
        self,
        tower_gradients: Sequence[Sequence[Gradient]],
        variables: Sequence[Any],
        reduction: choices.Reduction = "sum",
    ) -> list[Gradient]:
        """Returns the K gradients of the global batch from N x K gradients; see `apply_tower_gradients`."""
        workers = current_workers()
        refuse_unknown("reduction", reduction, choices.Reduction)
        lengths = [len(gradients) for gradients in tower_gradients]
        if not lengths or set(lengths) != {len(variables)}:
            raise ValueError(
                "`tower_gradients` must hold one list for each tower, with one gradient for each variable. "
                f"Received: lists of {lengths} gradients for {len(variables)} variables."
            )
        combined = []
        for variable, *gradients in zip(variables, *tower_gradients, strict=True):
            with tf.device(own_of(self).parameter_device or variable_homes.home(variable)), tf.name_scope("gradients"):
                if getattr(variable, "overwrite_with_gradient", False):
                    combined.append(_largest(gradients))
                    continue
                total = sum_gradients([_cast(gradient, variable.dtype) for gradient in gradients])
                parts = len(gradients) * workers.count
                combined.append(
                    total if total is None or reduction == "sum" else scale(total, tf.constant(1 / parts, tf.float64))
                )
        return sum_over_workers(combined, variables, workers.collectives)


# `inspect.signature` and documentation show the arguments.
DataParallelOptimizer.__new__.__wrapped__ = DataParallelOptimizer.__init__  # type: ignore[attr-defined]


@contextlib.contextmanager
def sending_gradients_as(dtype: str | None, optimizers: Sequence[keras.optimizers.Optimizer]) -> Iterator[None]:
    """Makes a step that is traced send the gradients of `optimizers` in another dtype; None keeps their own dtype."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers if dtype is not None else ():

            def apply(grads: Sequence[Gradient], *variables: Any, own: Any = optimizer.apply, **named: Any) -> Any:
                return own([_sent_as(gradient, dtype) for gradient in grads], *variables, **named)

            stack.enter_context(replaced(optimizer, "apply", apply))
        yield


def _beside(gradient: Gradient, variable: Any) -> Gradient:
    """Copies a dense gradient to its variable's device, and returns any other unchanged."""
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return gradient
    with tf.device(variable_homes.home(variable)):
        return tf.identity(gradient)


def _sent_as(gradient: Gradient, dtype: str | None) -> Gradient:
    """Casts a gradient so that the towers send their parts in another dtype."""
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(tf.cast(gradient.values, dtype), gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if gradient is None:
        return None
    gradient = tf.convert_to_tensor(gradient)
    return total_of_own(tf.cast(tf.cast(own_part(gradient), dtype), gradient.dtype))


def sum_gradients(gradients: Sequence[Gradient]) -> Gradient:
    """Sums N gradients of one variable; returns None if all are None.

    `tf.IndexedSlices` are concatenated, not made dense: lazy optimizers update only the rows that occur.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
        values = tf.concat([gradient.values for gradient in present], axis=0)
        indices = tf.concat([gradient.indices for gradient in present], axis=0)
        if all(_names_rows_once(gradient.indices) for gradient in present):
            values, indices = _add_up_rows(values, indices)
        return tf.IndexedSlices(values, indices, present[0].dense_shape)
    dense = [tf.convert_to_tensor(gradient) for gradient in present]
    # add_n takes three and more in any order, and would round otherwise each time.
    return tf.add_n(dense) if len(dense) <= 2 else tf.reduce_sum(tf.stack(dense), 0)


def sum_over_workers(gradients: Sequence[Gradient], variables: Sequence[Any], collectives: OneWorker) -> list[Gradient]:
    """Sums K gradients over the workers; sparse gradients are concatenated, as in `sum_gradients`."""
    if collectives.count == 1:
        return list(gradients)

    def is_summed(gradient: Gradient, variable: Any) -> bool:
        is_dense = gradient is not None and not isinstance(gradient, tf.IndexedSlices)
        return is_dense and not getattr(variable, "overwrite_with_gradient", False)

    columns = list(zip(gradients, variables, strict=True))
    sums = collectives.sum_all([g if is_summed(g, variable) else None for g, variable in columns])
    for i, (gradient, _) in enumerate(columns):
        if isinstance(gradient, tf.IndexedSlices):
            sums[i] = _gather_slices(gradient, collectives)
        elif gradient is not None and sums[i] is None:
            ones = tf.ones([collectives.count], tf.int32)
            sums[i] = tf.reduce_max(collectives.gather(gradient[tf.newaxis], ones), axis=0)
    return sums


def _gather_slices(gradient: tf.IndexedSlices, collectives: OneWorker) -> tf.IndexedSlices:
    counts = collectives.counts(tf.shape(gradient.indices)[0])
    values, indices = collectives.gather(gradient.values, counts), collectives.gather(gradient.indices, counts)
    if _names_rows_once(gradient.indices):
        values, indices = _add_up_rows(values, indices)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _add_up_rows(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Adds up the rows that have the same index, so that each index occurs once."""
    indices, places = tf.unique(indices)
    return tf.math.unsorted_segment_sum(values, places, tf.size(indices)), indices


def _names_rows_once(indices: Tensor) -> bool:
    """Returns whether the indices of a gradient are unique by construction.

    They are for matrices of sparse inputs (`tf.nn.embedding_lookup_sparse`), but not for embeddings. The difference matters:
    optimizers square the values of a row before they add them up.
    """
    if not tf.is_symbolic_tensor(indices):
        return False
    operation = indices.op
    while operation.type in ("Reshape", "Identity", "StridedSlice", "Cast", "GatherV2", "ResourceGather"):
        operation = operation.inputs[0].op
    return operation.type in ("Unique", "UniqueV2")


def _largest(values: Sequence[Gradient]) -> Gradient:
    """Returns the largest of gradients that overwrite a variable: float8's magnitudes, and the scales computed from them."""
    present = [value for value in values if value is not None]
    return tf.reduce_max(tf.stack(present), axis=0) if present else None


def _cast(gradient: Gradient, dtype: Any) -> Gradient:
    if gradient is None or not tf.is_tensor(gradient) or gradient.dtype == dtype:
        return gradient
    return tf.cast(gradient, dtype)
