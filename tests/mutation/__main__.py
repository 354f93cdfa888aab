"""Run the tests of the partitioner on mutants, and print the mutants that no test notices.

A mutant is tested in a copy of the repository, in a process of its own with limits of time and memory. First come the unit
tests that reach the line of its fault, then random programs.
"""

import argparse
import collections
import json
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from mutation.mutants import draw_mutants
from mutation.running import PARTITION, in_process, reach_lines, run_programs, run_tests

ROOT = Path(__file__).parents[2]
# All other modules decide results. These explain and draw the partition, or need several workers, XLA or a failure.
_OTHERS = {"bodies", "comparison", "compilation", "explanation", "failures", "step_check", "tolerance"}
_OTHERS |= {"tensorflow_internals", "user_lines", "worker_exchanges"}


def parsed():
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="the number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the sample")
    parser.add_argument("--seconds", type=int, default=60, help="the time for the unit tests of a mutant")
    parser.add_argument("--programs", type=int, default=30, help="the number of random programs for a mutant")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "mutants", help="a folder, to go on after a break")
    return parser.parse_args()


def main():
    """Tests the mutants one by one, and prints the score."""
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes = collections.Counter()
    with tempfile.TemporaryDirectory() as folder, (options.out / "outcomes.jsonl").open("a+") as file:
        copy = copied(Path(folder))
        reached = options.out / "reached.json"
        if not reached.exists():
            assert in_process(copy, 3600, reach_lines, reached) == 0, "The tests fail without a fault."
        tests = json.loads(reached.read_text())
        file.seek(0)
        known = dict(map(json.loads, file))
        modules = sorted(path for path in (copy / PARTITION).glob("**/*.py") if path.stem not in _OTHERS)
        for mutant in draw_mutants(copy, modules, options.count, options.seed):
            if str(mutant) not in known:
                known[str(mutant)] = outcome_of(mutant, copy, tests, options)
                file.write(json.dumps([str(mutant), known[str(mutant)]]) + "\n")
                file.flush()
            outcomes[known[str(mutant)]] += 1
            print(f"{known[str(mutant)]:10} {mutant}", flush=True)
    print(f"{outcomes.total()} mutants: " + ", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common()))


def copied(folder):
    """Copies what the tests need to a folder, and returns it."""
    for name in ("keras_dp", "tests", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def outcome_of(mutant, copy, tests, options):
    """Returns whether tests notice a mutant: "test" or "program" if they do, "no end" if they never end, or "survives"."""
    module = copy / mutant.path
    right = module.read_text()
    module.write_text(mutant.code)
    try:
        chosen = tests_of(mutant, tests)
        code = in_process(copy, 2 * options.seconds + 60, run_tests, chosen, options.seconds) if chosen else 0
        if code:
            return "no end" if code < 0 else "test"
        command = ["fuzz", "--no-shrinking", "--minutes", "3", "--seed", str(options.seed), "--count", str(options.programs)]
        code = in_process(copy, 300, run_programs, command) if options.programs else 0
        return "program" if code else "survives"
    finally:
        module.write_text(right)


def tests_of(mutant, tests):
    """Returns the tests that reach a mutant's line, or else its module: the quickest case of each test, then the next ones."""
    lines = tests["lines"].get(mutant.path, {})
    found = set(lines.get(str(mutant.line), ())) or {test for reaching in lines.values() for test in reaching}
    cases = collections.defaultdict(list)
    for test in sorted(found, key=lambda test: tests["seconds"][test]):
        cases[test.partition("[")[0]].append(test)
    places = {test: (i, tests["seconds"][test]) for listed in cases.values() for i, test in enumerate(listed)}
    return sorted(found, key=lambda test: places[test])


if __name__ == "__main__":
    main()
