"""Data sets of images in one file each, for the examples."""

from pathlib import Path

import numpy as np

ARRAYS = ("x_train", "y_train", "x_test", "y_test")


def read(path):
    """The arrays of an npz file: (x_train, y_train), (x_test, y_test). Nothing in the file is run: it holds no pickles.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file lacks an array, or holds something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file with images at this path. Received: {str(path)!r}")
    try:
        # NumPy leaves a damaged file open.
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = [name for name in ARRAYS if name not in archive]
            arrays = {name: archive[name] for name in ARRAYS if name in archive}
    except Exception as error:  # NumPy and zipfile have many for a file that is damaged
        raise ValueError(f"The file cannot be read as an npz file of arrays: {error!r}. Received: {str(path)!r}") from error
    if missing:
        raise ValueError(f"The file lacks {', '.join(missing)}; it needs {', '.join(ARRAYS)}. Received: {str(path)!r}")
    for images, labels in (ARRAYS[:2], ARRAYS[2:]):
        _refuse_what_is_not_labeled_images(arrays[images], arrays[labels], f"{images} and {labels}", path)
    return (arrays["x_train"], arrays["y_train"]), (arrays["x_test"], arrays["y_test"])


def _refuse_what_is_not_labeled_images(images, labels, names, path):
    is_right = images.ndim >= 3 and images.dtype.kind in "uif" and labels.dtype.kind in "ui"
    if not is_right or labels.size != len(images) or not images.size:
        raise ValueError(
            f"{names} must be images of numbers, and an integer label for each. Received: shapes {images.shape} and "
            f"{labels.shape}, of {images.dtype} and {labels.dtype}, in {str(path)!r}"
        )
