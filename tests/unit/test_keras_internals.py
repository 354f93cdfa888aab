"""The private names of Keras that keras_dp uses exist, and have their known meaning."""

import ast
import functools
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
from tensorflow.python.eager import context
from worker_processes import free_ports

import keras_dp
from keras_dp.keras_internals import extension_types, keras_batch_norms, keras_models, keras_optimizers, tensorflow_runtime
from keras_dp.keras_internals.graph_optimizer import graph_optimizer

PACKAGE = Path(keras_dp.__file__).parent


def model():
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dropout(0.5)], name="inner")
    outer = keras.Sequential([keras.Input((3,)), inner, layers.BatchNormalization(), layers.Dense(2)])
    outer.compile("adam", "mse", metrics=["accuracy"])
    return outer


INTERNALS = {*PACKAGE.glob("keras_internals/*.py"), PACKAGE / "partition" / "tensorflow_internals.py"}
MODULES = sorted(set(PACKAGE.rglob("*.py")) - INTERNALS)


def names_defined(tree):
    """Yields the names of functions and classes, of attributes that are set, and of annotated names in classes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def private_names(tree, own):
    """Yields the private modules that a module imports, and the private names that it touches and keras_dp does not define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (name for name in names if name.startswith(("keras.src", "tensorflow.python")))
        is_private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if is_private and node.attr not in own:
            yield node.attr


def test_private_names_are_touched_in_their_modules_alone():
    """In other modules, names with an underscore are defined by keras_dp, or are public names of named tuples."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}
    own = {name for tree in trees.values() for name in names_defined(tree)} | {"_asdict", "_fields", "_replace"}
    assert [(path, name) for path, tree in trees.items() for name in private_names(tree, own)] == []
    program = ast.parse("from keras.src import layers\nx._private_of_keras")
    assert list(private_names(program, own)) == ["keras.src", "_private_of_keras"]


def test_flatten_layers_and_is_built():
    names = [type(layer).__name__ for layer in keras_models.flatten_layers(model())]
    assert names.count("Sequential") == 2
    assert {"Dense", "Dropout", "BatchNormalization"} <= set(names)
    assert keras_models.is_built(model())
    assert not keras_models.is_built(keras.Sequential([layers.Dense(1)]))


def test_xla_that_was_asked_for_differs_from_keras_choice_on_gpus(monkeypatch):
    compiled, asked = model(), model()
    asked.compile("adam", "mse", jit_compile=True)
    assert [keras_models.was_told_to_use_xla(one) for one in (compiled, asked)] == [False, True]
    gpus = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: gpus)
    compiled.compile("adam", "mse")
    assert compiled.jit_compile
    assert not keras_models.was_told_to_use_xla(compiled)


def test_seed_states_move_with_random_operations():
    outer = model()
    keras.utils.set_random_seed(0)
    assert len(keras_models.seed_states(outer)) == 1  # The seed of the dropout.
    keras.random.normal((2,))
    states = keras_models.seed_states(outer)
    assert len(states) == 2  # That of operations without a seed, too, which made it.
    before = [state.numpy().tolist() for state in states]
    outer(np.ones((2, 3)), training=True)
    assert states[0].numpy().tolist() == [before[0][0], before[0][1] + 1]
    keras.random.normal((2,))
    assert states[1].numpy().tolist() != before[1]


def test_moments_are_replaced_in_one_thread_and_put_back():
    layer, of_another_thread = layers.BatchNormalization(momentum=0.5), layers.BatchNormalization()
    layer.build((None, 3)), of_another_thread.build((None, 3))
    assert keras_batch_norms.reduction_axes(layer) == [0]
    ones = tf.ones(3, tf.float64)
    with keras_batch_norms.replaced_moments(lambda layer, inputs, mask: (ones, 4 * ones)):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(of_another_thread, np.zeros((2, 3)), training=True).result()
        layer(np.zeros((2, 3)), training=True)
    assert of_another_thread.moving_mean.numpy().tolist() == [0.0] * 3
    assert layer.moving_mean.numpy().tolist() == [0.5] * 3
    assert layer.moving_variance.numpy().tolist() == [2.5] * 3
    mean, variance = keras_batch_norms.own_moments(layer, tf.constant([[1.0] * 3, [3.0] * 3]), None)
    assert (float(mean[0]), float(variance[0])) == (2.0, 1.0)
    keras_batch_norms.update_moving_statistics(layer, ones, ones)
    assert layer.moving_mean.numpy().tolist() == [0.75] * 3


def test_variables_move_and_optimizers_find_them_again():
    moved = model()
    moved.optimizer.exclude_from_weight_decay(var_list=moved.trainable_variables[:1])
    moved.optimizer.build(moved.trainable_variables)
    variable, other, *_ = moved.trainable_variables
    value = variable.numpy()
    keras_models.move_variable(variable, "CPU:3")
    assert variable.value.device.endswith("CPU:3")
    np.testing.assert_array_equal(variable.numpy(), value)
    moved.optimizer.apply([tf.ones_like(v) for v in moved.trainable_variables], moved.trainable_variables)
    assert (variable.numpy() < value).all()
    assert [keras_optimizers.decays(moved.optimizer, one) for one in (variable, other)] == [False, True]


def test_functions_follow_variables():
    """So do functions of a layer and of a program, wherever these keep them, and what they call; none is traced again."""

    class Layer(layers.Layer):
        def __init__(self):
            super().__init__()
            self.weight = self.add_weight(shape=(), initializer="ones")
            self.attribute = tf.function(lambda x: x * self.read())
            self.parts = [functools.partial(tf.function(lambda factor, x: factor * x * self.read()), 2.0)]
            self.traces = 0

        def read(self):
            self.traces += 1
            return tf.identity(self.weight)

        @tf.function
        def method(self, x):
            return self.attribute(x) + self.read()

    def gradient():
        with tf.GradientTape() as tape:
            result = layer.method(x)
        return tape.gradient(result, layer.weight)

    layer, x = Layer(), tf.constant(2.0, tf.float64)
    concrete = tf.function(lambda x: x - layer.read()).get_concrete_function(x)
    assert (layer.method(x), gradient(), layer.parts[0](x), concrete(x)) == (3, 3, 4, 1)
    old = layer.weight.value
    keras_models.move_variable(layer.weight, "CPU:3")
    keras_models.follow_moved({id(old.handle): layer.weight.value})
    del old
    layer.weight.assign(5.0)
    assert (layer.method(x), layer.attribute(x), gradient()) == (15, 10, 3)
    assert (layer.parts[0](x), concrete(x)) == (20, -3)
    assert layer.traces == 4
    assert layer.method.get_concrete_function(x).variables == (layer.weight.value,)


def test_accumulators_weight_decay_and_velocities():
    """Velocities are those that hold the learning rate; coupled weight decay is left to the update."""
    variables = [keras.Variable([1.0]), keras.Variable([1.0])]
    variables[1].overwrite_with_gradient = True
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=3)
    for gradient in ([2.0], [3.0]):
        optimizer.apply([gradient, gradient], variables)
    (accumulator,) = keras_optimizers.accumulators(optimizer)
    assert accumulator.numpy() == [5.0]

    weight = keras.Variable([1.0])
    keras_optimizers.SGDWithCoupledWeightDecay(0.5, weight_decay=0.5).apply([[0.0]], [weight])
    assert weight.numpy() == [1.0]
    keras.optimizers.SGD(0.5, weight_decay=0.5).apply([[0.0]], [weight])
    assert weight.numpy() == [0.75]

    variables = [keras.Variable([1.0, 2.0])]
    for optimizer in (keras.optimizers.SGD(0.5, momentum=0.5), keras.optimizers.RMSprop(0.5, momentum=0.5)):
        assert keras_optimizers.velocities(optimizer) == []
        optimizer.apply([[1.0, 1.0]], variables)
        (velocity,) = keras_optimizers.velocities(optimizer)
        assert np.abs(velocity.numpy()).min() > 0.1
    assert keras_optimizers.velocities(keras.optimizers.SGD(0.5)) == []
    assert keras_optimizers.velocities(keras.optimizers.Adam()) is None


def test_schedules_see_every_batch():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=2)
    assert keras_optimizers.learning_rate_schedule(optimizer) is schedule
    assert keras_optimizers.learning_rate_schedule(keras.optimizers.SGD(0.1)) is None
    rates = [0.1, schedule, lambda: 0.1]
    assert [keras_optimizers.has_learning_rate_variable(keras.optimizers.SGD(rate)) for rate in rates] == [True, False, False]
    weight = keras.Variable([1.0])
    for batches in range(3):
        assert int(keras_optimizers.batches_seen(optimizer)) == batches
        assert float(optimizer.learning_rate) == float(schedule(batches))
        optimizer.apply([[1.0]], [weight])


def test_optimizer_state_is_found_for_each_weight():
    weights = model().trainable_variables
    many = keras.optimizers.Adam(amsgrad=True, use_ema=True, gradient_accumulation_steps=2)
    for optimizer in (many, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.9))):
        optimizer.build(weights)
        pairs = keras_optimizers.optimizer_state(optimizer)
        assert {id(weight) for _, weight in pairs} == set(map(id, weights))
        assert all(variable.shape == weight.shape for variable, weight in pairs)
        # Every variable that is no scalar belongs to a weight.
        assert {id(variable) for variable, _ in pairs} == {id(one) for one in optimizer.variables if one.shape != ()}


def test_reduced_gradients_are_passed_through_no_operation():
    weights = [keras.Variable(np.ones(2)), keras.Variable(np.ones(3))]
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.build(weights)

    def types():
        apply = tf.function(lambda gradients: optimizer.apply(gradients, weights))
        return {operation.type for operation in apply.get_concrete_function([np.ones(2), np.ones(3)]).graph.get_operations()}

    assert "IdentityN" in types(), "Keras does not reduce gradients any more: reduced_gradients can go"
    with keras_optimizers.reduced_gradients(optimizer):
        assert "IdentityN" not in types()


def test_fit_begins_with_the_epoch_that_a_callback_wants():
    class Begins(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            assert keras_models.initial_epoch(self.model) is None
            keras_models.set_initial_epoch(self.model, 2)

    def epochs(*callbacks):
        return small.fit(np.ones((4, 3)), np.ones((4, 1)), epochs=4, verbose=0, callbacks=callbacks).epoch

    small = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    small.compile("sgd", "mse")
    assert epochs(Begins()) == [2, 3]
    keras_models.set_initial_epoch(small, None)
    assert epochs() == [0, 1, 2, 3]


@pytest.mark.processes
def test_tensorflows_server_and_collectives():
    """A separate process, as one worker, runs collectives, which then fail with a reason."""
    script = """
import sys
import grpc
import tensorflow as tf
from keras_dp.keras_internals import tensorflow_runtime
from keras_dp.workers import health_check

address = sys.argv[1]
jobs = {"worker": [address]}
tensorflow_runtime.start_server(jobs, "worker", 0, leader="/job:worker/replica:0/task:0")
arguments = {"group_size": 1, "group_key": 1, "communication_hint": "ring", "timeout_seconds": 20.0, "ordering_token": []}

def collect(instance_key):
    x = tf.constant([1.0, 2.0])
    total = tf.raw_ops.CollectiveReduceV2(input=x, instance_key=instance_key, merge_op="Add", final_op="Id", **arguments)
    return total.numpy().tolist(), tf.raw_ops.CollectiveGatherV2(input=x, instance_key=instance_key + 1, **arguments).device

total, device = collect(1)
assert total == [1.0, 2.0]
assert device.startswith("/job:worker/replica:0/task:0"), device

# What the other workers ask.
with grpc.insecure_channel(address, health_check._OPTIONS) as channel:
    answers = [channel.unary_unary(health_check._STATUS)(b"", timeout=10) for _ in range(2)]
assert answers[0] == answers[1] != b"", answers
others = health_check.HealthCheck(["127.0.0.1:1", address], 0, 10.0)
others.wait_for_all(10.0)
others.stop()

tensorflow_runtime.abort_collectives("Worker 1 is lost")
try:
    collect(3)
except tf.errors.UnavailableError as error:
    assert "Worker 1 is lost" in error.message, error
else:
    print("the collectives go on")
"""
    (port,) = free_ports(1)
    command = [sys.executable, "-W", "ignore", "-c", script, f"127.0.0.1:{port}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_a_server_is_not_started_after_tensorflow():
    tf.constant(1.0)
    with pytest.raises(RuntimeError, match="must be configured at program startup"):
        tensorflow_runtime.start_server({"worker": ["127.0.0.1:1"]}, "worker", 0, leader="/job:worker/replica:0/task:0")


def test_kernels_of_gpus_and_definitions_of_operations_are_known_without_gpus():
    kernels = {kernel.device_type: kernel for kernel in tensorflow_runtime.registered_kernels("Reshape")}
    assert {"CPU", "GPU"} <= kernels.keys() | {"GPU" for kind in kernels if kind == "DEFAULT"}
    assert any("shape" in kernel.host_memory_arg for kernel in kernels.values())
    assert {kernel.device_type for kernel in tensorflow_runtime.registered_kernels("AsString")} == {"CPU"}
    definition = tensorflow_runtime.definition_of("ConcatV2")
    assert [(argument.name, argument.number_attr) for argument in definition.input_arg] == [("values", "N"), ("axis", "")]
    assert tensorflow_runtime.definition_of("There is no such operation") is None


def test_virtual_clusters_count_arithmetic_and_bytes():
    concrete = tf.function(lambda x: tf.matmul(x, x)).get_concrete_function(tf.TensorSpec([8, 8]))
    graph = concrete.graph.as_graph_def(add_shapes=True)
    name = "/job:localhost/replica:0/task:0/device:CPU:0"
    for node in graph.node:
        node.device = name
    device = {"type": "CPU", "num_cores": 1, "frequency": 1, "bandwidth": 1000}
    cluster = tensorflow_runtime.VirtualCluster(graph, [graph.node[-1].name], {name: device})
    costs, seconds = cluster.run()
    (product,) = [cost for cost in costs if cost.op.op == "MatMul"]
    assert (product.compute_time, product.memory_time) == (1000 * 2 * 8**3, 1000 * 3 * 4 * 8**2)
    assert list(product.op_memory.output_memory) == [4 * 8**2]
    assert seconds >= 1e-6 * 2 * 8**3


def test_a_dataset_before_its_prefetch():
    numbers = tf.data.Dataset.range(5)
    source, ahead = tensorflow_runtime.before_prefetch(numbers.prefetch(3))
    assert list(source.as_numpy_iterator()) == list(numbers.as_numpy_iterator())
    assert ahead == 3
    assert tensorflow_runtime.before_prefetch(numbers.prefetch(tf.data.AUTOTUNE))[1] == tf.data.AUTOTUNE
    assert tensorflow_runtime.before_prefetch(numbers.prefetch(3).take(2)) is None


def test_extension_types_are_taken_apart_and_put_together():
    class Rows(tf.experimental.ExtensionType):
        several: tuple[tf.Tensor, ...]
        by_name: Mapping[str, tf.Tensor]
        ragged: tf.RaggedTensor

    def of_rows(rows):
        return Rows((tf.ones([rows, 2]),), {"b": tf.ones([rows]), "a": tf.ones([rows, 3])}, tf.ragged.range(tf.range(rows)))

    def components(one):
        return [component for _, component in extension_types.components_of(one)]

    specs = {rows: tf.type_spec_from_value(of_rows(rows)) for rows in (3, 5)}
    for one in (of_rows(3), specs[3]):
        assert extension_types.is_extension_type(one)
        paths = ["/".join(path) for path, _ in extension_types.components_of(one)]
        assert paths == ["several/0", "by_name/a", "by_name/b", "ragged"]
        made = extension_types.with_components(one, components(of_rows(5)))
        assert isinstance(made, Rows)
        assert tf.type_spec_from_value(made) == specs[5]
        assert extension_types.with_components(one, components(specs[5])) == specs[5]
    assert not any(map(extension_types.is_extension_type, (tf.ones(2), None, tf.TensorSpec([]), tf.ragged.range(3), 1, int)))


def told_to_functions():
    """Returns what functions that this thread calls are told of two options of the graph optimizer."""
    config = tf.compat.v1.ConfigProto.FromString(context.context().function_call_options.config_proto_serialized)
    options = config.graph_options.rewrite_options
    return options.remapping, options.disable_meta_optimizer


def test_options_of_the_graph_optimizer_are_those_of_one_thread_for_a_time():
    before = tf.config.optimizer.get_experimental_options()
    with graph_optimizer(remapping=False, disable_meta_optimizer=True):
        assert told_to_functions() == (RewriterConfig.OFF, True)
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(told_to_functions).result() == (RewriterConfig.DEFAULT, False)
        with graph_optimizer(remapping=True):
            assert told_to_functions() == (RewriterConfig.ON, True)
        assert told_to_functions() == (RewriterConfig.OFF, True)
    assert told_to_functions() == (RewriterConfig.DEFAULT, False)
    assert tf.config.optimizer.get_experimental_options() == before


@pytest.mark.parametrize("jit_compile", [False, True])
def test_steps_and_reports_leave_the_random_numbers_of_other_functions_alone(jit_compile):
    """They set an option of the graph optimizer to its default, which had not been set, and all functions began again."""
    keras.utils.set_random_seed(1)
    draw = tf.function(lambda: tf.random.normal(()))
    x, y = np.ones((4, 2)), np.ones((4, 1))
    draws = [float(draw()), float(draw())]
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((2,)), layers.Dense(1)]), devices=2)
    parallel.compile("sgd", "mse", jit_compile=jit_compile)
    for call in (parallel.train_on_batch, lambda x, y: parallel.report((x, y)), parallel.test_on_batch):
        call(x, y)
        draws += [float(draw()), float(draw())]
    assert len(set(draws)) == 8
