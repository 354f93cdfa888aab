"""The promise: a model trains on towers to the same weights as on one device. This is the first test to read."""

import keras
import numpy as np
from comparison import assert_same

import keras_dp

rng = np.random.default_rng(0)
# 50 rows in batches of 16: three towers get slices of 5, 5 and 6 rows, and of 0, 1 and 1 rows in the last batch.
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


def test_towers_give_the_result_of_one_device(tmp_path):
    plain = build()
    expected = train(plain)
    assert expected[0]["loss"][0] > 1.1 * expected[0]["loss"][-1], "nothing was learned"
    for towers in (1, 2, 3):
        inner = build()
        parallel = keras_dp.DataParallelModel(inner, devices=towers)
        assert_same(expected, train(parallel), 1e-9)
        parallel.save(tmp_path / "model.keras")
        # The file holds the plain model, and loads without keras_dp.
        for model in (inner, keras.saving.load_model(tmp_path / "model.keras")):
            assert_same(plain.get_weights(), model.get_weights(), 1e-9)
            assert_same([*map(np.array, plain.optimizer.variables)], [*map(np.array, model.optimizer.variables)], 1e-9)
