"""`check_step` compares one step on one device and on towers, and finds the operation that is wrong."""

import dataclasses
import inspect
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, values
from keras import layers
from programs.steps import Learner

import keras_dp
from keras_dp.partition import step as step_module
from keras_dp.partition.inspecting import comparison
from keras_dp.partition.inspecting.tolerance import difference
from keras_dp.partition.placing.rules import RULES

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(7, 4)), rng.normal(size=(7, 2))
IMAGES, TARGETS = rng.normal(size=(22, 9, 9, 3)).astype("float32"), np.ones((22, 2), "float32")


class Own(Learner, keras.Sequential):
    """Trains by a step of its own."""

    def loss_of(self, x, y):
        return keras.ops.mean(keras.ops.square(self(x, training=True) - y)), {}


class Sorting(Own):
    """Lets rows meet rows."""

    def train_step(self, data):
        return super().train_step(data) | {"second": tf.sort(data[0], axis=0)[1, 0]}


class RowsWithRows(Sorting):
    """Needs the whole batch, which is put together from the towers' slices, on both of the ways that are compared."""

    def train_step(self, data):
        return super().train_step(data) | {"together": tf.reduce_sum(data[0] @ tf.transpose(data[0]))}


def wrapped(*stack, model=keras.Sequential, inputs=X, optimizer="sgd", loss="mse", jit_compile=False, **arguments):
    model = model([keras.Input(inputs.shape[1:], dtype="float16" if inputs.dtype == "float16" else None), *stack])
    parallel = keras_dp.DataParallelModel(model, devices=2, **arguments)
    parallel.compile(optimizer, loss, jit_compile=jit_compile)
    return parallel


def of_four_layers(**arguments):
    stack = [layers.Dense(5, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(2)]
    return wrapped(*stack, optimizer="adam", **arguments)


def line_of(function, text):
    source, start = inspect.getsourcelines(function)
    return f"test_step_check.py, line {start + next(i for i, line in enumerate(source) if text in line)}"


@pytest.mark.parametrize(("model", "steps"), [(keras.Sequential, ("train", "test", "predict")), (RowsWithRows, ("train",))])
def test_same(model, steps):
    """Covers the steps of Keras and of the user. The check leaves the model unchanged."""
    parallel = of_four_layers(model=model)
    parallel.fit(X, Y, batch_size=4, verbose=0)
    before = parallel.get_weights(), values(parallel.inner_model.optimizer)
    for step in steps:
        check = keras_dp.check_step(parallel, (X, Y) if step != "predict" else X, step)
        assert check.is_exact, check
        assert check.first is None, check
        assert len(check.tensors.measured) > {"train": 64, "test": 16, "predict": 8}[step]
        assert f"{step} step on one device and on towers: the same" in str(check)
    assert_same(before, (parallel.get_weights(), values(parallel.inner_model.optimizer)), 0.0)


def wrong_on_the_second_tower(monkeypatch, kind, change):
    """Makes the rule of a type of operations wrong: `change` makes another tensor of what the second tower computes.

    It is a function of the right tensor, and of a function that adds an operation of a type on tensors.
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


@pytest.mark.parametrize("jit_compile", [False, True])
def test_wrong_rule_is_found(jit_compile, monkeypatch):
    """The first wrong operation is named, with the user's line, although all operations behind it differ as well."""
    right = RULES["Mean"]

    def mean_of_the_towers_means(node):
        plan = right(node)
        if plan and "mul" not in node.name:
            plan.instance = None
        return plan

    monkeypatch.setitem(RULES, "Mean", mean_of_the_towers_means)
    check = keras_dp.check_step(of_four_layers(model=Own, jit_compile=jit_compile), (X, Y))
    assert not check.is_exact
    first = check.first
    assert (first.type, first.placement) == ("Mean", "Partial(reduction='sum')")
    assert line_of(Own.loss_of, "return") in str(check)
    assert "different" in str(check)
    assert "without XLA, the step is the same" not in str(check)


def test_explanation():
    """Lists the bytes of a batch of 7 rows, the operations that are computed once, and the user's lines."""
    explanation = of_four_layers(model=RowsWithRows).explain((X, Y))
    assert {meeting.bytes for meeting in explanation.meetings if meeting.kind == "gather"} == {7 * 4 * 8}
    sort = next(known for known in explanation.once if known.type == "TopKV2")
    assert sort.line.endswith(line_of(Sorting.train_step, "tf.sort"))
    assert sum(meeting.bytes for meeting in explanation.meetings if meeting.kind == "sum") >= 8 * (4 * 5 + 5 * 2)
    assert "2 towers on" in str(explanation)
    assert "TopKV2" in str(explanation)


def test_fit_warns_once_of_many_gathered_rows(caplog):
    """Only large gathers cause a warning, which names the user's line; `explain` shows the small ones."""

    def warnings_of(width):
        caplog.clear()
        x = np.ones((16, width))
        parallel = wrapped(layers.Dense(1), model=Sorting, inputs=x)
        for batch_size in (16, 8):
            parallel.fit(x, x[:, :1], batch_size=batch_size, verbose=0)
        return [record.message for record in caplog.records if record.name == "keras_dp" and "gathers" in record.message]

    (message,) = warnings_of(2**14)
    assert "TopKV2 gathers 2.1 MB of rows in each step" in message
    assert line_of(Sorting.train_step, "tf.sort") in message
    assert warnings_of(4) == []


def test_refuses_what_it_cannot_compare():
    parallel = of_four_layers()
    uncompiled = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), layers.Dense(2)]), devices=3)
    targets = "needs targets: pass check_step.. a batch as fit.. feeds it, .x, y."
    for message, *arguments in [
        ("Received: step='fit'", parallel, (X, Y), "fit"),
        ("looks at the towers of a keras_dp.DataParallelModel.*Received: <Sequential", parallel.inner_model, (X, Y)),
        (targets, parallel, X),
        (targets, parallel, (X,)),
        ("Compile the model before check_step", uncompiled, (X, Y)),
    ]:
        with pytest.raises(ValueError, match=message):
            keras_dp.check_step(*arguments)
    assert keras_dp.check_step(parallel, [X, Y]).is_exact


def in_float16(*last):
    """Returns a function that checks a network with shortcuts in mixed precision, and layers before its last ones."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((8, 8, 4))
    for _ in range(2):
        x = layers.ReLU()(x + layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(x)))
    for layer in (layers.Dropout(0.3), *last, layers.GlobalAveragePooling2D(), layers.Dense(4, dtype="float32")):
        x = layer(x)
    parallel = keras_dp.DataParallelModel(keras.Model(inputs, x), devices=3)
    parallel.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    draw = np.random.default_rng(3)
    return keras_dp.check_step(parallel, (draw.normal(size=(22, 8, 8, 4)).astype("float32"), draw.integers(0, 4, 22)))


def test_sums_in_half_precision_that_cancel():
    """What rounding leaves of the gradient of a bias before a normalization was "different"."""
    found = in_float16()
    assert found.is_exact, found


def times_32(made, add):
    for _ in range(5):
        made = add("AddV2", made, made)
    return made


WRONG_IN_HALF_PRECISION = [("Relu", lambda made, add: add("ZerosLike", made)), ("BiasAddGrad", times_32)]


@pytest.mark.parametrize(("kind", "change"), WRONG_IN_HALF_PRECISION)
def test_negative_control_in_half_precision(monkeypatch, kind, change):
    wrong_on_the_second_tower(monkeypatch, kind, change)
    found = in_float16(layers.Conv2D(4, 3, activation="relu"))
    assert found.first.type == kind
    assert not found.is_exact


def test_products_are_compared_without_tensor_float_32(monkeypatch):
    """On an H100, XLA and cuDNN rounded factors of a convolution otherwise, and the step was "different"."""
    seen = []
    run, allowed = comparison.run, tf.config.experimental.tensor_float_32_execution_enabled
    monkeypatch.setattr(comparison, "run", lambda *arguments: (seen.append(allowed()), run(*arguments))[1])
    assert allowed()
    found = keras_dp.check_step(of_four_layers(), (X, Y))
    assert found.is_exact
    assert "XLA" not in str(found)
    assert set(seen) == {False}
    assert allowed()


def one_of_two_of_a_name():
    """TensorFlow calls the kernels of a subclassed model alike. Once, the last one alone was judged."""

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.last = layers.Dense(4), layers.Dense(2)

        def call(self, x):
            return self.last(self.hidden(x))

    parallel = keras_dp.DataParallelModel(Subclassed(), devices=2)
    parallel.compile("sgd", "mse")
    parallel(X)
    return parallel, (X, Y), parallel.inner_model.hidden.kernel


def half_precision_of_the_input_alone():
    last = layers.Dense(2)
    convolution = [layers.Lambda(lambda x: tf.cast(x, "float32")), layers.Conv2D(4, 3), layers.GlobalAveragePooling2D()]
    parallel = wrapped(*convolution, last, inputs=IMAGES.astype("float16"), optimizer=keras.optimizers.SGD(0.01))
    return parallel, (IMAGES.astype("float16"), TARGETS), last.bias


def of_convolutions(optimizer, policy):
    keras.config.set_dtype_policy(policy)
    hidden = layers.Conv2D(4, 3)
    stack = [hidden, layers.GlobalAveragePooling2D(), layers.Dense(2, dtype="float32")]
    return wrapped(*stack, inputs=IMAGES, optimizer=optimizer), (IMAGES, TARGETS), hidden.bias


def a_bias_after_a_long_sum_in_half_precision():
    return of_convolutions(keras.optimizers.SGD(0.01), "mixed_bfloat16")


def a_sign_that_rounding_turned():
    """Loss scaling updates weights in a branch. There, a step of Lion whose sign was turned was "different"."""
    return of_convolutions(keras.optimizers.Lion(1e-3), "mixed_float16")


def a_small_weight():
    """A millionth is always within an absolute tolerance: a weight of that size that moved by a tenth was the same."""
    only = layers.Dense(2, use_bias=False)
    parallel = wrapped(only, optimizer=keras.optimizers.Adam(1e-7))
    only.kernel.assign(only.kernel * 1e-6)
    return parallel, (X.astype("float32"), Y.astype("float32")), only.kernel


def numbers_that_mean_something():
    """Classes as floats would become other classes if they were rounded otherwise, and explain any difference."""
    only = layers.Dense(3, "softmax")
    return wrapped(only, loss="sparse_categorical_crossentropy"), (X, np.arange(7.0) % 3), only.bias


@pytest.mark.parametrize(
    ("build", "floatx", "moved"),
    [
        (one_of_two_of_a_name, "float64", 1e-3),
        (half_precision_of_the_input_alone, "float32", 0.05),
        (a_bias_after_a_long_sum_in_half_precision, "float32", 0.05),
        (a_sign_that_rounding_turned, "float32", 3.1e-3),
        (a_small_weight, "float32", 1e-7),
        (numbers_that_mean_something, "float64", 1e-3),
    ],
)
def test_a_variable_that_towers_alone_move_is_found(build, floatx, moved, monkeypatch):
    keras.config.set_floatx(floatx)
    parallel, batch, variable = build()
    right = comparison.run

    def checked(by):
        def moving(*arguments):
            results = right(*arguments)
            with tf.control_dependencies(results):
                variable.value.assign_add(tf.fill(variable.shape, tf.constant(by, variable.dtype)))
            return results

        monkeypatch.setattr(comparison, "run", moving)
        return keras_dp.check_step(parallel, batch)

    assert checked(1.9e-3 if build is a_sign_that_rounding_turned else 0.0).variables.different == {}
    found = checked(moved)
    assert not found.is_exact
    (name,) = found.variables.different
    assert variable.name in name
    assert re.search(rf"variable '{name}' differs by [\d.e+-]+, [\d.e+]+ times as much as is allowed", str(found))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_changes_that_are_rounding_alone_are_the_same(optimizer):
    """The bias before a normalization, and the layer of zeros before balanced classes, change by what rounding leaves of 0."""
    keras.config.set_floatx("float32")
    stack = [layers.Dense(3), layers.BatchNormalization(), layers.Dense(3, "softmax", kernel_initializer="zeros")]
    parallel = wrapped(*stack, optimizer=optimizer, loss="sparse_categorical_crossentropy")
    found = keras_dp.check_step(parallel, (np.tile(X, (3, 1)).astype("float32"), np.arange(21) % 3))
    assert found.is_exact, found


def test_towers_that_xla_compiles_are_compared_as_they_run():
    found = keras_dp.check_step(of_four_layers(jit_compile=True), (X, Y))
    assert found.is_exact, found
    assert "on one device and on towers, compiled by XLA: the same" in str(found)
    assert "tensors inside, without XLA, which fuses them: the same" in str(found)


def test_a_fault_of_xla_alone_is_found(monkeypatch):
    """XLA's towers compute another function than the program's; without XLA, they compute the right one."""
    right = step_module.compile_programs

    def wrong(built):
        for node in built.graph.function.node_def:
            node.op = {"Tanh": "Sigmoid"}.get(node.op, node.op)
        return right(built)

    monkeypatch.setattr(step_module, "compile_programs", wrong)
    found = keras_dp.check_step(of_four_layers(jit_compile=True), (X, Y))
    assert not found.is_exact
    assert not found.tensors.different
    assert "without XLA, the step is the same: the difference comes from how XLA compiles the towers" in str(found)
    parallel = of_four_layers(jit_compile=True, verify=True)
    before = parallel.get_weights()
    with pytest.raises(RuntimeError, match="Without XLA, it is the same.*train with jit_compile=False"):
        parallel.fit(X, Y, verbose=0)
    assert_same(before, parallel.get_weights(), 0.0)
    of_four_layers(verify=True).fit(X, Y, verbose=0)


def test_checks_of_the_program_strings_and_counts():
    """Rounded otherwise, 0.7 would be more than 0.7. A scalar string has no dtype of NumPy.

    A count that is wrong by one is wrong, however large it is.
    """

    class Named(Own):
        def train_step(self, data):
            tf.debugging.assert_less_equal(data[0], tf.constant(0.7, data[0].dtype))
            said.assign("trained")
            return super().train_step(data)

    said = tf.Variable("begin")
    assert keras_dp.check_step(wrapped(layers.Dense(2), model=Named), (np.minimum(X, 0.7), Y)).is_exact
    assert difference(np.array(20000), np.array(20001)) == 1.0
    assert difference(np.array(2**60, "uint64"), np.array(2**60 + 1, "uint64")) == 1.0
