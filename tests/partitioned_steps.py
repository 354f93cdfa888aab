"""Run a step on towers without a model: partition it, and call it with whole tensors."""

import contextlib
import itertools
import random
from unittest import mock

import numpy as np
import tensorflow as tf

from keras_dp.partition.building.target import Target
from keras_dp.partition.facts.row_counts import RowCounts
from keras_dp.partition.placing import propagation
from keras_dp.partition.placing.readings import RowSources, readings
from keras_dp.partition.step import Argument, run_partitioned
from keras_dp.partition.tracing.trace import Trace
from keras_dp.steps.across_workers import AcrossWorkers
from keras_dp.workers.collectives import OneWorker

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
HOME = "CPU:3"


def specs_of(arrays, known_rows=None):
    """Returns the specs of arrays whose first axis is the rows."""
    return [tf.TensorSpec([known_rows, *array.shape[1:]], tf.constant(array).dtype) for array in arrays]


def run(step, arrays):
    """Runs a partitioned step on arrays whose first axis is the rows, and returns its result and its partition."""
    partitioned, partition = partitioned_step(step, specs_of(arrays), [True] * len(arrays))
    return tf.nest.flatten(partitioned(*map(tf.constant, arrays))), partition


def agree(step, *batches, specs=None, has_rows=None, known_rows=None, tolerance=1e-11, **options):
    """Asserts that a step gives the same plain and partitioned on each batch, a list of arrays. Returns its partition."""
    specs = specs or specs_of(batches[0], known_rows)
    partitioned, partition = partitioned_step(step, specs, has_rows or [True] * len(specs), known_rows, **options)
    plain = tf.function(step, autograph=False).get_concrete_function(*specs)
    for batch in batches:
        results = [tf.nest.flatten(function(*map(tf.constant, batch))) for function in (partitioned, plain)]
        for received, expected in zip(*results, strict=True):
            assert received.shape == expected.shape
            np.testing.assert_allclose(received, expected, rtol=tolerance, atol=tolerance)
    return partition


def with_gradients(loss, *variables):
    """Returns a step that computes a loss, and its gradients with respect to its first tensor and to variables."""

    def step(x, *others):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(x, *others)
        return value, *tape.gradient(value, [x, *variables])

    return step


@contextlib.contextmanager
def reading_at_random(seed):
    """Reads integers as rows in a random order, makes random sources rows in random segments, and leaves out some readings."""
    draw = random.Random(seed)

    def in_any_order(node, blocks=()):
        found = list(readings(node, blocks))
        draw.shuffle(found)
        return found[: draw.randint(1, len(found))]

    def any_blocks(self, node, facts):
        is_any = node.type in ("Fill", "Tile", "BroadcastTo") or draw.random() < 0.5
        return draw.choice([None, (), (1,), (2,), (1, 1)]) if is_any else ()

    with (
        mock.patch.object(propagation, "readings", in_any_order),
        mock.patch.object(RowSources, "blocks_made", any_blocks),
    ):
        yield


def partitioned_step(
    step, specs, has_rows, known_rows=None, devices=DEVICES, home=HOME, collectives=None, keeps_rows=False, **options
):
    """Partitions a step, and returns it as a function of whole tensors, with its partition.

    Each of several workers takes the whole tensors, and its towers the worker's own rows.
    """
    found = []
    collectives = collectives or OneWorker()
    count, first = len(devices) * collectives.count, len(devices) * collectives.index
    towers = range(first, first + len(devices))

    def function(*tensors):
        rows = tf.shape(tensors[has_rows.index(True)])[0] if known_rows is None else known_rows
        begins = [rows * i // count for i in towers]
        ends = [rows * (i + 1) // count for i in towers]
        every = [rows * (len(devices) * i) // count for i in range(collectives.count + 1)]
        worker_rows = [end - begin for begin, end in itertools.pairwise(every)]
        counts = RowCounts(
            rows,
            begins,
            [end - begin for begin, end in zip(begins, ends, strict=True)],
            worker_rows=tf.stack(worker_rows) if known_rows is None else worker_rows,
        )
        larger = tf.maximum if known_rows is None else max
        ranges = [(begin, larger(end, begin + 1)) for begin, end in zip(begins, ends, strict=True)]
        across = AcrossWorkers(collectives, keeps_rows) if collectives.count > 1 else None
        arguments = [
            Argument(spec, lambda tensor=tensor: tensor, [tensor[a:b] for a, b in ranges] if cut else None)
            for spec, tensor, cut in zip(specs, tensors, has_rows, strict=True)
        ]
        result, partition = run_partitioned(Trace(step, specs), arguments, counts, Target(devices, home, across, **options))
        found.append(partition)
        return result

    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    return concrete, found[-1]
