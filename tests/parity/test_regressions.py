"""Cases that were once wrong here, or are wrong in other frameworks, stay right."""

import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_script, assert_same_training, assert_towers_match_one_device
from keras import layers, ops, optimizers

import keras_dp

rng = np.random.default_rng(0)


def compiled(optimizer=lambda: optimizers.SGD(0.02), loss="mse"):
    return lambda: {"optimizer": optimizer(), "loss": loss}


def dense(outputs=2):
    return keras.Sequential([keras.Input((3,)), layers.Dense(outputs)])


def test_fewer_rows_than_towers_in_float32():
    """For zero rows, oneDNN aborts the process in the gradient of MaxPooling2D; other layers fail there, or forward."""
    keras.config.set_floatx("float32")

    def build():
        inputs = keras.Input((8, 8, 2))
        images = layers.MaxPooling2D()(layers.BatchNormalization()(layers.Conv2D(3, 3)(inputs)))
        images = layers.AveragePooling2D(2)(layers.SeparableConv2D(3, 3, padding="same")(images))
        films = layers.ConvLSTM2D(2, 3)(layers.Reshape((2, 8, 4, 2))(inputs))
        return keras.Model(inputs, layers.Dense(2)(layers.Concatenate()([layers.Flatten()(x) for x in (images, films)])))

    # Two batches: Keras does not know their numbers of rows.
    data = rng.normal(size=(9, 8, 8, 2)).astype("float32"), rng.normal(size=(9, 2)).astype("float32")
    assert_towers_match_one_device(build, compiled(), [(data, 8)], 4)


def test_embeddings_of_an_empty_slice_touch_no_row():
    """The borrowed row's tokens must not appear among the sparse gradients."""

    def build():
        inputs = keras.Input((4,), dtype="int32")
        table = layers.Embedding(9, 3)
        x = layers.Flatten()(layers.Add()([table(inputs), table(9 - 1 - inputs)]))
        return keras.Model(inputs, layers.Dense(2)(x))

    data = rng.integers(0, 9, (5, 4)), rng.normal(size=(5, 2))
    assert_same_training(build, compiled(lambda: optimizers.Adam(0.01)), [(data, 2)], 4)


def test_a_model_that_is_gone_leaves_no_graph_of_its_towers():
    """TensorFlow never frees a tf.custom_gradient: the marks of cross-tower sums kept their towers' graphs alive."""
    graphs = []

    class Traced(layers.Layer):
        def call(self, x):
            graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
            return x

    def train():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2), layers.BatchNormalization(), Traced()])
        parallel = keras_dp.DataParallelModel(model, devices=2)
        parallel.compile("sgd", "mse")
        del graphs[:]
        parallel.train_on_batch(rng.normal(size=(4, 3)), rng.normal(size=(4, 2)))
        assert graphs

    train()
    keras.utils.clear_session()
    assert graphs[-1]() is None


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("shape", [(4, None), (4, 3)])
def test_the_end_of_data_of_unknown_length_counts_as_in_plain_keras(shape):
    """When the data end, Keras calls the step once more. What does not depend on the batch is written then, in plain Keras too.

    With a length that is not known, the number of rows depends on the batch in plain Keras, though it is a constant on towers.
    """

    def build():
        sums = layers.Lambda(lambda x: ops.sum(x, 1, keepdims=True))
        return keras.Sequential([keras.Input(shape[1:]), sums, layers.Dense(1)])

    def script(model):
        model.compile(**compiled()())
        rows = np.random.default_rng(0).normal(size=(12, 3)), np.random.default_rng(1).normal(size=(12, 1))
        spec = tf.TensorSpec(shape[1:], "float64"), tf.TensorSpec((1,), "float64")
        batches = tf.data.Dataset.from_generator(lambda: zip(*rows, strict=True), output_signature=spec)
        batches = batches.batch(4, drop_remainder=True)
        return model.fit(batches, shuffle=False, verbose=0).history

    assert_same_script(build, script, 2)


def test_a_list_at_home_has_the_gradients_of_rows():
    """The shape of the elements is not known in the gradient, and may count rows: 4 entries, in a batch of 4."""

    def one_row(y_true, y_pred):
        both = y_pred, y_pred @ tf.transpose(y_pred)
        return sum(tf.reduce_sum(tf.TensorArray(rows.dtype, 4).unstack(rows).read(1) ** 2) for rows in both)

    data = rng.normal(size=(8, 3)), rng.normal(size=(8, 1))
    assert_same_training(lambda: dense(outputs=4), compiled(loss=one_row), [(data, 4)], 2)


@pytest.mark.parametrize(("switch", "orders"), [("of the model", [True, False, True]), ("of TensorFlow", [False, True, False])])
@pytest.mark.filterwarnings("ignore:Even though the")
def test_eagerness_may_change_between_calls(switch, orders):
    x, y = rng.normal(size=(20, 3)), rng.normal(size=(20, 2))

    def script(model):
        model.compile(**compiled()())
        found = []
        try:
            for is_eager in orders:
                if switch == "of the model":
                    model.run_eagerly = is_eager
                else:
                    tf.config.run_functions_eagerly(is_eager)
                found += [model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history, model.predict(x, verbose=0)]
                found += [model.train_on_batch(x, y)]
        finally:
            tf.config.run_functions_eagerly(False)
        return found

    assert_same_script(dense, script, 2)


def test_arrays_of_a_generator_are_not_written_over():
    """TensorFlow takes an aligned array of a generator without a copy, and wrote the model's first result over a slice of it.

    The array, and so the data of the next epoch, were the exponentials of the user's data.
    """
    memory = np.empty(8 * 8 * 8 + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    x = memory[begin : begin + 8 * 8 * 8].view(np.float64).reshape(8, 8)
    x[...] = np.random.default_rng(0).normal(size=(8, 8))
    before, y = x.copy(), np.ones((8, 1))

    def build():
        inputs = keras.Input((8,))
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Activation("exponential")(inputs)))

    def script(model):
        model.compile("sgd", "mse")
        types = (tf.TensorSpec([None, 8], tf.float64), tf.TensorSpec([None, 1], tf.float64))
        dataset = tf.data.Dataset.from_generator(lambda: iter([(x, y)] * 3), output_signature=types)
        both = ((x, y) for _ in range(3)), dataset
        return [model.fit(data, steps_per_epoch=3, shuffle=False, verbose=0).history for data in both]

    assert_same_script(build, script, 2)
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("traced", ["before wrapping", "while training"])
def test_functions_of_a_model_whose_variables_move(traced):
    """They have captured the variables where they were."""

    class Functions(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.outputs = layers.Dense(4), layers.Dense(2)
            self.hidden.build((None, 3))
            self.outputs.build((None, 4))
            self.attribute = tf.function(self.outputs)

        @tf.function
        def method(self, x):
            return ops.tanh(self.hidden(x))

        def call(self, x):
            return self.attribute(self.method(x))

    x, y = rng.normal(size=(20, 3)), rng.normal(size=(20, 2))

    def build():
        model = Functions()
        if traced == "before wrapping":
            model.predict(x, batch_size=7, verbose=0)
        return model

    def script(model):
        model.compile("sgd", "mse")
        history = model.fit(x, y, batch_size=7, verbose=0).history
        inner = getattr(model, "inner_model", model)
        return [history, *(each.predict(x, batch_size=7, verbose=0) for each in (inner, model))]

    _, parallel = assert_same_script(build, script, 2, {"parameter_device": "sharded"})
    assert len({weight.value.device for weight in parallel.weights}) == 2


def test_a_loss_for_each_output():
    """Its history was taken for that of a fit without batches, by a test for truth that arrays do not have."""

    class Model(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                losses = tf.reduce_mean((self(x, training=True) - y) ** 2, axis=0)
                loss = tf.reduce_sum(losses)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": losses}

    data = rng.normal(size=(20, 3)), rng.normal(size=(20, 2))
    assert_same_training(lambda: Model([keras.Input((3,)), layers.Dense(2)]), compiled(), [(data, 8)], 2)
