"""Find the lists that have to be made at home.

Rows can be gathered, but a TensorList on towers cannot. If an operation that is computed once takes a list, all operations that
fill the list are computed once, too.
"""

from collections.abc import Set

from keras_dp.partition.facts.placements import REPLICATE, ListOf
from keras_dp.partition.placing.planned import Planned
from keras_dp.partition.tracing.graph import reached
from keras_dp.partition.tracing.names import Output


def lists_wanted_at_home(name: str, propagation: Planned) -> Set[str]:
    """Returns the nodes on towers that make the lists that a node takes at home, directly or from other lists.

    Args:
        name: the node.
        propagation: the `Propagation`, with the plans of the node and of all nodes before it.
    """
    plan, sources = propagation.plans[name], propagation.sources[name]
    needs = plan.needs or [REPLICATE] * len(sources)
    taken = zip(sources, needs, strict=True)
    begins = {source[0] for source, need in taken if _is_list(source, propagation) and not isinstance(need, ListOf)}

    def is_movable(maker: str) -> bool:
        return not (propagation.plans[maker].is_at_home or propagation.plans[maker].also_at_home)

    def makers(name: str) -> set[str]:
        return {source[0] for source in propagation.sources[name] if _is_list(source, propagation)}

    return reached(filter(is_movable, begins), lambda name: filter(is_movable, makers(name)))


def _is_list(output: Output, propagation: Planned) -> bool:
    return isinstance(propagation.facts[output].placement, ListOf)
