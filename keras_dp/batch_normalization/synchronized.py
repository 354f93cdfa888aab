"""Define SyncBatchNormalization, a layer that is synchronized in every mode, and convert models to it."""

import keras

from keras_dp.keras_internals import keras_models


@keras.saving.register_keras_serializable(package="keras_dp")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Normalizes as `keras.layers.BatchNormalization`, with the moments of the global batch in every mode.

    With `DataParallelModel(..., batch_norm="local")` or `"first"`, only these layers stay synchronized. On one device, and with
    `batch_norm="sync"`, the layer equals Keras's own, with the same arguments, weights and results.

    A saved model with such layers loads where keras_dp is imported.

    >>> import keras, keras_dp
    >>> model = keras.Sequential([keras.Input((4,)), keras_dp.SyncBatchNormalization(momentum=0.9)])
    >>> parallel = keras_dp.DataParallelModel(model, devices=1, batch_norm="local")
    """


def batch_norms(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Lists every batch normalization in a model, however deeply nested."""
    return [layer for layer in keras_models.flatten_layers(model) if isinstance(layer, keras.layers.BatchNormalization)]


def is_synchronized(layer: keras.layers.BatchNormalization) -> bool:
    """Returns whether a layer itself asks for the moments of the global batch."""
    return layer.synchronized or isinstance(layer, SyncBatchNormalization)


def convert_batch_norm(model: keras.Model) -> keras.Model:
    """Turns every `BatchNormalization` of a model, however deeply nested, into a `SyncBatchNormalization`, in place.

    The layers stay the same objects with the same weights. So any model can be converted: subclassed, compiled, half trained
    or wrapped.

    >>> import keras, keras_dp
    >>> model = keras.applications.MobileNetV2((32, 32, 3), weights=None)
    >>> model = keras_dp.convert_batch_norm(model)

    Args:
        model: a `keras.Model`, or a `DataParallelModel` around one.

    Returns:
        The model itself.

    Raises:
        ValueError: if `model` is not a `keras.Model`, or a layer is of a subclass of `BatchNormalization`, which only its
            author can convert. No layer is converted then.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(f"convert_batch_norm() takes a keras.Model. Received: {model!r} of type {type(model)}")
    layers = batch_norms(model)
    for layer in layers:
        if type(layer) not in (keras.layers.BatchNormalization, SyncBatchNormalization):
            raise ValueError(
                f"The layer {layer.name!r} is of a subclass of BatchNormalization. Derive that class from "
                f"keras_dp.SyncBatchNormalization instead. Received: {type(layer).__name__}"
            )
    for layer in layers:
        layer.__class__ = SyncBatchNormalization
    return model
