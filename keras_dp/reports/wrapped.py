"""Find what reports look at in a `DataParallelModel`, or refuse it."""

from typing import Any

import keras

from keras_dp import choices
from keras_dp.choices import refuse_unknown
from keras_dp.steps.towers import TowerSteps
from keras_dp.wrapping.one_state import is_made, own_of
from keras_dp.wrapping.own_training import has_own_step


def inspected(asked: str, parallel: Any, batch: Any, step: choices.Step) -> tuple[TowerSteps, Any]:
    """Returns what a report looks at: the steps of a `DataParallelModel` on towers, and a batch.

    Args:
        asked: the name of the report.
        parallel: a compiled `DataParallelModel`. A step of the user's own, or "predict", needs no `compile`.
        batch: a global batch of B rows, as `fit` feeds it: (x, y) or (x, y, sample_weight). None makes one of ones and zeros,
            with the types of the batches for which the step was last traced.
        step: "train", "test" or "predict".

    Raises:
        ValueError: if there is no such step, model or batch, or the model runs eagerly.
    """
    refuse_unknown("step", step, choices.Step)
    if not isinstance(parallel, keras.Model) or not is_made(parallel):
        raise ValueError(
            f"{asked}() looks at the towers of a keras_dp.DataParallelModel: wrap the model, compile it, and pass the wrapper. "
            f"Received: {parallel!r} of type {type(parallel)}"
        )
    trainer = own_of(parallel)
    model = trainer.inside
    if trainer.is_eager():
        raise ValueError(
            f"{asked}() looks at towers, and eager steps use one device. Received: {parallel!r} with run_eagerly=True"
        )
    is_of_keras = step != "predict" and not has_own_step(model)
    if is_of_keras and not model.compiled:
        raise ValueError(f"Compile the model before {asked}(). Received: {parallel!r}, which is not compiled")
    steps = trainer.tower_steps
    if batch is None:
        types = steps.batch_types.get(step)
        if types is None:
            raise ValueError(f"The model was not trained yet: pass a batch, {asked}((x, y)). Received: batch=None")
        return steps, types.stand_in(steps.inputs.usual_rows)
    # Keras takes a list for a tuple.
    batch = tuple(batch) if isinstance(batch, list) else batch
    has_own_loss = type(model).compute_loss is not keras.Model.compute_loss
    has_targets = isinstance(batch, tuple) and len(batch) > 1
    if is_of_keras and model.loss is not None and not has_own_loss and not has_targets:
        raise ValueError(
            f"The loss of the model needs targets: pass {asked}() a batch as fit() feeds it, (x, y) or (x, y, sample_weight). "
            f"Received: a batch of type {type(batch)} without targets"
        )
    return steps, batch
