"""Run each of Keras's own tests with each model and each optimizer that it makes wrapped.

Keras's package includes its tests: https://github.com/keras-team/keras. A test that passes as it is must pass wrapped.
"""

import contextlib
import os
import sys
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
from _pytest.runner import runtestprotocol
from differences import DIFFERENCES
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.models import Functional

import keras_dp
from keras_dp.wrapping.one_state import OWN, own_of

keras_dp.use_logical_cpus(2)

# Tests make models in their own files, and in a function that they share.
TEST_FILES = ("_test.py", "test_case.py")


class WrappedModel(keras_dp.DataParallelModel):
    """Wraps the model that a test makes."""

    def __init__(self, *args, **kwargs):
        """Does nothing when Python initializes again what `keras.Model(inputs, outputs)` returned."""
        if not hasattr(self, OWN):
            super().__init__(*args, **kwargs)


class WrappedOptimizer(keras_dp.DataParallelOptimizer):
    """Wraps the optimizer that a test makes."""

    def __init__(self, *args, **kwargs):
        """Does nothing when Python initializes again what `keras.optimizers.Optimizer(...)` returned."""
        if args and args[0] is own_of(self).inside:
            super().__init__(*args, **kwargs)


def unwrapped(value):
    """Returns the object inside a wrapper, and any other unchanged."""
    return own_of(value).inside if isinstance(value, WrappedModel | WrappedOptimizer) else value


def made_in_a_test(frame):
    """Returns whether a test's own line makes an object, rather than Keras, or the constructor of a model or optimizer."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return code.co_filename.endswith(TEST_FILES) and not isinstance(first, keras.Layer | keras.optimizers.Optimizer)


def wrapping(make, wrap):
    """Returns a `__new__` that wraps what a test makes of a class or its subclasses, with the plain objects as arguments."""

    def make_wrapped(cls, *args, **kwargs):
        if issubclass(cls, WrappedModel | WrappedOptimizer) or not made_in_a_test(sys._getframe(1)):
            return make(cls, *args, **kwargs)
        args, kwargs = keras.tree.map_structure(unwrapped, (args, kwargs))
        made = make(cls, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return wrap(made)

    return make_wrapped


# Python does not call `object.__new__` with arguments once a class had its own; so the class keeps this one.
keras.optimizers.Optimizer.__new__ = lambda cls, *args, **kwargs: object.__new__(cls)


def wrapped_over_two_devices(model):
    return WrappedModel(model, devices=2)


WRAP = {
    keras.Model: wrapped_over_two_devices,
    keras.Sequential: wrapped_over_two_devices,
    Functional: wrapped_over_two_devices,
    keras.optimizers.Optimizer: WrappedOptimizer,
}


@contextlib.contextmanager
def everything_wrapped():
    """Wraps each model over two devices, and each optimizer, that tests make."""
    with contextlib.ExitStack() as stack:
        for kind, wrap in WRAP.items():
            stack.enter_context(mock.patch.object(kind, "__new__", wrapping(kind.__new__, wrap)))
        yield


class ModelOfLayer:
    """Replaces the private trainer that Keras's tests mix into layers: a layer with it becomes a `keras.Model`."""

    def __init__(self, trainer):
        # Tests call it as a function of the class.
        vars(self)["__init__"] = trainer.__init__

    def __mro_entries__(self, bases):
        layers = [base for base in bases if base is not self and not issubclass(keras.Model, base)]
        return (type("ModelOfLayer", (*layers, keras.Model), {}),)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    """Imports tests with models in place of layers that train."""
    with mock.patch.object(keras_trainer, "TensorFlowTrainer", ModelOfLayer(keras_trainer.TensorFlowTrainer)):
        return (yield)


def error_of(reports):
    """Returns the error of the first report that failed; None if all passed or were skipped."""
    for report in reports:
        if report.failed:
            return getattr(report.longrepr, "reprcrash", report.longrepr)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Reports a test's wrapped run. A test that fails wrapped, and as it is too, counts as skipped."""
    if difference := DIFFERENCES.get(f"{item.path.stem}::{item.name}"):
        reason, errors = difference
        item.add_marker(pytest.mark.xfail(reason=reason, raises=errors, strict=True))
    with everything_wrapped():
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if error_of(reports) and (error := error_of(runtestprotocol(item, nextitem=nextitem, log=False))):
        for report in reports:
            if report.failed:
                report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Plain Keras fails: {error}")
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
