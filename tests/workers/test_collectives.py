"""Sums and gathers over workers give the right tensors, and use operations and keys by which the workers match."""

import math
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from partitioned_steps import partitioned_step
from worker_threads import on_workers

from keras_dp.workers import buckets
from keras_dp.workers import collectives as module
from keras_dp.workers.collectives import Collectives, OneWorker

rng = np.random.default_rng(0)

NUMBERS = [
    *(tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64, tf.bfloat16),
    *(tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128),
]


def constructed(*arguments, **options):
    """Makes the collectives of a worker whose operations cannot run."""
    with mock.patch.object(Collectives, "gather", lambda self, x: tf.range(self.count)):
        return Collectives(*arguments, **options)


def operations(make):
    """Calls `make()` in a new graph, and returns the graph's collective operations."""
    with tf.Graph().as_default() as graph:
        make()
    return [operation for operation in graph.get_operations() if operation.type.startswith("Collective")]


# One worker


def test_one_worker_alone_has_what_it_has():
    alone = OneWorker()
    dense, ragged, sparse = tf.constant([1.0, 2.0]), tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[0, 1]])
    assert (alone.index, alone.count) == (0, 1)
    assert alone.sum(dense) is dense is alone.of_worker(0, [dense])[0]
    assert [one is other for one, other in zip(alone.sum_all([dense, None]), [dense, None], strict=True)] == [True] * 2
    assert all(alone.gather(x) is x for x in (dense, ragged, sparse, tf.constant(["text"])))
    assert alone.exchange(b"message") == [alone.broadcast(b"message")] == [b"message"]
    assert alone.counts(tf.constant(3)).numpy().tolist() == [3]
    assert not operations(lambda: (alone.sum(tf.zeros([2])), alone.gather(tf.zeros([2]))))


# Several workers, as threads


def test_all_kinds_of_numbers_are_summed_and_gathered():
    def work(collectives):
        own = [tf.cast(tf.constant([[0, 1], [1, 0], [0, 1]][: collectives.index + 1]), dtype) for dtype in NUMBERS]
        return [(collectives.sum(x[0]), collectives.gather(x), collectives.stack(x[-1])) for x in own]

    for of_dtypes in on_workers(2, work):
        for dtype, (total, rows, stacked) in zip(NUMBERS, of_dtypes, strict=True):
            assert (total.dtype, rows.dtype, stacked.dtype) == (dtype, dtype, dtype)
            assert tf.reduce_all(stacked == tf.cast([[0, 1], [1, 0]], dtype))
            expected = [0, 1] if dtype == tf.bool else [0, 2]
            assert tf.reduce_all(total == tf.cast(expected, dtype))
            assert tf.reduce_all(rows == tf.cast([[0, 1], [0, 1], [1, 0]], dtype))


def test_tensors_of_one_worker_arrive_everywhere():
    """The workers' tensors may have different shapes, and others than that worker's."""
    strings = [[["", "a"], ["ÿé", ""]], [[b"\xff\x00", b"long" * 99]], np.zeros([0, 2], str), [["", ""]]]

    def work(collectives):
        size = 2 * collectives.index
        of_numbers = [tf.cast(tf.reshape(tf.range(3 * size), [size, 3]), dtype) for dtype in NUMBERS]
        of_strings = [tf.constant(x, tf.string) if collectives.index == 1 else tf.fill([1, 1], "other") for x in strings]
        return collectives.of_worker(
            tf.constant(1, tf.int64), [*of_numbers, *of_strings, tf.constant(collectives.index / 2), tf.zeros([0])]
        )

    of_numbers = [tf.cast([[0, 1, 2], [3, 4, 5]], dtype) for dtype in NUMBERS]
    expected = [*of_numbers, *[tf.constant(x, tf.string) for x in strings], tf.constant(0.5), tf.zeros([0])]
    for received in on_workers(3, work):
        for x, y in zip(received, expected, strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            np.testing.assert_array_equal(x, y)


def test_rows_of_strings_are_gathered():
    """They travel as numbers, since collectives send nothing else. A worker may have no rows, or empty strings alone."""
    rows = [[["a", "ÿé"]], [], [["", ""], ["long" * 99, "\0"]]]

    def work(collectives):
        own = tf.reshape(tf.constant(rows[collectives.index], tf.string), [-1, 2])
        ragged = tf.RaggedTensor.from_tensor(own)
        return collectives.gather(own), collectives.gather(ragged), collectives.gather(tf.sparse.from_dense(own))

    expected = tf.constant([["a", "ÿé"], ["", ""], ["long" * 99, "\0"]])
    for dense, ragged, sparse in on_workers(3, work):
        for received in (dense, ragged.to_tensor(), tf.sparse.to_dense(sparse)):
            np.testing.assert_array_equal(received, expected)


@pytest.mark.parametrize("dtype", [tf.uint32, tf.uint64, tf.complex128], ids=lambda dtype: dtype.name)
def test_numbers_at_the_ends_of_their_range_arrive(dtype):
    ends = [dtype.min, dtype.max] if dtype.is_integer else [1e300 - 2e-300j, complex("inf")]
    for rows in on_workers(2, lambda collectives: collectives.gather(tf.constant(ends, dtype))):
        assert rows.numpy().tolist() == ends * 2


@pytest.mark.parametrize(("order", "rows"), [((2, 0, 1), (2, 3, 0)), ((0, 1, 2), (0, 0, 0))])
def test_rows_are_gathered_in_the_order_of_the_workers(rows, order):
    def work(collectives):
        count = rows[collectives.index]
        own = tf.fill([count, 2, 2], float(collectives.index))
        return collectives.gather(own), collectives.gather(own, tf.constant(rows)), collectives.counts(count)

    for gathered, with_counts, counts in on_workers(3, work, order):
        expected = np.repeat(np.arange(3.0), rows)[:, np.newaxis, np.newaxis] * np.ones((2, 2))
        np.testing.assert_array_equal(gathered, expected)
        np.testing.assert_array_equal(with_counts, expected)
        assert counts.numpy().tolist() == list(rows)


def test_rows_of_one_width_are_counted_and_others_are_refused():
    def counts(collectives, width):
        return collectives._counts_of_one_width(tf.zeros([1 + collectives.index, width])).numpy().tolist()

    assert on_workers(2, lambda collectives: counts(collectives, 2)) == [[1, 2]] * 2
    with pytest.raises(tf.errors.InvalidArgumentError, match="all axes but the first must have the same length"):
        on_workers(2, lambda collectives: counts(collectives, collectives.index))


@pytest.mark.parametrize("empty", [(1,), (0, 1, 2)])
def test_ragged_and_sparse_rows_are_gathered(empty):
    ragged = [[[[1], []], [[2, 3]]], [[], [[4]]], [[[5, 6]]]]
    dense = [[[0, 1, 0], [2, 0, 0]], [[0, 0, 3]], [[0, 0, 0], [4, 5, 6]]]

    def work(collectives):
        rows = slice(0 if collectives.index in empty else None)
        ragged_rows = tf.ragged.constant(ragged[collectives.index], tf.int32, ragged_rank=2)[rows]
        dense_rows = tf.constant(dense[collectives.index])[rows]
        return collectives.gather(ragged_rows), collectives.gather(tf.sparse.from_dense(dense_rows))

    for ragged_rows, sparse_rows in on_workers(3, work, (1, 2, 0)):
        present = [i for i in range(3) if i not in empty]
        assert ragged_rows.to_list() == [row for i in present for row in ragged[i]]
        expected = [row for i in present for row in dense[i]]
        assert sparse_rows.dense_shape.numpy().tolist() == [len(expected), 3]
        assert tf.sparse.to_dense(sparse_rows).numpy().tolist() == expected


def test_messages_of_any_length_are_exchanged():
    messages = [b"", b"long " * 100, b"\x00\xff"]
    received = on_workers(3, lambda collectives: collectives.exchange(messages[collectives.index]), (1, 0, 2))
    assert received == [messages] * 3
    assert on_workers(2, lambda collectives: collectives.exchange(b"")) == [[b"", b""]] * 2


@pytest.mark.parametrize("size", [0, 1024, 1025])
def test_the_first_workers_message_is_broadcast(size, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 256)
    message = rng.bytes(size)
    others = [message, b"", rng.bytes(2000)]
    assert on_workers(3, lambda collectives: collectives.broadcast(others[collectives.index])) == [message] * 3


# Buckets


class Recorder(Collectives):
    """Records the tensors that it sums, over two workers with equal tensors."""

    def __init__(self):
        self.index, self.count, self.sent = 0, 2, []

    def sum(self, x, place=None):
        self.sent.append(x)
        return x + x


def test_buckets_lose_nothing_and_are_no_larger_than_they_may_be(monkeypatch):
    for room in (1, 3, 8, 1000):
        monkeypatch.setattr(buckets, "BUCKET_BYTES", 8 * room)
        for shapes in ([(1,)], [(), ()], [(2, 2), (3,), (17,), (1, 1)], [(0,), (4, 0), (9,)], [(8,), (8,), (8,)], []):
            tensors = [tf.constant(rng.normal(size=shape)) for shape in shapes]
            recorder = Recorder()
            for total, tensor in zip(recorder.sum_all(tensors), tensors, strict=True):
                np.testing.assert_array_equal(total, 2 * tensor, strict=True)
            whole, rest = divmod(sum(map(math.prod, shapes)), room)
            assert [size for x in recorder.sent if (size := math.prod(x.shape))] == [room] * whole + [rest] * bool(rest)


def test_the_last_tensors_are_sent_first_and_dtypes_and_devices_are_not_mixed(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4 * 8)
    recorder = Recorder()
    with tf.device("CPU:1"):
        elsewhere = tf.constant([5, 6])
    tensors = [tf.range(6), None, tf.range(10, 15), tf.constant([20]), elsewhere, tf.constant([7.0])]
    sums = recorder.sum_all(tensors)
    assert [(x.dtype, x.device[-5:], x.numpy().tolist()) for x in recorder.sent] == [
        (tf.int32, "CPU:0", [20, *range(10, 15), 0, 1]),
        (tf.float32, "CPU:0", [7.0]),
        (tf.int32, "CPU:1", [5, 6]),
        (tf.int32, "CPU:0", [2, 3, 4, 5]),
    ]
    assert [total is None or (total == 2 * x).numpy().all() for total, x in zip(sums, tensors, strict=True)] == [True] * 6


def test_a_bucket_waits_for_the_one_before_it_to_be_full(monkeypatch):
    """Workers whose gradients are ready in different orders must send them in the same order."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4 * 8)
    worker = constructed(0, 2)

    def needed_by(operation):
        before = {x.op for x in operation.inputs}.union(operation.control_inputs)
        return before.union(*map(needed_by, before))

    sums = operations(lambda: worker.sum_all([tf.zeros([8], name=name) for name in ("first", "second", "third")]))
    names = [{operation.name for operation in needed_by(one)} & {"first", "second", "third"} for one in sums]
    assert names == [{"third"}, {"second", "third"}, {"first", "second", "third"}]
    # It does not wait for the sum.
    assert not any(one in needed_by(other) for one in sums for other in sums)


# The operations


@pytest.mark.parametrize(
    ("communication", "shape", "kind"),
    [
        ("ring", [3, module.SMALL_BYTES], "CollectiveReduce"),  # runs in any order
        ("ring", [4, 2], "CollectiveGather"),  # half the messages: each worker adds the parts, in the same order
        ("ring", [None, 2], "CollectiveReduceV2"),  # runs one after the other, like all of NCCL's
        ("nccl", [None, 2], "CollectiveReduceV2"),
        ("nccl", [3, 2], "CollectiveReduceV2"),
    ],
)
def test_sums_run_in_any_order_where_their_shapes_are_known(communication, shape, kind):
    worker = constructed(1, 3, communication)

    def make():
        with tf.device("CPU:1"):
            x = tf.compat.v1.placeholder(tf.float32, shape)
        total = worker.sum(x)
        assert (total.shape.rank, total.dtype) == (2, x.dtype)

    (operation,) = operations(make)
    assert operation.type == kind
    assert operation.get_attr("timeout_seconds") == 0.0
    assert operation.get_attr("communication_hint") == communication.encode()
    if kind.endswith("V2"):
        assert tf.get_static_value(operation.inputs[1]) == 3
    else:
        assert operation.get_attr("group_size") == 3
        assert operation.device[-5:] == "CPU:1"


def test_nothing_is_sent_for_tensors_without_elements():
    """TensorFlow cannot gather them."""
    worker = constructed(1, 3)
    assert not operations(lambda: worker.sum(tf.zeros([4, 0])))


def test_devices_of_one_worker_are_in_groups_of_their_own():
    worker = constructed(0, 2)

    def make():
        for device in ("CPU:0", "CPU:1", "CPU:0", "GPU:0", "GPU:1"):
            with tf.device(f"/job:worker/replica:0/task:1/device:{device}"):
                worker.sum(tf.zeros([2]))

    keys = [operation.get_attr("group_key") for operation in operations(make)]
    assert keys[0] == keys[2]
    assert len(set(keys)) == 4
    assert min(keys) > 0


def test_sums_of_strings_are_refused():
    worker = constructed(0, 2)
    with pytest.raises(TypeError, match="Received: a tensor of string"):
        operations(lambda: worker.sum(tf.constant("text")))


@pytest.mark.parametrize(("keeps_rows", "gathered"), [(False, 1), (True, 0)])
def test_predictions_for_own_rows_are_sent_to_no_worker(keeps_rows, gathered):
    def step(x):
        return x * 2.0, tf.reduce_sum(x, axis=0)

    options = {"devices": ["CPU:0", "CPU:0"], "home": "CPU:0", "collectives": constructed(0, 2), "keeps_rows": keeps_rows}
    with mock.patch.object(Collectives, "gather", autospec=True, side_effect=lambda worker, rows, counts: rows) as gather:
        concrete, _ = partitioned_step(step, [tf.TensorSpec([6, 3])], [True], 6, **options)
    assert gather.call_count == gathered
    assert concrete.structured_outputs[0].shape.as_list() == [None if keeps_rows else 6, 3]
    assert concrete.structured_outputs[1].shape.as_list() == [3]


@pytest.mark.parametrize("known_rows", [None, 5])
def test_moments_take_one_exchange(known_rows):
    """The numbers of the workers' rows, which weight their moments, follow from the batch, and are not sent."""

    def step(x):
        return tf.nn.moments(x, axes=[0])

    options = {"devices": ["CPU:0", "CPU:0"], "home": "CPU:0", "collectives": constructed(0, 2)}
    everywhere = mock.patch.object(Collectives, "stack", autospec=True, side_effect=lambda worker, x: tf.stack([x, x]))
    with everywhere as stack:
        partitioned_step(step, [tf.TensorSpec([known_rows, 3])], [True], known_rows, **options)
    assert [call.args[1].shape.num_elements() for call in stack.call_args_list] == [2 * 3]


# Keys


def keys(worker, *tensors):
    """Returns the keys of sums of tensors with the given dtypes and shapes, in a new graph."""
    made = operations(lambda: [worker.sum(tf.compat.v1.placeholder(dtype, shape)) for dtype, shape in tensors])
    return [operation.get_attr("instance_key") for operation in made]


def test_a_key_is_that_of_a_place_and_a_type():
    one, other = constructed(0, 2), constructed(1, 2)
    tensors = [(tf.float32, [3]), (tf.float32, [3]), (tf.float32, [3, 1]), (tf.float64, [3, 1]), (tf.float32, [])]
    expected = keys(one, *tensors)
    assert len(set(expected)) == len(tensors)
    # The keys are the same in another graph, on another worker, and after other graphs.
    assert keys(one, *tensors) == expected
    keys(other, (tf.int32, [7]), (tf.float32, [3]))
    assert keys(other, *tensors) == expected
    # In reverse order, each tensor has another place.
    assert not set(keys(one, *tensors[::-1])) & set(expected[3:])


def test_keys_that_would_collide_are_told_apart():
    worker = constructed(0, 2)
    tensors = [(tf.float32, [3]), (tf.float32, [4])]
    with mock.patch.object(module.zlib, "crc32", return_value=5):
        first = keys(worker, *tensors)
        assert len(set(first)) == 2
        assert keys(worker, *tensors) == first


def late_use(worker, place, sizes, kind="sum"):
    """Returns the keys and sizes that an operation on a tensor of unknown size gets when it runs, at a place of its graph."""
    made = []

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def use_of(x):
        for _ in range(place):
            worker.sum(tf.zeros([]))
        worker.sum(x) if kind == "sum" else worker.gather(x, tf.fill([worker.count], tf.size(x)))
        return made.pop()

    def reduce(input, instance_key, **arguments):  # noqa: A002
        made.append((instance_key, tf.size(input)))
        return input

    def gather(input, instance_key, **arguments):  # noqa: A002
        return tf.tile(reduce(input, instance_key), [worker.count])

    with (
        mock.patch.object(tf.raw_ops, "CollectiveReduceV2", reduce),
        mock.patch.object(tf.raw_ops, "CollectiveGatherV2", gather),
    ):
        return [tuple(int(part) for part in use_of(tf.zeros([size]))) for size in sizes]


def test_tensors_of_unknown_size_are_padded_to_few_sizes_with_a_key_for_each():
    worker = constructed(0, 2)
    sizes = [0, 1, 3, 4, 1025]
    late = set()
    for place, kind in ((0, "sum"), (1, "sum"), (0, "gather")):
        uses = late_use(worker, place, sizes, kind)
        assert [size for _, size in uses] == [1, 1, 4, 4, 2048]
        assert len(set(uses)) == 3
        assert late_use(constructed(1, 2), place, sizes[::-1], kind) == uses[::-1]
        late |= {key for key, _ in uses}
    assert len(late) == 3 * 3
    # They are distinct from the keys of tensors of known size.
    assert 2**30 <= min(late) <= max(late) < 2**31
    assert max(keys(worker, *[(tf.float32, [size]) for size in range(100)])) < 2**30
