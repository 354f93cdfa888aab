"""The harness around Keras's own tests wraps what they make, and reports what passes as it is and fails wrapped."""

import re
import subprocess
import sys
from pathlib import Path

TESTS = """
import keras
import numpy as np
from keras.src import testing
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer as Trainer

def is_wrapped(made):
    return "keras_dp" in str([base.__module__ for base in type(made).__mro__])

class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.inside = keras.Sequential([keras.layers.Dense(1)])

class Trained(Trainer, keras.layers.Dense):
    def __init__(self):
        keras.layers.Dense.__init__(self, 1)
        Trainer.__init__(self)

class SampleTest(testing.TestCase):
    def test_sequential(self):
        assert not is_wrapped(keras.Sequential())

    def test_functional(self):
        assert not is_wrapped(keras.Model(inputs := keras.Input((1,)), inputs))

    def test_subclassed(self):
        assert not is_wrapped(Model())

    def test_layer_that_trains(self):
        assert not is_wrapped(Trained())

    def test_optimizer(self):
        assert not is_wrapped(keras.optimizers.SGD())

    def test_parts_of_models(self):
        assert not is_wrapped(Model().inside)

    def test_training(self):
        for model in (keras.Sequential([keras.layers.Dense(1)]), Trained()):
            model.compile("sgd", "mse")
            assert model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0).history["loss"][0] > 0

    def test_that_fails_as_it_is(self):
        assert keras.Sequential().layers
"""


def test_harness(tmp_path):
    (tmp_path / "sample_test.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", Path(__file__).parent / "pytest.ini", "-rA", tmp_path]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    outcomes = {name: outcome for outcome, name in re.findall(r"^(PASSED|FAILED) .*::test_(\w+)", output, re.MULTILINE)}
    assert outcomes == {
        **dict.fromkeys(("sequential", "functional", "subclassed", "layer_that_trains", "optimizer"), "FAILED"),
        **dict.fromkeys(("parts_of_models", "training"), "PASSED"),
    }, output
    assert re.search(r"^SKIPPED \[1\] .* Plain Keras fails: .*: AssertionError: assert \[\]$", output, re.MULTILINE), output
