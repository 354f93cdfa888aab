"""CIFAR-10 for the examples: from a file, from Keras's cache or from the internet; random crops and flips."""

import keras
import numpy as np
import tensorflow as tf

from data import archive

PADDING = 4  # pixels on each side, of which random crops take some


def load(path=None):
    """Small photographs of ten classes, to train on and to test with.

    Args:
        path: an npz file with the uint8 arrays x_train, y_train, x_test and y_test. None takes CIFAR-10 from Keras's cache, or
            downloads it.

    Returns:
        (x_train, y_train), (x_test, y_test): float32 images of shape (n, 32, 32, 3), with the mean 0 and the deviation 1 of
        the training images in each channel, and n integer labels.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file lacks an array.
        SystemExit: if the download fails.
    """
    if path is None:
        try:
            (x_train, y_train), (x_test, y_test) = keras.datasets.cifar10.load_data()
        except Exception as error:  # Keras raises a bare Exception for a failed download
            raise SystemExit(f"CIFAR-10 could not be downloaded ({error}). Give its file: --data FILE.npz") from None
    else:
        (x_train, y_train), (x_test, y_test) = archive.read(path)
    mean, deviation = (statistic(x_train, axis=(0, 1, 2), dtype="float64") for statistic in (np.mean, np.std))
    x_train, x_test = (((images - mean) / deviation).astype("float32") for images in (x_train, x_test))
    return (x_train, y_train.ravel().astype("int32")), (x_test, y_test.ravel().astype("int32"))


def augmented_batches(images, labels, batch_size, seed):
    """Batches of randomly cropped and flipped images, in another order in each epoch (He et al. 2016, section 4.2).

    Args:
        images: float32 images of shape (n, 32, 32, 3), in which 0 is the mean.
        labels: n labels.
        batch_size: images in a global batch.
        seed: for the order, the crops and the flips; the same seed gives the same epochs.

    Returns:
        A `tf.data.Dataset` of ceil(n / batch_size) batches.
    """

    def augment(image, label, number):
        seed = tf.bitcast(number, tf.int32)
        image = tf.pad(image, [[PADDING, PADDING], [PADDING, PADDING], [0, 0]])
        image = tf.image.stateless_random_crop(image, images.shape[1:], seed)
        return tf.image.stateless_random_flip_left_right(image, seed + 1), label

    numbers = tf.data.Dataset.random(seed, rerandomize_each_iteration=True)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed)
    dataset = tf.data.Dataset.zip(dataset, numbers).map(lambda example, number: augment(*example, number), tf.data.AUTOTUNE)
    return dataset.batch(batch_size).prefetch(tf.data.AUTOTUNE)
