"""A wrapper is the model: an instance of the user's class, whose attributes, private ones and special methods are one.

Each program once gave other results than in plain Keras, silently or by an error, or is of the same kind.
"""

import abc
import functools
import gc
import math
import pickle
import weakref
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same
from keras import layers

import keras_dp
from keras_dp.keras_internals.keras_optimizers import optimizers_of

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(22, 3)), rng.normal(size=(22, 2))

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def plain(model, **options):
    return model


def on_towers(model, **options):
    return keras_dp.DataParallelModel(model, devices=3, **options)


def dense(kind=keras.Sequential, *arguments):
    return kind([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)], *arguments)


def own_update(model, x, y, scale=1.0):
    with tf.GradientTape() as tape:
        loss = scale * tf.reduce_mean((model(x, training=True) - y) ** 2)
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return {"loss": loss}


def fitted(model, **arguments):
    history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **arguments)
    return history.history, model.get_weights()


@program
def steps_without_tensors_and_with_attributes_that_change(wrap):
    """An eager step sees each change of the program's."""

    class Model(keras.Sequential):
        alpha, calls = 1.0, 0

        def step(self, x, y):
            self.calls += 1
            return own_update(self, x, y, self.alpha)

        def draw(self, low=0.0):
            return tf.constant(low + 1.0)

        def loop(self, dataset):
            run, losses = self.distribute_strategy.run, []
            for number, (x, y) in enumerate(self.distribute_strategy.experimental_distribute_dataset(dataset)):
                self.alpha = 1 / (number + 1)
                losses.append(float(run(self.step, args=(x, y))["loss"]))
            self.layers[0].trainable = False
            losses.append(float(run(self.step, args=(x, y))["loss"]))
            return losses, float(run(self.draw)), float(run(self.draw, args=(0.5,)))

    model = wrap(dense(Model))
    model.compile("sgd", "mse")
    return model.loop(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)), model.calls, model.get_weights()


@program
def callbacks_and_methods_stop_training(wrap):
    """Observers of Keras, as this callback, once got the model inside, which does not train."""

    class Model(keras.Sequential):
        def enough(self):
            self.stop_training = True

    class Average(keras.callbacks.SwapEMAWeights):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            if epoch == 1:
                self.model.enough()

    model = wrap(dense(Model))
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    return fitted(model, epochs=4, callbacks=[Average(swap_on_epoch=True)])


@program
def special_methods(wrap):
    class Model(keras.Sequential):
        def __len__(self):
            return len(self.layers)

        def __getitem__(self, index):
            return self.layers[index].name

        def __iter__(self):
            return iter([layer.units for layer in self.layers])

        def __contains__(self, name):
            return any(layer.name == name for layer in self.layers)

        def __enter__(self):
            self.entered = True
            return self

        def __exit__(self, *error):
            self.entered = False

        def __add__(self, other):
            return other + len(self)

        def __getattr__(self, name):
            if name == "made_up":
                return "made up"
            raise AttributeError(name)

    model = wrap(dense(Model))
    with model as entered:
        inside = entered.entered
    return [len(model), len(model[0]) > 0, list(model), "none" in model, inside, model.entered, model + 3, model.made_up]


@program
def an_own_summary_and_names_of_the_wrapper(wrap):
    class Model(keras.Sequential):
        devices = "mine"

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.num_towers = "my number"

        def summary(self):
            return len(self.layers)

        def report(self):
            return "my report"

        def explain(self, what):
            return f"{what}, explained"

        @property
        def tower_steps(self):
            return 7

    model = wrap(dense(Model))
    model.parameter_device = "mine, too"
    model.compile("sgd", "mse")
    names = [model.devices, model.num_towers, model.report(), model.explain("x"), model.tower_steps, model.parameter_device]
    return [model.summary(), *names, fitted(model)]


@program
def attributes_that_a_step_reads(wrap):
    """They are private, in slots, properties and descriptors. The optimizer has a private one, too."""

    class Kept:
        """Keeps values by the instance that they belong to."""

        def __init__(self):
            self.values = weakref.WeakKeyDictionary()

        def __get__(self, instance, owner=None):
            return self if instance is None else self.values.get(instance, 1.0)

        def __set__(self, instance, value):
            self.values[instance] = value

    class Mixin:
        __slots__ = ()

    class Model(keras.Sequential, Mixin):
        __slots__ = ("slot",)
        _scale = 1.0
        factor = Kept()

        @property
        def double(self):
            return 2 * self._half

        @double.setter
        def double(self, value):
            self._half = value / 2

        def train_step(self, batch):
            read = {"private": self._scale, "slot": self.slot, "descriptor": self.factor, "property": self.double}
            return own_update(self, *batch, math.prod(read.values())) | read

    def change(logs):
        model._scale = 0.1
        model.optimizer._learning_rate = keras.Variable(0.1, trainable=False)

    model = dense(Model)
    model.slot = 3.0
    model = wrap(model)
    model.compile("sgd", "mse")
    model.double, model.factor = 2.0, 1.5
    first = fitted(model, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=change)])
    model.slot = 7.0
    model.train_function = None
    return first, model.double, model.factor, model.slot, fitted(model)


@program
def classes_that_count_their_subclasses(wrap):
    counted = []

    class Meta(type(keras.Sequential)):
        def __new__(cls, *arguments, **named):
            counted.append(arguments[0])
            return super().__new__(cls, *arguments, **named)

        def __call__(cls, *arguments, **named):
            made = super().__call__(*arguments, **named)
            made.made_by = "the metaclass"
            return made

    kinds = {}

    class Registered(keras.Sequential, metaclass=Meta):
        def __init_subclass__(cls, kind, **named):
            super().__init_subclass__(**named)
            kinds[kind] = cls

    class Model(Registered, kind="small"):
        pass

    model = wrap(dense(Model))
    model.compile("sgd", "mse")
    return counted, sorted(kinds), model.made_by, kinds["small"] is Model, isinstance(model, Model), fitted(model)


class Doubling:
    """Changes results of methods that come after it in the method resolution order."""

    def predict(self, *arguments, **named):
        return 2 * super().predict(*arguments, **named)

    def train_step(self, data):
        return {name: 2 * value for name, value in super().train_step(data).items()}


class Calling(Doubling, keras.Sequential):
    """Overrides every method of a trainer, and calls that of `super()`."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.called = []


def calls_super(name):
    def method(self, *arguments, **named):
        if not name.endswith("_step"):
            self.called.append(name)
        return getattr(super(Calling, self), name)(*arguments, **named)

    return method


for _name in (
    *("train_step", "test_step", "predict_step", "make_train_function", "make_test_function", "make_predict_function"),
    *("compile", "fit", "evaluate", "predict", "train_on_batch", "reset_metrics"),
):
    setattr(Calling, _name, calls_super(_name))


@program
def super_in_every_method_and_several_bases(wrap):
    model = wrap(dense(Calling))
    model.compile("sgd", "mse", metrics=["mae"])
    results = [fitted(model, epochs=2, validation_data=(X, Y)), model.evaluate(X, Y, batch_size=8, verbose=0)]
    results += [model.predict(X, batch_size=8, verbose=0), model.train_on_batch(X, Y)]
    return [*results, model.called]


@program
def functions_of_the_trainer_of_ones_own(wrap):
    class Model(keras.Sequential):
        def make_train_function(self, force=False):
            if self.train_function is None or force:

                @tf.function
                def step(iterator):
                    return self.distribute_strategy.run(self.train_step, args=(next(iterator),), kwargs={})

                self.train_function = step

        def make_test_function(self, force=False):
            if self.test_function is None or force:

                @tf.function(reduce_retracing=True)
                def step(batch):
                    x, y = batch
                    return self.test_step((x, y))

                self.test_function = lambda iterator: step(next(iterator))

    model = wrap(dense(Model))
    model.compile("sgd", "mse", metrics=["mae"])
    return fitted(model), model.evaluate(X, Y, batch_size=8, verbose=0)


@program
def a_function_of_the_trainer_that_was_set_before(wrap):
    """Keras calls what `model.train_function` is; a second wrapper around a model finds the first one's function there."""
    model = dense()
    model.compile("sgd", "mse")
    model.train_function = lambda iterator: {"loss": tf.reduce_sum(next(iterator)[0])}
    wrapped = wrap(model)
    results = fitted(wrapped)
    wrapped.compile("sgd", "mse")
    return results, fitted(wrapped), fitted(wrap(model))


@program
def steps_of_several_arguments(wrap):
    class Model(keras.Sequential):
        def pair_step(self, x, y, scale=1.0, by=None):
            scale = scale if by is None else scale * by["factor"]
            return own_update(self, x, y, scale)

        def fit(self, dataset):
            run = self.distribute_strategy.run
            step = tf.function(lambda x, y: run(self.pair_step, args=(x, y), kwargs={"scale": 0.5}))
            losses = [float(step(x, y)["loss"]) for x, y in dataset]
            by = {"factor": tf.constant(0.5, "float64")}
            losses += [float(run(self.pair_step, (x, y, 2.0), {"by": by})["loss"]) for x, y in dataset]
            return losses

    model = wrap(dense(Model))
    model.compile("sgd", "mse")
    return model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)), model.get_weights()


@program
def compile_without_super(wrap):
    class Model(keras.Sequential):
        def compile(self, optimizer):
            self.mine = optimizer

        def fit(self, x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            self.mine.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return float(loss)

    model = wrap(dense(Model))
    model.compile(keras.optimizers.SGD(0.1))
    return model.fit(X, Y), model.get_weights()


@program
def compiled_again_with_its_own_optimizer(wrap):
    """The first time, it is set before the model is compiled."""
    model = wrap(dense())
    model.optimizer = keras.optimizers.Adam(0.01)
    results = [float(model.optimizer.learning_rate)]
    model.compile(model.optimizer, "mse")
    results.append(fitted(model))
    model.compile(model.optimizer, "mae")
    results.append(fitted(model))
    (model.inner_model if isinstance(model, keras_dp.DataParallelModel) else model).compile(model.optimizer, "mse")
    return [*results, fitted(model), int(model.optimizer.iterations)]


@program
def a_method_makes_its_train_function_anew(wrap):
    class Model(keras.Sequential):
        scale = 1.0

        def set_stage(self, scale, by_force, steps_per_execution=1):
            self.scale, self.steps_per_execution = scale, steps_per_execution
            if by_force:
                self.make_train_function(force=True)
            else:
                self.train_function = None

        def train_step(self, data):
            return own_update(self, *data, self.scale)

    ends = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))
    model = wrap(dense(Model))
    model.compile("sgd", "mse")
    results = [fitted(model)]
    for stage in ((0.1, False), (0.01, True, 3)):
        model.set_stage(*stage)
        results.append(fitted(model, callbacks=[count]))
    return results, ends


@program
def a_checkpoint_restored_before_the_layers_exist(wrap, tmp_path):
    class Lazy(keras.Model):
        def build(self, shape):
            self.dense = layers.Dense(2)
            self.dense.build(shape)
            self.built = True

        def call(self, x):
            return self.dense(x)

    saved = Lazy()
    saved(X)
    path = tf.train.Checkpoint(model=saved).save(tmp_path / "lazy")
    model = wrap(Lazy())
    model.compile("sgd", "mse")
    tf.train.Checkpoint(model=model).restore(path)
    results = [model.predict(X, verbose=0), fitted(model)]
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "both")
    fitted(model)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path).assert_consumed()
    return [*results, fitted(model)]


@program
def models_that_hold_their_wrappers(wrap):
    """A student holds its own wrapper, one that trains it, and its teacher's."""

    class Trainer:
        def __init__(self, model):
            self.model = model

        def train(self):
            return fitted(self.model)

    class Student(keras.Sequential):
        def train_step(self, data):
            return {**own_update(self, data[0], self.teacher(data[0])), "layers": len(self.me.layers)}

    teacher, student = wrap(dense()), dense(Student)
    student.teacher = teacher
    student = wrap(student)
    student.me = student
    student.trainer = Trainer(student)
    teacher.compile("sgd", "mse")
    student.compile("sgd", "mse")
    return fitted(teacher), student.trainer.train(), len(student.trainable_variables), fitted(teacher)


@program
def a_loss_scaled_optimizer(wrap):
    """The user's optimizer is inside a LossScaleOptimizer, and not another layer below."""
    model = wrap(dense())
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    model.optimizer.inner_optimizer.momentum = 0.9
    return fitted(model, epochs=2), type(model.optimizer.inner_optimizer).__name__


@program
def what_a_step_computed_eagerly_keeps(wrap):
    class Model(keras.Sequential):
        def train_step(self, data):
            self.seen = getattr(self, "seen", 0) + 1
            return own_update(self, *data)

    model = wrap(dense(Model))
    model.compile("sgd", "mse", run_eagerly=True)
    return fitted(model), model.seen


class Mixin:
    """Comes after Keras's class, whose methods win."""

    def fit(self, *arguments, **named):
        return "the mixin's"

    def more(self):
        return "more"


@program
def methods_of_instances_and_mixins_and_patches(wrap):
    class Model(keras.Sequential, Mixin):
        def value(self):
            return 1

    model = wrap(dense(Model))
    with mock.patch.object(Model, "value", return_value=2):
        values = [model.value()]
    values.append(model.value())
    model.compile("sgd", "mse")
    own = model.fit
    model.fit = lambda *arguments, **named: own(*arguments, **{**named, "epochs": 2})
    return values, fitted(model), model.more()


@program
def what_methods_set_on_the_class(wrap):
    class Model(keras.Sequential, abc.ABC):
        scale, count = 1.0, 0
        registry = []  # noqa: RUF012

        def warm(self):
            type(self).scale = 0.25

        @classmethod
        def register(cls):
            cls.count += 1
            cls.registry.append(cls)

        def like(self, other):
            return isinstance(other, type(self))

        def train_step(self, data):
            return own_update(self, *data, self.scale)

    class Other(Model):
        pass

    model, other = wrap(dense(Model)), dense(Other)
    model.compile("sgd", "mse")
    model.warm()
    model.register()
    is_alike = model.like(other)
    isinstance(3, type(model))
    return fitted(model), Model.scale, Model.count, Model.registry == [Model], is_alike, isinstance(other, Model)


@program
def tables_of_objects(wrap):
    """Tables by identity are the only ones that have two entries."""
    table = {}

    class Model(keras.Sequential):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            table[self] = 0.5

        @functools.lru_cache  # noqa: B019
        def key(self):
            calls.append(self.name)
            return len(calls)

        def train_step(self, data):
            return own_update(self, *data, table[self] * self.key())

    calls = []
    model = wrap(dense(Model))
    model.compile("sgd", "mse")
    first = model.key()
    table[model] *= 3
    return first, len(table), fitted(model), len(calls)


@program
def an_optimizer_that_the_model_keeps_too(wrap):
    """Its rows were weighted twice."""

    class Model(keras.Sequential):
        def compile(self, optimizer, loss):
            super().compile(optimizer, loss)
            self.mine = [optimizer]

    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    model = wrap(dense(Model))
    if wrap is plain:
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, batch_size=22, shuffle=False, verbose=0)
    else:
        model.compile(keras_dp.DataParallelOptimizer(inner, accumulate="rows"), "mse")
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()


@program
def data_that_call_another_model(wrap):
    """A step once held a lock while it waited for its batch, which waited for the lock."""
    teacher, student = wrap(dense()), wrap(dense())
    student.compile("sgd", "mse")

    def batches():
        while True:
            yield X[:8], teacher.predict(X[:8], verbose=0)

    types = tf.TensorSpec((8, 3), "float64"), tf.TensorSpec((8, 2), "float64")
    data = tf.data.Dataset.from_generator(batches, output_signature=types)
    return student.fit(data, steps_per_epoch=3, shuffle=False, verbose=0).history


@program
def a_part_called_inner_model(wrap, tmp_path):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner_model = dense()

        def call(self, x):
            return self.inner_model(x)

    model, other = wrap(Model()), Model()
    model(X)
    other(X)
    model.save_weights(tmp_path / "a.weights.h5")
    other.load_weights(tmp_path / "a.weights.h5")
    return other.get_weights(), len(model.inner_model.layers)


@program
def an_iterator_that_reads_the_weights_between_two_steps_of_one_execution(wrap):
    model = wrap(dense())
    model.compile("sgd", "mse", steps_per_execution=2)
    seen = []

    def batches():
        for _ in range(2):
            seen.append(model.get_weights())
            yield X[:4], Y[:4]

    model.make_train_function()
    logs = model.train_function(batches())
    return seen, {name: float(value) for name, value in logs.items()}


@program
def calls_inside_a_tape(wrap):
    """A tape that records TensorFlow's functions of towers could not differentiate them."""
    generator, critic = wrap(dense()), keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(critic(generator.predict(X, verbose=0)))
    generator.compile("sgd", "mse")
    with tf.GradientTape():
        results = [generator.train_on_batch(X, Y), generator.evaluate(X, Y, verbose=0), fitted(generator)]
    return tape.gradient(loss, critic.trainable_variables), results


@program
def targets_alone(wrap):
    class Model(keras.Sequential):
        def train_step(self, data):
            _, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            return own_update(self, tf.concat([y, y[:, :1]], axis=1), y)

    model = wrap(dense(Model))
    model.compile("sgd")
    return model.fit(y=Y, batch_size=8, shuffle=False, verbose=0).history, model.get_weights()


@program
def initialized_again_and_deleted_once(wrap):
    deleted = []

    class Model(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.dense = layers.Dense(units)

        def build(self, shape):
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x)

        def change(self, units):
            self.__init__(units)

        def __del__(self):
            deleted.append(1)

    model = wrap(Model(5))
    model.change(2)
    model.compile("sgd", "mse")
    results = fitted(model)
    del model
    keras.utils.clear_session()
    gc.collect()
    return results, len(deleted)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, tmp_path):
    def run(wrap, folder):
        folder.mkdir()
        keras.utils.set_random_seed(1)
        needs_folder = "tmp_path" in PROGRAMS[name].__code__.co_varnames
        return PROGRAMS[name](wrap, folder) if needs_folder else PROGRAMS[name](wrap)

    expected, found = run(plain, tmp_path / "plain"), run(on_towers, tmp_path / "towers")
    assert [leaf for leaf in keras.tree.flatten(expected) if isinstance(leaf, str)] == [
        leaf for leaf in keras.tree.flatten(found) if isinstance(leaf, str)
    ]
    numbers = [[leaf for leaf in keras.tree.flatten(result) if not isinstance(leaf, str)] for result in (expected, found)]
    assert_same(*numbers, 1e-9)


def test_our_names_are_functions_of_the_package_too():
    class Model(keras.Sequential):
        report = explain = check_step = communication_report = None

    parallel = on_towers(dense(Model))
    parallel.compile("sgd", "mse")
    parallel.fit(X, Y, batch_size=8, verbose=0)
    parallel.evaluate(X, Y, batch_size=8, verbose=0)
    assert parallel.report is None
    # The last batch is remembered.
    assert keras_dp.report(parallel).devices == ["CPU:0", "CPU:1", "CPU:2"]
    assert keras_dp.explain(parallel).once == []
    assert keras_dp.check_step(parallel).is_exact
    assert keras_dp.communication_report(parallel, step="test").bytes_of("gradients") == 0


def test_diagnostics_refuse_the_same_in_the_same_words():
    for look in (keras_dp.report, keras_dp.explain, keras_dp.check_step, keras_dp.communication_report):
        model, name = dense(), look.__name__
        message = rf"{name}\(\) looks at the towers of a keras_dp.DataParallelModel: wrap.*Received: <Seq"
        with pytest.raises(ValueError, match=message):
            look(model, (X, Y))
        parallel = on_towers(model)
        with pytest.raises(ValueError, match=rf"Compile the model before {name}\(\)"):
            look(parallel, (X, Y))
        parallel.compile("sgd", "mse")
        with pytest.raises(ValueError, match=rf"not trained yet: pass a batch, {name}\(\(x, y\)\)"):
            look(parallel)
        with pytest.raises(ValueError, match=rf"needs targets: pass {name}\(\) a batch"):
            look(parallel, X)
        with pytest.raises(ValueError, match="`step` must be one of 'train', 'test', 'predict'"):
            look(parallel, (X, Y), "fit")
        parallel.compile("sgd", "mse", run_eagerly=True)
        with pytest.raises(ValueError, match=rf"{name}\(\) looks at towers, and eager steps use one device"):
            look(parallel, (X, Y))


def test_errors_of_the_users_own_keep_their_words():
    """A note about single rows is for errors that name a shape of the data."""

    class Layer(layers.Layer):
        def call(self, x):
            raise ValueError("my own configuration is wrong")

    parallel = on_towers(keras.Sequential([Layer()]))
    parallel.compile("sgd", "mse")
    with pytest.raises(ValueError, match="my own configuration is wrong") as error:
        parallel.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(11, drop_remainder=True), shuffle=False, verbose=0)
    assert "single rows" not in " ".join([str(error.value), *getattr(error.value, "__notes__", ())])


class Adversaries(keras.Model):
    """Keeps its optimizers in a list and a dictionary, as GANs do."""

    def __init__(self):
        super().__init__()
        self.one, self.other = keras.Sequential([layers.Dense(4), layers.Dense(2)]), layers.Dense(2)

    def compile(self, optimizers, named):
        super().compile()
        self.optimizers, self.named = optimizers, {"deeper": [named]}

    def call(self, x):
        return self.other(self.one(x)[:, :1])

    def train_step(self, data):
        x, y = data
        parts = [(self.one, self.optimizers[0]), (self.other, self.named["deeper"][0])]
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        for part, optimizer in parts:
            optimizer.apply(tape.gradient(loss, part.trainable_variables), part.trainable_variables)
        return {"loss": loss}


def adversaries(**options):
    keras.utils.set_random_seed(1)
    parallel = on_towers(Adversaries(), **options)
    parallel.compile([keras.optimizers.Adam(0.1)], keras.optimizers.SGD(0.1, momentum=0.9))
    history = parallel.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
    return parallel, [history, parallel.get_weights()]


def test_optimizers_wherever_a_model_keeps_them():
    """Their slots once stayed on the first device, and their gradients were sent in their own dtype."""
    _, expected = adversaries()
    parallel, spread = adversaries(parameter_device="sharded")
    assert_same(expected, spread, 1e-9)
    assert len(optimizers_of(parallel.inner_model)) == 3  # with the one that `compile` makes
    homes = {weight.value.device for weight in parallel.weights}
    assert len(homes) > 1
    for optimizer in (parallel.optimizers[0], parallel.named["deeper"][0]):
        slots = [variable for variable in optimizer.variables if variable.shape and "learning" not in variable.path]
        assert {slot.value.device for slot in slots} <= homes
    adam = parallel.optimizers[0]
    for slot, weight in zip(adam._momentums, adam._trainable_variables, strict=True):
        assert slot.value.device == weight.value.device
    _, rounded = adversaries(gradient_dtype="bfloat16")
    apart = [np.abs(a - b).max() for a, b in zip(expected[1], rounded[1], strict=True)]
    assert min(apart) > 1e-9
    assert max(apart) < 0.1


def test_a_method_makes_the_function_of_towers_anew():
    """The one that it made for the model alone trains on one device."""
    made = []

    class Model(keras.Sequential):
        def make_train_function(self, force=False):
            if self.train_function is None or force:
                made.append(self)
                step = tf.function(lambda data: self.distribute_strategy.run(self.train_step, args=(data,)))
                self.train_function = lambda iterator: step(next(iterator))

    model = dense(Model)
    model.compile("sgd", "mse")
    fitted(model)
    parallel = on_towers(model)
    fitted(parallel)
    assert [type(each) for each in made] == [Model, type(parallel)]


def test_no_gradient_of_a_step_leads_to_the_model():
    """A call of the model itself under a tape has one."""
    parallel = on_towers(dense())
    parallel.compile("sgd", "mse")
    with tf.GradientTape(persistent=True) as tape:
        step, call = parallel.test_step((X, Y))["loss"], tf.reduce_mean(parallel(X))
    assert tape.gradient(step, parallel.trainable_variables) == [None] * 4
    assert None not in tape.gradient(call, parallel.trainable_variables)


def test_nothing_of_a_wrapper_stays_when_it_is_gone():
    inner = dense()
    parallel = on_towers(inner)
    parallel.compile("sgd", "mse")
    fitted(parallel)
    kind, reference = weakref.ref(type(parallel)), weakref.ref(parallel)
    del parallel
    gc.collect()
    assert reference() is None
    assert kind() is None or kind() not in type(inner).__subclasses__()
    assert type(pickle.loads(pickle.dumps(inner))) is type(inner)


def test_super_of_the_type_of_self_leads_to_the_users_class_again():
    """It does so in each subclass of a class, and the class of a wrapper is one."""

    class Model(keras.Sequential):
        def fit(self, *arguments, **named):
            return super(type(self), self).fit(*arguments, **named)

    model = on_towers(dense(Model))
    model.compile("sgd", "mse")
    with pytest.raises(RecursionError):
        model.fit(X, Y, verbose=0)


def test_subclasses_of_the_wrapper_have_no_steps_of_their_own():
    """They would be hidden by the model's."""
    with pytest.raises(TypeError, match="has no train_step of its own.*Received: Own with train_step"):

        class Own(keras_dp.DataParallelModel):
            def train_step(self, data):
                return {}


def test_the_class_of_a_wrapper_is_made_once():
    with pytest.raises(TypeError, match="Set the class of that object, and wrap it again"):
        on_towers(dense()).__class__ = Mixin
