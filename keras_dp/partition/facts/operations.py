"""Name types of operations that several stages treat alike."""

SHAPES = ("Shape", "ShapeN", "Size")
SHAPES_AND_RANK = (*SHAPES, "Rank")
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
