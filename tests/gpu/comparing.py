"""Measure how far the results of two trainings are apart."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

LIMIT = 1e-9  # in float64


def difference(expected: Any, received: Any) -> float:
    """Returns the largest difference of two nested results, each relative to 1 plus the size of the expected number.

    It is not a number if any difference is none.
    """
    pairs = list(zip(map(_array, keras.tree.flatten(expected)), map(_array, keras.tree.flatten(received)), strict=True))
    # Python's own max() may pass over what is not a number.
    return float(np.max([np.max(np.abs(one - other) / (1 + np.abs(one)), initial=0.0) for one, other in pairs]))


def state(model: keras.Model) -> list[Any]:
    """Returns the values of the variables of a model and of its optimizer."""
    return [*model.get_weights(), *(np.array(variable) for variable in model.optimizer.variables)]


def permuted(rows: int, batch_size: int, seed: int) -> np.ndarray:
    """Returns an order of rows that permutes the rows of each batch, and leaves each row in its batch."""
    random = np.random.default_rng(seed)
    return np.concatenate([begin + random.permutation(size) for begin, size in _batches(rows, batch_size)])


def _batches(rows: int, batch_size: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, rows, batch_size):
        yield begin, min(batch_size, rows - begin)


def _array(value: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(value), "float64")
