"""XLA compiles the operations of each tower between exchanges, and the result stays one device's."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same_script, largest_change
from keras import layers
from ways_of_wrapping import wrapped

import keras_dp
from keras_dp.batches.shares import Shares
from keras_dp.batches.slicing import cut
from keras_dp.partition.running import compilation
from keras_dp.reports.communication import _run_and_collect

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(22, 8, 8, 2)), rng.normal(size=(22, 3))


def build():
    stack = [layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU(), layers.GlobalAveragePooling2D()]
    return keras.Sequential([keras.Input((8, 8, 2)), *stack, layers.Dense(3)])


def trained(devices=2, optimizer="sgd", jit_compile=True, **arguments):
    parallel = keras_dp.DataParallelModel(build(), devices=devices, **arguments)
    parallel.compile(optimizer, "mse", jit_compile=jit_compile)
    parallel.train_on_batch(X, Y)
    return parallel


def graphs_of(parallel, devices):
    return _run_and_collect(parallel.tower_steps, "train", cut((X, Y), Shares.alike(devices)))[1]


def programs(parallel, devices):
    """Counts the programs in a step: those of each tower's device, without the updates, and the updates."""
    nodes = [node for graph in graphs_of(parallel, devices) for node in graph.node if node.attr["_XlaMustCompile"].b]
    kinds = Counter((node.device[-5:], "update" if "update/" in node.name else "tower") for node in nodes)
    towers = [kinds[f"CPU:{tower}", "tower"] for tower in range(devices)]
    return towers, [kinds[f"CPU:{tower}", "update"] for tower in range(devices)]


def with_dropout():
    return keras.Sequential([keras.Input((8, 8, 2)), layers.Flatten(), layers.Dropout(0.5), layers.Dense(3)])


@pytest.mark.parametrize(
    ("build", "options", "towers", "updates"),
    [
        (build, {"devices": 1}, [1], [0]),
        (build, {"devices": 3}, [3, 3, 3], [1, 0, 0]),
        (build, {"devices": 3, "pack_copies": True}, [3, 3, 3], [1, 0, 0]),
        (build, {"devices": 3, "batch_norm": "local"}, [1, 1, 1], [1, 0, 0]),
        # A home writes after all homes have their sums.
        (build, {"devices": 2, "parameter_device": "sharded"}, [3, 3], [2, 2]),
        # TensorFlow's kernels draw, between what the numbers depend on and what they are for.
        (with_dropout, {"devices": 1}, [3], [0]),
        # The host counts the numbers that each tower skips, and is tower 0's device here.
        (with_dropout, {"devices": 2}, [2, 1], [1, 0]),
    ],
)
def test_a_tower_has_a_program_more_than_it_meets_others(build, options, towers, updates):
    """Auto-clustering cut a tower of an MLP into six programs, and each of them is launched by itself."""
    parallel = wrapped(build(), **options)
    parallel.compile(keras.optimizers.Adam(), "mse", jit_compile=True)
    parallel.train_on_batch(X, Y)
    assert programs(parallel, options["devices"]) == (towers, updates)


@pytest.mark.parametrize(("devices", "towers", "updates"), [(1, [1], [0]), (2, [3, 3], [1, 0])])
def test_a_number_of_rows_that_is_not_known_makes_no_more_programs(monkeypatch, devices, towers, updates):
    """Operations that need shapes of so many rows once stood outside: a tower of ResNet-20 had 49 programs in place of one."""
    parallel = keras_dp.DataParallelModel(build(), devices=devices)
    parallel.compile(keras.optimizers.Adam(), "mse", jit_compile=True)
    written = []

    def noting(built, *arguments):
        made = write_programs(built, *arguments)
        written.append([node for node in built.function.node_def if "_XlaMustCompile" in node.attr])
        return made

    write_programs = compilation.write_programs
    monkeypatch.setattr(compilation, "write_programs", noting)
    parallel.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), shuffle=False, verbose=0)
    kinds = Counter((node.device[-5:], node.name.startswith("update")) for node in written[-1])
    assert [kinds[f"CPU:{tower}", False] for tower in range(devices)] == towers
    assert [kinds[f"CPU:{tower}", True] for tower in range(devices)] == updates


def without_meetings():
    stack = [layers.Flatten(), layers.Dense(8, "relu"), layers.LayerNormalization(), layers.Dense(3)]
    return keras.Sequential([keras.Input((8, 8, 2)), *stack])


def test_a_program_of_a_whole_step_begins_when_other_towers_have_their_weights_on_the_way():
    """On a GPU, a copy waits for all that was given before it: the other tower would begin when this one ends."""
    parallel = wrapped(without_meetings(), devices=2, pack_copies=True)
    parallel.compile("sgd", "mse", jit_compile=True)
    parallel.train_on_batch(X, Y)
    assert programs(parallel, 2) == ([1, 1], [1, 0])
    nodes = {node.name: node for graph in graphs_of(parallel, 2) for node in graph.node}
    (program,) = [node for name, node in nodes.items() if "tower_0/program" in name]
    awaited = [nodes[name[1:]] for name in program.input if name[0] == "^"]
    weights = [node for node in awaited if node.op == "ConcatV2" and "message" in node.name]
    assert weights
    assert any(node.op == "_Send" and node.input[0] == weights[0].name for node in nodes.values())


def with_a_table():
    return keras.Sequential([keras.Input((4,), dtype="int32"), layers.Embedding(50_000, 6), layers.Flatten(), layers.Dense(3)])


def test_a_program_begins_when_the_rows_of_a_table_are_on_the_way_to_other_towers():
    """The rows for the last of eight towers once left behind the program of home's own tower, which computes a whole step."""
    parallel = wrapped(with_a_table(), devices=3)
    parallel.compile("sgd", "mse", jit_compile=True)
    x, y = rng.integers(0, 9, size=(12, 4)), rng.normal(size=(12, 3))
    parallel.train_on_batch(x, y)
    graphs = _run_and_collect(parallel.tower_steps, "train", cut((x, y), Shares.alike(3)))[1]
    nodes = {node.name: node for graph in graphs for node in graph.node}
    sent = {node.input[0].partition(":")[0] for node in nodes.values() if node.op == "_Send"}
    rows = {name for name in sent if nodes[name].op in ("GatherV2", "ResourceGather")}
    assert len(rows) == 2
    awaited = [{name for name in node.input if name[0] == "^"} for name, node in nodes.items() if "tower_0/program" in name]
    assert any({f"^{name}" for name in rows} <= controls for controls in awaited)


@pytest.mark.parametrize("jit_compile", [True, "auto"])
def test_xla_compiles_each_tower_for_its_own_device_when_asked(jit_compile):
    """XLA compiles neither the sums between towers nor the whole step, which it would put on one device."""
    parallel = trained(jit_compile=jit_compile)
    convolutions = sum(node.op.startswith("Conv2D") for graph in graphs_of(parallel, 2) for node in graph.node)
    if jit_compile is True:
        assert programs(parallel, 2) == ([3, 3], [1, 0])
        assert convolutions == 0
        assert "operations on each tower, compiled by XLA, " in str(parallel.explain((X, Y)))
    else:
        assert programs(parallel, 2) == ([0, 0], [0, 0])
        assert convolutions == 4  # The forward one and the kernel's gradient, on each of two towers.


def growing(x):
    """Doubles the columns in a loop: XLA wants one shape in each round."""
    shapes = tf.TensorShape([]), tf.TensorShape([None, None])
    loop = tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, tf.concat([x, x**2], 1)), (0, x), shape_invariants=shapes)
    return tf.ensure_shape(loop[1], [None, 12])


def kept(x):
    """Keeps the positive numbers, whose count XLA does not know."""
    return x * tf.reduce_sum(tf.boolean_mask(x, x > 0)) + tf.cast(tf.size(tf.unique(tf.reshape(x > 0, [-1]))[0]), x.dtype)


def decomposed(x):
    """Is exact to 1e-15 in LAPACK. XLA approaches the result."""
    return x @ tf.linalg.svd(tf.transpose(x) @ x)[2]


def as_strings(x):
    """Goes through strings, which XLA does not have."""
    return x + tf.strings.to_number(tf.strings.as_string(x, precision=3), tf.float64)


def resized(x):
    """XLA has an error here in float64."""
    images = tf.image.resize(tf.reshape(x, [-1, 3, 1, 1]), [6, 2])
    return tf.reshape(tf.cast(images, x.dtype), [-1, 12])


def whole_rows(x):
    """Makes a shape of the number of rows, which a program would have to be compiled for."""
    rows = tf.shape(x)[0]
    return x * tf.cast(tf.fill([rows, 1], rows), x.dtype)


def norm_of_zeros(x):
    """Has a gradient of 0 in TensorFlow, and none in XLA."""
    rows = tf.cast(tf.range(tf.shape(x)[0]) % 2, x.dtype)[:, None]
    return x + tf.norm(x * rows, axis=1, keepdims=True) ** 2


def in_order(x):
    """Sorts zeros of both signs."""
    return x * tf.cast(tf.argsort(tf.round(x), axis=1, stable=True), x.dtype)


def as_long_as_a_number(x):
    """Counts up to a number that is known when the branch runs."""
    largest = tf.reduce_max(tf.abs(x))
    return x * tf.cond(largest > 0, lambda: tf.reduce_sum(tf.range(largest * 3)) / 10, lambda: largest)


def as_many_as_rounds(x):
    """Has a size that a loop finds from the number of rows."""
    (rounds,) = tf.while_loop(lambda i: i * i < tf.shape(x)[0], lambda i: (i + 1,), [tf.constant(0)])
    return x + tf.reduce_sum(tf.ones([rounds, 3], x.dtype), 0) / 10


OUTSIDE = [
    growing,
    as_many_as_rounds,
    kept,
    decomposed,
    as_strings,
    resized,
    whole_rows,
    norm_of_zeros,
    in_order,
    as_long_as_a_number,
]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("function", OUTSIDE)
def test_operations_that_xla_cannot_compile_run_beside_programs(function, devices):
    """Each is between two layers, so that each has a gradient to pass on."""

    def script(model):
        model.compile("sgd", "mse", jit_compile=isinstance(model, keras_dp.DataParallelModel))
        data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(9)
        return [model.fit(data, epochs=2, shuffle=False, verbose=0).history, model.predict(x, verbose=0)]

    x = rng.normal(size=(22, 3))

    def stack():
        return keras.Sequential([keras.Input((3,)), layers.Dense(3, "tanh"), layers.Lambda(function), layers.Dense(1)])

    assert_same_script(stack, script, devices)


class Lengthening(layers.Layer):
    """Keeps the mean of each batch that it has seen."""

    def build(self, input_shape):
        self.means = tf.Variable(tf.zeros([1], self.compute_dtype), shape=[None], trainable=False)

    def call(self, x):
        self.means.assign(tf.concat([self.means.read_value(), [tf.reduce_mean(x)]], 0))
        return x + tf.reduce_sum(self.means.read_value() ** 2)


class MeanUpTo(keras.metrics.MeanAbsoluteError):
    """Reads how far it counts from its own variable, in a branch of the update at home."""

    def result(self):
        mean = super().result()
        return tf.cond(mean > -1.0, lambda: tf.reduce_sum(tf.range(tf.abs(mean) * 9 + 3)), lambda: mean)


@pytest.mark.parametrize("devices", [1, 2])
def test_variables_that_change_their_shape_and_results_that_depend_on_values(devices):
    def stack():
        return keras.Sequential([keras.Input((3,)), Lengthening(), layers.Dense(1)])

    def script(model):
        model.compile("sgd", "mse", metrics=[MeanUpTo()], jit_compile=isinstance(model, keras_dp.DataParallelModel))
        return model.fit(x, x[:, 0], batch_size=5, shuffle=False, verbose=0).history

    x = rng.normal(size=(20, 3))
    assert_same_script(stack, script, devices)


def test_an_error_of_xla_says_how_to_train_without_it(monkeypatch):
    """Resizing is not compiled, since XLA refuses its gradient in float64."""
    monkeypatch.setattr(compilation, "_NOT_COMPILED", frozenset())
    stack = [layers.Dense(3, "tanh"), layers.Lambda(resized), layers.Dense(1)]
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((3,)), *stack]), devices=2)
    parallel.compile("adam", "mse", jit_compile=True)
    before = parallel.get_weights()
    with pytest.raises(tf.errors.OpError) as failure:
        parallel.train_on_batch(X[:, 0, 0, :1] * [1.0, 2.0, 3.0], Y[:, :1])
    assert "keras_dp: XLA failed in a program of this step. compile(..., jit_compile=False)" in "".join(failure.value.__notes__)
    assert largest_change(before, parallel.get_weights()) == 0


class Checked(keras.Sequential):
    def train_step(self, data):
        x = data[0]
        tf.debugging.assert_less(tf.reduce_max(tf.abs(x)), tf.constant(10.0, x.dtype), message="too large")
        return super().train_step(data)


def test_checks_fail_as_without_xla():
    """XLA leaves checks out, so that a step went on with what its check refuses."""
    parallel = keras_dp.DataParallelModel(Checked(build().layers), devices=2)
    parallel.compile("adam", "mse", jit_compile=True)
    parallel.train_on_batch(X, Y)
    before = parallel.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        parallel.train_on_batch(100 * X, Y)
    assert largest_change(before, parallel.get_weights()) == 0


def draw_in_a_loop(x):
    seed = tf.constant([3, 4])
    return tf.while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, x + tf.random.stateless_normal(tf.shape(x), seed + i, dtype=x.dtype)), (0, x)
    )[1]


def test_random_numbers_are_those_of_one_device_without_xla():
    """XLA draws other numbers: towers that it compiled once drew numbers that no single device draws."""
    x = rng.normal(size=(22, 3))
    stack = [lambda: layers.Dropout(0.5), lambda: layers.GaussianNoise(0.1), lambda: layers.Lambda(draw_in_a_loop)]

    def script(model):
        model.compile("sgd", "mse", jit_compile=isinstance(model, keras_dp.DataParallelModel))
        return model.fit(x, x[:, :1], batch_size=9, epochs=2, shuffle=False, verbose=0).history

    assert_same_script(lambda: keras.Sequential([keras.Input((3,)), *(make() for make in stack), layers.Dense(1)]), script, 3)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    """Half precision, loss scaling, batch normalization and dropout together, which keras-team/keras#20763 asks for."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    stack = [layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.3)]
    stack += [layers.GlobalAveragePooling2D(), layers.Dense(3, dtype="float32")]
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((8, 8, 2)), *stack]), devices=3)
    parallel.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
    x, y = X.astype("float32"), Y.astype("float32")
    parallel.fit(x, y, batch_size=9, verbose=0)
    scales = isinstance(parallel.inner_model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scales == (policy == "mixed_float16")
    found = keras_dp.check_step(parallel, (x, y))
    assert found.is_exact, found
    assert "compiled by XLA" in str(found)


def test_the_plain_model_of_spread_variables_runs_without_xla():
    """TensorFlow's XLA compiles no function whose variables are on several devices: docs/gpu.md tells what to do."""
    parallel = trained(parameter_device="sharded")
    expected = parallel.predict(X, verbose=0)
    model = parallel.inner_model
    with pytest.raises(tf.errors.InvalidArgumentError, match="Trying to access resource .* located in device"):
        model.predict(X, verbose=0)
    model.compile("sgd", "mse", jit_compile=False)
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, atol=1e-12)


class CompiledByTheUser(keras.Sequential):
    @tf.function(jit_compile=True)
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"own": loss}


def test_a_step_that_the_user_compiles_has_its_variables_on_one_device():
    """XLA's own error spoke of a resource, after the step had begun."""

    def fitted(**options):
        model = CompiledByTheUser([keras.Input((4,)), layers.Dense(8), layers.Dense(3)])
        parallel = keras_dp.DataParallelModel(model, devices=2, **options)
        parallel.compile("sgd")
        before = parallel.get_weights()
        try:
            return parallel.fit(np.ones((8, 4)), np.ones((8, 3)), verbose=0).history
        finally:
            assert (largest_change(before, parallel.get_weights()) > 0) == (not options)

    assert fitted()["own"][0] > 0
    with pytest.raises(ValueError, match=r"XLA compiles a function for one. Leave jit_compile out of.*CPU:0, CPU:1"):
        fitted(parameter_device="sharded")
