"""Define what the programs share: a small model, optimizers, steps, and a script that trains."""

import functools

import keras
import tensorflow as tf

from programs.catalogue import FEATURES, TARGETS, program


def dense(cls, outputs=1, activation=None, normalized=True):
    """Returns a function that builds a small functional network of this class for 5 features."""

    def build():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dense(4, activation="tanh")(inputs)
        if normalized:
            hidden = keras.layers.BatchNormalization(momentum=0.8)(hidden)
        return cls(inputs, keras.layers.Dense(outputs, activation=activation)(hidden))

    return build


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.01)


def descend(optimizer, tape, loss, variables):
    """Takes the gradients from the tape and applies them."""
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


class Learner:
    """Makes a model descend along the loss of its `loss_of`, which also returns further logs, and track it.

    It is no model itself: Keras would change it where a subclass is made of inputs and outputs.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="total")
        self.seed = keras.random.SeedGenerator(12)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss, logs = self.loss_of(*data) if isinstance(data, tuple) else self.loss_of(data)
        descend(self.optimizer, tape, loss, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"total": self.tracker.result(), **logs}


def descends(loss_of, **arguments):
    """Registers a program whose step descends along the loss of (model, x, y), which also returns further logs."""
    build = dense(type(loss_of.__name__, (Learner, keras.Model), {"loss_of": loss_of}))
    return program(functools.wraps(loss_of)(lambda: (build, fits(**arguments))))


def follow(average, network):
    """Moves the weights of a network that is an average of another one towards the weights of that."""
    for mean, weight in zip(average.weights, network.weights, strict=True):
        mean.assign(0.9 * mean + 0.1 * weight)


def fits(x=FEATURES, y=TARGETS, optimizer=sgd, builds=False, evaluates=False, predicts=False, report=None, **arguments):
    """Returns a script that compiles with arguments and fits, and optionally evaluates, predicts and reports on the model."""

    def script(model):
        made = optimizer()
        if builds:  # a branch of the step cannot make the optimizer's variables
            made.build(model.trainable_variables)
        model.compile(optimizer=made, **arguments)
        results = [model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history]
        if evaluates:
            results.append(model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True))
        if predicts:
            results.append(model.predict(x, batch_size=4, verbose=0))
        if report:
            results.append(report(model))
        return results

    return script


def mean_square(y, answers):
    return tf.reduce_mean(tf.square(y - answers))


def rows_of(x):
    """Returns the number of rows of a batch, as a tensor."""
    return tf.cast(tf.shape(x)[0], "float64")
