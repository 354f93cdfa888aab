"""Define the view of a propagation under way that its parts have."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from keras_dp.partition.facts.node import Plan, Static
from keras_dp.partition.facts.placements import Facts
from keras_dp.partition.tracing.names import Output
from keras_dp.partition.tracing.traced import Traced


@dataclasses.dataclass(frozen=True)
class Gathered:
    """A node that is computed once, from gathered rows.

    Attributes:
        type: the type of its operation.
        name: the node's name.
        reason: why no tower computes it.
    """

    type: str
    name: str
    reason: str


class Planned(Protocol):
    """Holds the plans of the nodes so far; see `Propagation` for the attributes."""

    traced: Traced
    nodes: dict[str, Any]
    facts: dict[Output, Facts]
    plans: dict[str, Plan]
    sources: dict[str, list[Output]]
    gathered: list[Gathered]
    batch_rows: int | None

    def static(self, output: Output) -> Static:
        """Returns the dtype and the shape of an output, as far as TensorFlow or the rules know them."""


class Bodies(Protocol):
    """Looks into the functions that nodes run; see `Propagation`."""

    def body(
        self, name: str, arguments: Sequence[Facts], statics: Sequence[Static], known_shapes: bool
    ) -> tuple[Any, list[Facts]]:
        """Returns the propagation through a function that each tower would run by itself, and the facts of its outputs."""
