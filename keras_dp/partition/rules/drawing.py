"""Random numbers and row numbers: made once for the whole batch, as on one device, and cut into slices."""

from keras_dp.partition.node import Node, Plan
from keras_dp.partition.placements import REPLICATE, Facts, Shard
from keras_dp.partition.rows import Rows, depends_on_rows
from keras_dp.partition.rules.registry import rule, types

DRAWS = types(
    """
    RandomStandardNormal RandomUniform RandomUniformInt StatelessParameterizedTruncatedNormal StatelessRandomBinomial
    StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomNormal StatelessRandomNormalV2 StatelessRandomPoisson
    StatelessRandomUniform StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 StatelessRandomUniformInt
    StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormal StatelessTruncatedNormalV2
    TruncatedNormal
    """
)


@rule(*DRAWS)
def draw(node: Node) -> Plan | None:
    """Random numbers of a shape that counts rows are drawn at home: the numbers are one device's."""
    shape = node.inputs[0].numbers
    if shape is None or any(facts.placement != REPLICATE for facts in node.inputs):
        return None
    rows = [i for i, number in enumerate(shape) if depends_on_rows([number])]
    if len(rows) != 1 or not isinstance(shape[rows[0]], Rows):
        return None
    return Plan([Facts(Shard(rows[0], shape[rows[0]].blocks))])


@rule("Range")
def count_up(node: Node) -> Plan | None:
    """The numbers of the rows of the whole batch."""
    start, limit, step = (facts.numbers for facts in node.inputs)
    if start == [0] and step == [1] and limit is not None and isinstance(limit[0], Rows):
        return Plan([Facts(Shard(0, limit[0].blocks))])
    return None
