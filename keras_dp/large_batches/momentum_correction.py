"""Scale the velocity of SGD when the learning rate changes."""

import operator
import warnings
from collections.abc import Callable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import keras
import tensorflow as tf

from keras_dp.devices import variable_homes
from keras_dp.keras_internals import keras_optimizers
from keras_dp.keras_internals.keras_optimizers import innermost_optimizers


class Velocity:
    """Corrects the velocity v of an optimizer that keeps the learning rate η inside: v <- m v - η g.

    The velocity v sums up gradients times the rates of their own steps. Most analyses use a velocity u that sums up gradients
    alone (u <- m u + g, w <- w - η u), so that a new rate acts on all of u at once. For the same effect, v must be multiplied
    by η_new / η_old when the rate changes (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 3, remark 2, "Apply
    momentum correction after changing learning rate if using (10)").

    Args:
        optimizer: an innermost Keras optimizer.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self._optimizer = ref(optimizer)
        self._rate: float | None = None
        self._end: int | None = None
        self._multiplied: list[Any] = []
        self._multiply: Callable[[Any], None] = _nothing

    @classmethod
    def of(cls, optimizer: keras.optimizers.Optimizer) -> "Velocity":
        """Returns the only velocity of an optimizer, so that two callbacks correct it once for one change of the rate."""
        return _velocities.setdefault(optimizer, cls(optimizer))

    def begin(self) -> None:
        """Begins training; forgets the rate of the last step, unless training resumes at the step where it ended."""
        if self._end != self._steps():
            self._rate = None

    def end(self) -> None:
        """Notes the step at which training ends."""
        self._end = self._steps()

    def follow(self, new_rate: float, last_rate: Callable[[], float]) -> None:
        """Corrects the velocity for the rate of the next step.

        Args:
            new_rate: the rate of the next step.
            last_rate: a function that returns the rate of the last step; called if that rate is not known.
        """
        rate = last_rate() if self._rate is None else self._rate
        self._rate = new_rate
        # A rate of 0 made the velocity 0, which no factor can undo.
        if new_rate == rate or rate == 0:
            return
        velocities = [velocity.value for velocity in keras_optimizers.velocities(self._optimizer()) or []]
        if len(velocities) != len(self._multiplied) or any(map(operator.is_not, velocities, self._multiplied)):
            self._multiplied, self._multiply = velocities, _multiplication(velocities)
        self._multiply(tf.constant(new_rate / rate, tf.float64))

    def _steps(self) -> int:
        return int(keras_optimizers.batches_seen(self._optimizer()))


_velocities: MutableMapping[keras.optimizers.Optimizer, Velocity] = WeakKeyDictionary()


class Rate:
    """Finds the learning rates of an optimizer's last and next step.

    Attributes:
        optimizer: the optimizer.
        schedule: the schedule of its rate; None if a variable holds the rate.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self.optimizer = optimizer
        self.schedule = keras_optimizers.learning_rate_schedule(optimizer)
        self._steps = keras_optimizers.batches_seen(optimizer)
        # Run eagerly, a schedule takes milliseconds.
        self._at = tf.function(self.schedule or _nothing, reduce_retracing=True)
        self._note()

    def note_restored(self) -> None:
        """Notes the rate again, if the optimizer is at another step than at the last note."""
        if int(self._steps) != self._noted_at:
            self._note()

    def _note(self) -> None:
        self._noted_at = int(self._steps)
        self._noted = float(self.optimizer.learning_rate) if self.schedule is None else 0.0

    def last(self) -> float:
        """Returns the rate of the last step; if a variable holds the rate, of the last step before the note."""
        return self._noted if self.schedule is None else float(self._at(tf.maximum(self._steps.value - 1, 0)))

    def next(self) -> float:
        """Returns the rate of the next step."""
        return float(self.optimizer.learning_rate if self.schedule is None else self._at(tf.identity(self._steps.value)))


def without_velocity(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Returns the reason why an optimizer has no velocity that holds the learning rate; None if it has one."""
    if keras_optimizers.velocities(optimizer) is None:
        return (
            f"{type(optimizer).__name__} keeps no velocity that the learning rate is part of. In Adam and similar "
            "optimizers, the rate multiplies averages of gradients when they are applied: a new rate acts on them at once."
        )
    if not optimizer.momentum:
        return f"{type(optimizer).__name__} was made without momentum."
    return None


def _multiplication(velocities: list[Any]) -> Callable[[Any], None]:
    @tf.function(autograph=False)
    def multiply(factor: Any) -> None:
        with variable_homes.beside_inputs():
            for velocity in velocities:
                # In 16 bits, a factor near 1 would be rounded to 1.
                wide = velocity.dtype if velocity.dtype.size > 2 else tf.float32
                velocity.assign(tf.cast(tf.cast(velocity, wide) * tf.cast(factor, wide), velocity.dtype))

    return multiply


def _nothing(*_: Any) -> None:
    pass


class MomentumCorrection(keras.callbacks.Callback):
    """Multiplies the velocity of SGD by η_new / η_old whenever the learning rate changes from η_old to η_new.

    Keras's SGD, with and without Nesterov momentum, keeps the learning rate inside its velocity, v <- m v - η g. So a new rate
    takes about 1 / (1 - m) steps to act. With the correction it acts at once, as in the reference u <- m u + g, w <- w - η u
    (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 3, remark 2). The same holds for `LARS`, and for RMSprop with
    momentum. `LearningRateWarmup` makes the correction itself.

    >>> import keras, keras_dp, numpy as np
    >>> parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=1)
    >>> parallel.compile(keras.optimizers.SGD(0.25, momentum=0.9), "mse")
    >>> halving = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    >>> callbacks = [halving, keras_dp.callbacks.MomentumCorrection()]
    >>> data = np.ones((8, 4)), np.ones((8, 1))
    >>> parallel.fit(*data, epochs=2, callbacks=callbacks, verbose=0).history["learning_rate"]
    [0.125, 0.0625]

    Give it as the last callback. It corrects for changes by earlier callbacks, by the optimizer's schedule, and between two
    calls of `fit`. A rate of 0 erases the velocity. If the optimizer has no velocity, or its velocity does not hold the rate
    (Adam), the callback does nothing and warns why.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the rate of the last step, if training resumes.

        Raises:
            ValueError: if a schedule changes the rate between steps that are executed together.
        """
        optimizers = innermost_optimizers(self.model.optimizer)
        reasons = [without_velocity(optimizer) for optimizer in optimizers]
        self._rates = [Rate(optimizer) for optimizer, reason in zip(optimizers, reasons, strict=True) if reason is None]
        if not self._rates:
            warnings.warn(f"MomentumCorrection does nothing: {' '.join(filter(None, reasons))}", stacklevel=2)
        if self.model.steps_per_execution > 1 and any(rate.schedule is not None for rate in self._rates):
            raise ValueError(
                "MomentumCorrection cannot correct between steps that are executed together, and the schedule changes the "
                "learning rate between them. Compile with steps_per_execution=1, or set the rate with callbacks. "
                f"Received: steps_per_execution={self.model.steps_per_execution}"
            )
        for rate in self._rates:
            Velocity.of(rate.optimizer).begin()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the rate again, if a callback has restored the optimizer."""
        for rate in self._rates:
            rate.note_restored()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Corrects the velocity, if the next step has another rate than the last one."""
        for rate in self._rates:
            Velocity.of(rate.optimizer).follow(rate.next(), rate.last)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the step at which training ends, since it may resume later."""
        for rate in self._rates:
            Velocity.of(rate.optimizer).end()
