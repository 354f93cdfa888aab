"""Count what workers send each other in a training step: in the graph that one of them traces, which nothing runs.

A sum of more than 64 KiB goes around a ring; a smaller one is a gather, which each worker adds up. See docs/partition.md.
"""

import argparse
import collections
import math
import subprocess
import sys
from unittest import mock

import tensorflow as tf

import keras_dp
from keras_dp.cli import models, synthetic
from keras_dp.workers.collectives import Collectives

COLUMNS = "{:<13}{:<12}{:>8}{:>8}{:>10}{:>10}{:>10}{:>18}"


class Counted(Collectives):
    """Notes the kind and the bytes of each exchange of worker 0; -1 if its size is known only in a step."""

    def __init__(self, count):
        with mock.patch.object(Collectives, "gather", lambda self, x: tf.range(self.count)):
            super().__init__(0, count)
        self.exchanges = []

    def _key(self, kind, dtype, shape, *most):
        self.exchanges.append((kind, -1 if most else math.prod(shape) * dtype.size))
        return super()._key(kind, dtype, shape, *most)


def count(name, batch_norm, workers):
    """Prints the row of a model."""
    keras_dp.use_logical_cpus(1)
    workload = models.workload(name)
    model = workload.build()
    parallel = keras_dp.DataParallelModel(model, batch_norm=batch_norm)
    parallel.compile(models.optimizer(), **workload.objective())
    slices = parallel.tower_steps.slices_of(next(iter(synthetic.dataset(model, 2 * workers))))
    worker = Counted(workers)

    @tf.function(autograph=False)
    def step():
        return parallel.tower_steps.trace("train", slices, worker).run("CPU:0")[0]

    step.get_concrete_function()
    sizes = collections.defaultdict(list)
    for kind, size in worker.exchanges:
        sizes["late" if size < 0 else kind].append(size)
    sums, gathers, late = (sizes[kind] for kind in ("sum", "stack", "late"))
    megabytes, kilobytes = f"{sum(sums) / 1e6:.2f}", f"{sum(gathers) / 1e3:.1f}"
    print(COLUMNS.format(name, batch_norm, workers, len(sums), megabytes, len(gathers), kilobytes, len(late)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=models.BUILT_IN, help="only the row of this model")
    parser.add_argument("--batch-norm", default="sync", choices=["sync", "local"], help="of this model (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="how many there are (default: %(default)s)")
    options = parser.parse_args()
    if options.model:
        count(options.model, options.batch_norm, options.workers)
        return
    print(COLUMNS.format("model", "batch norm", "workers", "sums", "MB", "gathers", "KB", "of unknown size"))
    for name, batch_norm in (("mlp", "sync"), ("resnet20", "sync"), ("resnet20", "local"), ("transformer", "sync")):
        row = [sys.executable, __file__, name, "--batch-norm", batch_norm, "--workers", str(options.workers)]
        print(subprocess.run(row, capture_output=True, text=True, check=True).stdout, end="", flush=True)


if __name__ == "__main__":
    main()
