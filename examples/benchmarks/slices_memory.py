"""Measure the memory and the time of a training step on one device whose rows are cut into k slices, one after the other.

Each k has a process of its own, in which TensorFlow's allocator counts what it allocates, as on GPUs
(TF_CPU_ALLOCATOR_USE_BFC). Batch normalizations take the moments of each slice: with those of the global batch, slices meet in
the middle of the step, and memory falls little. Other ways to less memory are measured beside it. See docs/out_of_memory.md.
"""

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time

import keras
import tensorflow as tf
from keras import layers

import keras_dp
from keras_dp.cli import models, synthetic

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "TF_CPU_ALLOCATOR_USE_BFC": "true"}
BATCH_SIZES = {"mlp": 8_192, "transformer": 64, "resnet20": 256, "resnet50": 32, "unet": 64, "lstm": 128}
ALLOCATOR = "CPU:0"
WARM_UP_STEPS = 3


class Block(keras.layers.Layer):
    """Computes a part of a model, and computes it again for the gradient if asked to, in place of keeping its activations."""

    def __init__(self, part, again):
        super().__init__()
        self.part, self.again = part, again

    def call(self, x, training=None):
        """Returns the part's outputs."""

        def run(x):
            return self.part(x, training=training)

        return keras.remat(run)(x) if self.again else run(x)


def transformer_in_blocks(again, width=128):
    def block():
        inputs = keras.Input((models.SEQUENCE_LENGTH, width))
        normalized = layers.LayerNormalization()(inputs)
        attention = layers.MultiHeadAttention(num_heads=4, key_dim=width // 4)
        x = layers.Add()([inputs, attention(normalized, normalized, use_causal_mask=True)])
        hidden = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        return keras.Model(inputs, layers.Add()([x, layers.Dense(width)(hidden)]))

    tokens = keras.Input((models.SEQUENCE_LENGTH,), dtype="int32")
    x = models.PositionEmbedding()(layers.Embedding(models.VOCABULARY, width)(tokens))
    for _ in range(4):
        x = Block(block(), again)(x)
    return keras.Model(tokens, layers.Dense(models.VOCABULARY)(layers.LayerNormalization()(x)))


def convolution(x, filters, size=3, strides=1):
    x = layers.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


def resnet20_in_blocks(again):
    def block(shape, filters, strides):
        inputs = shortcut = keras.Input(shape)
        if strides == 2:
            shortcut = keras.ops.pad(inputs[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (filters // 4, filters // 4)))
        x = convolution(layers.ReLU()(convolution(inputs, filters, strides=strides)), filters)
        return keras.Model(inputs, layers.ReLU()(layers.Add()([x, shortcut])))

    images = keras.Input((32, 32, 3))
    x = layers.ReLU()(convolution(images, 16))
    for filters, first_strides in ((16, 1), (32, 2), (64, 2)):
        for strides in (first_strides, 1, 1):
            x = Block(block(x.shape[1:], filters, strides), again)(x)
    return keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def resnet50_in_blocks(again):
    def block(shape, filters, strides):
        inputs = shortcut = keras.Input(shape)
        if shape[-1] != 4 * filters:
            shortcut = convolution(inputs, 4 * filters, 1, strides)
        x = layers.ReLU()(convolution(inputs, filters, 1, strides))
        x = layers.ReLU()(convolution(x, filters))
        return keras.Model(inputs, layers.ReLU()(layers.Add()([convolution(x, 4 * filters, 1), shortcut])))

    images = keras.Input((224, 224, 3))
    x = layers.MaxPooling2D(3, 2, padding="same")(layers.ReLU()(convolution(images, 64, 7, 2)))
    for filters, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(count):
            x = Block(block(x.shape[1:], filters, 2 if filters > 64 and number == 0 else 1), again)(x)
    return keras.Model(images, layers.Dense(1_000)(layers.GlobalAveragePooling2D()(x)))


IN_BLOCKS = {"transformer": transformer_in_blocks, "resnet20": resnet20_in_blocks, "resnet50": resnet50_in_blocks}
# By name: the slices of a device, the batches of an update and how their gradients are averaged, and whether each block is
# computed again.
WAYS = {
    "none": (1, 1, "batches", False),
    "`slices_per_device=4`": (4, 1, "batches", False),
    "`gradient_accumulation_steps=4`": (1, 4, "batches", False),
    'the same, `accumulate="rows"`': (1, 4, "rows", False),
    "`keras.remat`": (1, 1, "batches", True),
    "`keras.remat`, `slices_per_device=4`": (4, 1, "batches", True),
}


def measured_slices(name, slices, *options):
    """Measures the steps of a model whose rows are cut into slices."""
    return measured(name, models.workload(name).build, slices, 1, "batches", *options)


def measured_way(name, way, *options):
    """Measures the steps of a model of blocks, with one of several ways to less memory."""
    slices, batches, accumulate, again = WAYS[way]
    return measured(name, functools.partial(IN_BLOCKS[name], again), slices, batches, accumulate, *options)


def measured(name, build, slices, batches, accumulate, steps, batch_norm, jit_compile):
    """Trains, and returns the bytes of the variables, the most bytes in an update beside them, and its median time."""
    # With few threads, operations of one slice wait for each other, as on GPUs.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    synthetic.BATCHES = 1
    parallel = keras_dp.DataParallelModel(build(), 1, batch_norm=batch_norm, slices_per_device=slices)
    optimizer = models.optimizer()
    optimizer.gradient_accumulation_steps = batches if batches > 1 else None
    optimizer = keras_dp.DataParallelOptimizer(optimizer, accumulate=accumulate)
    parallel.compile(optimizer, **models.workload(name).objective(), jit_compile=jit_compile)
    x, y = next(iter(synthetic.dataset(parallel.inner_model, BATCH_SIZES[name] // batches)))

    def update():
        for _ in range(batches):
            parallel.train_on_batch(x, y)

    for _ in range(WARM_UP_STEPS):
        update()
    peaks, times = [], []
    for _ in range(steps):
        gc.collect()
        before = tf.config.experimental.get_memory_info(ALLOCATOR)["current"]
        tf.config.experimental.reset_memory_stats(ALLOCATOR)
        begin = time.perf_counter()
        update()
        times.append(time.perf_counter() - begin)
        peaks.append(tf.config.experimental.get_memory_info(ALLOCATOR)["peak"] - before)
    variables = [*parallel.variables, *parallel.optimizer.variables]
    held = sum(one.value.shape.num_elements() * tf.as_dtype(one.dtype).size for one in variables)
    # A thread that other load holds up frees its memory later: that only adds.
    return held, min(peaks), statistics.median(times)


def in_process(function, *arguments):
    """The same, from a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps([function.__name__, *arguments])]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)
    if done.returncode:
        raise RuntimeError(done.stderr[-2_000:])
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=BATCH_SIZES)
    parser.add_argument("--slices", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--ways", action="store_true", help="measure other ways to less memory beside slices")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-norm", choices=["local", "sync"], default="local")
    parser.add_argument("--jit-compile", action="store_true")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        name, *others = arguments.one
        print(json.dumps({"measured_slices": measured_slices, "measured_way": measured_way}[name](*others)))
        return
    options = arguments.steps, arguments.batch_norm, arguments.jit_compile
    if arguments.ways:
        show("for less memory", measured_way, arguments.models or IN_BLOCKS, WAYS, options)
    else:
        names = arguments.models or ["mlp", "transformer", "resnet20", "resnet50"]
        show("slices", measured_slices, names, arguments.slices, options)


def show(heading, function, names, choices, options):
    """Prints a table with a line for each choice, beside the first of them."""
    headings = ["model", "rows", heading, "memory, MB", "of the first", "without variables, MB", "of the first", "step, ms"]
    headings.append("of the first")
    print(f"| {' | '.join(headings)} |\n{'|---' * len(headings)}|", flush=True)
    for name in names:
        first = None
        for choice in choices:
            held, beside, seconds = in_process(function, name, choice, *options)
            numbers = held + beside, beside, seconds
            first = first or numbers
            units = (1e6, 1e6, 1e-3)
            cells = [name, f"{BATCH_SIZES[name]:,}", str(choice)]
            for number, of_one, unit in zip(numbers, first, units, strict=True):
                cells += [f"{number / unit:,.0f}", f"{number / of_one:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
