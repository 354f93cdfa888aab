"""Describe programs as data, so that they can be drawn, run, shrunk and kept."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

WIDTH = 3


@dataclasses.dataclass(frozen=True)
class Statement:
    """One step of a program: computes a value from others.

    Attributes:
        kind: the name of the kind of statement; see `kinds`.
        result: the name of the value that it computes.
        arguments: the names of the values that it takes.
        parameters: numbers and texts, as JSON knows them.
        bodies: the bodies of a loop, branch or function.
    """

    kind: str
    result: str
    arguments: tuple[str, ...]
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bodies: tuple["Body", ...] = ()

    def __str__(self) -> str:
        parameters = [f"{name}={value!r}" for name, value in self.parameters.items()]
        lines = [f"{self.result} = {self.kind}({', '.join([*self.arguments, *parameters])})"]
        for body in self.bodies:
            lines += [f"    of {', '.join(body.arguments) or 'nothing'}:"]
            lines += [f"    {line}" for statement in body.statements for line in str(statement).splitlines()]
            lines += [f"    return {body.result}"]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Body:
    """The statements of a loop, branch or function.

    Attributes:
        arguments: the names of the values that change from call to call.
        statements: the statements.
        result: the name of the value to return.
    """

    arguments: tuple[str, ...]
    statements: tuple[Statement, ...]
    result: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A step over a batch of rows.

    Attributes:
        statements: the statements.
        results: the names of the values that the step returns.
        loss: the name of the value whose mean is differentiated; None for a step without gradients.
    """

    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    loss: str | None = None

    def __str__(self) -> str:
        lines = [*map(str, self.statements), f"return {', '.join(self.results)}"]
        return "\n".join([*lines, f"differentiate {self.loss}"] if self.loss else lines)

    def to_json(self) -> str:
        """Writes the program as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Program":
        """Reads a program from JSON."""
        read = json.loads(text)
        return cls(tuple(map(_statement, read["statements"])), tuple(read["results"]), read["loss"])


def _statement(read: Mapping[str, Any]) -> Statement:
    bodies = [Body(tuple(b["arguments"]), tuple(map(_statement, b["statements"])), b["result"]) for b in read["bodies"]]
    return Statement(read["kind"], read["result"], tuple(read["arguments"]), read["parameters"], tuple(bodies))


class State:
    """The variables and generators of a program, the same for each run.

    Args:
        devices: the devices of the variables, in turn.
    """

    def __init__(self, devices: Sequence[str] = ("CPU:0",)):
        draw = np.random.default_rng(5)
        shapes = {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,), "table": (5, WIDTH), "total": (), "moving": (WIDTH,)}
        self.variables = {}
        for i, (name, shape) in enumerate(shapes.items()):
            with tf.device(devices[i % len(devices)]):
                self.variables[name] = tf.Variable(draw.normal(size=shape) * 0.5, name=name)
        with tf.device(devices[0]):
            self.counter = tf.Variable(0, dtype=tf.int64, name="counter")
            self.generator = tf.random.Generator.from_seed(3)
        self._all = [*self.variables.values(), self.counter, self.generator.state]
        self._first = [variable.numpy() for variable in self._all]

    def reset(self) -> None:
        """Sets all variables to their first values."""
        for variable, value in zip(self._all, self._first, strict=True):
            variable.assign(value)

    def values(self) -> list[np.ndarray]:
        """Returns the values of all variables."""
        return [variable.numpy() for variable in self._all]

    def is_first(self) -> bool:
        """Returns whether all variables have their first values."""
        return all(np.array_equal(one, other) for one, other in zip(self._first, self.values(), strict=True))


Run = Callable[[Statement, Sequence[Any], State, "Scope"], Any]
RUNS: dict[str, Run] = {}


class Scope:
    """The values of a program, or of a body inside of it.

    Args:
        state: the variables.
        values: the values so far, by name.
    """

    def __init__(self, state: State, values: Mapping[str, Any]):
        self.state, self.values = state, dict(values)

    def run(self, statements: Sequence[Statement]) -> None:
        """Runs statements in order."""
        for statement in statements:
            arguments = [self.values[name] for name in statement.arguments]
            self.values[statement.result] = RUNS[statement.kind](statement, arguments, self.state, self)

    def call(self, body: Body, *arguments: Any) -> Any:
        """Runs a body, which may take all values of the scope, and returns its result."""
        inner = Scope(self.state, {**self.values, **dict(zip(body.arguments, arguments, strict=True))})
        inner.run(body.statements)
        return inner.values[body.result]


def step_of(program: Program, state: State) -> Callable[..., list[Any]]:
    """Returns the step of a program, a function of two tensors with rows: numbers (B, 3), and integers (B,)."""

    def step(x: Any, labels: Any) -> list[Any]:
        def computed() -> Scope:
            scope = Scope(state, {"x": x, "labels": labels})
            scope.run(program.statements)
            return scope

        if program.loss is None:
            scope = computed()
            return [scope.values[name] for name in program.results]
        with tf.GradientTape() as tape:
            tape.watch(x)
            scope = computed()
            loss = tf.reduce_mean(scope.values[program.loss])
        sources = [x, *(state.variables[name] for name in ("kernel", "bias", "table"))]
        gradients = tape.gradient(loss, sources, unconnected_gradients="zero")
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        state.variables["kernel"].assign_sub(0.1 * tf.clip_by_norm(gradients[1], 1.0))
        return [*(scope.values[name] for name in program.results), loss, *gradients]

    return step
