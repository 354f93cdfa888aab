"""Replace attributes of Keras for a while, on one thread at a time."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute of an object or a module another value, on one thread at a time."""
    with _replacing:
        own = name in vars(owner)
        original = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)


def on_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement on the thread that traces a step; what other threads do with Keras in the meantime is not changed."""
    tracing = threading.get_ident()

    @functools.wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == tracing else original)(*args, **kwargs)

    return either


# One thread at a time replaces names of Keras, so that each puts back what it found.
_replacing = threading.RLock()
