"""Warm up the learning rate, in a schedule or from a callback."""

import logging
from typing import Any

import keras
from keras.optimizers.schedules import LearningRateSchedule

from keras_dp.keras_internals import keras_optimizers
from keras_dp.keras_internals.keras_optimizers import innermost
from keras_dp.large_batches.momentum_correction import Velocity
from keras_dp.large_batches.number_checks import refuse_negative, refuse_unless_positive

logger = logging.getLogger("keras_dp")


Tensor = Any


RATE_PRECISION = 0.01  # of a learning rate in a bfloat16 variable


class LearningRateWarmup(keras.callbacks.Callback):
    """Ramps the learning rate up from η to k η over the first epochs, at every step.

    The warm-up takes T steps, `warmup_epochs` times the steps in an epoch. At step t the rate is η + (k η - η) t / T, and at
    step T it is k η (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 2.1, "Linear Scaling Rule", and section 2.2,
    "Gradual warmup"). After that, the callback leaves the rate alone.

    >>> import keras, keras_dp, numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    >>> warmup = keras_dp.callbacks.LearningRateWarmup(0.01, scale=4, warmup_epochs=2)
    >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=1, epochs=3, verbose=0, callbacks=[warmup]).history
    >>> [round(rate, 4) for rate in history["learning_rate"]]
    [0.0231, 0.0381, 0.04]

    The rate of each epoch's last step is logged as `learning_rate`. If another callback lowers the rate, as ReduceLROnPlateau
    does, it stays lower by the same factor through the rest of the warm-up. If another callback raises the rate, the warm-up
    overrides it until it ends, so that a LearningRateScheduler takes over afterwards. For an optimizer with a
    `LearningRateSchedule`, use `schedules.WarmupThen`, which is the same warm-up as a schedule.

    The step t is the optimizer's, or the step of `fit`'s epochs if that is larger (`initial_epoch`). So training that resumes
    from a checkpoint, in this process or another one, resumes the warm-up. For an optimizer that has seen T steps, the warm-up
    is over. With `steps_per_execution` of n, the rate changes every n steps.

    Args:
        base_learning_rate: η, the rate for the small batch.
        scale: k, the size of the global batch relative to the small batch. The same global batch on more devices is not
            larger, and needs the same rate.
        warmup_epochs: the length of the warm-up in epochs, which need not be whole.
        steps_per_epoch: the number of steps in an epoch; None to take it from `fit`.
        momentum_correction: whether to correct the velocity for each change of the rate that this callback makes or sees; see
            `MomentumCorrection`. It does nothing for optimizers like Adam.

    Raises:
        ValueError: if an argument is not a positive number.
    """

    def __init__(
        self,
        base_learning_rate: float,
        scale: float,
        warmup_epochs: float = 5,
        steps_per_epoch: int | None = None,
        momentum_correction: bool = True,
    ):
        super().__init__()
        refuse_unless_positive("base_learning_rate", base_learning_rate)
        refuse_unless_positive("scale", scale)
        refuse_negative("warmup_epochs", warmup_epochs)
        if steps_per_epoch is not None:
            refuse_unless_positive("steps_per_epoch", steps_per_epoch)
        self.base_learning_rate = base_learning_rate
        self.scale = scale
        self.warmup_epochs = warmup_epochs
        self.steps_per_epoch = steps_per_epoch
        self.momentum_correction = momentum_correction

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Computes the length of the warm-up.

        Raises:
            ValueError: if the optimizer's rate cannot be set, or the number of steps in an epoch is not known.
        """
        optimizer = self._optimizer
        steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if steps is None:
            raise ValueError(
                "LearningRateWarmup does not know how many steps an epoch has, since fit() does not know its data's length. "
                "Give it steps_per_epoch. Received: steps_per_epoch=None"
            )
        if hasattr(optimizer, "optimizers") or not keras_optimizers.has_learning_rate_variable(optimizer):
            raise ValueError(
                "LearningRateWarmup sets the learning rate, but this optimizer has several, a schedule or a function. Wrap "
                "each schedule: keras_dp.schedules.WarmupThen(schedule, scale, warmup_steps). "
                f"Received: optimizer={optimizer!r}"
            )
        self._steps_per_epoch = steps
        self._warmup_steps = self.warmup_epochs * steps
        self._factor = 1.0  # by which other callbacks have lowered the rate
        self._rate: float | None = None  # of the last step
        self._is_over = False
        Velocity.of(optimizer).begin()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate of the next step."""
        optimizer = self._optimizer
        current = float(optimizer.learning_rate)
        step = self._step(batch)
        last_rate = self._resume(step, batch, current) if self._rate is None else current
        self._set_rate(step)
        # The variable's dtype rounds the rate.
        self._rate = float(optimizer.learning_rate)
        if self.momentum_correction:
            Velocity.of(optimizer).follow(self._rate, lambda: last_rate)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the rate of the last step. If the warm-up ends here, sets the full rate and leaves it to other callbacks."""
        if self._rate is None:
            return
        if logs is not None:
            logs.setdefault("learning_rate", self._rate)
        next_step = self._step(self._steps_per_epoch)
        if next_step >= self._warmup_steps:
            self._set_rate(next_step)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the step at which training ends, since it may resume later."""
        Velocity.of(self._optimizer).end()

    @property
    def _optimizer(self) -> keras.optimizers.Optimizer:
        return innermost(self.model.optimizer)

    def _step(self, batch: int) -> int:
        seen = int(keras_optimizers.batches_seen(self._optimizer))
        return max(seen, self._epoch * self._steps_per_epoch + batch)

    def _set_rate(self, step: int) -> None:
        if self._is_over:
            return
        optimizer = self._optimizer
        current = float(optimizer.learning_rate)
        if self._rate is not None and current < self._rate:
            self._factor *= current / self._rate
        rate = self._ramp(step) * self._factor
        if rate != current:
            optimizer.learning_rate = rate
        self._is_over = step >= self._warmup_steps

    def _resume(self, step: int, batch: int, current: float) -> float:
        """Finds where training resumes, from the optimizer's iterations and rate, which a checkpoint holds.

        Returns:
            The rate of the last step.
        """
        seen = int(keras_optimizers.batches_seen(self._optimizer))
        if seen == 0:
            # No step has used the rate of a new optimizer.
            return current
        together = self.model.steps_per_execution
        last = step - (together if batch else (self._steps_per_epoch - 1) % together + 1)
        self._is_over = last >= self._warmup_steps
        if self._is_over and self._epoch == 0:
            logger.warning(
                "LearningRateWarmup: the optimizer has seen %d batches already, so that the warm-up of %d steps is over. "
                "Compile the model with a new optimizer to warm up again.",
                seen,
                self._warmup_steps,
            )
        # In the first epoch, no other callback can have lowered a rate that the warm-up had set.
        if self._is_over or self._epoch == 0:
            return current
        expected = self._ramp(last)
        if current < expected * (1 - RATE_PRECISION):
            logger.warning(
                "LearningRateWarmup resumes at step %d with the rate %g, which is lower than the expected %g. It assumes that "
                "another callback lowered the rate, and keeps it lower by the same factor.",
                step,
                current,
                expected,
            )
            self._factor = current / expected
            # At the end of the epoch that ended the warm-up, another callback may have lowered the full rate.
            self._is_over = step >= self._warmup_steps
            return current
        # At the end of that epoch, the checkpoint may hold the rate of the next step.
        return expected if step >= self._warmup_steps else current

    def _ramp(self, step: int) -> float:
        end = self.scale * self.base_learning_rate
        if step >= self._warmup_steps:
            return end
        return gradual_warmup(max(step, 0), self.base_learning_rate, end, self._warmup_steps)


@keras.saving.register_keras_serializable("keras_dp")
class WarmupThen(LearningRateSchedule):
    """Warms up gradually to k times a schedule, and then follows k times that schedule.

    With the schedule η(t) of the small batch, the scale k and T warm-up steps, the rate at step t is

        η(0) + (k η(T) - η(0)) t / T   for t < T
        k η(t)                         from then on

    It starts at the small batch's rate, and grows by the same amount at every step (Goyal et al. 2017,
    https://arxiv.org/abs/1706.02677, section 2.1, "Linear Scaling Rule", and section 2.2, "Gradual warmup"). Steps count from
    the beginning of training: a schedule that decays after 30 epochs does so with and without warm-up.

    >>> import keras, keras_dp
    >>> schedule = keras_dp.schedules.WarmupThen(0.1, scale=8, warmup_steps=4)
    >>> [round(float(schedule(step)), 3) for step in range(6)]
    [0.1, 0.275, 0.45, 0.625, 0.8, 0.8]

    The schedule is part of the optimizer and counts its iterations, so that a saved model resumes the warm-up. A saved model
    that was compiled with it needs keras_dp to be imported before it is loaded, or `compile=False`. A model that was trained
    with `callbacks.LearningRateWarmup` needs neither.

    Args:
        schedule: η, the rate for the small batch, as a `LearningRateSchedule` or a number.
        scale: k, the size of the global batch relative to the batch that the schedule was made for.
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
        """Returns the rate at a step, as a scalar."""
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
        """Returns the arguments of an equal schedule."""
        schedule = self.schedule
        if isinstance(schedule, LearningRateSchedule):
            schedule = keras.optimizers.schedules.serialize(schedule)
        return {"schedule": schedule, "scale": self.scale, "warmup_steps": self.warmup_steps, "name": self.name}


def gradual_warmup(step: Any, start: Any, end: Any, steps: float) -> Any:
    """Returns the rate at one of T warm-up steps: from `start` at step 0 in equal increments to `end` at step T."""
    return start + (end - start) * step / steps
