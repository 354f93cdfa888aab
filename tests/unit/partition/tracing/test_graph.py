"""A graph is followed forward and backward, in an order that is always the same."""

from tensorflow.core.framework import node_def_pb2

from keras_dp.partition.tracing.graph import Graph, reached, set_inputs

# "e" comes first, and takes the second result of "d". Nothing here makes "given".
INPUTS = {"e": ["d:z:1", "a"], "a": ["given"], "b": ["a:0", "^a"], "c": ["a"], "d": ["c", "b", "^c"], "alone": []}


def graph_of(inputs):
    return Graph(node_def_pb2.NodeDef(name=name, op=name.upper(), input=taken) for name, taken in inputs.items())


def test_sources_are_named_once_in_the_order_of_all_nodes():
    graph = graph_of(INPUTS)
    assert graph.sources == {"e": ["a", "d"], "a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"], "alone": []}
    assert {name: graph.takers[name] for name in "abcde"} == {"a": ["e", "b", "c"], "b": ["d"], "c": ["d"], "d": ["e"], "e": []}


def test_a_node_comes_after_its_sources_and_else_as_it_was():
    graph = graph_of(INPUTS)
    assert graph.order == ["a", "b", "c", "d", "e", "alone"]
    assert [node.op for node in graph.in_order()] == ["A", "B", "C", "D", "E", "ALONE"]


def test_nodes_before_and_after_others():
    graph = graph_of(INPUTS)
    assert graph.before(["b", "given"]) == {"a", "b"}
    assert list(graph.within(["b"]).nodes) == ["a", "b"]
    assert graph.after(["c"]) == {"c", "d", "e"}
    assert graph.after(["a"], lambda name: name != "d") == {"a", "b", "c", "e"}


def test_cycles_are_found_through_tensors_and_controls():
    waiting = {"a": ["given"], "b": ["a:z:0", "^c"], "c": ["b:z:0"], "d": ["c:z:0"]}
    assert set(graph_of(waiting).cycle) == {"b", "c"}
    assert graph_of(waiting | {"b": ["a:z:0"]}).cycle == []


def test_what_is_reached_comes_in_one_order():
    following = {8: [4, 6], 4: [2, 1], 6: [3, 1], 2: [8]}
    assert list(reached([8, 5], lambda number: following.get(number, []))) == [5, 8, 6, 1, 3, 4, 2]


def test_inputs_are_replaced_even_by_those_that_a_node_has():
    node = node_def_pb2.NodeDef(name="a", input=["b", "c", "^d"])
    set_inputs(node, (name for name in node.input if name != "c"))
    assert list(node.input) == ["b", "^d"]
