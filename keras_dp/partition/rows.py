"""Follow numbers that count rows, before there is a batch.

A size is an `int`, a `Size` that does not depend on the batch, a `Rows` that is a multiple of the number of rows, or `GLOBAL`,
which depends on the number of rows in some other way. As a shape, a `Rows` is the number of the tower's own rows; as a number,
as the denominator of a mean, it is that of the global batch.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

Number = Any  # int, Size, Rows or GLOBAL

_LONGEST_NAME = 120


@dataclasses.dataclass(frozen=True)
class Size:
    """A size that is known by name only: a coefficient times the product of sizes of tensors.

    Attributes:
        coefficient: a number.
        factors: names, sorted. The same name stands for the same size.
    """

    coefficient: int
    factors: tuple[str, ...]

    @classmethod
    def named(cls, name: str) -> "Size":
        """The size with a name of its own."""
        return cls(1, (name,))

    def __str__(self) -> str:
        return "*".join([*([str(self.coefficient)] if self.coefficient != 1 else []), *self.factors])


# The number of rows of the whole batch, along an axis of which every tower has all entries.
ALL_ROWS = Size.named("all rows")


class _Global:
    """A number that depends on the number of rows, and is no multiple of it."""

    def __repr__(self) -> str:
        return "GLOBAL"


GLOBAL = _Global()


@dataclasses.dataclass(frozen=True)
class Rows:
    """A multiple of the number of rows, in segments.

    Attributes:
        blocks: for each segment, how many entries it has for each row, an `int` or a `Size`. (1,) counts the rows of the batch;
            (3,) counts three entries for each row, row by row; (1, 1) counts two batches, one behind the other.
    """

    blocks: tuple[Any, ...] = (1,)

    @property
    def total(self) -> Number:
        """Entries for each row, in all segments together."""
        total = self.blocks[0]
        for block in self.blocks[1:]:
            total = add(total, block)
        return total


def multiply(a: Number, b: Number) -> Number:
    """A x b."""
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
    """A + b."""
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
    """A - b."""
    if isinstance(a, Rows) and isinstance(b, Rows):
        x, y = a.total, b.total
        if x == y:
            return 0
        return Rows((x - y,)) if isinstance(x, int) and isinstance(y, int) and x > y else GLOBAL
    if isinstance(b, int | Size):
        return add(a, multiply(-1, b))
    return GLOBAL


def divide(a: Number, b: Number) -> Number:
    """A // b, for sizes, which are not negative."""
    if b == 1:
        return a
    if isinstance(a, Rows) and isinstance(b, Rows):
        quotient = exactly(a.total, b.total)
        return GLOBAL if quotient is None else quotient
    if isinstance(a, Rows) and isinstance(b, int | Size):
        quotients = tuple(exactly(block, b) for block in a.blocks)
        return GLOBAL if None in quotients else Rows(quotients)
    if isinstance(b, Rows) or GLOBAL in (a, b) or b == 0:
        return GLOBAL
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    quotient = exactly(a, b)
    return derived("divide", a, b) if quotient is None else quotient


def exactly(a: Number, b: Number) -> Number | None:
    """A / b if b is known to divide a, of numbers that do not depend on rows; else None."""
    if GLOBAL in (a, b) or _coefficient(b) == 0 or _coefficient(a) % _coefficient(b):
        return None
    factors = list(_factors(a))
    for factor in _factors(b):
        if factor not in factors:
            return None
        factors.remove(factor)
    return _product(_coefficient(a) // _coefficient(b), factors)


def product(numbers: Iterable[Number]) -> Number:
    """The product of all numbers."""
    result: Number = 1
    for number in numbers:
        result = multiply(result, number)
    return result


def larger(a: Number, b: Number) -> Number:
    """The maximum of two numbers."""
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
    """The result of an operation of which nothing else is known, on numbers of which none depends on rows."""
    if depends_on_rows(numbers):
        return GLOBAL
    name = f"{operation}({','.join(str(number) for number in numbers)})"
    return Size.named(name if len(name) <= _LONGEST_NAME else f"{operation}#{hash(name):x}")


def depends_on_rows(numbers: Iterable[Number]) -> bool:
    """Whether any number depends on the number of rows."""
    return any(isinstance(number, Rows) or number is GLOBAL for number in numbers)


def gathered(size: Number) -> Number | None:
    """The size of an axis once its rows are gathered, None if it is not known."""
    if isinstance(size, Rows):
        return multiply(size.total, ALL_ROWS)
    return None if size is GLOBAL else size


def segments_between(blocks: Sequence[Number], start: int, rows: Number) -> int | None:
    """The end of the segments from `start` on that have so many rows together, or None."""
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
