"""Do the work of long runs: steps, models, calls and shapes, again and again, on one device or on two towers."""

import gc
import itertools
import os
import time
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context

import keras_dp

X, Y = (np.random.default_rng(0).normal(size=(64, width)).astype("float32") for width in (8, 1))


class Sample(NamedTuple):
    """What a process holds at one time."""

    done: int  # how much of the work is done: steps, models, calls or fits
    seconds: float  # since the start
    megabytes: float  # of resident memory
    functions: int  # that TensorFlow knows
    threads: int  # those of TensorFlow included
    files: int  # open file descriptors


def sample(done):
    """Returns what this process holds now. Works on Linux."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return Sample(
        done,
        time.monotonic(),
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        len(context.context().list_function_names()),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
    )


def plain(model):
    return model


def on_towers(model):
    return keras_dp.DataParallelModel(model, devices=2)


def compiled(wrap):
    """Returns a model with all that keeps state: batch normalization, dropout, an optimizer and metrics."""
    stack = [layers.Dense(16, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.1), layers.Dense(1)]
    model = wrap(keras.Sequential([keras.Input((8,)), *stack]))
    model.compile("adam", "mse", metrics=["mae"])
    return model


def steps(wrap):
    """Trains one model in epochs of 100 steps, and yields the number of steps so far."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).repeat()
    model = compiled(wrap)
    for count in itertools.count(1):
        model.fit(data, steps_per_epoch=100, verbose=0)
        yield 100 * count


def models(wrap):
    """Trains one new model after the other, and yields their number so far."""
    for count in itertools.count(1):
        compiled(wrap).fit(X, Y, batch_size=16, verbose=0)
        keras.utils.clear_session()
        yield count


def calls(wrap):
    """Fits, evaluates and predicts with one model in turn, and yields how often so far."""
    model = compiled(wrap)
    for count in itertools.count(1):
        model.fit(X, Y, batch_size=16, verbose=0)
        model.evaluate(X, Y, batch_size=16, verbose=0)
        model.predict(X, batch_size=16, verbose=0)
        yield count


def shapes(wrap):
    """Fits one model on more rows each time, and yields the number of fits so far. Each one is traced anew."""
    model = compiled(wrap)
    for count in itertools.count(1):
        rows = 8 + count
        x, y = (np.resize(array, (2 * rows, array.shape[1])) for array in (X, Y))
        model.fit(x, y, batch_size=rows, verbose=0)
        yield count


WORK = {"steps": steps, "models": models, "calls": calls, "shapes": shapes}


def samples(name, wrap, amount, number):
    """Does an amount of work, and returns so many samples, evenly spread over it."""
    taken = []
    for done in WORK[name](wrap):
        if done >= amount * (len(taken) + 1) / number:
            taken.append(sample(done))
        if done >= amount:
            return taken
    raise AssertionError("work does not end by itself")
