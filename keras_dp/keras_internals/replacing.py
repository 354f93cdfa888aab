"""Replace attributes of Keras temporarily, on one thread at a time."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of an object or a module inside the `with` block, on one thread at a time."""
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
    """Returns a function that calls the replacement on this thread, and the original on other threads that use Keras."""
    tracing = threading.get_ident()

    @functools.wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == tracing else original)(*args, **kwargs)

    return either


# Only one thread at a time replaces names of Keras, so that each restores the original.
_replacing = threading.RLock()
