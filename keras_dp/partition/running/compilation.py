"""Compile the operations of towers with XLA."""

from keras_dp.partition.building.builder import Built
from keras_dp.partition.building.writing import full_name
from keras_dp.partition.placing.rules.drawing import DRAWS
from keras_dp.partition.placing.rules.registry import types
from keras_dp.partition.tracing.traced import nodes_with

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
    """Marks the nodes on towers so that XLA compiles each tower's nodes between two exchanges, for the tower's own device.

    A tower that exchanges nothing, with other towers or workers, is compiled together with the nodes at home on its device.
    Beside several towers, XLA would cut home into many small pieces, and each begins later than its nodes would (seen on an
    H100).

    `tf.xla.experimental.jit_scope` sets the same marks while a graph is traced. XLA skips operations that it does not support.
    Random numbers are drawn by TensorFlow's kernels, and so are one device's.

    Args:
        built: the graph of the towers and of home.
    """
    graph, devices = built.graph, built.target.devices
    drawing = built.instances.of(nodes_with(_RANDOM, built.propagation.traced))
    nodes = graph.function.node_def
    is_alone = len(devices) == 1 and not any(node.op.startswith("Collective") for node in nodes)
    for node in nodes:
        tower = graph.towers.get(node.name)
        is_own_constant = node.op == "Const" and node.name not in graph.origins
        if is_alone and not is_own_constant and node.device == full_name(devices[0]):
            tower = 0
        if tower is not None and node.op not in _RANDOM and node.name not in drawing:
            node.attr["_XlaCompile"].b = True
            node.attr["_XlaSeparateCompiledGradients"].b = False
            node.attr["_XlaScope"].s = f"tower_{tower}".encode()
