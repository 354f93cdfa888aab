"""Have XLA compile the operations of towers."""

import re

from keras_dp.partition.writing import GraphWriter


def compile_towers(written: GraphWriter) -> None:
    """Marks the nodes on towers: XLA compiles those between two exchanges, of each tower for its own device.

    As `tf.xla.experimental.jit_scope` does while a graph is traced; operations that XLA does not know stay as they are.
    """
    for node in written.function.node_def:
        tower = re.match(r"tower_\d+(?=/)", node.name)
        if tower:
            node.attr["_XlaCompile"].b = True
            node.attr["_XlaSeparateCompiledGradients"].b = False
            node.attr["_XlaScope"].s = tower[0].encode()
