"""A large table is looked up, and bags of its entries combined, where it lives: what is sent grows with the batch alone."""

import keras
import numpy as np
import pytest
from comparison import assert_same_training
from keras import layers, ops

import keras_dp

LENGTH, WIDTH = 5, 4
rng = np.random.default_rng(0)


def build(vocabulary, times=1, is_tied=False):
    tokens = keras.Input((LENGTH,), dtype="int32")
    table = layers.Embedding(vocabulary, WIDTH)
    found = ops.tanh(sum(table(tokens) for _ in range(times)))
    outputs = layers.Dense(2)(layers.Dropout(0.2)(layers.Flatten()(found)))
    if is_tied:
        outputs = ops.sum(found @ ops.transpose(table.embeddings), -1, keepdims=True)[:, 0] + outputs
    return keras.Model(tokens, outputs)


def batch(vocabulary, rows, length=LENGTH):
    return rng.integers(vocabulary, size=(rows, length)), rng.normal(size=(rows, 2))


def report(model, *of_batch, optimizer="sgd"):
    parallel = keras_dp.DataParallelModel(model, devices=3)
    parallel.compile(optimizer, "mse")
    return keras_dp.communication_report(parallel, batch(*of_batch))


def sent(vocabulary, rows=9, optimizer="sgd", **model):
    found = report(build(vocabulary, **model), vocabulary, rows, optimizer=optimizer)
    return found.bytes_of("weights"), found.total_bytes


def table_bytes(vocabulary):
    return vocabulary * WIDTH * 8


@pytest.mark.parametrize(
    ("optimizer", "arguments"), [("sgd", {}), ("adam", {"parameter_device": "sharded"}), ("rmsprop", {"pack_copies": True})]
)
def test_a_large_table_trains_as_on_one_device(optimizer, arguments):
    data = [(batch(400, rows), 4) for rows in (11, 2)]
    assert_same_training(lambda: build(400), lambda: {"optimizer": optimizer, "loss": "mse"}, data, 3, arguments)


def test_bytes_grow_with_the_batch_and_not_with_the_table():
    small, large, more_rows = sent(2_000), sent(20_000), sent(20_000, rows=90)
    assert small == large
    assert large[1] < table_bytes(20_000) / 20
    assert large[0] < more_rows[0] < table_bytes(20_000)
    # The rows of a sparse gradient and their indices are sent, and not their squares beside them.
    for optimizer in ("adam", "rmsprop"):
        assert sent(2_000, optimizer=optimizer)[1] <= small[1], optimizer


def test_a_small_table_is_sent_once_for_all_lookups():
    """Each of 3 towers would get 30 * 5 entries from a table of 20."""
    dense = (LENGTH * WIDTH * 2 + 2) * 8
    for times in (1, 2):
        assert sent(20, rows=90, times=times)[0] == 2 * (table_bytes(20) + dense), f"{times} lookups"


def test_a_table_that_is_multiplied_as_well_is_sent_once():
    """The product needs the whole table on each tower, so that the lookup has it there, too."""
    assert_same_training(lambda: build(400, is_tied=True), lambda: {"optimizer": "sgd", "loss": "mse"}, [(batch(400, 9), 4)], 3)
    assert sent(400, is_tied=True)[1] < 4.5 * table_bytes(400)


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


# Bags are combined where their table is, and their gradients repeated there: one entry a bag is sent.


VOCABULARY = 2_000


def table(**arguments):
    return layers.Embedding(VOCABULARY, WIDTH, **arguments)


def mean(tokens):
    return layers.GlobalAveragePooling1D()(table()(tokens))


def masked_mean(tokens):
    return layers.GlobalAveragePooling1D()(table(mask_zero=True)(tokens))


def weighted_sum(tokens):
    """Weighs the entries by numbers that are computed from the rows."""
    weights = ops.expand_dims(ops.cast(tokens % 7, keras.config.floatx()) / 7, -1)
    return ops.sum(table()(tokens) * weights, axis=1)


def largest(tokens):
    return layers.GlobalMaxPooling1D()(table()(tokens))


def of_two_fields(tokens):
    """Two bags from one table, and a third one from another."""
    one, other = table(), table()
    return layers.Concatenate()([ops.mean(one(tokens), 1), ops.sum(one(tokens[:, :9]), 1), ops.mean(other(tokens[:, 5:]), 1)])


def regularized_mean(tokens):
    """Takes the entries for something else, too, so that they are sent."""
    return layers.GlobalAveragePooling1D()(layers.ActivityRegularization(0.1)(table()(tokens)))


def build_bags(bag, length=30):
    tokens = keras.Input((length,), dtype="int32")
    return keras.Model(tokens, layers.Dense(2)(layers.Dropout(0.2)(bag(tokens))))


# With the lengths of the bags of two data sets.
BAGS = [
    (mean, (30, 12), {}),
    (masked_mean, (30, 12), {"parameter_device": "sharded"}),
    (weighted_sum, (30, 30), {}),
    (largest, (30, 30), {}),
    (of_two_fields, (30, 30), {"pack_copies": True}),
    (regularized_mean, (30, 30), {}),
]


@pytest.mark.parametrize(("bag", "lengths", "arguments"), BAGS)
def test_bags_train_as_on_one_device(bag, lengths, arguments):
    data = [(batch(VOCABULARY, rows, length), 4) for rows, length in zip((11, 2), lengths, strict=True)]
    length = lengths[0] if lengths[0] == lengths[1] else None
    assert_same_training(lambda: build_bags(bag, length), lambda: {"optimizer": "adam", "loss": "mse"}, data, 3, arguments)


@pytest.mark.parametrize("bag", [mean, weighted_sum, regularized_mean])
def test_one_entry_a_bag_is_sent(bag):
    """So bags that grow by 170 entries add indices, and masks or weights of one number an entry. An entry has 32 bytes."""
    grown = 0
    for sign, length in ((1, 200), (-1, 30)):
        found = report(build_bags(bag, length), VOCABULARY, 12, length, optimizer="adam")
        grown += sign * (found.total_bytes - found.bytes_of("inputs"))
    if bag is regularized_mean:
        assert grown >= 8 * 170 * WIDTH * 8
    else:
        assert grown <= 8 * 170 * 24
