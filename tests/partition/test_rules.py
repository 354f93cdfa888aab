"""Rules are proven, not believed: each operation gives the same whole and partitioned, wherever its inputs' rows are."""

import numpy as np
import pytest
import tensorflow as tf

import keras_dp  # noqa: F401  The devices are made ready first.
from keras_dp.partition.rules import RULES
from keras_dp.partition.rules.drawing import DRAWS
from partition.proofs import cases_of, prove, run
from partition.samples import samples

SAMPLES = samples()

# Eager TensorFlow counts another seed for these than a graph: the programs with stateful noise see to them.
STATEFUL_DRAWS = {name for name in DRAWS if not name.startswith("Stateless")}


@pytest.mark.parametrize("k", range(len(SAMPLES)), ids=lambda k: f"{SAMPLES[k].types[0]}-{k}")
def test_partitioned_is_whole(k):
    """For all placements of the inputs, and for batches in which a tower has one row, or none."""
    sample = SAMPLES[k]
    spread = set()
    for case in cases_of(sample):
        spread |= prove(sample, case)
    assert spread == (set() if sample.meets else set(sample.types))


def test_each_rule_has_a_sample():
    """A rule without a proof is not registered."""
    proven = {name for sample in SAMPLES for name in sample.types}
    assert set(RULES) - STATEFUL_DRAWS - proven == set()


def test_wrong_rule_is_found(monkeypatch):
    """A mean of the towers' means, as others take it, does not pass."""
    sample = next(sample for sample in SAMPLES if sample.types == ("Mean",))
    (case,) = [case for case in cases_of(sample) if case.rows == "B"]
    right = RULES["Mean"]

    def wrong(node):
        plan = right(node)
        plan.instance = None
        return plan

    monkeypatch.setitem(RULES, "Mean", wrong)
    with pytest.raises(AssertionError):
        prove(sample, case)


def test_operation_without_rule_is_computed_once():
    """On gathered rows, and it says so."""
    x = np.random.default_rng(0).normal(size=(7, 2))
    received, partition = run(lambda x: tf.sort(x, axis=0), [x])
    np.testing.assert_array_equal(received[0].numpy(), np.sort(x, axis=0))
    assert partition.gathered
