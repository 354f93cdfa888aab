"""Take a training step of workers on this machine apart, and what bounds it.

    python examples/benchmarks/worker_step.py

The first table has a step, and the step's sums and gathers one after another in a graph that computes nothing. The second
table has the processor time of one worker in a step, by the names that Linux has for its threads. The third table sums the
bytes of the step's gradients in several ways: in one ring, in two halves at once, in a ring that TensorFlow subdivides, and by
gathering, for which each worker receives the bytes of each other one once. "transfer" sends them from one worker to the other,
if there are two. All are medians of the chief, in milliseconds.
"""

import argparse
import collections
import functools
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

WARM_UP = 10  # steps, and calls of a bare graph
CALLS = 60
LEAST = 0.1  # milliseconds of a thread that the table names
MODELS = {"mlp": "sync", "resnet20": "sync", "resnet20, local": "local", "transformer": "sync"}
STEPS = {"mlp": 60, "transformer": 10}
WAYS = ("one ring", "two at once", "subdivided", "gathered", "transfer")
STEP_COLUMNS = "{:<17}{:>8}{:>11}{:>8}{:>13}"
SUM_COLUMNS = "{:<17}{:>8}{:>11}{:>14}{:>13}{:>11}{:>11}"


def processor_seconds():
    """The processor time of this process's threads so far, by their names."""
    seconds = collections.Counter()
    for thread in Path("/proc/self/task").iterdir():
        try:
            name, used = (thread / "comm").read_text().strip(), int((thread / "schedstat").read_text().split()[0])
        except OSError:  # it has ended
            continue
        seconds[name] += used / 1e9
    return seconds


def noted(method, exchanges, inside):
    """A method of the collectives that notes its calls while a graph is built, but for those inside another one."""

    @functools.wraps(method)
    def exchange(self, x, *arguments):
        import tensorflow as tf

        if tf.executing_eagerly() or inside:
            return method(self, x, *arguments)
        exchanges.append((method.__name__, x.dtype, tuple(x.shape)))
        inside.append(method)
        try:
            return method(self, x, *arguments)
        finally:
            inside.pop()

    return exchange


def train(name, steps):
    """Trains as one of the workers, and returns the times of steps, the processor time of threads, and the exchanges."""
    import keras_dp
    from keras_dp.cli import models, synthetic
    from keras_dp.cli.bench.measurement import StepTimes
    from keras_dp.workers.collectives import Collectives

    workload = models.workload(name.partition(",")[0])
    model = workload.build()
    parallel = keras_dp.DataParallelModel(model, batch_norm=MODELS[name])
    parallel.compile(models.optimizer(), **workload.objective())
    dataset = synthetic.dataset(model, workload.batch_size)
    times, exchanges, inside = StepTimes(), [], []
    methods = {kind: noted(getattr(Collectives, kind), exchanges, inside) for kind in ("sum", "stack", "gather")}
    with mock.patch.multiple(Collectives, **methods):
        parallel.fit(dataset, steps_per_epoch=WARM_UP, shuffle=False, verbose=0)
    before = processor_seconds()
    parallel.fit(dataset, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=[times])
    used = {thread: 1e3 * (seconds - before[thread]) / steps for thread, seconds in processor_seconds().items()}
    # The number of a sparse gradient's rows is known in the step alone: there is one for each token.
    tokens = workload.batch_size * models.SEQUENCE_LENGTH
    return times.milliseconds(), used, exchanges, tokens


def measure(name, steps):
    """Trains as one of the workers, and then exchanges alone. Returns all figures."""
    import numpy as np
    import tensorflow as tf

    import keras_dp

    workers = keras_dp.connect_workers()
    own, count = workers.collectives, workers.count
    milliseconds, used, exchanges, tokens = train(name, steps)

    def median_of(exchange):
        function, taken = tf.function(exchange, autograph=False), []
        for _ in range(CALLS):
            begin = time.perf_counter()
            with tf.device("CPU:0"):
                function()
            taken.append(1e3 * (time.perf_counter() - begin))
        return float(np.median(taken[WARM_UP:]))

    def step():
        made = []
        for kind, dtype, shape in exchanges:
            with tf.control_dependencies(made):
                x = tf.zeros([tokens // count if axis is None else axis for axis in shape], dtype)
                of_all = [tf.fill([count], tokens // count)] if kind == "gather" else []
                made = [getattr(own, kind)(x, *of_all)]
        return made

    elements = sum(math.prod(shape) for kind, _, shape in exchanges if kind == "sum")

    def common(key):
        return {
            "group_size": count,
            "group_key": 1,
            "instance_key": 2**29 + key,
            "communication_hint": "ring",
            "timeout_seconds": 0.0,
        }

    def ring(key, size=elements, offsets=(0,)):
        reduce = functools.partial(tf.raw_ops.CollectiveReduce, merge_op="Add", final_op="Id", subdiv_offsets=list(offsets))
        return reduce(input=tf.zeros([size]), **common(key))

    def gather():
        everywhere = tf.raw_ops.CollectiveGather(input=tf.zeros([1, elements]), shape=[count, elements], **common(5))
        return tf.reduce_sum(everywhere, axis=0)

    def transfer():
        if workers.is_chief:
            return tf.raw_ops.CollectiveBcastRecv(T=tf.float32, shape=[elements], **common(6))
        return tf.raw_ops.CollectiveBcastSend(input=tf.zeros([elements]), shape=[elements], **common(6))

    alone = {
        "alone": step,
        "one ring": lambda: ring(1),
        "two at once": lambda: [ring(2, elements // 2), ring(3, elements - elements // 2)],
        "subdivided": lambda: ring(4, offsets=(0, 0)),
        "gathered": gather,
        **({"transfer": transfer} if count == 2 else {}),
    }
    return {
        "step": float(np.median(milliseconds)),
        "exchanges": len(exchanges),
        "threads": used,
        "megabytes": 4 * elements / 1e6,
        **{name: median_of(exchange) for name, exchange in alone.items()},
    }


def started(name, options):
    """The figures of the chief, of workers that `keras-dp launch` starts."""
    question = json.dumps([name, options.steps or STEPS.get(name, 20)])
    launch = [sys.executable, "-m", "keras_dp", "launch", "--workers", str(options.workers), __file__, "--one", question]
    done = subprocess.run(launch, capture_output=True, text=True)
    answers = [line for line in done.stdout.splitlines() if line.startswith('[0] {"step"')]
    if not answers:
        raise RuntimeError(f"The workers have failed:\n{done.stderr[-3000:]}")
    return json.loads(answers[-1].removeprefix("[0] "))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="(default: all)")
    parser.add_argument("--workers", type=int, default=2, help="how many processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="timed steps (default: 60 of the MLP, 10 of the transformer, or 20)")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    figures = {name: started(name, options) for name in options.models}
    print(f"{options.workers} workers; medians, in milliseconds\n")
    print(STEP_COLUMNS.format("model", "step", "exchanges", "alone", "of the step"))
    for name, of in figures.items():
        part = f"{of['alone'] / of['step']:.0%}"
        print(STEP_COLUMNS.format(name, f"{of['step']:.1f}", of["exchanges"], f"{of['alone']:.1f}", part))
    print(f"\n{'threads':<17}" + "".join(f"{name:>17}" for name in figures))
    most = {
        thread: max(of["threads"].get(thread, 0) for of in figures.values())
        for of in figures.values()
        for thread in of["threads"]
    }
    for thread in sorted((thread for thread in most if most[thread] > LEAST), key=most.get, reverse=True):
        print(f"{thread:<17}" + "".join(f"{of['threads'].get(thread, 0):>17.1f}" for of in figures.values()))
    print("\n" + SUM_COLUMNS.format("gradients of", "MB", *WAYS))
    for name, of in figures.items():
        print(SUM_COLUMNS.format(name, f"{of['megabytes']:.1f}", *(f"{of[way]:.1f}" if way in of else "-" for way in WAYS)))


if __name__ == "__main__":
    main()
