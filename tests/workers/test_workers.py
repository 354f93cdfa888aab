"""Workers, which are real processes on this machine, train together and notice lost workers."""

import re
import subprocess
import sys
import time

import pytest
from unbroken_training import assert_unbroken
from worker_processes import SCRIPTS, TESTS, Workers

NUMBERS = [
    *("even_and_uneven_batches", "synchronized_batch_norm", "masks_and_sample_weights", "sparse_gradients"),
    *("losses_and_metrics_that_couple_rows", "shards_of_the_user", "rows_of_which_no_other_can_take_the_place"),
]
CONDUCT = [
    *("seeds_that_differ", "every_row_once", "only_the_chief_writes", "what_is_restored_on_the_chief_is_for_all"),
    *("one_worker_ends_training_for_all", "different_batches_are_warned_of", "batches_of_other_sizes_are_refused"),
    "differences_are_named",
]
OWN = [
    *("own_steps", "own_steps_of_models_whose_seeds_differ", "own_steps_on_shards", "whole_and_ragged_tensors"),
    *(
        "texts_that_each_worker_pads_by_itself",
        "predictions_of_own_rows",
        "several_numbers_of_rows",
        "metrics_and_masks_with_dropout",
        "gradients_in_half_the_bytes",
        "words_beside_sentences",
        "fewer_rows_than_workers",
    ),
]
CALLS = ["fit", "predict", "predict"]  # of worker_scripts/failing_step.py
ALL_CASES = (SCRIPTS / "exactness.py").read_text(encoding="utf-8").count("\n@case\n")


@pytest.mark.parametrize(
    ("count", "cases"),
    [
        pytest.param(2, ["even_and_uneven_batches"], id="2-quick"),
        pytest.param(2, [*NUMBERS, *CONDUCT], id="2"),
        pytest.param(3, NUMBERS, id="3"),
        pytest.param(2, [], id="2-all", marks=pytest.mark.slow),
        pytest.param(3, [], id="3-all", marks=pytest.mark.slow),
        pytest.param(2, OWN, id="2-own"),
        pytest.param(3, OWN, id="3-own"),
    ],
)
def test_workers_match_one_device(count, cases, tmp_path):
    """Runs cases of worker_scripts/exactness.py with 1 and 2 towers on each worker, against plain Keras on one device."""
    with Workers("exactness.py", count, tmp_path, count, *cases) as workers:
        codes = workers.start().wait(seconds=500)
        outputs = [workers.output(i) for i in range(count)]
    assert codes == [0] * count, "\n".join(output[-3000:] for output in outputs)
    for output in outputs:
        passed = re.findall(r"^passed (\w+), (\d)", output, re.MULTILINE)
        assert output.rstrip().endswith("done")
        assert len(passed) == 2 * (len(cases) or ALL_CASES), passed


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_published_programs_train_on_workers(part, tmp_path):
    """Runs the programs of test_programs.py on two workers with two towers each."""
    with Workers("published_programs.py", 2, tmp_path, 2, part, 10) as workers:
        codes = workers.start().wait(seconds=500)
        outputs = [workers.output(i) for i in range(2)]
    assert codes == [0, 0], "\n".join(output[-3000:] for output in outputs)
    for output in outputs:
        assert output.rstrip().endswith("done")
        assert "FAILED" not in output, output[output.index("FAILED") :]


def test_the_others_name_a_worker_that_is_killed(tmp_path):
    with Workers("training.py", 3, tmp_path, 0.4, tmp_path / "backup", "--epochs", 1000) as workers:
        workers.start().wait_for_output("epoch 2")
        workers.signal(1, "KILL")
        killed = time.monotonic()
        assert workers.wait(0, 2, seconds=20) == [1, 1]
        assert time.monotonic() - killed < 10
        for i in (0, 2):
            assert re.search(rf"WorkerLostError: Worker 1 \(127.0.0.1:{workers.ports[1]}\) is lost", workers.output(i))


@pytest.mark.parametrize("method", ["evaluate", "fit"])
def test_a_worker_that_ends_at_the_end_of_a_call_is_named(method, tmp_path):
    """After `evaluate`, the workers compare their batches. After the last epoch, `fit` waits for nobody."""
    with Workers("leaving.py", 2, tmp_path, method) as workers:
        assert workers.start().wait(seconds=60) == [1, 3]
        assert "fit has ended" in workers.output(0)
        assert "evaluate has ended" not in workers.output(0)
        assert re.search("WorkerLostError: Worker 1 .* is lost", workers.output(0))


TOO_LARGE = "InvalidArgumentError: too large : Tensor had NaN values"
FAILED = {"step": TOO_LARGE, "first": TOO_LARGE, "data": "UnknownError: OSError: a file is gone"}


@pytest.mark.parametrize("where", ["step", "first", "data"])
def test_a_step_that_fails_on_one_worker_is_named_by_all(where, tmp_path):
    """The others were told that not all workers call the same methods."""
    with Workers("failing_step.py", 3, tmp_path, where) as workers:
        assert workers.start().wait(seconds=120) == [0, 0, 0]
        outputs = [workers.output(i) for i in range(3)]
    lost = "The last step or call of worker 2 failed, and others still wait for it: all workers must start again."
    reason = f"WorkerLostError: {lost} Received: {FAILED[where]}"
    for output in outputs[:2]:
        assert re.findall("^(?:fit|predict): .*", output, re.MULTILINE) == [f"{call}: {reason}" for call in CALLS]
    own = re.findall("^(?:fit|predict): .*", outputs[2], re.MULTILINE)
    assert own[0].startswith(f"fit: {FAILED[where].partition(':')[0]}")
    assert own[1:] == [f"{call}: {reason}" for call in CALLS[1:]]
    assert all("\na change of 0.0\n" in output for output in outputs)
    assert len({re.search("^weights: .*", output, re.MULTILINE)[0] for output in outputs}) == 1


def test_after_a_step_that_fails_alike_on_all_workers_they_go_on(tmp_path):
    with Workers("failing_step.py", 3, tmp_path, "alike") as workers:
        assert workers.start().wait(seconds=120) == [0, 0, 0]
        outputs = [workers.output(i) for i in range(3)]
    for output in outputs:
        assert re.findall("^(?:fit|predict): .{20}", output, re.MULTILINE) == ["fit: InvalidArgumentError"]
    assert all("\na change of 0.0\n" in output for output in outputs)
    assert len({re.search("^weights: .*", output, re.MULTILINE)[0] for output in outputs}) == 1


def test_a_worker_that_is_stopped_is_given_up_in_time(tmp_path):
    with Workers("training.py", 2, tmp_path, 0.4, tmp_path / "backup", "--epochs", 1000, "--timeout", 6) as workers:
        workers.start().wait_for_output("epoch 2")
        workers.signal(1, "STOP")
        stopped = time.monotonic()
        assert workers.wait(0, seconds=40) == [1]
        assert 4 < time.monotonic() - stopped < 25
        assert re.search(r"WorkerLostError: Worker 1 \(.*\) is lost: it has not answered for \d+ s", workers.output(0))


def test_a_late_worker_is_waited_for_with_a_message(tmp_path):
    with Workers("training.py", 2, tmp_path, 0, tmp_path / "backup", "--epochs", 1) as workers:
        workers.start(0).wait_for_output("Waiting for Worker 1", 0)
        workers.start(1)
        assert workers.wait() == [0, 0]
        assert "weights" in workers.output(0)


def test_a_worker_that_never_starts_is_named(tmp_path):
    with Workers("training.py", 2, tmp_path, 0, tmp_path / "backup", "--start-timeout", 2) as workers:
        assert workers.start(1).wait(1) == [1]
        assert re.search(r"TimeoutError: Worker 0 \(.*\) did not start within 2 s", workers.output(1))


def test_other_versions_are_refused_on_all_workers(tmp_path):
    with Workers("other_versions.py", 2, tmp_path) as workers:
        assert workers.start().wait() == [1, 1]
        for i in range(2):
            assert re.search(r"differ in versions, keras: worker 0 has '3\.1.*', worker 1 has '3\.0\.0'", workers.output(i))


@pytest.mark.parametrize(
    ("options", "deaths", "epochs", "counts"),
    [
        pytest.param("--workers 2 --max-restarts 1", "2", "01223", "22", id="killed"),
        # The third worker dies twice. The chief's epochs are those of all three, again, and of two.
        pytest.param("--workers 3 --max-restarts 2 --min-workers 2", "22", "012223", "332", id="broken"),
        # Then another one dies.
        pytest.param("--workers 3 --max-restarts 3 --min-workers 2", "223", "0122233", "3323", id="back"),
    ],
)
def test_launched_workers_resume_after_one_was_killed(tmp_path, options, deaths, epochs, counts):
    """With --max-restarts, training ends with the weights of an uninterrupted run of plain Keras on one device.

    So it does if a worker dies each time, and --min-workers lets the others go on without it. It is taken in again later.
    """
    script = [str(SCRIPTS / "training.py"), "0", str(tmp_path / "backup"), "--die-in-epochs", *deaths]
    command = "import sys; from keras_dp.cli import main; sys.exit(main(sys.argv[1:]))"
    launched = subprocess.run(
        [sys.executable, "-c", command, "launch", *options.split(), *script],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=TESTS.parent,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr[-3000:]
    assert re.findall(r"\[0\] epoch (\d)", launched.stdout) == list(epochs)
    assert re.findall(r"\[0\] connected 0 of (\d)", launched.stdout) == list(counts)
    assert not (tmp_path / "backup").exists()
    assert_unbroken(launched.stdout, 4)
