"""Tell whether towers can follow the plan of a node, and else why the node is computed once."""

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import LOCAL_SHAPE, REPLICATE, Shard
from keras_dp.partition.placing import control_flow
from keras_dp.partition.placing.measuring import Measures
from keras_dp.partition.placing.rules import RULES
from keras_dp.partition.placing.rules.drawing import DRAWS
from keras_dp.partition.placing.rules.elementwise import CHECKS
from keras_dp.partition.placing.rules.recurrent import RECURRENT
from keras_dp.partition.tensorflow_internals import is_stateful


def is_sound(node: Node, plan: Plan, measures: Measures | None) -> bool:
    """Returns whether each shape that a tower takes in its own version is known to have one, and all rows can be met.

    Args:
        node: the node.
        plan: its plan.
        measures: the tensors that have named sizes; None if no towers meet over what the node takes and gives.
    """
    needs = plan.needs or [REPLICATE] * len(node.inputs)
    taken = zip(node.inputs, needs, strict=True)
    are_local = all(facts.is_local_shape() for facts, need in taken if need == LOCAL_SHAPE)
    return are_local and not _obstacle_to_meeting(node, plan, measures)


def why_once(node: Node, plan: Plan | None, measures: Measures | None) -> str:
    """Returns why a node is computed once. The arguments are those of `is_sound`; None for a node without a plan."""
    obstacle = _obstacle_to_meeting(node, plan, measures) if plan else None
    if obstacle:
        return obstacle
    if control_flow.is_control_flow(node):
        return "no tower has its own version of a shape that it takes"
    if is_stateful(node.type) and node.type not in (*DRAWS, *CHECKS, *RECURRENT):
        return "it has effects, which happen once"
    if node.type not in RULES:
        return "the operation has no rule"
    has_all_axes = all(static.rank is not None for static in node.statics)
    return "rows meet rows" if has_all_axes else "rows meet a tensor with an unknown number of axes"


def _obstacle_to_meeting(node: Node, plan: Plan, measures: Measures | None) -> str | None:
    """Returns why an input could not be cut, or the rows of a result could not be gathered; None if all can be."""
    if measures is None:
        return None
    needs = plan.needs or [REPLICATE] * len(node.inputs)
    for facts, static, need in zip(node.inputs, node.statics, needs, strict=True):
        if isinstance(need, Shard) and need != facts.placement:
            if static.rank is None:
                return "it takes a tensor with an unknown number of axes, which cannot be cut"
            if not measures.can_split(need.blocks):
                return "it takes rows in segments of unknown lengths"
    for facts, static in zip(plan.outputs, node.results, strict=True):
        if isinstance(facts.placement, Shard):
            if not isinstance(facts.shape, tuple) and static.rank is None:
                return "its result has an unknown number of axes, and its rows could not be gathered"
            if not measures.can_split(facts.placement.blocks):
                return "its result has rows in segments of unknown lengths, which could not be gathered"
    return None
