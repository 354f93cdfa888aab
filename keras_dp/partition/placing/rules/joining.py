"""Join the placements of two branches, of the rounds of a loop, or of the elements of a list."""

from typing import Any

from keras_dp.partition.facts.placements import (
    LOCAL_SHAPE,
    REPLICATE,
    Facts,
    ListOf,
    Need,
    Partial,
    Placement,
    Replicate,
    Shard,
    array_of,
)
from keras_dp.partition.facts.rows import VARYING, Number, Rows, Size, counts_all, depends_on_rows


def join(one: Facts, other: Facts, name: str = "", batch_rows: int | None = None) -> Facts | None:
    """Merges the facts of two alternatives for a tensor on a tower; None if no placement serves both.

    Args:
        one: the facts of one alternative.
        other: the facts of the other alternative.
        name: the tensor's name, for sizes that differ between the two.
        batch_rows: B, if it was known while the step was traced; else None.
    """
    a, b = one.placement, other.placement
    shape = _join_shapes(one.shape, other.shape)
    if isinstance(a, ListOf) and isinstance(b, ListOf):
        if a.element is None or b.element is None:
            return Facts(ListOf(a.element or b.element))
        # Elements that are in the list already keep their placement.
        element = join_elements(a.element, b.element) if are_placed_alike(a.element.placement, b.element.placement) else None
        return None if element is None else Facts(ListOf(element))
    if isinstance(a, ListOf | Shard) or isinstance(b, ListOf | Shard):
        if a == b:
            return Facts(a, None, shape)
        return _with_rows(one, other, shape, batch_rows) or _with_rows(other, one, shape, batch_rows)
    if a != b:
        # A replicated tensor is a sum of which one tower has all. For a maximum, the other towers' parts would count, too.
        return Facts(Partial(), None, shape) if {a, b} == {Replicate(), Partial()} else None
    return _join_entries(one, other, name, shape)


def join_elements(one: Facts, other: Facts, batch_rows: int | None = None) -> Facts | None:
    """Merges the facts of two elements of a list; None if no placement serves both.

    The elements of a list are not told apart: a size or an integer in which two elements differ is `VARYING`.

    Args:
        one: the facts of one element.
        other: the facts of the other element.
        batch_rows: B, if it was known while the step was traced; else None.
    """
    a, b = one.placement, other.placement
    shape = _join_shapes(one.shape, other.shape)
    if isinstance(a, Shard) and isinstance(b, Shard):
        if a != b and not are_placed_alike(a, b):
            return None
        return Facts(a if a == b else Shard(a.axis, (VARYING,)), None, shape)
    if a != REPLICATE or b != REPLICATE:
        return join(one, other, batch_rows=batch_rows)
    x, y = one.entries, other.entries
    if x is None or y is None or x.shape != y.shape:
        return None if one.counts_rows() or other.counts_rows() else Facts(REPLICATE, None, shape)
    entries = [_varying(a, b) for a, b in zip(x.flat, y.flat, strict=True)]
    return None if None in entries else Facts(REPLICATE, array_of(entries).reshape(x.shape), shape)


def are_placed_alike(one: Placement, other: Placement) -> bool:
    """Returns whether the elements of lists have the same placement, up to the number of entries for each row."""
    if isinstance(one, ListOf) and isinstance(other, ListOf):
        return one.element is None or other.element is None or are_placed_alike(one.element.placement, other.element.placement)
    if isinstance(one, Shard) and isinstance(other, Shard):
        return one == other or (one.axis == other.axis and len(one.blocks) == len(other.blocks) == 1)
    return one == other


def _with_rows(rows: Facts, whole: Facts, shape: Any, batch_rows: int | None) -> Facts | None:
    """Returns the facts of rows of which the alternative is a replicated tensor that is known to have an entry for each."""
    placement = rows.placement
    if not isinstance(placement, Shard) or whole.placement != REPLICATE or not isinstance(whole.shape, tuple):
        return None
    if placement.axis >= len(whole.shape) or not counts_all(whole.shape[placement.axis], placement.blocks, batch_rows):
        return None
    return Facts(placement, None, shape)


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


def _varying(a: Number, b: Number) -> Number | None:
    """Returns the number that stands for two numbers of elements; None if only one of them counts rows."""
    if a == b:
        return a
    if isinstance(a, Rows) and isinstance(b, Rows) and len(a.blocks) == len(b.blocks) == 1:
        return Rows((VARYING,))
    return None if depends_on_rows([a, b]) else VARYING


def _join_shapes(a: Any, b: Any) -> Any:
    if not isinstance(a, tuple) or not isinstance(b, tuple):
        return a if a is b else None
    if len(a) != len(b):
        return None
    return tuple(x if x == y else None for x, y in zip(a, b, strict=True))


def need_of(facts: Facts) -> Need:
    """Returns the form in which a tower takes a tensor with these facts."""
    if facts.placement == REPLICATE:
        return LOCAL_SHAPE if facts.counts_rows() else REPLICATE
    return facts.placement
