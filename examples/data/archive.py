"""Data sets of images in one file each, for the examples."""

from pathlib import Path

import numpy as np

ARRAYS = ("x_train", "y_train", "x_test", "y_test")


def read(path):
    """The arrays of an npz file: (x_train, y_train), (x_test, y_test).

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file lacks an array.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file with images at this path. Received: {str(path)!r}")
    with np.load(path) as archive:
        missing = [name for name in ARRAYS if name not in archive]
        if missing:
            raise ValueError(f"The file lacks {', '.join(missing)}; it needs {', '.join(ARRAYS)}. Received: {str(path)!r}")
        x_train, y_train, x_test, y_test = (archive[name] for name in ARRAYS)
    return (x_train, y_train), (x_test, y_test)
