"""The programs of docs/own_steps.md give the same results with and without the lines marked `# keras_dp`."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import TOLERANCE, assert_same, largest_change, values
from keras import layers

import keras_dp

PAGE = Path(__file__).parents[2] / "docs" / "own_steps.md"
PROGRAMS = [
    code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL) if "class " in code
]


def network(outputs, inputs):
    """Builds a small network with batch normalization and dropout."""
    return keras.Sequential(
        [keras.Input((inputs,)), layers.Dense(9), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(outputs)]
    )


def given():
    """Returns the names that the programs assume, with 71 rows: two batches and an uneven one."""
    rng = np.random.default_rng(0)
    keras.utils.set_random_seed(3)
    names = {"generator": network(6, 16), "discriminator": network(1, 6), "encoder": network(5, 6), "network": network(2, 6)}
    names |= {name: rng.normal(size=(71, 6)) for name in ("images", "one", "other", "x")}
    return names | {"y": rng.normal(size=(71, 2)), "keras": keras, "tf": tf, "keras_dp": keras_dp}


def trained(code):
    """Runs a program, and returns the variables of all networks and optimizers."""
    names = given()
    networks = [name for name in names.values() if isinstance(name, keras.Model)]
    before = [model.get_weights() for model in networks]
    keras.utils.set_random_seed(5)
    exec(code, names)
    model = names.get("gan") or names["model"]
    optimizers = [model.generator_optimizer, model.discriminator_optimizer] if "gan" in names else [model.optimizer]
    changes = [largest_change(a, b.get_weights()) for a, b in zip(before, networks, strict=True)]
    assert max(changes) > 1e-3, "nothing was trained"
    is_wrapped = isinstance(model, keras_dp.DataParallelModel)
    weights = [weight for network in networks for weight in network.get_weights()]
    return [*weights, *(value for one in optimizers for value in values(one))], is_wrapped


@pytest.mark.parametrize("k", range(len(PROGRAMS)), ids=["gan", "contrastive", "noisy"])
def test_program_of_the_page_is_its_plain_twin(k):
    code = PROGRAMS[k]
    plain = re.sub(r"keras_dp\.DataParallelModel\((.+)\)  # keras_dp", r"\1", code)
    assert "keras_dp" not in plain
    expected, _ = trained(plain)
    received, is_wrapped = trained(code)
    assert is_wrapped
    assert_same(expected, received, TOLERANCE["float64"])
