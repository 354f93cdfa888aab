"""Name the tensors of the traced graph in the partitioned one."""

import dataclasses
from collections.abc import Mapping, Sequence

from keras_dp.partition.program.places import Instance, Place
from keras_dp.partition.tracing.names import Output, name_of


@dataclasses.dataclass(frozen=True)
class Feeds:
    """The names of the tensors that the partitioned graph is given.

    Attributes:
        batch_rows: B, int32.
        begins: for each tower, the index of its first row, int32.
        rows: for each tower, the number of rows that it computes with, int32; at least 1.
        own_rows: for each tower, how many of these rows are its own, int32; 0 if it has borrowed a row.
        is_alive: for each tower, whether it has rows of its own, bool.
        worker_rows: the number of each worker's rows, W numbers, int32; for several workers.
        whole: for each argument of the step, the tensor of the whole batch.
        slices: for each argument that has rows, the N slices.

    The numbers are constants if they are known while the step is traced.
    """

    batch_rows: str
    begins: Sequence[str]
    rows: Sequence[str]
    own_rows: Sequence[str]
    is_alive: Sequence[str]
    worker_rows: str
    whole: Mapping[str, str]
    slices: Mapping[str, Sequence[str]]


@dataclasses.dataclass
class Instances:
    """Maps each traced node to its instances, the nodes that compute it in the partitioned graph.

    Attributes:
        slices: for each argument that has rows, the names of the N slices.
        made: by instance, the name of its node at home, or of the N nodes on the towers.
    """

    slices: Mapping[str, Sequence[str]]
    made: dict[Instance, list[str]] = dataclasses.field(default_factory=dict)

    def at_home(self, output: Output) -> str:
        """Returns the name of a tensor's instance at home."""
        return name_of(self.made[Place.HOME, output[0]][0], output[1])

    def part(self, output: Output, tower: int, place: Place = Place.TOWERS) -> str:
        """Returns the name of a tensor's instance on a tower."""
        name, port = output
        return self.slices[name][tower] if name in self.slices else name_of(self.made[place, name][tower], port)

    def is_on_towers(self, output: Output) -> bool:
        """Returns whether towers compute a tensor."""
        return (Place.TOWERS, output[0]) in self.made

    def is_at_home(self, output: Output) -> bool:
        """Returns whether home computes a tensor."""
        return (Place.HOME, output[0]) in self.made
