"""Bags of entries of a large table are combined where it lives, and their gradients repeated there: one entry a bag is sent."""

import keras
import numpy as np
import pytest
from comparison import assert_same_training
from keras import layers, ops

import keras_dp

VOCABULARY, WIDTH, LENGTH = 2_000, 4, 30
rng = np.random.default_rng(0)


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


def mean(tokens):
    return layers.GlobalAveragePooling1D()(layers.Embedding(VOCABULARY, WIDTH)(tokens))


def regularized_mean(tokens):
    """Takes the entries for something else, too, so that they are sent."""
    found = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    return layers.GlobalAveragePooling1D()(layers.ActivityRegularization(0.1)(found))


BAGS = [mean, masked_mean, weighted_sum, largest, of_two_fields, regularized_mean]


def build(bag, length=LENGTH):
    tokens = keras.Input((length,), dtype="int32")
    return keras.Model(tokens, layers.Dense(2)(layers.Dropout(0.2)(bag(tokens))))


def batch(rows, length=LENGTH):
    return rng.integers(VOCABULARY, size=(rows, length)), rng.normal(size=(rows, 2))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("bag", BAGS)
def test_bags_train_as_on_one_device(bag, optimizer):
    data = [(batch(rows), 4) for rows in (11, 2)]
    assert_same_training(lambda: build(bag), lambda: {"optimizer": optimizer, "loss": "mse"}, data, 3)


@pytest.mark.parametrize("arguments", [{"pack_copies": True}, {"parameter_device": "sharded"}], ids=lambda a: "-".join(a))
@pytest.mark.parametrize("bag", [masked_mean, of_two_fields])
def test_bags_train_so_however_they_are_sent(bag, arguments):
    data = [(batch(rows), 4) for rows in (11, 2)]
    assert_same_training(lambda: build(bag), lambda: {"optimizer": "adam", "loss": "mse"}, data, 3, arguments)


@pytest.mark.parametrize("bag", [mean, masked_mean, weighted_sum])
def test_bags_of_any_length_train_as_on_one_device(bag):
    data = [(batch(rows, length), 4) for rows, length in ((11, 30), (8, 12))]
    assert_same_training(lambda: build(bag, None), lambda: {"optimizer": "adam", "loss": "mse"}, data, 3)


def sent(bag, length, optimizer="adam"):
    """Returns the bytes of weights, gradients and other tensors that are sent in a step of 12 rows on 3 towers."""
    parallel = keras_dp.DataParallelModel(build(bag, length), devices=3)
    parallel.compile(optimizer, "mse")
    report = keras_dp.communication_report(parallel, batch(12, length))
    return report.total_bytes - report.bytes_of("inputs")


@pytest.mark.parametrize("bag", [mean, masked_mean, weighted_sum])
def test_one_entry_a_bag_is_sent(bag):
    """The bags grow by 170 entries of 32 bytes. Their indices, and masks or weights of one number an entry, are still sent."""
    more = sent(bag, 200) - sent(bag, 30)
    assert more <= 8 * 170 * 24


def test_entries_that_something_else_takes_are_sent():
    more = sent(regularized_mean, 200) - sent(regularized_mean, 30)
    assert more >= 8 * 170 * WIDTH * 8
