"""Every kind of model, and every layer of Keras, gives one device's result."""

import keras
import numpy as np
import pytest
from comparison import assert_same, assert_same_script, assert_same_training, same_on_towers, twins
from keras import layers, ops

import keras_dp

rng = np.random.default_rng(6)
X = rng.normal(size=(23, 5))
Y = rng.normal(size=(23, 3))


def assert_exact(build, x=X, y=Y, fits=1, **arguments):
    assert_same_training(build, lambda: {"optimizer": "adam", "loss": "mse"}, [((x, y), 9)] * fits, 3, **arguments)


def sequential(*first):
    return keras.Sequential([*first, layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Dense(3)])


def built():
    return sequential(keras.Input((5,)))


def fitted(model):
    return model.fit(X, Y, batch_size=9, shuffle=False, verbose=0).history


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
        return self.heads["out"](self.blocks[1](self.blocks[0](inputs), training=training))


KINDS = {"nested": nested, "subclassed, not built": Subclassed, "sequential, not built": sequential}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind):
    """The first batch builds a model that is not built. tf.distribute refuses models that were built before its scope.

    Evaluation once mistook the new list of layers for a conversion, so that the next epoch had no train function.
    """
    assert_exact(KINDS[kind], fits=2, validation_data=(X[:7], Y[:7]))


def test_loaded_models(tmp_path):
    """A loaded compiled model goes on from its optimizer's state. Then the model inside is compiled again by itself."""
    model = built()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    fitted(model)
    model.save(tmp_path / "model.keras")

    def script(loaded):
        results = fitted(loaded), loaded.evaluate(X, Y, verbose=0)
        getattr(loaded, "inner_model", loaded).compile(keras.optimizers.SGD(0.1), "mae")
        loaded.optimizer.learning_rate = 0.3
        return results, fitted(loaded)

    assert_same_script(lambda: keras.models.load_model(tmp_path / "model.keras"), script, 3)


def with_a_frozen_base():
    base = built()
    base.trainable = False
    inputs = keras.Input((5,))
    model = keras.Model(inputs, layers.Dense(3)(base(inputs, training=False)))
    model.base = base
    return model


@same_on_towers(with_a_frozen_base, 3)
def test_frozen_layers_and_compile_again(model):
    """A new head trains on a frozen base, whose batch normalization stays unchanged; then the whole model is tuned.

    Each training follows a compile(), of the wrapper or of the inner model.
    """
    inner = getattr(model, "inner_model", model)
    results = []
    for owner, trainable in ((inner, False), (model, False), (model, True), (inner, True)):
        owner.trainable = trainable
        results.append((len(model.trainable_weights), len(inner.trainable_weights)))
    for owner, trainable in ((model, False), (inner, True)):
        inner.base.trainable = trainable
        before = inner.base.get_weights()
        owner.compile(keras.optimizers.Adam(0.01), "mse")
        results.append(fitted(model))
        changed = [np.any(one != other) for one, other in zip(before, inner.base.get_weights(), strict=True)]
        assert set(changed) == {trainable}
    return results


def test_masks():
    """Masks pass through the model into recurrent layers, pooling and the loss."""

    def build():
        inputs = keras.Input((6, 4))
        hidden = layers.GRU(3, return_sequences=True)(layers.Masking()(inputs))
        return keras.Model(inputs, [layers.Dense(3)(layers.GlobalAveragePooling1D()(hidden)), layers.Dense(1)(hidden)])

    x = rng.normal(size=(9, 6, 4)) * (np.arange(6) < rng.integers(1, 7, 9)[:, None])[..., None]
    assert_exact(build, x, [Y[:9], rng.normal(size=(9, 6, 1))])


class Updating(layers.Layer):
    """Updates a weight that is trained, a mean over the rows, a count of the rows, and the largest of their values."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones", name="scale")
        self.mean = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="mean")
        self.rows = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="rows")
        self.largest = self.add_weight(shape=(), initializer="zeros", trainable=False, name="largest")

    def call(self, x, training=False):
        before = x * self.scale - self.mean
        if training:
            self.scale.assign(0.9 * self.scale**2)
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        self.rows.assign_add(ops.shape(x)[0])
        self.largest.assign(ops.maximum(self.largest, ops.max(x)))
        return before + ops.sin(self.scale) * x


def test_state_updated_in_call():
    """The gradient and the update of the weight apply to the new value, as in SpectralNormalization with its kernel."""
    assert_exact(lambda: keras.Sequential([keras.Input((5,)), Updating(), layers.Dense(3)]))


def test_lora():
    def build():
        model = built()
        model.layers[0].enable_lora(2)
        return model

    keras.config.set_floatx("float32")  # It is the dtype of its initializers.
    assert_exact(build)


def test_quantized_layers():
    """int8 leaves only the biases trainable; float8 takes its largest magnitudes over the global batch."""

    def build():
        model = built()
        model.layers[0].quantize("int8")
        model.layers[2].quantize("float8")
        return model

    assert_exact(build)


def test_stateful_layers():
    """Their state has as many rows as a batch, and carries over to the next batch."""

    def build():
        return keras.Sequential([keras.Input(batch_shape=(5, 6, 4)), layers.GRU(2, stateful=True), layers.Dense(3)])

    x = rng.normal(size=(15, 6, 4))

    def script(model):
        model.compile("sgd", "mse")
        history = model.fit(x, Y[:15], batch_size=5, shuffle=False, verbose=0).history
        model.layers[0].reset_states()
        return history, model.predict(x, 5, 0)

    states = [np.array(model.layers[0].states[0]) for model in assert_same_script(build, script, 3)]
    assert_same(*states, 1e-9)
    assert np.abs(states[0]).max() > 0


def test_rematerialized_layers():
    class Rematerialized(layers.Dense):
        def call(self, x):
            return keras.remat(super().call)(x)

    assert_exact(lambda: keras.Sequential([keras.Input((5,)), Rematerialized(3, "tanh")]))


FAMILIES_OF_APPLICATIONS = (
    "ConvNeXtTiny DenseNet121 EfficientNetB0 EfficientNetV2B0 InceptionV3 MobileNetV2 MobileNetV3Small NASNetMobile ResNet50V2 "
    "VGG16 Xception"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES_OF_APPLICATIONS.split())
def test_applications(name):
    """Each of two batches trains one step, without dropout. Small inputs and depth amplify the rounding."""
    pixels = 75 if name in ("InceptionV3", "Xception") else 32
    shape = (pixels, pixels, 3)
    x, y = rng.uniform(0, 255, (7, *shape)), rng.normal(size=(7, 2))

    def build():
        base = getattr(keras.applications, name)(weights=None, include_top=False, pooling="avg", input_shape=shape)
        for layer in base._flatten_layers():
            for rate in ("rate", "drop_path_rate"):
                if hasattr(layer, rate):
                    setattr(layer, rate, 0.0)
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
