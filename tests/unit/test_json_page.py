"""docs/json.md names each field that the commands write for programs, with its unit."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf

import keras_dp
from keras_dp.cli import environment
from keras_dp.cli.bench import command as bench
from keras_dp.cli.bench import step_summary, training_summary
from keras_dp.cli.bench.summary import Cell
from keras_dp.cli.check import training, workers
from keras_dp.cli.check.copying import Copy
from keras_dp.cli.check.findings import Finding
from keras_dp.cli.plan.prediction import MirroredPlan, Plan, PlannedRun
from keras_dp.cli.runs import Measurement, Survey, TrainingMeasurement
from keras_dp.reports.report import ComputedOnce, Report

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
ROW = re.compile(r"\| `(\w+)` \| ([^|]+) \| [^|]+ \|")


def documented():
    """Returns the fields of each table of the page, by the first words of the table."""
    tables = {}
    for block in PAGE.split("\n\n"):
        heading, *rest = block.splitlines()
        if heading.startswith("| "):
            columns = [column.strip() for column in heading.strip("|").split("|")]
            assert columns[1:] == ["unit", "meaning"], heading
            matches = [ROW.fullmatch(line) for line in rest[1:]]
            assert all(matches), block
            fields = [match[1] for match in matches]
            assert len(fields) == len(set(fields)), heading
            tables[columns[0]] = set(fields)
    return tables


def names(described):
    return {field.name for field in dataclasses.fields(described)}


def results_of_a_benchmark(measurement, end_to_end=False):
    """Returns what bench.json holds of one run and one failure."""
    options = SimpleNamespace(command="keras-dp bench", model="small", scaling="weak", end_to_end=end_to_end)
    measured, failed = Cell("keras_dp", 2, 8), Cell("mirrored", 2, 8)
    rounds = [{measured: measurement}]
    survey = Survey(environment.environment(), 0, 8)
    return bench._results_of(options, survey, [measured, failed], rounds, {failed: "no such device"})


def data_of_workers(monkeypatch):
    """Returns the data of a check of two workers, the other one of which is replaced."""
    collectives = SimpleNamespace(sum=lambda x: x / 2 * 3)
    group = SimpleNamespace(index=1, count=2, collectives=collectives, answer_times=lambda: [{1: 1e-4}, {0: 1e-4}])
    monkeypatch.setattr(workers, "find_cluster", lambda: "a cluster")
    monkeypatch.setattr(workers, "connect_workers", lambda **arguments: group)
    return workers.connected(1.0)[1].data


def test_each_field_is_documented(monkeypatch):
    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]), devices=2)
    parallel.compile("sgd", "mse")
    batches = tf.data.Dataset.from_tensors((np.ones((8, 4)), np.ones((8, 2)))).repeat()
    results = results_of_a_benchmark(Measurement([1.0], 1.0, 1.0, 1.0))
    trainings = results_of_a_benchmark(TrainingMeasurement(1.0, 1.0, [], [], 1, 1.0, {}), end_to_end=True)
    assert documented() == {
        "field of a finding": names(Finding),
        "field of `data` of `workers`": set(data_of_workers(monkeypatch)),
        "field of a copy": set(Copy._fields),
        "field of `data` of `speed`": set(training.speed(parallel, batches).data),
        "field of an entry": {"run", "plan", "mirrored"},
        "field of `run`": names(PlannedRun),
        "field of `plan`": names(Plan),
        "field of `mirrored`": names(MirroredPlan),
        "field of `bench.json`": set(results),
        "field of `environment`": set(results["environment"]),
        "field of a row": names(step_summary.Row),
        "field of a run": set(results["runs"][0]),
        "field of a row of `--end-to-end`": names(training_summary.Row),
        "field of a run of `--end-to-end`": set(trainings["runs"][0]),
        "field of a failure": set(results["failures"][0]),
        "field of a report": names(Report),
        "field of an operation in `once`": names(ComputedOnce),
    }


def test_a_report_is_json():
    class Sorts(keras.layers.Layer):
        def call(self, x):
            return x + tf.sort(x, axis=0)

    parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), Sorts(), keras.layers.Dense(2)]), devices=2)
    parallel.compile("sgd", "mse")
    report = parallel.report((np.ones((8, 4)), np.ones((8, 2))))
    read = json.loads(json.dumps(dataclasses.asdict(report)))
    assert read["rows"] == [4, 4]
    assert read["sent_bytes"] == dict(report.sent_bytes)
    assert read["weight_bytes"] == dict(report.weight_bytes)
    assert set(read["once"][0]) == names(ComputedOnce)
