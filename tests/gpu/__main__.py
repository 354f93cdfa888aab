"""Run on this machine what it can teach about keras_dp on GPUs, and write a report after each part.

Each part runs in a process of its own, within its time limit. The parts are in the order of what they teach, so a run that is
cut short has still learned the most. On a machine without GPUs, all parts run on logical CPUs, and the report says what that is
worth.

The exit code is 1 if a result is not exact, or a part has failed or run out of its own time; 130 after Ctrl-C; otherwise 0.
"""

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path

from gpu import report
from gpu.parts import PARTS
from gpu.runner import INTERRUPTED, is_good, run_parts


def main(arguments=None):
    """Runs the parts that the command line asks for, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="make gpu-test", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["parts:", *(f"  {part.name:<14} {part.teaches}" for part in PARTS)])
    parser.add_argument("--minutes", type=float, default=35.0, help="time for all parts together (default: %(default)g)")
    parser.add_argument("--only", type=_parts, default=PARTS, metavar="PART,...", help="parts to run (default: all)")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="directory of the report (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    about = {
        "command": shlex.join(["python", "-m", "gpu", *(sys.argv[1:] if arguments is None else arguments)]),
        "begun": time.strftime("%Y-%m-%d %H:%M"),
        "minutes": options.minutes,
        "quick": options.quick,
    }

    def tell(results):
        report.write(results, about, options.out)
        print(report.headline(results[-1]), flush=True)

    print(f"{len(options.only)} parts in at most {options.minutes:g} minutes; the report grows in {options.out / 'report.md'}")
    results = run_parts(options.only, options.out, 60 * options.minutes, options.quick, tell)
    return 130 if results[-1]["result"] == INTERRUPTED else int(not is_good(results))


def _parts(value):
    """Returns the named parts, in the order of `PARTS`."""
    names, known = value.split(","), [part.name for part in PARTS]
    if not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"The parts are {', '.join(known)}. Received: {value!r}")
    return [part for part in PARTS if part.name in names]


if __name__ == "__main__":
    # A machine that is taken away says so first: the running part is reported as interrupted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
