"""Exclude biases and normalization from weight decay."""

import keras

from keras_dp.keras_internals import keras_models
from keras_dp.keras_internals.keras_optimizers import innermost_optimizers

UNDECAYED_NAMES = ("alpha", "beta", "bias", "gamma", "scale")


def exclude_from_weight_decay(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    """Makes an optimizer decay a model's kernels and embeddings only, not its biases or the gains of normalization.

    Goyal et al. 2017 (https://arxiv.org/abs/1706.02677, section 5.1) do not decay the γ and β of batch normalization.
    Variables that are named alpha, beta, bias, gamma or scale are excluded, and all variables with at most one dimension.

    >>> import keras, keras_dp
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    >>> optimizer = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=1e-4)
    >>> keras_dp.optimizers.exclude_from_weight_decay(optimizer, model)
    >>> model.compile(optimizer, "mse")

    Args:
        optimizer: any Keras optimizer. Earlier exclusions end. Keras does not save exclusions: call this function again for
            the optimizer of a loaded model.
        model: a built model, or a `DataParallelModel` around one.

    Raises:
        ValueError: if the model has no variables yet, or there is no optimizer.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"Give the optimizer to compile with, not its name. Received: optimizer={optimizer!r}")
    if not keras_models.is_built(model):
        raise ValueError(
            "A model that is not built has no variables that could be excluded from weight decay. Build it, or call it on a "
            f"batch, first. Received: model={model!r}"
        )
    excluded = [v for v in model.trainable_variables if len(v.shape) <= 1 or v.name in UNDECAYED_NAMES]
    for part in innermost_optimizers(optimizer):
        part.exclude_from_weight_decay(var_list=excluded)
    # Existing traces decay the variables that were decayed before.
    keras_models.forget_traces(model)
