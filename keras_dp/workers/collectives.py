"""Sum and gather over the workers with TensorFlow's collectives."""

import contextlib
import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dp.devices.available import short_name
from keras_dp.partition.tensorflow_internals import HOST
from keras_dp.workers import buckets
from keras_dp.workers.conversion import as_numbers, as_received, as_sent, as_strings

Tensor = Any

# Up to this size, on a network of 10 Gbit/s, the bytes that gathering sends beyond those of a ring's sum take less time than
# the messages that it saves, at 50 µs a message: (W - 1) (W - 2) / W times the size, and W - 1 messages. See `sum`.
SMALL_BYTES = 2**16

# Tensors with a size that is known while the graph is built have keys below this, all others have this key or higher ones.
_FIRST_LATE_KEY = 2**30
_SIZES = 32  # powers of two
_LATE_PLACES = 2**30 // _SIZES
_SHORT_BYTES = 256

OTHER_WIDTHS = (
    "The workers' rows have different shapes: all axes but the first must have the same length. Pad the batches of all workers "
    "to a fixed length."
)


class OneWorker:
    """Replaces the collectives for a single worker, whose sums and rows are already complete.

    Attributes:
        index: the number of this worker.
        count: W, the number of workers.
        one_by_one: whether operations must run one after another, in the same order on all workers. NCCL deadlocks otherwise
            (its user guide, "Using multiple NCCL communicators concurrently" and "Group calls"); TensorFlow's ring does not.
    """

    index = 0
    count = 1
    one_by_one = False

    def sum(self, x: Tensor) -> Tensor:
        """Returns `x`; see `Collectives` for this method and the following ones."""
        return x

    def sum_all(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the tensors."""
        return list(tensors)

    def counts(self, own: Tensor) -> Tensor:
        """Returns the number as a vector of length 1."""
        return tf.reshape(tf.cast(own, tf.int32), [1])

    def stack(self, x: Tensor) -> Tensor:
        """Returns `x` with a first axis of length 1."""
        return x[tf.newaxis]

    def gather(self, x: Any, counts: Tensor | None = None) -> Any:
        """Returns `x`."""
        return x

    def of_worker(self, worker: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors."""
        return list(tensors)

    def exchange(self, message: bytes) -> list[bytes]:
        """Returns the message in a list."""
        return [message]

    def broadcast(self, message: bytes) -> bytes:
        """Returns the message."""
        return message


class Collectives(OneWorker):
    """Sums and gathers over W workers, in a graph or eagerly.

    Each operation has a key, by which TensorFlow matches its parts on the workers. A key always belongs to the same kind, dtype
    and shape. It is computed from these and from the operation's position among the collectives of its graph. So all workers
    must build the same operations in each graph, and run the same graphs in the same order. They may trace a graph at different
    times, or more often.

    Args:
        index: the number of this worker.
        count: W.
        communication: "ring" over gRPC, or "nccl" between GPUs.
    """

    def __init__(self, index: int, count: int, communication: str = "ring"):
        self.index = index
        self.count = count
        self._hint = communication
        self.one_by_one = communication == "nccl"
        self._uses: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._order = list(range(count))
        # TensorFlow gathers in its own order of workers.
        ranks = self.gather(tf.constant([index])).numpy().tolist()
        self._order = [ranks.index(i) for i in range(count)]

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of `x` over all workers, on every worker, on the device of `x`, or on the host for integers.

        Args:
            x: a tensor of numbers, of the same shape on every worker.
        """
        sent = as_sent(x)
        with tf.device(_sending_device(sent)):
            if tf.executing_eagerly() or not sent.shape.is_fully_defined():
                size = tf.size(sent)
                flat, arguments = self._padded("sum", tf.reshape(sent, [-1]))
                total = tf.raw_ops.CollectiveReduceV2(input=flat, **arguments, **_ADD)
                total = tf.reshape(total[:size], tf.shape(sent))
            elif self._hint == "ring" and math.prod(sent.shape) * sent.dtype.size <= SMALL_BYTES:
                # A ring's sum takes 2 (W - 1) messages, one after the other. Gathering takes W - 1, which are W times as large.
                total = tf.reduce_sum(self._stacked(sent), axis=0)
            else:
                arguments = self._arguments(sent, self._key("sum", sent.dtype, tuple(sent.shape)))
                if self._hint == "ring":
                    total = tf.raw_ops.CollectiveReduce(input=sent, subdiv_offsets=[0], **arguments, **_ADD)
                else:
                    # TensorFlow runs a function's operations of the second version one after another.
                    total = tf.raw_ops.CollectiveReduceV2(input=sent, ordering_token=[], **arguments, **_ADD)
            return as_received(total, x)

    def stack(self, x: Tensor) -> Tensor:
        """Returns the tensors of all workers along a new first axis, in their order, on every worker.

        Args:
            x: a tensor of numbers, of the same shape on every worker.
        """
        if tf.executing_eagerly() or not x.shape.is_fully_defined():
            everywhere = self.gather(tf.reshape(x, [1, -1]), tf.ones([self.count], tf.int32))
            return tf.reshape(everywhere, tf.concat([[self.count], tf.shape(x)], axis=0))
        sent = as_sent(x)
        with tf.device(_sending_device(sent)):
            everywhere = self._stacked(sent)
            if self._order != sorted(self._order):
                everywhere = tf.gather(everywhere, self._order)
            return as_received(everywhere, x)

    def _stacked(self, sent: Tensor) -> Tensor:
        """Returns tensors of a known shape in a graph, along a new first axis, in TensorFlow's order of workers."""
        if not sent.shape.num_elements():
            return tf.zeros([self.count, *sent.shape], sent.dtype)  # TensorFlow crashes where it gathers nothing.
        if sent.dtype == tf.bfloat16:
            return tf.cast(self._stacked(tf.cast(sent, tf.float32)), sent.dtype)  # TensorFlow gathers no bfloat16.
        arguments = self._arguments(sent, self._key("stack", sent.dtype, tuple(sent.shape)))
        if self._hint == "ring":
            return tf.raw_ops.CollectiveGather(input=sent[tf.newaxis], shape=[self.count, *sent.shape], **arguments)
        everywhere = tf.raw_ops.CollectiveGatherV2(input=sent[tf.newaxis], ordering_token=[], **arguments)
        return tf.ensure_shape(everywhere, [self.count, *sent.shape])

    def sum_all(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the sums of K dense tensors over all workers, packed into buckets of at most `buckets.BUCKET_BYTES`.

        The last tensors are packed first, because their gradients are ready first. A bucket holds tensors of one dtype and
        device. It is sent as soon as it is full and the preceding bucket of its dtype and device is full, so that all workers
        send buckets in the same order.

        Args:
            tensors: K tensors; None stays None.
        """
        sums: list[Any] = [None] * len(tensors)
        pieces: dict[int, list[Tensor]] = {}
        full: dict[tuple[Any, str], list[Tensor]] = {}
        for kind, bucket in buckets.divide(tensors):
            with tf.device(kind[1]), tf.control_dependencies(full.get(kind, ())):
                packed = tf.concat(
                    [tf.reshape(tensors[piece.tensor], [-1])[piece.begin : piece.end] for piece in bucket], axis=0
                )
            full[kind] = [] if tf.executing_eagerly() else [packed]
            parts = tf.split(self.sum(packed), [piece.end - piece.begin for piece in bucket])
            for piece, part in zip(bucket, parts, strict=True):
                pieces.setdefault(piece.tensor, []).append(part)
        for i, tensor in enumerate(tensors):
            if i in pieces:
                whole = tf.concat(pieces[i], axis=0) if len(pieces[i]) > 1 else pieces[i][0]
                sums[i] = tf.reshape(whole, tensor.shape)
            elif tensor is not None:
                sums[i] = self.sum(tensor)
        return sums

    def counts(self, own: Tensor) -> Tensor:
        """Returns the W numbers of all workers, int32, from this worker's number `own`."""
        return self.stack(tf.cast(own, tf.int32))

    def gather(self, x: Any, counts: Tensor | None = None) -> Any:
        """Returns the rows of all workers, in the order of the workers, on every worker.

        Args:
            x: a tensor, dense, ragged or sparse, with any number of rows on each worker.
            counts: the number of rows on each of the W workers, if they are known.
        """
        if isinstance(x, tf.RaggedTensor):
            return tf.RaggedTensor.from_row_lengths(self.gather(x.values), self.gather(x.row_lengths()), validate=False)
        if isinstance(x, tf.SparseTensor):
            return self._gather_sparse(x)
        if x.dtype == tf.string:
            lengths, characters = as_numbers(x)
            return as_strings(self.gather(lengths, counts), self.gather(characters))
        sent = as_sent(x)
        rows = tf.shape(sent)[0]
        if counts is None:
            counts = self.counts(rows) if sent.shape[1:].is_fully_defined() else self._counts_of_one_width(sent)
        longest = tf.reduce_max(counts)
        with tf.device(_sending_device(sent)):
            beside = tf.zeros([sent.shape.rank - 1, 2], tf.int32)
            whole = tf.pad(sent, tf.concat([[[0, longest - rows]], beside], axis=0))
            size = tf.size(whole)
            flat, arguments = self._padded("gather", tf.reshape(whole, [-1]))
            gathered = tf.raw_ops.CollectiveGatherV2(input=flat, **arguments)
            parts = tf.reshape(gathered, [self.count, -1])[:, :size]
            parts = tf.reshape(parts, tf.concat([[self.count], tf.shape(whole)], axis=0))
            if self._order != sorted(self._order):
                parts = tf.gather(parts, self._order)
            gathered = tf.boolean_mask(parts, tf.sequence_mask(counts, longest))
            gathered.set_shape([None, *sent.shape[1:]])
            return as_received(gathered, x)

    def of_worker(self, worker: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns K tensors of one worker, on every worker.

        Args:
            worker: the index of that worker.
            tensors: K dense tensors of numbers or strings. Their shapes may differ from that worker's, except for the rank and
                the sizes that a graph knows.
        """
        sent = [part for x in tensors for part in (as_numbers(x) if x.dtype == tf.string else [x])]
        is_sender = tf.cast(tf.equal(tf.cast(worker, tf.int32), self.index), tf.int32)
        shapes = tf.split(self.sum(is_sender * tf.concat([tf.shape(x) for x in sent], axis=0)), [x.shape.rank for x in sent])
        received = iter([self._of_sender(x, shape, is_sender) for x, shape in zip(sent, shapes, strict=True)])
        made = [as_strings(next(received), next(received)) if x.dtype == tf.string else next(received) for x in tensors]
        if not tf.executing_eagerly():
            for x, own in zip(made, tensors, strict=True):
                x.set_shape(own.shape)
        return made

    def _of_sender(self, x: Tensor, shape: Tensor, is_sender: Tensor) -> Tensor:
        own = tf.reshape(x, [-1])[: tf.size(x) * is_sender]
        return tf.reshape(self.sum(tf.pad(own, [[0, tf.reduce_prod(shape) - tf.size(own)]])), shape)

    def exchange(self, message: bytes) -> list[bytes]:
        """Returns the messages of all W workers, in one round if all are short. It runs immediately, in eager mode."""
        length = len(message).to_bytes(8, "little")
        begins = self._gather_bytes((length + message)[:_SHORT_BYTES].ljust(_SHORT_BYTES), [_SHORT_BYTES] * self.count)
        sizes = [int.from_bytes(begin[:8], "little") for begin in begins]
        in_begin = _SHORT_BYTES - 8
        rests = [max(0, size - in_begin) for size in sizes]
        ends = self._gather_bytes(message[in_begin:], rests) if any(rests) else [b""] * self.count
        return [(begin[8:] + end)[:size] for begin, end, size in zip(begins, ends, sizes, strict=True)]

    def _gather_bytes(self, own: bytes, sizes: Sequence[int]) -> list[bytes]:
        with tf.init_scope(), tf.device(HOST):
            everything = self.gather(tf.constant(np.frombuffer(own, np.uint8)), tf.constant(sizes, tf.int32)).numpy().tobytes()
        ends = np.cumsum(sizes).tolist()
        return [everything[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def broadcast(self, message: bytes) -> bytes:
        """Returns the chief's message, which may be long, and ignores all others. It runs immediately, in eager mode."""
        (length,) = np.frombuffer(self.exchange(np.int64(len(message)).tobytes())[0], np.int64)
        words = np.zeros(-(-int(length) // 4), np.int32)
        if self.index == 0:
            words.view(np.uint8)[:length] = np.frombuffer(message, np.uint8)
        step = buckets.BUCKET_BYTES // 4
        with tf.init_scope(), tf.device(HOST):
            parts = [self.sum(tf.constant(words[i : i + step])).numpy() for i in range(0, len(words), step)]
        return np.concatenate([*parts, words[:0]]).tobytes()[:length]

    def _counts_of_one_width(self, x: Tensor) -> Tensor:
        """Returns the numbers of rows of all workers, and checks that all rows have the same shape."""
        shapes = self.sum(tf.one_hot([self.index], self.count, axis=0, dtype=tf.int32) * tf.shape(x))
        shapes = tf.ensure_shape(shapes, [self.count, x.shape.rank])
        # `tf.debugging.assert_equal` creates functions, which a graph that becomes a part of another one must not contain.
        with tf.device(HOST):
            is_one = tf.reduce_all(tf.equal(shapes[:, 1:], shapes[:1, 1:]))
            check = tf.raw_ops.Assert(condition=is_one, data=[OTHER_WIDTHS, shapes], summarize=64)
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(shapes[:, 0])

    def _padded(self, kind: str, flat: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Returns a flat tensor, padded to a power of two, and its operation's other arguments.

        Each size needs a key, so padding keeps the number of sizes small.
        """
        sizes = tf.constant([2**i for i in range(_SIZES)], tf.int64)
        exponent = tf.searchsorted(sizes, [tf.size(flat, tf.int64)])[0]
        padded = tf.pad(flat, [[0, tf.cast(sizes[exponent], tf.int32) - tf.size(flat)]])
        key = _FIRST_LATE_KEY + self._key(kind, flat.dtype, (), _LATE_PLACES) * _SIZES + exponent
        return padded, {**self._arguments(flat, key), "ordering_token": []}

    def _key(self, kind: str, dtype: Any, shape: tuple[int, ...], most: int = _FIRST_LATE_KEY) -> int:
        place = 0 if tf.executing_eagerly() else _next_place(tf.compat.v1.get_default_graph())
        use = (kind, place, dtype.name, shape, most)
        key = zlib.crc32(repr(use).encode()) % most
        while self._uses.setdefault((key, most), use) != use:
            key = (key + 1) % most
        return key

    def _arguments(self, x: Tensor, key: Any) -> dict[str, Any]:
        # TensorFlow's own timeout would keep a thread for each operation until it expires. The health check times out instead.
        return {
            "group_size": self.count,
            "group_key": _group_key(x),
            "instance_key": key,
            "communication_hint": self._hint,
            "timeout_seconds": 0.0,
        }

    def _gather_sparse(self, x: tf.SparseTensor) -> tf.SparseTensor:
        rows = self.counts(x.dense_shape[0])
        before = tf.cast(tf.cumsum(rows, exclusive=True)[self.index], tf.int64)
        offset = tf.concat([[before], tf.zeros_like(x.dense_shape[1:])], axis=0)
        entries = self.counts(tf.shape(x.values)[0])
        shape = tf.concat([[tf.cast(tf.reduce_sum(rows), tf.int64)], x.dense_shape[1:]], axis=0)
        return tf.SparseTensor(self.gather(x.indices + offset, entries), self.gather(x.values, entries), shape)


def _next_place(graph: tf.Graph) -> int:
    """Returns the position of a graph's next collective operation, and counts it."""
    place: int = getattr(graph, "_keras_dp_collectives", 0)
    graph._keras_dp_collectives = place + 1
    return place


@contextlib.contextmanager
def counted_on(graph: tf.Graph) -> Iterator[None]:
    """Numbers the collectives of the current graph after the collectives of another graph, of which it becomes a part."""
    part: Any = tf.compat.v1.get_default_graph()
    part._keras_dp_collectives = getattr(graph, "_keras_dp_collectives", 0)
    yield
    graph._keras_dp_collectives = part._keras_dp_collectives


_ADD = {"merge_op": "Add", "final_op": "Id"}


def _group_key(x: Tensor) -> int:
    """Returns the key of the group that consists of the same device of every worker."""
    kind, _, number = short_name(_sending_device(x)).partition(":")
    return 1 + int(number or 0) + (1000 if kind == "GPU" else 0)


def _sending_device(sent: Tensor) -> str:
    # Integers are summed in the host's memory, even if they are on a GPU.
    return HOST if sent.dtype.is_integer or not sent.device else short_name(sent.device)
