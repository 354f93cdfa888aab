"""Models with a custom `fit`, `evaluate`, `predict` or `make_train_function` give one device's result."""

import functools
import gc
import inspect

import keras
import numpy as np
import tensorflow as tf
from comparison import assert_same_script, same_on_towers
from keras import layers

import keras_dp
from keras_dp.wrapping.one_state import own_of

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(21, 4)), rng.normal(size=(21, 3))


class Network(keras.Model):
    """Uses batch normalization, and dropout, whose masks are one device's."""

    def __init__(self):
        super().__init__()
        self.inside = keras.Sequential([layers.Dense(5), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3)])

    def call(self, x, training=None):
        return self.inside(x, training=training)


def compiled(model):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    return model


def fitted(model, **arguments):
    return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **arguments).history


def batches():
    return [(tf.constant(X[i : i + 8]), tf.constant(Y[i : i + 8])) for i in range(0, len(X), 8)]


def learned(model, loss_of):
    """Updates all weights by the gradient of a loss, and returns it."""
    with tf.GradientTape() as tape:
        loss = loss_of()
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


class Preprocessing(Network):
    """Prepares its data and passes them to `super()`, with a custom argument and attribute."""

    def fit(self, x, y, shift=0.0, **arguments):
        self.shift = shift
        return super().fit(x - shift, y, **arguments)

    def evaluate(self, x, y=None, **arguments):
        prepared = arguments.get("_use_cached_eval_dataset", False)
        return super().evaluate(x if prepared else x - self.shift, y, **arguments)

    def predict(self, x, **arguments):
        return 2 * super().predict(x - self.shift, **arguments)

    def train_on_batch(self, x, y, **arguments):
        return super().train_on_batch(x - self.shift, y, **arguments)


def test_calls_that_end_in_those_of_super():
    def script(model):
        history = fitted(compiled(model), shift=0.5, validation_data=(X, Y))
        results = [history, model.shift, model.evaluate(X, Y, batch_size=8, verbose=0)]
        return [*results, model.train_on_batch(X, Y), model.predict(X, batch_size=8, verbose=0)]

    _, parallel = assert_same_script(Preprocessing, script, 3)
    assert list(inspect.signature(parallel.fit).parameters) == ["x", "y", "shift", "arguments"]
    assert parallel.history is not None
    assert parallel.inner_model.shift == 0.5


class Logging(Network):
    """Wraps Keras's train function to collect the loss of each step."""

    def __init__(self):
        super().__init__()
        self.losses_seen = []

    def make_train_function(self, force=False):
        super().make_train_function(force)
        train = self.train_function

        def logged(iterator):
            logs = train(iterator)
            self.losses_seen.append(float(logs["loss"]))
            return logs

        self.train_function = logged


@same_on_towers(Logging, 3)
def test_a_train_function_around_that_of_super(model):
    fitted(compiled(model))
    assert len(model.losses_seen) == 3
    return model.losses_seen


class CompilingItsSteps(Network):
    """Makes its functions from its steps, without Keras's."""

    def make_train_function(self, force=False):
        if self.train_function is None or force:
            run = self.distribute_strategy.run
            self.train_function = tf.function(lambda iterator: run(self.train_step, args=(next(iterator),), kwargs={}))

    def make_test_function(self, force=False):
        step = tf.function(lambda x, y: self.test_step((x, y)), reduce_retracing=True)
        self.test_function = lambda iterator: step(*next(iterator))


def test_a_train_function_from_the_step():
    """The one that a model has made before it was wrapped trains on one device, and is made anew."""

    def build():
        model = CompilingItsSteps()
        fitted(compiled(model))
        return model

    def script(model):
        return fitted(model), model.evaluate(X, Y, batch_size=8, verbose=0)

    _, parallel = assert_same_script(build, script, 3)
    assert own_of(parallel).steps.partition("train") is not None


class LoopOverSteps(Network):
    def fit(self, epochs):
        compiled_step = tf.function(lambda x, y: self.train_step((x, y)), reduce_retracing=True)
        logs = []
        for _ in range(epochs):
            logs += [self.train_step(batch) for batch in batches()]
            logs += [compiled_step(*batch) for batch in batches()]
            self.reset_metrics()
            logs += [self.train_on_batch(*batch, return_dict=True) for batch in batches()]
        return logs


def test_a_loop_of_ones_own_around_steps_trains_on_the_towers(caplog):
    """Steps run as they are, in a function that the loop compiles, and in train_on_batch()."""

    def built():
        model = LoopOverSteps()
        model(X)
        return model

    _, parallel = assert_same_script(built, lambda model: compiled(model).fit(epochs=2), 3)
    assert "ran on one device" not in caplog.text
    assert own_of(parallel).uses


def repeatedly(method):
    """Decorates a method with what wraps no function."""
    twice = functools.partial(method)

    @functools.wraps(method)
    def repeated(self):
        twice(self)
        return twice(self)

    repeated.__wrapped__ = twice
    return repeated


class Adversaries(keras.Model):
    """Trains two networks by a method of its own, as published programs do, with steps that take four arguments."""

    def __init__(self):
        super().__init__()
        self.one, self.other = layers.Dense(3), layers.Dense(3)
        self.one.build((None, 4))
        self.other.build((None, 4))
        self.built = True

    def train_step(self, data):
        x, y, a, b = data
        one, other = self.one, self.other
        return {"loss": learned(self, lambda: tf.reduce_mean(a * (one(x) - y) ** 2 + b * (other(x) - one(x)) ** 2))}

    def step(self, x, y, a, b=1.0):
        self.steps = getattr(self, "steps", 0) + 1
        return float(self.train_step((x, y, a * self.steps, b))["loss"])

    def train(self, data):
        return [self.step(*batch) for batch in data]

    @tf.function
    def compiled_step(self, data):
        return self.train_step(data)["loss"]

    def similarity(self, x):
        return float(tf.reduce_mean(self.one(x) * self.other(x)))

    @repeatedly
    def forget(self):
        """Forgets what the first network has learned."""
        self.one.kernel.assign(0 * self.one.kernel)
        self.optimizer.iterations.assign(0)


def four_arguments():
    return [(x, y, tf.square(x[:, :1]), tf.square(y)) for x, y in batches()]


def test_methods_of_ones_own_train_by_steps_on_towers(caplog):
    """They call the step of the wrapper, also in a function that they compile, with any arguments."""

    def script(model):
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        results = [model.similarity(X), model.train(four_arguments()), model.train(four_arguments())]
        return [*results, float(model.compiled_step(four_arguments()[0])), model.step(*four_arguments()[0][:3])]

    _, parallel = assert_same_script(Adversaries, script, 3)
    assert "one device" not in caplog.text
    assert own_of(parallel).steps.partition("train") is not None


class AdversariesWithTapes(Adversaries):
    """Updates by itself, in a method that calls no step, with an optimizer that Keras does not know."""

    def compile(self, optimizer):
        self.optimizers = {"one": optimizer}

    def update(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.one(x) - y) ** 2)
        self.optimizers["one"].apply(tape.gradient(loss, self.one.trainable_variables), self.one.trainable_variables)
        return float(loss)

    def train(self, data):
        return [self.update(x, y) for x, y, _, _ in data]

    def fit(self, data):
        return self.train(data)


def test_methods_of_ones_own_that_compute_by_themselves_say_so(caplog):
    """The warning names the method that was called, once, wherever the model keeps its optimizer."""

    def script(model):
        model.compile(keras.optimizers.SGD(0.1))
        return [model.train(four_arguments()), model.fit(four_arguments()), model.get_weights()]

    assert_same_script(AdversariesWithTapes, script, 3)
    records = [record for record in caplog.records if "one device" in record.message]
    assert [record.message.partition(":")[0] for record in records] == [
        f"The model's own {name}() ran on one device" for name in ("update", "train", "fit")
    ]
    assert "it called neither super().fit(), nor train_on_batch(), train_step()" in records[-1].message


def test_methods_of_ones_own_are_the_models(caplog):
    """Covers a decorator that wraps something without code, and updates that are taken back."""
    model = Adversaries()
    model.compile("sgd")
    parallel = keras_dp.DataParallelModel(model, devices=3)
    assert parallel.train == parallel.train
    assert parallel.train.__self__ is parallel
    assert parallel.compiled_step.get_concrete_function is not None
    assert parallel.forget.__doc__ == "Forgets what the first network has learned."
    parallel.forget()
    assert float(tf.reduce_sum(parallel.one.kernel)) == 0
    kept = parallel.similarity
    del parallel
    gc.collect()
    assert kept(X) == 0
    assert "one device" not in caplog.text


class Distilled(Network):
    """Trains by a custom step, with a temperature that is given to `fit`."""

    def fit(self, *arguments, temperature=1.0, **named):
        self.temperature = temperature
        return super().fit(*arguments, **named)

    def train_step(self, data):
        x, y = data
        return {"loss": learned(self, lambda: tf.reduce_mean(((self(x, training=True) - y) / self.temperature) ** 2))}


@same_on_towers(Distilled, 3)
def test_a_fit_and_a_step(model):
    model.compile("adam")
    return fitted(model, temperature=2.0)


@keras.saving.register_keras_serializable("tests")
class Saving(keras.Sequential):
    """Saves, compiles and reads its class in the middle of its own loop."""

    def fit(self, path):
        self.train_on_batch(X, Y)
        self.save(path)
        self.compile(keras.optimizers.Adam(0.01), "mae")
        assert self.__class__ is Saving
        assert type(type(self)()) is Saving
        return self.train_on_batch(X, Y)


def test_a_loop_that_compiles_and_saves(tmp_path):
    """The file holds the user's class."""

    def script(model):
        results = compiled(model).fit(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert type(loaded) is Saving
        return results, loaded.get_weights()

    _, parallel = assert_same_script(lambda: Saving([keras.Input((4,)), layers.Dense(3)]), script, 3)
    assert isinstance(parallel.inner_model.optimizer, keras.optimizers.Adam)


def test_own_loops_leave_the_model_as_it_was():
    inner = compiled(Preprocessing())
    before = set(vars(inner))
    parallel = keras_dp.DataParallelModel(inner, devices=2)
    parallel.fit(X, Y, shift=1.0, verbose=0)
    assert set(vars(inner)) - before <= {"shift", "history", "_eval_epoch_iterator"}
    assert type(inner) is Preprocessing
