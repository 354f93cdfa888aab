"""Call the functions of Keras's trainer."""

import contextlib
import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_dp import choices
from keras_dp.batches.slicing import is_cut
from keras_dp.keras_internals.versions import STEPS_TAKE_BATCHES
from keras_dp.steps.towers import TowerSteps
from keras_dp.steps.verification import Verification

# Workers that read different batches are told of it after so many steps, and not only after an epoch.
_EARLY_CALLS = 4
_KEPT_TRACES = 16  # of a step that a program calls by itself

# If two threads run a step with collectives at once, TensorFlow takes the parts of one run for those of the other, and refuses
# all later collectives.
_one_at_a_time = threading.RLock()

_running: contextvars.ContextVar[tuple[Any, Any]] = contextvars.ContextVar("_running", default=(None, None))


def running_step(steps: TowerSteps) -> choices.Step | None:
    """Returns the step of a model whose function Keras's trainer is calling; None if a program calls one by itself."""
    owner, name = _running.get()
    return name if owner is steps else None


@contextlib.contextmanager
def _call(steps: TowerSteps, executions: int, name: choices.Step | None = None) -> Iterator[None]:
    """Surrounds a call of a function that runs a number of steps; of the name of a step, or of one that has its own name."""
    with contextlib.ExitStack() as stack:
        if steps.has_collectives:
            stack.enter_context(_one_at_a_time)
        stack.enter_context(steps.naming_failures())
        stack.callback(_running.reset, _running.set((steps, name)))
        stack.enter_context(steps.inputs.waiting.in_call(executions))
        yield


class PredictFunction:
    """Predicts for several batches.

    TensorFlow traces the function by the types of the batches, as it does for one device. Workers that predict for shards of
    their own trace it by the types of their datasets: each of them has batches of other sizes, and all have to trace together.

    Args:
        function: Keras's function.
        steps: the steps on towers.
        verification: compares first steps with one device.
    """

    def __init__(self, function: Any, steps: TowerSteps, verification: Verification):
        self._function, self._verification = function, verification
        self._steps = steps
        self._traced: set[str] = set()

    def __call__(self, batches: Any) -> Any:
        """Returns the outputs, in the order of the rows."""
        self._steps.refuse_moved()
        with _call(self._steps, len(batches), "predict"), self._verification.of_step("predict", batches[0]):
            if is_cut(batches[0]) and batches[0][0].is_of_shard:
                self._trace_for_any_sizes(len(batches))
            return self._function(batches)

    def _trace_for_any_sizes(self, executions: int) -> None:
        types = [self._steps.inputs.shard_types] * executions
        if repr(types) not in self._traced:
            self._traced.add(repr(types))
            self._function.get_concrete_function(types)


class StepFunction:
    """Runs the steps of Keras's trainer on the batches of an iterator, whether a dataset's or any other.

    Args:
        function: Keras's function, for the iterator of a dataset.
        step: the model's step, which takes the slices of a batch.
        steps: the steps on towers.
        steps_per_execution: the number of batches that a call takes.
        name: the name of the step.
        verification: compares first steps with one device.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        step: Callable[[Any], Any],
        steps: TowerSteps,
        steps_per_execution: int,
        name: choices.Step,
        verification: Verification,
    ):
        self._function, self._name, self._verification = function, name, verification
        self._steps = steps
        self._executions = range(steps_per_execution)
        # Keras's function sees the slices of a dataset, and shares its traces, as on one device. TensorFlow's stateful
        # operations draw on in each trace of this function, so it has the same ones: first those of datasets.
        self._types_of_datasets: list[Any] = []
        self._on_batch = tf.function(
            lambda batch: function(iter([steps.inputs.cut_as_of_dataset(batch)])), autograph=False, reduce_retracing=True
        )
        self._on_shard = tf.function(lambda batch: steps.inputs.run(step, (batch,)), autograph=False, reduce_retracing=True)

    def __call__(self, iterator: Any) -> Any:
        """Runs the steps, and returns the result of the last one."""
        self._steps.refuse_moved()
        with _call(self._steps, len(self._executions), self._name):
            result = (self._of_dataset if isinstance(iterator, tf.data.Iterator) else self._of_batches)(iterator)
        self._steps.calls += 1
        if self._name == "train":
            self._steps.slow_steps.note_call(self._steps.partition("train"), len(self._executions))
        if self._steps.calls == _EARLY_CALLS and self._steps.inputs.different_batches is not None:
            self._steps.inputs.different_batches.report()
        return result

    def _of_batches(self, iterator: Any) -> Any:
        for types in self._types_of_datasets:
            self._on_batch.get_concrete_function(types)
        self._types_of_datasets.clear()
        for batch in itertools.islice(iterator, len(self._executions)):
            with self._verification.of_step(self._name, batch):
                result = self._function(iter([batch])) if self._steps.inputs.cuts_in_step else self._on_batch(batch)
        return result

    def _of_dataset(self, iterator: Any) -> Any:
        types = iterator.element_spec
        if STEPS_TAKE_BATCHES and len(self._executions) == 1 and self._steps.inputs.takes_shards:
            # All workers trace by the types of their datasets, together, and not by the sizes of their own batches.
            self._on_shard.get_concrete_function(types)
            return self._on_shard(next(iterator))
        is_due = self._verification.is_due(self._name, types)
        batches = list(itertools.islice(iterator, len(self._executions))) if is_due else []
        if not batches:
            return self._noting_traces(iterator)
        taken = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=types)
        with self._verification.of_step(self._name, batches[-1], types):
            return self._noting_traces(iter(taken))

    def _noting_traces(self, iterator: tf.data.Iterator) -> Any:
        """Runs the steps on a dataset's batches, and notes their types if the step is traced for them."""
        traced_before = self._steps.batch_types.get(self._name)
        result = self._function(iterator)
        traced = self._steps.batch_types.get(self._name)
        if traced is not None and traced is not traced_before:
            self._types_of_datasets.append(traced.of_batch())
        return result


class CalledStep:
    """Runs a step that a program calls by itself, with arguments of its own.

    Args:
        step: the step.
        steps: the steps on towers.
    """

    def __init__(self, step: Callable[..., Any], steps: TowerSteps):
        self._steps, self._step = steps, step
        self._function = self._made()

    def _made(self) -> Any:
        run, step = self._steps.inputs.run, self._step
        return tf.function(lambda args, kwargs: run(step, args, kwargs), autograph=False, reduce_retracing=True)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs the step."""
        self._steps.refuse_moved()
        if self._function.experimental_get_tracing_count() >= _KEPT_TRACES:
            # Each number of Python among the arguments has a trace of its own.
            self._function = self._made()
        with _call(self._steps, 1):
            return self._function(tuple(args), dict(kwargs))
