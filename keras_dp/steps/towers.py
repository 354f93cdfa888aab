"""Define TowerSteps, the five moves from a global batch to its result."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp import choices
from keras_dp.batches.batch_types import BatchTypes
from keras_dp.batches.input_strategy import InputStrategy
from keras_dp.batches.nesting import map_leaves
from keras_dp.batches.other_rows import naming_other_rows, refuse_other_rows
from keras_dp.batches.slicing import Slice, as_tensor, cut
from keras_dp.batches.whole_tensors import WholeTensors
from keras_dp.devices import variable_homes
from keras_dp.error_notes import add_note
from keras_dp.keras_internals import keras_models
from keras_dp.optimizer import DataParallelOptimizer
from keras_dp.partition.building.target import Target
from keras_dp.partition.facts.operations import CALLS
from keras_dp.partition.inspecting.comparison import Comparison
from keras_dp.partition.inspecting.failures import failed_in_xla, failed_operation
from keras_dp.partition.inspecting.tolerance import usual_tolerance
from keras_dp.partition.step import Partition
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.partition.tracing.names import source_of
from keras_dp.partition.tracing.traced import Traced
from keras_dp.steps.partitioned import StepOnSlices, on_slices
from keras_dp.steps.plain import plain_step
from keras_dp.steps.slow_steps import SlowSteps
from keras_dp.workers.collectives import OneWorker
from keras_dp.wrapping.one_state import own_of

_LESS_MEMORY = (
    "keras_dp: For less memory, DataParallelModel(model, slices_per_device={0}) computes the rows of each "
    "device in {0} slices, one after the other. keras_dp.find_slices(parallel, batch) finds how many fit."
)


class TowerSteps:
    """Runs the steps of a model, "train", "test" and "predict", on N towers.

    A step takes five moves:

    1. Cut: the input pipeline cuts the global batch of B rows into N slices (`batches`).
    2. Trace: the model's own step is traced once, as one device would run it (`steps.plain`).
    3. Propagate: each tensor gets a placement, from the batch to the results: rows, a part of a sum, or the whole
       (`partition.placing`, with a rule for each operation).
    4. Exchange: where a rule asks for it, towers sum their parts or gather their rows (`partition.building.exchanges`).
    5. Build: one graph runs each tower's operations on its device, and operations with effects once (`partition.building`).

    Args:
        model: the inner model.
        inputs: the strategy that cuts its batches. It holds the devices, the collectives, and the tensors that are not cut.
        options: the arguments of the `DataParallelModel`.
        optimizer: returns the optimizer that applies the gradients in "train"; None if there is none.
        variables_made: is called when a first trace has made variables, before a second one.

    Attributes:
        jit_compile: whether XLA compiles the towers' operations between exchanges.
        pack_copies: whether tensors travel in few large messages, and small sums in one hop: as each message takes a GPU
            microseconds, whatever its size.
        has_collectives: whether towers exchange messages by collectives, in place of copies.
        calls: how often the steps of training and evaluation were called, and found a batch.
        slow_steps: tells if training could be faster.
        batch_types: the types of the last batches that each step was traced for.
    """

    def __init__(
        self,
        model: keras.Model,
        inputs: InputStrategy,
        options: choices.Options,
        optimizer: Callable[[], DataParallelOptimizer | None] = lambda: None,
        variables_made: Callable[[], None] = lambda: None,
    ):
        self.model = model
        self.inputs = inputs
        self.options = options
        self._optimizer = optimizer
        self.variables_made = variables_made
        self.jit_compile = self.pack_copies = self.has_collectives = False
        self.calls = 0
        self.slow_steps = SlowSteps(inputs.waiting.seconds)
        self.batch_types: dict[str, BatchTypes] = {}
        self._partitions: dict[str, Partition] = {}

    @property
    def optimizer(self) -> DataParallelOptimizer | None:
        """The optimizer that applies the gradients in "train"; None if there is none."""
        return self._optimizer()

    @property
    def home(self) -> str:
        """The device of operations that run once in a step: the home of the first variable."""
        weights = self.model.weights
        return variable_homes.home(weights[0]) if weights else self.inputs.devices[0]

    def run(
        self, name: choices.Step, slices: Sequence[Slice], step: Callable[[Any], Any], result_rows: choices.Rows = "all"
    ) -> tuple[Any, Partition]:
        """Runs a step on N slices of a batch, in the function that is being traced.

        Args:
            name: the step's name.
            slices: the slices.
            step: the step, a function of a batch.
            result_rows: as in `on_slices`.

        Returns:
            The step's result for the whole batch, and the step's partition.
        """
        traced = self.trace(name, slices, self.inputs.collectives, result_rows, step)
        self.batch_types[name] = BatchTypes.of(slices[0])
        result, partition = traced.run()
        # TensorFlow cannot differentiate the functions of towers, for a tape of the program's own around the call.
        result = tf.nest.map_structure(
            lambda one: tf.stop_gradient(one) if tf.is_tensor(one) else one, result, expand_composites=True
        )
        _refuse_compiled_across_devices(partition.traced)
        self._partitions[name] = partition
        return result, partition

    def run_own(self, name: choices.Step, slices: Sequence[Slice]) -> Any:
        """Runs the model's own step of this name on N slices, as training does, in the function that is being traced."""
        return self.inputs.run_on_slices(getattr(self.model, f"{name}_step"), slices)

    def trace(
        self,
        name: choices.Step,
        slices: Sequence[Slice],
        collectives: OneWorker | None = None,
        result_rows: choices.Rows = "all",
        step: Callable[[Any], Any] | None = None,
    ) -> StepOnSlices:
        """Traces a step as one device does, to run it on N slices of a batch. It may make variables.

        Args:
            name: the step.
            slices: the slices.
            collectives: as in `on_slices`.
            result_rows: as in `on_slices`.
            step: the step, a function of a batch; None for the model's own of this name.
        """
        plain, usual = self.plain(name, slices[0].whole, step), self.inputs.usual_rows
        shares = self.inputs.shares
        return on_slices(plain, slices, shares, self._target, collectives, self.variables_made, usual, result_rows)

    def _target(self) -> Target:
        return Target(
            self.inputs.devices,
            self.home,
            jit_compile=self.jit_compile,
            pack_copies=self.pack_copies,
            has_collectives=self.has_collectives,
        )

    def make_layers(self, name: choices.Step, slices: Sequence[Slice]) -> None:
        """Traces a step if layers have no variables yet. Random numbers that their seeds take stay drawn, as in training."""
        if not keras_models.is_built(self.model):
            self.trace(name, slices)

    def partition(self, name: choices.Step) -> Partition | None:
        """Returns the partition of a step as it was last traced; None if it was not."""
        return self._partitions.get(name)

    def _has_moved(self) -> bool:
        variables = (variable for partition in self._partitions.values() for variable in partition.variables)
        return any(map(keras_models.is_left_behind, variables))

    def forget_moved(self) -> bool:
        """Forgets its partitions if a variable of one has moved since, as one of a layer that several models share.

        Returns:
            Whether one has. The functions that hold these partitions must then be traced again.
        """
        if not self._has_moved():
            return False
        self._partitions.clear()
        return True

    def refuse_moved(self) -> None:
        """Raises a RuntimeError if a variable has moved since a step was traced: the step would update what it was."""
        if self._has_moved():
            homes = sorted({variable_homes.home(weight) for weight in self.model.weights})
            raise RuntimeError(
                "Weights of this model have moved to another device in the middle of a call: a wrapper with another "
                "parameter_device shares its layers. Give both the same devices and parameter_device, or let the other one "
                "train between calls of fit. The next call goes on from the current weights. Received: weights on "
                f"{', '.join(homes)}"
            )

    @contextlib.contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Adds a note to TensorFlow's errors: the operation that failed, its tower, and the user's line."""
        try:
            with naming_other_rows():
                yield
        except tf.errors.OpError as error:
            failed = failed_operation(error, self._partitions.values())
            if failed is not None:
                debug = "To run the step line by line on one device, compile with run_eagerly=True."
                add_note(error, f"keras_dp: {failed} {debug}")
            elif failed_in_xla(error):
                add_note(
                    error, "keras_dp: XLA failed in a program of this step. compile(..., jit_compile=False) trains without it."
                )
            if isinstance(error, tf.errors.ResourceExhaustedError):
                add_note(error, _LESS_MEMORY.format(2 * self.options.slices_per_device))
            raise

    def comparison(self, name: choices.Step, slices: Sequence[Slice], tolerance: float | None = None) -> Comparison:
        """Returns the comparison of a step for N slices of an eager batch on towers with the same step on one device."""
        traced = self.trace(name, slices)
        within = tolerance or usual_tolerance(keras.config.floatx())
        return Comparison(name, traced.trace, traced.arguments, traced.rows, traced.target, within)

    def plain(self, name: choices.Step, whole: WholeTensors, step: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
        """Returns a step for a whole batch, with this object's optimizer and options.

        Args:
            name: the step's name.
            whole: the tensors of the batch that are not cut.
            step: the step; None for the model's own of this name.
        """
        optimizer = None if name in ("test", "predict") or self.optimizer is None else own_of(self.optimizer)
        step = step or getattr(self.model, f"{name}_step")
        return plain_step(self.model, step, optimizer, self.options, whole)

    def on_host(self, batch: Any, finds_whole: bool = False) -> Any:
        """Returns an eager batch as tensors on the host.

        Args:
            batch: the batch.
            finds_whole: whether it stands for the batches of a dataset, whose types may say what stays whole.
        """
        with tf.device(HOST):
            batch = map_leaves(as_tensor, batch)
        self.inputs.see(batch, finds_whole)
        refuse_other_rows(batch, self.inputs.whole)
        self.inputs.prepare()
        return batch

    def slices_of(self, batch: Any) -> Sequence[Slice]:
        """Returns the N slices of an eager batch."""
        batch = self.on_host(batch, finds_whole=True)
        with tf.device(HOST):
            return cut(batch, self.inputs.shares, whole=self.inputs.whole)


def _refuse_compiled_across_devices(traced: Traced) -> None:
    """Raises a ValueError if the user lets XLA compile a function that takes variables of several devices, which it cannot."""
    for node in traced.nodes:
        if node.op in CALLS and node.attr["_XlaMustCompile"].b:
            homes = sorted({traced.places[name] for name in map(source_of, node.input) if name in traced.places})
            if len(homes) > 1:
                raise ValueError(
                    "A function with jit_compile=True changes variables that are on several devices, and XLA compiles a "
                    "function for one. Leave jit_compile out of tf.function, and give it to compile(..., jit_compile=True), so "
                    "that XLA compiles what each tower computes; or leave the variables together, without "
                    'parameter_device="sharded". '
                    f"Received: {node.attr['f'].func.name} with variables on {', '.join(homes)}"
                )
