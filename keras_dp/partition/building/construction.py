"""Hold the state of a partitioned graph while it is built."""

import dataclasses
from collections.abc import Sequence

from keras_dp.partition.building.across import Across
from keras_dp.partition.building.homes import Homes
from keras_dp.partition.building.instances import Feeds, Instances
from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.facts.row_counts import RowCounts
from keras_dp.partition.placing.propagation import Propagation


@dataclasses.dataclass(frozen=True)
class Construction:
    """The state of a partitioned graph while it is built.

    Attributes:
        graph: the graph so far.
        propagation: the plan of each node.
        devices: the devices of the N towers.
        feeds: the names of the tensors that the graph is given.
        known_rows: the numbers of rows, if they are known while the step is traced; else None.
        instances: the instances of the nodes so far.
        homes: the devices on which whole tensors are combined.
        across: the exchanges between workers, each of which has N towers; None for a single worker.
    """

    graph: GraphWriter
    propagation: Propagation
    devices: Sequence[str]
    feeds: Feeds
    known_rows: RowCounts | None
    instances: Instances
    homes: Homes
    across: Across | None

    def surely_has_rows(self, tower: int) -> bool:
        """Returns whether a tower always has rows."""
        return self.takes_sums(tower) or (self.known_rows is not None and self.known_rows.own_rows[tower] > 0)

    def surely_has_none(self, tower: int) -> bool:
        """Returns whether a tower never has rows of its own."""
        return self.known_rows is not None and self.known_rows.own_rows[tower] == 0

    def takes_sums(self, tower: int) -> bool:
        """Returns whether a tower takes sums that are whole already as its part. The other towers take zeros.

        The last tower of a single worker always has rows, since B(N-1)//N < B.
        """
        return tower == len(self.devices) - 1 and self.across is None
