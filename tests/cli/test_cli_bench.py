"""The command `keras-dp bench` finds models, checks its arguments, writes its results, and runs from end to end."""

import argparse
import csv
import dataclasses
import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers

import keras_dp
from keras_dp import tables
from keras_dp.cli import environment, main, models, runs, synthetic
from keras_dp.cli.arguments import MODELS
from keras_dp.cli.bench import command as bench
from keras_dp.cli.bench import engines, loopback, measurement, step_summary, training, training_summary
from keras_dp.cli.bench.summary import Cell
from keras_dp.cli.bench.survey import survey
from keras_dp.cli.runs import Measurement, Run, RunFailedError, Survey, Training, TrainingMeasurement

USER_MODULE = """
import keras
import numpy as np
import tensorflow as tf

def small():
    return keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])

def compiled():
    model = small()
    model.compile("adam", "mae")
    return model

def compiled_for_several_steps():
    model = small()
    model.compile("adam", "mae", steps_per_execution=2)
    return model

def broken():
    raise RuntimeError("this model cannot be built")

def ends():
    raise SystemExit(0)

def batches(rows=20):
    random = np.random.default_rng(rows)
    x = random.normal(size=(rows, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :2] ** 2)).shuffle(rows).batch(8)

def validation():
    return batches(9)

def arrays():
    return np.zeros((4, 3)), np.zeros((4, 2))

def endless():
    return batches().repeat()

def rows():
    return tf.data.Dataset.range(5)

def nothing():
    return batches().take(0)

class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.zeros((5, 3)), np.zeros((5, 2))

def of_any_length():
    return keras.Sequential([keras.Input((None, 3)), keras.layers.Dense(1)])

def without_inputs():
    return keras.Sequential([keras.layers.Dense(1)])

number = 3
"""


@pytest.fixture
def user_directory(tmp_path, monkeypatch):
    """Changes to a directory with a user's module."""
    (tmp_path / "user_models.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("user_models", None)


def started(setup):
    """Starts a measurement in the process of the tests, which has its devices already."""
    keras.utils.set_random_seed(engines.SEED)
    return [f"CPU:{index}" for index in range(setup.towers)]


def measured(milliseconds, **changes):
    values = {"step_milliseconds": milliseconds, "first_step_seconds": 1.5, "peak_memory_megabytes": 700.0, "loss": 2.3}
    return Measurement(**values | changes)


@pytest.mark.parametrize(
    ("name", "parameters", "input_shape", "output_shape", "batch_size"),
    [
        ("mlp", 669_706, (784,), (10,), 256),
        ("resnet20", 271_098, (32, 32, 3), (10,), 64),
        ("resnet50", 25_636_712, (224, 224, 3), (1_000,), 16),
        ("transformer", 2_086_536, (64,), (64, 5_000), 64),
        ("lstm", 1_548_168, (64,), (64, 5_000), 64),
        ("unet", 118_052, (64, 64, 3), (64, 64, 4), 16),
    ],
)
def test_built_in_models(name, parameters, input_shape, output_shape, batch_size):
    workload = models.workload(name)
    model = workload.build()
    assert model.count_params() == parameters
    assert (model.input_shape, model.output_shape) == ((None, *input_shape), (None, *output_shape))
    assert workload.batch_size == batch_size
    assert model.built
    assert not model.compiled


def test_transformer_looks_back_only():
    tokens = np.arange(64)[np.newaxis]
    changed = np.where(np.arange(64) < 40, tokens, 7)
    model = models.transformer()
    before, after = (keras.ops.convert_to_numpy(model(x)) for x in (tokens, changed))
    np.testing.assert_allclose(before[:, :40], after[:, :40])
    assert np.abs(before[:, 40:] - after[:, 40:]).max() > 1e-3


def compiled(model, **arguments):
    model.compile("sgd", **arguments)
    return model


def test_batches_of_a_language_model():
    model = compiled(models.transformer(), **models.classification())
    first, second = (next(iter(synthetic.dataset(model, 4))) for _ in range(2))
    x, y = (tensor.numpy() for tensor in first)
    assert x.shape == y.shape == (4, 64)
    assert x.dtype == np.int32
    for tokens in (x, y):
        assert 4_000 < tokens.max() < 5_000
        assert tokens.min() >= 0
    np.testing.assert_array_equal(second[0], x)


def several_inputs_and_outputs(as_outputs):
    words, image = keras.Input((5,), dtype="int32", name="words"), keras.Input((4, 4, 1), name="image")
    embedded = layers.Embedding(11, 3)(words)
    x = layers.Concatenate()([layers.Flatten()(embedded), layers.Flatten()(image)])
    return keras.Model([words, image], as_outputs(layers.Dense(7, name="kind")(x), layers.Dense(2, name="place")(x)))


@pytest.mark.parametrize(
    ("as_outputs", "named"),
    [
        (lambda *outputs: list(outputs), True),
        (lambda *outputs: list(outputs), False),
        (lambda kind, place: {"place": place, "kind": kind}, True),
    ],
)
def test_batches_of_several_inputs_and_outputs(as_outputs, named):
    model = several_inputs_and_outputs(as_outputs)
    kind_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compiled(model, loss={"kind": kind_loss, "place": "mse"} if named else [kind_loss, "mse"])
    x, y = next(iter(synthetic.dataset(model, 6)))
    assert {name: tensor.shape for name, tensor in x.items()} == {"words": (6, 5), "image": (6, 4, 4, 1)}
    assert np.max(x["words"]) < 11
    kind, place = (y["kind"], y["place"]) if isinstance(y, dict) else y
    assert kind.dtype.is_integer
    assert (kind.shape, place.shape) == ((6,), (6, 2))
    assert np.isfinite(model.evaluate(synthetic.dataset(model, 6), steps=2, verbose=0)).all()


def test_batches_need_known_shapes():
    unknown = keras.Sequential([keras.Input((None, 3)), layers.Dense(1)])
    with pytest.raises(ValueError, match=r"Only the batch size may be unknown.*Received: .*\(None, None, 3\)"):
        synthetic.dataset(compiled(unknown, loss="mse"), 4)
    text = keras.Sequential([keras.Input((1,), dtype="string"), layers.StringLookup(vocabulary=["a"])])
    with pytest.raises(ValueError, match=r"Inputs must be floats, integers or booleans. Received: .* of dtype string"):
        synthetic.dataset(compiled(text, loss="mse"), 4)

    class Subclassed(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(ValueError, match=r"Received: Subclassed. Return keras.Model\(inputs, outputs\)"):
        synthetic.dataset(compiled(Subclassed(), loss="mse"), 4)


def test_model_of_the_user(user_directory):
    workload = models.workload("user_models:small")
    assert workload.build().output_shape == (None, 2)
    assert workload.objective() == {"loss": "mse"}


@pytest.mark.parametrize("name", ["small", "compiled"])
def test_engines_train_the_same(user_directory, monkeypatch, name):
    monkeypatch.setattr(engines, "start", started)
    runs = [Run(engine, 2, 6, f"user_models:{name}", steps=4, warm_up=2) for engine in ("single", "keras_dp", "mirrored")]
    measurements = [measurement.measure(run) for run in runs]
    assert np.ptp([measurement.loss for measurement in measurements]) < 1e-9
    assert [len(measurement.step_milliseconds) for measurement in measurements] == [4, 4, 4]


def test_whole_trainings_are_those_of_plain_keras(user_directory, monkeypatch):
    """The data are shuffled, and the last batch is uneven: MirroredStrategy trains something else."""
    monkeypatch.setattr(engines, "start", started)
    single, parallel, mirrored = (
        training.measure(
            Training(
                engine,
                2,
                8,
                "user_models:compiled",
                data="user_models:batches",
                validation="user_models:validation",
                epochs=3,
            )
        )
        for engine in ("single", "keras_dp", "mirrored")
    )
    assert parallel.logs == pytest.approx(single.logs, rel=1e-5)
    assert parallel.logs.keys() == {"loss", "val_loss"}
    assert mirrored.logs != pytest.approx(single.logs, rel=1e-3)
    assert (single.batches, len(single.later_epoch_seconds), len(single.evaluation_seconds)) == (3, 2, 3)
    parts = single.first_epoch_seconds + sum(single.later_epoch_seconds) + sum(single.evaluation_seconds)
    assert 0.9 * single.total_seconds < parts <= single.total_seconds


def test_a_training_without_evaluation(user_directory, monkeypatch):
    monkeypatch.setattr(engines, "start", started)
    measured = training.measure(Training("single", 1, 8, "user_models:compiled", data="user_models:batches"))
    assert (measured.later_epoch_seconds, measured.evaluation_seconds, measured.logs.keys()) == ([], [], {"loss"})


@pytest.mark.processes
def test_workers_share_the_towers(user_directory):
    """Two processes train as one device does, and the first one answers."""
    of_workers = Run("workers", 2, 6, "user_models:small", workers=2, steps=3, warm_up=1)
    measured = runs.measure_in_new_process(of_workers)
    alone = runs.measure_in_new_process(dataclasses.replace(of_workers, engine="single", workers=1))
    assert measured.loss == pytest.approx(alone.loss, rel=1e-5)
    assert len(measured.step_milliseconds) == 3
    if loopback.DEVICES.exists():
        assert measured.communication_bytes > 0
    with pytest.raises(RunFailedError, match="this model cannot be built"):
        runs.measure_in_new_process(dataclasses.replace(of_workers, model="user_models:broken"))


def test_bytes_in_a_step_after_the_first_ones():
    counted = loopback.LoopbackBytes()
    assert counted.in_each_step(after=1) is None
    counted.sent = [1_000, 5_000, 6_000, 8_000]
    assert counted.in_each_step(after=2) == 1_500


def test_bytes_that_are_not_known(user_directory, monkeypatch):
    known = keras_dp.communication_report

    def unknown(parallel, batch):
        return known(parallel, batch)._replace(unsized=("cond/then/mul",))

    monkeypatch.setattr(engines, "start", started)
    monkeypatch.setattr(keras_dp, "communication_report", unknown)
    run = Run("keras_dp", 2, 6, "user_models:small", steps=1, warm_up=1, count_bytes=True)
    assert measurement.measure(run).communication_bytes is None
    monkeypatch.setattr(keras_dp, "communication_report", known)
    assert measurement.measure(run).communication_bytes > 0


def test_steps_are_timed_one_by_one(user_directory, monkeypatch):
    monkeypatch.setattr(engines, "start", started)
    with pytest.raises(ValueError, match=r"Received: a model that is compiled with steps_per_execution=2\. Compile it without"):
        measurement.measure(Run("single", 1, 6, "user_models:compiled_for_several_steps"))


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
        ("--towers 0", "argument --towers: must be an integer of at least 1. Received: '0'"),
        ("--towers x", "argument --towers: must be an integer of at least 1. Received: 'x'"),
        ("--towers 1,,2", "argument --towers: must be an integer of at least 1. Received: ''"),
        ("--batch 0", "argument --batch: must be an integer of at least 1. Received: '0'"),
        ("--batch=-4", "argument --batch: must be an integer of at least 1. Received: '-4'"),
        ("--rounds 0", "argument --rounds: must be an integer of at least 1. Received: '0'"),
        ("--against horovod", "The engines to compare with are single, mirrored, torch, ddp, or none. Received: 'horovod'"),
        ("--against miror", "Did you mean 'mirrored'? Received: 'miror'"),
        ("--batch-norm global", "argument --batch-norm: invalid choice: 'global'"),
        ("--parameter-device shard", """must be a device, such as CPU:0 or GPU:1, or "sharded". Did you mean 'sharded'?"""),
        ("--workers 2 --towers 2,3", "--towers: 2 workers share the towers evenly. Received: 2, 3 towers. Use multiples of 2."),
        ("--workers 0", "argument --workers: must be an integer of at least 1. Received: '0'"),
        ("--data batches", "argument --data: must be my_module:function. Received: 'batches'"),
        ("--data a:b", "--data is for whole trainings. Add --end-to-end."),
        ("--epochs 5", "--epochs is for whole trainings. Add --end-to-end."),
        ("--end-to-end", "--end-to-end needs the data to train on. Add --data my_module:batches."),
        ("--end-to-end --data a:b --warm-up 3", "--warm-up is for steps, not for whole trainings. Leave it out."),
        ("--end-to-end --data a:b --batch 3", "--batch is for steps, not for whole trainings. Leave it out."),
        ("--end-to-end --data a:b --against single,ddp", "whole trainings are not measured with ddp. Use single or mirrored."),
        ("--profile", "--profile needs a directory to write to. Add --out DIRECTORY."),
        ("--out user_models.py/results", "--out: nothing can be written there"),
        ("--redraw none.json", "must be a bench.json that keras-dp bench has written. Received: 'none.json'"),
        ("--redraw user_models.py", "must be a bench.json that keras-dp bench has written. Received: 'user_models.py'"),
    ],
)  # fmt: skip
def test_wrong_arguments(user_directory, capsys, arguments, message):
    with pytest.raises(SystemExit) as refusal:
        main(["bench", *arguments.split()])
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing", "The module user_models has no function 'missing'. Received: 'user_models:missing'"),
        ("number", "has no function 'number'"),
        ("compiled_for_several_steps", "steps_per_execution=2. Compile it without"),
        ("of_any_length", "Only the batch size may be unknown"),
        ("without_inputs", "Return keras.Model(inputs, outputs)"),
    ],
)
def test_models_that_cannot_be_measured_are_found_out_first(user_directory, name, problem):
    assert problem in survey(f"user_models:{name}").problem


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "arrays",
            "must return a tf.data.Dataset of batches, or a keras.utils.PyDataset. Received: tuple. Arrays become batches",
        ),
        ("endless", "The batches of user_models:endless never end, so that no epoch ends. Leave out repeat()"),
        ("rows", "must return batches of rows. Received: tensors of shapes (). Add .batch(64)."),
        ("nothing", "must return batches of rows. Received: no batch."),
        ("missing", "The module user_models has no function 'missing'."),
    ],
)
def test_data_that_cannot_be_trained_on_are_found_out_first(user_directory, name, problem):
    assert problem in survey("user_models:without_inputs", "user_models:batches", f"user_models:{name}").problem


def test_batches_of_the_user(user_directory):
    for name, rows in (("batches", 8), ("Sequence", 5)):
        found = survey("user_models:without_inputs", f"user_models:{name}")
        assert (found.problem, found.batch_size) == (None, rows)


def test_what_is_found_out_first(user_directory):
    assert "No module named 'no_such_module'. Received: 'no_such_module:build'" in survey("no_such_module:build").problem
    assert survey("user_models:small") == Survey(environment.environment(), gpus=0, batch_size=64)
    assert survey("mlp").batch_size == 256
    assert tuple(models.BUILT_IN) == MODELS
    with pytest.raises(RunFailedError, match="RuntimeError: this model cannot be built"):
        runs.survey_in_new_process("user_models:broken")
    with pytest.raises(RunFailedError):
        runs.survey_in_new_process("user_models:ends")


FOUND = Survey(environment.environment(), gpus=0, batch_size=256)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (dataclasses.replace(FOUND, problem="It has no shape."), "error: --model: It has no shape."),
        (dataclasses.replace(FOUND, gpus=2), "--towers: there are only 2 GPUs. Received: 8. Use fewer"),
        (RunFailedError("RuntimeError: no"), "error: --model: mlp cannot be built:\nRuntimeError: no"),
        (
            dataclasses.replace(FOUND, gpus=8),
            "error: --against: ddp is measured on CPUs alone. Use single or mirrored",
        ),
    ],
)
def test_nothing_is_measured_if_it_would_fail(found, message, monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: name)

    def look(*names):
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(runs, "survey_in_new_process", look)
    with pytest.raises(SystemExit):
        main(["bench", "--against", "single,ddp"])
    assert message in capsys.readouterr().err


def test_torch_is_needed_to_compare_with_it(monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["bench", "--against", "torch"])
    assert "error: --against: torch needs PyTorch. Run pip install torch." in capsys.readouterr().err


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit):
        main([])
    assert "the following arguments are required: command" in capsys.readouterr().err


def test_the_command_answers_without_tensorflow(tmp_path):
    """TensorFlow takes seconds to import. The script's name distinguishes the command from a user's script."""
    command = tmp_path / "keras-dp"
    lines = ["--help", "bench --help", "check --help", "launch --help", "plan --help", "--version", "bench --model mpl"]
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
        assert f"{line} {2 if 'mpl' in line else 0}\n" in output
    assert f"keras_dp {keras_dp.__version__} with Keras {keras.__version__}, TensorFlow " in output


def test_ratios_are_taken_within_rounds():
    keras_dp_cell, ceiling, single = (Cell(engine, 2, 8) for engine in ("keras_dp", "ceiling", "single"))
    rounds = [
        {keras_dp_cell: measured([20.0] * 3), ceiling: measured([10.0] * 3), single.measured: measured([40.0] * 3)},
        {keras_dp_cell: measured([90.0] * 3), ceiling: measured([80.0] * 3), single.measured: measured([100.0] * 3)},
        {keras_dp_cell: measured([70.0] * 3), single.measured: measured([100.0] * 3)},
    ]
    row = step_summary.summarize(single, rounds)
    assert (row.keras_dp_ratio_low, row.keras_dp_ratio, row.keras_dp_ratio_high) == (0.5, 0.7, 0.9)
    assert (row.towers, row.median_milliseconds, row.communication_megabytes) == (2, 100.0, 0.0)
    speed_ups = 40 / 20, 100 / 90, 100 / 70
    assert step_summary.summarize(keras_dp_cell, rounds).speed_up == pytest.approx(sorted(speed_ups)[1])
    assert step_summary.summarize(ceiling, rounds).speed_up == pytest.approx((40 / 10 + 100 / 80) / 2)


def test_old_and_new_are_compared_with_the_noise_of_rounds(tmp_path, capsys):
    def written(name, **times):
        runs = [
            {"round": i, "engine": engine, "towers": 2, "batch_size": 8, "step_milliseconds": [milliseconds] * 3}
            for engine, rounds in times.items()
            for i, milliseconds in enumerate(rounds, 1)
        ]
        (tmp_path / name).write_text(json.dumps({"command": "keras-dp bench", "rows": [], "runs": runs}))
        return str(tmp_path / name)

    old = written("old.json", keras_dp=[10.0, 11.0, 12.0], mirrored=[20.0, 20.0, 20.0], single=[7.0])
    new = written("new.json", keras_dp=[11.5, 13.0, 14.0], mirrored=[10.0, 12.0, 11.0], single=[6.0], ceiling=[7.0])
    assert main(["bench", "--compare", old, new]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 128
    _, _, rule, *lines = (" ".join(line.split()) for line in shown)
    assert set(rule) == {"─"}
    assert lines == [
        "keras_dp 2 8 11.00 (10.00 to 12.00) 13.00 (11.50 to 14.00) 1.18 no difference beyond noise",
        "mirrored 2 8 20.00 (20.00 to 20.00) 11.00 (10.00 to 12.00) 0.55 faster",
        "single 2 8 7.00 (7.00 to 7.00) 6.00 (6.00 to 6.00) 0.86 too few rounds to tell: 3 are needed",
    ]
    trainings = {"round": 1, "engine": "single", "towers": 2, "batch_size": 8, "total_seconds": 9.0}
    written_trainings = {"command": "keras-dp bench", "measures": "trainings", "rows": [], "runs": [trainings] * 3}
    (tmp_path / "trainings.json").write_text(json.dumps(written_trainings))
    assert main(["bench", "--compare", *[str(tmp_path / "trainings.json")] * 2]) == 0
    assert "9000.00 (9000.00 to 9000.00)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["bench", "--compare", old, str(tmp_path / "trainings.json")])
    assert "One benchmark is of steps, and the other of trainings." in capsys.readouterr().err
    other = written("other.json", ceiling=[7.0])
    with pytest.raises(SystemExit):
        main(["bench", "--compare", old, other])
    assert "have measured no engine with the same number of towers" in capsys.readouterr().err


def results():
    """Makes rows of two towers, in which the ceiling has failed."""
    rounds = [
        {
            Cell("keras_dp", 2, 256): measured([5.0, 6.0, 8.0], communication_bytes=2_500_000),
            Cell("single", 1, 256): measured([10.0, 12.0, 14.0]),
        }
    ]
    cells = [Cell(engine, 2, 256) for engine in ("keras_dp", "ceiling", "single")]
    return [step_summary.summarize(cell, rounds) for cell in cells], rounds, {cells[1]: "ValueError: no"}


def drawn(columns, rows, width=tables.WIDEST):
    return tables.text(tables.table(columns, rows, width), width).splitlines()


def test_table():
    rows, _, _ = results()
    *_, keras_dp_line, ceiling_line, single_line = drawn(step_summary.COLUMNS, rows)
    assert " ".join(keras_dp_line.split()) == "keras_dp 2 256 6.00 5.20 to 7.60 - 2.00 (100 %) 1.5 700 2.50 2.3000"
    assert " ".join(ceiling_line.split()) == "ceiling 2 256 failed - - - - - - -"
    assert " ".join(single_line.split()) == "single 2 256 12.00 10.40 to 13.60 0.50 (0.50 to 0.50) - 1.5 700 0.00 2.3000"
    for width in (128, 120, 80):
        lines = drawn(step_summary.COLUMNS, rows, width)
        assert max(map(len, lines)) <= width
        headings = {name for name in ("engine", "towers", "batch", "step", "speed-up", "loss") if name in " ".join(lines[:2])}
        assert headings == {"engine", "towers", "batch", "step", "speed-up", *(["loss"] if width > 120 else [])}


def trained(seconds, loss, **changes):
    values = {
        "total_seconds": seconds,
        "first_epoch_seconds": 4.0,
        "later_epoch_seconds": [2.0, 1.0],
        "evaluation_seconds": [3.0, 0.5],
    }
    values |= {"batches": 10, "peak_memory_megabytes": 700.0, "logs": {"loss": loss, "val_accuracy": 0.9}}
    return TrainingMeasurement(**values | changes)


def test_rows_of_trainings():
    parallel, single, mirrored = (Cell(engine, 2, 8) for engine in ("keras_dp", "single", "mirrored"))
    rounds = [
        {parallel: trained(5.0, 1.0), single.measured: trained(10.0, 1.0)},
        {parallel: trained(6.0, 1.0, later_epoch_seconds=[]), single.measured: trained(18.0, 1.25)},
    ]
    row = training_summary.summarize(parallel, rounds)
    assert (row.total_seconds, row.speed_up, row.first_epoch_seconds, row.later_epoch_seconds) == (5.5, 2.5, 4.0, 1.5)
    assert (row.later_epoch_low_seconds, row.later_epoch_high_seconds) == (1.0, 2.0)
    assert (row.evaluation_seconds, row.rows_per_second, row.difference) == (0.5, 10 * 8 / 1.5, 0.2)
    rows = [row, training_summary.summarize(single, rounds), training_summary.summarize(mirrored, rounds)]
    assert rows[1].difference == 0
    columns = training_summary.columns(rows)
    for width in (128, 80):
        assert max(map(len, drawn(columns, rows, width))) <= width
    wide = drawn(columns, rows)
    assert [name in wide[1] for name in ("loss", "val_accuracy", "from single")] == [True] * 3
    assert " ".join(wide[-1].split()) == "mirrored 2 8 failed - - - - - - - -"
    first, _, line, *_ = tables.markdown(columns, rows).splitlines()
    assert first.startswith(
        "| engine | towers | batch | training s | keras_dp over it (range by round) | speed-up (efficiency) |"
    )
    assert line.startswith(
        "| keras_dp | 2 | 8 | 5.50 | - | 2.50 (125 %) | 4.00 | 1.50 | 1.00 to 2.00 | 0.50 | 53 | 700 | 1.0000 |"
    )


def test_whole_trainings_take_turns(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(runs, "survey_in_new_process", lambda *names: dataclasses.replace(FOUND, batch_size=8))
    monkeypatch.setattr(runs, "train_in_new_process", lambda training: seen.append(training) or trained(5.0, 1.0))
    arguments = "bench --end-to-end --model a:b --data c:d --workers 2 --rounds 1 --epochs 4 --json"
    assert main([*arguments.split(), "--out", str(tmp_path)]) == 0
    assert [(training.engine, training.towers, training.batch_size, training.workers) for training in seen] == [
        ("keras_dp", 2, 8, 1), ("workers", 2, 8, 2), ("single", 1, 8, 1), ("mirrored", 2, 8, 1),
    ]  # fmt: skip
    assert {(training.model, training.data, training.validation, training.epochs) for training in seen} == {
        ("a:b", "c:d", None, 4)
    }
    output = capsys.readouterr()
    assert json.loads(output.out) == json.loads((tmp_path / "bench.json").read_text())
    assert "difference from single: " in output.err
    assert not (tmp_path / "bench.png").exists()
    with (tmp_path / "bench.csv").open(encoding="utf-8") as file:
        assert next(csv.DictReader(file))["val_accuracy"] == "0.9"
    assert main(["bench", "--redraw", str(tmp_path / "bench.json")]) == 0
    assert capsys.readouterr().out in output.err


@pytest.mark.parametrize("with_matplotlib", [True, False])
def test_files(tmp_path, monkeypatch, capsys, with_matplotlib):
    if not with_matplotlib:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    options = argparse.Namespace(command="keras-dp bench", model="mlp", scaling="strong", end_to_end=False)
    _, rounds, failures = results()
    cells = [Cell(engine, 2, 256) for engine in ("keras_dp", "ceiling", "single")]
    written = bench._results_of(options, FOUND, cells, rounds, failures)
    bench._write(written, tmp_path)
    with (tmp_path / "bench.csv").open(encoding="utf-8") as file:
        keras_dp_row, ceiling_row, single_row = csv.DictReader(file)
    assert (keras_dp_row["engine"], keras_dp_row["median_milliseconds"]) == ("keras_dp", "6.0")
    assert ceiling_row["median_milliseconds"] == ""
    assert single_row["keras_dp_ratio"] == "0.5"
    assert json.loads((tmp_path / "bench.json").read_text(encoding="utf-8")) == written
    assert written["command"] == "keras-dp bench"
    assert written["environment"]["keras"] == keras.__version__
    assert [run["step_milliseconds"] for run in written["runs"]] == [[5.0, 6.0, 8.0], [10.0, 12.0, 14.0]]
    assert written["failures"] == [{"engine": "ceiling", "towers": 2, "batch_size": 256, "message": "ValueError: no"}]
    assert (tmp_path / "bench.png").exists() is with_matplotlib
    assert ("[bench]" in capsys.readouterr().err) is not with_matplotlib


def test_redraw(tmp_path, monkeypatch, capsys):
    """The table, the figure and the CSV file are made again from the measurements."""
    monkeypatch.setattr(runs, "survey_in_new_process", lambda *names: FOUND)
    monkeypatch.setattr(runs, "measure_in_new_process", lambda run: measured([10.0, 11.0]))
    arguments = ["bench", "--towers", "2", "--rounds", "2", "--out", str(tmp_path)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    figure, table = (tmp_path / "bench.png").read_bytes(), (tmp_path / "bench.csv").read_text()
    for name in ("bench.png", "bench.csv"):
        (tmp_path / name).unlink()
    assert main(["bench", "--redraw", str(tmp_path / "bench.json")]) == 0
    assert capsys.readouterr().out == shown
    assert ((tmp_path / "bench.png").read_bytes(), (tmp_path / "bench.csv").read_text()) == (figure, table)
    assert main(["bench", "--redraw", str(tmp_path / "bench.json"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "bench.png").read_bytes() == figure
    assert "keras_dp over it: the step time of keras_dp, divided by the step time of this engine" in shown
    assert "measured in 2 rounds" in shown


@pytest.mark.parametrize(("runs_until", "shown_rounds"), [(0, 0), (3, 1), (6, 2)])
def test_an_interrupted_benchmark_shows_what_it_has(runs_until, shown_rounds, tmp_path, monkeypatch, capsys):
    """Ctrl-C interrupts the run after the given number; a round has four runs."""
    done = []

    def measure(run):
        if len(done) == runs_until:
            raise KeyboardInterrupt
        done.append(run)
        return measured([10.0])

    monkeypatch.setattr(runs, "survey_in_new_process", lambda *names: FOUND)
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
    written = json.loads((tmp_path / "bench.json").read_text())
    assert len(written["runs"]) == runs_until
    assert main(["bench", "--redraw", str(tmp_path / "bench.json")]) == 0
    assert capsys.readouterr().out == output.out


def test_results_are_written_after_each_round(tmp_path, monkeypatch):
    seen = []

    def measure(run):
        path = tmp_path / "bench.csv"
        seen.append(len(json.loads((tmp_path / "bench.json").read_text())["runs"]) if path.exists() else None)
        return measured([10.0])

    monkeypatch.setattr(runs, "survey_in_new_process", lambda *names: FOUND)
    monkeypatch.setattr(runs, "measure_in_new_process", measure)
    assert main(["bench", "--towers", "1", "--rounds", "3", "--against", "none", "--out", str(tmp_path)]) == 0
    assert seen == [None, None, 2, 2, 4, 4]


def test_engines_take_turns(monkeypatch, capsys):
    seen = []

    def fake(run):
        seen.append(run)
        if run.engine == "mirrored":
            raise RunFailedError("ValueError: not today")
        return measured([10.0, 11.0])

    monkeypatch.setattr(bench.runs, "survey_in_new_process", lambda *names: FOUND)
    monkeypatch.setattr(bench.runs, "measure_in_new_process", fake)
    arguments = "bench --model unet --towers 4,2,2 --batch 8 --scaling weak --rounds 2 --steps 7 --batch-norm local"
    assert main(arguments.split()) == 1
    first_round = [
        ("keras_dp", 2, 16), ("ceiling", 2, 16), ("single", 1, 16), ("mirrored", 2, 16),
        ("keras_dp", 4, 32), ("ceiling", 4, 32), ("single", 1, 32), ("mirrored", 4, 32),
    ]  # fmt: skip
    second_round = [cell for cell in first_round if cell[0] != "mirrored"]
    assert [(run.engine, run.towers, run.batch_size) for run in seen] == first_round + second_round
    assert all((run.model, run.steps, run.batch_norm) == ("unet", 7, "local") for run in seen)
    assert [run.engine for run in seen if run.count_bytes] == ["keras_dp"] * 2
    output = capsys.readouterr()
    assert "round 2 of 2: keras_dp on 4 towers, about 0 s to go" in output.err
    assert "mirrored on 4 towers failed:\nValueError: not today" in output.out
    assert arguments in output.out


def test_workers_are_compared_with_the_same_towers(monkeypatch):
    seen = []
    monkeypatch.setattr(runs, "survey_in_new_process", lambda *names: FOUND)
    monkeypatch.setattr(runs, "measure_in_new_process", lambda run: seen.append(run) or measured([10.0]))
    assert main(["bench", "--workers", "2", "--towers", "2,4", "--rounds", "1", "--against", "none"]) == 0
    assert [(run.engine, run.towers, run.workers) for run in seen] == [
        ("keras_dp", 2, 1), ("ceiling", 2, 1), ("workers", 2, 2), ("keras_dp", 4, 1), ("ceiling", 4, 1), ("workers", 4, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("has_torch", [True, False])
def test_workers_are_compared_with_those_of_torch(has_torch, monkeypatch, capsys):
    seen = []
    find_spec = bench.importlib.util.find_spec
    found = {"torch": "torch"} if has_torch else {}
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: found.get(name) if name == "torch" else find_spec(name))
    monkeypatch.setattr(runs, "survey_in_new_process", lambda *names: FOUND)
    monkeypatch.setattr(runs, "measure_in_new_process", lambda run: seen.append(run) or measured([10.0]))
    assert main(["bench", "--workers", "2", "--rounds", "1"]) == 0
    assert [(run.engine, run.towers, run.workers) for run in seen] == [
        ("keras_dp", 2, 1), ("ceiling", 2, 1), ("workers", 2, 2), ("single", 1, 1), ("mirrored", 2, 1),
        *([("torch", 1, 1), ("ddp", 2, 2)] if has_torch else []),
    ]  # fmt: skip
    assert ("ddp on 2 processes" in capsys.readouterr().err) is has_torch
    seen.clear()
    assert main(["bench", "--model", "a:b", "--workers", "2", "--rounds", "1"]) == 0
    assert {run.engine for run in seen} == {"keras_dp", "ceiling", "workers", "single", "mirrored"}


def test_the_speed_up_of_torch_is_over_torch():
    ddp, torch, single, parallel = (Cell(engine, 2, 8) for engine in ("ddp", "torch", "single", "keras_dp"))
    times = {ddp: [30.0], torch.measured: [15.0], single.measured: [6.0], parallel: [10.0]}
    row = step_summary.summarize(ddp, [{cell: measured(milliseconds, loss=None) for cell, milliseconds in times.items()}])
    assert (row.speed_up, row.keras_dp_ratio, row.loss) == (0.5, 10 / 30, None)


def test_plain_keras_is_measured_once_for_all_towers(monkeypatch):
    seen = []
    monkeypatch.setattr(runs, "survey_in_new_process", lambda *names: FOUND)
    monkeypatch.setattr(runs, "measure_in_new_process", lambda run: seen.append(run) or measured([10.0]))
    assert main(["bench", "--towers", "1,2", "--rounds", "1", "--against", "single"]) == 0
    assert [(run.engine, run.towers, run.batch_size) for run in seen] == [
        ("keras_dp", 1, 256), ("ceiling", 1, 256), ("single", 1, 256), ("keras_dp", 2, 256), ("ceiling", 2, 256),
    ]  # fmt: skip


@pytest.mark.processes
def test_a_whole_training_in_processes(user_directory, capsys):
    arguments = "bench --end-to-end --model user_models:compiled --data user_models:batches --towers 2 --rounds 1 --epochs 2"
    assert main([*arguments.split(), "--against", "none", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["engine"], row["towers"], row["batch_size"]) == ("keras_dp", 2, 8)
    assert row["first_epoch_seconds"] > row["later_epoch_seconds"] > 0


def test_end_to_end(user_directory):
    """Runs the command as a user does, and reads the towers' names in the profile."""
    script = "import sys; from keras_dp.cli import main; sys.exit(main())"
    arguments = "bench --model user_models:small --towers 2 --batch 6 --against none --rounds 1 --steps 3 --warm-up 2"
    process = subprocess.run(
        [sys.executable, "-c", script, *arguments.split(), "--out", "results", "--profile"],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert "round 1 of 1: ceiling on 2 towers" in process.stderr
    written = json.loads((user_directory / "results" / "bench.json").read_text(encoding="utf-8"))
    run, ceiling_run = written["runs"]
    assert (run["engine"], ceiling_run["engine"]) == ("keras_dp", "ceiling")
    assert len(run["step_milliseconds"]) == 3
    assert run["communication_bytes"] > 0
    assert run["first_step_seconds"] > max(run["step_milliseconds"]) / 1000
    (profile,) = (user_directory / "results" / "profile" / "2_towers").rglob("*.xplane.pb")
    assert all(name in profile.read_bytes() for name in (b"tower_0/", b"tower_1/"))


def test_a_failing_run_says_why(user_directory):
    with pytest.raises(RunFailedError, match="RuntimeError: this model cannot be built"):
        runs.measure_in_new_process(Run("keras_dp", 2, 4, "user_models:broken"))
