"""Each tower computes small values from all towers' parts by itself; what is large, random or has effects stays at home."""

import graphlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from partitioned_steps import DEVICES, HOME, agree, partitioned_step
from ways_of_wrapping import wrapped

from keras_dp.partition import step as steps
from keras_dp.partition.program import replication
from keras_dp.partition.tracing.names import source_of

ROWS = np.random.default_rng(4).normal(size=(7, 3))


def normalized(x):
    mean, variance = tf.nn.moments(x, 0)
    return (x - mean) * tf.math.rsqrt(variance + 1e-3)


def of_a_weighted_mean(x):
    weights = tf.abs(x[:, :1])
    return x * tf.math.divide_no_nan(tf.reduce_sum(weights * x, 0), tf.reduce_sum(weights))


def of_extremes(x):
    return (x - tf.reduce_min(x, 0)) / (tf.reduce_max(x, 0) - tf.reduce_min(x, 0))


def of_a_chain(x):
    for _ in range(3):
        x = x - tf.reduce_mean(x, 0)
        x = x / tf.sqrt(tf.reduce_sum(x**2, 0) + tf.reduce_max(x))
    return x


def of_a_known_integer(x):
    return x * tf.cast(tf.reduce_sum(tf.cast(x > 0, tf.int32)), x.dtype)


def beside_a_random_number(x):
    """Home draws the number once, and towers take it."""
    return x * (tf.reduce_sum(x, 0) + 0 * tf.random.uniform([], dtype=x.dtype))


def checked_first(x):
    total = tf.reduce_sum(x, 0)
    with tf.control_dependencies([tf.debugging.assert_less(total, 1e6 * tf.ones_like(total))]):
        return x - tf.identity(total)


def with_random_numbers(x):
    seed = tf.reduce_sum(tf.cast(x > 0, tf.int32), 0)[:2]
    return x * tf.random.stateless_uniform((3,), seed, dtype=x.dtype)


def of_a_factorization(x):
    """Not one of the operations that are known to give the same bits everywhere."""
    return x @ tf.linalg.inv(tf.transpose(x) @ x)


def of_a_large_sum(x):
    """Each part has 480 kB, which takes longer than a hop."""
    return x - tf.reduce_mean(tf.reduce_sum(x[:, :, None] * tf.ones((1, 3, 20_000), x.dtype), 0), 1)


def combined(step, monkeypatch, size=3, home=HOME):
    """Returns the result of a step, its graph, and the longest chains of copies between devices before and after."""
    found = []

    def run():
        specs = [tf.TensorSpec([None, size], tf.float64)]
        function, _ = partitioned_step(step, specs, [True], home=home, pack_copies=True)
        return function(tf.constant(ROWS)).numpy()

    with monkeypatch.context() as patched:
        patched.setattr(steps, "pack_copies", lambda written, *_: found.append(written))
        result = run()
        patched.setattr(steps, "with_replicated_sums", lambda program, *_: program)
        run()
    after, before = (longest_chain(written.function) for written in found)
    return result, found[0], before, after


def longest_chain(function):
    nodes = {node.name: node for node in function.node_def}
    sources = {name: [source_of(source) for source in node.input if source_of(source) in nodes] for name, node in nodes.items()}
    lengths = {}
    for name in graphlib.TopologicalSorter(sources).static_order():
        device = nodes[name].device
        ends = [lengths[source] + (nodes[source].device not in ("", device)) for source in sources[name]]
        lengths[name] = max(ends, default=0)
    return max(lengths.values())


HOMES = pytest.mark.parametrize("home", [HOME, DEVICES[0]])


@HOMES
@pytest.mark.parametrize(
    "step", [normalized, of_a_weighted_mean, of_extremes, of_a_chain, of_a_known_integer, beside_a_random_number]
)
def test_each_tower_combines_small_parts_by_itself(step, home, monkeypatch):
    result, written, before, after = combined(step, monkeypatch, home=home)
    np.testing.assert_allclose(result, step(tf.constant(ROWS)).numpy(), rtol=1e-12)
    assert before - after == (6 if step is of_a_chain else 1)
    combining = [node.name for node in written.function.node_def if node.op in ("Sum", "AddN", "Max", "Min")]
    assert {(written.towers | written.replicated).get(name) for name in combining} == {0, 1, 2}


@pytest.mark.parametrize(
    ("step", "size"),
    [(checked_first, 3), (with_random_numbers, 3), (of_a_factorization, 3), (of_a_large_sum, 3), (normalized, None)],
)
def test_all_else_is_combined_at_home(step, size, monkeypatch):
    """A sum of unknown size is, too."""
    result, written, before, after = combined(step, monkeypatch, size)
    np.testing.assert_allclose(result, step(tf.constant(ROWS)).numpy(), rtol=1e-9)
    assert before == after
    assert set(written.towers.values()) == {0, 1, 2}
    assert all(node.device.endswith(HOME) for node in written.function.node_def if node.name.startswith("sum/"))


def test_the_limit_decides_about_large_sums(monkeypatch):
    """A negative control: only its size keeps a large sum at home."""
    monkeypatch.setattr(replication, "_MOST_BYTES", 10_000_000)
    _, _, before, after = combined(of_a_large_sum, monkeypatch)
    assert after < before


@HOMES
def test_what_home_computes_after_a_write_is_not_what_the_tower_there_computes(home, monkeypatch):
    """The write waited for the towers, and the tower at home for a node of home that waits for the write."""
    moving = tf.Variable(np.zeros(3))

    def step(x):
        mean = tf.reduce_mean(x, 0)
        moving.assign(mean / 2)
        with tf.control_dependencies([moving.read_value()]):
            doubled = tf.identity(mean) * 2
        return tf.concat([x - doubled, [doubled]], 0)

    result, *_ = combined(step, monkeypatch, home=home)
    np.testing.assert_allclose(result, step(tf.constant(ROWS)).numpy(), rtol=1e-12)
    np.testing.assert_allclose(moving.numpy(), ROWS.mean(0) / 2, rtol=1e-12)


def test_home_keeps_only_what_it_needs(monkeypatch):
    """On a device without a tower, nothing of a relay is left, unless the result of the step is made of it."""

    def also_a_result(x):
        return tf.concat([normalized(x), tf.reduce_mean(x, 0, keepdims=True)], 0)

    for step, is_left in ((normalized, False), (also_a_result, True)):
        _, written, _, _ = combined(step, monkeypatch)
        nodes = written.function.node_def
        variances = [node.device[-1] for node in nodes if written.origins.get(node.name) == "moments/Squeeze_1"]
        assert variances == list("012")
        assert is_left == any(node.op == "Sum" and "CPU:3" in node.device for node in written.function.node_def)


def the_scale(x):
    return tf.math.rsqrt(tf.nn.moments(x, 0)[1] + 1e-3)


def sums_of_sums(x):
    return (tf.reduce_sum(tf.sin(x), 0) + tf.reduce_sum(x**2, 0)) / 3.0 + tf.reduce_sum(tf.exp(x), 0)


@HOMES
@pytest.mark.parametrize("value", [the_scale, sums_of_sums])
def test_all_towers_have_the_same_bits(value, home, monkeypatch):
    """Each row returns the value that its tower computes."""
    result, _, before, after = combined(lambda x: tf.zeros_like(x) + value(x), monkeypatch, home=home)
    assert after < before
    np.testing.assert_allclose(result[0], value(tf.constant(ROWS)), rtol=1e-12)
    assert len(np.unique(result, axis=0)) == 1


def of_norms(x):
    norms = [tf.sqrt(tf.reduce_sum(power(x), 0)) for power in (tf.square, tf.exp, tf.abs)]
    return tf.zeros_like(x) + tf.add_n(norms)


def test_no_order_depends_on_the_moment(monkeypatch):
    """AddN begins with an addend whose memory is free at that moment: towers that copy it would round otherwise, each time."""
    _, written, before, after = combined(of_norms, monkeypatch)
    assert [node.name for node in written.function.node_def if node.op == "AddN" and len(node.input) > 2] == []
    assert after < before


def test_a_long_chain_of_small_operations_is_no_deep_recursion():
    weights = tf.Variable(np.ones(3))

    def scaled(x):
        scale = tf.reduce_sum(weights) * 0 + 1.0
        for _ in range(400):
            scale = tf.sin(scale) + 1.0
        return x * (tf.abs(tf.reduce_sum(x, 0)) * scale)

    agree(scaled, [ROWS], pack_copies=True)


def test_towers_without_rows_give_no_second_copy_of_an_extreme():
    """TensorFlow's graph optimizer took the second tensor of a message, stacked with itself, for the first one."""
    agree(lambda x: (tf.reduce_max(x, 0), tf.reduce_max(2 * x, 0)), [ROWS[:1]], known_rows=1, pack_copies=True)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 prints no notes of TensorFlow's errors")
def test_an_error_in_what_towers_compute_in_place_of_home_names_no_tower():
    class Divides(keras.Model):
        def train_step(self, data):
            x = data[0]
            count = tf.reduce_sum(tf.cast(x[:, 0] > 1e9, tf.int64))
            return {"result": tf.reduce_sum(x * tf.cast(5 // count, x.dtype))}

    model = Divides(inputs=(inputs := keras.Input((3,))), outputs=keras.layers.Dense(1)(inputs))
    parallel = wrapped(model, devices=3, pack_copies=True)
    parallel.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError) as failed:
        parallel.train_on_batch(ROWS, ROWS)
    notes = "".join(failed.value.__notes__)
    assert "floordiv failed on all rows, for which it is computed once" in notes
    assert "failed on tower" not in notes
