"""Shares divide the rows of a batch into slices of these proportions."""

import itertools

import pytest
import tensorflow as tf

from keras_dp.batches.shares import Shares

DEVICES = ["CPU:0", "CPU:1"]
ROWS = (0, 1, 2, 5, 16, 97, 1000)


@pytest.mark.parametrize("towers", [1, 2, 3, 7])
def test_towers_with_the_same_share_have_as_many_rows(towers):
    for rows in ROWS:
        assert Shares.alike(towers).ranges(rows) == [(rows * i // towers, rows * (i + 1) // towers) for i in range(towers)]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("shares", [(1,), (3, 2), (1, 2, 5), (1, 100)])
def test_slices_follow_each_other_in_the_proportions_of_shares(shares, workers):
    divided = Shares(shares)
    for rows in ROWS:
        ranges = [own for worker in range(workers) for own in divided.ranges(rows, worker, workers)]
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ranges))
        assert (ranges[0][0], ranges[-1][1]) == (0, rows)
        sizes = [end - begin for begin, end in ranges]
        assert sizes == divided.sizes(rows, workers)
        wanted = [rows * share / (sum(shares) * workers) for share in shares * workers]
        assert all(abs(size - due) < 1 for size, due in zip(sizes, wanted, strict=True))
        # A batch that has rows has one for the last tower.
        assert sizes[-1] > 0 or rows == 0
        # Workers have the same parts of a batch as with alike towers.
        own = [sum(sizes[i : i + len(shares)]) for i in range(0, len(sizes), len(shares))]
        assert own == Shares.alike(workers).sizes(rows)


def test_tensors_are_divided_as_numbers_are():
    """The product of rows and shares needs more than 32 bits."""
    shares = Shares((999_999, 1))
    for rows in (*ROWS, 2**31 - 1):
        begin, end = shares.ranges(tf.constant(rows), 1, 3)[0]
        assert begin.dtype == tf.int32
        assert (int(begin), int(end)) == shares.ranges(rows, 1, 3)[0]


@pytest.mark.parametrize(
    ("rows", "slices_per_device", "expected"),
    [
        (None, 1, (1, 1)),
        (None, 2, (1, 1, 1, 1)),
        ([3, 2], 2, (3, 3, 2, 2)),
        ([24 << 30, 32 << 30], 1, (3, 4)),
        ((5, 5), 1, (1, 1)),
    ],
)
def test_the_towers_of_a_device_have_its_share(rows, slices_per_device, expected):
    assert Shares.of_devices(rows, DEVICES, slices_per_device).of_towers == expected


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1, 2, 3], "one share for each of the 2 devices, CPU:0, CPU:1. Received: rows=[1, 2, 3], of length 3"),
        ([], "of length 0"),
        ([1_000_000, 1], "sum is at most 1,000,000, after division by their greatest common divisor. Give rounded ones"),
    ],
)
def test_refuses_shares_that_do_not_fit(rows, message):
    with pytest.raises(ValueError, match="`rows` must have") as error:
        Shares.of_devices(rows, DEVICES, 1)
    assert message in str(error.value)
