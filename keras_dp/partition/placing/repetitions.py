"""Let home repeat entries by itself, rather than gather the copies from the towers.

The gradient of a bag's mean is the same for each of the bag's entries. A tower makes a copy for each entry, and the sparse
update of the table takes all of them whole. Home needs one gradient for each bag, and can make the copies itself. In general,
home computes a tensor, as well as the towers, if fewer bytes are gathered so, and if that takes little arithmetic.

Only a single worker does so. The texts of other workers may have other lengths, which home does not know.
"""

from keras_dp.partition.facts.placements import REPLICATE, Shard
from keras_dp.partition.placing.propagation import Propagation
from keras_dp.partition.placing.slice_bytes import bytes_of_slice
from keras_dp.partition.tracing.names import Output, output_of

_REPEATED = {"BroadcastTo", "ExpandDims", "Identity", "OneHot", "Reshape", "Squeeze", "Tile"}
_ARITHMETIC = {"Add", "AddV2", "Cast", "DivNoNan", "Mul", "Neg", "RealDiv", "SelectV2", "Sub"}
_MOST_GATHERED = 4  # tensors, so that few messages do not become many


def repeat_at_home(propagation: Propagation) -> None:
    """Plans operations at home, too, where that gathers fewer bytes than their results have."""
    returned = set(map(output_of, propagation.traced.outputs))
    gathered: dict[Output, frozenset[Output]] = {}  # for a tensor: the tensors that home gathers to have the whole of it
    for name, definition in propagation.nodes.items():
        for output in propagation.sources[name]:
            gathered.setdefault(output, frozenset([output] if propagation.is_on_towers(output) else []))
        result = name, 0
        if definition.op in _REPEATED | _ARITHMETIC and result not in returned and _is_of_rows(name, propagation):
            fewer = frozenset[Output]().union(*(gathered[output] for output in propagation.sources[name]))
            is_less = sum(bytes_of_slice(output, propagation) for output in fewer) < bytes_of_slice(result, propagation)
            if is_less and len(fewer) <= _MOST_GATHERED:
                propagation.plans[name].also_at_home = True
                gathered[result] = fewer


def _is_of_rows(name: str, propagation: Propagation) -> bool:
    """Returns whether towers compute a node's rows from rows and from tensors at home, with sizes that are known."""
    plan, placement = propagation.plans[name], propagation.facts[name, 0].placement
    is_on_towers = not plan.is_at_home and not plan.gathers and not plan.also_at_home
    if not is_on_towers or not isinstance(placement, Shard) or propagation.facts[name, 0].entries is not None:
        return False
    sizes = propagation.static((name, 0)).shape or [None]
    others = [size for axis, size in enumerate(sizes) if axis != placement.axis]
    placements = [propagation.facts[output].placement for output in propagation.sources[name]]
    are_known = all(isinstance(size, int) for size in (*others, *placement.blocks))
    return are_known and all(placed == REPLICATE or isinstance(placed, Shard) for placed in placements)
