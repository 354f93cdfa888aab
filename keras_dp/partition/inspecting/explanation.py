"""Explain where towers meet, what that costs, and what is computed once."""

import dataclasses
from collections.abc import Sequence

from keras_dp.partition.facts.placements import Shard
from keras_dp.partition.placing.slice_bytes import bytes_of_whole
from keras_dp.partition.program.places import Place
from keras_dp.partition.step import Partition
from keras_dp.partition.tracing.names import name_of
from keras_dp.partition.tracing.user_lines import user_line


@dataclasses.dataclass(frozen=True)
class Meeting:
    """A tensor that towers exchange.

    Attributes:
        kind: "sum" or another reduction of parts, "variance", "gather" of rows, "cut" of a whole tensor into slices, or
            "first" for the first tower's own value.
        name: the name of the tensor.
        bytes: the bytes of the whole tensor; None if its size is not known before the step runs.
        line: the user's line that made the tensor, if known.
    """

    kind: str
    name: str
    bytes: int | None
    line: str


@dataclasses.dataclass(frozen=True)
class Once:
    """An operation that is computed once, from gathered rows.

    Attributes:
        type: the type of the operation.
        name: the name of its node.
        reason: the reason why towers do not compute it.
        bytes: the bytes of the gathered rows; None if their size is not known before the step runs.
        line: the user's line that made the operation, if known.
    """

    type: str
    name: str
    reason: str
    bytes: int | None
    line: str


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """Explains how a step is partitioned.

    Attributes:
        devices: the devices of the N towers.
        home: the device of operations that are computed once.
        batch_rows: B, the number of rows for which bytes are computed.
        on_towers: the number of operations of the step that every tower computes.
        at_home: the number of operations that are computed once.
        jit_compile: whether XLA compiles the operations on towers, all those between two exchanges together.
        meetings: the tensors that towers exchange, in the order of the step.
        once: the operations for which rows are gathered.
        share_of_arithmetic: the share of the floating-point operations on rows that towers divide among themselves, from 0 to
            1; the rest is computed once, from gathered rows. None if it is not known. Operations on weights alone, such as an
            optimizer's updates, are not on rows.
    """

    devices: list[str]
    home: str
    batch_rows: int
    on_towers: int
    at_home: int
    jit_compile: bool
    meetings: list[Meeting]
    once: list[Once]
    share_of_arithmetic: float | None = None

    def __repr__(self) -> str:
        places = ", ".join(dict.fromkeys(self.devices))
        lines = [
            f"{len(self.devices)} towers on {places}; home on {self.home}; batch of {self.batch_rows} rows",
            f"{self.on_towers} operations on each tower{', compiled by XLA' * self.jit_compile}, {self.at_home} once at home",
            "",
            f"{'exchange':<10}{'tensors':>9}{'bytes':>14}",
        ]
        for kind in sorted({meeting.kind for meeting in self.meetings}):
            of_kind = [meeting for meeting in self.meetings if meeting.kind == kind]
            unknown = sum(meeting.bytes is None for meeting in of_kind)
            size = f"{sum(meeting.bytes or 0 for meeting in of_kind):,}"
            lines.append(f"{kind:<10}{len(of_kind):>9}{size:>14}" + (f" and {unknown} of unknown size" if unknown else ""))
        if self.share_of_arithmetic is not None:
            lines += ["", f"The towers share {100 * self.share_of_arithmetic:.1f} % of the arithmetic."]
        lines += ["", "Computed once, from gathered rows:" if self.once else "No operation is computed from gathered rows."]
        for known in self.once:
            lines.append(f"  {known.type} {known.name!r}: {known.reason}" + (f"; {known.line}" if known.line else ""))
        return "\n".join(lines)

    def notable(self) -> list[Once]:
        """Returns the operations whose gathered rows are at least 1 MiB, and at least a tenth of all exchanged bytes."""
        total = sum(meeting.bytes or 0 for meeting in self.meetings)
        return [once for once in self.once if (once.bytes or 0) >= max(2**20, total / 10)]


def explain(partition: Partition, devices: Sequence[str], batch_rows: int) -> Explanation:
    """Explains how a step is partitioned.

    Args:
        partition: the partition of the step.
        devices: the devices of the N towers.
        batch_rows: B, the number of rows for which bytes are computed.
    """
    graph = partition.traced.graph
    order = {node.name: i for i, node in enumerate(partition.traced.nodes)}
    meetings = [
        Meeting(
            exchange.form.name.lower(),
            name_of(*exchange.output),
            bytes_of_whole(exchange.output, partition.propagation, batch_rows),
            user_line(graph, exchange.output[0]),
        )
        for exchange in sorted(partition.program.meetings, key=lambda exchange: order.get(exchange.output[0], -1))
    ]
    once = [
        Once(
            known.type,
            known.name,
            known.reason,
            _gathered_bytes(partition, known.name, batch_rows),
            user_line(graph, known.name),
        )
        for known in partition.gathered
    ]
    found: dict[Place, set[str]] = {place: set() for place in Place}
    for place, name in partition.program.operations:
        found[place].add(name)
    computed = len(found[Place.TOWERS]), len(found[Place.HOME] | found[Place.REPLICATED])
    target = partition.target
    return Explanation(list(devices), target.home, batch_rows, *computed, target.jit_compile, meetings, once)


def _gathered_bytes(partition: Partition, name: str, batch_rows: int) -> int | None:
    """Counts the bytes of the rows that an operation takes."""
    propagation = partition.propagation
    inputs = propagation.sources[name]
    sizes = [
        bytes_of_whole(output, propagation, batch_rows)
        for output in inputs
        if isinstance(propagation.facts[output].placement, Shard)
    ]
    return None if None in sizes else sum(size or 0 for size in sizes)


def bytes_in_words(number: int) -> str:
    """Returns a number of bytes with its unit."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
