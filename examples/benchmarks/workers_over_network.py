"""Time steps of workers over networks of a chosen delay and rate, beside what the model on paper predicts for them.

The workers are processes of this machine, and `tests/relayed_network.py` is the network: a relay, which takes time from the
processors as well. So each model sends so many bytes that its network, and not the processors, bounds the step. The prediction
is that of worker_model.py: a ring of all-reduces, whose messages take the delay and their bytes' time, beside what a worker
computes in a step of its own rows. "free" is what a step takes where the network has no limits.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"
sys.path += [str(HERE), str(TESTS)]

import worker_model  # noqa: E402
from relayed_network import Line, RelayedNetwork  # noqa: E402
from worker_processes import Workers  # noqa: E402

WARM_UP = 3  # steps
INPUTS, ROWS = 1000, 8  # rows of each worker
# The line each way, and the megabytes of the gradients.
NETWORKS = {"100mbit": (Line(1e-3, 100e6 / 8), 4), "1gbit": (Line(1e-4, 1e9 / 8), 40)}
COLUMNS = "{:<10}{:>8}{:>8}{:>13}{:>14}{:>11}{:>11}{:>8}{:>10}"


def hidden_units(megabytes):
    """How many units the model has for so many bytes of gradients."""
    return round(megabytes * 1e6 / 4 / (INPUTS + 2))


def measure(megabytes, steps):
    """Trains as one of the workers, or alone. The first one prints the seconds of each step, after the warm-up."""
    import keras
    import numpy as np

    import keras_dp

    class Times(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            ends.append(time.perf_counter())

    ends = []
    workers = keras_dp.connect_workers(timeout=120)
    hidden = keras.layers.Dense(hidden_units(megabytes), activation="relu")
    model = keras.Sequential([keras.Input((INPUTS,)), hidden, keras.layers.Dense(1)])
    parallel = keras_dp.DataParallelModel(model)
    parallel.compile(keras.optimizers.SGD(1e-4), "mse")
    rows = ROWS * workers.count
    x = np.random.default_rng(0).normal(size=(rows * (WARM_UP + 1 + steps), INPUTS)).astype("float32")
    parallel.fit(x, x[:, :1], batch_size=rows, shuffle=False, verbose=0, callbacks=[Times()])
    if workers.is_chief:
        print("seconds", json.dumps([end - begin for begin, end in itertools.pairwise(ends[WARM_UP:])]))


def alone(*arguments):
    """The median seconds of a step of one worker's rows, in one process."""
    command = [sys.executable, __file__, "--one", json.dumps(arguments)]
    return median_in(subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout)


def together(line, count, *arguments):
    """The median seconds of a step of W workers, and the megabytes that one of them receives in a step."""
    with tempfile.TemporaryDirectory() as directory, RelayedNetwork(line) as network:
        script = [__file__, "--one", json.dumps(arguments)]
        with Workers("relayed.py", count, directory, *script, **network.environment) as workers:
            if any(workers.start().wait(seconds=500)):
                raise RuntimeError(f"A worker has failed:\n{workers.output(0)[-3000:]}")
            received = sum(network.passed(i, 0) for i in range(1, count))
            # The chief has sent its variables to the others once, as a sum.
            return median_in(workers.output(0)), received / 1e6 / (WARM_UP + 1 + arguments[1])


def median_in(output):
    return statistics.median(json.loads(output.partition("seconds ")[2].splitlines()[0]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)} (default: all)")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4], metavar="W", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each run (default: %(default)s)")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure(*args.one)
        return
    unknown = set(args.networks) - set(NETWORKS)
    if unknown:
        parser.error(f"The networks are {', '.join(NETWORKS)}. Received: {sorted(unknown)}")
    for name in args.networks or NETWORKS:
        line, megabytes = NETWORKS[name]
        print(f"{name}: {1e3 * line.delay:g} ms and {8e-6 * line.rate:g} Mbit/s each way, {megabytes} MB of gradients")
    print(f"medians of {args.steps} steps; MB that one worker receives in a step; a relay on this machine is the network")
    names = ("network", "workers", "MB", "expected MB", "computes, ms", "takes, ms", "predicted", "ratio", "free, ms")
    print(COLUMNS.format(*names))
    for name in args.networks or NETWORKS:
        line, megabytes = NETWORKS[name]
        computed = alone(megabytes, args.steps)
        model = worker_model.Model(hidden_units(megabytes) * (INPUTS + 2) + 1, 0, 1e3 * computed)
        for count in args.workers:
            measured, received = together(line, count, megabytes, args.steps)
            unlimited, _ = together(Line(), count, megabytes, args.steps)
            predicted = worker_model.step(model, 4, count, worker_model.Network(line.delay, line.rate), in_turn=False)
            expected = 2 * (count - 1) / count * megabytes
            times = [f"{1e3 * seconds:.1f}" for seconds in (computed, measured, predicted, unlimited)]
            times.insert(3, f"{measured / predicted:.2f}")
            print(COLUMNS.format(name, count, f"{received:.1f}", f"{expected:.1f}", *times), flush=True)


if __name__ == "__main__":
    main()
