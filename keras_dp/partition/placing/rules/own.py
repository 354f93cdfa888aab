"""Place conversions from parts of sums to each tower's own values, and back."""

from dataclasses import replace
from typing import Any

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import OWN, REPLICATE, Facts, Need, Partial, Shard
from keras_dp.partition.facts.tower_builder import TowerBuilder
from keras_dp.partition.own import is_own_part, is_total_of_own
from keras_dp.partition.placing.rules.elementwise import elementwise
from keras_dp.partition.placing.rules.registry import rule


@rule("Snapshot")
def own(node: Node) -> Plan | None:
    """Plans a conversion: a part becomes a tower's own value, or the towers' own values become the parts of a sum."""
    placement = node.inputs[0].placement

    def identity(builder: TowerBuilder, definition: Any, tower: int, inputs: list[str]) -> str:
        return builder.copy(definition, tower, inputs, operation="Identity")

    if is_own_part(node.name):
        return None if isinstance(placement, Shard) else Plan([Facts(OWN)], [placement], identity)
    if is_total_of_own(node.name):
        return Plan([Facts(Partial())], [OWN], identity) if placement == OWN else None
    return elementwise(node)


def with_own(node: Node, plan: Plan | None, has_rows: bool) -> Plan | None:
    """Plans a node of which some inputs are the towers' own values.

    Each tower computes with its own values. An output that would be replicated becomes the tower's own value, too.

    Args:
        node: the node.
        plan: the plan if these inputs were replicated; None if there is none, or no input has rows.
        has_rows: whether another input has rows, or parts of a sum.
    """
    if node.type == "RealDiv" and [facts.placement for facts in node.inputs] == [Partial(), OWN]:
        # Towers divide by different values, so that the sum cannot be taken before.
        return Plan([Facts(Partial())], [Partial(), OWN])
    if plan is None and not has_rows:
        return Plan([Facts(OWN) for _ in node.results], [facts.placement for facts in node.inputs])
    if plan is None or plan.needs is None:
        return None
    needs: list[Need] = []
    for facts, need in zip(node.inputs, plan.needs, strict=True):
        if facts.placement == OWN and need != REPLICATE:
            return None
        needs.append(OWN if facts.placement == OWN else need)
    outputs = [Facts(OWN, None, facts.shape) if facts.placement == REPLICATE else facts for facts in plan.outputs]
    return replace(plan, outputs=outputs, needs=needs, also_at_home=False)
