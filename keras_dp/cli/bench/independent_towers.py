"""Run towers that exchange nothing, as the bound for a benchmark."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from keras_dp import choices
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import Slice, without_entries
from keras_dp.model import DataParallelModel
from keras_dp.partition.building.target import Target
from keras_dp.partition.step import Partition, build, given, propagate, run
from keras_dp.partition.tracing.trace import Trace
from keras_dp.partition.tracing.traced import traced_step
from keras_dp.steps.partitioned import arguments_of, rows_of
from keras_dp.steps.towers import TowerSteps
from keras_dp.workers.collectives import OneWorker
from keras_dp.wrapping.one_state import own_of

Tensor = Any


def independent_towers(inner_model: keras.Model, **arguments: Any) -> DataParallelModel:
    """Returns a `DataParallelModel` whose towers exchange nothing, so that no tower waits for another.

    Each tower trains on its slice alone, on its device, as one device would. The first tower trains the inner model, and each
    other tower trains variables of its own. The extra time of a step of `DataParallelModel` is the whole cost of data
    parallelism. The trained model is useless: call `fit` in benchmarks only.

    Args:
        inner_model: as for `DataParallelModel`.
        **arguments: the other arguments of `DataParallelModel`.
    """
    parallel = DataParallelModel(inner_model, **arguments)
    steps = parallel.tower_steps
    own_of(parallel).steps = _IndependentSteps(steps.model, steps.inputs, steps.options, lambda: steps.optimizer)
    return parallel


class _IndependentSteps(TowerSteps):
    """Runs steps on N slices, each on its device without the others."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._copies: dict[tuple[str, int], tf.Variable] = {}

    def run(
        self, name: choices.Step, slices: Sequence[Slice], step: Callable[[Any], Any], result_rows: choices.Rows = "all"
    ) -> tuple[Any, Partition]:
        """Runs a step on each slice, and returns the result of the first."""
        batches = [_as_batch(part) for part in slices]
        steps = [arguments_of(self.plain(name, batch.whole, step), [batch], OneWorker()) for batch in batches]
        of_batch, arguments = steps[0]
        trace = Trace(of_batch, [argument.spec for argument in arguments], self.variables_made)
        traced = traced_step(trace.concrete)
        devices = self.inputs.devices
        first, *others = zip(batches, (arguments for _, arguments in steps), devices, strict=True)

        def run_on(batch: Slice, arguments: Sequence[Any], device: str) -> tuple[list[Tensor], Partition]:
            is_first = device == devices[0]
            placed = traced if is_first else dataclasses.replace(traced, places={})
            rows = rows_of([batch], Shares.alike(1), OneWorker())
            target = Target([device], self.home if is_first else device)
            built = build(propagate(placed, arguments, rows), arguments, rows, target)
            tensors = given(trace.concrete, traced, arguments, rows)
            if not is_first:
                captured = zip(traced.arguments[len(arguments) :], trace.concrete.captured_inputs, strict=True)
                handles = {variable.handle.ref(): self._copy_on(device, variable).handle for variable in trace.variables()}
                own = {name: handles[handle.ref()] for name, handle in captured if handle.ref() in handles}
                tensors |= {f"in/{name}": partial(tf.convert_to_tensor, handle) for name, handle in own.items()}
            results = run(built if is_first else dataclasses.replace(built, outputs=[]), tensors)
            return results, Partition.of(built, trace)

        results, partition = run_on(*first)
        for other in others:
            run_on(*other)
        return trace.packed(results), partition

    def _copy_on(self, device: str, variable: tf.Variable) -> tf.Variable:
        """Returns a tower's own copy of a variable of the inner model."""
        key = (device, id(variable.handle))
        if key not in self._copies:
            with tf.init_scope(), tf.device(device):
                self._copies[key] = tf.Variable(variable, trainable=False)
        return self._copies[key]


def _as_batch(part: Slice) -> Slice:
    """Turns a slice into a batch of its own."""
    rows = tf.maximum(part.rows, 1)
    return part._replace(begin=tf.zeros_like(rows), rows=rows, batch=without_entries(rows))
