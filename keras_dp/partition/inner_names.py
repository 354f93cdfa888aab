"""Keep the named sizes of a function apart from those of its other calls.

A function is traced once, and may be called for tensors of several sizes. The sizes that are named in its body would then be
taken for equal.
"""

from collections.abc import Iterable, Sequence

import tensorflow as tf

from keras_dp.partition.node import Static
from keras_dp.partition.placements import Facts, ListOf, Placement, Shard, array_of
from keras_dp.partition.rows import ALL_ROWS, Number, Rows, Size


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
    outside = {factor for facts in arguments for number in _numbers_of(facts) for factor in _factors(number)}
    return [_renamed(facts, outside.union(ALL_ROWS.factors), call) for facts in results]


def _renamed(facts: Facts, outside: set[str], call: str) -> Facts:
    def number(known: Number) -> Number:
        if isinstance(known, Rows):
            return Rows(tuple(map(number, known.blocks)))
        if not isinstance(known, Size):
            return known
        names = [factor if factor in outside else f"{call}/{factor}" for factor in known.factors]
        return Size(known.coefficient, tuple(sorted(names)))

    def placed(placement: Placement) -> Placement:
        if isinstance(placement, Shard):
            return Shard(placement.axis, tuple(map(number, placement.blocks)))
        if isinstance(placement, ListOf) and placement.element is not None:
            return ListOf(_renamed(placement.element, outside, call))
        return placement

    entries = None if facts.entries is None else array_of([number(known) for known in facts.entries.flat])
    shape = [number(size) for size in facts.shape] if isinstance(facts.shape, list) else facts.shape
    return Facts(placed(facts.placement), None if entries is None else entries.reshape(facts.entries.shape), shape)  # type: ignore[union-attr]


def _numbers_of(facts: Facts) -> Iterable[Number]:
    if isinstance(facts.placement, Shard):
        yield from facts.placement.blocks
    if isinstance(facts.placement, ListOf) and facts.placement.element is not None:
        yield from _numbers_of(facts.placement.element)
    yield from [] if facts.entries is None else facts.entries.flat
    yield from facts.shape if isinstance(facts.shape, list) else []


def _factors(number: Number) -> Iterable[str]:
    if isinstance(number, Rows):
        return [factor for block in number.blocks for factor in _factors(block)]
    return number.factors if isinstance(number, Size) else ()
