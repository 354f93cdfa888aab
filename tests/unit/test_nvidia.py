"""A warning names GPUs that TensorFlow does not see, with the reason."""

import logging

import pytest

from keras_dp import installation
from keras_dp.devices import nvidia
from keras_dp.devices.available import _warn_once, tower_devices


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Returns an empty directory, in place of the one where the driver lists its GPUs."""
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path / "gpus")
    monkeypatch.setattr(nvidia, "DRIVER_OF_WINDOWS", tmp_path / "libcuda.so.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    _warn_once.cache_clear()
    return tmp_path


def with_gpus(driver, count):
    for number in range(count):
        (driver / "gpus" / f"0000:0{number}:00.0").mkdir(parents=True)


def warnings(caplog, devices, variable, monkeypatch):
    """Looks for devices twice, and returns the warnings."""
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    with caplog.at_level(logging.WARNING, "keras_dp"):
        for _ in range(2):
            tower_devices(devices)
    return [record.getMessage() for record in caplog.records if record.name == "keras_dp"]


@pytest.mark.parametrize(
    ("variable", "said", "devices"),
    [(None, installation.command("cuda"), None), ("0,1", "pip install", 2), ("", "is empty", 2)],
)
def test_gpus_that_are_there_and_not_seen(variable, said, devices, driver, monkeypatch, caplog):
    with_gpus(driver, 2)
    (message,) = warnings(caplog, devices, variable, monkeypatch)
    assert message.startswith("This machine has GPUs, and TensorFlow sees none of them: the towers run on the CPU.")
    assert said in message


@pytest.mark.parametrize(
    ("count", "variable", "devices"), [(0, None, None), (0, "", None), (2, "-1", None), (2, None, ["CPU:0", "CPU:1"])]
)
def test_no_gpus_or_none_wanted(count, variable, devices, driver, monkeypatch, caplog):
    with_gpus(driver, count)
    assert warnings(caplog, devices, variable, monkeypatch) == []


def test_gpus_are_counted(driver):
    assert nvidia.count_gpus() == 0
    (driver / "libcuda.so.1").touch()
    assert nvidia.count_gpus() == 1
    with_gpus(driver, 3)
    assert nvidia.count_gpus() == 3
