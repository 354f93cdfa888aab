"""Tell once, early in a training, if it could be faster."""

import logging
import time
from statistics import median

import tensorflow as tf

from keras_dp.arithmetic.functions import arithmetic_of
from keras_dp.devices.available import are_gpus
from keras_dp.partition.step import Partition

# The first steps trace, build and warm up.
SKIPPED, OBSERVED = 10, 50
LARGE_WAIT = 0.1  # of a step
LARGE_WAIT_SECONDS = 1e-3  # it takes a part of a millisecond to take a batch that is ready
# A GPU begins an operation about every 5 µs, however small it is: the assumption of docs/gpu_audit.md.
LAUNCH_SECONDS = 5e-6
MOSTLY_LAUNCHES = 0.5  # of a step
LARGE_SHARE_ONCE = 0.25  # of the products of matrices
_PRODUCTS = ("MatMul", "Conv", "Einsum", "Rnn", "RNN")

logger = logging.getLogger("keras_dp")


class SlowSteps:
    """Observes some fifty calls of the training step, and logs one line if training could be faster.

    Args:
        seconds_waited: the time for which steps have waited for their input; it stays 0 if that is not measured.

    Attributes:
        is_wanted: whether the current training may be commented.
    """

    def __init__(self, seconds_waited: tf.Variable):
        self.is_wanted = False
        self._seconds_waited = seconds_waited
        self._calls = 0
        self._last: tuple[float, float] | None = None
        self._seconds: list[float] = []
        self._waits: list[float] = []

    def pause(self) -> None:
        """Leaves out the time until the next step, since an epoch or an evaluation begins."""
        self._last = None

    def note_call(self, partition: Partition | None, executions: int) -> None:
        """Notes that a call of the training step has ended.

        Args:
            partition: the partition of the step; None if it is not known.
            executions: the number of steps in a call.
        """
        if not self.is_wanted or len(self._seconds) >= OBSERVED:
            return
        self._calls += 1
        if self._calls < SKIPPED:
            return
        now, waited = time.perf_counter(), float(self._seconds_waited.numpy())
        if self._last is not None:
            self._seconds.append(now - self._last[0])
            self._waits.append(waited - self._last[1])
        self._last = now, waited
        if len(self._seconds) == OBSERVED:
            # Medians: a filled shuffle buffer is not typical.
            comment = _comment(median(self._seconds) / executions, median(self._waits) / executions, partition)
            if comment is not None:
                logger.info("%s See docs/questions.md.", comment)


def _comment(step: float, wait: float, partition: Partition | None) -> str | None:
    """Says why a step of so many seconds could be faster; None if there is no reason."""
    if wait > max(LARGE_WAIT * step, LARGE_WAIT_SECONDS):
        return (
            f"A step takes {1e3 * step:.1f} ms, and waits {1e3 * wait:.1f} ms of it for input: more devices will not make it "
            "faster. Prepare batches ahead, in a tf.data.Dataset: prefetch, map with num_parallel_calls, cache, larger files."
        )
    if partition is None:
        return None
    on_tower = sum(not plan.is_at_home for plan in partition.propagation.plans.values())
    target = partition.target
    are_launched = len(target.devices) > 1 and are_gpus(target.devices) and not target.jit_compile
    if are_launched and on_tower * LAUNCH_SECONDS > MOSTLY_LAUNCHES * step:
        return (
            f"A step takes {1e3 * step:.1f} ms, about as long as {on_tower:,} operations take to begin: each device has too "
            "few rows to be busy. A larger batch helps, jit_compile=True, or fewer devices."
        )
    once = _share_of_products_once(partition)
    if len(target.devices) > 1 and once > LARGE_SHARE_ONCE:
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
    products = arithmetic_of(partition.traced, lambda op: any(kind in op for kind in _PRODUCTS))
    once = sum(count for name, count in products.items() if propagation.plans[name].is_at_home)
    return once / max(sum(products.values()), 1)
