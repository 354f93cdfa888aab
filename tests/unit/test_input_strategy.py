"""The input pipeline cuts each batch into slices, on the host."""

import numpy as np
import pytest
import tensorflow as tf

from keras_dp.batches.input_strategy import InputStrategy
from keras_dp.batches.slicing import Slice
from keras_dp.batches.whole_tensors import WholeTensors
from keras_dp.workers.collectives import OneWorker

rng = np.random.default_rng(0)
DEVICES = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
X, Y, W = rng.normal(size=(22, 4)), rng.normal(size=(22, 2)), rng.uniform(size=22)


def feed_of(devices, **arguments):
    """Returns a strategy whose step is never run."""
    return InputStrategy(devices, lambda: False, lambda: None, None, **arguments)


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y, W)).batch(5)


def test_slices_are_cut_on_the_host_in_the_input_pipeline():
    """The step receives N slices, without the whole batch."""
    feed = feed_of(DEVICES[:3])
    parts = next(iter(feed.experimental_distribute_dataset(dataset())))
    assert all(isinstance(part, Slice) for part in parts)
    assert [len(part.data[0]) for part in parts] == [1, 2, 2]
    assert all("CPU:0" in part.data[0].device for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.data[0] for part in parts]), X[:5])


def test_shards_have_no_tensors_that_stay_whole():
    class TwoWorkers(OneWorker):
        count = 2

    feed = feed_of(DEVICES[:2], collectives=TwoWorkers(), whole=WholeTensors(("2",)))
    feed.takes_shards = True
    with pytest.raises(ValueError, match=r"must be the same for all.*Received: whole=\['2'\]"):
        feed.experimental_distribute_dataset(dataset())


@pytest.mark.parametrize("devices", [["GPU:0", "GPU:1"], ["GPU:0", "CPU:0"]])
def test_on_gpus_the_wait_for_input_is_measured_only_if_it_is_asked_for(devices):
    """The time for which a host waits for GPUs is not one for which they wait for input."""
    assert feed_of(devices).waiting.measure(True) is ("CPU:0" not in devices)


def test_a_users_own_autotuning_is_kept():
    feed = feed_of(DEVICES[:2])
    assert feed.experimental_distribute_dataset(dataset()).options().autotune.enabled is False
    options = tf.data.Options()
    options.autotune.enabled = True
    assert feed.experimental_distribute_dataset(dataset().with_options(options)).options().autotune.enabled is True
