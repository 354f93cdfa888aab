"""Read integers as row counts, where the number of rows was known while the step was traced.

Such a step has plain integers in the place of row counts: with 8 rows, a reshape to (8, 28, 28) takes the constant 8. An
integer that equals a*B may be read as `Rows((a,))`, the entries of all rows if each has a. Whether the program meant rows does
not matter. As a number of the whole batch, the reading has the value that the program wrote. As a size, it says that an axis is
cut into the towers' parts, which together are the whole. So any reading that a rule accepts is right. It decides only
how much of the work is shared.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_dp.partition.facts.node import Node, Static
from keras_dp.partition.facts.placements import REPLICATE, Facts, Shard
from keras_dp.partition.facts.rows import Rows
from keras_dp.partition.placing.rules.drawing import DRAWS
from keras_dp.partition.placing.rules.elementwise import BINARY
from keras_dp.partition.tracing.graph import reached, takers_of
from keras_dp.partition.tracing.names import Output

_SOURCES = frozenset([*DRAWS, "BroadcastTo", "Fill", "Tile"])
_MOST_SEGMENTS = 8
_PAIRS = frozenset([*BINARY, "AddN", "SelectV2"])


def readings(node: Node, blocks: tuple[Any, ...] = ()) -> Iterator[Node]:
    """Yields a node with each reading of its integers: as they are, one index of a shape as rows, all of them as rows.

    Of several entries for each row, it yields two readings: row by row, and one batch after the other.

    Args:
        node: the node.
        blocks: the segments of the rows, as in `Rows`, that an integer counts if they have as many entries.
    """
    yield node
    if node.batch_rows is None:
        return
    places = [_multiples(facts, node.batch_rows) for facts in node.inputs]
    indices = sorted(set().union(*places))
    for wanted in [[index] for index in indices] + ([indices] if len(indices) > 1 else []):
        chosen = [[index for index in wanted if index in found] for found in places]
        for is_in_segments in (False, True) if _has_several(node, chosen) else (False,):
            pairs = zip(node.inputs, chosen, strict=True)
            yield node.with_inputs([_read(facts, indices, node, blocks, is_in_segments) for facts, indices in pairs])


def _has_several(node: Node, chosen: Sequence[Sequence[int]]) -> bool:
    """Returns whether an integer counts several entries for each row: a few, which may be as many segments."""
    numbers = [facts.entries.flat[i] for facts, places in zip(node.inputs, chosen, strict=True) for i in places]  # type: ignore[union-attr]
    return any(1 < number // (node.batch_rows or 1) <= _MOST_SEGMENTS for number in numbers)


def _multiples(facts: Facts, batch_rows: int) -> set[int]:
    """Returns the places of integers that are multiples of B."""
    if facts.entries is None or facts.placement != REPLICATE:
        return set()
    return {
        i for i, number in enumerate(facts.entries.flat) if isinstance(number, int) and number > 0 and not number % batch_rows
    }


def _read(facts: Facts, places: Sequence[int], node: Node, blocks: tuple[Any, ...], is_in_segments: bool) -> Facts:
    """Returns the facts of integers, some of which are read as row counts."""
    if not places or facts.entries is None:
        return facts
    entries = facts.entries.copy()
    for place in places:
        number = entries.flat[place]
        each = number // (node.batch_rows or 1)
        if node.counts_all(number, blocks):
            entries.flat[place] = Rows(blocks)
        else:
            entries.flat[place] = Rows((1,) * each if is_in_segments and each <= _MOST_SEGMENTS else (each,))
    return Facts(facts.placement, entries, facts.shape)


class RowSources:
    """Tells which nodes may make rows although none of their inputs has any, such as random numbers for each row.

    Args:
        nodes: the NodeDefs of a graph, by name, in topological order.
        sources: by node, the outputs that it takes.
        statics: the `Static` of each output, by node.
        arguments: the facts of the graph's placeholders, by name.
    """

    def __init__(
        self,
        nodes: Mapping[str, Any],
        sources: Mapping[str, Sequence[Output]],
        statics: Mapping[str, Sequence[Static]],
        arguments: Mapping[str, Facts],
    ):
        self._nodes, self._sources, self._statics = nodes, sources, statics
        self._of_batch = {name for name, facts in arguments.items() if isinstance(facts.placement, Shard)}
        self._constant: set[str] = set()
        taken = {name: [source for source, _ in sources[name]] for name in nodes}
        self._users = takers_of(taken)
        for name, node in nodes.items():
            inputs = taken[name]
            if not self._of_batch.isdisjoint(inputs):
                self._of_batch.add(name)
            elif node.op == "Const" or (inputs and self._constant.issuperset(inputs)):
                self._constant.add(name)

    def blocks_made(self, node: Node, facts: Mapping[Output, Facts]) -> tuple[Any, ...] | None:
        """Returns the segments of the rows that a node may make, empty if they are not known; None if it makes no rows.

        It makes no rows if its result meets a tensor of the same shape that the batch does not change: noise that is added to a
        weight has no rows, even if the weight is as long as the batch.

        Args:
            node: the node.
            facts: the facts of tensors so far.
        """
        if node.type not in _SOURCES:
            return None
        sizes = self._statics[node.name][0].shape
        seen, waiting = {node.name}, [node.name]
        while waiting:
            name = waiting.pop()
            for user in self._users[name]:
                sources = [output for output in self._sources[user] if output[0] not in seen]
                others = [output for output in sources if output[0] not in self._constant]
                as_long = [output for output in others if self._is_as_long(output, sizes)]
                known = self._known_before(as_long, sizes, facts)
                if known is not None:
                    return known.blocks
                if any(name in self._of_batch for name, _ in as_long):
                    continue
                shape = self._statics[name][0].shape
                if any(self._statics[other][port].shape == shape for other, port in others) and self._nodes[user].op in _PAIRS:
                    return None
                if user not in seen and not others:
                    seen.add(user)
                    waiting.append(user)
        # Labels or noise for several batches one after the other come before what they meet.
        size = sizes[0] if sizes else None
        each, rest = divmod(size, node.batch_rows) if isinstance(size, int) and node.batch_rows else (0, 0)
        return (1,) * each if rest == 0 and each <= _MOST_SEGMENTS else ()

    def _known_before(
        self, outputs: Sequence[Output], sizes: Sequence[Any] | None, facts: Mapping[Output, Facts]
    ) -> Shard | None:
        """Returns the placement of the first rows that lead to some tensors, are as long, and have a placement already."""

        def as_long(output: Output) -> list[Output]:
            return [] if output in facts else [one for one in self._sources[output[0]] if self._is_as_long(one, sizes)]

        placements = (facts[output].placement for output in reached(outputs, as_long) if output in facts)
        return next((placement for placement in placements if isinstance(placement, Shard)), None)

    def _is_as_long(self, output: Output, sizes: Sequence[Any] | None) -> bool:
        """Returns whether the first axis of a tensor has a given size."""
        shape = self._statics[output[0]][output[1]].shape
        return bool(shape and sizes and shape[0] == sizes[0])
