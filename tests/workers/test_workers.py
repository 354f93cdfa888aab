"""Workers, which are real processes on this machine, train together and notice lost workers."""

import re
import time
from pathlib import Path

import pytest
from programs import adversarial, contrastive, distillation, generative, sequences, traps, vision  # noqa: F401
from programs.catalogue import PROGRAMS
from unbroken_training import assert_unbroken
from worker_processes import SCRIPTS, Launched, Workers

# Cases of worker_scripts/exactness.py, and programs of tests/programs: of workers of which some have fewer rows or none, and
# those that two workers show as well as three.
UNEVEN = [
    *("shards_of_the_user", "even_and_uneven_batches", "texts_that_each_worker_pads_by_itself"),
    *("fewer_rows_than_workers", "rows_of_which_no_other_can_take_the_place"),
]
OTHERS = [
    *("synchronized_batch_norm", "whole_and_ragged_tensors", "masks_dropout_and_sample_weights", "sparse_gradients"),
    "slices_one_after_the_other",
    *("gradients_in_half_the_bytes", "coupled_activity", "predictions_of_own_rows", "several_numbers_of_rows"),
    *("words_beside_sentences", "seeds_that_differ", "the_chief_writes_and_what_it_restores_is_for_all"),
    *("different_batches_are_noticed", "differences_are_named", "nearest_neighbors_in_a_queue"),
]
CALLS = ["fit", "predict", "predict"]  # of worker_scripts/failing_step.py
ALL_CASES = (SCRIPTS / "exactness.py").read_text(encoding="utf-8").count("\n@case\n")


@pytest.mark.parametrize(
    ("count", "towers", "cases"),
    [
        pytest.param(2, "2", ["even_and_uneven_batches"], id="2-quick"),
        pytest.param(2, "alternate", OTHERS, id="2"),
        pytest.param(3, "alternate", UNEVEN, id="3"),
        pytest.param(2, "12", [], id="2-all", marks=pytest.mark.slow),
        pytest.param(3, "12", [], id="3-all", marks=pytest.mark.slow),
        *(pytest.param(2, "2", list(PROGRAMS)[i::10], id=f"programs-{i}", marks=pytest.mark.slow) for i in range(10)),
    ],
)
def test_workers_match_one_device(count, towers, cases, tmp_path):
    """Runs cases of worker_scripts/exactness.py with 1 or 2 towers on each worker, against plain Keras on one device."""
    with Workers("exactness.py", count, tmp_path, count, towers, *cases) as workers:
        codes = workers.start().wait(seconds=500)
        outputs = workers.outputs()
    assert codes == [0] * count, "\n".join(output[-3000:] for output in outputs)
    for output in outputs:
        passed = re.findall(r"^passed (\w+), (\d)", output, re.MULTILINE)
        assert output.rstrip().endswith("done")
        assert len(passed) == (len(cases) or ALL_CASES) * (2 if towers == "12" else 1), passed


def trained(count, directory, seconds_per_epoch, *options):
    """Returns workers that train, and sleep for a quarter of the time of an epoch after each batch."""
    return Workers("training.py", count, directory, seconds_per_epoch, directory / "backup", *options)


def test_the_others_name_a_worker_that_is_killed(tmp_path):
    with trained(3, tmp_path, 0.4, "--epochs", 1000) as workers:
        workers.start().wait_for_output("epoch 1")
        workers.signal(1, "KILL")
        killed = time.monotonic()
        assert workers.wait(0, 2, seconds=20) == [1, 1]
        assert time.monotonic() - killed < 10
        for i in (0, 2):
            assert re.search(rf"WorkerLostError: Worker 1 \(127.0.0.1:{workers.ports[1]}\) is lost", workers.output(i))


@pytest.mark.parametrize("method", ["on_test_end", "on_train_end"])
def test_a_worker_that_ends_at_the_end_of_a_call_is_named(method, tmp_path):
    """After `evaluate`, the workers compare their batches. After the last epoch, `fit` waits for nobody."""
    with Workers("leaving.py", 2, tmp_path, method) as workers:
        assert workers.start().wait(seconds=60) == [1, 3]
        assert "fit has ended" in workers.output(0)
        assert "evaluate has ended" not in workers.output(0)
        assert re.search("WorkerLostError: Worker 1 .* is lost", workers.output(0))


TOO_LARGE = "InvalidArgumentError: too large : Tensor had NaN values"
FAILED = {"step": TOO_LARGE, "first": TOO_LARGE, "data": "UnknownError: OSError: a file is gone"}


def after_a_failed_step(where, directory):
    """Returns the outputs of three workers, and the lines of their calls. No step that failed has changed a weight."""
    with Workers("failing_step.py", 3, directory, where) as workers:
        assert workers.start().wait() == [0, 0, 0]
        outputs = workers.outputs()
    assert all("\na change of 0.0\n" in output for output in outputs)
    assert len({re.search("^weights: .*", output, re.MULTILINE)[0] for output in outputs}) == 1
    return [re.findall("^(?:fit|predict): .*", output, re.MULTILINE) for output in outputs]


@pytest.mark.parametrize("where", FAILED)
def test_a_step_that_fails_on_one_worker_is_named_by_all(where, tmp_path):
    lost = "The last step or call of worker 2 failed, and others still wait for it: all workers must start again."
    reason = f"WorkerLostError: {lost} Received: {FAILED[where]}"
    *others, own = after_a_failed_step(where, tmp_path)
    assert others == [[f"{call}: {reason}" for call in CALLS]] * 2
    assert own[0].startswith(f"fit: {FAILED[where].partition(':')[0]}")
    assert own[1:] == [f"{call}: {reason}" for call in CALLS[1:]]


def test_after_a_step_that_fails_alike_on_all_workers_they_go_on(tmp_path):
    for (said,) in after_a_failed_step("alike", tmp_path):
        assert said.startswith("fit: InvalidArgumentError")


def test_a_worker_that_is_stopped_is_given_up_in_time(tmp_path):
    with trained(2, tmp_path, 0.4, "--epochs", 1000, "--timeout", 6) as workers:
        workers.start().wait_for_output("epoch 1")
        workers.signal(1, "STOP")
        stopped = time.monotonic()
        assert workers.wait(0, seconds=40) == [1]
        assert 4 < time.monotonic() - stopped < 25
        assert re.search(r"WorkerLostError: Worker 1 \(.*\) is lost: it has not answered for \d+ s", workers.output(0))


def test_a_late_worker_is_waited_for_with_a_message(tmp_path):
    with trained(2, tmp_path, 0, "--epochs", 1, "--message-seconds", 1) as workers:
        workers.start(0).wait_for_output("Waiting for Worker 1", 0)
        workers.start(1)
        assert workers.wait() == [0, 0]
        assert "weights" in workers.output(0)


def test_a_worker_that_never_starts_is_named(tmp_path):
    with trained(2, tmp_path, 0, "--start-timeout", 2) as workers:
        assert workers.start(1).wait(1) == [1]
        assert re.search(r"TimeoutError: Worker 0 \(.*\) did not start within 2 s", workers.output(1))


def test_other_versions_are_refused_on_all_workers(tmp_path):
    with trained(2, tmp_path, 0, "--keras", "3.0.0") as workers:
        assert workers.start().wait() == [1, 1]
        for output in workers.outputs():
            assert re.search(r"differ in versions, keras: worker 0 has '3\.1.*', worker 1 has '3\.0\.0'", output)


def assert_nothing_is_lost(workers):
    assert workers.wait() == [0] * len(workers.ports)
    assert_unbroken(workers.output(0), 2)
    assert all("lost" not in output for output in workers.outputs())


def test_a_worker_that_is_ten_times_as_slow_is_waited_for(tmp_path):
    """It sleeps for 0.5 s after each of 8 batches."""
    with trained(3, tmp_path, 0.2, "--epochs", 2, "--slower", 10, "--timeout", 20) as workers:
        workers.start().wait_for_output("epoch 0")
        begin = time.monotonic()
        assert_nothing_is_lost(workers)
        assert time.monotonic() - begin > 3


def test_another_clock_changes_nothing(tmp_path):
    with trained(2, tmp_path, 0.2, "--epochs", 2, "--ahead", 86_400) as workers:
        assert_nothing_is_lost(workers.start())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_chief_whose_disk_is_full_ends_with_the_error_and_is_named(tmp_path):
    with trained(3, tmp_path, 0.2, "--epochs", 2, "--full") as workers:
        workers.start().wait_for_output("No space left on device", 0)
        begin = time.monotonic()
        assert workers.wait(seconds=20) == [1, 1, 1]
        assert time.monotonic() - begin < 15
        for i in (1, 2):
            assert "No space left" not in workers.output(i)
            assert re.search(rf"WorkerLostError: Worker 0 \(127.0.0.1:{workers.ports[0]}\) is lost", workers.output(i))


def test_launched_workers_resume_after_one_was_killed(tmp_path):
    """Training ends with the weights of an uninterrupted run of plain Keras on one device.

    The third of three workers dies twice, and is left out. When another one dies, it is tried again, dies, and is left out
    again. The chief's epochs are those of three, three, two, three and two workers.
    """
    script = [SCRIPTS / "training.py", 0, tmp_path / "backup", "--die-in-epochs", *"1122"]
    with Launched(tmp_path, "--workers 3 --max-restarts 4 --min-workers 2", *script) as launched:
        output = launched.whole_output()
    assert re.findall(r"\[0\] epoch (\d)", output) == list("01112223")
    assert re.findall(r"\[0\] connected 0 of (\d)", output) == list("33232")
    assert not (tmp_path / "backup").exists()
    assert_unbroken(output, 4)
