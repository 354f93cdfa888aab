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
from keras_dp.cli.bench.summary import Cell, Row
from keras_dp.cli.check import training, workers
from keras_dp.cli.check.copying import MeasuredCopy
from keras_dp.cli.check.findings import Finding
from keras_dp.cli.plan.prediction import MirroredPlan, PlannedRun, TowersPlan
from keras_dp.cli.runs import Measurement, Survey
from keras_dp.reports.report import ComputedOnce, Report

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")


def documented():
    """Returns the fields of each table of the page, by the first words of the table."""
    tables = {}
    for heading, block in re.findall(r"^\| (.+?) \| unit \| meaning \|\n.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        fields = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", block, re.MULTILINE)
        assert len(fields) == len(set(fields)) == block.count("\n"), heading
        tables[heading] = set(fields)
    return tables


def names(described):
    return {field.name for field in dataclasses.fields(described)}


def results_of_a_benchmark():
    """Returns what bench.json holds of one run and one failure."""
    measured, failed = Cell("keras_dp", 2, 8), Cell("mirrored", 2, 8)
    survey = Survey(environment.environment(), 0, 8)
    rounds = [{measured: Measurement([1.0], 1.0, 1.0, 1.0)}]
    options = SimpleNamespace(command="keras-dp bench", model="small", scaling="weak")
    return bench._results_of(options, survey, [measured, failed], rounds, {failed: "no such device"})


def data_of_workers(monkeypatch):
    """Returns the data of a check of two workers, the other one of which is replaced."""
    collectives = SimpleNamespace(sum=lambda x: x / 2 * 3)
    group = SimpleNamespace(index=1, count=2, collectives=collectives, answer_times=lambda: [{1: 1e-4}, {0: 1e-4}])
    monkeypatch.setattr(workers, "find_cluster", lambda: "a cluster")
    monkeypatch.setattr(workers, "connect_workers", lambda **arguments: group)
    return workers.connected(1.0)[1].data


def compiled(*stack):
    model = keras.Sequential([keras.Input((4,)), *stack, keras.layers.Dense(2)])
    parallel = keras_dp.DataParallelModel(model, devices=2)
    parallel.compile("sgd", "mse")
    return parallel


def test_each_field_is_documented(monkeypatch):
    batches = tf.data.Dataset.from_tensors((np.ones((8, 4)), np.ones((8, 2)))).repeat()
    results = results_of_a_benchmark()
    assert documented() == {
        "field of a finding": names(Finding),
        "field of `data` of `workers`": set(data_of_workers(monkeypatch)),
        "field of a copy": set(MeasuredCopy._fields),
        "field of `data` of `speed`": set(training.speed(compiled(), batches).data),
        "field of `data` of `shares`": set(training.shares(lambda devices: compiled(), batches, 4, ["CPU:0", "CPU:1"]).data),
        "field of an entry": {"run", "plan", "mirrored"},
        "field of `run`": names(PlannedRun),
        "field of `plan`": names(TowersPlan),
        "field of `mirrored`": names(MirroredPlan),
        "field of `bench.json`": set(results),
        "field of `environment`": set(results["environment"]),
        "field of a row": names(Row),
        "field of a run": set(results["runs"][0]),
        "field of a failure": set(results["failures"][0]),
        "field of a report": names(Report),
        "field of an operation in `once`": names(ComputedOnce),
    }


def test_a_report_is_json():
    class Sorts(keras.layers.Layer):
        def call(self, x):
            return x + tf.sort(x, axis=0)

    report = compiled(Sorts()).report((np.ones((8, 4)), np.ones((8, 2))))
    read = json.loads(json.dumps(dataclasses.asdict(report)))
    assert read["rows"] == [4, 4]
    assert read["sent_bytes"] == dict(report.sent_bytes)
    assert read["weight_bytes"] == dict(report.weight_bytes)
    assert set(read["once"][0]) == names(ComputedOnce)
