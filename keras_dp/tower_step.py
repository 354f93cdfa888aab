"""What one tower computes: forward, loss and backward, as a function of the variables' values and its slice."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_dp import keras_seams, metrics
from keras_dp.batch_norm import batch_norm_mode
from keras_dp.stamping import refuse_lost_gradients
from keras_dp.towers import SEED_STEP, Tower

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

    def read(self) -> dict[str, list[Tensor]]:
        """The variables' values, each read once, where it lives."""
        return {
            "weights": [_read(variable) for variable in self.weights],
            "state": [_read(variable) for variable in self.state],
            "seeds": [_read(variable) for variable in self.seeds],
        }


class TowerResult(NamedTuple):
    """What one tower hands back; parts that a step does not have are None or empty.

    Attributes:
        y_pred: the model's outputs for the slice.
        annotations: what Keras knows about each of them, see `keras_seams.annotations`.
        loss: the tower's part of the loss of the global batch.
        gradients: K gradients of that part.
        state: new values of the state variables, None where unchanged: weighted with the tower's share of the rows if they
            are floats.
        seeds: new values of the seeds, None where unchanged.
        metrics: what to add to the metrics' variables, None where nothing.
    """

    y_pred: Any
    annotations: Any = None
    loss: Tensor | None = None
    gradients: Sequence[Any] = ()
    state: Sequence[Tensor | None] = ()
    seeds: Sequence[Tensor | None] = ()
    metrics: Sequence[Tensor | None] = ()


class TowerStep:
    """One tower's step, to be traced by `stamp_towers`.

    Args:
        model: the inner model, built.
        variables: its variables.
        compute_loss: one of the functions of `losses`.
        batch_norm: a mode of `batch_norm_mode`.
        gradient_dtype: what gradients are cast to before they leave the tower, None for nothing.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Variables,
        compute_loss: Callable[..., Tensor],
        batch_norm: str,
        gradient_dtype: str | None,
    ):
        self.model = model
        self.variables = variables
        self.compute_loss = compute_loss
        self.batch_norm = batch_norm
        self.gradient_dtype = gradient_dtype

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

    @contextlib.contextmanager
    def _enter(self, tower: Tower, shared: dict[str, Any]) -> Iterator["_TowerScope"]:
        with _TowerScope(self.model, self.variables, tower, shared) as scope, batch_norm_mode(self.batch_norm):
            yield scope

    def _forward(self, scope: "_TowerScope", tower: Tower, training: bool) -> tuple[Any, Tensor]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tower.slice.data)
        y_pred = self._call(x, training)
        scope.refuse_updates_that_do_not_add_up()
        scope.collect_metrics(tower.alive)
        loss = self.compute_loss(self.model, x, y, y_pred, sample_weight, training)
        scope.collect_metrics(tower.share)
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
            "metrics": [tf.zeros(variable.shape, variable.dtype) for variable in variables.metrics],
        }
        pairs = [pair for kind, values in self._values.items() for pair in zip(getattr(variables, kind), values, strict=True)]
        self._scope = keras.StatelessScope(pairs, collect_losses=True)
        self._known = {id(variable) for variable, _ in pairs}
        self._metric_totals: list[Tensor | None] = [None] * len(variables.metrics)

    def __enter__(self) -> "_TowerScope":
        self._scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)

    def refuse_updates_that_do_not_add_up(self) -> None:
        """Refuses metrics that `call` updates, slice by slice, where only the whole batch would do."""
        for metric in self._model.metrics:
            updated = any(
                self._scope.get_current_value(variable) is not before
                for variable, before in zip(self._variables.metrics, self._values["metrics"], strict=True)
                if any(variable is own for own in metric.variables)
            )
            if updated and not metrics.is_additive(metric):
                raise ValueError(
                    f"The metric {metric.name!r} is updated inside call(), where each tower sees its own rows only, and is not "
                    "known to add up over parts of a batch. Give it to compile(metrics=...), or override compute_metrics(): "
                    f"both see the whole batch. Received: {metric}"
                )

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
        self._refuse_updates()
        state = [
            new * self._tower.share(new.dtype) if new is not None and new.dtype.is_floating else new
            for new in self._updates("state")
        ]
        return TowerResult(
            y_pred=y_pred,
            annotations=[keras_seams.annotations(output) for output in keras.tree.flatten(y_pred)],
            loss=loss,
            gradients=list(gradients),
            state=state,
            seeds=self._updates("seeds"),
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

    def _refuse_updates(self) -> None:
        for variable, update in zip(self._variables.weights, self._updates("weights"), strict=True):
            if update is not None:
                raise ValueError(
                    f"The trainable weight {variable.path!r} is updated inside call(), as SpectralNormalization does. Towers "
                    "cannot do that: train the model on one device, or constrain the weight (kernel_constraint=...) instead."
                )
        if set(self._scope.state_mapping) - self._known:
            raise ValueError(
                f"The model {self._model.name!r} updates a keras.Variable that it does not track, so that the update would be "
                "lost. Make it an attribute of the model or of one of its layers (self.add_weight(..., trainable=False))."
            )


def _fold_in(seed: Tensor, index: Tensor) -> Tensor:
    """A different seed for each tower, the seed itself for the first."""
    return seed + tf.cast(index, seed.dtype) * tf.constant([SEED_STEP, 0], seed.dtype)


def _without_borrowed_rows(gradient: Any, tower: Tower) -> Any:
    """The gradient without the row that an empty slice borrows, which would touch the rows of an embedding."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.shape(gradient.indices)[0] * tower.alive(tf.int32)
    return tf.IndexedSlices(gradient.values[:rows], gradient.indices[:rows], gradient.dense_shape)


def _read(variable: keras.Variable) -> Tensor:
    with tf.device(variable.value.device):
        return variable.value.read_value()


def _unique(variables: Any) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())
