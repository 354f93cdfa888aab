"""Answer an unknown argument with the name that may have been meant."""

import functools
import inspect
import reprlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from keras_dp.choices import question

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def suggesting_names(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Makes a method suggest an argument's name in place of a wrong one that is like it. Private names pass."""
    parameters = inspect.signature(function).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD][1:]

    @functools.wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        for name in kwargs:
            if name not in known and not name.startswith("_"):
                raise TypeError(
                    f"{function.__qualname__}() has no argument {name!r}.{question(name, known)} Received: "
                    f"{name}={reprlib.repr(kwargs[name])}. Its arguments are: {', '.join(known)}"
                )
        return function(*args, **kwargs)

    return checked
