"""Refuse arguments that are not positive numbers."""

import math
import numbers
from typing import Any


def refuse_unless_positive(name: str, value: Any, alternative: str = "") -> None:
    """Raises a ValueError unless the value is a positive, finite number."""
    if not _is_number(value) or not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be {alternative}a positive number. Received: {name}={value!r}")


def refuse_negative(name: str, value: Any) -> None:
    """Raises a ValueError unless the value is a finite number, 0 or more."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise ValueError(f"`{name}` must be a number, 0 or more. Received: {name}={value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
