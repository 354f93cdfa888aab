"""Compile the operations of towers with XLA."""

from keras_dp.partition.building.builder import Built
from keras_dp.partition.placing.rules.drawing import DRAWS
from keras_dp.partition.placing.rules.registry import types
from keras_dp.partition.tracing.graph import nodes_with

# XLA draws other random numbers than TensorFlow's kernels.
_RANDOM = frozenset(
    [
        *DRAWS,
        *types(
            """
            Multinomial RandomShuffle StatelessMultinomial StatelessRandomGetAlg StatelessRandomGetKeyCounter
            StatelessRandomGetKeyCounterAlg StatelessShuffle
            """
        ),
    ]
)


def compile_towers(built: Built) -> None:
    """Marks the nodes on towers so that XLA compiles each tower's nodes between two exchanges for the tower's own device.

    `tf.xla.experimental.jit_scope` sets the same marks while a graph is traced. XLA skips operations that it does not support.
    Random numbers are drawn by TensorFlow's kernels, and so are one device's.
    """
    drawing = built.instances.of(nodes_with(_RANDOM, built.propagation.traced))
    for node in built.graph.function.node_def:
        tower = built.graph.towers.get(node.name)
        if tower is not None and node.op not in _RANDOM and node.name not in drawing:
            node.attr["_XlaCompile"].b = True
            node.attr["_XlaSeparateCompiledGradients"].b = False
            node.attr["_XlaScope"].s = f"tower_{tower}".encode()
