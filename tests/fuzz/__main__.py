"""Run a campaign: draw programs, compare them, and shrink those that fail."""

import argparse
import collections
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
import turn

import keras_dp
from fuzz.drawing import draw_program, kinds_of
from fuzz.running import ON_TOWERS, Failure, check, check_packing, draw_setting, of_kept
from fuzz.shrinking import shrink

_MOST_SECONDS = 150
_PACKING = 15  # one in so many programs is also compared packed and not, bit for bit
_SIMPLER = (
    *({"workers": 1}, {"workers": 2}, {"towers": 2}),
    *({name: False} for name in ("is_compiled", "is_packed", "is_sharded", "fails", "reads_at_random")),
)


def parsed():
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="the number of programs")
    parser.add_argument("--seed", type=int, default=turn.SEED, help="the first seed; one of the commit's if it is left out")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many minutes")
    parser.add_argument("--keep", type=Path, help="a folder for the programs that fail")
    parser.add_argument("--kept", type=Path, help="check one program that was kept, and print its failure, or None")
    parser.add_argument("--no-shrinking", action="store_true")
    return parser.parse_args()


def main():
    """Runs the campaign, prints what failed, and returns the number of failures."""
    options = parsed()
    keras_dp.use_logical_cpus(5)
    keras.config.set_floatx("float64")
    # Workers wait for each other in operations, each of which keeps a thread.
    tf.config.threading.set_inter_op_parallelism_threads(512)
    if options.kept:
        failure = check(*of_kept(options.kept))
        print(failure)
        return int(failure is not None)
    first, end = options.seed, options.seed + options.count
    drawn, outcomes = collections.Counter(), collections.Counter()
    failures = count = 0
    began = time.monotonic()

    def summary():
        minutes = (time.monotonic() - began) / 60
        print(f"\n{count} programs from seed {first}, {drawn.total()} statements, {minutes:.1f} minutes: {failures} failed")
        rare = [f"{kind} {number}" for kind, number in sorted(drawn.items(), key=lambda item: item[1])[:12]]
        print("drawn least:", ", ".join(rare))
        print("outcomes:", ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common()), flush=True)

    def leave(seed, on_towers):
        """Leaves a program that does not end, which nothing can stop, and runs the others in another process."""
        is_plain = outcomes[ON_TOWERS] == on_towers
        print(f"\nseed {seed} does not end within {_MOST_SECONDS} seconds{' in plain TensorFlow' if is_plain else ''}")
        summary()
        rest = ["--seed", str(seed + 1), "--count", str(end - seed - 1)]
        code = subprocess.call([sys.executable, "-m", "fuzz", *rest]) if seed + 1 < end else 0
        os._exit(1 if code or failures or not is_plain else 0)

    for seed in range(first, end):
        if time.monotonic() - began > 60 * options.minutes:
            break
        program, setting = draw_program(seed), draw_setting(seed)
        count += 1
        drawn.update(kinds_of(program.statements))
        giving_up = threading.Timer(_MOST_SECONDS, leave, [seed, outcomes[ON_TOWERS]])
        giving_up.daemon = True
        giving_up.start()
        failure = check(program, setting, seed, outcomes)
        if failure is None and seed % _PACKING == 0:
            failure = check_packing(program, setting, seed)
        giving_up.cancel()
        if failure is not None:
            failures += 1
            print(f"\nseed {seed} {failure.symptom}\n{failure.details}\n{setting}", flush=True)
            if not options.no_shrinking:
                program, setting, failure = smallest(program, setting, seed, failure.symptom)
            print(f"{setting}\n{failure.details}\n{program}", flush=True)
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                described = {"setting": dataclasses.asdict(setting), "program": dataclasses.asdict(program)}
                text = json.dumps({"symptom": failure.symptom, "seed": seed, **described}, indent=1)
                (options.keep / f"{seed}.json").write_text(text + "\n")
        keras.backend.clear_session()
    summary()
    return failures


def smallest(program, setting, seed, symptom):
    """Returns a small program that fails in the same way, in a simple setting."""
    same = symptom.split(":")[0]
    compare = check_packing if same == "packs otherwise" else check

    def fails(candidate, way):
        found = compare(candidate, way, seed)
        return found is not None and found.symptom.split(":")[0] == same

    fewer_rows = [] if setting.is_static or len(setting.rows) == 1 else [{"rows": (rows,)} for rows in setting.rows]
    for change in (*_SIMPLER, *fewer_rows):
        simpler = dataclasses.replace(setting, **change)
        if simpler.workers <= setting.workers and simpler != setting and fails(program, simpler):
            setting = simpler
    smaller = shrink(program, lambda candidate: fails(candidate, setting))
    return smaller, setting, compare(smaller, setting, seed) or Failure(symptom, "It does not fail each time.")


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
