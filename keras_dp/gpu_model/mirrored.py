"""Collect the graph of a training step under MirroredStrategy, to simulate it beside that of keras_dp."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import Slice, cut
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.reports.step_graph import StepGraph, collect, on_devices


def graph_of_mirrored_step(model: keras.Model, batch: Any) -> StepGraph:
    """Trains a model by two steps under its MirroredStrategy, and collects the graph of a step.

    The slices are on the replicas' devices before the step begins, as with `graph_of_step`. XLA is off.

    Args:
        model: a model that was built and compiled in the scope of a MirroredStrategy.
        batch: one global batch `(x, y)` or `(x, y, sample_weight)` of tensors, which the strategy can divide.
    """
    strategy = model.distribute_strategy
    # Makes the variables of the optimizer and of the metrics, as outside the step that is traced.
    model.fit(tf.data.Dataset.from_tensors(batch), shuffle=False, verbose=0)

    def step(slices: Sequence[Slice]) -> Any:
        data = strategy.experimental_distribute_values_from_function(
            lambda context: slices[context.replica_id_in_sync_group].data
        )
        results = strategy.run(model.train_step, args=(data,))
        # Keras's `fit` shows the logs of the first replica.
        return keras.tree.map_structure(lambda result: strategy.experimental_local_results(result)[0], results)

    with tf.device(HOST):
        shares = Shares.alike(strategy.num_replicas_in_sync)
        slices = cut(batch, shares)
    return collect(step, on_devices(slices, strategy.extended.worker_devices), shares)
