"""What synchronizing batch normalization costs: training steps of ResNet-20 with and without it, in keras_dp and tf.distribute.

Each configuration runs in a process of its own; within a round they take turns, and what a round compares ran in that round.
"""

import argparse
import statistics

from keras_dp.cli import models
from keras_dp.cli.runs import Run, measure_in_new_process

MODEL = "resnet20"
BATCH_SIZE = models.workload(MODEL).batch_size
LAYERS = 19
CONFIGURATIONS = [(engine, batch_norm) for engine in ("keras_dp", "mirrored") for batch_norm in ("sync", "local")]


def step_milliseconds(engine, towers, batch_norm, steps):
    """The median of a run's steps."""
    run = Run(engine, towers, BATCH_SIZE, MODEL, batch_norm=batch_norm, steps=steps)
    return statistics.median(measure_in_new_process(run).step_milliseconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", type=int, nargs="+", default=[2, 4, 8], help="devices to train on (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=30, help="timed steps in each run, after the warm-up (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="in each of which every configuration runs once (default: %(default)s)"
    )
    args = parser.parse_args()
    print(f"{MODEL}, batch size {BATCH_SIZE}, {LAYERS} layers; medians of {args.rounds} rounds of {args.steps} steps")
    print(f"{'towers':<8}{'engine':<12}{'sync, ms':>10}{'local, ms':>11}{'a layer, ms':>13}{'by round':>20}")
    for towers in args.towers:
        rounds = [
            {(engine, mode): step_milliseconds(engine, towers, mode, args.steps) for engine, mode in CONFIGURATIONS}
            for _ in range(args.rounds)
        ]
        for engine in ("keras_dp", "mirrored"):
            sync, local = (statistics.median(times[engine, mode] for times in rounds) for mode in ("sync", "local"))
            costs = [(times[engine, "sync"] - times[engine, "local"]) / LAYERS for times in rounds]
            spread = f"{min(costs):.2f} to {max(costs):.2f}"
            print(
                f"{towers:<8}{engine:<12}{sync:>10.1f}{local:>11.1f}{statistics.median(costs):>13.2f}{spread:>20}", flush=True
            )


if __name__ == "__main__":
    main()
