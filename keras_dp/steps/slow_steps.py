"""Tell once, early in a training, if it could be faster."""

import itertools
import logging
import time
from statistics import median

import tensorflow as tf

from keras_dp.arithmetic.functions import arithmetic_of
from keras_dp.partition.step import Partition

# The first steps trace, build and warm up.
SKIPPED, OBSERVED = 10, 50
LARGE_WAIT = 0.1  # of a step
# A GPU begins an operation about every 5 µs, however small it is; docs/gpu.md measures it.
LAUNCH_SECONDS = 5e-6
MOST = 0.5  # of a step
LARGE_SHARE = 0.25  # of the products of matrices
_PRODUCTS = ("MatMul", "Conv", "Einsum", "Rnn", "RNN")

logger = logging.getLogger("keras_dp")


class SlowSteps:
    """Observes some fifty steps of a training, and logs one line if something else than arithmetic takes their time.

    Args:
        seconds_waited: the time for which steps have waited for their input.

    Attributes:
        is_wanted: whether the current training may be commented.
    """

    def __init__(self, seconds_waited: tf.Variable):
        self.is_wanted = False
        self._seconds_waited = seconds_waited
        self._begins: list[float] = []
        self._waited: list[float] = []

    def note_call(self, partition: Partition | None, executions: int) -> None:
        """Is called after each call of the training step.

        Args:
            partition: the partition of the step; None if it is not known.
            executions: the number of steps in a call.
        """
        if not self.is_wanted or len(self._begins) > SKIPPED + OBSERVED:
            return
        self._begins.append(time.perf_counter())
        if len(self._begins) > SKIPPED:
            self._waited.append(float(self._seconds_waited.numpy()))
        if len(self._begins) > SKIPPED + OBSERVED:
            # Medians: an evaluation or a filled shuffle buffer is not typical.
            call = median(_differences(self._begins[SKIPPED:]))
            wait = median(_differences(self._waited))
            comment = _comment(call / executions, wait / executions, partition)
            if comment is not None:
                logger.info(comment)


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def _comment(step: float, wait: float, partition: Partition | None) -> str | None:
    """Says why a step of so many seconds could be faster; None if there is no reason."""
    if wait > LARGE_WAIT * step:
        return (
            f"A step takes {1e3 * step:.1f} ms, and waits {1e3 * wait:.1f} ms of it for input: more devices will not make it "
            "faster. Prepare the data ahead: dataset.prefetch, map with num_parallel_calls, cache, or larger files."
        )
    if partition is None:
        return None
    on_tower = sum(not plan.is_at_home for plan in partition.propagation.plans.values())
    if on_tower * LAUNCH_SECONDS > MOST * step:
        return (
            f"A step takes {1e3 * step:.1f} ms, about as long as {on_tower:,} operations take to begin: each device has too "
            "few rows to be busy. A larger batch helps, jit_compile=True, or fewer devices."
        )
    once = _share_of_products_once(partition)
    if once > LARGE_SHARE:
        return (
            f"One device computes {100 * once:.0f} % of the products of matrices in a step, while the others wait. "
            "print(parallel.report()) names these operations."
        )
    return None


def _share_of_products_once(partition: Partition) -> float:
    """Returns the share of the arithmetic of products that is computed once; 0 if nothing is gathered, or rows are unknown."""
    propagation = partition.propagation
    if not partition.gathered or propagation.batch_rows is None:
        return 0.0
    flops = arithmetic_of(partition.traced)
    products = {node.name: flops[node.name] for node in partition.traced.nodes if any(kind in node.op for kind in _PRODUCTS)}
    once = sum(count for name, count in products.items() if propagation.plans[name].is_at_home)
    return once / max(sum(products.values()), 1)
