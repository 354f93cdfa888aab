"""`check_step` compares one step on one device and on towers, and finds the operation that is wrong."""

import dataclasses
import inspect
import re
import traceback
from xml.etree import ElementTree

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_training, values
from keras import layers

import keras_dp
from keras_dp.partition import step as step_module
from keras_dp.partition.inspecting import both_ways
from keras_dp.partition.placing.rules import RULES

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(7, 4)), rng.normal(size=(7, 2))


class Own(keras.Model):
    """Trains by a step of its own, in which rows meet rows."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def wrapped(cls=keras.Model, **arguments):
    inputs = keras.Input((4,))
    hidden = layers.Dropout(0.3)(layers.BatchNormalization()(layers.Dense(5)(inputs)))
    parallel = keras_dp.DataParallelModel(cls(inputs, layers.Dense(2)(hidden)), devices=3, **arguments)
    parallel.compile("adam", "mse", metrics=["mae"] if cls is keras.Model else None)
    return parallel


class RowsWithRows(Own):
    """Needs the whole batch, which is put together from the towers' slices, on both of the ways that are compared."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"second": tf.sort(data[0], axis=0)[1, 0], "together": tf.reduce_sum(data[0] @ tf.transpose(data[0]))}


@pytest.mark.parametrize(("cls", "steps"), [(keras.Model, ("train", "test", "predict")), (RowsWithRows, ("train",))])
def test_same(cls, steps):
    """Covers the steps of Keras and of the user. The check leaves the model unchanged."""
    parallel = wrapped(cls)
    parallel.fit(X, Y, batch_size=4, verbose=0)
    before = parallel.get_weights(), values(parallel.inner_model.optimizer)
    for step in steps:
        check = keras_dp.check_step(parallel, (X, Y) if step != "predict" else (X,), step)
        assert check.is_exact, check
        assert check.comparison.first is None, check
        assert len(check.comparison.tensors.differences) > {"train": 64, "test": 20, "predict": 8}[step]
        assert f"{step} step on one device and on towers: the same" in str(check)
    assert_same(before, (parallel.get_weights(), values(parallel.inner_model.optimizer)), 0.0)


@pytest.fixture
def wrong_mean(monkeypatch):
    """Makes a rule wrong: the mean of the towers' means replaces the mean of all rows."""
    right = RULES["Mean"]

    def wrong(node):
        plan = right(node)
        if plan and "mul" not in node.name:
            plan.instance = None
        return plan

    monkeypatch.setitem(RULES, "Mean", wrong)


def wrong_on_the_second_tower(monkeypatch, kind, change):
    """Makes the rule of a type of operations wrong: `change` makes another tensor of what the second tower computes.

    Args:
        monkeypatch: undoes it.
        kind: the type of the operations.
        change: a function of the right tensor, and of a function that adds an operation of a type on tensors.
    """
    right = RULES[kind]

    def wrong(node):
        def instance(builder, definition, tower, inputs):
            def add(operation, *tensors):
                return builder.graph.add(operation, list(tensors), builder.devices[tower], "wrong", tower, T=node.dtype(0))

            made = builder.copy(definition, tower, inputs)
            return change(made, add) if tower == 1 else made

        return dataclasses.replace(right(node), instance=instance)

    monkeypatch.setitem(RULES, kind, wrong)


@pytest.fixture
def mixed_float16():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def test_comparison_of_programs_that_fails_names_the_operation(wrong_mean):
    """Every failed test of exactness names the first wrong operation."""

    def build():
        inputs = keras.Input((4,))
        return Own(inputs, layers.Dense(2)(layers.BatchNormalization()(inputs)))

    with pytest.raises(AssertionError) as failed:
        assert_same_training(build, lambda: {"optimizer": "sgd"}, [((X, Y), 4)], 3)
    said = traceback.format_exception_only(failed.value)
    assert any("first operation that differs" in line for line in said)
    assert any("Mean" in line for line in said)


def test_wrong_rule_is_found(wrong_mean):
    """The first wrong operation is named, with the user's line, although all operations behind it differ as well."""
    parallel = wrapped(Own)
    check = keras_dp.check_step(parallel, (X, Y))
    assert not check.is_exact
    first = check.comparison.first
    assert (first.type, first.placement) == ("Mean", "Partial(reduction='sum')")
    source, start = inspect.getsourcelines(Own.train_step)
    line = start + next(i for i, text in enumerate(source) if "loss = " in text)
    assert f"test_step_check.py, line {line}" in str(check)
    assert "different" in str(check)


def test_explanation():
    """Lists the bytes of a batch of 7 rows, the operations that are computed once, and the user's lines."""
    explanation = wrapped(RowsWithRows).explain((X, Y))
    gathered = {meeting.name: meeting.bytes for meeting in explanation.meetings if meeting.kind == "gather"}
    assert set(gathered.values()) == {7 * 4 * 8}
    sort = next(known for known in explanation.once if known.type == "TopKV2")
    source, start = inspect.getsourcelines(RowsWithRows.train_step)
    assert sort.line == f"{__file__}, line {start + len(source) - 1}"
    assert sum(meeting.bytes for meeting in explanation.meetings if meeting.kind == "sum") >= 8 * (4 * 5 + 5 * 2)
    assert "3 towers on" in str(explanation)
    assert "TopKV2" in str(explanation)
    # The picture is valid XML, with a column for each tower and a line for each meeting.
    root = ElementTree.fromstring(explanation.svg())
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [f"tower {i}" for i in range(3)] == [text for text in texts if text.startswith("tower ")]
    assert any(text.startswith("sum ") and "BiasAddGrad" in text for text in texts)
    assert explanation._repr_svg_() == explanation.svg()


def test_fit_warns_once_of_many_gathered_rows(caplog):
    """Only large gathers cause a warning, which names the user's line; `explain` shows the small ones."""

    class Sorting(keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0])) + tf.reduce_mean(tf.sort(data[0], axis=0)[0])
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    def warnings_of(width):
        caplog.clear()
        parallel = keras_dp.DataParallelModel(Sorting([keras.Input((width,)), keras.layers.Dense(1)]), devices=2)
        parallel.compile("sgd")
        x = np.ones((16, width))
        for batch_size in (16, 8):
            parallel.fit(x, x[:, :1], batch_size=batch_size, verbose=0)
        return [record.getMessage() for record in caplog.records if record.name == "keras_dp" and "gathers" in record.message]

    (message,) = warnings_of(2**14)
    assert "TopKV2 gathers 2.1 MB of rows in each step" in message
    assert "test_step_check.py, line" in message
    assert warnings_of(4) == []


def test_refuses_what_it_cannot_compare():
    parallel = wrapped()
    with pytest.raises(ValueError, match="Received: step='fit'"):
        keras_dp.check_step(parallel, (X, Y), "fit")
    with pytest.raises(ValueError, match="looks at the towers of a keras_dp.DataParallelModel.*Received: <Functional"):
        keras_dp.check_step(parallel.inner_model, (X, Y))
    for batch in (X, (X,)):
        with pytest.raises(ValueError, match="needs targets: pass check_step.. a batch as fit.. feeds it, .x, y."):
            keras_dp.check_step(parallel, batch)
    uncompiled = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), layers.Dense(2)]), devices=3)
    with pytest.raises(ValueError, match="Compile the model before check_step"):
        keras_dp.check_step(uncompiled, (X, Y))
    assert keras_dp.check_step(parallel, X, "predict").is_exact
    assert keras_dp.check_step(parallel, [X, Y]).is_exact


def test_half_precision(mixed_float16, monkeypatch):
    """What half precision rounds counts as the same; a wrong rule does not."""

    def check():
        keras.utils.set_random_seed(0)
        stack = [layers.Conv2D(8, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.3)]
        stack += [layers.Conv2D(8, 3, activation="relu"), layers.GlobalAveragePooling2D(), layers.Dense(4, dtype="float32")]
        parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((9, 9, 3)), *stack]), devices=3)
        parallel.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x = np.random.default_rng(0).normal(size=(22, 9, 9, 3)).astype("float32")
        return keras_dp.check_step(parallel, (x, np.arange(22) % 4))

    found = check()
    assert found.is_exact, found
    assert found.comparison.variables.is_same
    wrong_on_the_second_tower(monkeypatch, "Relu", lambda made, add: add("ZerosLike", made))
    found = check()
    assert not found.is_exact
    assert found.comparison.first.type == "Relu"


def test_sums_in_half_precision_that_cancel(mixed_float16, monkeypatch):
    """What rounding leaves of the gradient of a bias before a normalization was "different"; a part that is wrong still is."""

    def check(*last):
        keras.utils.set_random_seed(3)
        x = inputs = keras.Input((8, 8, 4))
        for _ in range(2):
            x = layers.ReLU()(x + layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(x)))
        for layer in (*last, layers.GlobalAveragePooling2D(), layers.Dense(4, dtype="float32")):
            x = layer(x)
        parallel = keras_dp.DataParallelModel(keras.Model(inputs, x), devices=3)
        parallel.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        draw = np.random.default_rng(3)
        return keras_dp.check_step(parallel, (draw.normal(size=(22, 8, 8, 4)).astype("float32"), draw.integers(0, 4, 22)))

    def times_32(made, add):
        for _ in range(5):
            made = add("AddV2", made, made)
        return made

    found = check()
    assert found.is_exact, found
    wrong_on_the_second_tower(monkeypatch, "BiasAddGrad", times_32)
    found = check(layers.Conv2D(4, 3, activation="relu"))
    assert found.comparison.first.type == "BiasAddGrad"


def test_products_are_compared_without_tensor_float_32(monkeypatch):
    """On an H100, XLA and cuDNN rounded factors of a convolution otherwise, and the step was "different"."""
    parallel, seen = wrapped(), []
    run, allowed = both_ways.run, tf.config.experimental.tensor_float_32_execution_enabled
    monkeypatch.setattr(both_ways, "run", lambda *arguments: (seen.append(allowed()), run(*arguments))[1])
    assert allowed()
    assert keras_dp.check_step(parallel, (X, Y)).is_exact
    assert not any(seen)
    assert seen
    assert allowed()


@pytest.fixture
def moving(monkeypatch):
    """Returns a function that makes steps on towers move a variable, which one device does not move."""

    def move(variable, by):
        right = both_ways.run

        def wrong(*arguments):
            results = right(*arguments)
            with tf.control_dependencies(results):
                variable.value.assign_add(tf.fill(variable.shape, tf.constant(by, variable.dtype)))
            return results

        monkeypatch.setattr(both_ways, "run", wrong)

    return move


def test_variables_of_one_name_are_all_judged(moving):
    """TensorFlow calls the kernels of a subclassed model alike. Once, the last one alone was judged."""

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.last = layers.Dense(4), layers.Dense(2)

        def call(self, x):
            return self.last(self.hidden(x))

    parallel = keras_dp.DataParallelModel(Subclassed(), devices=2)
    parallel.compile("sgd", "mse")
    parallel.fit(X, Y, verbose=0)
    assert keras_dp.check_step(parallel, (X, Y)).is_exact
    moving(parallel.inner_model.hidden.kernel, 1e-3)
    check = keras_dp.check_step(parallel, (X, Y))
    assert not check.comparison.variables.is_same
    assert sum("kernel" in name for name in check.comparison.variables.differences) == 2


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_half_precision_excuses_only_what_depends_on_it(policy, moving):
    """A step in float32 whose input alone has half precision; and a bias after a long sum in half precision."""
    keras.config.set_floatx("float32")
    inputs = keras.Input((9, 9, 3), dtype="float16" if policy == "float32" else None)
    x = layers.Conv2D(4, 3, dtype=policy)(keras.ops.cast(inputs, "float32"))
    parallel = keras_dp.DataParallelModel(
        keras.Model(inputs, layers.Dense(2, dtype="float32")(layers.GlobalAveragePooling2D(dtype=policy)(x))), devices=2
    )
    parallel.compile(keras.optimizers.SGD(0.01), "mse")
    batch = np.random.default_rng(0).normal(size=(22, 9, 9, 3)).astype(inputs.dtype), np.ones((22, 2), "float32")
    assert keras_dp.check_step(parallel, batch).is_exact
    kind = layers.Dense if policy == "float32" else layers.Conv2D
    moving(next(layer for layer in parallel.inner_model.layers if isinstance(layer, kind)).bias, 0.05)
    assert not keras_dp.check_step(parallel, batch).comparison.variables.is_same


def test_a_sign_that_rounding_turned(mixed_float16, moving):
    """Loss scaling updates weights in a branch. There, a step of Lion whose sign was turned was "different"."""
    hidden = layers.Conv2D(4, 3)
    stack = [keras.Input((9, 9, 3)), hidden, layers.GlobalAveragePooling2D(), layers.Dense(2, dtype="float32")]
    parallel = keras_dp.DataParallelModel(keras.Sequential(stack), devices=2)
    parallel.compile(keras.optimizers.Lion(1e-3), "mse")
    batch = np.random.default_rng(0).normal(size=(22, 9, 9, 3)).astype("float32"), np.ones((22, 2), "float32")
    moving(hidden.bias, 1.9e-3)
    assert keras_dp.check_step(parallel, batch).comparison.variables.is_same
    moving(hidden.bias, 3.1e-3)
    assert not keras_dp.check_step(parallel, batch).comparison.variables.is_same


def test_small_weights_are_judged_by_their_own_size(moving):
    """A millionth is always within an absolute tolerance: a weight of that size that moved by a tenth was the same."""
    keras.config.set_floatx("float32")
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), layers.Dense(2, use_bias=False)]), devices=2)
    parallel.compile(keras.optimizers.Adam(1e-7), "mse")
    kernel = parallel.inner_model.layers[0].kernel
    kernel.assign(kernel * 1e-6)
    batch = X.astype("float32"), Y.astype("float32")
    found = keras_dp.check_step(parallel, batch)
    assert found.is_exact, found
    moving(kernel, 1e-7)
    found = keras_dp.check_step(parallel, batch)
    (name,) = found.comparison.variables.different
    assert "kernel" in name
    assert re.search(r"variable '.*kernel:0' differs by 1.0e-07, [\d.e+]+ times as much as is allowed", str(found))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_changes_that_are_rounding_alone_are_the_same(optimizer):
    """The bias before a normalization, and the layer of zeros before balanced classes, change by what rounding leaves of 0."""
    keras.config.set_floatx("float32")
    stack = [layers.Dense(3), layers.BatchNormalization(), layers.Dense(3, "softmax", kernel_initializer="zeros")]
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), *stack]), devices=2)
    parallel.compile(optimizer, "sparse_categorical_crossentropy")
    found = keras_dp.check_step(parallel, (np.tile(X, (3, 1)).astype("float32"), np.arange(21) % 3))
    assert found.is_exact, found


@pytest.fixture
def wrong_with_xla(monkeypatch):
    """Makes XLA's towers compute another function than the program's; without XLA, they compute the right one."""
    right = both_ways.compile_towers

    def wrong(built, devices):
        for node in built.graph.function.node_def:
            node.op = {"Tanh": "Sigmoid"}.get(node.op, node.op)
        right(built, devices)

    for module in (both_ways, step_module):
        monkeypatch.setattr(module, "compile_towers", wrong)


def with_xla(jit_compile=True, **arguments):
    inputs = keras.Input((4,))
    hidden = layers.BatchNormalization()(layers.Dense(5, "tanh")(inputs))
    parallel = keras_dp.DataParallelModel(keras.Model(inputs, layers.Dense(2)(hidden)), devices=3, **arguments)
    parallel.compile("adam", "mse", jit_compile=jit_compile)
    return parallel


def test_towers_that_xla_compiles_are_compared_as_they_run(monkeypatch):
    compiled = []
    right = both_ways.compile_towers
    monkeypatch.setattr(both_ways, "compile_towers", lambda *arguments: compiled.append(right(*arguments)))
    found = keras_dp.check_step(with_xla(), (X, Y))
    assert found.is_exact, found
    assert "on one device and on towers, compiled by XLA: the same" in str(found)
    assert "tensors inside, without XLA, which fuses them: the same" in str(found)
    assert len(compiled) == 1
    assert "XLA" not in str(keras_dp.check_step(with_xla(jit_compile=False), (X, Y)))
    assert len(compiled) == 1


def test_a_fault_of_xla_alone_is_found(wrong_with_xla):
    found = keras_dp.check_step(with_xla(), (X, Y))
    assert not found.is_exact
    assert found.comparison.tensors.is_same
    assert "without XLA, the step is the same: the difference comes from how XLA compiles the towers" in str(found)


def test_verification_finds_a_fault_of_xla_alone(wrong_with_xla):
    parallel = with_xla(verify=True)
    before = parallel.get_weights()
    with pytest.raises(RuntimeError, match="Without XLA, it is the same.*train with jit_compile=False"):
        parallel.fit(X, Y, verbose=0)
    assert_same(before, parallel.get_weights(), 0.0)
    with_xla(jit_compile=False, verify=True).fit(X, Y, verbose=0)


def test_a_wrong_rule_is_named_where_xla_compiles_the_towers(wrong_mean):
    found = keras_dp.check_step(with_xla(), (X, Y))
    assert not found.is_exact
    assert found.comparison.first.type == "Mean"
    assert "without XLA, the step is the same" not in str(found)


def test_numbers_that_mean_something_are_not_rounded_otherwise(moving):
    """Classes as floats would become other classes, and explain any difference."""
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), layers.Dense(3, "softmax")]), devices=2)
    parallel.compile("sgd", "sparse_categorical_crossentropy")
    batch = X, np.arange(7.0) % 3
    assert keras_dp.check_step(parallel, batch).is_exact
    moving(parallel.inner_model.layers[0].bias, 1e-3)
    assert not keras_dp.check_step(parallel, batch).is_exact


def test_a_check_of_the_program_that_refuses_other_numbers():
    """Rounded otherwise, 1 would be more than 1."""

    class AtMostOne(layers.Layer):
        def call(self, x):
            tf.debugging.assert_less_equal(x, tf.constant(0.7, x.dtype))
            return x

    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), AtMostOne(), layers.Dense(2)]), devices=2)
    parallel.compile("sgd", "mse")
    assert keras_dp.check_step(parallel, (np.minimum(X, 0.7), Y)).is_exact


def test_strings_and_counts():
    """A scalar string has no dtype of NumPy; and a count that is wrong by one is wrong, however large it is."""

    class Named(Own):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            self.said = tf.Variable("begin")

        def train_step(self, data):
            self.said.assign("trained")
            return super().train_step(data)

    inputs = keras.Input((4,))
    parallel = keras_dp.DataParallelModel(Named(inputs, layers.Dense(2)(inputs)), devices=2)
    parallel.compile("sgd")
    assert keras_dp.check_step(parallel, (X, Y)).is_exact
    assert both_ways.difference(np.array(20000), np.array(20001)) == 1.0
    assert both_ways.difference(np.array(2**60, "uint64"), np.array(2**60 + 1, "uint64")) == 1.0
