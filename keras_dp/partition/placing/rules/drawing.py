"""Draw random numbers, and number rows, as one device does."""

import math
from typing import Any

import tensorflow as tf

from keras_dp.partition.facts.node import Node, Plan
from keras_dp.partition.facts.placements import LOCAL_SHAPE, REPLICATE, Facts, Shard
from keras_dp.partition.facts.rows import Rows, depends_on_rows
from keras_dp.partition.facts.tower_builder import TowerBuilder
from keras_dp.partition.placing.rules.registry import rule, types
from keras_dp.partition.tensorflow_internals import HOST

DRAWS = types(
    """
    RandomStandardNormal RandomUniform RandomUniformInt StatelessParameterizedTruncatedNormal StatelessRandomBinomial
    StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomPoisson
    StatelessRandomUniform StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 StatelessRandomUniformInt
    StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormal StatelessTruncatedNormalV2
    TruncatedNormal
    """
)


# These draws use the numbers of Philox's blocks in sequence, from a key, a counter and the algorithm.
SKIPPING = types(
    """
    StatelessRandomNormalV2 StatelessRandomUniformFullIntV2 StatelessRandomUniformIntV2 StatelessRandomUniformV2
    """
)
_BLOCK_BITS = 128


@rule(*DRAWS)
def draw(node: Node) -> Plan | None:
    """Plans random numbers of a shape that counts rows, the same as one device draws.

    Each tower skips the numbers of the rows before its own. Where that is not possible, as for numbers that may be rejected,
    all numbers are drawn at home and cut into slices.
    """
    shape = node.inputs[0].numbers
    if shape is None or any(facts.placement != REPLICATE for facts in node.inputs):
        return None
    rows = [i for i, number in enumerate(shape) if depends_on_rows([number])]
    if len(rows) != 1 or not isinstance(shape[rows[0]], Rows):
        return None
    blocks = shape[rows[0]].blocks
    facts = Facts(Shard(rows[0], blocks))
    if node.type not in SKIPPING or rows != [0] or len(blocks) != 1 or node.in_body:
        return Plan([facts])
    entries = [*blocks, *shape[1:]]
    in_row = math.prod(entries) if all(isinstance(number, int) for number in entries) else None

    def instance(builder: TowerBuilder, definition: Any, tower: int, inputs: list[str]) -> str:
        return _draw_rows(builder, node, in_row, tower, inputs)

    return Plan([facts], [LOCAL_SHAPE, *[REPLICATE] * (len(node.inputs) - 1)], instance, also_at_home=True)


def _draw_rows(builder: TowerBuilder, node: Node, in_row: int | None, tower: int, inputs: list[str]) -> str:
    """Draws the numbers of a tower's rows.

    Philox (Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3) makes a block of 128 bits from a key and a counter.
    The next counter gives the next block.

    Args:
        builder: the builder of the graph.
        node: the draw.
        in_row: how many numbers each row has; None if this is not known.
        tower: the tower's number.
        inputs: the tower's shape, the key, the counter, the algorithm, and further inputs.
    """
    shape, key, counter, *more = inputs
    shape_dtype, device, host = node.dtype(0), builder.devices[tower], HOST
    in_block = _BLOCK_BITS // 8 // max(node.result_dtype().size, tf.float32.size)

    def on_host(operation: str, a: str, b: str, dtype: tf.DType = tf.int64) -> str:
        return builder.graph.add(operation, [a, b], host, f"host/{node.name}/{operation}", T=dtype)

    def number(value: Any, dtype: tf.DType = tf.int64) -> str:
        return builder.graph.constant(value, dtype, host)

    def cast(tensor: str, source: tf.DType, target: tf.DType) -> str:
        name = f"host/{node.name}/cast"
        return builder.graph.add("Cast", [tensor], host, name, SrcT=source, DstT=target, Truncate=False)

    axes = number([0], tf.int32)
    sizes = cast(shape, shape_dtype, tf.int64)
    count = builder.graph.add("Prod", [sizes, axes], host, f"{node.name}/count", T=tf.int64, Tidx=tf.int32, keep_dims=False)
    each = on_host("FloorDiv", count, cast(builder.rows[tower], tf.int32, tf.int64))
    before = on_host("Mul", cast(builder.begins[tower], tf.int32, tf.int64), each)
    blocks = cast(on_host("FloorDiv", before, number(in_block)), tf.int64, tf.uint64)
    skipped = _add_to_counter(builder, counter, blocks, on_host, number)
    if in_row is not None and in_row % in_block == 0:
        return builder.copy(node.definition, tower, [shape, key, skipped, *more])
    extra = on_host("FloorMod", before, number(in_block))
    length = cast(on_host("AddV2", count, extra), tf.int64, shape_dtype)
    flat = builder.graph.add("Pack", [length], host, f"{node.name}/flat", N=1, T=shape_dtype, axis=0)
    drawn = builder.copy(node.definition, tower, [flat, key, skipped, *more])
    begin, size = (
        builder.graph.add("Pack", [part], host, f"{node.name}/part", N=1, T=tf.int64, axis=0) for part in (extra, count)
    )
    dtype = node.result_dtype()
    own = builder.graph.add("Slice", [drawn, begin, size], device, f"{node.name}/own", T=dtype, Index=tf.int64)
    return builder.graph.add("Reshape", [own, shape], device, node.name, tower, T=dtype, Tshape=shape_dtype)


def _add_to_counter(builder: TowerBuilder, counter: str, blocks: str, on_host: Any, number: Any) -> str:
    """Adds a number of blocks to a counter of two words of 64 bits, the lower word first."""
    types_of_words = {"batch_dims": 0, "Tparams": tf.uint64, "Tindices": tf.int32, "Taxis": tf.int32}
    low, high = (
        builder.graph.add("GatherV2", [counter, number(i, tf.int32), number(0, tf.int32)], HOST, "counter", **types_of_words)
        for i in range(2)
    )
    total = on_host("AddV2", low, blocks, tf.uint64)
    overflows = on_host("Less", total, low, tf.uint64)
    carry = builder.graph.add("Cast", [overflows], HOST, "carry", SrcT=tf.bool, DstT=tf.uint64, Truncate=False)
    words = [total, on_host("AddV2", high, carry, tf.uint64)]
    return builder.graph.add("Pack", words, HOST, "counter", N=2, T=tf.uint64, axis=0)


@rule("Range")
def count_up(node: Node) -> Plan | None:
    """Plans a range that numbers the rows of the whole batch."""
    start, limit, step = (facts.numbers for facts in node.inputs)
    if start == [0] and step == [1] and limit is not None and isinstance(limit[0], Rows):
        return Plan([Facts(Shard(0, limit[0].blocks))])
    return None
