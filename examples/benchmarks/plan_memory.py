"""Hold the memory that `keras-dp plan` predicts against TensorFlow's allocator on CPUs, for ten models.

Each step has a process of its own, in which TensorFlow's allocator counts what it allocates, as on GPUs
(TF_CPU_ALLOCATOR_USE_BFC). Logical CPUs share one memory: what a tower sends another takes none, and so it is for the simulated
GPUs here. TensorFlow's profiler tells each tower's tensors, and the scratch memory of kernels, which is that of CPUs. Another
process, with TensorFlow's usual allocator, tells how much it grows; that needs Linux. See docs/gpu_audit.md.
"""

import argparse
import collections
import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import keras
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2  # hardly public, but nothing else tells the allocator's events

from keras_dp.cli import models, synthetic
from keras_dp.cli.plan import planning
from keras_dp.cli.plan.prediction import PlannedRun
from keras_dp.gpu_model.memory import peak_bytes
from keras_dp.gpu_model.placement import place_step
from keras_dp.gpu_model.simulation import simulate

DIRECTORY = Path(__file__).parent
PAGE = DIRECTORY.parents[1] / "docs" / "gpu_audit.md"
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
# The rows of a global batch, of which the activations take tens to hundreds of megabytes.
BATCH_SIZES = {
    "mlp": 8_192,
    "plan_memory:wide": 64,
    "plan_memory:embeddings": 4_096,
    "plan_memory:cnn": 256,
    "plan_memory:autoencoder": 1_024,
    "plan_memory:mobilenet": 64,
    "resnet20": 64,
    "unet": 32,
    "transformer": 32,
    "lstm": 64,
}
# With few threads, operations of one tower would wait for those of another; with many, operations of a single tower run at the
# same time. Neither is so on GPUs.
THREADS_OF_ONE_TOWER, THREADS_OF_SEVERAL = 2, 16
STEPS = 3  # threads take operations in another order each time
ALLOCATOR = "CPU:0"  # All logical CPUs have the same one.

layers = keras.layers


def cnn():
    """Builds a convolutional classifier of images of 32 x 32 pixels, with pooling and dropout."""
    stack = []
    for filters in (32, 64):
        stack += [layers.Conv2D(filters, 3, padding="same", activation="relu") for _ in range(2)]
        stack += [layers.MaxPooling2D(), layers.Dropout(0.25)]
    head = [layers.Flatten(), layers.Dense(256, activation="relu"), layers.Dropout(0.5), layers.Dense(10)]
    model = keras.Sequential([keras.Input((32, 32, 3)), *stack, *head])
    model.compile("adam", **models.classification())
    return model


def autoencoder():
    """Builds a convolutional autoencoder of images of 32 x 32 pixels, trained with RMSprop."""
    stack = [layers.Conv2D(32, 3, strides=2, padding="same", activation="relu")]
    stack += [layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"), layers.Flatten(), layers.Dense(64)]
    stack += [layers.Dense(8 * 8 * 64, activation="relu"), layers.Reshape((8, 8, 64))]
    stack += [layers.Conv2DTranspose(32, 3, strides=2, padding="same", activation="relu")]
    stack += [layers.Conv2DTranspose(3, 3, strides=2, padding="same", activation="sigmoid")]
    model = keras.Sequential([keras.Input((32, 32, 3)), *stack])
    model.compile("rmsprop", "mse")
    return model


def mobilenet():
    """Builds a small MobileNet: depthwise convolutions, batch normalization and clipped activations."""
    stack = [layers.Conv2D(16, 3, strides=2, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU(6.0)]
    for filters, strides in ((32, 1), (64, 2), (64, 1), (128, 2), (128, 1)):
        stack += [layers.DepthwiseConv2D(3, strides, padding="same", use_bias=False), layers.BatchNormalization()]
        stack += [layers.ReLU(6.0), layers.Conv2D(filters, 1, use_bias=False), layers.BatchNormalization(), layers.ReLU(6.0)]
    model = keras.Sequential([keras.Input((64, 64, 3)), *stack, layers.GlobalAveragePooling2D(), layers.Dense(10)])
    model.compile("adam", **models.classification())
    return model


def wide():
    """Builds a network of few rows and large dense weights, trained with Adam and clipped gradients."""
    stack = [layers.Dense(2_048, activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((1_024,)), *stack, layers.Dense(10)])
    model.compile(keras.optimizers.Adam(1e-3, global_clipnorm=1.0), **models.classification())
    return model


def embeddings():
    """Builds a classifier of bags of words with a large embedding, trained with Adagrad."""
    tokens = keras.Input((64,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(200_000, 64)(tokens))
    model = keras.Model(tokens, layers.Dense(10)(layers.Dense(128, activation="relu")(x)))
    model.compile("adagrad", **models.classification())
    return model


class Memory(NamedTuple):
    """Holds the bytes of a step, each with those of the variables.

    Attributes:
        predicted: the predicted peaks of all towers, added up.
        tensors: the most bytes of each tower's tensors at one time, added up.
        allocated: the most bytes that the allocator had given away, with the scratch memory of kernels and what it rounds up.
        process: how much the process grew, with TensorFlow's usual allocator.
    """

    predicted: int
    tensors: int
    allocated: int
    process: int


class Steps:
    """Runs the step of a model on logical CPUs, again and again."""

    def __init__(self, parallel, batch_size):
        self._parallel = parallel
        # One batch for each size, since batches are in the allocator, too.
        synthetic.BATCHES = 1
        few, more, self._batch = (
            next(iter(synthetic.dataset(parallel.inner_model, rows)))
            for rows in (2 * parallel.num_towers, 3 * parallel.num_towers, batch_size)
        )
        # Keras traces the step again when it first gets a batch with other rows, and then no more.
        parallel.train_on_batch(*few)
        parallel.train_on_batch(*more)

    def run(self):
        """Runs one step with the batch of the size that is measured."""
        self._parallel.train_on_batch(*self._batch)

    def bytes_of_variables(self):
        """Returns the bytes of all variables of the model, its optimizer and its metrics."""
        parallel = self._parallel
        metrics = [variable for metric in parallel.metrics for variable in metric.variables]
        variables = {id(one): one for one in (*parallel.variables, *parallel.optimizer.variables, *metrics)}.values()
        return sum(one.value.shape.num_elements() * tf.as_dtype(one.dtype).size for one in variables)


def use_threads(towers):
    """Sets the number of operations that run at the same time, before TensorFlow starts."""
    tf.config.threading.set_inter_op_parallelism_threads(THREADS_OF_ONE_TOWER if towers == 1 else THREADS_OF_SEVERAL)


def in_allocator(planned):
    """Predicts a step, runs it, and returns the predicted bytes, those of tensors, and those of the allocator."""
    use_threads(planned.towers)
    parallel, step = planning.collect(planned)
    placed = place_step(step, planned.batch_size, parallel.devices)
    simulation = simulate(placed, planned.machines()[0])
    # Logical CPUs share one memory, so that what one tower sends another takes none.
    predicted = peak_bytes(placed, simulation.spans, is_shared=True) if planned.towers > 1 else simulation.peak_bytes
    devices = {_plain(name): operation.device for name, operation in placed.operations.items()}
    steps = Steps(parallel, planned.batch_size)
    allocated, tensors = [], []
    for _ in range(STEPS):
        gc.collect()
        before = tf.config.experimental.get_memory_info(ALLOCATOR)["current"]
        tf.config.experimental.reset_memory_stats(ALLOCATOR)
        steps.run()
        allocated.append(tf.config.experimental.get_memory_info(ALLOCATOR)["peak"] - before)
        tensors.append(most_bytes_of_tensors(steps.run, devices))
    held = steps.bytes_of_variables()
    # A thread that other load holds up frees its memory later: that only adds.
    return [sum(predicted.values()), held + min(tensors), held + min(allocated)]


def in_process(planned):
    """Runs a step, and returns by how many bytes the process grows, with those of the variables."""
    use_threads(planned.towers)
    steps = Steps(planning.wrapped(planned), planned.batch_size)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # The most memory of this process so far is forgotten.
    before = _status("VmRSS")
    steps.run()
    return steps.bytes_of_variables() + _status("VmHWM") - before


def _status(name):
    """A size of this process in bytes, as Linux tells it."""
    return 1_024 * int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def most_bytes_of_tensors(run, devices):
    """The most bytes of each device's tensors while a function runs, without the scratch memory of kernels, added up.

    Args:
        run: the function.
        devices: the device of each operation, by its plain name. All other operations count as another device.
    """
    held = {}
    now, most = collections.Counter(), collections.Counter()
    for name, event in _allocations(run):
        if name == "MemoryAllocation" and event.get("region_type") != "temp":
            device = devices.get(_plain(event.get("tf_op", "")), "other")
            held[event["addr"]] = device, event["requested_bytes"]
            now[device] += event["requested_bytes"]
            most[device] = max(most[device], now[device])
        elif name == "MemoryDeallocation":
            device, size = held.pop(event["addr"], ("other", 0))
            now[device] -= size
    return most.total()


def _plain(name):
    """The name of an operation without the names and numbers of the calls around it, which differ in the profile."""
    return re.sub(r"^(partitioned|StatefulPartitionedCall)/|/_\d+", "", name)


def _allocations(run):
    """The names and the properties of the allocator's events while a function runs, in their order."""
    with tempfile.TemporaryDirectory() as directory:
        # Level 3 has the events of the allocator.
        tf.profiler.experimental.start(directory, tf.profiler.experimental.ProfilerOptions(host_tracer_level=3))
        run()
        tf.profiler.experimental.stop()
        (path,) = Path(directory).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    events = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                if name in ("MemoryAllocation", "MemoryDeallocation"):
                    properties = {plane.stat_metadata[stat.metadata_id].name: _value(stat, plane) for stat in event.stats}
                    events.append((1_000 * line.timestamp_ns + event.offset_ps, name, properties))
    return [event[1:] for event in sorted(events, key=lambda event: event[0])]


def _value(stat, plane):
    value = getattr(stat, stat.WhichOneof("value"))
    return plane.stat_metadata[value].name if stat.WhichOneof("value") == "ref_value" else value


def measured(planned):
    """The `Memory` of a step, from two processes of its own."""
    environments = {"in_allocator": {"TF_CPU_ALLOCATOR_USE_BFC": "true"}, "in_process": {"MALLOC_MMAP_THRESHOLD_": "65536"}}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--one", json.dumps([name, dataclasses.asdict(planned)])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=DIRECTORY,
            env=os.environ | ENVIRONMENT | environment,
        )
        for name, environment in environments.items()
    ]
    answers = []
    for process in processes:
        output, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(errors[-2_000:])
        answers.append(json.loads(output.splitlines()[-1]))
    return Memory(*answers[0], answers[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {name.split(":")[-1]: name for name in BATCH_SIZES}
    parser.add_argument("--models", nargs="+", choices=names, default=list(names))
    parser.add_argument("--towers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--write", action="store_true", help="write the table into docs/gpu_audit.md")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        name, planned = arguments.one
        print(json.dumps({"in_allocator": in_allocator, "in_process": in_process}[name](PlannedRun(**planned))))
        return
    headings = ["model", "towers", "rows", "predicted, MB", "tensors, MB", "predicted / tensors"]
    headings += ["allocator, MB", "process, MB"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    print("\n".join(lines), flush=True)
    for towers in arguments.towers:
        for short in arguments.models:
            rows = BATCH_SIZES[names[short]]
            memory = measured(PlannedRun(names[short], towers, rows))
            sizes = [f"{size / 1e6:.0f}" for size in memory]
            sizes.insert(2, f"{memory.predicted / memory.tensors:.2f}")
            lines.append(f"| {' | '.join([short, str(towers), f'{rows:,}', *sizes])} |")
            print(lines[-1], flush=True)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        between = re.compile(r"(<!-- memory -->\n).*?(<!-- end of memory -->)", re.DOTALL)
        table = "\n".join(lines)
        PAGE.write_text(between.sub(lambda markers: f"{markers[1]}\n{table}\n\n{markers[2]}", page), encoding="utf-8")


if __name__ == "__main__":
    main()
