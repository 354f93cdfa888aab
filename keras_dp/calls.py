"""Surround the calls of `fit`, `evaluate`, `predict` and the `*_on_batch` methods of a model on towers."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_dp.batch_normalization.synchronized import batch_norms
from keras_dp.batches.input_strategy import NO_BATCHES
from keras_dp.batches.nesting import map_leaves
from keras_dp.batches.other_rows import naming_other_rows
from keras_dp.batches.shards import with_empty_batches
from keras_dp.batches.slicing import as_tensor, rows_of_batches
from keras_dp.devices import announcement, variable_homes
from keras_dp.keras_internals import keras_models
from keras_dp.keras_internals.versions import STEPS_TAKE_BATCHES
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.steps.trainer_functions import StepFunction
from keras_dp.trainer import STEPS, TowerTrainer
from keras_dp.workers.joint_calls import Call
from keras_dp.wrapping.own_training import has_own_step
from keras_dp.wrapping.refusals import refuse_strategy

logger = logging.getLogger("keras_dp")


@contextlib.contextmanager
def in_call(trainer: TowerTrainer, method: str, arguments: dict[str, Any], sharded: bool) -> Iterator[dict[str, Any]]:
    """Surrounds a call of `fit`, `evaluate` or `predict`, and yields its arguments for this worker.

    Args:
        trainer: the trainer of the model.
        method: the name of the method.
        arguments: its arguments.
        sharded: whether each worker gives the data of its own.

    Raises:
        ValueError: if there are no data, or the workers' calls differ.
    """
    refuse_strategy()
    if arguments.get("x") is None and arguments.get("y") is None:
        raise ValueError(f"{method}() needs data: arrays, a dataset, a PyDataset or a generator. Received: x=None")
    trainer.uses += 1
    trainer.follow()
    executions = trainer.inside.steps_per_execution
    # fit() validates with a dataset and callbacks that it has prepared already.
    if not arguments.get("_use_cached_eval_dataset", False):
        call = Call(
            method,
            sharded,
            list(trainer.of_towers),
            list(trainer.feed.shares.of_towers),
            trainer.parameter_device,
            trainer.steps.options.batch_norm,
            trainer.steps.options.gradient_dtype,
            executions,
            "shard" if trainer.predicts_shard else "all",
        )
        trainer.begin(call, arguments)
    if sharded:
        for name in ("x", "validation_data"):
            if name in arguments:
                arguments[name] = with_empty_batches(arguments[name], trainer.workers, executions)
    fed = trainer.feed.feeding(
        feeds_trainer=True,
        takes_shards=sharded,
        cuts_in_step=_traces_by_batch(trainer, method),
        has_all_names=_has_all_names(trainer, method),
    )
    trainer.loops.append(method)
    try:
        with fed, trainer.workers.reporting_lost_workers(), naming_other_rows():
            yield arguments
            if trainer.feed.different_batches is not None and method != "fit":
                # The epochs of `fit` have reported theirs.
                trainer.feed.different_batches.report()
    finally:
        trainer.loops.pop()


@contextlib.contextmanager
def on_batch(trainer: TowerTrainer, *batch: Any, method: str) -> Iterator[tuple[Any, ...]]:
    """Surrounds a call of a method for one batch, and yields its arrays as tensors on the host, where it is cut into slices.

    Args:
        trainer: the trainer of the model.
        *batch: the batch.
        method: the method for many batches that takes the same data.
    """
    refuse_strategy()
    trainer.uses += 1
    trainer.follow()
    fed = trainer.feed.feeding(cuts_in_step=_traces_by_batch(trainer, method), has_all_names=_has_all_names(trainer, method))
    with trainer.workers.reporting_lost_workers(), fed:
        if trainer.is_eager():
            with tf.device(HOST):
                yield map_leaves(as_tensor, batch)
        else:
            yield trainer.steps.on_host(batch)


def announce(trainer: TowerTrainer, arguments: dict[str, Any]) -> None:
    """Logs, once, where the model trains with these arguments of `fit`."""
    data = arguments.get("x"), arguments.get("batch_size")
    rows = None if trainer.feed.takes_shards else rows_of_batches(*data, trainer.feed.named)
    trainer.feed.usual_rows = rows
    is_silent = arguments.get("verbose") == 0 or trainer.is_eager() or not trainer.workers.is_chief
    if is_silent or not trainer.messages.is_first("fit"):
        return
    batch_norm = trainer.steps.options.batch_norm if batch_norms(trainer.inside) else None
    spread = keras_models.is_built(trainer.inside) and variable_homes.should_spread(trainer.inside, trainer.devices)
    workers = trainer.workers.count
    slices = None if rows is None else trainer.feed.shares.sizes(rows, workers)
    logger.info(announcement.training(trainer.of_towers, workers, slices, batch_norm, spread))


@contextlib.contextmanager
def predicting_shard(trainer: TowerTrainer, wanted: bool) -> Iterator[None]:
    """Makes `predict` return the rows of this worker alone, or all."""
    before = trainer.predicts_shard
    trainer.predict_shard(wanted)
    try:
        yield
    finally:
        trainer.predict_shard(before)


def refuse_no_batches(trainer: TowerTrainer, method: str, calls: int) -> None:
    """Raises a ValueError if no step has run since there were so many calls of steps. Keras's functions are counted."""
    if trainer.steps.calls == calls and isinstance(getattr(trainer, f"{STEPS[method]}_function"), StepFunction):
        raise ValueError(NO_BATCHES.format(method))


def _traces_by_batch(trainer: TowerTrainer, method: str) -> bool:
    """Returns whether the function of a method's step is traced by the batch that it takes, with its known sizes."""
    is_step = STEPS_TAKE_BATCHES and trainer.inside.steps_per_execution == 1
    return is_step or method == "predict" or trainer.has_own(f"{STEPS[method]}_function")


def _has_all_names(trainer: TowerTrainer, method: str) -> bool:
    """Returns whether the data of a method have all tensors that `whole` names.

    The data of training have them. A step of the user's own may evaluate other data.
    """
    return method == "fit" or (method == "evaluate" and not has_own_step(trainer.inside))
