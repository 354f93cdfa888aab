"""Let the commands do in the process of the tests what they start processes for: importing TensorFlow takes seconds."""

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from keras_dp.cli import runs
from keras_dp.cli.bench import engines


@pytest.fixture
def in_process(monkeypatch):
    """Makes a command ask functions of this process; questions and answers stay JSON."""
    tf.config.list_logical_devices()  # TensorFlow starts with the devices of the tests, which a command could not change then

    def start(setup):
        keras.utils.set_random_seed(engines.SEED)
        return [f"CPU:{index}" for index in range(setup.towers)]

    def output_of(program, question, variables):
        monkeypatch.setattr(sys, "argv", ["keras-dp", json.dumps(question)])
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                importlib.import_module(program[1]).main() if program[0] == "-m" else exec(program[1])
        except Exception as error:
            raise runs.RunFailedError(f"{type(error).__name__}: {error}") from error
        return printed.getvalue().splitlines()

    monkeypatch.setattr(engines, "start", start)
    monkeypatch.setattr(runs, "_output_of", output_of)


@pytest.fixture
def in_users_directory(monkeypatch):
    """Changes to the directory of the module `user_models`, where processes find it."""
    monkeypatch.chdir(Path(__file__).with_name("cli"))
