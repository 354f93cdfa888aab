"""Random programs give the same results on towers as on one device, and what failed once does not fail again."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import turn

from fuzz.drawing import draw_program
from fuzz.programs import Program, Statement
from fuzz.running import Setting, check, draw_setting, of_kept
from fuzz.shrinking import shrink
from keras_dp.partition.facts.placements import Facts, Partial
from keras_dp.partition.placing.rules import RULES

TESTS = Path(__file__).parents[1]
# Each has its story: what was wrong when the fuzzer found it.
KEPT = sorted((TESTS / "fuzz" / "kept").glob("*.json"))
SEEDS = [0, turn.SEED]  # the same programs each time, and others for each commit


def fuzz(*arguments):
    """Runs the command in a process of its own, since TensorFlow aborts the process for some programs."""
    command = [sys.executable, "-m", "fuzz", *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(TESTS)}, capture_output=True, text=True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_are_one_devices(seed):
    found = fuzz("--count", 30, "--seed", seed)
    failed = re.findall(r"^seed (\d+) (?!.*in plain TensorFlow)", found.stdout, re.MULTILINE)
    assert not failed, found.stdout[-5000:] + found.stderr[-5000:]
    assert found.returncode == 0, found.stderr[-5000:]
    assert sum(map(int, re.findall(r"^(\d+) programs from", found.stdout, re.MULTILINE))) == 30


def test_the_same_seed_gives_the_same_program_which_can_be_kept():
    program = draw_program(3)
    assert program == draw_program(3) != draw_program(4)
    assert str(Program.of(json.loads(json.dumps(dataclasses.asdict(program))))) == str(program)


def test_all_settings_are_drawn():
    drawn = [dataclasses.asdict(draw_setting(seed)) for seed in range(100)]
    assert {name for name in drawn[0] if len({setting[name] for setting in drawn}) < 2} == {"is_optimized"}


@pytest.mark.parametrize("path", KEPT, ids=[path.stem for path in KEPT])
def test_what_failed_once_is_right(path):
    kept = json.loads(path.read_text())
    if kept["setting"].get("workers", 1) > 1:
        # Workers wait for each other in more threads than TensorFlow has by itself.
        found = fuzz("--kept", path)
        assert found.stdout.strip() == "None", kept["story"] + found.stdout + found.stderr[-2000:]
        return
    outcomes = Counter()
    failure = check(*of_kept(path), outcomes)
    assert failure is None, f"{kept['story']}: {failure}"
    assert outcomes["compared"] + outcomes["both fail"] == 1


def of(*statements):
    return Program(statements, (statements[-1].result,))


def test_a_wrong_rule_is_found_and_shrunk(monkeypatch):
    """A negative control: the maxima of the towers' rows are summed."""
    right = RULES["Max"]

    def wrong(node):
        plan = right(node)
        return plan and dataclasses.replace(plan, outputs=[Facts(Partial(), shape=plan.outputs[0].shape)])

    monkeypatch.setitem(RULES, "Max", wrong)
    program = of(
        Statement("unary", "a", ("x",), {"function": "tanh"}),
        Statement("along an axis", "b", ("a",), {"function": "softmax", "axis": 1}),
        Statement("reduction", "c", ("b",), {"function": "maximum", "axis": 0, "keepdims": False}),
        Statement("unary", "d", ("c",), {"function": "sigmoid"}),
    )
    setting = Setting(2, (7,))
    assert check(program, setting, 0).symptom == "differs"
    small = shrink(program, lambda candidate: check(candidate, setting, 0) is not None)
    kinds = [(statement.kind, statement.parameters["function"]) for statement in small.statements]
    assert ("reduction", "maximum") in kinds
    assert not {("unary", "tanh"), ("unary", "sigmoid"), ("along an axis", "softmax")} & set(kinds)


def test_a_failed_check_leaves_variables_alone():
    program = of(Statement("added to the total", "a", ("x",)), Statement("fails", "b", ("x",)))
    assert check(program, Setting(2, (7,), fails=True), 0) is None
