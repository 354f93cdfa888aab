"""Run `keras-dp check`: find out whether data parallelism works on this machine, with this model.

Without --model, a small network is trained. Each check prints a line: pass; warn, if training works, but not as it could; or
fail. The exit code is 1 if a check has failed, so that scripts can ask.

Started on several workers, as by keras-dp launch --workers 2 -m keras_dp check, it also checks that they reach each other. The
first worker prints all findings, the others those that are not "pass".
"""

import argparse
import collections
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator

from keras_dp import tables
from keras_dp.cli.arguments import IMPORTED, argument, function_name, model_name, positive
from keras_dp.cli.check.findings import Finding, is_good

FINDING = "finding: "  # the beginning of a line with a finding
DONE = "all checks are done"


@dataclasses.dataclass(frozen=True)
class Question:
    """Says what to check.

    Attributes:
        model: a name for `keras_dp.cli.models.workload`.
        data: "module:function" for a function that returns a batch, or a dataset of batches; None for random numbers.
        towers: the number of towers; None for all GPUs, or two logical CPUs.
        batch: the number of rows in a global batch of random numbers; None for 16 rows a tower.
        start_timeout: seconds to wait for other workers.
    """

    model: str
    data: str | None = None
    towers: int | None = None
    batch: int | None = None
    start_timeout: int = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--model",
        "--module",
        type=argument(model_name),
        default="small",
        help=f"my_module:build_model, which returns a built keras.Model, or a model of keras-dp bench; {IMPORTED} (default: a "
        "small model)",
    )
    parser.add_argument(
        "--data",
        type=argument(function_name),
        metavar="MODULE:FUNCTION",
        help="returns a batch, or a dataset of batches; imported like a model (default: random)",
    )
    parser.add_argument("--towers", type=argument(positive), help="number of towers (default: all GPUs, or two logical CPUs)")
    parser.add_argument("--batch", type=argument(positive), help="rows in a batch of random numbers (default: 16 a tower)")
    parser.add_argument(
        "--start-timeout",
        type=argument(positive),
        default=60,
        metavar="SECONDS",
        help="how long to wait for other workers (60)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Prints each finding as it comes, and returns 1 if a check has failed."""
    question = Question(options.model, options.data, options.towers, options.batch, options.start_timeout)
    console = tables.console()
    findings = []
    for finding in answers(question):
        findings.append(finding)
        if not options.json:
            console.print(finding)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
    return 0 if is_good(findings) else 1


def answers(question: Question) -> Iterator[Finding]:
    """Yields the findings of another process: a check that ends the process, as a broken driver may, is a finding, too."""
    code = "from keras_dp.cli.check.checking import main; main()"
    command = [sys.executable, "-c", code, json.dumps(dataclasses.asdict(question))]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1", **os.environ}
    others: collections.deque[str] = collections.deque(maxlen=3)
    is_done = False
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        for line in process.stdout or ():
            if line.startswith(FINDING):
                yield Finding(**json.loads(line.removeprefix(FINDING)))
            elif line.startswith(DONE):
                is_done = True
            elif line.strip():
                others.append(line.strip())
    if process.returncode or not is_done:
        yield Finding("checks", "fail", f"the checks ended with exit code {process.returncode}: {' '.join(others)[-600:]}")
