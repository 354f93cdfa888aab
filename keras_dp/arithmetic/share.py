"""Count which share of a step's arithmetic towers divide among themselves."""

import dataclasses
from collections.abc import Mapping

from keras_dp.arithmetic.functions import arithmetic_of
from keras_dp.partition.step import Partition
from keras_dp.partition.tracing.trace import Trace
from keras_dp.partition.tracing.traced import traced_step


@dataclasses.dataclass(frozen=True)
class ArithmeticOfRows:
    """Counts the floating-point operations of a step that have more to do for more rows.

    These are the forward pass, losses, gradients and metrics of rows. Not counted are operations on weights alone, such as an
    optimizer's updates, which cost the same for any number of rows. All sizes are those of one device.

    Attributes:
        on_towers: the operations that towers compute, each for its own rows.
        once: by node, the operations that are computed once, from gathered rows.
    """

    on_towers: int
    once: Mapping[str, int]

    @property
    def total(self) -> int:
        """The operations of one device."""
        return self.on_towers + sum(self.once.values())

    @property
    def share(self) -> float | None:
        """The share that towers divide among themselves, from 0 to 1; None if no operation has more to do for more rows."""
        return self.on_towers / self.total if self.total else None


def arithmetic_of_rows(partition: Partition, with_more_rows: Trace) -> ArithmeticOfRows:
    """Counts the arithmetic of rows in a step, on towers and once.

    Args:
        partition: the partition of a step whose number of rows is known.
        with_more_rows: a trace of the same step with more rows.
    """
    more = arithmetic_of(traced_step(with_more_rows.concrete))
    of_rows = {name: flops for name, flops in arithmetic_of(partition.traced).items() if more.get(name, flops) > flops}
    once = {name: flops for name, flops in of_rows.items() if partition.propagation.plans[name].is_at_home}
    return ArithmeticOfRows(sum(of_rows.values()) - sum(once.values()), once)
