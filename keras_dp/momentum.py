"""Momentum correction: a velocity that holds the learning rate follows a change of it."""

from collections.abc import Callable, MutableMapping
from typing import Any
from weakref import WeakKeyDictionary, ref

import keras
import tensorflow as tf

from keras_dp import keras_seams, placement


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
        self._multiply: Callable[[Any], None] | None = None

    @classmethod
    def of(cls, optimizer: keras.optimizers.Optimizer) -> "Velocity":
        """The one velocity of an optimizer: who corrects it twice for one change, corrects it once."""
        return _velocities.setdefault(optimizer, cls(optimizer))

    def begin(self) -> None:
        """Training begins, maybe not where it ended: nothing is known of earlier steps."""
        self._rate = self._multiply = None

    def follow(self, old_rate: float, new_rate: float) -> None:
        """Corrects the velocity for the rate of the next step.

        Args:
            old_rate: the rate of the last step, if this is the first call since training began; later calls know it.
            new_rate: the rate of the next step.
        """
        rate = old_rate if self._rate is None else self._rate
        self._rate = new_rate
        # A velocity of rate 0 does not tell what it was before.
        if new_rate == rate or rate == 0:
            return
        if self._multiply is None:
            velocities = keras_seams.velocities(self._optimizer())
            if not velocities:
                return
            self._multiply = _multiplication(velocities)
        self._multiply(tf.constant(new_rate / rate, tf.float64))


_velocities: MutableMapping[keras.optimizers.Optimizer, Velocity] = WeakKeyDictionary()


def without_velocity(optimizer: keras.optimizers.Optimizer) -> str | None:
    """Why the optimizer has no velocity that holds the learning rate; None if it has one."""
    if keras_seams.velocities(optimizer) is None:
        return (
            f"{type(optimizer).__name__} keeps averages of gradients, without the learning rate, which multiplies them when "
            "they are applied: a new rate acts on them at once."
        )
    if not optimizer.momentum:
        return f"{type(optimizer).__name__} was made without momentum."
    return None


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer inside those that wrap one."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def innermost_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizer inside those that wrap one, or all those inside a `MultiOptimizer`."""
    optimizer = innermost(optimizer)
    return list(getattr(optimizer, "optimizers", [optimizer]))


def _multiplication(velocities: list[keras.Variable]) -> Callable[[Any], None]:
    @tf.function(autograph=False)
    def multiply(factor: Any) -> None:
        with placement.beside_inputs():
            for velocity in velocities:
                velocity.assign(velocity * tf.cast(factor, velocity.dtype))

    return multiply
