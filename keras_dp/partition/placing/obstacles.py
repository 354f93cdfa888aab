"""Find out whether each tower can run the body of a loop, branch or call by itself, where no towers meet."""

from collections.abc import Sequence
from typing import Any

from keras_dp.partition.facts.node import Plan, Static
from keras_dp.partition.facts.operations import READS, SHAPES_AND_RANK
from keras_dp.partition.facts.placements import ANY_SHAPE, LOCAL_SHAPE, REPLICATE, Facts, ListOf, Need, Shard
from keras_dp.partition.facts.rows import Rows
from keras_dp.partition.placing import control_flow
from keras_dp.partition.placing.planned import Planned
from keras_dp.partition.placing.rules.elementwise import CHECKS
from keras_dp.partition.tensorflow_internals import is_stateful

_STATELESS = (*READS, *CHECKS, *control_flow.TYPES, "Placeholder")


def obstacle(definition: Any, body: Planned) -> str | None:
    """Returns why a node of a body cannot run unchanged on each tower; None if it can.

    Args:
        definition: the node.
        body: the plans of the node and of all nodes before it.
    """
    plan, where = body.plans[definition.name], f"{definition.op} {definition.name!r}"
    if body.gathered:
        return f"{where}: {body.gathered[-1].reason}"
    # A function that no rule has looked into may have effects, too.
    is_unseen = definition.op in control_flow.TYPES and plan.is_at_home
    if is_stateful(definition.op) and (is_unseen or definition.op not in _STATELESS):
        return f"{where} has effects"
    sources = body.sources[definition.name]
    taken = [body.facts[source] for source in sources]
    if plan.is_at_home:
        return _obstacle_at_home(definition, plan, taken, where)
    if plan.instance:
        return f"{where} is not the same on a tower"
    for source, facts, need in zip(sources, taken, plan.needs or (), strict=True):
        is_cut = (
            facts.placement == REPLICATE and isinstance(need, Shard) and can_cut(body.static(source), need, body.batch_rows)
        )
        if not is_cut and not _is_there(facts, need):
            what = "the number of all rows" if facts.placement == need else f"{facts.placement} as {need}"
            return f"{where} takes {what}"
    return None


def can_cut(static: Static, need: Shard, batch_rows: int | None) -> bool:
    """Returns whether a tower can take its rows of a whole tensor in a body: each row is known to have one block."""
    blocks, sizes = need.blocks, static.shape
    if batch_rows is None or sizes is None or len(blocks) != 1 or not isinstance(blocks[0], int):
        return False
    return bool(sizes[need.axis] == batch_rows * blocks[0])


def _obstacle_at_home(definition: Any, plan: Plan, taken: Sequence[Facts], where: str) -> str | None:
    if definition.op == "BroadcastGradientArgs" and _meets_all_rows(*taken):
        return f"{where} takes the number of all rows"
    if definition.op in (*SHAPES_AND_RANK, "BroadcastGradientArgs"):
        return None
    if any(isinstance(facts.placement, Shard) for facts in plan.outputs):
        return f"{where} is cut into slices"
    for facts in taken:
        if facts.placement != REPLICATE:
            return f"{where} takes the whole of {facts.placement}"
        if facts.counts_rows() and not _is_local(plan.outputs):
            return f"{where} takes the number of all rows"
    return None


def _meets_all_rows(one: Facts, other: Facts) -> bool:
    """Returns whether one of two shapes counts rows where the other one has an integer, which may be the number of all rows."""
    pairs = list(zip(reversed(one.numbers or []), reversed(other.numbers or []), strict=False))
    return any(isinstance(a, Rows) and isinstance(b, int) and b > 1 for a, b in pairs + [(b, a) for a, b in pairs])


def _is_local(results: Sequence[Facts]) -> bool:
    """Returns whether results may be computed from a tower's own number of rows: they count rows, or are known for any."""
    return any(facts.counts_rows() for facts in results) or all(facts.is_local_shape() for facts in results)


def _is_there(facts: Facts, need: Need) -> bool:
    """Returns whether a tower has a tensor in the form that it needs, in a body without exchanges."""
    if isinstance(need, ListOf):
        return isinstance(facts.placement, ListOf)
    if need == REPLICATE:
        return facts.placement == REPLICATE and not facts.counts_rows()
    if need in (LOCAL_SHAPE, ANY_SHAPE):
        return facts.placement == REPLICATE
    return facts.placement == need
