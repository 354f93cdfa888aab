"""Join the placements of two branches, or of the rounds of a loop."""

from typing import Any

from keras_dp.partition.placements import (
    LOCAL_SHAPE,
    REPLICATE,
    Facts,
    ListOf,
    Need,
    Partial,
    Replicate,
    Shard,
    array_of,
)
from keras_dp.partition.rows import Size, depends_on_rows


def join(one: Facts, other: Facts, name: str = "") -> Facts | None:
    """Merges the facts of two alternatives for a tensor on a tower; None if no placement serves both.

    Args:
        one: the facts of one alternative.
        other: the facts of the other alternative.
        name: the tensor's name, for sizes that differ between the two.
    """
    a, b = one.placement, other.placement
    shape = _join_shapes(one.shape, other.shape)
    if isinstance(a, ListOf) and isinstance(b, ListOf):
        if a.element is None or b.element is None:
            return Facts(ListOf(a.element or b.element))
        # Elements that are in the list already keep their placement.
        element = join(a.element, b.element, name) if a.element.placement == b.element.placement else None
        return None if element is None else Facts(ListOf(element))
    if isinstance(a, ListOf | Shard) or isinstance(b, ListOf | Shard):
        if a == b:
            return Facts(a, None, shape)
        if isinstance(a, ListOf) or isinstance(b, ListOf) or (isinstance(a, Shard) and isinstance(b, Shard)):
            return None
        if Partial() in (a, b):
            return None
        return Facts(a if isinstance(a, Shard) else b, None, shape)
    if a != b:
        # A replicated tensor is a sum of which one tower has all. For a maximum, the other towers' parts would count, too.
        return Facts(Partial(), None, shape) if {a, b} == {Replicate(), Partial()} else None
    return _join_entries(one, other, name, shape)


def _join_entries(one: Facts, other: Facts, name: str, shape: Any) -> Facts | None:
    x, y = one.entries, other.entries
    if x is None or y is None or x.shape != y.shape:
        rows = depends_on_rows([*([] if x is None else x.flat), *([] if y is None else y.flat)])
        return None if rows else Facts(one.placement, None, shape)
    entries = []
    for i, (a, b) in enumerate(zip(x.flat, y.flat, strict=True)):
        if a != b and depends_on_rows([a, b]):
            return None
        entries.append(a if a == b else Size.named(f"{name}[{i}]"))
    return Facts(one.placement, array_of(entries).reshape(x.shape), shape)


def _join_shapes(a: Any, b: Any) -> Any:
    if not isinstance(a, list) or not isinstance(b, list):
        return a if a is b else None
    if len(a) != len(b):
        return None
    return [x if x == y else None for x, y in zip(a, b, strict=True)]


def need_of(facts: Facts) -> Need:
    """Returns the form in which a tower takes a tensor with these facts."""
    if facts.placement == REPLICATE:
        return LOCAL_SHAPE if facts.counts_rows() else REPLICATE
    return facts.placement
