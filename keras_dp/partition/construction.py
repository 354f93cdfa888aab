"""Hold the partitioned graph under construction."""

import dataclasses
from collections.abc import Sequence

from keras_dp.partition.across import Across
from keras_dp.partition.homes import Homes
from keras_dp.partition.instances import Feeds, Instances
from keras_dp.partition.propagation import Propagation
from keras_dp.partition.writing import GraphWriter


@dataclasses.dataclass(frozen=True)
class Construction:
    """A partitioned graph under construction.

    Attributes:
        graph: is written.
        propagation: how each node is computed.
        devices: of the N towers.
        feeds: names of the tensors that are given.
        instances: of the nodes so far.
        homes: says where a whole tensor is put together.
        across: what the workers tell each other, of which each has N towers; None for one worker alone.
    """

    graph: GraphWriter
    propagation: Propagation
    devices: Sequence[str]
    feeds: Feeds
    instances: Instances
    homes: Homes
    across: Across | None

    def surely_has_rows(self, tower: int) -> bool:
        """Whether a tower always has rows: the last one of a worker alone has, since B(N-1)//N < B."""
        return tower == len(self.devices) - 1 and self.across is None
