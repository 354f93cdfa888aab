"""A wrapper has all attributes and methods of the model inside."""

import contextlib
import copy
import gc
import inspect
import pickle
import weakref
import zipfile
from concurrent import futures

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_script, same_on_towers, twins, values
from keras import layers, losses, metrics, optimizers

import keras_dp

rng = np.random.default_rng(0)
# Batches of 9, 9 and 2 rows: the last one has fewer rows than three towers.
X, Y = rng.normal(size=(20, 4)), rng.normal(size=(20, 2))

# The names that the wrapper defines itself, because they run the towers. They are tested one by one.
OF_THE_TOWERS = {
    *("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch", "call"),
    *("train_step", "test_step", "predict_step", "make_train_function", "make_test_function", "make_predict_function"),
    *("train_function", "test_function", "predict_function", "compile", "compile_from_config", "optimizer", "jit_compile"),
    *("run_eagerly", "distribute_strategy", "distribute_reduction_method", "quantize", "from_config"),
}


def build():
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, "tanh", name="body", kernel_regularizer="l2")(inputs)
    return keras.Model(inputs, layers.Dense(2, name="head")(hidden), name="users")


def dense():
    return keras.Sequential([keras.Input((4,)), layers.Dense(2)])


def compiled(model, **arguments):
    adam = optimizers.Adam(0.05, name="adam")
    defaults = {"optimizer": adam, "loss": losses.MeanSquaredError(), "metrics": [metrics.MeanAbsoluteError()]}
    model.compile(**{**defaults, **arguments})
    return model


def train(model, **arguments):
    """Fits the model, and returns the history's numbers."""
    return model.fit(X, Y, **{"batch_size": 9, "shuffle": False, "verbose": 0, **arguments}).history


def trained_in_parallel():
    parallel = compiled(keras_dp.DataParallelModel(build(), devices=3))
    train(parallel)
    return parallel


def inner(model):
    """Returns the model itself, or the inner model of a wrapper."""
    return getattr(model, "inner_model", model)


def wrapped_like(model, other):
    """Returns `other`, wrapped if `model` is a wrapper."""
    return other if inner(model) is model else keras_dp.DataParallelModel(other, devices=2)


def assert_same_answers(script, build=build):
    """Runs a script that trains nothing on a plain model and on a wrapper, and compares the numbers that it returns."""
    one, other = twins(build)
    parallel = keras_dp.DataParallelModel(other, devices=3)
    answers = []
    for model in (one, parallel):
        keras.utils.set_random_seed(5)
        answers.append(script(model))
    assert_same(*answers, 1e-9)


class Scaled(keras.Model):
    """Defines a user's class with attributes, a method, a property, a variable, and methods in place of Keras's."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)
        self.factor = self.temperature = 1.0
        self.scale = self.add_weight(shape=(), initializer="ones", trainable=False, name="scale")

    def call(self, x, offset=None, power=1.0):
        y = (self.factor * self.scale * self.dense(x)) ** power
        return y if offset is None else y + offset

    def double(self):
        self.factor *= 2

    @property
    def total(self):
        return self.factor * float(self.scale)

    def compile(self, optimizer="sgd", temperature=1.0, **arguments):
        super().compile(optimizer, **arguments)
        self.temperature = temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y - y_pred / self.temperature) ** 2)

    def get_metrics_result(self):
        results = super().get_metrics_result()
        return {**results, "doubled": 2 * results["loss"]}


def scaled():
    model = Scaled()
    model(X)
    return model


class Halving(keras.callbacks.Callback):
    """Reads, calls and sets what the user's class has. The step reads `factor` when it is traced, and `scale` always."""

    def on_train_begin(self, logs=None):
        self.model.factor = 1.5
        self.model.double()
        assert self.model.factor == 3.0

    def on_epoch_end(self, epoch, logs=None):
        self.model.scale.assign(0.5 * self.model.total / self.model.factor)


def is_used(behind, name, use):
    """Returns whether a function reads a property of an object or calls a method; None if the name is neither of these."""
    used = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        if isinstance(inspect.getattr_static(type(behind), name, None), property):
            monkeypatch.setattr(type(behind), name, property(used.append))
        elif callable(getattr(behind, name)):
            monkeypatch.setitem(vars(behind), name, lambda *args, **kwargs: used.append(name))
        else:
            return None
        use()
    return bool(used)


def use(owner, name):
    """Reads an attribute, or calls a method with None for every argument that it needs."""
    with contextlib.suppress(Exception):
        method = getattr(owner, name)
        if callable(method):
            given = inspect.signature(method).parameters.values()
            needed = [p for p in given if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            method(*[None] * len(needed))


def names_with_a_life_of_their_own(shown, behind, exceptions):
    """Returns the public names of `behind` that `shown` does not take from it."""
    own = []
    for name in sorted(set(dir(behind)) - exceptions):
        if not name.startswith("_") and hasattr(behind, name):
            taken = is_used(behind, name, lambda name=name: use(shown, name))
            if taken is None:
                value, other = getattr(behind, name), getattr(shown, name, None)
                taken = value is other or value == other
            own += [] if taken else [name]
    return own


def test_every_public_name_is_the_inner_models():
    """All names are enumerated, to notice additions of Keras, and used, to notice overrides by users."""

    class Users(keras.Model):
        pass

    inputs = keras.Input((4,))
    model = Users(inputs, layers.Dense(2)(inputs))
    parallel = compiled(keras_dp.DataParallelModel(model, devices=2))
    assert names_with_a_life_of_their_own(parallel, model, OF_THE_TOWERS) == []


def test_every_public_name_of_the_optimizer_is_the_users():
    class Users(optimizers.Adam):
        pass

    users = Users(0.05)
    parallel = compiled(keras_dp.DataParallelModel(build(), devices=2), optimizer=users)
    assert names_with_a_life_of_their_own(parallel.optimizer, users, {"from_config"}) == []
    assert isinstance(parallel.optimizer, keras_dp.DataParallelOptimizer)
    assert parallel.optimizer.inner_optimizer is parallel.inner_model.optimizer is users


@same_on_towers(build, 3)
def test_methods_of_the_optimizer_and_others_in_its_place(model):
    """The optimizer may be set on the wrapper or on the inner model."""
    compiled(model, optimizer=optimizers.AdamW(0.05))
    model.optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.optimizer.build(model.trainable_variables)
    gradients = [keras.ops.ones(variable.shape) for variable in model.trainable_variables]
    iterations = int(model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True)))
    model.optimizer.apply(gradients)
    model.optimizer.learning_rate.assign(0.01)
    history = train(model)
    model.optimizer.iterations.assign(30)
    model.optimizer.set_weights([variable.numpy() for variable in model.optimizer.variables])
    results = [iterations, history, train(model)]
    for owner in (model, inner(model)):
        compiled(model)
        owner.optimizer = optimizers.SGD(0.3)
        results.append(train(model))
    return results


def test_evaluation_without_an_optimizer():
    assert_same_answers(lambda model: compiled(model, optimizer=None).evaluate(X, Y, batch_size=9, verbose=0))


def test_a_class_of_ones_own():
    """Callbacks can read and set its attributes, methods and properties, and its overrides have an effect."""

    def script(model):
        model.compile(optimizers.Adam(0.05), temperature=2.0)
        history = train(model, epochs=2, callbacks=[Halving()])
        assert set(history) == {"loss", "doubled"}
        assert model.total == 0.75
        return history, model.factor, model.temperature, float(keras.ops.sum(model(X)))

    _, parallel = assert_same_script(scaled, script, 3)
    assert not hasattr(parallel, "no_such_attribute")
    parallel.note = "new"
    assert parallel.inner_model.note == "new"
    del parallel.note
    assert not hasattr(parallel.inner_model, "note")
    assert {"double", "total", "factor", "devices"} <= set(dir(parallel))


@pytest.mark.filterwarnings(r"ignore:Layer 'averages' \(of type Functional\) was passed an input with a mask")
def test_calling_the_model():
    """Covers all arguments of `call`, masks, several inputs, calls inside a `tf.function`, and symbolic inputs."""

    def dropping():
        return keras.Sequential([keras.Input((4,)), layers.Dropout(0.5, seed=3)])

    assert_same_answers(lambda model: [model(X), model(X, training=True), model(tf.constant(X), training=False)], dropping)
    assert_same_answers(lambda model: [model(X, Y), model(X, power=2.0), model(X, offset=Y), model.call(X, power=2.0)], scaled)
    assert_same_answers(lambda model: tf.function(model)(tf.constant(X)))

    def averages():
        inputs = keras.Input((2, 2))
        return keras.Model(inputs, layers.GlobalAveragePooling1D()(inputs), name="averages")

    def with_masks(model):
        x = X.reshape(20, 2, 2) * (np.arange(40).reshape(20, 2, 1) % 3 > 0)
        return [model(x), model(layers.Masking()(x)), model(x, mask=x[..., 0] != 0)]

    assert_same_answers(with_masks, averages)
    parallel = keras_dp.DataParallelModel(build(), devices=2)
    assert parallel(keras.Input((4,))).shape == (None, 2)
    with pytest.raises(ValueError, match=r"expected shape=\(None, 4\), found shape=\(20, 2\)"):
        parallel(Y)


@same_on_towers(build, 3)
def test_inside_another_model(model, tmp_path):
    """The other model then holds the inner model. It trains on one device or on its own towers, and can be saved."""
    inputs = keras.Input((4,))
    whole = compiled(keras.Model(inputs, layers.Dense(2, kernel_initializer="ones")(model(inputs))))
    sequential = keras.Sequential([keras.Input((4,)), model, layers.Dense(2, kernel_initializer="ones")])
    results = [train(whole), train(wrapped_like(model, whole)), whole.get_weights(), sequential(X)]
    whole.save(tmp_path / "whole.keras")
    results.append(keras.models.load_model(tmp_path / "whole.keras")(X))
    return results, train(compiled(model))


def test_summary():
    def lines_of(model):
        lines, options = [], {"expand_nested": True, "show_trainable": True, "layer_range": ["body", "head"]}
        model.summary(90, [0.3, 0.6, 0.8, 1.0], lambda line, line_break=False: lines.append(line), **options)
        return lines

    parallel = compiled(keras_dp.DataParallelModel(build(), devices=2))
    assert lines_of(parallel) == [*lines_of(parallel.inner_model), " Devices: 2 towers on CPU:0 and CPU:1"]
    assert "body" in "".join(lines_of(parallel))
    parallel.get_layer("body").trainable = False
    assert lines_of(parallel)[:-1] == lines_of(parallel.inner_model)


@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_weights_files(tmp_path):
    """Plain models and wrappers read each other's files: whole, in shards, in part, and with the optimizer's state."""
    plain, parallel = compiled(build()), trained_in_parallel()
    train(plain)

    def write(model, name, **arguments):
        model.set_weights([rng.normal(size=weight.shape) for weight in model.get_weights()])
        model.save_weights(tmp_path / name, **arguments)

    for writer, reader in ((plain, parallel), (parallel, plain)):
        for name, arguments in (("a.weights.h5", {}), ("a.weights.json", {"max_shard_size": 1})):
            writer.optimizer.iterations.assign_add(5)
            write(writer, name, **arguments)
            reader.load_weights(tmp_path / name)
            assert_same(writer.get_weights(), reader.get_weights(), 0)
            assert int(inner(reader).optimizer.iterations) == int(inner(writer).optimizer.iterations)
        write(writer, "a.weights.h5")
        before = reader.get_weights()
        reader.load_weights(tmp_path / "a.weights.h5", objects_to_skip=[reader.get_layer("head")])
        assert_same(writer.get_weights()[:2] + before[2:], reader.get_weights(), 0)


def test_tensorflows_checkpoints(tmp_path):
    """`tf.train.Checkpoint` and `tf.saved_model.save` find the inner model's objects, and the user's optimizer."""
    plain, parallel = compiled(build()), compiled(keras_dp.DataParallelModel(build(), devices=3))
    for writer, reader in ((plain, parallel), (parallel, plain)):
        train(writer)
        train(reader, epochs=2)
        path = tf.train.Checkpoint(model=writer, optimizer=writer.optimizer).save(str(tmp_path / "checkpoint"))
        reader.set_weights([np.zeros_like(weight) for weight in reader.get_weights()])
        tf.train.Checkpoint(model=reader, optimizer=reader.optimizer).restore(path).expect_partial()
        assert_same(writer.get_weights(), reader.get_weights(), 0)
        assert_same(values(writer.optimizer), values(reader.optimizer), 0)
    tf.saved_model.save(parallel, tmp_path / "saved")
    outputs = tf.saved_model.load(tmp_path / "saved").signatures["serving_default"](tf.constant(X))
    assert_same(plain.predict(X, verbose=0), next(iter(outputs.values())), 1e-12)


def test_saving(tmp_path):
    """`save`, `keras.saving.save_model` and the like write the inner model's files, of any kind, with its optimizer."""
    parallel = trained_in_parallel()
    keras.saving.save_model(parallel, tmp_path / "function.keras")
    parallel.inner_model.save(tmp_path / "inner.keras")
    for name, arguments in (("a.keras", {}), ("a.keras", {"overwrite": True}), ("unzipped", {"zipped": False}), ("a.h5", {})):
        parallel.save(tmp_path / name, **arguments)
    keras.models.save_model(parallel, tmp_path / "function.h5")
    names = ("function.keras", "a.keras", "inner.keras")
    assert len({zipfile.ZipFile(tmp_path / name).read("config.json") for name in names}) == 1
    for name in (*names, "unzipped", "function.h5", "a.h5"):
        loaded = keras.models.load_model(tmp_path / name)
        assert type(loaded) is type(build())
        assert_same(parallel.get_weights(), loaded.get_weights(), 0)
        assert type(loaded.optimizer) is optimizers.Adam
        if not name.endswith("h5"):  # HDF5 files hold no state of the optimizer.
            assert_same(values(parallel.optimizer), values(loaded.optimizer), 0)
    keras.saving.save_weights(parallel, tmp_path / "a.weights.h5")
    for model in (build(), keras_dp.DataParallelModel(build(), devices=2)):
        keras.saving.load_weights(model, tmp_path / "a.weights.h5")
        assert_same(parallel.get_weights(), model.get_weights(), 0)


class Registered(keras.Model):
    """Defines a user's class with a configuration; `from_config` changes the dtype in it, and nothing else."""

    def __init__(self, units, **arguments):
        super().__init__(**arguments)
        self.units = units
        self.dense = layers.Dense(units)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return {**super().get_config(), "units": self.units}

    @classmethod
    def from_config(cls, config):
        return cls(**{**config, "dtype": "float64"})


def registered():
    model = Registered(2)
    model(X)
    return model


@pytest.mark.parametrize("build", [build, registered], ids=["functional", "subclassed"])
def test_clones(build):
    """A clone of a wrapper is a wrapper, with the same settings around a clone of the inner model."""
    clone = keras.models.clone_model

    def script(model):
        of_class = model.__class__.from_config(model.get_config())
        assert type(of_class) is type(inner(model))
        clones = [compiled(each) for each in (clone(clone(compiled(model))), of_class)]
        for each in clones:
            each(X)
            each.set_weights(model.get_weights())
        return [train(each) for each in clones], train(model)

    _, parallel = assert_same_script(build, script, 3)
    of_towers = {"batch_norm": "local", "gradient_dtype": "bfloat16"}
    configured = keras_dp.DataParallelModel(build(), ["CPU:2", "CPU:0"], "sharded", **of_towers)
    cloned = clone(clone(configured))
    assert isinstance(cloned, keras_dp.DataParallelModel)
    assert type(cloned.inner_model) is type(parallel.inner_model)
    assert not {id(layer) for layer in cloned.layers} & {id(layer) for layer in configured.layers}
    assert {name: getattr(cloned.tower_steps.options, name) for name in of_towers} == of_towers
    assert (cloned.devices, cloned.parameter_device) == (["CPU:2", "CPU:0"], "sharded")
    with pytest.raises(ValueError, match=r"of the object inside. Rebuild that object with .* and wrap it: keras_dp.DataPar"):
        keras_dp.DataParallelModel.from_config(parallel.get_config())


@same_on_towers(build, 3)
def test_clones_with_a_function_for_each_layer(model):
    """Keras takes one for its own classes alone, of which it knows a wrapper to be."""

    def wider(layer):
        config = layer.get_config()
        return layer.__class__.from_config({**config, "units": 2} if "units" in config else config)

    clone = compiled(keras.models.clone_model(compiled(model), clone_function=wider))
    assert (inner(clone) is clone) == (inner(model) is model)
    return [weight.shape for weight in clone.get_weights()], train(clone), train(model)


def test_copies():
    """A copy has its own weights, optimizer state and towers, as with Keras."""

    def script(model):
        first = train(compiled(model))
        others = copy.copy(model), copy.deepcopy(model)
        second = train(model)
        for other in others:
            assert_same(second, train(other), 1e-12)
            assert_same(values(model.optimizer), values(other.optimizer), 1e-12)
        return first, second

    _, parallel = assert_same_script(build, script, 3)
    for other in (copy.copy(parallel), copy.deepcopy(parallel)):
        assert isinstance(other, keras_dp.DataParallelModel)
        assert other.devices == parallel.devices


def test_pickles_hold_the_inner_model():
    """Another process can load a pickle, like a file, without keras_dp and without as many devices."""
    parallel = trained_in_parallel()
    pickled = pickle.dumps(parallel)
    assert b'"users"' in pickled
    assert b"keras_dp" not in pickled
    loaded = pickle.loads(pickled)
    assert type(loaded) is type(parallel.inner_model)
    assert_same(parallel.get_weights(), loaded.get_weights(), 0)
    assert_same(values(parallel.optimizer), values(loaded.optimizer), 0)


def test_tensorflow_lite():
    """Its converter takes a wrapper for the model inside it: with one input or two, of floats and integers."""
    keras.config.set_floatx("float32")
    tokens, floats = keras.Input((3,), dtype="int32"), keras.Input((2,))
    hidden = layers.Flatten()(layers.Embedding(5, 2)(tokens))
    with_two = keras.Model([tokens, floats], layers.Dense(2)(layers.Concatenate()([hidden, floats])))
    for model in (with_two, build()):
        parallel = keras_dp.DataParallelModel(model, devices=2)
        one, other = (tf.lite.TFLiteConverter.from_keras_model(each).convert() for each in (model, parallel))
        assert one == other


@same_on_towers(build, 3)
def test_weights_changed_between_fits(model, tmp_path):
    """Changes by any method, on the wrapper or the inner model, have an effect, because the weights have no copy."""
    results = [train(compiled(model))]
    inner(model).set_weights([0.5 * weight for weight in model.get_weights()])
    results += [train(model), model.evaluate(X, Y, verbose=0)]
    inner(model).layers[1].kernel.assign(np.ones((4, 3)))
    model.save_weights(tmp_path / "model.weights.h5")
    results += [train(model), model.predict(X, verbose=0)]
    model.load_weights(tmp_path / "model.weights.h5")
    tree = model.get_state_tree(value_format="numpy_array")
    results.append(train(model))
    model.set_state_tree(tree)
    model.get_layer("head").set_weights([0.5 * weight for weight in model.get_layer("head").get_weights()])
    return tree, [*results, train(model)]


def test_the_inner_model_trained_by_itself(caplog):
    """The inner model can train between fits of the wrapper, and after the wrapper is gone, which leaves no trace."""

    def script(model):
        plain = inner(model)
        return train(compiled(model)), train(plain), train(model), int(plain.optimizer.iterations)

    one, parallel = assert_same_script(build, script, 3)
    plain, wrapper = parallel.inner_model, weakref.ref(parallel)
    del parallel
    caplog.clear()  # TensorFlow's warnings of many tracings refer to the traced functions.
    gc.collect()
    assert wrapper() is None
    assert_same(train(one), train(plain), 1e-9)


@same_on_towers(build, 3)
def test_two_wrappers_around_one_model(model):
    """The wrappers train in turn, also after `clear_session`. The model is then a part of another one, which trains as well."""
    other = wrapped_like(model, inner(model))
    results = [train(compiled(model)), train(compiled(other))]
    keras.utils.clear_session()
    results.append(train(model))
    first = layers.Dense(4, kernel_initializer="identity")
    whole = compiled(keras.Sequential([keras.Input((4,)), first, inner(model)]))
    return [*results, train(whole)], whole.get_weights()


def in_a_thread(function):
    with futures.ThreadPoolExecutor() as threads:
        return threads.submit(function).result()


def test_fit_inside_a_thread():
    """Meanwhile another thread uses Keras as well, in the middle of the computation of the loss."""
    elsewhere = []

    def penalty(kernel):
        elsewhere.append(in_a_thread(lambda: float(losses.MeanSquaredError()(X, 2 * X))))
        return 0.1 * keras.ops.sum(kernel**2)

    def penalized():
        return keras.Sequential([keras.Input((4,)), layers.Dense(2, kernel_regularizer=penalty)])

    assert_same_script(penalized, lambda model: in_a_thread(lambda: train(compiled(model))), 3)
    assert len(elsewhere) > 2
    np.testing.assert_allclose(elsewhere, np.mean(X**2))


def test_uncompiled():
    """Predictions build a model that is not built, as `build` does."""

    def unbuilt():
        return keras_dp.DataParallelModel(keras.Sequential([layers.Dense(3), layers.Dense(2)]), devices=3)

    predicting, built = unbuilt(), unbuilt()
    assert not hasattr(predicting, "inputs")
    with pytest.raises(ValueError, match="isn't built"):
        predicting.count_params()
    assert predicting.predict(X, verbose=0).shape == (20, 2)
    built.build((None, 4))
    for model in (predicting, built):
        assert model.built
        assert model.inner_model.built
        assert model.count_params() == 5 * 3 + 4 * 2
    assert_same(built.inner_model.predict(X, 9, 0), built.predict(X, 9, 0), 1e-12)
    assert not built.compiled
    assert not hasattr(built, "optimizer")
    for method in (built.fit, built.evaluate, built.train_on_batch, built.test_on_batch):
        with pytest.raises(ValueError, match=r"must call `compile\(\)`"):
            method(X, Y)


@pytest.mark.filterwarnings("ignore:`compile\\(\\)` was not called as part of model loading")
def test_compile_configs():
    """The wrapper shows the arguments of `compile` with the user's optimizer, and takes a plain model's."""
    plain, parallel = compiled(build()), compiled(keras_dp.DataParallelModel(build(), devices=3))
    config = plain.get_compile_config()
    assert config["metrics"]
    assert config == parallel.get_compile_config()

    def script(model):
        model.compile_from_config(config)
        return train(model), model.evaluate(X, Y, verbose=0)

    assert_same_script(build, script, 3)


@same_on_towers(build, 3)
def test_settings_changed_after_compile(model):
    """Covers `steps_per_execution`, `run_eagerly` and, from a callback, `stop_training`."""

    def stop(batch, logs):
        model.stop_training = batch >= 6

    compiled(model)
    model.steps_per_execution = 3
    model.unrolled_steps_per_execution = 2
    history = train(model, batch_size=2, epochs=3, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=stop)])
    assert len(history["loss"]) == 1
    compiled(model).run_eagerly = True
    return history, train(model)


class CompilesForXLA(keras.Model):
    """Compiles itself for XLA, without an argument that says so."""

    def compile(self, optimizer, loss):
        super().compile(optimizer, loss, jit_compile=True)


def before_wrapping():
    return keras_dp.DataParallelModel(compiled(build(), jit_compile=True), devices=2)


def in_its_own_compile():
    model = build()
    parallel = keras_dp.DataParallelModel(CompilesForXLA(model.inputs, model.outputs), devices=2)
    parallel.compile("sgd", "mse")
    return parallel


def by_an_attribute():
    parallel = trained_in_parallel()
    parallel.jit_compile = True
    return parallel


@pytest.mark.parametrize("compile_", [before_wrapping, in_its_own_compile, by_an_attribute])
def test_xla_is_used_however_it_is_asked_for(compile_):
    parallel = compile_()
    train(parallel)
    assert parallel.jit_compile
    assert "compiled by XLA" in str(parallel.explain((X, Y)))
    parallel.jit_compile = False
    assert "compiled by XLA" not in str(parallel.explain((X, Y)))


@same_on_towers(build, 3)
def test_steps_called_directly(model):
    """Covers `make_train_function`, `train_function`, `train_step` and the like with a whole batch, before any `fit`."""
    compiled(model)
    model.make_predict_function()
    results = [model.predict_function([(tf.constant(X),)])]
    model.make_train_function()
    dataset, batch = tf.data.Dataset.from_tensor_slices((X, Y)).batch(9), (tf.constant(X[:8]), tf.constant(Y[:8]))
    batches = iter(dataset)
    logs = [model.train_function(batches) for _ in range(3)]
    model.make_test_function(force=True)
    logs += [model.test_function(iter(dataset)), model.train_step(batch), model.test_step(batch)]
    results += [{name: float(value) for name, value in each.items()} for each in logs]
    return results, model.predict_step(batch[:1]), train(model)


@same_on_towers(dense, 3)
def test_adding_and_removing_layers(model):
    results = [train(compiled(model))]
    model.add(layers.Dense(2, kernel_initializer="ones"))
    results += [train(compiled(model)), len(model.layers)]
    model.pop()
    return results, train(compiled(model)), model.output_shape[1:]


def test_what_the_wrapper_is():
    """It is a `DataParallelModel` and an instance of the inner model's class, and appears under its own name in errors.

    KerasTuner asks its strategy whether to write checkpoints; other tools enter its scope, or check its type.
    """
    parallel = keras_dp.DataParallelModel(build(), devices=2)
    assert isinstance(parallel, keras_dp.DataParallelModel)
    assert isinstance(parallel, type(parallel.inner_model))
    assert repr(parallel) == str(parallel) == "<DataParallelModel name=users, built=True, 2 towers on CPU:0 and CPU:1>"
    assert {parallel: 1}[parallel] == 1
    strategy, default = parallel.distribute_strategy, tf.distribute.get_strategy()
    assert isinstance(strategy, tf.distribute.Strategy)
    assert type(default) is strategy.__class__
    assert strategy.extended is default.extended
    assert strategy.extended.should_checkpoint
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        assert not tf.distribute.has_strategy()
        assert len(train(compiled(parallel))["loss"]) == 1
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = strategy.no_such_name
