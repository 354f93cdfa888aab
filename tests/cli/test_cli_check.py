"""`keras-dp check` says whether data parallelism works, and each planted fault is found."""

import dataclasses
import functools
import json
import math
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from worker_threads import on_workers

import keras_dp
from keras_dp import tables
from keras_dp.cli import main, models
from keras_dp.cli.check import checking, command, copying, machine, training, workers
from keras_dp.cli.check.findings import Finding
from keras_dp.devices import nvidia, platforms, trial_copies
from keras_dp.partition.placing.rules import RULES
from keras_dp.workers.group import WorkerGroup


@pytest.fixture
def findings(monkeypatch):
    """Returns a function that runs the checks in this process, and returns the findings by name."""
    monkeypatch.setattr(checking, "use_logical_cpus", lambda count: None)
    keras.config.set_floatx("float32")
    question = functools.partial(command.Question, towers=2)
    return lambda *arguments, **named: {one.name: one for one in checking.findings(question(*arguments, **named))}


def wrapped(*stack, features=4):
    """Returns a model with these layers, compiled on two towers."""
    inputs = keras.Input((features,))
    outputs = inputs
    for layer in (*stack, keras.layers.Dense(2)):
        outputs = layer(outputs)
    parallel = keras_dp.DataParallelModel(keras.Model(inputs, outputs), devices=2)
    parallel.compile("sgd", "mse")
    return parallel


@pytest.mark.promise
def test_a_machine_that_works(findings, monkeypatch, capsys):
    """Prints what a user sees. Without GPUs, only the devices are a warning."""
    monkeypatch.setattr(command, "answers", checking.findings)
    assert main(["check"]) == 0
    printed = capsys.readouterr().out
    verdicts = {line.split()[1]: line.split()[0] for line in printed.splitlines() if not line.startswith(" ")}
    expected = dict.fromkeys(("versions", "copies", "rows", "result", "work", "repeated"), "pass")
    assert {name: verdicts[name] for name in expected} == expected
    assert verdicts["speed"] in ("pass", "warn")  # a busy machine may be late with its input
    assert "train step on one device and on towers: the same" in printed
    assert all(len(line) <= tables.WIDEST for line in printed.splitlines())


@pytest.mark.parametrize(("end", "code"), [("kill -ABRT $$", -6), ("exit 0", 0)])
def test_a_process_that_ends_before_its_checks(end, code, tmp_path, monkeypatch, capsys):
    """The finding before the end is kept, although a model has printed the beginning of its line."""
    python = tmp_path / "python"
    finding = json.dumps(dataclasses.asdict(Finding("versions", "pass", "all is well")))
    python.write_text(f"#!/bin/sh\nprintf '\nfinding: %s\nno such file' '{finding}'\n{end}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert main(["check", "--json"]) == 1
    first, last = json.loads(capsys.readouterr().out)
    assert first["name"] == "versions"
    assert (last["verdict"], last["seen"]) == ("fail", f"the checks ended with exit code {code}: no such file")


@pytest.mark.parametrize(
    ("function", "said"), [("broken", "RuntimeError: this model cannot be built"), ("other", "has no function 'other'")]
)
def test_a_model_that_cannot_be_checked(function, said, findings):
    *others, (name, last) = findings(f"user_models:{function}").items()
    assert (name, last.verdict) == ("model", "fail")
    assert said in last.seen
    assert [name for name, _ in others] == ["versions", "devices", "copies"]


def test_a_model_and_data_of_the_user(findings, tmp_path, monkeypatch):
    """One row for two towers: one of them is idle. The module is in the current directory."""
    (tmp_path / "a_module.py").write_text("from user_models import one_row, small\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    found = findings("a_module:small", "a_module:one_row")
    assert found["rows"].verdict == "warn"
    assert "1 rows for 2 towers, 0 or more for each" in found["rows"].seen
    assert found["result"].verdict == found["repeated"].verdict == "pass"


@pytest.mark.parametrize(("name", "rows"), [("generator", 4), ("Sequence", 5)])
def test_data_of_a_generator_or_a_py_dataset(name, rows):
    """The first batch is enough: a generator may be endless."""
    x, y = checking._first_batch(models.function_named(f"user_models:{name}")())
    assert (x.shape, y.shape) == ((rows, 3), (rows, 2))


def test_copies_that_change_numbers(monkeypatch):
    """As direct copies between GPUs may, where the IOMMU is on."""
    devices = ["CPU:0", "CPU:1", "CPU:2"]
    copied = trial_copies.copied

    def broken(tensor, device):
        right = copied(tensor, device)
        return tf.concat([right[:-1], [tf.constant(7, tf.uint8)]], 0) if device == "CPU:2" else right

    assert copying.copies(devices).verdict == "pass"
    monkeypatch.setattr(trial_copies, "copied", broken)
    found = copying.copies(devices)
    assert found.verdict == "fail"
    assert found.seen == "numbers changed on their way from CPU:0 to CPU:2, CPU:1 to CPU:2"
    assert "IOMMU" in found.advice


def test_the_matrix_of_copies():
    found = [copying.MeasuredCopy("GPU:0", "GPU:1", True, 9.0, 21.04), copying.MeasuredCopy("GPU:1", "GPU:0", True, 9.0, 20.0)]
    assert copying._matrix(["GPU:0", "GPU:1"], found) == (
        "GB/s to GPU:0 GPU:1",
        "GPU:0       -  21.0",
        "GPU:1    20.0     -",
    )


def test_copies_that_plan_does_not_expect_are_told():
    assert copying._beside_plan(16.0) == copying._beside_plan(39.0) == []
    (line,) = copying._beside_plan(62.0)
    assert line.startswith("keras-dp plan assumes 15 to 40 µs for a small copy, not 62: ")


def test_a_result_that_differs(findings, monkeypatch):
    right = RULES["Relu"]

    def wrong(node):
        plan = right(node)

        def instance(builder, definition, tower, inputs):
            made = builder.copy(definition, tower, inputs)
            return builder.graph.add("ZerosLike", [made], builder.devices[1], "wrong", 1, T=node.dtype(0)) if tower else made

        return dataclasses.replace(plan, instance=instance)

    monkeypatch.setitem(RULES, "Relu", wrong)
    found = findings("small")["result"]
    assert found.verdict == "fail"
    assert any("Relu" in line for line in found.table)


def test_a_step_that_cannot_run_twice():
    """It counts its rows in a table, and is not wrong."""
    counts = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    class Counting(keras.Sequential):
        def train_step(self, data):
            counts.insert(tf.constant(0, tf.int64), counts.lookup(tf.constant(0, tf.int64)) + 1)
            return super().train_step(data)

    parallel = keras_dp.DataParallelModel(Counting([keras.Input((4,)), keras.layers.Dense(1)]), devices=2)
    parallel.compile("sgd", "mse")
    found = training.result(parallel, (np.ones((8, 4)), np.ones((8, 1))))
    assert found.verdict == "warn"
    assert "an iterator, a queue, a table" in found.advice


class DrawsByItself(keras.layers.Layer):
    """Draws from the operating system's randomness, and not from Keras's seeds."""

    def build(self, shape):
        self.generator = tf.random.Generator.from_non_deterministic_state()

    def call(self, x):
        return x * self.generator.uniform(tf.shape(x), dtype=x.dtype)


def test_a_layer_that_draws_its_own_randomness():
    batches = tf.data.Dataset.from_tensors((np.ones((8, 4)), np.ones((8, 2))))
    found = training.repeated(lambda: wrapped(DrawsByItself()), batches)
    assert found.verdict == "warn"
    assert found.seen.startswith("the same seed gives weights that differ by ")
    assert "without Keras's seeds" in found.advice


@pytest.mark.parametrize(
    ("device", "by", "verdict"), [("GPU:0", 5e-10, "pass"), ("GPU:0", 1e-4, "warn"), ("CPU:0", 5e-10, "warn")]
)
def test_gpus_may_add_in_any_order(device, by, verdict):
    """On an H100, weights differed by 5e-10 between two trainings of a small network."""
    weights = iter([np.zeros(3), np.full(3, by)])

    def build():
        inner = SimpleNamespace(get_weights=lambda: [next(weights)])
        return SimpleNamespace(devices=[device], inner_model=inner, fit=lambda *arguments, **named: None)

    found = training.repeated(build, tf.data.Dataset.from_tensors((np.ones((8, 4)), np.ones((8, 2)))))
    assert found.verdict == verdict


@pytest.mark.parametrize("package", [keras, tf])
def test_a_version_that_was_never_tested(package, monkeypatch):
    monkeypatch.setattr(package, "__version__", "3.99.0")
    found = machine.versions_found()
    assert (found.verdict, "not tested with versions as new" in found.advice) == ("warn", True)


@pytest.mark.parametrize(
    ("count", "gpus", "capability", "verdict", "seen", "advice"),
    [
        (2, ["A100", "A100"], (9, 0), "pass", "", ""),
        (2, ["A100"], (9, 0), "warn", "", "Is another version of CUDA"),
        (2, ["A100", "T4"], (9, 0), "warn", "", "They differ"),
        # Plain Keras fails on them, too, and says less.
        (1, ["RTX 5090"], (12, 0), "warn", "12.0", "Blackwell"),
        (1, [], None, "fail", "the driver has 1 GPU(s), and TensorFlow, built for CUDA ", "[cuda]"),
    ],
)
def test_gpus_of_the_machine(count, gpus, capability, verdict, seen, advice, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvidia, "count_gpus", lambda: count)
    monkeypatch.setattr(machine, "environment", lambda: {"gpus": gpus})
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"compute_capability": capability})
    found = machine.devices_found()
    assert found.verdict == verdict
    assert seen in found.seen
    assert advice in found.advice
    assert found.advice or verdict == "pass"


@pytest.mark.parametrize(("megabytes", "verdict"), [(3, "pass"), (9000, "warn")])
def test_other_programs_on_a_gpu(megabytes, verdict, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0"])
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    answer = SimpleNamespace(stdout=f"0, {megabytes}, 81559, 580.1\n", stderr="", returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **named: answer)
    assert machine.memory_of_others().verdict == verdict


@pytest.mark.parametrize(("slow", "verdict"), [(1.1, "pass"), (3.0, "warn")])
def test_gpus_that_differ_are_timed_alone(slow, verdict, findings, monkeypatch):
    timed = []

    def speed(parallel, batches):
        timed.append((parallel.devices, len(next(iter(batches))[0])))
        return Finding("speed", "pass", "", data={"milliseconds": slow if parallel.devices == ["CPU:1"] else 1.0})

    monkeypatch.setattr(training, "speed", speed)
    monkeypatch.setattr(machine, "gpus_differ", lambda: True)
    found = findings("small", batch=10)["shares"]
    assert timed == [(["CPU:0", "CPU:1"], 10), (["CPU:0"], 5), (["CPU:1"], 5)]
    assert (found.verdict, found.seen) == (verdict, f"5 rows take 1.0 ms on CPU:0, {slow} ms on CPU:1")
    assert ("rows=[10, 3]" in found.advice) == (verdict == "warn")


def test_steps_that_wait_for_input():
    def slow():
        while True:
            time.sleep(0.05)
            yield np.ones((8, 4)), np.ones((8, 2))

    spec = tuple(tf.TensorSpec((8, width), tf.float64) for width in (4, 2))
    found = training.speed(wrapped(), tf.data.Dataset.from_generator(slow, output_signature=spec))
    assert found.verdict == "warn"
    assert found.data["input_wait"] > 0.5


def test_rows_that_are_gathered():
    class Sorts(keras.layers.Layer):
        def call(self, x):
            return x + tf.sort(x, axis=0)

    found = training.work(wrapped(Sorts(), features=40_000), (np.ones((8, 40_000)), np.ones((8, 2))))
    assert found.verdict == "warn"
    assert "gather rows, the largest 2.6 MB" in found.seen


@pytest.mark.parametrize(
    ("variables", "release", "system", "name", "advice"),
    [
        ({"COLAB_RELEASE_TAG": "r"}, "6.1", "Linux", "Colab", "Runtime > Change runtime type"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, "6.1", "Linux", "Kaggle", "GPU T4 x2"),
        ({}, "5.15.90.1-microsoft-standard-WSL2", "Linux", "Linux in WSL", "driver in Windows"),
        ({}, "10", "Windows", "Windows", "run the script in WSL"),
        ({}, "23.1", "Darwin", "macOS", "no GPU on macOS"),
        ({}, "6.1", "Linux", "Linux", "If there are GPUs: pip install"),
    ],
)
def test_machines_where_gpus_come_otherwise(variables, release, system, name, advice, monkeypatch):
    for variable in ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(platforms.platform, "release", lambda: release)
    monkeypatch.setattr(platforms.platform, "system", lambda: system)
    monkeypatch.setattr(nvidia, "count_gpus", lambda: 0)
    assert machine.versions_found().seen.endswith(f"on {name}")
    found = machine.devices_found()
    assert advice in found.advice
    assert ("pip install" in found.advice) == platforms.current_platform().has_cuda


@pytest.mark.processes
def test_workers_that_work(capfd):
    """The first worker prints all, the other one only what is not as it should be: there is no GPU."""
    assert main(["launch", "--workers", "2", "-m", "keras_dp", "check"]) == 0
    lines = [line for line in capfd.readouterr().out.splitlines() if not line[4:].startswith(" ")]
    first, second = ([line[4:].split()[:2] for line in lines if line.startswith(f"[{i}]")] for i in (0, 1))
    passed = ("workers", "versions", "copies", "rows", "result", "work", "repeated")
    assert [["pass", name] in first for name in passed] == [True] * len(passed)
    assert first[-1][1] == "speed"
    assert second in ([["warn", "devices"]], [["warn", "devices"], ["warn", "speed"]])
    assert any("2 workers with the same versions" in line for line in lines)
    assert any("32 rows for 2 towers" in line for line in lines)


@pytest.mark.parametrize(
    ("error", "advised"),
    [
        (TimeoutError("Worker 1 (127.0.0.1:2222) did not start within 1 s."), "firewalls"),
        (ValueError("They differ in versions, keras: worker 0 has '3.15.1', worker 1 has '3.14.0'."), ""),
    ],
    ids=["not started", "other versions"],
)
def test_workers_that_cannot_be_connected(error, advised, findings, monkeypatch):
    """Nothing else is checked then."""
    monkeypatch.setattr(workers, "find_cluster", lambda: "a cluster")
    monkeypatch.setattr(workers, "connect_workers", mock.Mock(side_effect=error))
    (found,) = findings("small", start_timeout=1).values()
    assert (found.name, found.verdict) == ("workers", "fail")
    assert str(error) in found.seen
    assert advised in found.advice


@pytest.mark.parametrize("changed", [False, True])
def test_sums_that_a_network_changes(changed, monkeypatch):
    """The collectives of worker 1 of 2 are replaced: the other one brings the same numbers."""
    collectives = SimpleNamespace(sum=lambda x: x / 2 * 3 + (1.0 if changed else 0.0))
    group = SimpleNamespace(index=1, count=2, collectives=collectives, answer_times=lambda: [{1: 1e-4}, {0: 1e-4}])
    monkeypatch.setattr(workers, "find_cluster", lambda: "a cluster")
    monkeypatch.setattr(workers, "connect_workers", lambda **arguments: group)
    _, found = workers.connected(1.0)
    assert found.verdict == ("fail" if changed else "pass")


@pytest.mark.parametrize(
    ("times", "verdict", "said"),
    [
        ({(2, 0): 9e-4}, "pass", "a worker answers in 0.90 ms"),
        ({(0, 2): 0.03}, "warn", "most workers answer in 0.20 ms, but worker 2 answers 0 in 30.00 ms"),
        ({(1, 2): math.inf}, "fail", "most workers answer in 0.20 ms, but worker 2 does not answer 1"),
    ],
)
def test_a_pair_of_workers_that_is_slow_or_silent(times, verdict, said):
    found = workers.of_pairs([{j: times.get((i, j), 2e-4) for j in range(3) if i != j} for i in range(3)])
    assert (found.verdict, found.seen) == (verdict, said)
    assert found.table[0].split() == ["ms", "to", "worker", "0", "1", "2"]
    assert found.data["milliseconds_of_an_answer"]["0 to 1"] == pytest.approx(0.2)
    json.dumps(found.data, allow_nan=False)


def test_two_workers_that_are_silent():
    found = workers.of_pairs([{1: math.inf}, {0: math.inf}])
    assert (found.verdict, found.seen) == ("fail", "worker 1 does not answer 0, worker 0 does not answer 1")


def test_times_between_three_workers():
    """Each worker measures its own row of the table, in turn, and all receive the same one."""
    rows = [{1: 0.1, 2: 0.2}, {0: 0.3, 2: math.inf}, {0: 0.4, 1: 0.5}]

    def times(collectives):
        own = SimpleNamespace(answer_times=lambda: rows[collectives.index])
        return WorkerGroup(collectives, own).answer_times()

    assert on_workers(3, times) == [rows] * 3


def test_too_few_devices(findings):
    found = findings("small", towers=9)
    assert found["towers"].verdict == "fail"
    assert "devices=9" in found["towers"].seen


def test_lines_fit_the_terminal():
    text = tables.text(Finding("rows", "warn", "seen " * 30, "advice " * 20, ("a row",)), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[-1] == " " * 20 + "a row"
