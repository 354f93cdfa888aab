"""Integers that are computed before there is a batch are the ones that TensorFlow's kernels compute.

Each evaluator is tried with random integers, many of them near the limits of their dtype, and with sizes that are known by name
only. For these, the kernel computes with a value for each name.
"""

import math
import zlib

import numpy as np
import pytest
import tensorflow as tf

from keras_dp.partition.building.constants import are_known
from keras_dp.partition.facts.node import Node, Static
from keras_dp.partition.facts.placements import Facts
from keras_dp.partition.facts.rows import ALL_ROWS, GLOBAL, Rows, Size
from keras_dp.partition.facts.sizes import EVALUATORS, BroadcastAxes, evaluate

BATCH_ROWS = 6
SIZES = {"n": 4, "m": 3, **dict.fromkeys(ALL_ROWS.factors, BATCH_ROWS)}
CASES = 150


@pytest.fixture
def rng(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


class Sample:
    """Draws the inputs of an operation."""

    def __init__(self, rng):
        self.rng = rng
        self.dtype = [tf.int32, tf.int64][rng.integers(2)]

    def number(self):
        """Returns a small integer, one near a limit, a named size or a number of rows."""
        kind = self.rng.integers(10)
        if kind < 4:
            return int(self.rng.integers(-3, 9))
        if kind < 6:
            return int([self.dtype.min, self.dtype.max][self.rng.integers(2)]) + int(self.rng.integers(-2, 3))
        if kind < 8:
            return Size(int(self.rng.integers(1, 4)), tuple(self.rng.choice(["n", "m"], self.rng.integers(1, 3))))
        return Rows((int(self.rng.integers(1, 4)),))

    def plain(self, low=-3, high=9):
        return int(self.rng.integers(low, high))

    def size(self):
        """Returns the size of an axis."""
        kind = self.rng.integers(6)
        if kind < 4:
            return [1, 1, 2, 5][kind]
        return Size.named("n") if kind == 4 else Rows((1,))

    def array(self, shape, draw=None):
        made = np.empty(shape, object)
        for index in np.ndindex(*shape):
            number = (draw or self.number)()
            # Plain integers have to fit.
            made[index] = min(max(number, self.dtype.min), self.dtype.max) if isinstance(number, int) else number
        return made

    def shape(self, least=0, most=2):
        return tuple(int(size) for size in self.rng.integers(1, 4, self.rng.integers(least, most + 1)))


def same_shape(count):
    def draw(sample):
        shape = sample.shape()
        return [sample.array(shape) for _ in range(count)], {}

    return draw


def broadcast(sample):
    shape = sample.shape()
    shapes = [shape, [shape, ()][sample.rng.integers(2)]]
    return [sample.array(one) for one in (shapes if sample.rng.integers(2) else shapes[::-1])], {}


def plain_broadcast(sample):
    shape = sample.shape()
    return [sample.array(shape, sample.plain), sample.array((), sample.plain)], {}


def reduced(sample):
    shape = sample.shape()
    axes = np.array([0][: len(shape)] if sample.rng.integers(2) else [], object)
    return [sample.array(shape), axes], {"keep_dims": bool(sample.rng.integers(2))}


def packed(sample):
    shape = sample.shape(0, 1)
    values = [sample.array(shape) for _ in range(sample.plain(1, 4))]
    return [values], {"axis": sample.plain(-len(shape) - 1, len(shape) + 1)}


def unpacked(sample):
    shape = sample.shape(1, 2)
    axis = sample.plain(-len(shape), len(shape))
    return [sample.array(shape)], {"axis": axis, "num": shape[axis]}


def split(sample):
    shape = (sample.plain(1, 3) * 2, 2)[: sample.plain(1, 3)]
    return [np.array(0, object), sample.array(shape)], {"num_split": 2}


def split_by_sizes(sample):
    shape = (4, 2)[: sample.plain(1, 3)]
    sizes = [[1, 3], [2, -1], [1, -1], [2, 3], [4, 0], [-1, 1]][sample.plain(0, 6)]
    return [sample.array(shape), np.array(sizes, object), np.array(0, object)], {"num_split": 2}


def concatenated(sample):
    shape = sample.shape(1, 2)
    axis = np.array(sample.plain(-len(shape), len(shape)), object)
    return [[sample.array(shape) for _ in range(sample.plain(2, 4))], axis], {}


def reshaped(sample):
    value = sample.array(sample.shape())
    target = [[value.size], [-1], [1, value.size], [-1, 1], [], [2, -1], [value.size + 1]][sample.plain(0, 7)]
    return [value, np.array(target, object)], {}


def expanded(sample):
    value = sample.array(sample.shape(0, 1))
    return [value, np.array(sample.plain(-value.ndim - 1, value.ndim + 1), object)], {}


def squeezed(sample):
    value = sample.array([(1, 3), (3, 1), (1,), (1, 1)][sample.plain(0, 4)])
    ones = [axis for axis in range(value.ndim) if value.shape[axis] == 1]
    return [value], {"axis": [ones[0]] if sample.rng.integers(2) else []}


def gathered(sample):
    value = sample.array(sample.shape(1, 2))
    axis = sample.plain(-value.ndim, value.ndim)
    indices = sample.array(sample.shape(0, 2), lambda: sample.plain(-1, 4))
    return [value, indices, np.array(axis, object)], {}


def stitched(sample):
    order = sample.rng.permutation(4)
    parts = [order[:1], order[1:]]
    if sample.rng.integers(3) == 0:
        parts[1] = np.concatenate([parts[1], parts[0]])
    indices = [np.array([int(i) for i in part], object) for part in parts]
    return [indices, [sample.array(part.shape) for part in indices]], {}


def sliced(sample):
    value = sample.array(sample.shape(1, 2))
    begins = [sample.plain(0, 3) for _ in value.shape]
    lengths = [sample.plain(-1, 3) for _ in value.shape]
    return [value, np.array(begins, object), np.array(lengths, object)], {}


def strided(sample):
    value = sample.array(sample.shape(1, 2))
    count = sample.plain(1, value.ndim + 2)
    numbers = [[sample.plain(-4, 5) for _ in range(count)] for _ in range(2)]
    strides = [[1, 1, 2, -1, -2][sample.plain(0, 5)] for _ in range(count)]
    masks = {f"{name}_mask": sample.plain(0, 2**count) for name in ("begin", "end", "new_axis", "shrink_axis")}
    ellipsis = 2 ** sample.plain(0, count) if sample.rng.integers(3) == 0 else 0
    return [value, *(np.array(part, object) for part in (*numbers, strides))], {**masks, "ellipsis_mask": ellipsis}


def ranged(sample):
    return [np.array(sample.plain(-9, 9), object) for _ in range(3)], {}


def permuted(sample):
    order = [int(i) for i in sample.rng.permutation(4)]
    order[0] = order[1] if sample.rng.integers(4) == 0 else order[0]
    return [np.array(order, object)], {}


def filled(sample):
    return [np.array(sample.shape(0, 2), object), sample.array(())], {}


def tiled(sample):
    value = sample.array(sample.shape(1, 2))
    return [value, np.array([sample.plain(0, 3) for _ in value.shape], object)], {}


def offsets(sample):
    axis, rank = sample.plain(0, 2), 2
    others = [sample.size() for _ in range(rank)]
    shapes = []
    for _ in range(sample.plain(2, 4)):
        shape = np.array([*others, None], object)[:-1]
        shape[axis] = sample.size()
        shapes.append(shape)
    return [np.array(axis, object), shapes], {}


def reversed_along(sample):
    value = sample.array(sample.shape(1, 2))
    return [value, np.array([sample.plain(-value.ndim, value.ndim)], object)], {}


def transposed(sample):
    value = sample.array(sample.shape(1, 2))
    return [value, np.array([int(i) for i in sample.rng.permutation(value.ndim)], object)], {}


def broadcast_to(sample):
    value = sample.array([(), (1,), (3,), (1, 3), (2, 1)][sample.plain(0, 5)])
    return [value, np.array([[2, 3], [3], [4, 2, 3]][sample.plain(0, 3)], object)], {}


def selected(sample):
    shape = sample.shape()
    condition = sample.array(shape, lambda: sample.plain(0, 2))
    return [condition, sample.array(shape), sample.array(shape)], {}


def selected_by_rows(sample):
    shape = sample.shape(1, 2)
    condition = sample.array(shape[: sample.plain(1, len(shape) + 1)], lambda: sample.plain(0, 2))
    return [condition, sample.array(shape), sample.array(shape)], {}


def logical(sample):
    shape = sample.shape()
    return [sample.array(shape, lambda: sample.plain(0, 2)) for _ in range(2)], {}


def two_shapes(sample):
    full = [sample.size() for _ in range(sample.plain(1, 4))]

    def one():
        sizes = [1 if sample.rng.integers(3) == 0 else size for size in full]
        sizes = sizes[sample.plain(0, len(full)) :]
        return np.array([*sizes, None], object)[:-1]

    return [one(), one()], {}


def cast(sample):
    return [sample.array(sample.shape())], {"DstT": [tf.int32, tf.int64, tf.bool][sample.plain(0, 3)]}


DRAW = {
    **dict.fromkeys(["Mul", "Add", "AddV2", "Sub", "FloorDiv", "Maximum", "Minimum"], broadcast),
    **dict.fromkeys(["Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual"], broadcast),
    **dict.fromkeys(["LogicalAnd", "LogicalOr"], logical),
    "FloorMod": plain_broadcast,
    **dict.fromkeys(["Identity", "Neg", "OnesLike", "ZerosLike", "StopGradient", "Snapshot"], same_shape(1)),
    "Cast": cast,
    **dict.fromkeys(["Prod", "Sum", "Max", "Min"], reduced),
    "Pack": packed,
    "Unpack": unpacked,
    "Split": split,
    "SplitV": split_by_sizes,
    "ConcatV2": concatenated,
    "Reshape": reshaped,
    "ExpandDims": expanded,
    "Squeeze": squeezed,
    "GatherV2": gathered,
    "DynamicStitch": stitched,
    "Slice": sliced,
    "StridedSlice": strided,
    "Range": ranged,
    "InvertPermutation": permuted,
    "Fill": filled,
    "Tile": tiled,
    "ConcatOffset": offsets,
    "ReverseV2": reversed_along,
    "Transpose": transposed,
    "BroadcastTo": broadcast_to,
    "SelectV2": selected,
    "Select": selected_by_rows,
    "BroadcastArgs": two_shapes,
    "BroadcastGradientArgs": two_shapes,
}
# The indices of inputs that are int32, whatever the dtype of the others.
INT32 = {"Split": [0], "SplitV": [2], "ConcatOffset": range(9), "DynamicStitch": [0, 1]}


def value_of(number):
    """Returns the value of a number; None for numbers without one."""
    if isinstance(number, Rows):
        total = value_of(number.total)
        return None if total is None else BATCH_ROWS * total
    if isinstance(number, Size):
        factors = [SIZES.get(name) for name in number.factors]
        return None if None in factors else number.coefficient * math.prod(factors)
    return number if isinstance(number, int) else None


def kernel(name, inputs, attributes, dtype):
    """Returns the node, and the kernel's results; None if the kernel fails."""
    flat = [entries for given in inputs for entries in (given if isinstance(given, list) else [given])]
    with tf.Graph().as_default() as graph:

        def made(entries, i):
            is_bool = name in ("LogicalAnd", "LogicalOr") or (name in ("Select", "SelectV2") and i == 0)
            own = tf.bool if is_bool else tf.int32 if i in INT32.get(name, ()) else dtype
            values = [value_of(number) for number in entries.flat]
            return tf.constant(np.array(values, own.as_numpy_dtype).reshape(entries.shape), own)

        numbers = iter(range(len(flat)))
        given = [
            [made(entries, next(numbers)) for entries in part] if isinstance(part, list) else made(part, next(numbers))
            for part in inputs
        ]
        result = getattr(tf.raw_ops, name)(**dict(zip(PARAMETERS[name].split(), given, strict=True)), **attributes)
        node = tf.nest.flatten(result)[0].op
        statics = [Static(tensor.dtype, tensor.shape.as_list()) for tensor in node.inputs]
        results = [
            Static(tensor.dtype, None if tensor.shape.rank is None else tensor.shape.as_list()) for tensor in node.outputs
        ]
        facts = [Facts(entries=entries) for entries in flat]
        described = Node(node.node_def, facts, statics, results)
        with tf.compat.v1.Session(graph=graph) as session:
            try:
                computed = session.run(list(node.outputs))
            except tf.errors.OpError:
                computed = None
    return described, computed


PARAMETERS = {
    "Mul": "x y",
    "Add": "x y",
    "AddV2": "x y",
    "Sub": "x y",
    "FloorDiv": "x y",
    "Maximum": "x y",
    "Minimum": "x y",
    "FloorMod": "x y",
    "Equal": "x y",
    "NotEqual": "x y",
    "Greater": "x y",
    "GreaterEqual": "x y",
    "Less": "x y",
    "LessEqual": "x y",
    "LogicalAnd": "x y",
    "LogicalOr": "x y",
    "Neg": "x",
    "OnesLike": "x",
    "ZerosLike": "x",
    "Cast": "x",
    "InvertPermutation": "x",
    "Identity": "input",
    "Snapshot": "input",
    "Squeeze": "input",
    "StopGradient": "input",
    "Prod": "input axis",
    "Sum": "input axis",
    "Max": "input axis",
    "Min": "input axis",
    "Pack": "values",
    "Unpack": "value",
    "Split": "axis value",
    "SplitV": "value size_splits axis",
    "ConcatV2": "values axis",
    "Reshape": "tensor shape",
    "ExpandDims": "input axis",
    "GatherV2": "params indices axis",
    "DynamicStitch": "indices data",
    "Slice": "input begin size",
    "StridedSlice": "input begin end strides",
    "Range": "start limit delta",
    "Fill": "dims value",
    "Tile": "input multiples",
    "ConcatOffset": "concat_dim shape",
    "ReverseV2": "tensor axis",
    "Transpose": "x perm",
    "BroadcastTo": "input shape",
    "SelectV2": "condition t e",
    "Select": "condition x y",
    "BroadcastArgs": "s0 s1",
    "BroadcastGradientArgs": "s0 s1",
}


def agree(entries, computed, bound):
    """Returns whether the entries are the computed ones, as far as these have values; a name stands for one value."""
    if entries.shape != np.shape(computed):
        return False
    for number, actual in zip(entries.flat, np.asarray(computed).flat, strict=True):
        known = value_of(number)
        if known is None and isinstance(number, Size) and number.coefficient == len(number.factors) == 1:
            known = bound.setdefault(number, int(actual))
        if known is not None and known != int(actual):
            return False
    return True


def axes_agree(entries, computed, shapes):
    """Returns whether the axes are the computed ones. Whether axes of one entry are summed makes no difference."""
    (axes,) = entries.flat
    full = max(map(len, shapes))
    padded = [[1] * (full - len(shape)) + [value_of(size) for size in shape] for shape in shapes]
    single = {axis for axis, sizes in enumerate(zip(*padded, strict=True)) if sizes == (1, 1)}
    actual = {int(axis) for axis in computed}
    return axes.surely - single <= actual <= axes.perhaps | axes.surely


def test_each_evaluator_is_tried():
    assert EVALUATORS.keys() - DRAW.keys() == set()


@pytest.mark.parametrize("name", DRAW)
def test_integers_are_those_of_the_kernel(name, rng):
    known = 0
    for _ in range(CASES):
        sample = Sample(rng)
        inputs, attributes = DRAW[name](sample)
        flat = [entries for given in inputs for entries in (given if isinstance(given, list) else [given])]
        limits = tf.int32 if name == "ConcatOffset" else sample.dtype
        if any(not limits.min <= value_of(number) <= limits.max for entries in flat for number in entries.flat):
            continue
        try:
            node, computed = kernel(name, inputs, attributes, sample.dtype)
        except (ValueError, tf.errors.OpError):
            # TensorFlow refuses such a node.
            continue
        results = evaluate(node)
        if results is None:
            continue
        if computed is None:
            # An error may only be lost with the operation that has it: the constants for known results take its place.
            lost = [entries is not None and are_known(entries) for entries in results]
            assert not all(lost), f"the kernel fails: {name} {inputs} {attributes}, evaluated as {results}"
            continue
        bound = {}
        for entries, actual in zip(results, computed, strict=True):
            if entries is None:
                continue
            known += 1
            if entries.size and isinstance(entries.flat[0], BroadcastAxes):
                assert axes_agree(entries, actual, inputs), (name, inputs, entries, actual)
            else:
                assert agree(entries, actual, bound), (name, inputs, attributes, entries, actual)
    assert known >= CASES / 10, f"{known} results"


def test_numbers_of_rows_have_no_value_of_their_own():
    assert value_of(GLOBAL) is None
    assert value_of(Rows((2,))) == 2 * BATCH_ROWS
