"""Keep the states of the generators of Python and NumPy, which a trace may use."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def same_random_states() -> Iterator[None]:
    """Restores the states of `random` and `np.random` at the end of the `with` block."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
