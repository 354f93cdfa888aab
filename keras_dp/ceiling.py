"""IndependentTowers: the ceiling that data parallelism is measured against."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from keras_dp import choices
from keras_dp.batches import Slice
from keras_dp.model import DataParallelModel
from keras_dp.partition.calling import call
from keras_dp.partition.graph import traced_step
from keras_dp.partition.step import Trace, build, given
from keras_dp.partitioned_step import arguments_of, rows_of

Tensor = Any


class IndependentTowers(DataParallelModel):
    """The towers of a `DataParallelModel` without any exchange, so that none waits for another one.

    Each trains on its slice alone, on its device, as one device would: the first one the inner model, each other one variables
    of its own. What a step of `DataParallelModel` takes longer is all that data parallelism costs. It trains nothing of use:
    for `fit` in benchmarks.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._copies: dict[tuple[str, int], tf.Variable] = {}

    def _run_on_towers(self, step: choices.Step, data: Sequence[Slice]) -> Any:
        """Runs a step ("train", "test" or "predict") of the inner model on each slice; the result is that of the first."""
        batches = [_as_batch(part) for part in data]
        steps = [arguments_of(self._plain_step(step), [batch], self._whole, None) for batch in batches]
        of_batch, arguments = steps[0]
        trace = Trace(of_batch, [argument.spec for argument in arguments])
        traced = traced_step(trace.concrete)
        first, *others = zip(batches, (arguments for _, arguments in steps), self.devices, strict=True)

        def run(batch: Slice, arguments: Sequence[Any], device: str) -> list[Tensor]:
            is_first = device == self._devices[0]
            placed = traced if is_first else dataclasses.replace(traced, places={})
            builder, outputs, effects = build(placed, arguments, [device], self._home() if is_first else device)
            tensors = given(trace.concrete, traced, arguments, rows_of([batch]))
            if not is_first:
                captured = zip(traced.arguments[len(arguments) :], trace.concrete.captured_inputs, strict=True)
                handles = {variable.handle.ref(): self._copy_on(device, variable).handle for variable in trace.variables()}
                own = {name: handles[handle.ref()] for name, handle in captured if handle.ref() in handles}
                tensors |= {f"in/{name}": partial(tf.convert_to_tensor, handle) for name, handle in own.items()}
            return call(builder.graph, tensors, outputs if is_first else [], effects)

        results = run(*first)
        for other in others:
            run(*other)
        return trace.packed(results)

    def _copy_on(self, device: str, variable: tf.Variable) -> tf.Variable:
        """The variable of a tower that stands for one of the inner model."""
        key = (device, id(variable.handle))
        if key not in self._copies:
            with tf.init_scope(), tf.device(device):
                self._copies[key] = tf.Variable(variable, trainable=False)
        return self._copies[key]


def _as_batch(part: Slice) -> Slice:
    """A slice as a batch of its own."""
    rows = tf.maximum(part.rows, 1)
    return Slice(part.data, tf.zeros_like(rows), rows, rows)
