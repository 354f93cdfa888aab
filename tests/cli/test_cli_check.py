"""`keras-dp check` says whether data parallelism works, and each planted fault is found."""

import dataclasses
import json
import math
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp import tables
from keras_dp.cli import main, models
from keras_dp.cli.check import checking, copying, machine, training, workers
from keras_dp.cli.check.command import Question
from keras_dp.cli.check.findings import Finding
from keras_dp.devices import nvidia, platforms
from keras_dp.partition.placing.rules import RULES

MODEL = """
import keras, numpy as np, os, signal
def build():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
def batch():
    return np.ones((1, 4), "float32"), np.ones((1, 2), "float32")
def ends():
    os.kill(os.getpid(), signal.SIGABRT)
def unbuilt():
    print("building", end="")
    raise RuntimeError("no such file")
def leaves():
    raise SystemExit(0)
"""


@pytest.fixture
def findings(monkeypatch):
    """Returns a function that runs the checks in this process, and returns the findings by name."""
    monkeypatch.setattr(checking, "use_logical_cpus", lambda count: None)
    keras.config.set_floatx("float32")
    return lambda *arguments, **named: {
        one.name: one for one in checking.findings(Question(*arguments, **{"towers": 2} | named))
    }


@pytest.mark.promise
def test_a_machine_that_works(tmp_path, capsys):
    """Runs the command as a user does. Without GPUs, only the devices are a warning."""
    assert main(["check"]) == 0
    printed = capsys.readouterr().out
    verdicts = {line.split()[1]: line.split()[0] for line in printed.splitlines() if not line.startswith(" ")}
    expected = dict.fromkeys(("versions", "copies", "rows", "result", "work", "repeated"), "pass")
    assert {name: verdicts[name] for name in expected} == expected
    assert verdicts["speed"] in ("pass", "warn")  # a busy machine may be late with its input
    assert "train step on one device and on towers: the same" in printed
    assert all(len(line) <= tables.WIDEST for line in printed.splitlines())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("ends", "the checks ended with exit code -6"),
        ("unbuilt", "RuntimeError: no such file"),
        ("other", "has no function 'other'"),
        ("leaves", "the checks ended with exit code 0"),
    ],
)
def test_a_model_that_cannot_be_checked(function, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--model", f"my_model:{function}", "--json"]) == 1
    *others, last = json.loads(capsys.readouterr().out)
    assert last["verdict"] == "fail"
    assert said in last["seen"]
    assert [one["name"] for one in others] == ["versions", "devices", "copies"]


def test_a_model_and_data_of_the_user(findings, tmp_path, monkeypatch):
    """One row for two towers: one of them is idle."""
    (tmp_path / "a_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    found = findings("a_model:build", "a_model:batch")
    assert found["rows"].verdict == "warn"
    assert "1 rows for 2 towers, 0 or more for each" in found["rows"].seen
    assert found["result"].verdict == found["repeated"].verdict == "pass"


GENERATORS = """
import keras, numpy as np

def endless():
    while True:
        yield [np.ones((4, 3), "float32"), np.zeros((4, 1), "float32")]

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.ones((4, 3), "float32"), np.zeros((4, 1), "float32")
"""


@pytest.mark.parametrize("name", ["endless", "Batches"])
def test_data_of_a_generator_or_a_py_dataset(name, tmp_path, monkeypatch):
    """The first batch is enough. An endless generator was once read to its end."""
    (tmp_path / f"batches_of_{name}.py").write_text(GENERATORS)
    monkeypatch.chdir(tmp_path)
    given = models.function_named(f"batches_of_{name}:{name}")()
    x, y = checking._first_batch(given)
    assert (x.shape, y.shape) == ((4, 3), (4, 1))


def test_copies_that_change_numbers(monkeypatch):
    """As direct copies between GPUs may, where the IOMMU is on."""
    copied = copying._copied

    def broken(tensor, device):
        return (
            tf.concat([copied(tensor, device)[:-1], [tf.constant(7, tf.uint8)]], 0)
            if device == "CPU:2"
            else copied(tensor, device)
        )

    assert copying.copies(["CPU:0", "CPU:1", "CPU:2"]).verdict == "pass"
    monkeypatch.setattr(copying, "_copied", broken)
    found = copying.copies(["CPU:0", "CPU:1", "CPU:2"])
    assert found.verdict == "fail"
    assert found.seen == "numbers changed on their way from CPU:0 to CPU:2, CPU:1 to CPU:2"
    assert "IOMMU" in found.advice


def test_the_matrix_of_copies():
    found = [copying.Copy("GPU:0", "GPU:1", True, 9.0, 21.04), copying.Copy("GPU:1", "GPU:0", True, 9.0, 20.0)]
    assert copying._matrix(["GPU:0", "GPU:1"], found) == (
        "GB/s to GPU:0 GPU:1",
        "GPU:0       -  21.0",
        "GPU:1    20.0     -",
    )


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


class DrawsByItself(keras.layers.Layer):
    """Draws from the operating system's randomness, and not from Keras's seeds."""

    def build(self, shape):
        self.generator = tf.random.Generator.from_non_deterministic_state()

    def call(self, x):
        return x * self.generator.uniform(tf.shape(x))


def test_a_step_that_cannot_run_twice():
    """It counts its rows in a table, and was called wrong."""
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


def test_a_layer_that_draws_its_own_randomness(monkeypatch):
    def build():
        parallel = keras_dp.DataParallelModel(
            keras.Sequential([keras.Input((4,)), DrawsByItself(), keras.layers.Dense(2)]), devices=2
        )
        parallel.compile("sgd", "mse")
        return parallel

    keras.config.set_floatx("float32")
    found = training.repeated(build, tf.data.Dataset.from_tensors((np.ones((8, 4), "float32"), np.ones((8, 2), "float32"))))
    assert found.verdict == "warn"
    assert found.seen.startswith("the same seed gives weights that differ by ")
    assert "without Keras's seeds" in found.advice


@pytest.mark.parametrize(
    ("device", "by", "verdict"),
    [("GPU:0", 5e-10, "pass"), ("GPU:0", 1e-4, "warn"), ("CPU:0", 5e-10, "warn"), ("CPU:0", 0.0, "pass")],
)
def test_gpus_may_add_in_any_order(device, by, verdict):
    """On an H100, weights differed by 5e-10 between two trainings of a small network, and every check warned of it."""
    weights = iter([np.zeros(3), np.full(3, by)])

    def build():
        inner = SimpleNamespace(get_weights=lambda: [next(weights)])
        return SimpleNamespace(devices=[device], inner_model=inner, fit=lambda *arguments, **named: None)

    found = training.repeated(build, tf.data.Dataset.from_tensors((np.ones((8, 4)), np.ones((8, 2)))))
    assert found.verdict == verdict


@pytest.mark.parametrize(("package", "version"), [("keras", "3.99.0"), ("tf", "2.99.0")])
def test_a_version_that_was_never_tested(package, version, monkeypatch):
    monkeypatch.setattr(getattr(machine, package), "__version__", version)
    found = machine.versions_found()
    assert (found.verdict, "not tested with versions as new" in found.advice) == ("warn", True)


def test_gpus_that_tensorflow_does_not_see(tmp_path, monkeypatch):
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(nvidia, "DRIVER", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = machine.devices_found()
    assert found.verdict == "fail"
    assert found.seen.startswith("the driver has 1 GPU(s), and TensorFlow, built for CUDA ")
    assert "[cuda]" in found.advice


@pytest.mark.parametrize(
    ("gpus", "in_machine", "verdict", "advice"),
    [
        (["A100", "A100"], 2, "pass", ""),
        (["A100"], 2, "warn", "Is another version of CUDA"),
        (["A100", "T4"], 2, "warn", "They differ"),
    ],
)
def test_gpus_that_tensorflow_sees(gpus, in_machine, verdict, advice, monkeypatch):
    monkeypatch.setattr(machine, "environment", lambda: {"gpus": gpus})
    monkeypatch.setattr(nvidia, "count_gpus", lambda: in_machine)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = machine.devices_found()
    assert (found.verdict, found.advice[: len(advice)]) == (verdict, advice)


@pytest.mark.parametrize(("capability", "verdict"), [((9, 0), "pass"), ((12, 0), "warn")])
def test_gpus_that_tensorflow_has_no_kernels_for(capability, verdict, monkeypatch):
    """Plain Keras fails on them, too, and says less."""
    monkeypatch.setattr(machine, "environment", lambda: {"gpus": ["RTX 5090"]})
    monkeypatch.setattr(nvidia, "count_gpus", lambda: 1)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {"compute_capability": capability})
    found = machine.devices_found()
    assert (found.verdict, "Blackwell" in found.advice) == (verdict, verdict == "warn")
    assert f"{capability[0]}.{capability[1]}" in found.seen or verdict == "pass"


@pytest.mark.parametrize(("megabytes", "verdict"), [(3, "pass"), (9000, "warn")])
def test_other_programs_on_a_gpu(megabytes, verdict, monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["GPU:0"])
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    answer = SimpleNamespace(stdout=f"0, {megabytes}, 81559, 580.1\n", stderr="", returncode=0)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **named: answer)
    assert machine.memory_of_others().verdict == verdict


def test_steps_that_wait_for_input():
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), devices=2)
    parallel.compile("sgd", "mse")

    def slow():
        while True:
            time.sleep(0.1)
            yield np.ones((8, 4)), np.ones((8, 2))

    spec = tuple(tf.TensorSpec((8, width), tf.float64) for width in (4, 2))
    found = training.speed(parallel, tf.data.Dataset.from_generator(slow, output_signature=spec))
    assert found.verdict == "warn"
    assert found.data["input_wait"] > 0.5


def test_rows_that_are_gathered():
    class Sorts(keras.layers.Layer):
        def call(self, x):
            return x + tf.sort(x, axis=0)

    inputs = keras.Input((40_000,))
    parallel = keras_dp.DataParallelModel(keras.Model(inputs, keras.layers.Dense(1)(Sorts()(inputs))), devices=2)
    parallel.compile("sgd", "mse")
    found = training.work(parallel, (np.ones((8, 40_000)), np.ones((8, 1))))
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


def test_a_worker_that_cannot_be_reached(monkeypatch, capsys):
    with socket.socket() as free, socket.socket() as own:
        free.bind(("127.0.0.1", 0))
        own.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (own, free)]
    cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert main(["check", "--start-timeout", "3", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["verdict"]) == ("workers", "fail")
    assert addresses[1] in found["seen"]
    assert "firewalls" in found["advice"]


def test_workers_with_other_versions(monkeypatch):
    def differ(**arguments):
        raise ValueError("They differ in versions, keras: worker 0 has '3.15.1', worker 1 has '3.14.0'.")

    monkeypatch.setattr(workers, "find_cluster", lambda: "a cluster")
    monkeypatch.setattr(workers, "connect_workers", differ)
    group, found = workers.connected(1.0)
    assert group is None
    assert (found.verdict, "worker 1 has '3.14.0'" in found.seen) == ("fail", True)


@pytest.mark.parametrize("changed", [False, True])
def test_sums_that_a_network_changes(changed, monkeypatch):
    """The collectives of worker 1 of 2 are replaced: the other one brings the same numbers."""
    collectives = SimpleNamespace(sum=lambda x: x / 2 * 3 + (1.0 if changed else 0.0))
    group = SimpleNamespace(index=1, count=2, collectives=collectives, answer_times=lambda: [{1: 1e-4}, {0: 1e-4}])
    monkeypatch.setattr(workers, "find_cluster", lambda: "a cluster")
    monkeypatch.setattr(workers, "connect_workers", lambda **arguments: group)
    _, found = workers.connected(1.0)
    assert found.verdict == ("fail" if changed else "pass")


TIMES = {(i, j): 2e-4 for i in range(3) for j in range(3) if i != j}


@pytest.mark.parametrize(
    ("times", "verdict", "said"),
    [
        ({}, "pass", "a worker answers in 0.20 ms"),
        ({(2, 0): 9e-4}, "pass", "a worker answers in 0.90 ms"),
        ({(0, 2): 0.03}, "warn", "most workers answer in 0.20 ms, but worker 2 answers 0 in 30.00 ms"),
        ({(1, 2): math.inf}, "fail", "most workers answer in 0.20 ms, but worker 2 does not answer 1"),
    ],
)
def test_a_pair_of_workers_that_is_slow_or_silent(times, verdict, said):
    seconds = TIMES | times
    found = workers.of_pairs([{j: time for (one, j), time in seconds.items() if one == i} for i in range(3)])
    assert (found.verdict, found.seen) == (verdict, said)
    assert found.table[0].split() == ["ms", "to", "worker", "0", "1", "2"]
    assert found.data["milliseconds_of_an_answer"]["0 to 1"] == pytest.approx(0.2)
    json.dumps(found.data, allow_nan=False)


def test_two_workers_that_are_silent():
    found = workers.of_pairs([{1: math.inf}, {0: math.inf}])
    assert (found.verdict, found.seen) == ("fail", "worker 1 does not answer 0, worker 0 does not answer 1")


def test_times_between_three_workers(tmp_path):
    """Each worker measures its own row of the table, and all receive the same one."""
    (tmp_path / "times.py").write_text(
        "import json, keras_dp\n"
        "group = keras_dp.connect_workers()\n"
        "print('times', json.dumps(group.answer_times()), flush=True)\n"
    )
    command = [sys.executable, "-m", "keras_dp", "launch", "--workers", "3", str(tmp_path / "times.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    received = [line.partition("times ")[2] for line in printed.splitlines() if "times " in line]
    assert len(received) == 3
    assert len(set(received)) == 1
    times = json.loads(received[0])
    assert [sorted(row) for row in times] == [["1", "2"], ["0", "2"], ["0", "1"]]
    assert all(0 < time < 5 for row in times for time in row.values())


def test_too_few_devices(findings):
    found = findings("small", towers=9)
    assert found["towers"].verdict == "fail"
    assert "devices=9" in found["towers"].seen


def test_lines_fit_the_terminal():
    text = tables.text(Finding("rows", "warn", "seen " * 30, "advice " * 20, ("a row",)), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[-1] == " " * 20 + "a row"
