"""The command `keras-dp bench` finds models, checks its arguments, writes its results, and runs from end to end."""

import csv
import dataclasses
import json
import subprocess
import sys
import types
from unittest import mock

import keras
import numpy as np
import pytest
from keras import layers

import keras_dp
from keras_dp import tables
from keras_dp.cli import environment, main, models, runs, synthetic
from keras_dp.cli.arguments import MODELS
from keras_dp.cli.bench import beside_plan, engines, loopback, measurement, summary
from keras_dp.cli.bench import command as bench
from keras_dp.cli.bench.summary import Cell, Row
from keras_dp.cli.bench.survey import survey
from keras_dp.cli.plan.prediction import PlannedRun, Range
from keras_dp.cli.runs import Measurement, Run, RunFailedError, Survey

FOUND = Survey(environment.environment(), gpus=0, batch_size=256)


def measured(milliseconds, **changes):
    values = {"step_milliseconds": milliseconds, "first_step_seconds": 1.5, "peak_memory_megabytes": 700.0, "loss": 2.3}
    return Measurement(**values | changes)


@pytest.fixture
def seen(monkeypatch):
    """Replaces all runs: each takes 10 ms, and is in this list."""
    done = []
    monkeypatch.setattr(runs, "survey_in_new_process", lambda model: FOUND)
    monkeypatch.setattr(runs, "measure_in_new_process", lambda run: done.append(run) or measured([10.0, 11.0]))
    return done


@pytest.mark.parametrize(
    ("name", "parameters", "batch_shape", "output_shape"),
    [
        ("mlp", 669_706, (256, 784), (10,)),
        ("resnet20", 271_098, (64, 32, 32, 3), (10,)),
        ("resnet50", 25_636_712, (16, 224, 224, 3), (1_000,)),
        ("transformer", 2_086_536, (64, 64), (64, 5_000)),
        ("lstm", 1_548_168, (64, 64), (64, 5_000)),
        ("unet", 118_052, (16, 64, 64, 3), (64, 64, 4)),
    ],
)
def test_built_in_models(name, parameters, batch_shape, output_shape):
    workload = models.workload(name)
    model = workload.build()
    assert (model.count_params(), model.compiled) == (parameters, False)
    assert (workload.batch_size, *model.input_shape[1:]) == batch_shape
    assert model.output_shape[1:] == output_shape


def test_a_language_model_looks_back_only_and_has_batches_of_tokens():
    model = models.transformer()
    model.compile("sgd", **models.classification())
    (x, y), again = (next(synthetic.dataset(model, 4).as_numpy_iterator()) for _ in range(2))
    assert x.shape == y.shape == (4, 64)
    assert x.dtype == np.int32
    assert all(tokens.min() >= 0 and 4_000 < tokens.max() < 5_000 for tokens in (x, y))
    np.testing.assert_array_equal(again[0], x)
    before, after = (np.asarray(model(tokens)) for tokens in (x, np.where(np.arange(64) < 40, x, 7)))
    np.testing.assert_allclose(before[:, :40], after[:, :40])
    assert np.abs(before[:, 40:] - after[:, 40:]).max() > 1e-3


@pytest.mark.parametrize(
    ("as_outputs", "named"),
    [(lambda *outputs: list(outputs), False), (lambda kind, place: {"place": place, "kind": kind}, True)],
)
def test_batches_of_several_inputs_and_outputs(as_outputs, named):
    words, image = keras.Input((5,), dtype="int32", name="words"), keras.Input((4, 4, 1), name="image")
    x = layers.Concatenate()([layers.Flatten()(layers.Embedding(11, 3)(words)), layers.Flatten()(image)])
    outputs = as_outputs(layers.Dense(7, name="kind")(x), layers.Dense(2, name="place")(x))
    model = keras.Model([words, image], outputs)
    kind_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", {"kind": kind_loss, "place": "mse"} if named else [kind_loss, "mse"])
    x, y = next(iter(synthetic.dataset(model, 6)))
    assert {name: tensor.shape for name, tensor in x.items()} == {"words": (6, 5), "image": (6, 4, 4, 1)}
    assert np.max(x["words"]) < 11
    kind, place = (y["kind"], y["place"]) if isinstance(y, dict) else y
    assert kind.dtype.is_integer
    assert (kind.shape, place.shape) == ((6,), (6, 2))
    assert np.isfinite(model.evaluate(synthetic.dataset(model, 6), steps=2, verbose=0)).all()


@pytest.mark.parametrize("name", ["small", "compiled"])
def test_engines_train_the_same(in_process, name):
    of_engines = [Run(engine, 2, 6, f"user_models:{name}", steps=2, warm_up=1) for engine in ("single", "keras_dp", "mirrored")]
    measurements = [measurement.measure(run) for run in of_engines]
    assert np.ptp([measurement.loss for measurement in measurements]) < 1e-9
    assert [len(measurement.step_milliseconds) for measurement in measurements] == [2, 2, 2]


@pytest.mark.processes
def test_workers_share_the_towers(in_users_directory, request):
    """Two processes train as one with two towers does, and the first one answers."""
    of_workers = Run("workers", 2, 6, "user_models:small", workers=2, steps=3, warm_up=1)
    of_both = runs.measure_in_new_process(of_workers)
    request.getfixturevalue("in_process")
    keras.config.set_floatx("float32")
    alone = measurement.measure(dataclasses.replace(of_workers, engine="keras_dp", workers=1))
    assert of_both.loss == pytest.approx(alone.loss, rel=1e-5)
    assert len(of_both.step_milliseconds) == len(alone.step_milliseconds) == 3
    if loopback.DEVICES.exists():
        assert of_both.communication_bytes > 0


def test_bytes_in_a_step(in_process, monkeypatch):
    """Those of workers are counted after the first steps. Those of towers may not be known."""
    counted = loopback.LoopbackBytes()
    assert counted.in_each_step(after=1) is None
    counted.sent = [1_000, 5_000, 6_000, 8_000]
    assert counted.in_each_step(after=2) == 1_500
    known = keras_dp.communication_report
    monkeypatch.setattr(keras_dp, "communication_report", lambda *given: known(*given)._replace(unsized=("cond/then/mul",)))
    run = Run("keras_dp", 2, 6, "user_models:small", steps=1, warm_up=1, count_bytes=True)
    assert measurement.measure(run).communication_bytes is None


@pytest.mark.parametrize("synchronized", [True, False])
def test_mirrored_synchronizes_nested_batch_norm(synchronized):
    inner_model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(), layers.Dense(2)])
    model = keras.Sequential([keras.Input((3,)), inner_model, layers.BatchNormalization()])
    run = Run("mirrored", 2, 4, "mlp", batch_norm="sync" if synchronized else "local")
    assert engines._on_engine(run, model, ["CPU:0", "CPU:1"]) is model
    assert inner_model.layers[0].synchronized is model.layers[1].synchronized is synchronized


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model vgg", "A model is one of small, mlp, resnet20, resnet50, transformer, lstm, unet, or my_module:"
         "build_function. Received: 'vgg'"),
        ("--model resnet2", "Did you mean 'resnet20'? Received: 'resnet2'"),
        ("--towers 1,,2", "argument --towers: must be an integer of at least 1. Received: ''"),
        *((f"--{name} 0", f"argument --{name}: must be an integer of at least 1. Received: '0'")
          for name in ("batch", "rounds", "steps", "warm-up", "workers")),
        ("--against horovod", "The engines to compare with are single, mirrored, or none. Received: 'horovod'"),
        ("--against miror", "Did you mean 'mirrored'? Received: 'miror'"),
        ("--batch-norm global", "argument --batch-norm: invalid choice: 'global'"),
        ("--parameter-device shard", """must be a device, such as CPU:0 or GPU:1, or "sharded". Did you mean 'sharded'?"""),
        ("--workers 2 --towers 2,3", "--towers: 2 workers share the towers evenly. Received: 2, 3 towers. Use multiples of 2."),
        ("--profile", "--profile needs a directory to write to. Add --out DIRECTORY."),
        ("--out user_models.py/results", "--out: nothing can be written there"),
    ],
)  # fmt: skip
def test_wrong_arguments(in_users_directory, capsys, arguments, message):
    with pytest.raises(SystemExit) as refusal:
        main(["bench", *arguments.split()])
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("user_models:missing", "The module user_models has no function 'missing'. Received: 'user_models:missing'"),
        ("user_models:number", "has no function 'number'"),
        ("user_models:compiled_for_several_steps", "steps_per_execution=2. Compile it without"),
        ("user_models:of_any_length", "Only the batch size may be unknown"),
        ("user_models:without_inputs", "Return keras.Model(inputs, outputs)"),
        ("user_models:text", "Inputs must be floats, integers or booleans. Received: "),
        ("no_such_module:build", "No module named 'no_such_module'. Received: 'no_such_module:build'"),
    ],
)
def test_what_cannot_be_measured_is_found_out_first(name, problem):
    assert problem in survey(name).problem


def test_what_is_found_out_first():
    assert survey("user_models:small") == Survey(environment.environment(), gpus=0, batch_size=64)
    assert survey("mlp").batch_size == 256
    assert tuple(models.BUILT_IN) == MODELS


def test_a_process_that_fails_says_why():
    with pytest.raises(RunFailedError, match="RuntimeError: cannot be built"):
        runs._output_of(["-c", "raise RuntimeError('cannot be built')"], None, {})
    with pytest.raises(RunFailedError, match="The process ended with exit code 0"):
        runs._output_of(["-c", ""], None, {})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (dataclasses.replace(FOUND, problem="It has no shape."), "error: --model: It has no shape."),
        (dataclasses.replace(FOUND, gpus=2), "--towers: there are only 2 GPUs. Received: 8. Use fewer"),
        (RunFailedError("RuntimeError: no"), "error: --model: mlp cannot be built:\nRuntimeError: no"),
    ],
)
def test_nothing_is_measured_if_it_would_fail(found, message, monkeypatch, capsys):
    monkeypatch.setattr(runs, "survey_in_new_process", mock.Mock(side_effect=[found]))
    with pytest.raises(SystemExit):
        main(["bench"])
    assert message in capsys.readouterr().err


def test_the_command_answers_without_tensorflow(tmp_path):
    """TensorFlow takes seconds to import. The script's name distinguishes the command from a user's script."""
    command = tmp_path / "keras-dp"
    lines = ["--help", "bench --help", "check --help", "launch --help", "plan --help", "--version", "", "bench --model mpl"]
    command.write_text(f"""
import sys
from keras_dp.cli import main
for line in {lines}:
    sys.argv[1:] = line.split()
    try:
        main()
    except SystemExit as end:
        print(line, end.code)
    print(sorted({{"keras", "tensorflow"}} & sys.modules.keys()))
""")
    output = subprocess.run([sys.executable, str(command)], capture_output=True, text=True).stdout
    assert output.count("[]\n") == len(lines)
    for line in lines:
        assert f"{line} {0 if line.startswith('--') or 'help' in line else 2}\n" in output
    assert f"keras_dp {keras_dp.__version__} with Keras {keras.__version__}, TensorFlow " in output


def test_ratios_are_taken_within_rounds():
    parallel, ceiling, single = (Cell(engine, 2, 8) for engine in ("keras_dp", "ceiling", "single"))
    times = {parallel: (20, 90, 70), ceiling: (10, 80), single.measured: (40, 100, 100)}
    rounds = [{cell: measured([float(of[i])] * 3) for cell, of in times.items() if i < len(of)} for i in range(3)]
    row = summary.summarize(single, rounds)
    assert (row.keras_dp_ratio_low, row.keras_dp_ratio, row.keras_dp_ratio_high) == (0.5, 0.7, 0.9)
    assert (row.towers, row.median_milliseconds, row.communication_megabytes) == (2, 100.0, 0.0)
    speed_ups = 40 / 20, 100 / 90, 100 / 70
    assert summary.summarize(parallel, rounds).speed_up == pytest.approx(sorted(speed_ups)[1])
    assert summary.summarize(ceiling, rounds).speed_up == pytest.approx((40 / 10 + 100 / 80) / 2)


def test_table():
    cells = [Cell(engine, 2, 256) for engine in ("keras_dp", "ceiling", "single")]
    parallel, single = measured([5.0, 6.0, 8.0], communication_bytes=2_500_000), measured([10.0, 12.0, 14.0])
    rows = [summary.summarize(cell, [{cells[0]: parallel, cells[2].measured: single}]) for cell in cells]
    wide, narrow = (tables.text(tables.table(summary.COLUMNS, rows, width), width).splitlines() for width in (128, 80))
    assert [" ".join(line.split()) for line in wide[-3:]] == [
        "keras_dp 2 256 6.00 5.20 to 7.60 - 2.00 (100 %) 1.5 700 2.50 2.3000",
        "ceiling 2 256 failed - - - - - - -",
        "single 2 256 12.00 10.40 to 13.60 0.50 (0.50 to 0.50) - 1.5 700 0.00 2.3000",
    ]
    assert [name in " ".join(narrow[:2]) for name in ("speed-up", "loss")] == [True, False]


def test_files(seen, tmp_path, monkeypatch, capsys):
    """They are written after each round."""
    written_before = []

    def measure(run):
        path = tmp_path / "bench.json"
        written_before.append(len(json.loads(path.read_text())["runs"]) if path.exists() else None)
        if run.engine == "ceiling":
            raise RunFailedError("ValueError: no")
        return measured([10.0, 12.0, 14.0] if run.engine == "single" else [5.0, 6.0, 8.0])

    monkeypatch.setattr(runs, "measure_in_new_process", measure)
    arguments = ["bench", "--towers", "2", "--rounds", "2", "--against", "single", "--out", str(tmp_path)]
    assert main(arguments) == 1
    assert written_before == [None, None, None, 2, 2]
    assert "keras_dp over it: the step time of keras_dp, divided by the step time of this engine" in capsys.readouterr().out
    with (tmp_path / "bench.csv").open(encoding="utf-8") as file:
        rows = [(row["engine"], row["median_milliseconds"], row["keras_dp_ratio"]) for row in csv.DictReader(file)]
    assert rows == [("keras_dp", "6.0", "1.0"), ("ceiling", "", ""), ("single", "12.0", "0.5")]
    written = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert written["command"].startswith("keras-dp bench --towers 2")
    assert written["environment"]["keras"] == keras.__version__
    assert [run["step_milliseconds"] for run in written["runs"]] == [[5.0, 6.0, 8.0], [10.0, 12.0, 14.0]] * 2
    assert written["failures"] == [{"engine": "ceiling", "towers": 2, "batch_size": 256, "message": "ValueError: no"}]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")

    (tmp_path / "bench.png").unlink()
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert main([*arguments, "--json"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out) == json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert "bench.png is not drawn, because matplotlib is missing. Run pip install " in output.err
    assert "[bench]" in output.err
    assert not (tmp_path / "bench.png").exists()


@pytest.mark.parametrize(("runs_until", "shown_rounds"), [(0, 0), (3, 1), (6, 2)])
def test_an_interrupted_benchmark_shows_what_it_has(runs_until, shown_rounds, seen, tmp_path, monkeypatch, capsys):
    """Ctrl-C interrupts the run after the given number; a round has four runs."""
    measure = mock.Mock(side_effect=[*[measured([10.0])] * runs_until, KeyboardInterrupt])
    monkeypatch.setattr(runs, "measure_in_new_process", measure)
    assert main(["bench", "--towers", "2", "--rounds", "3", "--out", str(tmp_path)]) == 130
    output = capsys.readouterr()
    if runs_until == 0:
        assert "interrupted: nothing was measured" in output.err
        assert list(tmp_path.iterdir()) == []
        return
    assert "interrupted: these are the results so far" in output.err
    assert f"measured in {shown_rounds} round" in output.out
    assert "failed" not in output.out
    assert ("mirrored  " in output.out) is (runs_until > 3)
    assert len(json.loads((tmp_path / "bench.json").read_text())["runs"]) == runs_until


def test_engines_take_turns(seen, monkeypatch, capsys):
    def measure(run):
        seen.append(run)
        if run.engine == "mirrored":
            raise RunFailedError("ValueError: not today")
        return measured([10.0, 11.0])

    monkeypatch.setattr(runs, "measure_in_new_process", measure)
    arguments = "bench --model unet --towers 4,2,2 --batch 8 --scaling weak --rounds 2 --steps 7 --batch-norm local"
    assert main(arguments.split()) == 1
    engines = ["keras_dp", "ceiling", "single", "mirrored"]
    first_round = [(name, 1 if name == "single" else towers, 8 * towers) for towers in (2, 4) for name in engines]
    second_round = [cell for cell in first_round if cell[0] != "mirrored"]
    assert [(run.engine, run.towers, run.batch_size) for run in seen] == first_round + second_round
    assert all((run.model, run.steps, run.batch_norm) == ("unet", 7, "local") for run in seen)
    assert [run.engine for run in seen if run.count_bytes] == ["keras_dp"] * 2
    output = capsys.readouterr()
    assert "round 2 of 2: keras_dp on 4 towers, about 0 s to go" in output.err
    assert "mirrored on 4 towers failed:\nValueError: not today" in output.out
    assert arguments in output.out


OF_TWO = [("keras_dp", 2, 1), ("ceiling", 2, 1), ("workers", 2, 2)]


@pytest.mark.parametrize(
    ("arguments", "cells"),
    [
        ("--workers 2 --towers 2,4 --against none", OF_TWO + [(name, 4, workers) for name, _, workers in OF_TWO]),
        ("--workers 2", [*OF_TWO, ("single", 1, 1), ("mirrored", 2, 1)]),
        ("--towers 1,2 --against single",
         [("keras_dp", 1, 1), ("ceiling", 1, 1), ("single", 1, 1), ("keras_dp", 2, 1), ("ceiling", 2, 1)]),
    ],
)  # fmt: skip
def test_what_is_compared(arguments, cells, seen):
    """Workers are compared with the same towers. One device is measured once for all."""
    assert main(["bench", *arguments.split(), "--rounds", "1"]) == 0
    assert [(run.engine, run.towers, run.workers) for run in seen] == cells


def test_a_profile_and_bytes_as_the_command_asks_for_them(in_process, tmp_path, capsys):
    """The towers' names are in the profile."""
    arguments = "bench --model user_models:small --towers 2 --batch 6 --against none --rounds 1 --steps 3 --warm-up 2"
    assert main([*arguments.split(), "--out", str(tmp_path), "--profile"]) == 0
    assert "round 1 of 1: ceiling on 2 towers" in capsys.readouterr().err
    run, ceiling_run = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["runs"]
    assert (run["engine"], ceiling_run["engine"]) == ("keras_dp", "ceiling")
    assert len(run["step_milliseconds"]) == 3
    assert run["communication_bytes"] > 0
    assert run["first_step_seconds"] > max(run["step_milliseconds"]) / 1000
    (profile,) = (tmp_path / "profile" / "2_towers").rglob("*.xplane.pb")
    assert all(name in profile.read_bytes() for name in (b"tower_0/", b"tower_1/"))


def test_steps_on_gpus_that_contradict_the_prediction_are_told(monkeypatch):
    planned = []

    def plan(step):
        planned.append(step)
        if step.towers == 8:
            raise RunFailedError("no such step")
        return types.SimpleNamespace(compiled_milliseconds=Range(6.0 / step.towers, 10.0 / step.towers))

    monkeypatch.setattr(beside_plan, "plan_in_new_process", plan)
    options = types.SimpleNamespace(model="resnet20", parameter_device="sharded", batch_norm="local")
    rows = [Row("keras_dp", towers, 512, median_milliseconds=7.0) for towers in (1, 2, 4, 8)]
    rows += [Row("single", 1, 512, median_milliseconds=70.0), Row("keras_dp", 1, 512)]
    told = list(beside_plan.contradictions({"gpus": ["NVIDIA A100-SXM4-40GB"] * 8}, rows, options))
    assert told == [
        "2 towers: 7.00 ms a step, where keras-dp plan --gpu A100 predicts 3.00 to 5.00 with XLA",
        "4 towers: 7.00 ms a step, where keras-dp plan --gpu A100 predicts 1.50 to 2.50 with XLA",
    ]
    assert planned[1] == PlannedRun("resnet20", 2, 512, parameter_device="sharded", batch_norm="local", gpu="A100")
    for gpus in ([], ["NVIDIA GeForce RTX 4080"], ["NVIDIA A100-SXM4-40GB", "Tesla T4"]):
        assert list(beside_plan.contradictions({"gpus": gpus}, rows, options)) == []
