"""The example that classifies the digit of each pixel makes correct scenes; .ci/run trains on them."""

import importlib
from pathlib import Path

import keras
import numpy as np


def test_pixels_have_the_class_of_the_digit_that_is_seen(monkeypatch):
    """Each digit has its own brightness, so that a visible pixel shows which class it must have."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    keras.config.set_floatx("float32")
    example = importlib.import_module("digits_segmentation")
    labels = np.arange(10)
    images = np.zeros((10, 28, 28, 1), "float32")
    images[:, 4:20, 8:20] = (0.5 + labels / 20).reshape(10, 1, 1, 1)
    (x, y), (again, _), (_, other) = (example.scenes(images, labels, 30, seed) for seed in (3, 3, 4))
    assert x.shape == (30, example.SIZE, example.SIZE, 1)
    ink = x[..., 0] > 0.4
    np.testing.assert_array_equal(y[~ink], example.BACKGROUND)
    np.testing.assert_allclose(x[..., 0][ink], 0.5 + y[ink] / 20, rtol=1e-6)
    # Digits hide earlier ones, so that not every scene shows all ink.
    seen = ink.sum(axis=(1, 2))
    assert seen.min() < seen.max() == example.DIGITS * 16 * 12
    np.testing.assert_array_equal(again, x)
    assert (other != y).any()
