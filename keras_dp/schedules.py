"""Learning-rate schedules for large batches: linear scaling, reached by gradual warm-up."""

import math
import numbers
from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

Tensor = Any


@keras.saving.register_keras_serializable("keras_dp")
class WarmupThen(LearningRateSchedule):
    """A learning rate that warms up gradually to k times a schedule, and then follows k times that schedule.

    With the schedule η(t) of the small batch, the scale k and T warm-up steps, the rate at step t is

        η(0) + (k η(T) - η(0)) t / T   for t < T
        k η(t)                         from then on

    so that it starts at the small batch's rate and grows by the same amount at every step (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 2.1, "Linear Scaling Rule", and section 2.2, "Gradual warmup"). Steps count
    from the beginning of training: a schedule that decays after 30 epochs decays then, with and without warm-up.

    >>> import keras, keras_dp
    >>> schedule = keras_dp.schedules.WarmupThen(0.1, scale=8, warmup_steps=4)
    >>> [round(float(schedule(step)), 3) for step in range(6)]
    [0.1, 0.275, 0.45, 0.625, 0.8, 0.8]

    It is part of the optimizer, and counts its iterations: what is saved during warm-up goes on where it was. A saved model
    that was compiled with it needs keras_dp to be imported before it is loaded (or `compile=False`); one that was trained
    with `callbacks.LearningRateWarmup` does not.

    Args:
        schedule: η, as a `LearningRateSchedule` or a number: what the small batch is trained with.
        scale: k, by how much the global batch is larger than the one that the schedule was made for.
        warmup_steps: T, in steps of the optimizer; with n images and a global batch of B, an epoch has ceil(n / B).
        name: the name of the operations.

    Raises:
        ValueError: if the scale is not positive, or the number of steps is negative or not whole.
    """

    def __init__(self, schedule: Any, scale: float, warmup_steps: int, name: str = "WarmupThen"):
        super().__init__()
        refuse_unless_positive("scale", scale)
        if isinstance(schedule, dict):
            schedule = keras.optimizers.schedules.deserialize(schedule)
        if not isinstance(schedule, LearningRateSchedule):
            refuse_unless_positive("schedule", schedule, "a LearningRateSchedule or ")
        refuse_negative("warmup_steps", warmup_steps)
        if warmup_steps != int(warmup_steps):
            raise ValueError(f"`warmup_steps` must be a whole number. Received: warmup_steps={warmup_steps!r}")
        self.schedule = schedule if isinstance(schedule, LearningRateSchedule) else float(schedule)
        self.scale = float(scale)
        self.warmup_steps = int(warmup_steps)
        self.name = name

    def __call__(self, step: Any) -> Tensor:
        """The rate at a step, as a scalar."""
        with keras.name_scope(self.name):
            if not self.warmup_steps:
                return self.scale * self._rate(step)
            rate = gradual_warmup(
                keras.ops.cast(step, keras.config.floatx()),
                self._rate(0),
                self.scale * self._rate(self.warmup_steps),
                self.warmup_steps,
            )
            return keras.ops.where(step < self.warmup_steps, rate, self.scale * self._rate(step))

    def _rate(self, step: Any) -> Tensor:
        rate = self.schedule(step) if isinstance(self.schedule, LearningRateSchedule) else self.schedule
        return keras.ops.convert_to_tensor(rate, keras.config.floatx())

    def get_config(self) -> dict[str, Any]:
        """What makes an equal schedule."""
        schedule = self.schedule
        if isinstance(schedule, LearningRateSchedule):
            schedule = keras.optimizers.schedules.serialize(schedule)
        return {"schedule": schedule, "scale": self.scale, "warmup_steps": self.warmup_steps, "name": self.name}


def gradual_warmup(step: Any, start: Any, end: Any, steps: float) -> Any:
    """The rate at one of T warm-up steps: from `start` at step 0 in equal increments to `end` at step T."""
    return start + (end - start) * step / steps


def refuse_unless_positive(name: str, value: Any, alternative: str = "") -> None:
    """Raises a ValueError unless the value is a positive, finite number."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be {alternative}a positive number. Received: {name}={value!r}")


def refuse_negative(name: str, value: Any) -> None:
    """Raises a ValueError unless the value is a finite number, 0 or more."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"`{name}` must be a number, 0 or more. Received: {name}={value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
