"""What one tower computes: forward, loss and backward, as a function of the variables' values and its slice."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp import keras_seams, losses, metrics
from keras_dp.batch_norm import batch_norm_mode
from keras_dp.stamping import refuse_lost_gradients
from keras_dp.sync_batch_norm import batch_norms
from keras_dp.tower_result import TowerResult, Variables
from keras_dp.towers import SEED_STEP, Tower

Tensor = Any


# What TensorFlow says where a number is None. A shape like (None, 4) in an error, on the other hand, is a batch's.
_WORDS_OF_UNKNOWN_ROWS = ("NoneType", "None values not supported", "partially known TensorShape", "Failed to convert elements")


@contextlib.contextmanager
def unknown_rows_explained() -> Iterator[None]:
    """Says, in errors about a None, what may have been None: the number of rows, which models with fixed batches rely on."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if asks_for_rows(error):
            error.add_note(
                "keras_dp: how many rows a tower has is not known while it is traced, also if all batches have the same size. "
                "If the model or the loss asks for x.shape[0], which is None, let it ask for keras.ops.shape(x)[0]."
            )
        raise


def asks_for_rows(error: Exception) -> bool:
    """Whether an error is about a None, as the number of rows is while a step is traced."""
    return any(words in str(error) for words in _WORDS_OF_UNKNOWN_ROWS)


class TowerStep:
    """One tower's step, to be traced by `stamp_towers`.

    Args:
        model: the inner model, built.
        variables: its variables.
        compute_loss: one of the functions of `losses`.
        batch_norm: a mode of `batch_norm_mode`.
        gradient_dtype: what gradients are cast to before they leave the tower, None for nothing.
        jit_compile: whether XLA compiles the tower's operations, in clusters between the sums over the towers.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Variables,
        compute_loss: Callable[..., Tensor],
        batch_norm: str,
        gradient_dtype: str | None,
        jit_compile: bool,
    ):
        self.model = model
        self.variables = variables
        self.compute_loss = compute_loss
        self.batch_norm = batch_norm
        self.gradient_dtype = gradient_dtype
        self.jit_compile = jit_compile

    def train(self, tower: Tower, shared: dict[str, Any]) -> TowerResult:
        """Forward, loss, backward and metrics. `shared` holds the variables' values and the loss scale, None if 1."""
        weights = shared["weights"]
        with self._enter(tower, shared) as scope:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(weights)
                y_pred, loss = self._forward(scope, tower, training=True)
                scaled = loss if shared["loss_scale"] is None else loss * tf.cast(shared["loss_scale"], loss.dtype)
            gradients = tape.gradient(scaled, weights)
            columns = zip(self.variables.weights, weights, gradients, strict=True)
            without = {variable.path: weight for variable, weight, gradient in columns if gradient is None}
            refuse_lost_gradients(scaled, without)
            self._update_metrics(scope, tower, y_pred)
        gradients = [self._on_the_wire(_without_borrowed_rows(gradient, tower)) for gradient in gradients]
        return scope.result(y_pred, loss, gradients)

    def test(self, tower: Tower, shared: dict[str, Any]) -> TowerResult:
        """Forward, loss and metrics."""
        with self._enter(tower, shared) as scope:
            y_pred, loss = self._forward(scope, tower, training=False)
            self._update_metrics(scope, tower, y_pred)
        return scope.result(y_pred, loss)

    def predict(self, tower: Tower, shared: dict[str, Any]) -> TowerResult:
        """Forward."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(tower.slice.data)
        with self._enter(tower, shared) as scope:
            y_pred = self._call(x, training=False)
        return scope.result(y_pred)

    def moments(self, tower: Tower, shared: dict[str, Any]) -> TowerResult:
        """Forward in training mode; the outputs are, for each batch normalization, the `Moments` that its calls took."""
        x, _, _ = keras.utils.unpack_x_y_sample_weight(tower.slice.data)
        with _TowerScope(self.model, self.variables, tower, shared) as scope, batch_norm_mode(self.batch_norm) as taken:
            self._call(x, training=True)
        return scope.result([taken.get(layer, []) for layer in batch_norms(self.model)])

    def trace(self, step: str) -> Callable[[Tower, dict[str, Any]], TowerResult]:
        """The method of this name, to be traced: marked for XLA if the towers are compiled."""

        def traced(tower: Tower, shared: dict[str, Any]) -> TowerResult:
            with tf.xla.experimental.jit_scope() if self.jit_compile else contextlib.nullcontext():
                return getattr(self, step)(tower, shared)

        return traced

    @contextlib.contextmanager
    def _enter(self, tower: Tower, shared: dict[str, Any]) -> Iterator["_TowerScope"]:
        with _TowerScope(self.model, self.variables, tower, shared) as scope, batch_norm_mode(self.batch_norm):
            yield scope

    def _forward(self, scope: "_TowerScope", tower: Tower, training: bool) -> tuple[Any, Tensor]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tower.slice.data)
        with scope.metrics_of_a_slice():
            y_pred = self._call(x, training)
        sees_whole_batch = self.compute_loss is losses.gathered_loss
        with scope.metrics_of_the_batch() if sees_whole_batch else scope.metrics_of_a_slice():
            loss = self.compute_loss(self.model, x, y, y_pred, sample_weight, training)
        return y_pred, loss

    def _on_the_wire(self, gradient: Any) -> Any:
        return gradient if gradient is None or self.gradient_dtype is None else tf.cast(gradient, self.gradient_dtype)

    def _call(self, x: Any, training: bool) -> Any:
        return self.model(x, training=training) if keras_seams.accepts_training(self.model) else self.model(x)

    def _update_metrics(self, scope: "_TowerScope", tower: Tower, y_pred: Any) -> None:
        if metrics.add_up(self.model, y_pred):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tower.slice.data)
            self.model.compute_metrics(x, y, y_pred, sample_weight)
            scope.collect_metrics(tower.alive)


class _Scope(keras.StatelessScope):
    """A `StatelessScope` in which a trainable weight that `call` updates, as SpectralNormalization does, stays trainable.

    A variable's gradient is that of all reads, also of those after an update, and does not go on into what it was updated with.
    """

    def __init__(self, pairs: list[tuple[keras.Variable, Tensor]], weights: list[keras.Variable]):
        super().__init__(pairs, collect_losses=True)
        self._weights = {id(variable) for variable in weights}

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        variable, value = update
        if id(variable) in self._weights:
            before = self.get_current_value(variable)
            value = tf.stop_gradient(value) + (before - tf.stop_gradient(before))
        super().add_update((variable, value))


class _TowerScope:
    """Stands in for the variables: reads give the tower's tensors, updates are kept as results of the tower."""

    def __init__(self, model: keras.Model, variables: Variables, tower: Tower, shared: dict[str, Any]):
        self._model = model
        self._variables = variables
        self._tower = tower
        self._values = {
            "weights": shared["weights"],
            "state": shared["state"],
            "seeds": [_fold_in(seed, tower.index) for seed in shared["seeds"]],
            "metrics": list(shared["metrics"]),
        }
        pairs = [pair for kind, values in self._values.items() for pair in zip(getattr(variables, kind), values, strict=True)]
        self._scope = _Scope(pairs, variables.weights)
        self._known = {id(variable) for variable, _ in pairs}
        self._metric_totals: list[Tensor | None] = [None] * len(variables.metrics)

    def __enter__(self) -> "_TowerScope":
        self._scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)

    @contextlib.contextmanager
    def metrics_of_a_slice(self) -> Iterator[None]:
        """Where metrics may be updated with values of the tower's own rows, or with one value for all of them, a mean."""

        def collect(metric: keras.metrics.Metric, values: list[Any]) -> None:
            if not metrics.is_additive(metric):
                raise ValueError(
                    f"The metric {metric.name!r} is updated where each tower sees its own rows only, and is not known to add "
                    "up over parts of a batch. Give it to compile(metrics=...), or override compute_metrics(): both see "
                    f"the whole batch. Received: {metric}"
                )
            has_rows = any(tf.is_tensor(value) and value.shape.rank != 0 and value.shape[0] is None for value in values)
            self.collect_metrics(self._tower.alive if has_rows else self._tower.share)

        with keras_seams.watched_updates(self._model.metrics, collect):
            yield

    @contextlib.contextmanager
    def metrics_of_the_batch(self) -> Iterator[None]:
        """Where metrics may be updated with the gathered batch, which is the same on every tower."""
        yield
        self.collect_metrics(self._tower.share)

    def collect_metrics(self, coefficient: Callable[[tf.DType], Tensor]) -> None:
        """Takes up what the metrics' variables gained since the last call, times a coefficient of the tower."""
        for i, (variable, before) in enumerate(zip(self._variables.metrics, self._values["metrics"], strict=True)):
            after = self._scope.get_current_value(variable)
            if after is before:
                continue
            # Shares of whole numbers add up to a whole number only as floats.
            dtype = after.dtype if after.dtype.is_floating else tf.float64
            gain = tf.cast(after - before, dtype) * coefficient(dtype)
            total = self._metric_totals[i]
            self._metric_totals[i] = gain if total is None else total + gain
            self._values["metrics"][i] = after

    def result(self, y_pred: Any, loss: Tensor | None = None, gradients: Sequence[Any] = ()) -> TowerResult:
        """The tower's result, with what became of the variables."""
        self._refuse_untracked_updates()
        return TowerResult(
            y_pred=y_pred,
            annotations=[keras_seams.annotations(output) for output in keras.tree.flatten(y_pred)],
            loss=loss,
            gradients=list(gradients),
            weights=[self._shared_out(new) for new in self._updates("weights")],
            state=[self._shared_out(new) for new in self._updates("state")],
            seeds=[None if new is None else _fold_out(new, self._tower.index) for new in self._updates("seeds")],
            metrics=self._metric_totals,
        )

    def _updates(self, kind: str) -> list[Tensor | None]:
        updates = []
        for variable, before in zip(getattr(self._variables, kind), self._values[kind], strict=True):
            after = self._scope.get_current_value(variable)
            if after is not before and after.graph is not before.graph:
                raise ValueError(
                    f"The variable {variable.path!r} is updated inside a loop, a tf.cond branch or a nested tf.function, where "
                    "a tower cannot hand its new value out. Update it at the top level of call(); for dropout inside an RNN "
                    "cell, unroll the RNN (unroll=True) or use a Dropout layer before it."
                )
            updates.append(None if after is before else after)
        return updates

    def _shared_out(self, value: Tensor | None) -> Tensor | None:
        if value is None:
            return None
        if self._tower.is_common(value):
            return self._tower.only_first(value)
        return value * self._tower.share(value.dtype) if value.dtype.is_floating else value

    def _refuse_untracked_updates(self) -> None:
        if set(self._scope.state_mapping) - self._known:
            raise ValueError(
                f"The model {self._model.name!r} updates a keras.Variable that it does not track, so that the update would be "
                "lost. Make it an attribute of the model or of one of its layers (self.add_weight(..., trainable=False))."
            )


def _fold_in(seed: Tensor, index: Tensor) -> Tensor:
    """A different seed for each tower, the seed itself for the first."""
    return seed + tf.cast(index, seed.dtype) * tf.constant([SEED_STEP, 0], seed.dtype)


def _fold_out(seed: Tensor, index: Tensor) -> Tensor:
    """The seed without what was folded in: draws move it on by the same amount on every tower."""
    return seed - tf.cast(index, seed.dtype) * tf.constant([SEED_STEP, 0], seed.dtype)


def _without_borrowed_rows(gradient: Any, tower: Tower) -> Any:
    """The gradient without the row that an empty slice borrows, which would touch the rows of an embedding."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.shape(gradient.indices)[0] * tower.alive(tf.int32)
    return tf.IndexedSlices(gradient.values[:rows], gradient.indices[:rows], gradient.dense_shape)
