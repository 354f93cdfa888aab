"""Hold the state of a partitioned graph while it is built."""

import dataclasses
from collections.abc import Sequence

from keras_dp.partition.across import Across
from keras_dp.partition.homes import Homes
from keras_dp.partition.instances import Feeds, Instances
from keras_dp.partition.propagation import Propagation
from keras_dp.partition.writing import GraphWriter


@dataclasses.dataclass(frozen=True)
class Construction:
    """The state of a partitioned graph while it is built.

    Attributes:
        graph: the graph so far.
        propagation: the plan of each node.
        devices: the devices of the N towers.
        feeds: the names of the tensors that the graph is given.
        instances: the instances of the nodes so far.
        homes: the devices on which whole tensors are combined.
        across: the exchanges between workers, each of which has N towers; None for a single worker.
    """

    graph: GraphWriter
    propagation: Propagation
    devices: Sequence[str]
    feeds: Feeds
    instances: Instances
    homes: Homes
    across: Across | None

    def surely_has_rows(self, tower: int) -> bool:
        """Returns whether a tower always has rows. The last tower of a single worker has, since B(N-1)//N < B."""
        return tower == len(self.devices) - 1 and self.across is None
