"""Define LARS, SGD with a rate for each variable."""

from typing import Any

import keras
import tensorflow as tf

from keras_dp.keras_internals import keras_optimizers
from keras_dp.large_batches.number_checks import refuse_negative, refuse_unless_positive

Tensor = Any
Variable = Any


@keras.saving.register_keras_serializable("keras_dp")
class LARS(keras_optimizers.SGDWithCoupledWeightDecay):
    """Applies SGD with momentum and a separate rate for each variable: layer-wise adaptive rate scaling.

    For a variable w with the gradient g, the learning rate γ, the momentum m, the trust coefficient η and the weight decay β
    (You, Gitman and Ginsburg 2017, https://arxiv.org/abs/1708.03888, section 4, equation 6, and algorithm 1)::

        λ = η |w| / (|g| + β |w|)
        v <- m v + γ λ (g + β w)
        w <- w - v

    So each update is proportional to the norm of its variable, whatever the norm of the gradient. LARS is for batches so large
    that linear scaling, with one rate for all variables, diverges. If the norm of w or of g is 0, λ is 1.

    >>> import keras, keras_dp
    >>> weight = keras.Variable([3.0, 4.0])
    >>> optimizer = keras_dp.optimizers.LARS(learning_rate=1.0, trust_coefficient=0.1)
    >>> optimizer.apply([[0.0, 10.0]], [weight])
    >>> weight.numpy().tolist()
    [3.0, 3.5]

    SGD updates the variables that are excluded from weight decay, usually biases and normalization: λ = 1 and β = 0 (see
    `exclude_from_weight_decay`). The velocity holds the learning rate, so that `callbacks.MomentumCorrection` applies.

    Args:
        learning_rate: γ, a number or a `LearningRateSchedule`. It may be much larger than for SGD.
        momentum: m, from 0 to 1.
        weight_decay: β. Unlike in Keras's optimizers, it is part of the gradient, as in the paper.
        trust_coefficient: η.
        nesterov: whether to apply Nesterov momentum.
        name: the optimizer's name.
        **kwargs: `clipnorm`, `use_ema`, `gradient_accumulation_steps` and so on: see `keras.optimizers.SGD`.

    Raises:
        ValueError: if the weight decay is negative, or the trust coefficient not positive.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        nesterov: bool = False,
        name: str = "LARS",
        **kwargs: Any,
    ):
        refuse_negative("weight_decay", weight_decay)
        refuse_unless_positive("trust_coefficient", trust_coefficient)
        super().__init__(learning_rate, momentum, nesterov, weight_decay, name=name, **kwargs)
        self.trust_coefficient = trust_coefficient

    def update_step(self, gradient: Tensor, variable: Variable, learning_rate: Tensor) -> None:
        """Updates a variable, from its gradient."""
        if keras_optimizers.decays(self, variable):
            # The rows of a sparse gradient that occur twice must be added up before the norm is computed.
            gradient = keras.ops.cast(tf.convert_to_tensor(gradient), variable.dtype)
            decay = keras.ops.cast(self.weight_decay, variable.dtype)
            weight_norm, gradient_norm = _norm(variable), _norm(gradient)
            moves = keras.ops.logical_and(weight_norm > 0, gradient_norm > 0)
            total = keras.ops.where(moves, gradient_norm + decay * weight_norm, 1)
            trust = keras.ops.where(moves, self.trust_coefficient * weight_norm / total, 1)
            gradient = trust * (gradient + decay * variable)
        super().update_step(gradient, variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of an equal optimizer."""
        return {**super().get_config(), "trust_coefficient": self.trust_coefficient}


def _norm(tensor: Tensor) -> Tensor:
    return keras.ops.sqrt(keras.ops.sum(keras.ops.square(tensor)))
