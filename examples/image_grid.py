"""Write generated images into one picture."""

from pathlib import Path

import matplotlib.image
import numpy as np

MAGNIFICATION = 2  # pixels of the picture for each pixel of an image


def save_grid(images, columns, path):
    """Writes images side by side as a PNG, and prints its path.

    Args:
        images: gray images from 0 (black) to 1 of shape (rows * columns, height, width, 1); other values are clipped.
        columns: the number of images in a row.
        path: the path of the PNG; its directory is created if it is missing.
    """
    images = np.clip(images, 0, 1)[..., 0]
    height, width = images.shape[1:]
    grid = images.reshape(-1, columns, height, width).swapaxes(1, 2).reshape(-1, columns * width)
    grid = grid.repeat(MAGNIFICATION, axis=0).repeat(MAGNIFICATION, axis=1)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    matplotlib.image.imsave(path, grid, vmin=0, vmax=1, cmap="gray")
    print(f"{len(images)} generated images: {path}")
