"""Divide the tensors that workers sum into buckets."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from keras_dp.devices.available import short_name
from keras_dp.partition.tensorflow_internals import HOST

BUCKET_BYTES = 4 * 2**20


class Piece(NamedTuple):
    """Elements `begin` to `end` of flattened tensor number `tensor`."""

    tensor: int
    begin: int
    end: int


def divide(tensors: Sequence[Any]) -> Iterator[tuple[tuple[Any, str], list[Piece]]]:
    """Yields the pieces of each bucket, at most `BUCKET_BYTES`, with their dtype and device.

    The pieces of the last tensors come first. Tensors of unknown shapes, and None, are left out.
    """
    filling: dict[tuple[Any, str], list[Piece]] = {}
    room: dict[tuple[Any, str], int] = {}
    for i in reversed(range(len(tensors))):
        tensor = tensors[i]
        if tensor is None or not tensor.shape.is_fully_defined():
            continue
        kind = (tensor.dtype, short_name(tensor.device or HOST))
        begin, size = 0, math.prod(tensor.shape)
        while begin < size:
            bucket = filling.setdefault(kind, [])
            left = room.setdefault(kind, BUCKET_BYTES // tensor.dtype.size)
            end = min(begin + left, size)
            bucket.append(Piece(i, begin, end))
            room[kind] = left - (end - begin)
            begin = end
            if not room[kind]:
                yield kind, filling.pop(kind)
                del room[kind]
    yield from filling.items()
