"""Measure how far the results of two trainings are apart."""

import keras
import numpy as np


def difference(expected, received):
    """Returns the largest difference of two nested results, each relative to 1 plus the size of the expected number.

    It is not a number if any difference is none.
    """
    pairs = list(zip(map(_array, keras.tree.flatten(expected)), map(_array, keras.tree.flatten(received)), strict=True))
    # Python's own max() may pass over what is not a number.
    return float(np.max([np.max(np.abs(one - other) / (1 + np.abs(one)), initial=0.0) for one, other in pairs]))


def state(model):
    """Returns the values of the variables of a model and of its optimizer."""
    return [*model.get_weights(), *(np.array(variable) for variable in model.optimizer.variables)]


def permuted(rows, batch_size, seed):
    """Returns an order of rows that permutes the rows of each batch, and leaves each row in its batch."""
    random = np.random.default_rng(seed)
    begins = range(0, rows, batch_size)
    return np.concatenate([begin + random.permutation(min(batch_size, rows - begin)) for begin in begins])


def _array(value):
    return np.asarray(keras.ops.convert_to_numpy(value), "float64")
