"""Integers that are computed before there is a batch are the ones that TensorFlow's kernels compute.

Each evaluator is tried with random integers, many of them near the limits of their dtype, and with sizes that are known by name
only. For these, the kernel computes with a value for each name.
"""

import inspect
import math

import numpy as np
import pytest
import tensorflow as tf

from keras_dp.partition.facts.node import Node, Static
from keras_dp.partition.facts.placements import Facts
from keras_dp.partition.facts.rows import ALL_ROWS, GLOBAL, Rows, Size
from keras_dp.partition.facts.sizes import EVALUATORS, BroadcastAxes, evaluate
from keras_dp.partition.program.known import are_known

BATCH_ROWS = 6
SIZES = {"n": 4, "m": 3, **dict.fromkeys(ALL_ROWS.factors, BATCH_ROWS)}
CASES = 150
rng = np.random.default_rng(0)


class Sample:
    """Draws the inputs of an operation."""

    def __init__(self):
        self.dtype = [tf.int32, tf.int64][rng.integers(2)]

    def number(self):
        """Returns a small integer, one near a limit, a named size or a number of rows."""
        kind = rng.integers(10)
        if kind < 4:
            return int(rng.integers(-3, 9))
        if kind < 6:
            return int([self.dtype.min, self.dtype.max][rng.integers(2)]) + int(rng.integers(-2, 3))
        if kind < 8:
            return Size(int(rng.integers(1, 4)), tuple(rng.choice(["n", "m"], rng.integers(1, 3))))
        return Rows((int(rng.integers(1, 4)),))

    def plain(self, low=-3, high=9):
        return int(rng.integers(low, high))

    def size(self):
        """Returns the size of an axis."""
        kind = rng.integers(6)
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
        return tuple(int(size) for size in rng.integers(1, 4, rng.integers(least, most + 1)))

    def one(self):
        return [self.array(self.shape())], {}

    def broadcast(self):
        shape = self.shape()
        shapes = [shape, [shape, ()][rng.integers(2)]]
        return [self.array(one) for one in (shapes if rng.integers(2) else shapes[::-1])], {}

    def plain_broadcast(self):
        shape = self.shape()
        return [self.array(shape, self.plain), self.array((), self.plain)], {}

    def reduced(self):
        shape = self.shape()
        axes = np.array([0][: len(shape)] if rng.integers(2) else [], object)
        return [self.array(shape), axes], {"keep_dims": bool(rng.integers(2))}

    def packed(self):
        shape = self.shape(0, 1)
        values = [self.array(shape) for _ in range(self.plain(1, 4))]
        return [values], {"axis": self.plain(-len(shape) - 1, len(shape) + 1)}

    def unpacked(self):
        shape = self.shape(1, 2)
        axis = self.plain(-len(shape), len(shape))
        return [self.array(shape)], {"axis": axis, "num": shape[axis]}

    def split(self):
        shape = (self.plain(1, 3) * 2, 2)[: self.plain(1, 3)]
        return [np.array(0, object), self.array(shape)], {"num_split": 2}

    def split_by_sizes(self):
        shape = (4, 2)[: self.plain(1, 3)]
        sizes = [[1, 3], [2, -1], [1, -1], [2, 3], [4, 0], [-1, 1]][self.plain(0, 6)]
        return [self.array(shape), np.array(sizes, object), np.array(0, object)], {"num_split": 2}

    def concatenated(self):
        shape = self.shape(1, 2)
        axis = np.array(self.plain(-len(shape), len(shape)), object)
        return [[self.array(shape) for _ in range(self.plain(2, 4))], axis], {}

    def reshaped(self):
        value = self.array(self.shape())
        target = [[value.size], [-1], [1, value.size], [-1, 1], [], [2, -1], [value.size + 1]][self.plain(0, 7)]
        return [value, np.array(target, object)], {}

    def expanded(self):
        value = self.array(self.shape(0, 1))
        return [value, np.array(self.plain(-value.ndim - 1, value.ndim + 1), object)], {}

    def squeezed(self):
        value = self.array([(1, 3), (3, 1), (1,), (1, 1)][self.plain(0, 4)])
        ones = [axis for axis in range(value.ndim) if value.shape[axis] == 1]
        return [value], {"axis": [ones[0]] if rng.integers(2) else []}

    def gathered(self):
        value = self.array(self.shape(1, 2))
        axis = self.plain(-value.ndim, value.ndim)
        indices = self.array(self.shape(0, 2), lambda: self.plain(-1, 4))
        return [value, indices, np.array(axis, object)], {}

    def stitched(self):
        order = rng.permutation(4)
        parts = [order[:1], order[1:]]
        if rng.integers(3) == 0:
            parts[1] = np.concatenate([parts[1], parts[0]])
        indices = [np.array([int(i) for i in part], object) for part in parts]
        return [indices, [self.array(part.shape) for part in indices]], {}

    def sliced(self):
        value = self.array(self.shape(1, 2))
        begins = [self.plain(0, 3) for _ in value.shape]
        lengths = [self.plain(-1, 3) for _ in value.shape]
        return [value, np.array(begins, object), np.array(lengths, object)], {}

    def strided(self):
        value = self.array(self.shape(1, 2))
        count = self.plain(1, value.ndim + 2)
        numbers = [[self.plain(-4, 5) for _ in range(count)] for _ in range(2)]
        strides = [[1, 1, 2, -1, -2][self.plain(0, 5)] for _ in range(count)]
        masks = {f"{name}_mask": self.plain(0, 2**count) for name in ("begin", "end", "new_axis", "shrink_axis")}
        ellipsis = 2 ** self.plain(0, count) if rng.integers(3) == 0 else 0
        return [value, *(np.array(part, object) for part in (*numbers, strides))], {**masks, "ellipsis_mask": ellipsis}

    def ranged(self):
        return [np.array(self.plain(-9, 9), object) for _ in range(3)], {}

    def permuted(self):
        order = [int(i) for i in rng.permutation(4)]
        order[0] = order[1] if rng.integers(4) == 0 else order[0]
        return [np.array(order, object)], {}

    def filled(self):
        return [np.array(self.shape(0, 2), object), self.array(())], {}

    def tiled(self):
        value = self.array(self.shape(1, 2))
        return [value, np.array([self.plain(0, 3) for _ in value.shape], object)], {}

    def offsets(self):
        axis, rank = self.plain(0, 2), 2
        others = [self.size() for _ in range(rank)]
        shapes = []
        for _ in range(self.plain(2, 4)):
            shape = np.array([*others, None], object)[:-1]
            shape[axis] = self.size()
            shapes.append(shape)
        return [np.array(axis, object), shapes], {}

    def reversed_along(self):
        value = self.array(self.shape(1, 2))
        return [value, np.array([self.plain(-value.ndim, value.ndim)], object)], {}

    def transposed(self):
        value = self.array(self.shape(1, 2))
        return [value, np.array([int(i) for i in rng.permutation(value.ndim)], object)], {}

    def broadcast_to(self):
        value = self.array([(), (1,), (3,), (1, 3), (2, 1)][self.plain(0, 5)])
        return [value, np.array([[2, 3], [3], [4, 2, 3]][self.plain(0, 3)], object)], {}

    def selected(self):
        shape = self.shape()
        condition = self.array(shape, lambda: self.plain(0, 2))
        return [condition, self.array(shape), self.array(shape)], {}

    def selected_by_rows(self):
        shape = self.shape(1, 2)
        condition = self.array(shape[: self.plain(1, len(shape) + 1)], lambda: self.plain(0, 2))
        return [condition, self.array(shape), self.array(shape)], {}

    def logical(self):
        shape = self.shape()
        return [self.array(shape, lambda: self.plain(0, 2)) for _ in range(2)], {}

    def two_shapes(self):
        full = [self.size() for _ in range(self.plain(1, 4))]

        def one():
            sizes = [1 if rng.integers(3) == 0 else size for size in full]
            sizes = sizes[self.plain(0, len(full)) :]
            return np.array([*sizes, None], object)[:-1]

        return [one(), one()], {}

    def cast(self):
        return [self.array(self.shape())], {"DstT": [tf.int32, tf.int64, tf.bool][self.plain(0, 3)]}


DRAW = {
    **dict.fromkeys(["Mul", "Add", "AddV2", "Sub", "FloorDiv", "Maximum", "Minimum"], Sample.broadcast),
    **dict.fromkeys(["Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual"], Sample.broadcast),
    **dict.fromkeys(["LogicalAnd", "LogicalOr"], Sample.logical),
    "FloorMod": Sample.plain_broadcast,
    **dict.fromkeys(["Identity", "Neg", "OnesLike", "ZerosLike", "StopGradient", "Snapshot"], Sample.one),
    "Cast": Sample.cast,
    **dict.fromkeys(["Prod", "Sum", "Max", "Min"], Sample.reduced),
    "Pack": Sample.packed,
    "Unpack": Sample.unpacked,
    "Split": Sample.split,
    "SplitV": Sample.split_by_sizes,
    "ConcatV2": Sample.concatenated,
    "Reshape": Sample.reshaped,
    "ExpandDims": Sample.expanded,
    "Squeeze": Sample.squeezed,
    "GatherV2": Sample.gathered,
    "DynamicStitch": Sample.stitched,
    "Slice": Sample.sliced,
    "StridedSlice": Sample.strided,
    "Range": Sample.ranged,
    "InvertPermutation": Sample.permuted,
    "Fill": Sample.filled,
    "Tile": Sample.tiled,
    "ConcatOffset": Sample.offsets,
    "ReverseV2": Sample.reversed_along,
    "Transpose": Sample.transposed,
    "BroadcastTo": Sample.broadcast_to,
    "SelectV2": Sample.selected,
    "Select": Sample.selected_by_rows,
    "BroadcastArgs": Sample.two_shapes,
    "BroadcastGradientArgs": Sample.two_shapes,
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


def static(tensor):
    return Static(tensor.dtype, None if tensor.shape.rank is None else tensor.shape.as_list())


def kernel(name, inputs, attributes, dtype):
    """Returns the node, and the kernel's results; None if the kernel fails."""
    with tf.Graph().as_default() as graph:

        def made(entries, i):
            is_bool = name in ("LogicalAnd", "LogicalOr") or (name in ("Select", "SelectV2") and i == 0)
            own = tf.bool if is_bool else tf.int32 if i in INT32.get(name, ()) else dtype
            values = [value_of(number) for number in entries.flat]
            return tf.constant(np.array(values, own.as_numpy_dtype).reshape(entries.shape), own)

        given = tf.nest.pack_sequence_as(inputs, [made(entries, i) for i, entries in enumerate(tf.nest.flatten(inputs))])
        operation = getattr(tf.raw_ops, name)
        result = operation(**dict(zip(inspect.signature(operation).parameters, given, strict=False)), **attributes)
        node = tf.nest.flatten(result)[0].op
        facts = [Facts(entries=entries) for entries in tf.nest.flatten(inputs)]
        described = Node(node.node_def, facts, list(map(static, node.inputs)), list(map(static, node.outputs)))
        with tf.compat.v1.Session(graph=graph) as session:
            try:
                computed = session.run(list(node.outputs))
            except tf.errors.OpError:
                computed = None
    return described, computed


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
def test_integers_are_those_of_the_kernel(name):
    known = 0
    for _ in range(CASES):
        sample = Sample()
        inputs, attributes = DRAW[name](sample)
        limits = tf.int32 if name == "ConcatOffset" else sample.dtype
        if any(
            not limits.min <= value_of(number) <= limits.max for entries in tf.nest.flatten(inputs) for number in entries.flat
        ):
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
