"""Towers exchange tensors by collectives where these work, and otherwise by copies, with a sentence that says why."""

import dataclasses
import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_script

import keras_dp
from keras_dp.devices import communication
from keras_dp.devices.communication import Facts, has_collectives, why_copies
from keras_dp.partition.running.groups import by_rank, keys_of_collective

GPUS = Facts(("GPU:0", "GPU:1"))


@pytest.fixture(autouse=True)
def forget_warnings():
    communication._warn_once.cache_clear()


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"workers": 2}, "2 workers train together"),
        ({"devices": ("GPU:0", "CPU:0")}, "devices of one kind, and the towers run on GPU:0 and CPU:0"),
        ({"system": "Windows"}, "no NCCL for Windows"),
        ({"has_nccl": False}, "built without NCCL"),
        ({"has_pieces": True}, "split into several logical devices, and NCCL wants a card for each tower"),
        ({"grows_memory": True}, "leave out tf.config.experimental.set_memory_growth and .* TF_FORCE_GPU_ALLOW_GROWTH"),
    ],
)
def test_each_reason_for_copies_is_a_sentence(facts, reason):
    assert re.search(rf"{reason}.*\.$", why_copies(dataclasses.replace(GPUS, **facts)))


def test_nothing_is_known_against_gpus_of_their_own_and_logical_cpus():
    assert why_copies(GPUS) is None
    on_cpus = Facts(("CPU:0", "CPU:1"), system="Windows", has_nccl=False, has_pieces=True, grows_memory=True)
    assert why_copies(on_cpus) is None


@pytest.mark.parametrize(
    ("pieces", "grows", "environment", "expected"),
    [
        (None, None, "", (False, False)),
        ([0], False, "true", (False, True)),
        ([0, 1], None, "", (True, False)),
        (None, True, "", (False, True)),
    ],
)
def test_facts_of_gpus_are_what_tensorflow_says(pieces, grows, environment, expected, monkeypatch):
    cpu, config = tf.config.list_physical_devices("CPU")[0], tf.config
    # These two answer for GPUs what they answer for a CPU: its pieces, or None.
    assert len(config.get_logical_device_configuration(cpu)) == len(config.list_logical_devices("CPU"))
    monkeypatch.setattr(config, "list_physical_devices", lambda kind: [cpu])
    monkeypatch.setattr(config, "get_logical_device_configuration", lambda gpu: pieces)
    monkeypatch.setattr(config.experimental, "get_memory_growth", lambda gpu: grows)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", environment)
    found = Facts.of(["GPU:0", "GPU:1"], 1)
    assert (found.has_pieces, found.grows_memory) == expected


def test_tensorflow_has_nccl_where_it_was_built_for_gpus():
    assert Facts.of(["CPU:0"], 1).has_nccl == tf.test.is_built_with_gpu_support()


def build():
    return keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])


def trains(**arguments):
    x = np.random.default_rng(0).normal(size=(8, 3))

    def script(model):
        model.compile("sgd", "mse")
        return model.fit(x, x[:, :1], batch_size=4, verbose=0, shuffle=False).history

    return assert_same_script(build, script, 2, arguments)[1].tower_steps


def test_copies_are_the_default_and_collectives_have_messages(caplog):
    steps = [trains(communication=choice) for choice in (None, "copies", "nccl")]
    assert [(one.has_collectives, one.pack_copies) for one in steps] == [(False, False), (False, False), (True, True)]
    assert not has_collectives("nccl", ["CPU:0"], 1)
    assert "copies" not in caplog.text


def test_a_warning_says_once_why_there_are_copies(monkeypatch, caplog):
    monkeypatch.setattr(communication, "why_copies", lambda facts: "There is a reason.")
    with caplog.at_level(logging.WARNING, "keras_dp"):
        assert not any(trains(communication="nccl").has_collectives for _ in range(2))
    assert caplog.messages == ['Towers send each other copies, in place of communication="nccl". There is a reason.']


def test_collectives_that_fail_are_a_reason(monkeypatch, caplog):
    def fail(devices):
        raise tf.errors.UnknownError(None, None, "Error invoking NCCL: unhandled system error\nand more")

    monkeypatch.setattr(communication, "by_rank", fail)
    with caplog.at_level(logging.WARNING, "keras_dp"):
        assert not has_collectives("nccl", ["CPU:0", "CPU:2"], 1)
    assert "collectives fail on CPU:0 and CPU:2: Error invoking NCCL: unhandled system error" in caplog.messages[0]


def test_an_unknown_choice_is_refused():
    message = r"`communication` must be one of 'copies', 'nccl', None. Did you mean 'nccl'\? Received: communication='NCLL'"
    with pytest.raises(ValueError, match=message):
        keras_dp.DataParallelModel(build(), devices=2, communication="NCLL")


def test_each_set_of_devices_has_a_group_and_each_collective_a_key():
    one, other = keys_of_collective(["CPU:0", "CPU:1"]), keys_of_collective(["CPU:1", "CPU:0"])
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    less = keys_of_collective(["CPU:0", "CPU:2"])
    assert less[1] != one[1]
    # MirroredStrategy begins at 1; keras_dp's workers have 1 to 2,000. TensorFlow takes 32 bits.
    assert all(2_000 < key < 2**31 for keys in (one, other, less) for key in keys[1:])


def test_devices_are_ranked_by_their_numbers_not_their_order():
    assert by_rank(("CPU:2", "CPU:0", "CPU:3")) == ["CPU:0", "CPU:2", "CPU:3"]


@pytest.mark.parametrize("name", ["CollectiveGatherV2", "CollectiveAllToAllV2"])
def test_collectives_that_move_wrong_numbers_are_a_reason(name, monkeypatch, caplog):
    """As NCCL may on a machine whose IOMMU redirects direct copies. One number of many is wrong, on one device."""
    right = getattr(tf.raw_ops, name)

    def wrong(input, **keys):  # noqa: A002
        result = right(input=input, **keys)
        return tf.tensor_scatter_nd_add(result, [[1, 7]], [1.0]) if "CPU:2" in input.device else result

    by_rank.cache_clear()
    monkeypatch.setattr(tf.raw_ops, name, wrong)
    with caplog.at_level(logging.WARNING, "keras_dp"):
        assert not has_collectives("nccl", ["CPU:0", "CPU:2"], 1)
    words = {"CollectiveGatherV2": "an all-gather", "CollectiveAllToAllV2": "an all-to-all"}[name]
    assert f"collectives fail on CPU:0 and CPU:2: {words} of known numbers gave [[" in caplog.messages[0]
    assert "nan" in caplog.messages[0]
    by_rank.cache_clear()
    monkeypatch.undo()
    assert has_collectives("nccl", ["CPU:0", "CPU:2"], 1)
