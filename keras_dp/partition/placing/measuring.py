"""Find the tensors to measure in the step for sizes that are known by name only while tracing.

Rows of several tensors may follow each other, such as the levels of a pyramid. A tower's tensor then has segments, and each has
as many entries as the tower has rows, times its block. A block may be a `Size`. Some tensor before it has this size along an
axis, since that is how sizes are named, and the step measures that tensor.
"""

from collections.abc import Sequence

import tensorflow as tf

from keras_dp.partition.facts.placements import ListOf, Own, Placement, Shard
from keras_dp.partition.facts.rows import ALL_ROWS, Number, Size
from keras_dp.partition.placing.planned import Planned
from keras_dp.partition.tracing.names import Output

Measure = tuple[Output, int]  # a tensor, and one of its axes


class Measures:
    """Finds the tensors that have named sizes along an axis.

    Args:
        propagation: the `Propagation`, with the facts of the tensors so far.
    """

    def __init__(self, propagation: Planned):
        self._propagation = propagation
        self._found: dict[str, Measure] = {}
        self._searched = 0

    def can_split(self, blocks: Sequence[Number]) -> bool:
        """Returns whether the lengths of some segments can be computed in the step."""
        return all(self._find(factor) for factor in _factors(measured_blocks(blocks)))

    def of(self, placement: object) -> list[Output]:
        """Returns the tensors to measure before a tensor with this placement is gathered or cut."""
        blocks = measured_blocks(placement.blocks) if isinstance(placement, Shard) else ()
        return [self.measure(factor)[0] for factor in _factors(blocks)]

    def measure(self, factor: str) -> Measure:
        """Returns a tensor, and the axis along which it has a named size that `can_split` has found before."""
        self._find(factor)
        return self._found[factor]

    def _find(self, factor: str) -> bool:
        nodes, plans = self._propagation.traced.nodes, self._propagation.plans
        while factor not in self._found and self._searched < len(nodes) and nodes[self._searched].name in plans:
            self._search(nodes[self._searched].name)
            self._searched += 1
        return factor in self._found

    def _search(self, name: str) -> None:
        for port in range(len(self._propagation.plans[name].outputs)):
            output = name, port
            static, placement = self._propagation.static(output), self._propagation.facts[output].placement
            if static.dtype in (tf.resource, tf.variant) or isinstance(placement, ListOf | Own):
                continue
            for axis, size in enumerate(static.shape or ()):
                if isinstance(size, Size) and size.coefficient == len(size.factors) == 1 and not _is_of_rows(axis, placement):
                    self._found.setdefault(size.factors[0], (output, axis))


def _is_of_rows(axis: int, placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.axis == axis


def measured_blocks(blocks: Sequence[Number]) -> tuple[Number, ...]:
    """Returns the blocks of some segments if they have to be measured: if they differ and not all are integers; else none."""
    is_plain = len(set(blocks)) == 1 or all(isinstance(block, int) for block in blocks)
    return () if is_plain else tuple(blocks)


def _factors(blocks: Sequence[Number]) -> list[str]:
    """Returns the names of sizes of which blocks are products, without the number of all rows, which is always known."""
    named = dict.fromkeys(factor for block in blocks if isinstance(block, Size) for factor in block.factors)
    return [factor for factor in named if factor not in ALL_ROWS.factors]
