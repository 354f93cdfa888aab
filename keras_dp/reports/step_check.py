"""Compare one step on one device with the same step on towers."""

from typing import Any

from keras_dp import choices
from keras_dp.partition.inspecting.step_check import StepCheck
from keras_dp.reports.step_graph import refuse_other_state
from keras_dp.reports.wrapped import inspected
from keras_dp.steps.random_states import same_random_states


def check_step(parallel: Any, batch: Any = None, step: choices.Step = "train", tolerance: float | None = None) -> StepCheck:
    """Runs one step on one device and partitioned on towers, from the same state, and compares the two.

    Compares results, variables, and tensors that are spread over the step. If anything differs, looks further until it can name
    the first operation that differs although its inputs do not, with the user's line. The model and its optimizers stay
    unchanged.

    TensorFloat-32, to which GPUs round factors in float32, is off meanwhile. Where XLA compiles the towers, results and
    variables of the step that it has compiled are compared with plain Keras's on one device without XLA. The tensors inside are
    compared without XLA, which fuses them away.

    >>> import keras, keras_dp, numpy as np
    >>> parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=1)
    >>> parallel.compile("sgd", "mse")
    >>> keras_dp.check_step(parallel, (np.ones((8, 4)), np.ones((8, 1)))).is_exact
    True

    Args:
        parallel: a compiled `DataParallelModel`.
        batch: a global batch of B rows, as `fit` feeds it: (x, y) or (x, y, sample_weight). None makes one of ones and zeros,
            with the types of the batches for which the step was last traced.
        step: "train", "test" or "predict".
        tolerance: the largest difference that counts as none; None for 1e-9 in float64, 1e-4 in float32. For a variable, as a
            share of its largest change in the step, so that small variables count as much as large ones.

    Raises:
        ValueError: if there is no such step, the model is not a compiled `DataParallelModel`, or runs eagerly, or needs
            another batch, or its step changes other state than variables, such as a table or an iterator.
    """
    steps, batch = inspected("check_step", parallel, batch, step)
    slices = steps.slices_of(batch)
    steps.make_layers(step, slices)
    with same_random_states():
        comparison = steps.comparison(step, slices, tolerance)
        refuse_other_state(comparison.traced)
        return comparison.check()
