"""Compute once, from gathered rows, tensors of which no tower needs its own rows.

Adam squares the rows of a sparse gradient. Only its update, at home, takes the squares, and it takes the gradient as well. So
the rows of the gradient are gathered, and squared at home. If towers squared them, both would be sent. Where to cut between
towers and home is a minimum cut in general. Here each group of connected operations moves as a whole, or stays.
"""

from keras_dp.partition.facts.node import Plan
from keras_dp.partition.facts.operations import SHAPES_AND_RANK
from keras_dp.partition.facts.placements import REPLICATE, Facts, Shard
from keras_dp.partition.placing.planned import Planned
from keras_dp.partition.placing.rules.elementwise import BINARY, UNARY
from keras_dp.partition.tracing.graph import takers_of
from keras_dp.partition.tracing.names import Output

# These take no time of their own, or tell something of the tensor.
_OTHERS = {"Cast", "EnsureShape", "Identity", "OnesLike", "PreventGradient", "StopGradient", "ZerosLike"}
_OF_ENTRIES = {*UNARY, *BINARY} - _OTHERS


def compute_once_from_gathered_rows(planned: Planned) -> None:
    """Plans at home the operations on entries whose results are only taken at home, where fewer tensors are gathered so."""
    takers = takers_of(planned.sources)
    movable: set[str] = set()
    for name in reversed(planned.nodes):
        taken_by = takers[name, 0]
        if taken_by and _is_of_entries(name, planned) and all(_takes_whole(t, planned) or t in movable for t in taken_by):
            movable.add(name)

    def is_gathered(output: Output) -> bool:
        return any(_takes_whole(taker, planned) for taker in takers[output])

    for together in _connected(movable, planned):
        results = [name for name in together if is_gathered((name, 0))]
        rows = {output for name in together for output in _rows(name, planned) if output[0] not in together}
        if len([output for output in rows if not is_gathered(output)]) < len(results):
            for name in together:
                planned.plans[name] = Plan([Facts()])
                planned.facts[name, 0] = Facts()


def _connected(names: set[str], planned: Planned) -> list[set[str]]:
    """Returns the nodes in groups: nodes are together if one takes the other's result, or both take the same rows."""
    groups: dict[str, set[str]] = {}
    for name in names:
        joined = {name, *(output[0] for output in _rows(name, planned))}
        joined = joined.union(*(groups[member] for member in joined if member in groups))
        groups |= dict.fromkeys(joined, joined)
    distinct = {id(group): group for group in groups.values()}
    return [group.intersection(names) for group in distinct.values()]


def _takes_whole(name: str, planned: Planned) -> bool:
    """Returns whether a node takes its inputs whole. A shape is known without them."""
    return planned.plans[name].is_at_home and planned.nodes[name].op not in SHAPES_AND_RANK


def _rows(name: str, planned: Planned) -> list[Output]:
    """Returns the inputs of a node that have rows."""
    return [output for output in planned.sources[name] if isinstance(planned.facts[output].placement, Shard)]


def _is_of_entries(name: str, planned: Planned) -> bool:
    """Returns whether towers compute a node on entries of their rows, each from its own rows and from tensors at home."""
    plan, rows = planned.plans[name], _rows(name, planned)
    is_plain = plan.needs is not None and not (plan.instance or plan.readings or plan.gathers)
    if planned.nodes[name].op not in _OF_ENTRIES or not rows or not is_plain:
        return False
    others = [output for output in planned.sources[name] if output not in rows]
    are_there = all(planned.facts[o].placement == REPLICATE and planned.plans[o[0]].is_at_home for o in others)
    return are_there and isinstance(planned.facts[name, 0].placement, Shard) and planned.facts[name, 0].entries is None
