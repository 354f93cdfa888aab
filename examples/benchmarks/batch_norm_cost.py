"""What synchronizing batch normalization costs: training steps of ResNet-20 with and without it, in keras_dp and tf.distribute.

Each configuration runs in a process of its own; within a round they take turns, and what a round compares ran in that round.
"""

import argparse
import statistics

from step_time import BATCH_SIZES, measure_in_new_process

MODEL = "resnet20"
LAYERS = 19
CONFIGURATIONS = [(engine, batch_norm) for engine in ("keras_dp", "mirrored") for batch_norm in ("sync", "local")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=30, help="timed steps in each run, after the warm-up")
    parser.add_argument("--repetitions", type=int, default=3, help="rounds, in each of which every configuration runs once")
    args = parser.parse_args()
    print(
        f"{MODEL}, batch size {BATCH_SIZES[MODEL]}, {LAYERS} layers; medians of {args.repetitions} rounds of {args.steps} steps"
    )
    print(f"{'towers':<8}{'engine':<12}{'sync, ms':>10}{'local, ms':>11}{'a layer, ms':>13}{'by round':>20}")
    for towers in args.towers:
        rounds = [
            {
                (engine, batch_norm): statistics.median(
                    measure_in_new_process(engine, MODEL, towers, args.steps, batch_norm)["milliseconds"]
                )
                for engine, batch_norm in CONFIGURATIONS
            }
            for _ in range(args.repetitions)
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
