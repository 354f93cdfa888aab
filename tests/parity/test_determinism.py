"""The same seed gives the same bytes again, in float32: of the weights, the optimizer's state, and all results."""

import json
import re

import pytest
from repeated_runs import (
    PROGRAMS,
    built,
    called_after_op_determinism,
    digest,
    in_a_new_process,
    trained,
    trained_from_a_file,
    trained_with_backups,
)
from worker_processes import Workers

SHARDED = {"parameter_device": "sharded", "pack_copies": True}
RUNS = [
    ("batch normalization", 4, SHARDED),
    ("dropout", None, {}),
    ("attention", 1, {}),
    ("augmentation", 2, {"shuffled_by": "dataset"}),
    ("recurrent", 3, {"batch_norm": "local"}),
    ("attention", 3, {"gradient_dtype": "bfloat16", "policy": "mixed_bfloat16"}),
    ("own step", 3, {"jit_compile": True}),
    ("dropout", 4, {"op_determinism": True, "pack_copies": True}),
]


@pytest.mark.parametrize(("program", "towers", "options"), RUNS)
def test_new_processes_give_the_same_bytes(program, towers, options):
    """Their sets of texts have different orders."""
    first, second = (in_a_new_process(trained, program, towers, server=server, **options) for server in (0, 1))
    assert first == second


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_op_determinism_may_be_called_after_the_model_is_made(steps_per_execution):
    """TensorFlow then refuses to read the time, which steps do to measure how long they wait for input."""
    assert in_a_new_process(called_after_op_determinism, steps_per_execution) == [2, 2, 90, 3]


def test_another_seed_gives_other_bytes():
    """A negative control, and the same in one process."""
    first, second, other = (trained("dropout", 3, seed=seed) for seed in (3, 3, 4))
    assert first == second
    assert not set(first.values()) & set(other.values())


STEPS = [
    ("attention", 3, SHARDED),
    ("batch normalization", 4, SHARDED),
    ("dropout", 4, {"pack_copies": True}),
    ("own step", 4, {}),
]


@pytest.mark.parametrize(("program", "towers", "options"), STEPS)
def test_a_step_from_the_same_state_gives_the_same_bytes_each_time(program, towers, options):
    """AddN adds three addends in any order. It did so with the sums of towers, in half of these steps."""
    model, parallel = built(program, towers, **options)
    x, y = PROGRAMS[program][1]()
    parallel.train_on_batch(x, y)
    variables = [*model.variables, *model.optimizer.variables]
    begin, seen = [variable.numpy() for variable in variables], set()
    for _ in range(60):
        for variable, value in zip(variables, begin, strict=True):
            variable.assign(value)
        parallel.reset_metrics()
        loss = parallel.train_on_batch(x, y)
        seen.add(digest([loss, *(variable.numpy() for variable in variables)]))
    assert len(seen) == 1


@pytest.mark.parametrize(("program", "towers"), [("dropout", 3), ("augmentation", None), ("own step", 1)])
def test_what_is_loaded_from_a_file_goes_on_with_the_same_bytes(program, towers, tmp_path):
    runs = []
    for number in range(2):
        path = str(tmp_path / f"{number}.keras")
        runs.append([in_a_new_process(trained_from_a_file, program, towers, path, ends) for ends in (False, True)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


@pytest.mark.parametrize("towers", [4, None])
def test_a_run_that_goes_on_from_a_backup_has_the_bytes_of_an_unbroken_one(towers, tmp_path):
    """The order of the rows is fixed, and nothing is drawn: Keras's backups hold neither."""
    unbroken, stopped, resumed = (
        in_a_new_process(trained_with_backups, "batch normalization", towers, str(tmp_path / folder), stops)
        for folder, stops in (("unbroken", False), ("broken", True), ("broken", False))
    )
    assert stopped["weights"] != unbroken["weights"]
    assert resumed == unbroken


@pytest.mark.parametrize(("program", "towers"), [("batch normalization", 2), ("dropout", 1)])
def test_two_workers_give_the_same_bytes(program, towers, tmp_path):
    runs = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Workers("repeated.py", 2, folder, program, towers) as workers:
            assert workers.start().wait(seconds=200) == [0, 0], workers.output(0)[-3000:]
            runs += [json.loads(re.search("^digests (.*)$", workers.output(i), re.MULTILINE)[1]) for i in range(2)]
    assert all(run == runs[0] for run in runs)
