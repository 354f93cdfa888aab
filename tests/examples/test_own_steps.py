"""The programs of docs/own_steps.md give the same results with and without the lines marked `# keras_dp`."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import TOLERANCE, assert_same, values
from keras import layers

import keras_dp

PAGE = Path(__file__).parents[2] / "docs" / "own_steps.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
PROGRAMS = [code[code.index("class ") :] for code in BLOCKS if "class " in code]


def network(outputs):
    """Builds a small network with batch normalization and dropout, in place of the page's."""
    return keras.Sequential([layers.Dense(9), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(outputs)])


def trained(code):
    """Runs a program on 71 rows, two batches and an uneven one, and returns its variables, and whether it is on towers."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(71, 6))
    names = {"keras": keras, "tf": tf, "keras_dp": keras_dp, "network": network, "images": images, "rng": rng}
    keras.utils.set_random_seed(5)
    exec(code, names)
    model = names.get("gan") or names["model"]
    optimizers = [model.generator_optimizer, model.discriminator_optimizer] if "gan" in names else [model.optimizer]
    assert min(int(one.iterations.numpy()) for one in optimizers) == 3, "nothing was trained"
    is_wrapped = isinstance(model, keras_dp.DataParallelModel)
    return [*model.get_weights(), *(value for one in optimizers for value in values(one))], is_wrapped


@pytest.mark.parametrize("k", range(len(PROGRAMS)), ids=["gan", "contrastive", "noisy"])
def test_program_of_the_page_is_its_plain_twin(k):
    code = PROGRAMS[k]
    plain = re.sub(r"keras_dp\.DataParallelModel\((.+)\)  # keras_dp", r"\1", code)
    assert "keras_dp" not in plain
    expected, _ = trained(plain)
    received, is_wrapped = trained(code)
    assert is_wrapped
    assert_same(expected, received, TOLERANCE["float64"])
