"""Make all workers run the same calls, with the same variables."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp import choices
from keras_dp.keras_internals.keras_models import all_variables
from keras_dp.workers.agreement import described_data, described_model
from keras_dp.workers.callback import with_workers_callbacks
from keras_dp.workers.group import WorkerGroup, share_random_state
from keras_dp.workers.synchronization import synchronize


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a model on towers.

    Attributes:
        method: "fit", "evaluate" or "predict".
        sharded: whether each worker reads its own part of the data.
        devices: the devices of each worker's N towers.
        shares: the shares of these towers in the rows of a batch.
        parameter_device: see `DataParallelModel` for this attribute and the following ones.
        batch_norm: the mode of batch normalization.
        gradient_dtype: the dtype in which gradients are sent.
        steps_per_execution: the number of steps that TensorFlow runs at once.
        rows: whose rows `predict` returns.
    """

    method: str
    sharded: bool
    devices: Sequence[str]
    shares: Sequence[int]
    parameter_device: str
    batch_norm: choices.BatchNorm
    gradient_dtype: choices.GradientType
    steps_per_execution: int
    rows: choices.Rows


class SingleCalls:
    """Replaces `JointCalls` for a single worker, which has no others to agree with."""

    def begin(self, call: Call, model: keras.Model, wrapper: keras.Model, arguments: dict[str, Any]) -> None:
        """Does nothing; see `JointCalls` for this method and the following ones."""

    def forget(self) -> None:
        """Does nothing."""

    def synchronize(self, model: keras.Model) -> None:
        """Does nothing."""

    def variables_of(self, model: keras.Model) -> set[Any]:
        """Returns no variables."""
        return set()

    def synchronize_others(self, known: Collection[Any], variables: Sequence[tf.Variable]) -> None:
        """Does nothing."""

    def agree_on_graph(self, step: str, described: Callable[[], str]) -> None:
        """Does nothing."""


class JointCalls(SingleCalls):
    """Makes all workers run the same calls, with the same variables.

    Args:
        group: the workers.
    """

    def __init__(self, group: WorkerGroup):
        self._group = group
        self._are_synchronized = False
        self._others: dict[Any, tf.Variable] = {}  # by their references
        self._agreed: set[str] = set()  # steps whose graphs are the same

    def begin(self, call: Call, model: keras.Model, wrapper: keras.Model, arguments: dict[str, Any]) -> None:
        """Checks that all workers begin the same call, and prepares it.

        Args:
            call: the call.
            model: the inner model.
            wrapper: the model that is called.
            arguments: the method's arguments, by name. Callbacks and verbosity are set for this worker, in place.

        Raises:
            ValueError: on all workers, if the calls differ.
        """
        shared = {name: value for name, value in arguments.items() if name not in ("verbose", "callbacks")}
        described = {name: described_data(value) for name, value in shared.items()}
        self._group.agree({**dataclasses.asdict(call), **described_model(model), **described})
        share_random_state(self._group)
        # fit() synchronizes when training begins, after the chief has restored a backup.
        self._are_synchronized = call.method == "fit"
        callbacks = arguments.get("callbacks")
        arguments["callbacks"] = with_workers_callbacks(callbacks, self._group, wrapper, model, lambda: self._state(model))
        if not self._group.is_chief:
            arguments.setdefault("verbose", 0)

    def forget(self) -> None:
        """Synchronizes all variables again in the next call: the model was compiled."""
        self._are_synchronized = False
        self._others.clear()
        self._agreed.clear()

    def synchronize(self, model: keras.Model) -> None:
        """Gives all workers the chief's variables, once after they were created, and once in each call."""
        if not self._are_synchronized:
            self._are_synchronized = True
            synchronize(self._group, self._state(model))

    def variables_of(self, model: keras.Model) -> set[Any]:
        """Returns references to the variables that `synchronize` covers."""
        return {variable.value.ref() for variable in all_variables(model)}

    def synchronize_others(self, known: Collection[Any], variables: Sequence[tf.Variable]) -> None:
        """Gives all workers the chief's values of variables that only a step knows, such as variables that it creates.

        All workers first run the step together. A worker that retraces it finds no new variables.

        Args:
            known: the `variables_of` the model before the step was traced.
            variables: the variables of the step.
        """
        others = [variable for variable in variables if variable.ref() not in self._others and variable.ref() not in known]
        if others:
            self._others |= {variable.ref(): variable for variable in others}
            with tf.init_scope():
                synchronize(self._group, others)

    def agree_on_graph(self, step: str, described: Callable[[], str]) -> None:
        """Checks that all workers have traced the same graph, the first time that they trace a step together.

        Args:
            step: the step's name.
            described: returns a text that two graphs have in common only if they compute the same in the same order.

        Raises:
            ValueError: on all workers, if the graphs differ.
        """
        if step not in self._agreed:
            self._agreed.add(step)
            with tf.init_scope():
                self._group.agree({f"the operations of the {step} step, which may follow the order of a set": described()})

    def _state(self, model: keras.Model) -> list[keras.Variable | tf.Variable]:
        """Lists the variables of a model, its optimizers, its metrics and its steps."""
        return [*all_variables(model), *self._others.values()]


def calls_of(group: WorkerGroup) -> SingleCalls:
    """Returns `JointCalls`, or `SingleCalls` if there is one worker."""
    return JointCalls(group) if group.count > 1 else SingleCalls()
