"""Keep the named sizes of a function apart from those of its other calls, and those of a list's elements apart.

A function is traced once, and may be called for tensors of several sizes. The sizes that are named in its body would then be
taken for equal. The rounds of a loop are such calls: the elements that they add to a list may have other sizes in each round.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from keras_dp.partition.facts.node import Static
from keras_dp.partition.facts.placements import Facts, ListOf, Placement, Shard, array_of
from keras_dp.partition.facts.rows import ALL_ROWS, VARYING, Number, Rows, Size


def with_shape(facts: Facts, static: Static) -> Facts:
    """Returns the facts of a tensor with the shape by which its sizes are named where a function is called with it."""
    if static.dtype in (tf.resource, tf.variant) or static.shape is None:
        return facts
    along = facts.placement.axis if isinstance(facts.placement, Shard) else None
    return Facts(facts.placement, facts.entries, [None if axis == along else size for axis, size in enumerate(static.shape)])


def named_apart(results: Sequence[Facts], arguments: Sequence[Facts], call: str) -> list[Facts]:
    """Returns the facts of the results of a function, with names of their own for the sizes that its arguments do not have.

    Args:
        results: the facts of the results, as named in the function.
        arguments: the facts of the arguments.
        call: the name of the node that calls the function.
    """
    outside = _names_of(arguments)

    def renamed(size: Size) -> Number:
        names = [factor if factor in outside else f"{call}/{factor}" for factor in size.factors]
        return Size(size.coefficient, tuple(sorted(names)))

    return [_mapped(facts, renamed) for facts in results]


def varying_in_lists(variables: Sequence[Facts], first: Sequence[Facts]) -> list[Facts]:
    """Returns the facts of a loop's variables, with `VARYING` for the sizes of lists' elements that differ between rounds.

    Args:
        variables: the facts of the variables after a round.
        first: the facts of the variables before the first round.
    """
    outside = _names_of(first)

    def varying(size: Size) -> Number:
        return size if outside.issuperset(size.factors) else VARYING

    return [_mapped(facts, varying) if isinstance(facts.placement, ListOf) else facts for facts in variables]


def taken(element: Facts, name: str) -> Facts:
    """Returns the facts of one element of a list, with a name of its own for each size that may differ between elements.

    Args:
        element: the facts of all elements.
        name: the name of the node that takes the element.
    """
    numbers = itertools.count()

    def named(size: Size) -> Number:
        return Size.named(f"{name}/{next(numbers)}") if size == VARYING else size

    return _mapped(element, named)


def _mapped(facts: Facts, rename: Callable[[Size], Number]) -> Facts:
    def number(known: Number) -> Number:
        if isinstance(known, Rows):
            return Rows(tuple(map(number, known.blocks)))
        return rename(known) if isinstance(known, Size) else known

    def placed(placement: Placement) -> Placement:
        if isinstance(placement, Shard):
            return Shard(placement.axis, tuple(map(number, placement.blocks)))
        if isinstance(placement, ListOf) and placement.element is not None:
            return ListOf(_mapped(placement.element, rename))
        return placement

    entries = None if facts.entries is None else array_of([number(known) for known in facts.entries.flat])
    shape = [number(size) for size in facts.shape] if isinstance(facts.shape, tuple) else facts.shape
    return Facts(placed(facts.placement), None if entries is None else entries.reshape(facts.entries.shape), shape)  # type: ignore[union-attr]


def _names_of(facts: Iterable[Facts]) -> set[str]:
    """Returns the names of the sizes in some facts, and of sizes that are the same everywhere."""
    named = {factor for known in facts for number in _numbers_of(known) for factor in _factors(number)}
    return named.union(ALL_ROWS.factors, VARYING.factors)


def _numbers_of(facts: Facts) -> Iterable[Number]:
    if isinstance(facts.placement, Shard):
        yield from facts.placement.blocks
    if isinstance(facts.placement, ListOf) and facts.placement.element is not None:
        yield from _numbers_of(facts.placement.element)
    yield from [] if facts.entries is None else facts.entries.flat
    yield from facts.shape if isinstance(facts.shape, tuple) else []


def _factors(number: Number) -> Iterable[str]:
    if isinstance(number, Rows):
        return [factor for block in number.blocks for factor in _factors(block)]
    return number.factors if isinstance(number, Size) else ()
