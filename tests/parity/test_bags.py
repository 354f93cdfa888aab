"""Bags of entries of a large table are combined where it lives, and their gradients repeated there: one entry a bag is sent."""

import keras
import numpy as np
import pytest
from comparison import assert_same_training
from keras import layers, ops

import keras_dp

VOCABULARY, WIDTH, LENGTH = 2_000, 4, 30
rng = np.random.default_rng(0)


def mean(tokens):
    return layers.GlobalAveragePooling1D()(layers.Embedding(VOCABULARY, WIDTH)(tokens))


def masked_mean(tokens):
    return layers.GlobalAveragePooling1D()(layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)(tokens))


def weighted_sum(tokens):
    """Weighs the entries by numbers that are computed from the rows."""
    weights = ops.expand_dims(ops.cast(tokens % 7, keras.config.floatx()) / 7, -1)
    return ops.sum(layers.Embedding(VOCABULARY, WIDTH)(tokens) * weights, axis=1)


def largest(tokens):
    return layers.GlobalMaxPooling1D()(layers.Embedding(VOCABULARY, WIDTH)(tokens))


def of_two_fields(tokens):
    """Two bags from one table, and a third one from another."""
    table, other = layers.Embedding(VOCABULARY, WIDTH), layers.Embedding(VOCABULARY, WIDTH)
    bags = [ops.mean(table(tokens), 1), ops.sum(table(tokens[:, :9]), 1), ops.mean(other(tokens[:, 5:]), 1)]
    return layers.Concatenate()(bags)


def regularized_mean(tokens):
    """Takes the entries for something else, too, so that they are sent."""
    found = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    return layers.GlobalAveragePooling1D()(layers.ActivityRegularization(0.1)(found))


def build(bag, length=LENGTH):
    tokens = keras.Input((length,), dtype="int32")
    return keras.Model(tokens, layers.Dense(2)(layers.Dropout(0.2)(bag(tokens))))


def batch(rows, length=LENGTH):
    return rng.integers(VOCABULARY, size=(rows, length)), rng.normal(size=(rows, 2))


@pytest.mark.parametrize(
    ("bag", "optimizer", "arguments"),
    [
        (masked_mean, "sgd", {}),
        (masked_mean, "adam", {"parameter_device": "sharded"}),
        (weighted_sum, "adam", {}),
        (largest, "sgd", {}),
        (of_two_fields, "sgd", {}),
        (of_two_fields, "adam", {"pack_copies": True}),
        (regularized_mean, "adam", {}),
    ],
)
def test_bags_train_as_on_one_device(bag, optimizer, arguments):
    data = [(batch(rows), 4) for rows in (11, 2)]
    assert_same_training(lambda: build(bag), lambda: {"optimizer": optimizer, "loss": "mse"}, data, 3, arguments)


@pytest.mark.parametrize("bag", [mean, masked_mean])
def test_bags_of_any_length_train_as_on_one_device(bag):
    data = [(batch(rows, length), 4) for rows, length in ((11, 30), (8, 12))]
    assert_same_training(lambda: build(bag, None), lambda: {"optimizer": "adam", "loss": "mse"}, data, 3)


def growth(bag):
    """Returns by how many bytes a step of 12 rows on 3 towers sends more, but for inputs, if bags grow by 170 entries."""
    sent = {}
    for length in (30, 200):
        parallel = keras_dp.DataParallelModel(build(bag, length), devices=3)
        parallel.compile("adam", "mse")
        report = keras_dp.communication_report(parallel, batch(12, length))
        sent[length] = report.total_bytes - report.bytes_of("inputs")
    return sent[200] - sent[30]


@pytest.mark.parametrize("bag", [mean, weighted_sum])
def test_one_entry_a_bag_is_sent(bag):
    """An entry has 32 bytes. Indices of entries, and masks or weights of one number an entry, are still sent."""
    assert growth(bag) <= 8 * 170 * 24


def test_entries_that_something_else_takes_are_sent():
    assert growth(regularized_mean) >= 8 * 170 * WIDTH * 8
