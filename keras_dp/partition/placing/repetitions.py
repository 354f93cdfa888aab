"""Let home repeat entries by itself, rather than gather the copies from the towers.

The gradient of a bag's mean is the same for each of the bag's entries. A tower makes a copy for each entry, and the sparse
update of the table takes all of them whole. Home needs one gradient for each bag, and can make the copies itself. In general,
home computes a tensor, as well as the towers, if fewer bytes are gathered so, and if that takes little arithmetic.
"""

from typing import Any, Protocol

from keras_dp.partition.facts.node import Plan, Static
from keras_dp.partition.facts.placements import REPLICATE, Facts, Shard
from keras_dp.partition.placing.slice_bytes import bytes_of_slice
from keras_dp.partition.tracing.graph import Traced
from keras_dp.partition.tracing.names import Output, output_of

_REPEATED = {"BroadcastTo", "ExpandDims", "Identity", "OneHot", "Reshape", "Squeeze", "Tile"}
_ARITHMETIC = {"Add", "AddV2", "Cast", "DivNoNan", "Mul", "Neg", "RealDiv", "SelectV2", "Sub"}
_MOST_GATHERED = 4  # tensors, so that few messages do not become many


class Planned(Protocol):
    """Defines the parts of a propagation that are read and changed here."""

    traced: Traced
    facts: dict[Output, Facts]
    plans: dict[str, Plan]
    nodes: dict[str, Any]
    sources: dict[Any, list[Output]]
    tower_rows: int

    def static(self, output: Output) -> Static:
        """Returns the dtype and the shape of an output, as far as TensorFlow or the rules know them."""


def repeat_at_home(planned: Planned) -> None:
    """Plans operations at home, too, where that gathers fewer bytes than their results have."""
    returned = set(map(output_of, planned.traced.outputs))
    gathered: dict[Output, frozenset[Output]] = {}  # for a tensor: the tensors that home gathers to have the whole of it
    for name, definition in planned.nodes.items():
        for output in planned.sources[name]:
            gathered.setdefault(output, frozenset([output] if _has_rows_on_towers(output, planned) else []))
        result = name, 0
        if definition.op in _REPEATED | _ARITHMETIC and result not in returned and _is_of_rows(name, planned):
            fewer = frozenset[Output]().union(*(gathered[output] for output in planned.sources[name]))
            is_less = sum(bytes_of_slice(output, planned) for output in fewer) < bytes_of_slice(result, planned)
            if is_less and len(fewer) <= _MOST_GATHERED:
                planned.plans[name].also_at_home = True
                gathered[result] = fewer


def _has_rows_on_towers(output: Output, planned: Planned) -> bool:
    """Returns whether the whole of a tensor is gathered from the towers. The rows of arguments count as well."""
    is_argument = planned.nodes[output[0]].op == "Placeholder" and isinstance(planned.facts[output].placement, Shard)
    return is_argument or not planned.plans[output[0]].is_at_home


def _is_of_rows(name: str, planned: Planned) -> bool:
    """Returns whether towers compute a node's rows from rows and from tensors at home, with sizes that are the same everywhere.

    Workers may read texts of different lengths, so that one worker's length is not that of all rows.
    """
    plan, placement = planned.plans[name], planned.facts[name, 0].placement
    is_on_towers = not plan.is_at_home and not plan.gathers and not plan.also_at_home
    if not is_on_towers or not isinstance(placement, Shard) or planned.facts[name, 0].entries is not None:
        return False
    sizes = planned.static((name, 0)).shape or [None]
    others = [size for axis, size in enumerate(sizes) if axis != placement.axis]
    placements = [planned.facts[output].placement for output in planned.sources[name]]
    are_known = all(isinstance(size, int) for size in (*others, *placement.blocks))
    return are_known and all(placed == REPLICATE or isinstance(placed, Shard) for placed in placements)
