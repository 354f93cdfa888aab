"""keras_dp refuses versions of Keras and TensorFlow that are too old, and warns about untested ones."""

import logging
import re
from importlib import metadata

import keras
import pytest
import tensorflow as tf

from keras_dp.keras_internals import versions


@pytest.mark.parametrize("package", [keras, tf])
def test_an_old_version_is_refused_in_one_sentence(package, monkeypatch):
    monkeypatch.setattr(package, "__version__", "2.17.1")
    with pytest.raises(ImportError) as refused:
        versions.refuse_old_versions()
    assert str(refused.value) == (
        "keras_dp needs Keras 3.8 to 3.15 and TensorFlow 2.18 to 2.21. Install them with pip install --upgrade keras "
        f"tensorflow. Received: Keras {keras.__version__} and TensorFlow {tf.__version__}"
    )


@pytest.mark.parametrize(("package", "version"), [(keras, "3.16.0.dev1"), (tf, "2.22.0-rc1")])
def test_a_newer_version_is_warned_of(package, version, monkeypatch, caplog):
    versions.refuse_old_versions()
    assert caplog.messages == []
    monkeypatch.setattr(package, "__version__", version)
    with caplog.at_level(logging.WARNING, "keras_dp"):
        versions.refuse_old_versions()
    (said,) = caplog.messages
    assert said.startswith("keras_dp is tested with Keras 3.8 to 3.15 and TensorFlow 2.18 to 2.21; results with Keras ")
    assert version in said


def test_the_metadata_states_the_same_versions():
    required = dict(re.match(r"(\w+)(.*)", line).groups() for line in metadata.requires("keras_dp") if "extra" not in line)
    for package, (oldest, untested) in {"keras": versions.KERAS, "tensorflow": versions.TENSORFLOW}.items():
        limits = {f">={oldest[0]}.{oldest[1]}", f"<{untested[0]}.{untested[1]}"}
        assert set(required[package].split(",")) == limits


def test_callbacks_of_other_versions_are_left_out():
    found = versions.callback_classes("CSVLogger", "CallbackOfTheFuture", "TensorBoard")
    assert found == (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
