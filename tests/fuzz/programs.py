"""Describe programs as data, so that they can be drawn, run, shrunk and kept."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

WIDTH = 3
# Keras's optimizers for the weights of layers.
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.05),
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.RMSprop(0.01, clipnorm=0.1, gradient_accumulation_steps=2),
    "decaying": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5), weight_decay=0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion(0.01), dynamic_growth_steps=2),
}
# By kind of statement, a function that runs one: see `Scope.run`. `kinds` fills it.
RUNS: dict[str, Callable[..., Any]] = {}


@dataclasses.dataclass(frozen=True)
class Statement:
    """One step of a program: computes a value from others, all of which have names."""

    kind: str  # see `kinds`
    result: str
    arguments: tuple[str, ...]
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # numbers and texts, as JSON knows them
    bodies: tuple["Body", ...] = ()

    def __str__(self):
        parameters = [f"{name}={value!r}" for name, value in self.parameters.items()]
        lines = [f"{self.result} = {self.kind}({', '.join([*self.arguments, *parameters])})"]
        for body in self.bodies:
            lines += [f"    of {', '.join(body.arguments) or 'nothing'}:"]
            lines += [f"    {line}" for statement in body.statements for line in str(statement).splitlines()]
            lines += [f"    return {body.result}"]
        return "\n".join(lines)

    @classmethod
    def of(cls, read):
        """Returns the statement that `dataclasses.asdict` has described, which JSON may have kept."""
        bodies = [Body(tuple(one["arguments"]), tuple(map(cls.of, one["statements"])), one["result"]) for one in read["bodies"]]
        return cls(read["kind"], read["result"], tuple(read["arguments"]), read["parameters"], tuple(bodies))


@dataclasses.dataclass(frozen=True)
class Body:
    """The statements of a loop, branch or function."""

    arguments: tuple[str, ...]  # the values that change from call to call
    statements: tuple[Statement, ...]
    result: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A step over a batch of rows."""

    statements: tuple[Statement, ...]
    results: tuple[str, ...]
    loss: str | None = None  # the value whose mean is differentiated
    optimizer: str = "momentum"  # of the layers' weights

    def __str__(self):
        lines = [*map(str, self.statements), f"return {', '.join(self.results)}"]
        return "\n".join([*lines, f"differentiate {self.loss}, {self.optimizer}"] if self.loss else lines)

    @classmethod
    def of(cls, read):
        """Returns the program that `dataclasses.asdict` has described."""
        rest = {name: read[name] for name in ("loss", "optimizer") if name in read}
        return cls(tuple(map(Statement.of, read["statements"])), tuple(read["results"]), **rest)


class State:
    """The variables and generators of a program, the same for each run; its variables are on the devices in turn."""

    def __init__(self, devices=("CPU:0",)):
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
        self._layers, self._optimizers, self._all, self._first = {}, {}, [], []
        self._add([*self.variables.values(), self.counter, self.generator.state])

    def layer(self, name, make, shape):
        """Returns the layer of a name. It is made before the step, even if the step is being traced."""
        if name not in self._layers:
            with tf.init_scope(), tf.device(self._home):
                made = self._layers[name] = make()
                made.build(shape)
                draw = np.random.default_rng(zlib.crc32(name.encode()))
                for variable in made.variables:
                    is_seed = variable.dtype == "uint32"
                    # Variances are positive.
                    variable.assign([5, 0] if is_seed else np.abs(draw.normal(size=variable.shape)) * 0.3 + 0.1)
            self._add(made.variables)
        return self._layers[name]

    @property
    def weights(self):
        return [weight for layer in self._layers.values() for weight in layer.trainable_weights]

    def optimizer(self, name):
        """Returns the optimizer of a name, with variables for all weights so far."""
        if name not in self._optimizers:
            with tf.init_scope(), tf.device(self._home):
                made = self._optimizers[name] = OPTIMIZERS[name]()
                made.build(self.weights)
            self._add(made.variables)
        return self._optimizers[name]

    def _add(self, variables):
        with tf.init_scope():
            self._all += variables
            self._first += [variable.numpy() for variable in variables]

    def values(self):
        return [variable.numpy() for variable in self._all]

    def is_first(self):
        return all(np.array_equal(one, other) for one, other in zip(self._first, self.values(), strict=True))


class Scope:
    """The values of a program so far, or of a body inside of it, by name."""

    def __init__(self, state, values):
        self.state, self.variables, self.values = state, state.variables, dict(values)

    def run(self, statement):
        return RUNS[statement.kind](statement, [self.values[name] for name in statement.arguments], self)

    def call(self, body, *arguments):
        """Runs a body, which may take all values of the scope, and returns its result."""
        return self.after(body.statements, dict(zip(body.arguments, arguments, strict=True)))[body.result]

    def after(self, statements, values):
        """Runs statements in order, with these values as well, and returns all values."""
        inner = Scope(self.state, {**self.values, **values})
        for statement in statements:
            inner.values[statement.result] = inner.run(statement)
        return inner.values


def step_of(program, state):
    """Returns the step of a program, a function of two tensors with rows: numbers (B, 3), and integers (B,)."""

    def computed(x, labels):
        return Scope(state, {}).after(program.statements, {"x": x, "labels": labels})

    def step(x, labels):
        if program.loss is None:
            values = computed(x, labels)
            return [values[name] for name in program.results]
        with tf.GradientTape() as tape:
            tape.watch(x)
            values = computed(x, labels)
            loss = tf.reduce_mean(values[program.loss])
        sources = [x, *(state.variables[name] for name in ("kernel", "bias", "table"))]
        sources += [weight.value for weight in state.weights]
        gradients = [*map(tf.convert_to_tensor, tape.gradient(loss, sources, unconnected_gradients="zero"))]
        state.variables["kernel"].assign_sub(0.1 * tf.clip_by_norm(gradients[1], 1.0))
        if state.weights:
            state.optimizer(program.optimizer).apply(gradients[len(sources) - len(state.weights) :], state.weights)
        return [*(values[name] for name in program.results), loss, *gradients]

    return step
