"""Keras's own tests of its callbacks, which its package includes, pass with wrapped models."""

import importlib
import inspect
import types
import unittest

import keras
import pytest
from classification import TOWERS

import keras_dp

# The tests of RemoteMonitor need a file that Keras's package lacks; Orbax is not installed.
CALLBACKS = (
    *("backup_and_restore", "callback", "csv_logger", "early_stopping", "lambda_callback", "learning_rate_scheduler"),
    *("model_checkpoint", "monitor_callback", "reduce_lr_on_plateau", "swap_ema_weights", "tensorboard", "terminate_on_nan"),
)

# The errors of tests that keras_dp refuses, because it replaces tf.distribute.
REFUSED = {"test_swap_ema_weights_with_tf_distribute": "cannot run inside a tf.distribute scope"}


def collected():
    """Returns the module, the class and the name of each test."""
    for callback in CALLBACKS:
        module = importlib.import_module(f"keras.src.callbacks.{callback}_test")
        for name, test_class in vars(module).items():
            if (
                inspect.isclass(test_class)
                and issubclass(test_class, unittest.TestCase)
                and test_class.__module__ == module.__name__
            ):
                for test in unittest.defaultTestLoader.getTestCaseNames(test_class):
                    yield pytest.param(module, test_class, test, id=f"{name}.{test}")


class Wrapped(keras.Model):
    """Replaces `keras.Model`, and wraps its models, and those of derived classes, when they are made."""

    def __new__(cls, *args, **kwargs):
        model = keras.Model(*args, **kwargs) if cls is Wrapped else super().__new__(cls, *args, **kwargs)
        if cls is not Wrapped:
            model.__init__(*args, **kwargs)
        return keras_dp.DataParallelModel(model, devices=TOWERS)


def wrapped_sequential(*args, **kwargs):
    """Replaces `keras.Sequential`."""
    return keras_dp.DataParallelModel(keras.Sequential(*args, **kwargs), devices=TOWERS)


NAMES = {"Model": Wrapped, "Sequential": wrapped_sequential}


@pytest.mark.parametrize(("module", "test_class", "test"), list(collected()))
def test_keras(module, test_class, test, monkeypatch):
    for name, wrapped in NAMES.items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, wrapped)
    if hasattr(module, "models"):
        monkeypatch.setattr(module, "models", types.SimpleNamespace(**{**vars(keras.models), **NAMES}))
    result = unittest.TestResult()
    test_class(test).run(result)
    assert result.testsRun == 1
    assert not result.skipped
    failures = "\n".join(trace for _, trace in [*result.failures, *result.errors])
    if test in REFUSED:
        assert REFUSED[test] in failures
    else:
        assert not failures, failures
