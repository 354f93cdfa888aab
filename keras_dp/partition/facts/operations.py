"""Name types of operations that several stages treat alike."""

SHAPES = ("Shape", "ShapeN", "Size")
SHAPES_AND_RANK = (*SHAPES, "Rank")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
LOOPS = ("While", "StatelessWhile")
BRANCHES = ("If", "StatelessIf")
CASES = ("Case", "StatelessCase")
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
