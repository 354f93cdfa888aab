"""Tell whether a step is being traced, in which a wrapper is the model inside it."""

import contextlib
import contextvars
from collections.abc import Iterator

_in_trace = contextvars.ContextVar("_in_trace", default=False)


def in_trace() -> bool:
    """Returns whether the step of a model is being traced, or run on one device, so that it calls the model's own steps."""
    return _in_trace.get()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Says that the step of a model is being traced, or run on one device."""
    token = _in_trace.set(True)
    try:
        yield
    finally:
        _in_trace.reset(token)
