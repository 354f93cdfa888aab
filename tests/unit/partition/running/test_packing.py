"""No message waits for itself, and packing changes no number: random graphs on two to four devices."""

import random
from collections import Counter, defaultdict

import numpy as np
import pytest
import tensorflow as tf

from keras_dp.partition.building.writing import GraphWriter
from keras_dp.partition.running import calling, functions, packing

OPERATIONS = {"AddV2": np.add, "Sub": np.subtract, "Maximum": np.maximum}
# Tensors of int32 are not packed.
PASSED = {
    f"passed_{dtype}_{len(shape)}:0": np.arange(1, 1 + np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    for dtype in ("float64", "int64", "int32")
    for shape in [(), (2, 2)]
}


class RandomGraph:
    """Draws a graph of towers, of which some or all have a home on their device. Some nodes wait for others on any device."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.written = GraphWriter("CPU:0")  # takes the tensors in `PASSED`
        self.values = {}  # of all tensors, by name, as NumPy computes them
        self._alike = defaultdict(list)
        count = self.draw.randint(2, 4)
        self.devices = [f"CPU:{k}" for k in range(count)]
        homes = self.draw.choice([1, count])
        places = [(f"tower_{k}", f"CPU:{k}") for k in range(count)] + [("home", f"CPU:{k}") for k in range(homes)]
        for place in places:
            for passed, value in PASSED.items():
                self._write("Neg", [passed], -value, *place)
        meeting = self.draw.choice([0.0, 0.2, 0.9])
        for _ in range(self.draw.randint(10, 50)):
            if self.draw.random() < meeting:
                self.draw.choice([self._meet, self._meet, self._exchange])(places[:count])
            else:
                self._combine(*self.draw.choice(places))

    def _combine(self, prefix, device):
        """Combines two tensors, more often those of the same tower than others."""
        operation, kind = self.draw.choice(list(OPERATIONS)), self.draw.choice(list(PASSED))
        alike = self._alike[kind, self.draw.choice([prefix, prefix, None])]
        inputs = self.draw.choices(alike[-8:], k=2)
        controls = self.draw.sample(list(self.values), self.draw.choice([0, 0, 0, 2, 3]))
        value = OPERATIONS[operation](*(self.values[name] for name in inputs))
        self._write(operation, [*inputs, *(f"^{name}" for name in controls)], value, prefix, device)

    def _meet(self, towers):
        """Stacks parts of all towers on each of them, as towers that combine parts by themselves do."""
        kinds = self.draw.choices(list(PASSED), k=self.draw.choice([1, 2, 3]))
        parts = [[self._negated(kind, *tower) for tower in towers] for kind in kinds]
        for prefix, device in towers:
            for alike in parts:
                value = np.stack([self.values[part] for part in alike])
                inputs = {"N": len(alike), "T": tf.as_dtype(value.dtype), "axis": 0}
                self.values[self.written.add("Pack", alike, device, f"{prefix}/stack", **inputs)] = value

    def _exchange(self, towers):
        """Adds tensors of all towers on each of them, as homes add gradients of variables that are spread."""
        kind = self.draw.choice(list(PASSED))
        parts = [[self._negated(kind, *tower) for tower in towers] for _ in towers]
        for (prefix, device), alike in zip(towers, parts, strict=True):
            self._write("AddN", alike, sum(self.values[part] for part in alike), prefix, device)

    def _negated(self, kind, prefix, device):
        latest = self._alike[kind, prefix][-1]
        return self._write("Neg", [latest], -self.values[latest], prefix, device)

    def _write(self, operation, inputs, value, prefix, device):
        attributes = {"N": len(inputs)} if operation == "AddN" else {}
        name = self.written.add(operation, inputs, device, f"{prefix}/{operation}", T=tf.as_dtype(value.dtype), **attributes)
        self.values[name] = value
        for where in (prefix, None):
            self._alike[f"passed_{value.dtype}_{value.ndim}:0", where].append(name)
        return name

    def run(self, has_collectives):
        """Returns all values, as the packed graph computes them, and counts messages, stacks of them and collectives."""
        passed = {name: lambda value=value: tf.constant(value) for name, value in PASSED.items()}

        @tf.function(autograph=False)
        def function():
            made = calling.function_of(self.written, passed, list(self.values), [])
            types = functions.types_of(made.definition, made.given)
            packing.pack_copies(self.written, types, {}, self.devices if has_collectives else ())
            return calling.call(made)

        values = [value.numpy() for value in function.get_concrete_function()()]
        names = [node.name for node in self.written.function.node_def]
        return values, Counter(name.partition("_")[0] for name in names if name.startswith(("packed/", "together/Collective")))


def exchanged_by(count, has_collectives=False):
    """Runs random graphs, compares all of their values, and counts what they exchange."""
    exchanged = Counter()
    for seed in range(count):
        graph = RandomGraph(seed)
        values, counts = graph.run(has_collectives)
        for (name, expected), value in zip(graph.values.items(), values, strict=True):
            np.testing.assert_array_equal(value, expected, err_msg=f"{name}, seed {seed}")
        assert not graph.written.graph.cycle
        exchanged += counts
    return exchanged


def test_packed_graphs_have_no_cycle_and_compute_the_same():
    exchanged = exchanged_by(60)
    assert exchanged["packed/message"] > 80
    assert exchanged["packed/stack"] > 10


def test_graphs_with_collectives_have_no_cycle_and_compute_the_same():
    """A collective waits for all its members, which no edge of the graph says."""
    exchanged = exchanged_by(60, has_collectives=True)
    assert exchanged["together/CollectiveGatherV2"] > 50
    assert exchanged["together/CollectiveAllToAllV2"] > 5


@pytest.fixture
def drawn_rounds(monkeypatch):
    draw = random.Random(7)
    monkeypatch.setattr(packing, "_rounds", lambda copies, *_: [draw.randrange(4) for _ in copies])


@pytest.mark.usefixtures("drawn_rounds")
def test_no_rounds_make_a_cycle():
    """The rounds say which copies share messages. They do not have to be right for the result to be right."""
    assert exchanged_by(30)["packed/message"] > 20


@pytest.mark.usefixtures("drawn_rounds")
def test_a_function_that_would_wait_for_itself_is_not_packed(monkeypatch):
    """A negative control: nodes wait for messages that they lead to, which the check finds."""
    monkeypatch.setattr(packing, "_last_rounds", lambda copies, rounds, latest, nodes, order: dict.fromkeys(nodes, 4))
    with pytest.warns(UserWarning, match="travel one by one: in messages.*a cycle of the nodes .*packed/message"):
        exchanged_by(20)
