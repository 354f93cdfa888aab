"""Define TowerSteps, the five moves from a global batch to its result."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import keras
import tensorflow as tf

from keras_dp import choices
from keras_dp.batches.input_strategy import HOST, InputStrategy
from keras_dp.batches.other_rows import refuse_other_rows
from keras_dp.batches.slicing import Slice, as_tensor, cut
from keras_dp.batches.whole_tensors import WholeTensors
from keras_dp.devices import variable_homes
from keras_dp.error_notes import add_note
from keras_dp.optimizer import DataParallelOptimizer
from keras_dp.partition.comparison import Comparison, compare
from keras_dp.partition.failures import failed_operation
from keras_dp.partition.step import Partition, partition_of
from keras_dp.steps.partitioned import arguments_of, rows_of, run_on_slices
from keras_dp.steps.plain import plain_step
from keras_dp.steps.unknown_rows import UnknownRows

Result = TypeVar("Result")


class TowerSteps:
    """Runs the steps of a model, "train", "test" and "predict", on N towers.

    A step takes five moves:

    1. Cut: the input pipeline cuts the global batch of B rows into N slices (`batches`).
    2. Trace: the model's own step is traced once, as one device would run it (`steps.plain`).
    3. Propagate: each tensor gets a placement, from the batch to the results: rows, a part of a sum, or the whole
       (`partition.propagation`, with a rule for each operation).
    4. Exchange: where a rule asks for it, towers sum their parts or gather their rows (`partition.exchanges`).
    5. Build: one graph runs each tower's operations on its device, and operations with effects once (`partition.building`).

    Args:
        model: the inner model.
        inputs: the strategy that cuts its batches. It holds the devices, the collectives, and the tensors that are not cut.
        batch_norm: see `DataParallelModel`.
        gradient_dtype: see `DataParallelModel`.
        pack_copies: whether the tensors that devices send each other share messages.

    Attributes:
        optimizer: the optimizer that applies the gradients in "train"; None if there is none.
        jit_compile: whether XLA compiles the towers' operations between exchanges.
    """

    def __init__(
        self,
        model: keras.Model,
        inputs: InputStrategy,
        batch_norm: choices.BatchNorm = "sync",
        gradient_dtype: choices.GradientType = None,
        pack_copies: bool = False,
    ):
        self.model = model
        self.inputs = inputs
        self.batch_norm = batch_norm
        self.gradient_dtype = gradient_dtype
        self.pack_copies = pack_copies
        self.optimizer: DataParallelOptimizer | None = None
        self.jit_compile = False
        self._unknown_rows = UnknownRows()
        self._partitions: dict[str, Partition] = {}

    @property
    def home(self) -> str:
        """The device of operations that run once in a step: the home of the first variable."""
        weights = self.model.weights
        return variable_homes.home(weights[0]) if weights else self.inputs.devices[0]

    def run(self, name: choices.Step, slices: Sequence[Slice]) -> tuple[Any, Partition]:
        """Runs a step on N slices of a batch, in the function that is being traced.

        Returns:
            The step's result for the whole batch, and the step's partition.
        """
        inputs, whole = self.inputs, slices[0].whole
        step = self.plain(name, whole)
        result, self._partitions[name] = self.trace(
            lambda rows: run_on_slices(
                step,
                slices,
                whole,
                rows,
                inputs.devices,
                self.home,
                inputs.collectives,
                jit_compile=self.jit_compile,
                pack_copies=self.pack_copies,
            ),
            inputs.known_rows,
        )
        return result, self._partitions[name]

    @contextlib.contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Adds a note to TensorFlow's errors: the operation that failed, its tower, and the user's line."""
        try:
            yield
        except tf.errors.OpError as error:
            graphs = [partition.traced.graph for partition in self._partitions.values()]
            failed = failed_operation(error, graphs, self.inputs.devices)
            if failed is not None:
                debug = "To run the step line by line on one device, compile with run_eagerly=True."
                add_note(error, f"keras_dp: {failed} {debug}")
            raise

    def partition(self, name: choices.Step, slices: Sequence[Slice]) -> Partition:
        """Partitions a step for N slices of an eager batch, without running it."""
        inputs, whole = self.inputs, slices[0].whole
        step = self.plain(name, whole)
        return self.trace(
            lambda rows: partition_of(*arguments_of(step, slices, whole, rows), inputs.devices, self.home),
            int(slices[0].batch_rows),
        )

    def compare(self, name: choices.Step, slices: Sequence[Slice], tolerance: float) -> Comparison:
        """Runs a step on one device and on towers, for N slices of an eager batch, and compares all tensors."""
        inputs, whole = self.inputs, slices[0].whole
        step = self.plain(name, whole)

        def compared(rows: int | None) -> Comparison:
            of_batch, arguments = arguments_of(step, slices, whole, rows)
            return compare(of_batch, arguments, rows_of(slices), inputs.devices, self.home, tolerance)

        return self.trace(compared, int(slices[0].batch_rows))

    def plain(self, name: choices.Step, whole: WholeTensors) -> Callable[[Any], Any]:
        """Returns the model's own step for a whole batch, with this object's optimizer, `batch_norm` and `gradient_dtype`.

        Args:
            name: the step's name.
            whole: the tensors of the batch that are not cut.
        """
        optimizer = self.optimizer if name == "train" else None
        return plain_step(self.model, name, optimizer, self.batch_norm, self.gradient_dtype, whole)

    def trace(self, attempt: Callable[[int | None], Result], rows: int | None) -> Result:
        """Traces a step for any number of rows, or for a known number if the step asks for it; see `UnknownRows`."""
        return self._unknown_rows.trace(attempt, rows)

    def on_host(self, batch: Any, finds_whole: bool = False) -> Any:
        """Returns an eager batch as tensors on the host, and creates all variables.

        Args:
            batch: the batch.
            finds_whole: whether it stands for the batches of a dataset, whose types may say what stays whole.
        """
        with tf.device(HOST):
            batch = keras.tree.map_structure(as_tensor, batch)
        self.inputs.see(batch, finds_whole)
        refuse_other_rows(batch, self.inputs.whole)
        self.inputs.prepare(batch)
        return batch

    def slices_of(self, batch: Any) -> Sequence[Slice]:
        """Returns the N slices of an eager batch, and creates all variables."""
        batch = self.on_host(batch, finds_whole=True)
        with tf.device(HOST):
            return cut(batch, self.inputs.num_towers, whole=self.inputs.whole)
