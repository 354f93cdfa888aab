"""Every kind of model, and every layer of Keras, gives one device's result."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_script, assert_same_training, fit, twins
from keras import layers, ops

import keras_dp

rng = np.random.default_rng(6)
X = rng.normal(size=(23, 5))
Y = rng.normal(size=(23, 3))
DATA = [((X, Y), 9)]


def compiled(optimizer="sgd", **arguments):
    return lambda: {"optimizer": optimizer, "loss": "mse", **arguments}


def sequential():
    return keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Dense(3)])


def nested():
    """Builds a model of two branches that share an inner model with batch normalization."""
    block = keras.Sequential([keras.Input((5,)), layers.Dense(5, "tanh"), layers.BatchNormalization()])
    inputs = keras.Input((5,))
    both = layers.Concatenate()([block(inputs), block(layers.Dense(5)(inputs))])
    return keras.Model(inputs, layers.Dense(3)(both))


class Subclassed(keras.Model):
    """Keeps its layers in a list and a dict."""

    def __init__(self):
        super().__init__()
        self.blocks = [layers.Dense(6, "tanh"), layers.BatchNormalization()]
        self.heads = {"out": layers.Dense(3)}

    def call(self, inputs, training=None):
        hidden = self.blocks[1](self.blocks[0](inputs), training=training)
        return self.heads["out"](hidden)


KINDS = {
    "nested": nested,
    "subclassed, not built": Subclassed,
    "sequential, not built": lambda: keras.Sequential([layers.Dense(6), layers.BatchNormalization(), layers.Dense(3)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind):
    """The first batch builds a model that is not built. tf.distribute refuses models that were built before its scope."""
    assert_same_training(KINDS[kind], compiled("adam"), DATA, 3)


def test_loaded_models(tmp_path):
    """A loaded compiled model continues training from its optimizer's state, without another compile()."""
    model = sequential()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    model.fit(X, Y, batch_size=9, verbose=0)
    model.save(tmp_path / "model.keras")

    def script(loaded):
        assert loaded.compiled
        return loaded.fit(X, Y, batch_size=9, shuffle=False, verbose=0).history, loaded.evaluate(X, Y, verbose=0)

    assert_same_script(lambda: keras.models.load_model(tmp_path / "model.keras"), script, 3)


def test_frozen_layers_and_compile_again():
    """Layers that are frozen in the first training train after a second compile(), of either model."""

    def script(model):
        inner = getattr(model, "inner_model", model)
        results = []
        for owner, trainable in ((inner, False), (model, False), (model, True), (inner, True)):
            owner.trainable = trainable
            results.append((len(model.trainable_weights), len(inner.trainable_weights)))
        for owner, trainable in ((model, False), (inner, True), (inner, False), (model, True)):
            inner.layers[0].trainable = trainable
            before = inner.layers[0].get_weights()[0]
            owner.compile(keras.optimizers.Adam(0.01), "mse")
            results.append(model.train_on_batch(X, Y))
            assert np.any(before != inner.layers[0].get_weights()[0]) == trainable
        return results

    assert_same_script(sequential, script, 3)


def test_fine_tuning():
    """A new head trains on a frozen base, whose batch normalization stays unchanged; then the whole model is tuned."""

    def build():
        base = sequential()
        base.trainable = False
        inputs = keras.Input((5,))
        model = keras.Model(inputs, layers.Dense(3)(base(inputs, training=False)))
        model.base = base
        return model

    def script(model):
        results = []
        for trainable in (False, True):
            model.base.trainable = trainable
            moving = model.base.layers[1].moving_mean.numpy()
            model.compile(keras.optimizers.Adam(0.01), "mse")
            results.append(model.fit(X, Y, batch_size=9, shuffle=False, verbose=0).history)
            assert np.any(moving != model.base.layers[1].moving_mean.numpy()) == trainable
        return results

    assert_same_script(build, script, 3)


def test_masks():
    """Masks pass through the model into recurrent layers, pooling and the loss."""

    def build():
        inputs = keras.Input((6, 4))
        hidden = layers.GRU(3, return_sequences=True)(layers.Masking()(inputs))
        return keras.Model(inputs, [layers.Dense(3)(layers.GlobalAveragePooling1D()(hidden)), layers.Dense(1)(hidden)])

    x = rng.normal(size=(23, 6, 4)) * (np.arange(6) < rng.integers(1, 7, 23)[:, None])[..., None]
    assert_same_training(build, compiled(), [((x, [Y, rng.normal(size=(23, 6, 1))]), 9)], 3)


def in_front(layer):
    """Returns a function that builds a model of a layer and a dense one."""
    return lambda: keras.Sequential([keras.Input((5,)), layer(), layers.Dense(3)])


def test_weights_updated_in_call():
    """The gradient and the update apply to the new value, as in SpectralNormalization with its kernel."""

    class Shrinking(layers.Layer):
        def build(self, shape):
            self.scale = self.add_weight(shape=shape[1:], initializer="ones", name="scale")

        def call(self, x, training=False):
            before = x * self.scale
            if training:
                self.scale.assign(0.9 * self.scale**2)
            return before + ops.sin(self.scale) * x

    assert_same_training(in_front(Shrinking), compiled("adam"), DATA, 3)


def test_state_that_is_a_mean_over_the_rows():
    class Centering(layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="mean")
            self.steps = self.add_weight(shape=(), initializer="zeros", dtype="int64", trainable=False, name="steps")

        def call(self, x, training=False):
            centered = x - self.mean
            if training:
                self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
                self.steps.assign_add(1)
            return centered

    assert_same_training(in_front(Centering), compiled(), DATA, 3)


def test_other_state():
    """Covers a count of rows, and the largest of their values."""

    class Counting(layers.Layer):
        def build(self, shape):
            self.rows = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="rows")
            self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False, name="largest")

        def call(self, x):
            self.rows.assign_add(ops.shape(x)[0])
            self.largest.assign(ops.maximum(self.largest, ops.max(x)))
            return x

    assert_same_training(in_front(Counting), compiled(), DATA, 3)


def two_layers():
    return keras.Sequential([keras.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(3)])


def test_lora():
    """Its initializers are float32."""

    def build():
        model = two_layers()
        model.layers[0].enable_lora(2)
        return model

    keras.config.set_floatx("float32")
    assert_same_training(build, compiled("adam"), DATA, 3)


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize` method")
@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_quantized_layers(mode):
    """int8 leaves only the biases trainable; float8 takes its largest magnitudes over the global batch."""

    def build():
        model = two_layers()
        model.quantize(mode)
        return model

    assert_same_training(build, compiled("adam"), DATA, 3)


def test_stateful_layers():
    """Their state has as many rows as a batch, and carries over to the next batch."""

    def build():
        return keras.Sequential([keras.Input(batch_shape=(5, 6, 4)), layers.GRU(2, stateful=True), layers.Dense(3)])

    data = rng.normal(size=(15, 6, 4)), Y[:15]

    def script(model):
        history = fit(model, compiled(), [(data, 5)])
        model.layers[0].reset_states()
        return history, model.predict(data[0], 5, 0)

    states = [np.array(model.layers[0].states[0]) for model in assert_same_script(build, script, 3)]
    assert_same(*states, 1e-9)
    assert np.abs(states[0]).max() > 0


def test_steps_of_ones_own():
    """Custom steps in which rows meet rows are exact: the step is traced unchanged, and its graph is partitioned."""

    class Own(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                error = self(x, training=True) - y
                loss = ops.sqrt(ops.mean(error**2)) + ops.max(ops.abs(error))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss, "largest": ops.max(error)}

    def build():
        inputs = keras.Input((5,))
        return Own(inputs, layers.Dense(3)(layers.Dropout(0.5)(layers.BatchNormalization()(inputs))))

    assert_same_training(build, compiled("adam"), DATA, 3)


def test_rematerialized_layers():
    class Remat(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.out = layers.Dense(4, "tanh"), layers.Dense(3)
            self.rematerialized = keras.remat(self.dense.call)

        def build(self, shape):
            self.dense.build(shape)
            self.out.build((None, 4))

        def call(self, x):
            return self.out(self.rematerialized(x))

    assert_same_training(Remat, compiled(), DATA, 3)


def test_functions_compiled_by_the_user():
    """Covers functions that were traced before, outside of the step."""

    class Decorated(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")

        @tf.function
        def product(self, x):
            return ops.matmul(x, self.kernel)

        def call(self, x):
            return self.product(x)

    def build():
        model = keras.Sequential([keras.Input((5,)), Decorated()])
        model(np.ones((9, 5)))
        return model

    assert_same_training(build, compiled(), DATA, 3)


FAMILIES_OF_APPLICATIONS = {
    "ConvNeXtTiny": 32,
    "DenseNet121": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "InceptionV3": 75,
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "NASNetMobile": 32,
    "ResNet50V2": 32,
    "VGG16": 32,
    "Xception": 75,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES_OF_APPLICATIONS)
def test_applications(name):
    """Each of two batches trains one step, without dropout. Small inputs and depth amplify the rounding."""
    pixels = FAMILIES_OF_APPLICATIONS[name]
    x, y = rng.uniform(0, 255, (7, pixels, pixels, 3)), rng.normal(size=(7, 2))

    def build():
        shape = (pixels, pixels, 3)
        base = getattr(keras.applications, name)(weights=None, include_top=False, pooling="avg", input_shape=shape)
        for layer in base._flatten_layers():
            if isinstance(layer, layers.Dropout):
                layer.rate = 0.0
            if hasattr(layer, "drop_path_rate"):
                layer.drop_path_rate = 0.0
        return keras.Sequential([base, layers.Dense(2)])

    one, inner = twins(build)
    start, results = one.get_weights(), []
    for model in (one, keras_dp.DataParallelModel(inner, devices=3)):
        model.compile(keras.optimizers.SGD(0.001), "mse")
        for rows in (7, 4):
            model.set_weights(start)
            results.append((model.train_on_batch(x[:rows], y[:rows]), model.get_weights()))
            assert any(not np.array_equal(a, b) for a, b in zip(start, results[-1][1], strict=True))
    assert_same(results[:2], results[2:], 1e-6)
