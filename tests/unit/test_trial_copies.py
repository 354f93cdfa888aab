"""GPUs whose direct copies change numbers are refused, in place of training with these."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp.devices import trial_copies
from keras_dp.devices.trial_copies import arrives, refuse_broken_copies


@pytest.fixture(autouse=True)
def forget_trials():
    refuse_broken_copies.cache_clear()
    yield
    refuse_broken_copies.cache_clear()


def test_numbers_that_change_are_found(monkeypatch):
    numbers = np.arange(99, dtype=np.uint8)
    assert arrives(numbers, "CPU:0", "CPU:1")
    monkeypatch.setattr(trial_copies, "copied", lambda tensor, device: tf.concat([tensor[:-1], tensor[:1]], 0))
    assert not arrives(numbers, "CPU:0", "CPU:1")


def test_memory_that_a_copy_leaves_as_it_was_is_found(monkeypatch):
    """Each direction has numbers of its own, so that those of the copy before are wrong."""
    found = {}

    def stale(tensor, device):
        before, found[device] = found.get(device, tensor), tensor
        return before

    monkeypatch.setattr(trial_copies, "placed", lambda numbers, device: tf.constant(numbers))
    monkeypatch.setattr(trial_copies, "copied", stale)
    with pytest.raises(RuntimeError, match=r"on their way from GPU:1 to GPU:2, GPU:2 to GPU:0, GPU:2 to GPU:1\. Direct copies"):
        refuse_broken_copies(("GPU:0", "GPU:1", "GPU:2"))


def test_each_pair_of_gpus_is_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(trial_copies, "arrives", lambda numbers, *pair: tried.append(pair) or True)
    for _ in range(2):
        refuse_broken_copies(("GPU:0", "CPU:0", "GPU:3"))
    refuse_broken_copies(("CPU:0", "CPU:1"))
    assert tried == [("GPU:0", "GPU:3"), ("GPU:3", "GPU:0")]


def test_models_are_not_wrapped_for_such_gpus(monkeypatch):
    """The parameter device takes part, too."""
    monkeypatch.setattr(trial_copies, "arrives", lambda numbers, source, target: target == "CPU:0")
    monkeypatch.setattr("keras_dp.trainer.tower_devices", lambda devices: ["CPU:0", "CPU:1"])
    asked = []

    def refuse(devices):
        asked.append(devices)
        refuse_broken_copies(tuple(device.replace("CPU", "GPU") for device in devices))

    monkeypatch.setattr("keras_dp.trainer.refuse_broken_copies", refuse)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(RuntimeError, match=r"IOMMU.* Received: GPU:0, GPU:1 and GPU:2"):
        keras_dp.DataParallelModel(model, parameter_device="CPU:2")
    assert asked == [("CPU:0", "CPU:1", "CPU:2")]
    model.compile("sgd", "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
