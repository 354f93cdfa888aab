"""MNIST for the examples: from a file, from Keras's cache or from the internet; else scikit-learn's handwritten digits."""

import contextlib
import io
import os
import socket
from pathlib import Path

import image_archive
import keras
import numpy as np

DOWNLOAD_TIMEOUT = 10  # seconds


def load(path=None):
    """Handwritten digits, to train on and to test with.

    Args:
        path: an npz file with the uint8 arrays x_train, y_train, x_test and y_test. None takes MNIST from Keras's cache, or
            downloads it; if neither works, the 1,797 digits that come with scikit-learn stand in.

    Returns:
        (x_train, y_train), (x_test, y_test): float32 images in [0, 1] of shape (n, 28, 28, 1), and n integer labels.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file lacks an array.
    """
    if path is not None:
        return _from_file(path)
    cached = Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser() / "datasets" / "mnist.npz"
    if cached.exists():
        return _from_file(cached)
    try:
        return _from_download()
    except Exception as error:  # Keras raises a bare Exception for a failed download
        print(f"MNIST is not at {cached}, and its download failed ({error}); using the digits of scikit-learn. See --data.")
        return _from_scikit_learn()


def _from_file(path):
    train, test = image_archive.read(path)
    return _prepare(*train), _prepare(*test)


def _from_download():
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
    try:
        # Keras announces downloads that then fail.
        with contextlib.redirect_stdout(io.StringIO()):
            train, test = keras.datasets.mnist.load_data()
    finally:
        socket.setdefaulttimeout(timeout)
    return _prepare(*train), _prepare(*test)


def _from_scikit_learn():
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("The digits need scikit-learn: pip install keras_dp[examples]") from None
    digits = load_digits()
    images = keras.ops.image.resize(digits.images[..., np.newaxis].astype("float32") / 16, (28, 28))
    images, labels = keras.ops.convert_to_numpy(images), digits.target.astype("int32")
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def _prepare(images, labels):
    return images[..., np.newaxis].astype("float32") / 255, labels.astype("int32")
