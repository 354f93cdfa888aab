"""The test on GPUs runs on logical CPUs, and its report tells what has failed."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import types
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import gpu.__main__ as command
from gpu import comparing, copies, devices, machine, memory, models, parity, placement, report, runner, slices, workers
from gpu.parts import PARTS, SAME_GRAPH, Part
from gpu.placement import Ran
from gpu.record import Record
from gpu.slices import Event

# Parts in place of the real ones, and their results.
MEASURES = "record.row('times', milliseconds=3.5)"
PLANTED = {
    "right": ("record.compare('numbers', 1e-12, model='dense')", "exact"),
    "measures": (f"{MEASURES}; record.finding('3.5 ms')", "measured"),
    "differs": ("record.compare('numbers', 1e-3, model='planted')", "NOT EXACT"),
    "no_number": ("record.compare('numbers', float('nan'), model='planted')", "NOT EXACT"),
    "fails": (f"{MEASURES}; raise ValueError('a planted failure')", "FAILED"),
    "sleeps": (f"{MEASURES}; import time; print('a planted wait'); time.sleep(60)", "TIMED OUT"),
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    for name, (code, _) in PLANTED.items():
        (tmp_path / f"planted_{name}.py").write_text(f"def run(record):\n    {code}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    parts = [Part(name, "planted", 2.0 if name == "sleeps" else 60.0, SAME_GRAPH, f"planted_{name}") for name in PLANTED]
    monkeypatch.setattr(command, "PARTS", parts)
    return parts


@pytest.fixture
def record(tmp_path):
    return Record(tmp_path / "record.json", quick=True)


def run(out, *arguments):
    """Runs the command, and returns its exit code, the report by part, and its text."""
    code = command.main(["--out", str(out), *arguments])
    found = json.loads((out / "report.json").read_text())
    return code, {part["name"]: part for part in found["parts"]}, (out / "report.md").read_text()


def test_planted_failures_are_reported_and_the_other_parts_run(planted, tmp_path, capsys):
    code, parts, text = run(tmp_path / "out")
    assert code == 1
    assert {name: part["result"] for name, part in parts.items()} == {name: result for name, (_, result) in PLANTED.items()}
    assert parts["fails"]["error"][-1] == "ValueError: a planted failure"
    assert "a planted wait" in parts["sleeps"]["error"]
    # What a part has recorded before its end is kept.
    assert all(parts[name]["tables"]["times"] == [{"milliseconds": 3.5}] for name in ("measures", "fails", "sleeps"))
    assert parts["differs"]["different"] == ["numbers: model planted, difference 0.001, limit 1e-09"]
    assert "ValueError: a planted failure" in text
    assert "NOT EXACT" in capsys.readouterr().out


def test_without_failures_the_exit_code_is_zero(planted, tmp_path):
    """The report is written after each part, and names parts for which no time is left."""
    seen = []
    with mock.patch.object(report, "write", lambda results, *_: seen.append([one["name"] for one in results])):
        assert command.main(["--out", str(tmp_path / "out"), "--only", "measures,right"]) == 0
    assert seen == [["right"], ["right", "measures"]]
    code, parts, _ = run(tmp_path / "out", "--minutes", "0.1", "--only", "right,fails")
    assert code == 0
    assert [part["result"] for part in parts.values()] == ["no time left"] * 2


def test_an_interrupted_run_reports_what_it_has(tmp_path):
    paths = os.pathsep.join([str(runner.TESTS), str(runner.TESTS.parent)])
    arguments = [sys.executable, "-m", "gpu", "--only", "machine,parity", "--out", str(tmp_path)]
    process = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": paths})
    while not (tmp_path / "parts" / "machine.log").exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    (part,) = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert (part["name"], part["result"]) == ("machine", "interrupted")


def test_an_unknown_part_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path), "--only", "parity,speed"])
    assert "The parts are machine, parity, " in capsys.readouterr().err


@pytest.mark.promise
@pytest.mark.parametrize(("name", "compares"), [("machine", False), ("normalization", True)])
def test_parts_of_seconds_run_on_logical_cpus(name, compares, record, monkeypatch):
    part = importlib.import_module(f"gpu.{name}")
    monkeypatch.setattr(part, "prepare", lambda record, count: [f"CPU:{index}" for index in range(count)], raising=False)
    part.run(record)
    assert record.results["different"] == []
    assert (record.results["compared"] > 0) is compares
    assert record.results["finding"]


@pytest.mark.processes
def test_reliability_on_cpus(tmp_path):
    """Placement is beside it: the graphs of all functions in a process are recorded."""
    code, parts, text = run(tmp_path, "--quick", "--only", "placement,reliability")
    assert code == 0, text
    assert {name: part["result"] for name, part in parts.items()} == {"placement": "measured", "reliability": "exact"}
    assert "**No GPU was used.**" in text
    tables = parts["reliability"]["tables"]
    assert [row["right"] for row in tables["State after a step that failed, beside the state before it"]] == ["yes", "yes"]
    assert all(row["difference"] <= 1e-9 for row in tables["After a step that failed, beside plain Keras"])
    assert len(tables["The same seed twice, in float32"]) == 1


def test_parity_notices_a_wrapper_that_is_not_exact(record):
    plain = parity.train(parity.compiled(parity.built("convolutions", "float64")), "convolutions")
    for mode in ("sync", "local"):
        parity.compare_float64(record, "convolutions", plain, 3, batch_norm=mode)
    assert [row["right"] for row in record.results["tables"]["float64"]] == ["yes", "NO"]
    assert len(record.results["different"]) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_parts_run_on_logical_cpus(tmp_path):
    code, parts, text = run(tmp_path, "--quick")
    assert code == 0, text
    assert list(parts) == [part.name for part in PARTS]
    exact = {name for name, part in parts.items() if part["result"] == "exact"}
    assert exact == {"parity", "normalization", "reliability", "xla", "workers"}
    assert all(part["finding"] for part in parts.values())


def test_differences_are_relative_to_large_numbers_and_absolute_for_small_ones():
    assert comparing.difference([1000.0, {"a": 0.0}], [1001.0, {"a": 1e-3}]) == pytest.approx(1e-3)
    assert np.isnan(comparing.difference([1.0, 2.0, 3.0], [1.0, float("nan"), 3.0]))


def test_a_permutation_keeps_each_row_in_its_batch():
    order = comparing.permuted(34, 11, seed=0)
    assert sorted(order) == list(range(34))
    assert not np.array_equal(order, np.arange(34))
    assert [sorted(order[begin : begin + 11]) for begin in (0, 11, 22)] == [list(range(b, b + 11)) for b in (0, 11, 22)]


@pytest.mark.parametrize(
    ("count", "names", "pieces"),
    [
        (1, ["GPU:0", "GPU:1", "GPU:2", "GPU:3"], [[1500] * 4]),
        # Neighbours are on different cards: the first card has the pieces 0 and 1.
        (2, ["GPU:0", "GPU:2", "GPU:1", "GPU:3"], [[3000] * 2, [3000] * 2]),
        (3, ["GPU:0", "GPU:2", "GPU:3", "GPU:1"], [[3000] * 2, [6000], [6000]]),
        (8, ["GPU:0", "GPU:1", "GPU:2", "GPU:3"], []),
    ],
)
def test_cards_are_split_if_there_are_too_few(count, names, pieces, record, monkeypatch):
    split, grows = [], []
    found = [types.SimpleNamespace(name=f"/physical_device:GPU:{index}") for index in range(count)]
    noted = {
        "list_physical_devices": lambda kind: found,
        "set_logical_device_configuration": lambda card, made: split.append([piece.memory_limit for piece in made]),
        "experimental.set_memory_growth": lambda card, grow: grows.append(grow),
    }
    for name, function in noted.items():
        monkeypatch.setattr(f"tensorflow.config.{name}", function)
    monkeypatch.setattr(devices, "ask_driver", lambda question: [["8000"]] * count)
    assert devices.prepare(record, 4) == names
    assert (split, grows) == (pieces, [] if pieces else [True] * count)
    assert record.results["gpus"]


def test_operations_elsewhere_are_explained_or_found():
    towers = ["GPU:0", "GPU:1"]
    ran = [
        Ran("MatMul", "float32", "step/tower_1/dense/MatMul", "GPU:1"),
        Ran("MatMul", "float32", "step/tower_0/dense/MatMul", "CPU:0"),
        Ran("Sub", "int32", "step/tower_1/sub", "CPU:0"),
        Ran("_Recv", "float32", "step/tower_1/received", "CPU:0"),
        Ran("Conv2D", "float32", "tower_0/conv", "GPU:1"),
        Ran("Const", "float32", "tower_0/axis", "GPU:1"),
        Ran("AddN", "float32", "step/home/sum", "CPU:0"),
        Ran("AddN", "float32", "step/home/sum_1", "GPU:0"),
        Ran("Reshape", "float32", "step/packed/reshape", "GPU:1"),
        Ran("StridedSlice", "float32", "slices_1/strided_slice", "CPU:0"),
    ]
    found = {(row["of"], row["operation"], row["ran_on"]): row["why"] for row in placement.elsewhere(ran, towers, "GPU:0")}
    assert found == {
        ("tower 0", "MatMul", "CPU:0"): placement.UNEXPLAINED,
        ("tower 1", "Sub", "CPU:0"): placement.INTEGERS,
        ("tower 0", "Conv2D", "GPU:1"): placement.UNEXPLAINED,
        ("tower 0", "Const", "GPU:1"): placement.CONSTANTS,
        ("home", "AddN", "CPU:0"): placement.UNEXPLAINED,
        ("slices", "StridedSlice", "CPU:0"): placement.SLICES,
    }


def test_the_slices_in_a_profile_of_a_gpu():
    plane = slices.xplane_pb2.XPlane(name="/device:GPU:0")
    plane.stat_metadata[1].name = "memcpy_details"
    plane.event_metadata[1].name = "MemcpyH2D"
    plane.event_metadata[2].name = "sgemm"
    stream = plane.lines.add(name="Stream #14(MemcpyH2D)", timestamp_ns=1000)
    for size in (4096, 8):
        details = f"kind_src:pinned kind_dst:device size:{size} dest:0 async:1"
        stream.events.add(metadata_id=1, offset_ps=2000, duration_ps=5000).stats.add(metadata_id=1, str_value=details)
    stream.events.add(metadata_id=2, offset_ps=9000, duration_ps=1000)
    plane.lines.add(name="Steps").events.add(metadata_id=2)
    events = list(slices._events(plane))
    assert events[0] == Event("MemcpyH2D", 1002.0, 1007.0, 4096)
    assert [slices._is_slice(event, 4096) for event in events] == [True, False, False]


def test_the_fit_finds_latency_and_bandwidth():
    sizes = [4**i for i in range(1, 14)]
    assert copies.fit(sizes, [1e-5 + size / 2e10 for size in sizes]) == pytest.approx((1e-5, 2e10))


@pytest.mark.parametrize(("kind", "has_code"), [((8, 6), True), ((9, 0), True), ((12, 0), False)])
def test_whether_tensorflow_has_code_for_a_gpu(kind, has_code):
    assert (machine._compiled_for(*kind, ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"]) == "yes") == has_code


def test_a_profile_of_gpus_tells_what_runs_beside_computation(record, monkeypatch):
    kernels = [Event("sgemm", *span, None) for span in ((0, 50), (30, 80), (90, 95), (20, 40))]
    events = [*kernels, Event("MemcpyH2D", 60, 120, 10**9), Event("MemcpyD2H", 0, 40, 10**9)]
    planes = {"/device:GPU:0": events, "/host:CPU": []}
    monkeypatch.setattr(slices, "prepare", lambda record, count: record.devices("2 GPUs", gpus=True))
    monkeypatch.setattr(slices, "_profile", lambda *arguments: planes)
    slices.run(record)
    (row,) = record.results["tables"]["Copies of slices to GPUs"]
    assert row["copies"] == 1
    # Of the 60 ns of the copy, 25 are beside 85 ns of computation.
    assert row["share_of_the_shorter"] == "42 %"
    del planes["/device:GPU:0"]
    with pytest.raises(RuntimeError, match="the profile has no GPU"):
        slices.run(record)


def test_nccl_may_refuse_two_processes_on_one_card_alone(record, monkeypatch):
    trained = 'trained {"weights": [[1.0]], "milliseconds": 2.0}'
    refused = "alpha:1:2 [0] NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000\nError"

    def run(communication, cards, count):
        return [refused if communication == "nccl" else trained] * count

    monkeypatch.setattr(workers, "_run", run)
    monkeypatch.setattr(workers, "_visible_cards", lambda: ["0"])
    workers.run(record)
    (row,) = record.results["tables"]["NCCL on one card"]
    assert "Duplicate GPU" in row["message"]
    assert record.results["finding"] == "ring: largest difference 0e+00, NCCL refuses two processes on one card"
    monkeypatch.setattr(workers, "_visible_cards", lambda: ["0", "1"])
    with pytest.raises(RuntimeError, match="the workers did not train with 'nccl': .* Duplicate GPU"):
        workers.run(record)


def test_gpus_are_listed_with_what_the_driver_says(record, monkeypatch):
    card = types.SimpleNamespace(name="/physical_device:GPU:0")
    details = {"device_name": "a card", "compute_capability": (8, 0)}
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [card])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda card: details)
    monkeypatch.setattr(machine, "ask_driver", lambda *questions: [["a card", "80000", "79000", "8.0", "570.1", "00:01"]])
    topology = types.SimpleNamespace(stdout="        GPU0\nGPU0     X\n\nLegend:")
    monkeypatch.setattr(machine.subprocess, "run", lambda *arguments, **options: topology)
    machine.run(record)
    assert record.results["finding"].startswith("a card; TensorFlow")
    (row,) = record.results["tables"]["GPUs that TensorFlow sees"]
    assert row == {"gpu": "GPU:0", "name": "a card", "compute_capability": "8.0", "compiled_for": row["compiled_for"]}
    assert "memory.total" in record.results["tables"]["Cards that the driver knows, memory in MB"][0]
    assert record.results["remarks"] == ["how cards are connected: `GPU0 X`"]


@pytest.fixture
def as_gpus(monkeypatch):
    """Makes a part take logical CPUs, which it does not share with the host, for GPUs."""

    def prepare(record, count):
        record.devices("logical CPUs in place of GPUs", gpus=True)
        return [f"CPU:{index}" for index in (1, 2, 3, 0)[:count]]

    return lambda module: monkeypatch.setattr(module, "prepare", prepare)


def test_the_memory_of_gpus_is_compared_with_the_least(record, monkeypatch, as_gpus):
    as_gpus(memory)
    monkeypatch.setattr(memory, "_memory", lambda device: {"current": 2_000_000, "peak": 12_000_000})
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", lambda device: None)
    keras.config.set_floatx("float32")
    memory.run(record)
    assert {row["peak"] for row in record.results["tables"][memory.TABLE]} == {10.0}
    assert " times the least " in record.results["finding"]


def test_copies_between_the_host_and_a_gpu_are_measured(record, as_gpus):
    as_gpus(copies)
    copies.run(record)
    assert [row["between"] for row in record.results["tables"]["Constants"]] == ["CPU:1 and CPU:2", "CPU:0 and CPU:1"]


def test_the_least_memory():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, dtype="float32")])
    # Twenty weights and their gradients, and outputs of five numbers a row; then half of two moments for each weight.
    assert memory.least_bytes(model, 7, 0.0) == 4 * (2 * 20 + 7 * 5)
    assert memory.least_bytes(model, 7, 0.5) == 4 * (3 * 20 + 7 * 5)


def test_tables_are_aligned():
    rows = [{"model": "dense", "ms": 3.25, "right": True}, {"model": "a long name", "ms": None, "right": False}]
    lines = report._table(rows)
    assert len({len(line) for line in lines}) == 1
    assert lines[2] == "| dense       | 3.25 | yes   |"


def test_the_large_transformer():
    assert 90e6 < models.large_transformer().count_params() < 110e6
