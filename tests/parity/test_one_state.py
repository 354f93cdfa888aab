"""A wrapper is the model: an instance of the user's class, whose attributes, private ones and special methods are one.

Each program once gave other results than in plain Keras, silently or by an error, or is of the same kind.
"""

import abc
import copy
import functools
import gc
import inspect
import math
import pickle
import weakref
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_results, largest_change
from keras import layers

import keras_dp
from keras_dp.wrapping.refusals import PARTS_OF_STEPS

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(22, 3)), rng.normal(size=(22, 2))


def plain(model, **options):
    return model


def on_towers(model, **options):
    return keras_dp.DataParallelModel(model, devices=3, **options)


def dense(kind=keras.Sequential):
    return kind([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2)])


def compiled(model, optimizer="sgd", loss="mse", **arguments):
    model.compile(optimizer, loss, **arguments)
    return model


def own_update(model, x, y, scale=1.0):
    with tf.GradientTape() as tape:
        loss = scale * tf.reduce_mean((model(x, training=True) - y) ** 2)
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return {"loss": loss}


def fitted(model, **arguments):
    history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **arguments)
    return history.history, model.get_weights()


def evaluated_and_predicted(model):
    arguments = {"batch_size": 8, "verbose": 0}
    return model.evaluate(X, Y, return_dict=True, **arguments), model.predict(X, **arguments)


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

    model = compiled(wrap(dense(Model)))
    return model.loop(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)), model.calls, model.get_weights()


def an_own_summary_and_names_of_the_wrapper(wrap):
    class Model(keras.Sequential):
        devices = "mine"

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.num_towers = "my number"

        def summary(self):
            return len(self.layers)

        def explain(self, what):
            return f"{what}, explained"

        @property
        def tower_steps(self):
            return 7

    model = compiled(wrap(dense(Model)))
    model.parameter_device = "mine, too"
    names = [model.devices, model.num_towers, model.explain("x"), model.tower_steps, model.parameter_device]
    return [model.summary(), *names, fitted(model)]


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
    model = compiled(wrap(model))
    model.double, model.factor = 2.0, 1.5
    first = fitted(model, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=change)])
    model.slot = 7.0
    model.train_function = None
    return first, model.double, model.factor, model.slot, fitted(model)


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

    model = compiled(wrap(dense(Model)))
    return counted, sorted(kinds), model.made_by, kinds["small"] is Model, isinstance(model, Model), fitted(model)


def super_in_every_method_and_several_bases(wrap):
    class Doubling:
        """Changes results of methods that come after it in the method resolution order."""

        def predict(self, *arguments, **named):
            return 2 * super().predict(*arguments, **named)

        def train_step(self, data):
            return {name: 2 * value for name, value in super().train_step(data).items()}

    class Calling(Doubling, keras.Sequential):
        called = []  # noqa: RUF012

    def calls_super(name):
        def method(self, *arguments, **named):
            if not name.endswith("_step"):
                self.called.append(name)
            return getattr(super(Calling, self), name)(*arguments, **named)

        return method

    for name in (
        *("train_step", "test_step", "predict_step", "make_train_function", "make_test_function", "make_predict_function"),
        *("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch", "reset_metrics"),
    ):
        setattr(Calling, name, calls_super(name))
    model = compiled(wrap(dense(Calling)), metrics=["mae"])
    results = fitted(model, epochs=2, validation_data=(X, Y)), evaluated_and_predicted(model)
    single = model.train_on_batch(X, Y), model.test_on_batch(X, Y), model.predict_on_batch(X)
    return results, single, Calling.called


def a_function_of_the_trainer_that_was_set_before(wrap):
    """Keras calls what `model.train_function` is; a second wrapper around a model finds the first one's function there."""
    model = compiled(dense())
    model.train_function = lambda iterator: {"loss": tf.reduce_sum(next(iterator)[0])}
    wrapped = wrap(model)
    return fitted(wrapped), fitted(compiled(wrapped)), fitted(wrap(model))


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

    model = compiled(wrap(dense(Model)))
    return model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)), model.get_weights()


def compiled_again_with_its_own_optimizer(wrap):
    """The first time, it is set before the model is compiled."""
    model = wrap(dense())
    model.optimizer = keras.optimizers.Adam(0.01)
    results = [float(model.optimizer.learning_rate)]
    results += [fitted(compiled(model, model.optimizer, loss)) for loss in ("mse", "mae")]
    compiled(getattr(model, "inner_model", model), model.optimizer)
    return [*results, fitted(model), int(model.optimizer.iterations)]


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
    model = compiled(wrap(dense(Model)))
    results = [fitted(model)]
    for stage in ((0.1, False), (0.01, True, 3)):
        model.set_stage(*stage)
        results.append(fitted(model, callbacks=[count]))
    return results, ends


def a_checkpoint_restored_before_the_layers_exist(wrap, folder):
    class Lazy(keras.Model):
        def build(self, shape):
            self.dense = layers.Dense(2)
            self.dense.build(shape)
            self.built = True

        def call(self, x):
            return self.dense(x)

    saved = Lazy()
    saved(X)
    path = tf.train.Checkpoint(model=saved).save(folder / "lazy")
    model = compiled(wrap(Lazy()))
    tf.train.Checkpoint(model=model).restore(path)
    results = [model.predict(X, verbose=0), fitted(model)]
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(folder / "both")
    fitted(model)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path).assert_consumed()
    return [*results, fitted(model)]


def models_that_hold_their_wrappers(wrap):
    """A student holds its own wrapper, a function that trains it, and its teacher's wrapper."""

    class Student(keras.Sequential):
        def train_step(self, data):
            return {**own_update(self, data[0], self.teacher(data[0])), "layers": len(self.me.layers)}

    teacher, student = wrap(dense()), dense(Student)
    student.teacher = teacher
    student = compiled(wrap(student))
    student.me = student
    student.train = functools.partial(fitted, student)
    return fitted(compiled(teacher)), student.train(), len(student.trainable_variables), fitted(teacher)


class Mixin:
    """Comes after Keras's class, whose methods win."""

    def fit(self, *arguments, **named):
        return "the mixin's"

    def more(self):
        return "more"


def methods_that_are_special_mixed_in_or_patched(wrap):
    class Model(keras.Sequential, Mixin):
        def __len__(self):
            return len(self.layers)

        def __enter__(self):
            self.entered = True
            return self

        def __exit__(self, *error):
            self.entered = False

        def __getattr__(self, name):
            if name == "made_up":
                return "made up"
            raise AttributeError(name)

        def value(self):
            return 1

    model = wrap(dense(Model))
    with mock.patch.object(Model, "value", return_value=2), model as entered:
        values = [model.value(), entered.entered]
    values += [model.value(), model.entered, model.made_up, len(model), model.more()]
    own = compiled(model).fit
    model.fit = lambda *arguments, **named: own(*arguments, **{**named, "epochs": 2})
    return values, fitted(model)


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

    model, other = compiled(wrap(dense(Model))), dense(Other)
    model.warm()
    model.register()
    is_alike = model.like(other)
    isinstance(3, type(model))
    return fitted(model), Model.scale, Model.count, Model.registry == [Model], is_alike, isinstance(other, Model)


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
    model = compiled(wrap(dense(Model)))
    first = model.key()
    table[model] *= 3
    return first, len(table), fitted(model), len(calls)


def an_optimizer_that_the_model_keeps_too(wrap):
    """Its rows were weighted twice."""

    class Model(keras.Sequential):
        def compile(self, optimizer, loss):
            super().compile(optimizer, loss)
            self.mine = [optimizer]

    optimizer = keras.optimizers.SGD(0.1)
    if wrap is not plain:
        inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
        optimizer = keras_dp.DataParallelOptimizer(inner, accumulate="rows")
    model = compiled(wrap(dense(Model)), optimizer)
    model.fit(X, Y, batch_size=22 if wrap is plain else 8, shuffle=False, verbose=0)
    return model.get_weights()


def data_that_call_another_model(wrap):
    """A step once held a lock while it waited for its batch, which waited for the lock."""
    teacher, student = wrap(dense()), compiled(wrap(dense()))

    def batches():
        while True:
            yield X[:8], teacher.predict(X[:8], verbose=0)

    types = tf.TensorSpec((8, 3), "float64"), tf.TensorSpec((8, 2), "float64")
    data = tf.data.Dataset.from_generator(batches, output_signature=types)
    return student.fit(data, steps_per_epoch=3, shuffle=False, verbose=0).history


def a_part_called_inner_model(wrap, folder):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner_model = dense()

        def call(self, x):
            return self.inner_model(x)

    model, other = wrap(Model()), Model()
    model(X)
    other(X)
    model.save_weights(folder / "a.weights.h5")
    other.load_weights(folder / "a.weights.h5")
    return other.get_weights(), len(model.inner_model.layers)


def an_iterator_that_reads_the_weights_between_two_steps_of_one_execution(wrap):
    model = compiled(wrap(dense()), steps_per_execution=2)
    seen = []

    def batches():
        for _ in range(2):
            seen.append(model.get_weights())
            yield X[:4], Y[:4]

    model.make_train_function()
    logs = model.train_function(batches())
    return seen, {name: float(value) for name, value in logs.items()}


def calls_inside_a_tape(wrap):
    """A tape that records TensorFlow's functions of towers could not differentiate them."""
    generator, critic = wrap(dense()), keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(critic(generator.predict(X, verbose=0)))
    with tf.GradientTape():
        results = [compiled(generator).train_on_batch(X, Y), evaluated_and_predicted(generator), fitted(generator)]
    return tape.gradient(loss, critic.trainable_variables), results


def targets_alone(wrap):
    class Model(keras.Sequential):
        def train_step(self, data):
            _, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            return own_update(self, tf.concat([y, y[:, :1]], axis=1), y)

    model = compiled(wrap(dense(Model)), loss=None)
    return model.fit(y=Y, batch_size=8, shuffle=False, verbose=0).history, model.get_weights()


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
    results = fitted(compiled(model))
    del model
    keras.utils.clear_session()
    gc.collect()
    return results, len(deleted)


def steps_that_are_set_on_the_model(wrap):
    """They once got the slices: `predict` returned the rows of the first tower."""
    inner = dense()
    model = compiled(wrap(inner))
    model.train_step = lambda data: {"own": own_update(inner, *data)["loss"] + tf.math.reduce_std(data[1])}
    model.test_step = lambda data: {"rows": tf.shape(data[0])[0], "largest": tf.reduce_max(inner(data[0]))}
    model.predict_step = lambda data: inner(data[0] if isinstance(data, tuple) else data) * 2
    results = [fitted(model, epochs=2), evaluated_and_predicted(model)]
    del model.predict_step
    model.predict_function = None
    results.append(model.predict(X, batch_size=8, verbose=0))
    model.train_step, model.train_function = model.test_step, None
    return [*results, fitted(model)]


def steps_that_call_those_they_replace(wrap):
    """As tools do that patch a model: the old step, read from the wrapper, takes the whole batch as in plain Keras."""
    results = []
    for eagerly in (False, True):
        model = compiled(wrap(dense()), run_eagerly=eagerly)
        first = model.train_step
        model.train_step = lambda data, first=first: {**first(data), "first": tf.reduce_sum(data[0])}
        results.append(fitted(model))
        second = model.train_step
        for step in (lambda data, second=second: {**second(data), "second": tf.reduce_max(data[1])}, first):
            model.train_step, model.train_function = step, None
            results.append(fitted(model))
    return results


def functions_that_are_set_on_the_model(wrap):
    """Before the first call, they were once ignored; after it, they got slices in place of batches."""
    model = compiled(wrap(dense()))
    results = {}
    for name, method in {"train": model.fit, "test": model.evaluate, "predict": model.predict}.items():
        arguments = {"batch_size": 8, "verbose": 0} | ({"shuffle": False} if name == "train" else {})
        data = (X,) if name == "predict" else (X, Y)
        seen = []

        def function(iterator, name=name, seen=seen):
            batch = iterator[0] if name == "predict" else next(iterator)
            seen.append(batch[0])
            return getattr(model, f"{name}_step")(batch)

        for value in (function, None, function):
            setattr(model, f"{name}_function", value)
            result = method(*data, **arguments)
            results.setdefault(name, []).append(getattr(result, "history", result))
        results[name].append(seen)
    return results, model.get_weights()


def sharing(wrap, homes, units=(2, 2), last=layers.Identity):
    """Returns two models that share a layer. Each has a device of its own for its weights."""
    shared = layers.Dense(4, "tanh")
    models = [keras.Sequential([keras.Input((3,)), shared, layers.Dense(number), last()]) for number in units]
    return [compiled(wrap(model, parameter_device=home), "adam") for model, home in zip(models, homes, strict=True)]


def layers_that_models_share(wrap):
    """The first wrapper once went on with the old variable, when the second one had moved the shared weights."""
    results = []
    for homes in (("CPU:1", "CPU:2"), ("sharded", None)):
        models = sharing(wrap, homes)
        results += [(fitted(model), model.train_on_batch(X, Y), model.predict(X, verbose=0)) for model in models * 2]
    return results


# All functions of `wrap`, or of `wrap` and a folder.
PROGRAMS = {
    name: value
    for name, value in list(globals().items())
    if inspect.isfunction(value) and [*inspect.signature(value).parameters] in (["wrap"], ["wrap", "folder"])
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, tmp_path):
    results = []
    for wrap in (plain, on_towers):
        folder = tmp_path / wrap.__name__
        folder.mkdir()
        keras.utils.set_random_seed(1)
        takes = inspect.signature(PROGRAMS[name]).parameters
        results.append(PROGRAMS[name](*[wrap, folder][: len(takes)]))
    assert_same_results(*results)


def test_our_names_are_functions_of_the_package_too():
    class Model(keras.Sequential):
        report = explain = check_step = communication_report = None

    parallel = compiled(on_towers(dense(Model)))
    parallel.fit(X, Y, batch_size=8, verbose=0)
    parallel.evaluate(X, Y, batch_size=8, verbose=0)
    assert parallel.report is None
    # The last batch is remembered.
    assert keras_dp.report(parallel).devices == ["CPU:0", "CPU:1", "CPU:2"]
    assert keras_dp.explain(parallel).once == []
    assert keras_dp.check_step(parallel).is_exact
    assert keras_dp.communication_report(parallel, step="test").bytes_of("gradients") == 0


@pytest.mark.parametrize("look", [keras_dp.report, keras_dp.explain, keras_dp.check_step, keras_dp.communication_report])
def test_diagnostics_refuse_the_same_in_the_same_words(look):
    def refuses(words, *arguments):
        with pytest.raises(ValueError, match=words):
            look(*arguments)

    model, name = dense(), look.__name__
    refuses(rf"{name}\(\) looks at the towers of a keras_dp.DataParallelModel: wrap.*Received: <Seq", model, (X, Y))
    parallel = on_towers(model)
    refuses(rf"Compile the model before {name}\(\)", parallel, (X, Y))
    compiled(parallel)
    refuses(rf"not trained yet: pass a batch, {name}\(\(x, y\)\)", parallel)
    refuses(rf"needs targets: pass {name}\(\) a batch", parallel, X)
    refuses("`step` must be one of 'train', 'test', 'predict'", parallel, (X, Y), "fit")
    compiled(parallel, run_eagerly=True)
    refuses(rf"{name}\(\) looks at towers, and eager steps use one device", parallel, (X, Y))


def test_errors_of_the_users_own_keep_their_words():
    """A note about single rows is for errors that name a shape of the data."""

    class Layer(layers.Layer):
        def call(self, x):
            raise ValueError("my own configuration is wrong")

    parallel = compiled(on_towers(keras.Sequential([Layer()])))
    with pytest.raises(ValueError, match="my own configuration is wrong") as error:
        parallel.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(11, drop_remainder=True), shuffle=False, verbose=0)
    assert "single rows" not in " ".join([str(error.value), *getattr(error.value, "__notes__", ())])


class Adversaries(keras.Sequential):
    """Keeps its optimizers in a list and a dictionary, as GANs do."""

    def compile(self, optimizers, named):
        super().compile()
        self.optimizers, self.named = optimizers, {"deeper": [named]}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        for part, optimizer in zip(self.layers, (self.optimizers[0], self.named["deeper"][0]), strict=True):
            optimizer.apply(tape.gradient(loss, part.trainable_variables), part.trainable_variables)
        return {"loss": loss}


def adversaries(**options):
    keras.utils.set_random_seed(1)
    parallel = on_towers(dense(Adversaries), **options)
    parallel.compile([keras.optimizers.Adam(0.1)], keras.optimizers.SGD(0.1, momentum=0.9))
    return parallel, fitted(parallel)


def test_optimizers_wherever_a_model_keeps_them():
    """Their slots once stayed on the first device, and their gradients were sent in their own dtype."""
    _, expected = adversaries()
    parallel, spread = adversaries(parameter_device="sharded")
    assert_same(expected, spread, 1e-9)
    adam, sgd = parallel.optimizers[0], parallel.named["deeper"][0]
    assert len({weight.value.device for weight in parallel.weights}) > 1
    for optimizer, slots in ((adam, adam._momentums), (sgd, sgd.momentums)):
        assert [slot.value.device for slot in slots] == [weight.value.device for weight in optimizer._trainable_variables]
    _, rounded = adversaries(gradient_dtype="bfloat16")
    apart = [largest_change([one], [other]) for one, other in zip(expected[1], rounded[1], strict=True)]
    assert 1e-9 < min(apart) <= max(apart) < 0.1


def test_no_gradient_of_a_step_leads_to_the_model():
    """A call of the model itself under a tape has one."""
    parallel = compiled(on_towers(dense()))
    with tf.GradientTape(persistent=True) as tape:
        step, call = parallel.test_step((X, Y))["loss"], tf.reduce_mean(parallel(X))
    assert tape.gradient(step, parallel.trainable_variables) == [None] * 4
    assert None not in tape.gradient(call, parallel.trainable_variables)


def test_nothing_of_a_wrapper_stays_when_it_is_gone():
    inner = dense()
    parallel = compiled(on_towers(inner))
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

    model = compiled(on_towers(dense(Model)))
    with pytest.raises(RecursionError):
        model.fit(X, Y, verbose=0)


def test_copies_of_a_subclass_of_the_wrapper_need_no_arguments():
    """Its `__init__` takes others than those of the wrapper, and is not called again."""

    class Fixed(keras_dp.DataParallelModel):
        def __init__(self, model, note):
            super().__init__(model, devices=2)
            self.note = note

    model = Fixed(dense(), note="kept")
    copies = [keras.models.clone_model(model), copy.copy(model), copy.deepcopy(model)]
    assert [(type(one).__name__, one.num_towers) for one in copies] == [("Fixed", 2)] * 3


def test_a_subclass_of_the_wrapper_takes_the_model_as_its_first_argument():
    class Own(keras_dp.DataParallelModel):
        def __init__(self):
            super().__init__(dense(), devices=2)

    with pytest.raises(TypeError, match="Own must take the model as its first argument.*Received: no model before __init__"):
        Own()


def test_all_parts_of_steps_are_known():
    """Keras's steps ask the model for no other method."""
    asked, getattribute = set(), keras.Model.__getattribute__

    class Asked(keras.Sequential):
        def __getattribute__(self, name):
            asked.add(name)
            return getattribute(self, name)

    model = compiled(dense(Asked))
    model.train_on_batch(X, Y)
    asked.clear()
    for step in (model.train_step, model.test_step, model.predict_step):
        step((X, Y))
    methods = {name for name in asked if not name.startswith("_") and callable(getattr(keras.Model, name, None))}
    assert {"call", "compute_loss"} <= methods - {"train_step", "test_step", "predict_step"} <= PARTS_OF_STEPS


@pytest.mark.parametrize("name", ["train_step", "compute_loss", "call", "__call__", "metrics"])
@pytest.mark.parametrize("bases", [(), (Mixin,)])
def test_subclasses_of_the_wrapper_have_no_steps_of_their_own(name, bases):
    """The model's steps, and all that they call, would hide them."""
    first = [type(base.__name__, (base,), {name: lambda self, *arguments: {}}) for base in bases]
    own = {} if first else {name: lambda self, *arguments: {}}
    with pytest.raises(TypeError, match=f"has no {name} of its own.*Received: Own with {name}"):
        type("Own", (*first, keras_dp.DataParallelModel), own)


def test_the_class_of_a_wrapper_is_made_once():
    with pytest.raises(TypeError, match="Set the class of that object, and wrap it again"):
        on_towers(dense()).__class__ = Mixin


def test_weights_that_move_in_the_middle_of_a_fit_are_an_error():
    """The running step would update what the weights were, and its updates would be lost."""
    one, other = sharing(on_towers, ("CPU:1", "CPU:2"))
    alternate = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: other.train_on_batch(X, Y))
    with pytest.raises(RuntimeError, match="Weights of this model have moved to another device in the middle of a call"):
        fitted(one, callbacks=[alternate])
    before = one.get_weights()
    fitted(one)
    assert largest_change(before[:1], one.get_weights()[:1]) > 0


def test_models_that_share_a_layer_leave_its_spread_weights_where_they_are():
    """Models that take turns, as in a GAN, would else trace their steps again in each turn."""
    traces = []

    class Counted(layers.Layer):
        def call(self, x):
            traces.append(self.name)
            return x

    wrappers = sharing(on_towers, ("sharded", "sharded"), (2, 7), Counted)

    def train():
        for wrapper, y in zip(wrappers, (Y, np.ones((22, 7))), strict=True):
            wrapper.train_on_batch(X, y)

    train()
    traces.clear()
    for _ in range(3):
        train()
    assert len(traces) <= 2
