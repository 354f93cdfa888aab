"""Describe programs as data, so that they can be drawn, run, shrunk and kept."""

import dataclasses
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

WIDTH = 3
# Keras's optimizers for the weights of layers.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.05),
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.RMSprop(0.01, clipnorm=0.1, gradient_accumulation_steps=2),
    "decaying": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5), weight_decay=0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion(0.01), dynamic_growth_steps=2),
}


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
        optimizer: the name of the optimizer of the layers' weights.
    """

    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    loss: str | None = None
    optimizer: str = "momentum"

    def __str__(self) -> str:
        lines = [*map(str, self.statements), f"return {', '.join(self.results)}"]
        return "\n".join([*lines, f"differentiate {self.loss}, {self.optimizer}"] if self.loss else lines)

    def to_json(self) -> str:
        """Writes the program as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Program":
        """Reads a program from JSON."""
        read = json.loads(text)
        return cls(
            tuple(map(_statement, read["statements"])), tuple(read["results"]), read["loss"], read.get("optimizer", "momentum")
        )


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
        self._home = devices[0]
        self._layers: dict[str, Any] = {}
        self._optimizers: dict[str, Any] = {}
        self._all = [*self.variables.values(), self.counter, self.generator.state]
        self._first = [variable.numpy() for variable in self._all]

    def layer(self, name: str, make: Callable[[], Any], shape: Sequence[Any]) -> Any:
        """Returns the layer of a name. It is made before the step, even if the step is being traced."""
        if name not in self._layers:
            with tf.init_scope(), tf.device(self._home):
                made = make()
                made.build(shape)
                draw = np.random.default_rng(zlib.crc32(name.encode()))
                for variable in made.variables:
                    is_seed = variable.dtype == "uint32"
                    # Variances are positive.
                    variable.assign([5, 0] if is_seed else np.abs(draw.normal(size=variable.shape)) * 0.3 + 0.1)
            self._layers[name] = made
            self._add(made.variables)
        return self._layers[name]

    @property
    def weights(self) -> list[Any]:
        """The trainable weights of the layers."""
        return [weight for layer in self._layers.values() for weight in layer.trainable_weights]

    def optimizer(self, name: str) -> Any:
        """Returns the optimizer of a name, with variables for all weights so far."""
        if name not in self._optimizers:
            with tf.init_scope(), tf.device(self._home):
                made = OPTIMIZERS[name]()
                made.build(self.weights)
            self._optimizers[name] = made
            self._add(made.variables)
        return self._optimizers[name]

    def _add(self, variables: Sequence[Any]) -> None:
        with tf.init_scope():
            self._all += variables
            self._first += [variable.numpy() for variable in variables]

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
        sources += [weight.value for weight in state.weights]
        gradients = tape.gradient(loss, sources, unconnected_gradients="zero")
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        state.variables["kernel"].assign_sub(0.1 * tf.clip_by_norm(gradients[1], 1.0))
        if state.weights:
            state.optimizer(program.optimizer).apply(gradients[len(sources) - len(state.weights) :], state.weights)
        return [*(scope.values[name] for name in program.results), loss, *gradients]

    return step
