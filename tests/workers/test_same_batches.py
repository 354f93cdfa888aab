"""Workers compare digests of their global batches, and report different ones."""

import numpy as np
import pytest
import tensorflow as tf
from worker_threads import on_workers

from keras_dp.batches import same_batches
from keras_dp.batches.same_batches import SAMPLED_ELEMENTS, DifferentBatches, digest

rng = np.random.default_rng(0)
ROWS = rng.normal(size=(5, 3))
RAGGED = tf.ragged.constant([[1, 2], [3], [4, 5, 6], [], [7]])

BATCHES = {
    "float32": lambda order: tf.constant(ROWS[order], tf.float32),
    "float64": lambda order: tf.constant(ROWS[order]),
    "bfloat16": lambda order: tf.constant(ROWS[order], tf.bfloat16),
    "int64": lambda order: tf.constant(order, tf.int64),
    "uint8": lambda order: tf.constant(order, tf.uint8),
    "bool": lambda order: tf.constant(order)[:, tf.newaxis] > tf.range(4),
    "complex": lambda order: tf.constant(ROWS[order] + 1j),
    "string": lambda order: tf.strings.as_string(order),
    "ragged": lambda order: tf.gather(RAGGED, order),
    "sparse": lambda order: tf.sparse.from_dense(ROWS[order]),
    "nested": lambda order: ({"a": tf.constant(order), "b": tf.ones([5])}, None, tf.zeros([5, 0])),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_digest_is_that_of_the_batch(name):
    make = BATCHES[name]
    own = digest(make([0, 1, 2, 3, 4]))
    assert (own.dtype, own.shape) == (tf.int32, ())
    assert 0 <= own < 2**20
    assert digest(make([0, 1, 2, 3, 4])) == own
    for order in ([1, 0, 2, 3, 4], [4, 3, 2, 1, 0], [0, 1, 2, 3, 3]):
        assert digest(make(order)) != own


def test_input_and_labels_are_told_apart_and_a_large_batch_is_sampled():
    one, other = tf.range(4), tf.range(4)[::-1]
    assert digest((one, other)) != digest((other, one))
    large = rng.normal(size=(5 * SAMPLED_ELEMENTS // 2, 2))
    assert digest(tf.constant(large)) != digest(tf.constant(large[::-1]))
    assert digest(tf.constant(large)) == digest(tf.constant(large))


def test_a_batch_in_a_dataset_has_the_same_digest():
    batch = {name: make([2, 0, 1, 4, 3]) for name, make in BATCHES.items() if name != "nested"}
    (received,) = tf.data.Dataset.from_tensors(batch).map(digest)
    assert received == digest(batch)


# Reports


def report(*epochs):
    """Lets all workers report after each epoch, which has the digests and the numbers of rows of all workers in each step."""

    def work(collectives):
        batches = DifferentBatches(collectives, "CPU:0")
        for steps in epochs:
            for digests, rows in steps:
                batch_rows, of_batch = (tf.constant(numbers[collectives.index]) for numbers in (rows, digests))
                batches.note(of_batch, batch_rows)
            batches.report()

    on_workers(len(epochs[0][0][0]), work)


def test_different_batches_are_warned_of_once(caplog):
    """The chief says it for all. Nothing is said of the same batches."""
    report([((5, 5), (8, 8)), ((2**20 - 4,) * 2, (3, 3))])
    assert not caplog.messages
    differing = [((5, 6), (8, 8)), ((7, 7), (8, 8)), ((1, 0), (8, 8))]
    report(differing, differing)
    (message,) = caplog.messages
    assert message.startswith("The workers were given different batches in 2 steps")
    assert "as after dataset.shard(), pass sharded=True" in message


def test_different_numbers_of_rows_are_refused():
    with pytest.raises(ValueError, match=r"different numbers of rows in 1 steps.* sharded=True"):
        report([((5, 6, 5), (8, 7, 8)), ((5, 5, 5), (8, 8, 8))])


def test_a_step_that_differs_is_found_however_many_follow(monkeypatch, caplog):
    """Steps that share a place in the notes are counted as one."""
    monkeypatch.setattr(same_batches, "NOTED_STEPS", 3)
    same = [((9, 9), (8, 8))] * 7
    report([((5, 6), (8, 8)), *same], same)
    (message,) = caplog.messages
    assert message.startswith("The workers were given different batches in 1 steps")
