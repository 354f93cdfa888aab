"""Keep the states of the generators of Python and NumPy, which a trace may use."""

import contextlib
import random
from collections.abc import Callable, Iterator

import numpy as np


@contextlib.contextmanager
def same_random_states() -> Iterator[None]:
    """Restores the states of `random` and `np.random` at the end of the `with` block."""
    restore = noted_random_states()
    try:
        yield
    finally:
        restore()


def noted_random_states() -> Callable[[], None]:
    """Notes the states of `random` and `np.random`, and returns a function that restores them."""
    states = random.getstate(), np.random.get_state()

    def restore() -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])

    return restore
