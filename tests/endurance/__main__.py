"""Work for a long time, on one device and on two towers, and tell whether memory, functions, threads, files or times grow."""

import argparse
import csv
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras_dp
from endurance.work import WORK, Sample, on_towers, plain, samples

AMOUNTS = {"steps": 50_000, "models": 500, "calls": 2_000, "shapes": 100}
WRAPS = {"plain": plain, "towers": on_towers}
MOST_GROWTH = 0.02  # of memory, beyond that of plain Keras
SAMPLES = 60
WARM_UP = 1 / 3  # of a run's samples


def parsed():
    parser = argparse.ArgumentParser(prog="python -m endurance", description=__doc__)
    parser.add_argument("--work", choices=WORK, nargs="+", default=list(WORK), help="what to do")
    parser.add_argument("--share", type=float, default=1.0, help="do this share of the full amounts")
    parser.add_argument("--out", type=Path, default=Path("results/endurance"), help="where to write the samples")
    parser.add_argument("--one", nargs=3, metavar=("WORK", "WRAP", "AMOUNT"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    """Runs each work in processes of its own, prints a table, and returns the number of quantities that grow."""
    options = parsed()
    if options.one:
        name, wrap, amount = options.one
        keras_dp.use_logical_cpus(2)
        print(json.dumps(samples(name, WRAPS[wrap], int(amount), SAMPLES)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    runs = {name: {wrap: run(name, wrap, options) for wrap in WRAPS} for name in options.work}
    print(f"{'work':<8}{'amount':>8}{'on':>8}{'MB':>8}{'growth':>9}{'functions':>11}{'threads':>9}{'files':>7}{'slower':>8}")
    found = []
    for name, of_wrap in runs.items():
        for wrap, taken in of_wrap.items():
            last = taken[-1]
            print(
                f"{name:<8}{last.done:>8,}{wrap:>8}{last.megabytes:>8,.0f}{growth(taken, 'megabytes'):>9.1%}"
                f"{last.functions:>11,}{last.threads:>9}{last.files:>7}{slowdown(taken):>8.0%}"
            )
        found += [f"{name}: {what}" for what in grown(of_wrap)]
    print("\n".join(found) or "Nothing grows beyond plain Keras.")
    return len(found)


def run(name, wrap, options):
    """Does a work in a process of its own, and writes its samples."""
    amount = max(round(options.share * AMOUNTS[name]), SAMPLES)
    command = [sys.executable, "-m", "endurance", "--one", name, wrap, str(amount)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    taken = [Sample(*values) for values in json.loads(done.stdout.splitlines()[-1])]
    with open(options.out / f"{name}_{wrap}.csv", "w", newline="") as file:
        csv.writer(file).writerows([Sample._fields, *taken])
    return taken


def change(values):
    """Returns the relative change of values after the warm-up: from the median of their first third to that of their last."""
    kept = values[int(WARM_UP * len(values)) :]
    third = max(len(kept) // 3, 1)
    return statistics.median(kept[-third:]) / statistics.median(kept[:third]) - 1


def growth(samples, field):
    """Returns the relative growth of a quantity."""
    return change([getattr(sample, field) for sample in samples])


def slowdown(samples):
    """Returns by how much a unit of work takes longer at the end."""
    return change([(b.seconds - a.seconds) / (b.done - a.done) for a, b in itertools.pairwise(samples)])


def grown(runs):
    """Names the quantities that grow on towers, and not in plain Keras."""
    found = []
    alone, towers = runs["plain"], runs["towers"]
    more = growth(towers, "megabytes") - max(growth(alone, "megabytes"), 0)
    if more > MOST_GROWTH:
        found.append(f"the memory grows by {more:.1%} beyond plain Keras")
    for field in ("functions", "threads", "files"):
        if growth(towers, field) > max(growth(alone, field), 0) + MOST_GROWTH:
            found.append(f"the {field} grow by {growth(towers, field):.1%}, in plain Keras by {growth(alone, field):.1%}")
    return found


if __name__ == "__main__":
    sys.exit(main())
