"""What sharded placement sends and stores, counted: beside whole variables at their best, and beside a ring all-reduce.

Counted by `keras_dp.communication_report` in TensorFlow's own graphs, on logical CPUs; each number of towers in a process of
its own.
"""

import argparse
import math
import subprocess
import sys

import tensorflow as tf

import keras_dp
from keras_dp.cli import models, synthetic
from keras_dp.devices import variable_homes


def count(model_name, towers):
    """Prints the row of one model on some towers."""
    keras_dp.use_logical_cpus(towers)
    workload = models.workload(model_name)
    model = workload.build()
    parallel = keras_dp.DataParallelModel(model, parameter_device="sharded")
    parallel.compile(models.optimizer(), **workload.objective())
    report = keras_dp.communication_report(parallel, next(iter(synthetic.dataset(model, workload.batch_size))))
    state = dict.fromkeys(parallel.devices, 0)
    for variable in parallel.optimizer.variables:
        state[variable_homes.home(variable)] += math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
    ratios = (
        report.busiest_bytes / report.whole_variables_bytes,
        report.busiest_bytes / report.ring_bytes,
        report.bytes_of("inputs") / report.batch_bytes,
        max(state.values()) * towers / sum(state.values()),
        report.largest_weight_bytes * towers / report.weight_bytes,
    )
    cells = "".join(f"{ratio:>18.2f}" for ratio in ratios)
    print(f"{model_name:<13}{towers:>6}{report.busiest_bytes / 1e6:>14.2f}{cells}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=models.BUILT_IN,
        default=["mlp", "resnet20", "unet", "transformer"],
        help="to measure (default: %(default)s)",
    )
    parser.add_argument("--towers", type=int, nargs="+", default=[2, 4, 8], help="devices to train on (default: %(default)s)")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        count(args.models[0], args.towers[0])
        return
    headings = ("over whole", "over a ring", "inputs over", "state, largest", "largest weight")
    units = ("variables", "all-reduce", "the batch", "over 1 / N", "over 1 / N")
    print(f"{'model':<13}{'towers':>6}{'busiest, MB':>14}" + "".join(f"{heading:>18}" for heading in headings))
    print(" " * 33 + "".join(f"{unit:>18}" for unit in units))
    for model_name in args.models:
        for towers in args.towers:
            command = [sys.executable, __file__, "--row", "--models", model_name, "--towers", str(towers)]
            row = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
            print(row, end="", flush=True)


if __name__ == "__main__":
    main()
