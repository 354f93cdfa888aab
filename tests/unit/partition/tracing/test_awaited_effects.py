"""A node waits for the effects that come before it in plain Keras, and for nothing that no result can depend on."""

from tensorflow.core.framework import node_def_pb2

from keras_dp.partition.tracing.traced import awaited_effects


def nodes(**types_and_inputs):
    return {name: node_def_pb2.NodeDef(name=name, op=op, input=inputs) for name, (op, *inputs) in types_and_inputs.items()}


def test_a_node_without_effects_waits_for_writes_and_not_for_reads():
    """TensorFlow lets a gradient of a squared difference wait for another gradient, which reads variables."""
    awaited = awaited_effects(
        nodes(
            read=("ReadVariableOp",),
            write=("AssignVariableOp",),
            square=("Square", "read"),
            gradient=("Sub", "square", "^square", "^write"),
            update=("AssignSubVariableOp", "gradient", "^gradient"),
        )
    )
    assert awaited["gradient"] == ["write"]
    assert awaited["update"] == ["read", "write"]
