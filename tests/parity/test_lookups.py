"""A large table is looked up where it lives: what is sent grows with the batch, not with the table."""

import keras
import numpy as np
import pytest
from comparison import assert_same_training
from keras import layers, ops

import keras_dp

LENGTH, WIDTH = 5, 4
rng = np.random.default_rng(0)


def build(vocabulary, optimizer="adam", times=1, is_tied=False):
    """Builds a model that looks up each of the tokens in a table, and may also multiply by the whole table."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    table = layers.Embedding(vocabulary, WIDTH)
    found = ops.tanh(sum(table(tokens) for _ in range(times)))
    outputs = layers.Dense(2)(layers.Dropout(0.2)(layers.Flatten()(found)))
    if is_tied:
        outputs = ops.sum(found @ ops.transpose(table.embeddings), -1, keepdims=True)[:, 0] + outputs
    return keras.Model(tokens, outputs)


def batch(vocabulary, rows):
    return rng.integers(vocabulary, size=(rows, LENGTH)), rng.normal(size=(rows, 2))


def sent(vocabulary, rows=9, num_towers=3, optimizer="sgd", **model):
    """Returns the bytes of weights that are sent in a step, and all bytes."""
    parallel = keras_dp.DataParallelModel(build(vocabulary, **model), devices=num_towers)
    parallel.compile(optimizer, "mse")
    report = keras_dp.communication_report(parallel, batch(vocabulary, rows))
    return report.bytes_of("weights"), report.total_bytes


def table_bytes(vocabulary):
    return vocabulary * WIDTH * 8


@pytest.mark.parametrize(
    ("optimizer", "arguments"), [("sgd", {}), ("adam", {"parameter_device": "sharded"}), ("rmsprop", {"pack_copies": True})]
)
def test_a_large_table_trains_as_on_one_device(optimizer, arguments):
    vocabulary = 400
    data = [(batch(vocabulary, rows), 4) for rows in (11, 2)]
    assert_same_training(lambda: build(vocabulary), lambda: {"optimizer": optimizer, "loss": "mse"}, data, 3, arguments)


def test_bytes_grow_with_the_batch_and_not_with_the_table():
    small, large, more_rows = sent(2_000), sent(20_000), sent(20_000, rows=90)
    assert small == large
    assert large[1] < table_bytes(20_000) / 20
    assert large[0] < more_rows[0] < table_bytes(20_000)


def test_a_small_table_is_sent_once_for_all_lookups():
    """Each of 3 towers would get 30 * 5 entries from a table of 20."""
    dense = (LENGTH * WIDTH * 2 + 2) * 8
    for times in (1, 2):
        assert sent(20, rows=90, times=times)[0] == 2 * (table_bytes(20) + dense), f"{times} lookups"


def test_a_table_that_is_multiplied_as_well_is_sent_once():
    """The product needs the whole table on each tower, so that the lookup has it there, too."""
    vocabulary = 400
    data = [(batch(vocabulary, 9), 4)]
    assert_same_training(lambda: build(vocabulary, is_tied=True), lambda: {"optimizer": "sgd", "loss": "mse"}, data, 3)
    assert sent(vocabulary, is_tied=True)[1] < 4.5 * table_bytes(vocabulary)


@pytest.mark.parametrize(("batch_size", "is_sent"), [(6, False), (90, True)])
def test_fit_knows_the_rows_of_batches_of_any_number(batch_size, is_sent):
    """100 rows in batches of 6 or 90 are traced for any number of rows. A table of 60 entries lies between their entries."""
    parallel = keras_dp.DataParallelModel(build(60), devices=3)
    parallel.compile("sgd", "mse")
    x, y = batch(60, 100)
    parallel.fit(x, y, batch_size=batch_size, verbose=0)
    partition = parallel.tower_steps.partition("train")
    lookups = {node.name for node in partition.traced.nodes if node.op.endswith(("Gather", "GatherV2"))}
    looked_up = [node for node, traced in partition.origins.items() if traced in lookups and "embedding" in traced]
    assert len(looked_up) == 3
    assert all((node in partition.towers) == is_sent for node in looked_up)


def test_the_squares_of_a_sparse_gradient_are_not_sent_beside_it():
    """The rows of the gradient and their indices are sent, and nothing more: no more than for SGD."""
    most = sent(2_000)[1]
    assert sent(2_000, optimizer="adam")[1] <= most
    assert sent(2_000, optimizer="rmsprop")[1] <= most
