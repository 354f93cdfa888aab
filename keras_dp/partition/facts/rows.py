"""Calculate with numbers that count rows, before there is a batch.

A number is an `int`, a `Size`, a `Rows` or `GLOBAL`. A `Size` does not depend on the batch. A `Rows` is a multiple of the
number of rows. `GLOBAL` depends on the number of rows in some other way. As a shape, a `Rows` counts the tower's own rows. As a
number, such as the denominator of a mean, it counts the rows of the global batch.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

Number = Any  # int, Size, Rows or GLOBAL

_LONGEST_NAME = 120


@dataclasses.dataclass(frozen=True)
class Size:
    """A size that is known by name only: a coefficient times a product of sizes of tensors.

    Attributes:
        coefficient: an integer.
        factors: the names of the sizes, sorted. Equal names stand for equal sizes.
    """

    coefficient: int
    factors: tuple[str, ...]

    @classmethod
    def named(cls, name: str) -> "Size":
        """Returns the size of this name."""
        return cls(1, (name,))

    def __str__(self) -> str:
        return "*".join([*([str(self.coefficient)] if self.coefficient != 1 else []), *self.factors])


# The number of rows of the whole batch, as the size of an axis of which every tower has all entries.
ALL_ROWS = Size.named("all rows")


# A size of an element of a list that may differ from element to element.
VARYING = Size.named("varying")


class _Global:
    """A number that depends on the number of rows, but is not a `Rows`."""

    def __repr__(self) -> str:
        return "GLOBAL"


GLOBAL = _Global()


@dataclasses.dataclass(frozen=True)
class Rows:
    """A multiple of the number of rows, in segments.

    Attributes:
        blocks: for each segment, the number of its entries for each row, an `int` or a `Size`. (1,) counts the rows of the
            batch. (3,) counts three entries for each row, row by row. (1, 1) counts two batches, one after the other.
    """

    blocks: tuple[Any, ...] = (1,)

    @property
    def total(self) -> Number:
        """The number of entries for each row, in all segments together."""
        total = self.blocks[0]
        for block in self.blocks[1:]:
            total = add(total, block)
        return total


def multiply(a: Number, b: Number) -> Number:
    """Returns a times b."""
    if isinstance(b, Rows) and not isinstance(a, Rows):
        a, b = b, a
    if 0 in (a, b):
        return 0
    if isinstance(a, Rows):
        return Rows(tuple(multiply(block, b) for block in a.blocks)) if isinstance(b, int | Size) and _positive(b) else GLOBAL
    if GLOBAL in (a, b):
        return GLOBAL
    return _product(_coefficient(a) * _coefficient(b), [*_factors(a), *_factors(b)])


def add(a: Number, b: Number) -> Number:
    """Returns a + b."""
    if 0 in (a, b):
        return b if a == 0 else a
    if isinstance(a, Rows) and isinstance(b, Rows):
        if len(a.blocks) != len(b.blocks):
            a, b = Rows((a.total,)), Rows((b.total,))
        return Rows(tuple(add(x, y) for x, y in zip(a.blocks, b.blocks, strict=True)))
    if isinstance(a, Rows) or isinstance(b, Rows) or GLOBAL in (a, b):
        return GLOBAL
    if _factors(a) == _factors(b):
        return _product(_coefficient(a) + _coefficient(b), _factors(a))
    return derived("add", a, b)


def subtract(a: Number, b: Number) -> Number:
    """Returns a - b."""
    if isinstance(a, Rows) and isinstance(b, Rows):
        x, y = a.total, b.total
        if x == y:
            return 0
        return Rows((x - y,)) if isinstance(x, int) and isinstance(y, int) and x > y else GLOBAL
    if isinstance(b, int | Size):
        return add(a, multiply(-1, b))
    return GLOBAL


def divide(a: Number, b: Number) -> Number:
    """Returns a // b, for sizes, which are not negative."""
    if b == 1:
        return a
    if isinstance(a, Rows) and isinstance(b, Rows):
        quotient = exactly(a.total, b.total)
        return GLOBAL if quotient is None else quotient
    if isinstance(a, Rows) and isinstance(b, int | Size) and _positive(b):
        quotients = tuple(exactly(block, b) for block in a.blocks)
        return GLOBAL if None in quotients else Rows(quotients)
    if depends_on_rows([a, b]) or b == 0:
        return GLOBAL
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    quotient = exactly(a, b)
    return derived("divide", a, b) if quotient is None else quotient


def exactly(a: Number, b: Number) -> Number | None:
    """Returns a / b if b is known to divide a, for numbers that do not depend on rows; else None."""
    if GLOBAL in (a, b) or _coefficient(b) == 0 or _coefficient(a) % _coefficient(b):
        return None
    factors = list(_factors(a))
    for factor in _factors(b):
        if factor not in factors:
            return None
        factors.remove(factor)
    return _product(_coefficient(a) // _coefficient(b), factors)


def product(numbers: Iterable[Number]) -> Number:
    """Returns the product of all numbers."""
    result: Number = 1
    for number in numbers:
        result = multiply(result, number)
    return result


def larger(a: Number, b: Number) -> Number:
    """Returns the maximum of two numbers."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    if a == b:
        return a
    for x, y in ((a, b), (b, a)):
        # A batch has at least one row.
        if isinstance(x, Rows) and isinstance(y, int) and y <= 1 and all(isinstance(block, int) for block in x.blocks):
            return x
    return GLOBAL if depends_on_rows([a, b]) else derived("max", a, b)


def derived(operation: str, *numbers: Number) -> Number:
    """Returns the result of any other operation: a `Size` with a name of its own, or GLOBAL if a number depends on rows."""
    if depends_on_rows(numbers):
        return GLOBAL
    name = f"{operation}({','.join(str(number) for number in numbers)})"
    return Size.named(name if len(name) <= _LONGEST_NAME else f"{operation}#{hash(name):x}")


def depends_on_rows(numbers: Iterable[Number]) -> bool:
    """Returns whether any number depends on the number of rows."""
    return any(isinstance(number, Rows) or number is GLOBAL for number in numbers)


def gathered(size: Number) -> Number | None:
    """Returns the size of an axis after its rows are gathered; None if it is not known."""
    if isinstance(size, Rows):
        return multiply(size.total, ALL_ROWS)
    return None if size is GLOBAL else size


def counts_all(number: Number, blocks: Sequence[Any], batch_rows: int | None) -> bool:
    """Returns whether a size is known to count the entries of all rows, of which each has `blocks`.

    Args:
        number: the size.
        blocks: the segments of the rows, as in `Rows`.
        batch_rows: B, if it is known; else None.
    """
    if not blocks:
        return False
    total = Rows(tuple(blocks)).total
    if isinstance(number, int):
        return batch_rows is not None and isinstance(total, int) and number == batch_rows * total
    return bool(number == multiply(total, ALL_ROWS))


def segments_between(blocks: Sequence[Number], start: int, rows: Number) -> int | None:
    """Returns the end of the segments that begin at `start` and have `rows` entries together; None if there are none."""
    if not isinstance(rows, Rows):
        return None
    total: Number = 0
    for stop in range(start, len(blocks) + 1):
        if total == rows.total:
            return stop
        total = add(total, blocks[stop]) if stop < len(blocks) else total
    return None


def _product(coefficient: int, factors: Iterable[str]) -> Number:
    factors = tuple(sorted(factors))
    return Size(coefficient, factors) if factors and coefficient else coefficient


def _coefficient(number: Number) -> int:
    return number.coefficient if isinstance(number, Size) else int(number)


def _factors(number: Number) -> tuple[str, ...]:
    return number.factors if isinstance(number, Size) else ()


def _positive(number: Number) -> bool:
    return math.copysign(1, _coefficient(number)) > 0
