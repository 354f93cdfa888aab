"""The promise: a model on towers becomes the model that one device makes of it. The first test to read."""

import functools

import keras
import numpy as np
import pytest

import keras_dp

rng = np.random.default_rng(0)
# 50 rows in batches of 16: slices of 6, 5 and 5 rows on three towers, and in the last batch of 1, 1 and none.
IMAGES, LABELS, WEIGHTS = rng.normal(size=(50, 8, 8, 1)), rng.integers(0, 4, 50), rng.uniform(size=50)


def build():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Conv2D(6, 3), keras.layers.BatchNormalization(), keras.layers.ReLU(), keras.layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Flatten(), keras.layers.Dense(4)])


def train(model):
    keras.utils.set_random_seed(1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), loss, metrics=["accuracy"])
    history = model.fit(IMAGES, LABELS, batch_size=16, epochs=3, sample_weight=WEIGHTS, verbose=0).history
    return history, model.evaluate(IMAGES, LABELS, verbose=0), model.predict(IMAGES, batch_size=7, verbose=0)


@functools.cache
def on_one_device():
    model = build()
    return model, train(model)


@pytest.mark.parametrize("towers", [1, 2, 3, 4])
def test_towers_give_the_result_of_one_device(towers, tmp_path):
    plain, expected = on_one_device()
    inner = build()
    parallel = keras_dp.DataParallelModel(inner, devices=towers)
    received = train(parallel)
    parallel.save(tmp_path / "model.keras")

    assert expected[0]["loss"][0] > 1.1 * expected[0]["loss"][-1], "nothing was learned"
    # The file is the plain model's, and loads without keras_dp.
    saved = keras.saving.load_model(tmp_path / "model.keras")
    weights, *same = [[*model.get_weights(), *map(np.array, model.optimizer.variables)] for model in (plain, inner, saved)]
    for numbers, others in [(expected, received), *((weights, each) for each in same)]:
        for one, other in zip(keras.tree.flatten(numbers), keras.tree.flatten(others), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-9)
