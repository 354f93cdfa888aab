"""NCCL's collectives take the times of its own model, which are near those that others have published."""

import pytest

from keras_dp.gpu_model.hardware import machine_of
from keras_dp.gpu_model.nccl import Nccl, Protocol


def all_reduce(gpu, size, gpus):
    link = machine_of(gpu).link
    return link.nccl.all_reduce_seconds(size, gpus, link.bandwidth)


def of_bus_bandwidth(gigabytes_per_second, size, gpus):
    """Returns the time that nccl-tests turns into a "busbw": doc/PERFORMANCE.md."""
    return size * 2 * (gpus - 1) / gpus / (1e9 * gigabytes_per_second)


@pytest.mark.parametrize(
    ("gpu", "size", "gpus", "published"),
    [
        # The smallest all-reduce between two A100s: https://github.com/NVIDIA/nccl/issues/583
        ("A100", 32, 2, 10.14e-6),
        # A large one between two A100s with 12 NVLinks: https://github.com/NVIDIA/nccl-tests/issues/178
        ("A100", 12e9, 2, of_bus_bandwidth(208, 12e9, 2)),
        # H100s, with NVLink SHARP: https://github.com/NVIDIA/nccl/issues/1455
        ("H100", 2e9, 2, of_bus_bandwidth(370, 2e9, 2)),
        ("H100", 2e9, 8, of_bus_bandwidth(480, 2e9, 8)),
        # Eight H200s: https://github.com/NVIDIA/nccl-tests/issues/272
        ("H200", 4e9, 8, of_bus_bandwidth(475, 4e9, 8)),
    ],
)
def test_all_reduces_take_about_the_published_times_and_never_longer(gpu, size, gpus, published):
    assert 0.75 * published < all_reduce(gpu, size, gpus) < published


def test_the_fastest_way_is_taken():
    ring, tree = Protocol("ring", 1.0, 1.0, 0.5), Protocol("tree", 2.0, 0.0, 1.0)
    switch = Protocol("switch", 9.0, 0.0, 1.0, 8.0)
    # Four GPUs have six steps, in which a ring moves six quarters of the bytes over each link, and a tree twice the bytes.
    assert Nccl((ring,), (tree,)).all_reduce_seconds(4.0, 4, 10.0) == 2.0 + 8 / 10
    assert Nccl((ring,), ()).all_reduce_seconds(4.0, 4, 10.0) == 1.0 + 6 + 6 / 5
    assert Nccl((ring,), (tree,), (switch,)).all_reduce_seconds(80.0, 4, 10.0) == 2.0 + 160 / 10
    assert Nccl((ring,), (tree,), (switch,)).all_reduce_seconds(160.0, 4, 10.0) == 9.0 + 160 / 8
    assert Nccl((ring,), (tree,)).all_gather_seconds(5.0, 4, 10.0) == 1.0 + 3 + 15 / 5
