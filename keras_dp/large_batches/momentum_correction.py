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
    """The velocity v of an optimizer that keeps the learning rate η inside: v <- m v - η g.

    The velocity sums up gradients times the rates of their own steps. Written with a velocity u that sums up gradients alone
    (u <- m u + g, w <- w - η u), as most analyses have it, a new rate acts on all of u at once. To have that, v must be
    multiplied by η_new / η_old when the rate changes (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 3,
    remark 2, "Apply momentum correction after changing learning rate if using (10)").

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
        """The one velocity of an optimizer: who corrects it twice for one change, corrects it once."""
        return _velocities.setdefault(optimizer, cls(optimizer))

    def begin(self) -> None:
        """Training begins; if not where it ended, nothing is known of the rate of the last step."""
        if self._end != self._steps():
            self._rate = None

    def end(self) -> None:
        """Training ends."""
        self._end = self._steps()

    def follow(self, new_rate: float, last_rate: Callable[[], float]) -> None:
        """Corrects the velocity for the rate of the next step.

        Args:
            new_rate: the rate of the next step.
            last_rate: gives the rate of the last step; asked if it is not known.
        """
        rate = last_rate() if self._rate is None else self._rate
        self._rate = new_rate
        # A velocity of rate 0 does not tell what it was before.
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
    """The learning rates of an optimizer's last and next step.

    Attributes:
        optimizer: the optimizer.
        schedule: the schedule that gives its rate; None if a variable does.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        self.optimizer = optimizer
        self.schedule = keras_optimizers.learning_rate_schedule(optimizer)
        self._steps = keras_optimizers.batches_seen(optimizer)
        # Operation by operation, a schedule takes milliseconds.
        self._at = tf.function(self.schedule or _nothing, reduce_retracing=True)
        self._note()

    def note_restored(self) -> None:
        """Notes the rate again, if the optimizer is at another step than when it was noted."""
        if int(self._steps) != self._noted_at:
            self._note()

    def _note(self) -> None:
        self._noted_at = int(self._steps)
        self._noted = float(self.optimizer.learning_rate) if self.schedule is None else 0.0

    def last(self) -> float:
        """Of the last step; where a variable gives the rate, of the last one before it was noted."""
        return self._noted if self.schedule is None else float(self._at(tf.maximum(self._steps.value - 1, 0)))

    def next(self) -> float:
        """Of the next step."""
        return float(self.optimizer.learning_rate if self.schedule is None else self._at(tf.identity(self._steps.value)))


def without_velocity(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Why the optimizer has no velocity that holds the learning rate; None if it has one."""
    if keras_optimizers.velocities(optimizer) is None:
        return (
            f"{type(optimizer).__name__} keeps no velocity that the learning rate is part of. In Adam and its kin, the rate "
            "multiplies averages of gradients when they are applied: a new rate acts on them at once."
        )
    if not optimizer.momentum:
        return f"{type(optimizer).__name__} was made without momentum."
    return None


def _multiplication(velocities: list[Any]) -> Callable[[Any], None]:
    @tf.function(autograph=False)
    def multiply(factor: Any) -> None:
        with variable_homes.beside_inputs():
            for velocity in velocities:
                # In 16 bits, factors near 1 would be 1.
                wide = velocity.dtype if velocity.dtype.size > 2 else tf.float32
                velocity.assign(tf.cast(tf.cast(velocity, wide) * tf.cast(factor, wide), velocity.dtype))

    return multiply


def _nothing(*_: Any) -> None:
    pass


class MomentumCorrection(keras.callbacks.Callback):
    """Multiplies the velocity of SGD by η_new / η_old whenever the learning rate changes from η_old to η_new.

    Keras's SGD, with and without Nesterov momentum, keeps the learning rate inside its velocity, v <- m v - η g, so that a new
    rate takes about 1 / (1 - m) steps to act. Corrected, it acts at once, as in the reference u <- m u + g, w <- w - η u
    (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 3, remark 2). The same holds for `LARS`, and for RMSprop with
    momentum. `LearningRateWarmup` corrects by itself.

    Give it as the last callback: it corrects for changes that callbacks before it and the optimizer's schedule make, and for
    those between two calls of `fit`. A velocity is forgotten where the rate is 0. For an optimizer whose velocity does not
    hold the rate, such as Adam, or that has none, it does nothing and warns why.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the rate of the last step, if training goes on.

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
                "MomentumCorrection cannot correct between steps that are executed together, in which the schedule changes the "
                "learning rate. Compile with steps_per_execution=1, or set the rate with callbacks. "
                f"Received: steps_per_execution={self.model.steps_per_execution}"
            )
        for rate in self._rates:
            Velocity.of(rate.optimizer).begin()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the rate again, if a callback has restored the optimizer since."""
        for rate in self._rates:
            rate.note_restored()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Corrects, if the next step has another rate than the last one."""
        for rate in self._rates:
            Velocity.of(rate.optimizer).follow(rate.next(), rate.last)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Training may go on later."""
        for rate in self._rates:
            Velocity.of(rate.optimizer).end()
