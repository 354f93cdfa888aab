"""Measure the memory and the time of a training step on one device whose rows are cut into k slices, one after the other.

Each k has a process of its own, in which TensorFlow's allocator counts what it allocates, as on GPUs
(TF_CPU_ALLOCATOR_USE_BFC). Batch normalizations take the moments of each slice: with those of the global batch, slices meet in
the middle of the step, and memory falls little. See docs/out_of_memory.md.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time

import tensorflow as tf

import keras_dp
from keras_dp.cli import models, synthetic

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "TF_CPU_ALLOCATOR_USE_BFC": "true"}
BATCH_SIZES = {"mlp": 8_192, "transformer": 64, "resnet20": 256, "resnet50": 32, "unet": 64, "lstm": 128}
ALLOCATOR = "CPU:0"
WARM_UP_STEPS = 3


def measured(name, batch_size, slices, steps, batch_norm, jit_compile):
    """Trains, and returns the bytes of the variables, the most bytes in a step beside them, and the median time of a step."""
    # With few threads, operations of one slice wait for each other, as on GPUs.
    tf.config.threading.set_inter_op_parallelism_threads(2)
    synthetic.BATCHES = 1
    workload = models.workload(name)
    parallel = keras_dp.DataParallelModel(workload.build(), 1, batch_norm=batch_norm, slices_per_device=slices)
    parallel.compile(models.optimizer(), **workload.objective(), jit_compile=jit_compile)
    x, y = next(iter(synthetic.dataset(parallel.inner_model, batch_size)))
    for _ in range(WARM_UP_STEPS):
        parallel.train_on_batch(x, y)
    peaks, times = [], []
    for _ in range(steps):
        gc.collect()
        before = tf.config.experimental.get_memory_info(ALLOCATOR)["current"]
        tf.config.experimental.reset_memory_stats(ALLOCATOR)
        begin = time.perf_counter()
        parallel.train_on_batch(x, y)
        times.append(time.perf_counter() - begin)
        peaks.append(tf.config.experimental.get_memory_info(ALLOCATOR)["peak"] - before)
    variables = [*parallel.variables, *parallel.optimizer.variables]
    held = sum(one.value.shape.num_elements() * tf.as_dtype(one.dtype).size for one in variables)
    # A thread that other load holds up frees its memory later: that only adds.
    return held, min(peaks), statistics.median(times)


def in_process(*arguments):
    """The same, from a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)
    if done.returncode:
        raise RuntimeError(done.stderr[-2_000:])
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=BATCH_SIZES, default=["mlp", "transformer", "resnet20", "resnet50"])
    parser.add_argument("--slices", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch-norm", choices=["local", "sync"], default="local")
    parser.add_argument("--jit-compile", action="store_true")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(measured(*arguments.one)))
        return
    headings = ["model", "rows", "slices", "memory, MB", "of one slice", "without variables, MB", "of one slice", "step, ms"]
    headings.append("of one slice")
    print(f"| {' | '.join(headings)} |\n{'|---' * len(headings)}|", flush=True)
    for name in arguments.models:
        first = None
        for slices in arguments.slices:
            rows = BATCH_SIZES[name]
            held, beside, seconds = in_process(name, rows, slices, arguments.steps, arguments.batch_norm, arguments.jit_compile)
            numbers = held + beside, beside, seconds
            first = first or numbers
            units = (1e6, 1e6, 1e-3)
            cells = [name, f"{rows:,}", str(slices)]
            for number, of_one, unit in zip(numbers, first, units, strict=True):
                cells += [f"{number / unit:,.0f}", f"{number / of_one:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
