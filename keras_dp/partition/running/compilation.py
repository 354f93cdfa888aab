"""Compile the operations of towers with XLA."""

from keras_dp.partition.building.writing import GraphWriter


def compile_towers(written: GraphWriter) -> None:
    """Marks the nodes on towers so that XLA compiles each tower's nodes between two exchanges for the tower's own device.

    `tf.xla.experimental.jit_scope` sets the same marks while a graph is traced. XLA skips operations that it does not support.
    """
    for node in written.function.node_def:
        tower = written.towers.get(node.name)
        if tower is not None:
            node.attr["_XlaCompile"].b = True
            node.attr["_XlaSeparateCompiledGradients"].b = False
            node.attr["_XlaScope"].s = f"tower_{tower}".encode()
