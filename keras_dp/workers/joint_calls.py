"""Have all workers make the same calls, with the same variables."""

from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp.workers.agreement import described_data, described_model
from keras_dp.workers.callback import with_workers_callback
from keras_dp.workers.group import WorkerGroup, share_random_state
from keras_dp.workers.synchronization import all_variables, synchronize


class JointCalls:
    """Has all workers make the same calls, with the same variables.

    A worker alone agrees with itself, and has nothing to share.

    Args:
        group: the workers.
    """

    def __init__(self, group: WorkerGroup):
        self._group = group
        self._are_synchronized = group.count == 1
        self._others: set[Any] = set()

    def begin(self, method: str, model: keras.Model, wrapper: keras.Model, facts: dict[str, Any], call: dict[str, Any]) -> None:
        """Begins a call on all workers: it has to be the same on each.

        Args:
            method: "fit", "evaluate" or "predict".
            model: the inner model.
            wrapper: the model that is called.
            facts: what else has to be the same, of JSON's types, by names for people.
            call: the arguments by name; callbacks and verbosity become those of this worker.

        Raises:
            ValueError: on all workers, if one makes another call.
        """
        if self._group.count == 1:
            return
        shared = {name: value for name, value in call.items() if name not in ("verbose", "callbacks")}
        described = {name: described_data(value) for name, value in shared.items()}
        self._group.agree({"the method called": method, **facts, **described_model(model), **described})
        share_random_state(self._group)
        # When training begins, the variables are those that the first worker has restored from a backup.
        self._are_synchronized = method == "fit"
        call["callbacks"] = with_workers_callback(call.get("callbacks"), self._group, wrapper)
        if not self._group.is_chief:
            call.setdefault("verbose", 0)

    def forget(self) -> None:
        """Has the variables be given anew: the model was compiled."""
        self._are_synchronized = self._group.count == 1
        self._others.clear()

    def synchronize(self, model: keras.Model) -> None:
        """Gives all workers the first one's variables, once after they were created, and in each call."""
        if not self._are_synchronized:
            self._are_synchronized = True
            synchronize(self._group, all_variables(model))

    def variables_of(self, model: keras.Model) -> set[Any]:
        """References to the variables that `synchronize` gives; none if there is one worker alone."""
        return set() if self._group.count == 1 else {variable.value.ref() for variable in all_variables(model)}

    def synchronize_others(self, known: Collection[Any], variables: Sequence[tf.Variable]) -> None:
        """Gives all workers the first one's values of variables that a step alone knows, such as those that it makes.

        All workers come to these when they first run the step; a worker that traces it once more comes to no others.

        Args:
            known: the `variables_of` the model before the step was traced.
            variables: of the step.
        """
        others = [variable for variable in variables if variable.ref() not in self._others and variable.ref() not in known]
        if others and self._group.count > 1:
            self._others.update(variable.ref() for variable in others)
            with tf.init_scope():
                synchronize(self._group, others)
