"""Slices hold the right rows, and together they are the batch."""

import numpy as np
import pytest
import tensorflow as tf

from keras_dp.batches import slicing
from keras_dp.batches.shares import Shares
from keras_dp.batches.whole_tensors import WholeTensors


def cut(batch, num_slices):
    return tf.function(lambda: slicing.cut(batch, Shares.alike(num_slices)))()


@pytest.mark.parametrize(("rows", "num_slices"), [(5, 3), (2, 4), (16, 4), (5, 1)])
def test_slice_i_has_rows_from_b_i_over_n(rows, num_slices):
    x = np.arange(rows * 2).reshape(rows, 2)
    for i, part in enumerate(cut({"x": x}, num_slices)):
        begin, end = rows * i // num_slices, rows * (i + 1) // num_slices
        assert (int(part.begin), int(part.rows), int(part.batch_rows)) == (begin, end - begin, rows)
        # An empty slice borrows a row of the batch.
        np.testing.assert_array_equal(part.data["x"], x[begin : max(end, begin + 1)])


def test_rows_of_some_slices():
    batch = {"x": tf.range(7), "ragged": tf.ragged.range(tf.range(7)), "mean": tf.constant(2.0), "nothing": None}
    slices = slicing.cut({"x": batch["x"]}, Shares.alike(6))[2:4]
    own = slicing.own_rows(batch, slices)
    assert [part.rows.numpy() for part in slices] == [1, 1]
    np.testing.assert_array_equal(own["x"], [2, 3])
    assert own["ragged"].to_list() == [[0, 1], [0, 1, 2]]
    assert (own["mean"], own["nothing"]) == (2.0, None)


@pytest.mark.parametrize("num_slices", [1, 2, 3, 8])
def test_the_own_rows_of_all_slices_are_the_batch(num_slices):
    """Ragged and sparse tensors are cut by rows, and scalars stay whole."""
    x, ragged = np.arange(10.0).reshape(5, 2), tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]])
    parts = cut((x, ragged, tf.sparse.from_dense(x), np.float64(7.0), None), num_slices)
    assert parts[-1].data[1].to_list()[-1] == [7]
    dense, of_ragged, of_sparse, scalar, nothing = slicing.whole_batch([part.data for part in parts], parts)
    for whole in (dense, tf.sparse.to_dense(of_sparse)):
        np.testing.assert_array_equal(whole, x)
    assert of_ragged.to_list() == ragged.to_list()
    assert (float(scalar), nothing) == (7.0, None)


def test_row_specs_leave_the_number_of_rows_open():
    assert slicing.row_spec(tf.zeros((3, 2))) == tf.TensorSpec([None, 2])
    assert slicing.row_spec(tf.TensorSpec([3, 2], tf.int32)) == tf.TensorSpec([None, 2], tf.int32)
    assert slicing.row_spec(tf.ragged.constant([[1], [2, 3]])).shape.as_list() == [None, None]
    assert slicing.row_spec(tf.sparse.from_dense([[1, 0]])).shape.as_list() == [None, 2]
    assert slicing.row_spec(tf.OptionalSpec(None)) is None
    assert slicing.row_spec(None) is None


def test_refuses_rows_that_disagree():
    with pytest.raises(ValueError, match=r"same number of rows.*whole=.*\(3, 2\) \(0\), \(4,\) \(1\)"):
        cut((np.zeros((3, 2)), np.zeros(4)), 2)

    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None])])
    def cut_unknown_rows(x, y):
        return slicing.cut((x, y), Shares.alike(2))[0].data

    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of rows"):
        cut_unknown_rows(tf.zeros(3), tf.zeros(4))


def test_refuses_what_has_no_rows():
    with pytest.raises(ValueError, match="at least one tensor"):
        cut((None, None), 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least one row"):
        cut(np.zeros((0, 2)), 2)
    with pytest.raises(ValueError, match=r"A dataset inside a batch.*flat_map.*Received: <_VariantDataset"):
        cut(next(iter(tf.data.Dataset.range(4).window(2))), 2)


@pytest.mark.parametrize(("rows", "own"), [(None, None), (6, 3)])
def test_slices_of_sparse_tensors_have_known_sizes(rows, own):
    """A layer makes its weights by the last size."""

    @tf.function(input_signature=[tf.SparseTensorSpec([rows, 5], tf.float32)], autograph=False)
    def shapes(x):
        seen.extend(part.data.shape.as_list() for part in cut(x, 2))
        return tf.constant(0)

    seen = []
    shapes.get_concrete_function()
    assert seen == [[own, 5], [own, 5]]


@pytest.mark.parametrize(
    ("data", "batch_size", "whole", "expected"),
    [
        (np.ones((100, 2)), None, (), 32),
        (np.ones((6, 2)), 50, (), 6),
        ({"nodes": np.ones((100, 2)), "edges": np.ones((7, 2))}, 50, ("0/edges",), 50),
        (iter([np.ones((100, 2))]), None, (), None),
    ],
)
def test_the_rows_of_batches_that_fit_is_given(data, batch_size, whole, expected):
    """A tensor that stays whole says nothing of rows."""
    assert slicing.rows_of_batches(data, batch_size, WholeTensors(whole)) == expected
