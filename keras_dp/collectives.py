"""Collectives: sums and gathers over the workers, by TensorFlow's own collective runtime."""

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_dp.placement import short_name

Tensor = Any

COMMUNICATIONS = ("ring", "nccl")
BUCKET_BYTES = 4 * 2**20

_HOST = "CPU:0"
_SENT_AS_THEY_ARE = (tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)
_SENT_AS = {
    **dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32,), tf.int64),
}
_SEEN_AS = {tf.uint64: tf.int64, tf.complex64: tf.float32, tf.complex128: tf.float64}
# Keys of tensors whose size is known while a graph is made are below, those of all others above.
_FIRST_LATE_KEY = 2**30
_LARGEST_PRIME_BELOW_2_30 = 2**30 - 35


class Collectives:
    """Sums and gathers over W workers, in a graph or eagerly. One worker alone has itself for a sum.

    Each operation has a key, by which its parts on the workers find each other, and which belongs to one kind, type and
    shape for good. It is made of these and of the operation's place among those of its graph: so all workers must make the same
    operations in one graph, and run the same graphs one after the other, but may trace them at different times, or more often.

    Args:
        index: the number of this worker.
        count: W.
        communication: "ring" over gRPC, or "nccl" between GPUs.
        timeout: seconds until an operation that other workers do not come to fails; 0 for never.
    """

    def __init__(self, index: int = 0, count: int = 1, communication: str = "ring", timeout: float = 0.0):
        self.index = index
        self.count = count
        self._hint = communication
        self._timeout = timeout
        self._uses: dict[int, tuple[str, int, str, tuple[int, ...]]] = {}
        self._order = list(range(count))
        if count > 1:
            # TensorFlow gathers in an order of its own.
            ranks = self._gather_equal(tf.constant([index])).numpy().tolist()
            self._order = [ranks.index(i) for i in range(count)]

    def sum(self, x: Tensor, place: int | None = None) -> Tensor:
        """The sum of `x` over all workers, on every worker, on the device of `x`; it has the same shape on each.

        Args:
            x: a tensor of numbers.
            place: the operation's, as `next_place` gives it; None for the next one of the current graph.
        """
        if self.count == 1:
            return x
        with tf.device(x.device or _HOST):
            sent = _as_sent(x)
            if not tf.executing_eagerly() and sent.shape.is_fully_defined() and self._hint == "ring":
                total = self._sum_in_any_order(sent, place)
            else:
                flat = tf.reshape(sent, [-1])
                total = tf.raw_ops.CollectiveReduceV2(input=flat, **self._arguments("sum", flat, place), **_ADD)
                total = tf.reshape(total, tf.shape(sent))
            return _as_received(total, x)

    def sum_all(self, tensors: Sequence[Any], dtype: Any = None) -> list[Any]:
        """The sums of K dense tensors over all workers, packed into buckets of at most `BUCKET_BYTES`.

        The last tensors, whose gradients are ready first, go first. A bucket is sent as soon as it is full, and none before
        the one that precedes it is full: in the same order on all workers.

        Args:
            tensors: K tensors; None stays None.
            dtype: what is sent and summed, as tensors of `dtype`; None for their own.
        """
        if self.count == 1:
            return list(tensors)
        sums: list[Any] = [None] * len(tensors)
        pieces: dict[int, list[Tensor]] = {}
        full: list[Tensor] = []
        for bucket in _buckets(tensors, dtype):
            with tf.device(tensors[bucket[0].tensor].device or _HOST), tf.control_dependencies(full):
                packed = tf.concat([_flat(tensors[piece.tensor], dtype)[piece.begin : piece.end] for piece in bucket], axis=0)
            full = [] if tf.executing_eagerly() else [packed]
            parts = tf.split(self.sum(packed), [piece.end - piece.begin for piece in bucket])
            for piece, part in zip(bucket, parts, strict=True):
                pieces.setdefault(piece.tensor, []).append(part)
        for i, tensor in enumerate(tensors):
            if i in pieces:
                whole = tf.concat(pieces[i], axis=0) if len(pieces[i]) > 1 else pieces[i][0]
                sums[i] = tf.cast(tf.reshape(whole, tensor.shape), tensor.dtype)
            elif tensor is not None:
                sums[i] = self.sum(tensor)
        return sums

    def counts(self, own: Tensor) -> Tensor:
        """The W numbers of all workers, int32, from the one of each."""
        return self.sum(tf.one_hot(self.index, self.count, dtype=tf.int32) * tf.cast(own, tf.int32))

    def gather(self, x: Any, counts: Tensor | None = None) -> Any:
        """The rows of all workers, in the order of the workers, on every worker.

        Args:
            x: a tensor, dense, ragged or sparse, with any number of rows on each worker.
            counts: the number of rows on each of the W workers, if they are known.

        Raises:
            TypeError: if it holds strings, which TensorFlow's collectives cannot send.
        """
        if self.count == 1:
            return x
        if isinstance(x, tf.RaggedTensor):
            return tf.RaggedTensor.from_row_lengths(self.gather(x.values), self.gather(x.row_lengths()), validate=False)
        if isinstance(x, tf.SparseTensor):
            return self._gather_sparse(x)
        rows = tf.shape(x)[0]
        counts = self.counts(rows) if counts is None else counts
        longest = tf.maximum(tf.reduce_max(counts), 1)  # TensorFlow crashes where it gathers nothing at all.
        with tf.device(x.device or _HOST):
            sent = _as_sent(x)
            beside = [[0, 0]] * (sent.shape.rank - 1)
            padded = tf.pad(sent, tf.concat([[[0, longest - rows]], tf.constant(beside, tf.int32, [len(beside), 2])], axis=0))
            flat = self._gather_equal(tf.reshape(padded, [-1]))
            parts = tf.reshape(flat, tf.concat([[self.count, longest], tf.shape(sent)[1:]], axis=0))
            if self._order != sorted(self._order):
                parts = tf.gather(parts, self._order)
            gathered = tf.boolean_mask(parts, tf.sequence_mask(counts, longest))
            gathered.set_shape([None, *sent.shape[1:]])
            return _as_received(gathered, x)

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all W workers, at once, in eager code."""
        if self.count == 1:
            return [message]
        with tf.init_scope(), tf.device(_HOST):
            own = tf.constant(np.frombuffer(message, np.uint8))
            counts = self.counts(tf.size(own))
            everything = self.gather(own, counts).numpy().tobytes()
        ends = np.cumsum(counts.numpy())
        return [everything[end - size : end] for end, size in zip(ends, counts.numpy(), strict=True)]

    def broadcast(self, message: bytes) -> bytes:
        """The message of the first worker, which may be long, at once, in eager code. The others' are not looked at."""
        if self.count == 1:
            return message
        (length,) = np.frombuffer(self.exchange(np.int64(len(message)).tobytes())[0], np.int64)
        words = np.zeros(-(-int(length) // 4), np.int32)
        if self.index == 0:
            words.view(np.uint8)[:length] = np.frombuffer(message, np.uint8)
        step = BUCKET_BYTES // 4
        with tf.init_scope(), tf.device(_HOST):
            parts = [self.sum(tf.constant(words[i : i + step])).numpy() for i in range(0, len(words), step)]
        return np.concatenate([*parts, words[:0]]).tobytes()[:length]

    def _sum_in_any_order(self, x: Tensor, place: int | None) -> Tensor:
        """As the second version of the operation, which TensorFlow runs one after the other: NCCL needs that, gRPC does not."""
        return tf.raw_ops.CollectiveReduce(
            input=x,
            group_size=self.count,
            group_key=_group_key(x),
            instance_key=self._key("sum", x, place),
            subdiv_offsets=[0],
            communication_hint=self._hint,
            timeout_seconds=self._timeout,
            **_ADD,
        )

    def _gather_equal(self, flat: Tensor) -> Tensor:
        return tf.raw_ops.CollectiveGatherV2(input=flat, **self._arguments("gather", flat))

    def _key(self, kind: str, x: Tensor, place: int | None) -> int:
        if place is None:
            place = 0 if tf.executing_eagerly() else next_place(tf.compat.v1.get_default_graph())
        use = (kind, place, x.dtype.name, tuple(x.shape))
        key = zlib.crc32(repr(use).encode()) % _LARGEST_PRIME_BELOW_2_30
        while self._uses.setdefault(key, use) != use:
            key = (key + 1) % _LARGEST_PRIME_BELOW_2_30
        return key

    def _late_key(self, kind: str, x: Tensor, place: int | None) -> Tensor:
        """The key of a tensor whose size is known when the graph runs."""
        place = next_place(tf.compat.v1.get_default_graph()) if place is None else place
        salt = zlib.crc32(repr((kind, place, x.dtype.name)).encode()) % 2**30
        hashed = (tf.size(x, tf.int64) * 0x9E3779B1 + salt * 0x85EBCA6B) % _LARGEST_PRIME_BELOW_2_30
        return _FIRST_LATE_KEY + tf.cast(hashed, tf.int32)

    def _arguments(self, kind: str, flat: Tensor, place: int | None = None) -> dict[str, Any]:
        is_known = tf.executing_eagerly() or flat.shape[0] is not None
        return {
            "group_size": self.count,
            "group_key": _group_key(flat),
            "instance_key": self._key(kind, flat, place) if is_known else self._late_key(kind, flat, place),
            "ordering_token": [],
            "communication_hint": self._hint,
            "timeout_seconds": self._timeout,
        }

    def _gather_sparse(self, x: tf.SparseTensor) -> tf.SparseTensor:
        rows = self.counts(x.dense_shape[0])
        before = tf.cast(tf.cumsum(rows, exclusive=True)[self.index], tf.int64)
        offset = tf.concat([[before], tf.zeros_like(x.dense_shape[1:])], axis=0)
        entries = self.counts(tf.shape(x.values)[0])
        shape = tf.concat([[tf.cast(tf.reduce_sum(rows), tf.int64)], x.dense_shape[1:]], axis=0)
        return tf.SparseTensor(self.gather(x.indices + offset, entries), self.gather(x.values, entries), shape)


def next_place(graph: tf.Graph) -> int:
    """The number of the next collective operation among those of a graph."""
    place: int = getattr(graph, "_keras_dp_collectives", 0)
    graph._keras_dp_collectives = place + 1
    return place


class _Piece(NamedTuple):
    """Elements `begin` to `end` of the flattened tensor number `tensor`."""

    tensor: int
    begin: int
    end: int


_ADD = {"merge_op": "Add", "final_op": "Id"}


def _buckets(tensors: Sequence[Any], dtype: Any) -> Iterator[list[_Piece]]:
    """Pieces that are sent together: of one dtype, on one device, at most `BUCKET_BYTES`."""
    bucket: list[_Piece] = []
    room = 0
    kind = None
    for i in reversed(range(len(tensors))):
        tensor = tensors[i]
        if tensor is None or not tensor.shape.is_fully_defined():
            continue
        sent = tf.as_dtype(dtype or tensor.dtype)
        if bucket and (sent, tensor.device) != kind:
            yield bucket
            bucket = []
        if not bucket:
            room = BUCKET_BYTES // sent.size
        kind = (sent, tensor.device)
        begin, size = 0, math.prod(tensor.shape)
        while begin < size:
            end = min(begin + room, size)
            bucket.append(_Piece(i, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield bucket
                bucket, room = [], BUCKET_BYTES // sent.size
    if bucket:
        yield bucket


def _flat(tensor: Tensor, dtype: Any) -> Tensor:
    return tf.reshape(tf.cast(tensor, dtype or tensor.dtype), [-1])


def _group_key(x: Tensor) -> int:
    """The same devices of all workers are a group."""
    kind, _, number = short_name(x.device or _HOST).partition(":")
    return 1 + int(number or 0) + (1000 if kind == "GPU" else 0)


def _as_sent(x: Tensor) -> Tensor:
    """A tensor of a type that collectives take."""
    if x.dtype in _SENT_AS_THEY_ARE:
        return x
    if x.dtype in _SENT_AS:
        return tf.cast(x, _SENT_AS[x.dtype])
    if x.dtype in _SEEN_AS:
        return tf.bitcast(x, _SEEN_AS[x.dtype])
    raise TypeError(f"Workers can send each other numbers only. Received: a tensor of {x.dtype.name}")


def _as_received(sent: Tensor, x: Tensor) -> Tensor:
    """What was sent, as a tensor of the type of `x` again."""
    return tf.bitcast(sent, x.dtype) if x.dtype in _SEEN_AS else tf.cast(sent, x.dtype)
