"""State on which devices a step runs, and how these work together."""

import dataclasses
from collections.abc import Sequence

from keras_dp.partition.building.across import Across


@dataclasses.dataclass(frozen=True)
class Target:
    """Describes where a partitioned step runs.

    Attributes:
        devices: the devices of the N towers. Towers of one device follow each other, and compute in turns; see `turns`.
        home: the device of the operations that are computed once, on each worker.
        across: the exchanges between workers, each of which runs the step on its own towers; None for one worker alone.
        jit_compile: whether XLA compiles the operations of towers between exchanges.
        pack_copies: whether the tensors that devices send each other share messages, and each tower combines small parts of
            sums by itself; see `packing` and `replication`.
        has_collectives: whether towers exchange messages by collectives, in place of copies; see `collectives`.
    """

    devices: Sequence[str]
    home: str
    across: Across | None = None
    jit_compile: bool = False
    pack_copies: bool = False
    has_collectives: bool = False

    @property
    def takes_turns(self) -> bool:
        """Whether towers share a device."""
        return len({*self.devices}) < len(self.devices)
