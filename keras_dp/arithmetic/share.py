"""Count which share of a step's arithmetic towers divide among themselves."""

from keras_dp.arithmetic.functions import arithmetic_of
from keras_dp.partition.step import Partition
from keras_dp.partition.tracing.graph import traced_step
from keras_dp.partition.tracing.trace import Trace


def share_of_towers(partition: Partition, with_more_rows: Trace) -> float | None:
    """Returns the share of the arithmetic of rows that towers compute, each for its own rows, from 0 to 1.

    The rest is computed once, from gathered rows. The arithmetic of rows is the arithmetic of the operations that have more to
    do for more rows: forward, losses, gradients and metrics of rows. Not counted are operations on weights alone, such as an
    optimizer's updates, which cost the same for any number of rows. All sizes are those of one device.

    Args:
        partition: the partition of a step whose number of rows is known.
        with_more_rows: a trace of the same step with more rows.

    Returns:
        The share; None if no operation is known to have more to do for more rows.
    """
    more = arithmetic_of(traced_step(with_more_rows.concrete))
    of_rows = {name: flops for name, flops in arithmetic_of(partition.traced).items() if more.get(name, flops) > flops}
    plans = partition.propagation.plans
    shared = sum(flops for name, flops in of_rows.items() if not plans[name].is_at_home)
    return shared / sum(of_rows.values()) if of_rows else None
