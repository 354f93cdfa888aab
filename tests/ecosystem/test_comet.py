"""Comet's own logging of Keras logs the inner model. It runs in a new process, as comet must be imported before Keras."""

import json
import sys
import zipfile
from pathlib import Path

import pytest
from forked_processes import output_of_command

SCRIPT = """
import sys
import comet_ml
import keras_dp
keras_dp.use_logical_cpus(2)
sys.path.insert(0, sys.argv[3])
from classification import classifier, two_classes

config = comet_ml.ExperimentConfig(offline_directory=sys.argv[1], log_code=False, log_env_details=False)
experiment = comet_ml.start(workspace="towers", project_name="towers", online=False, experiment_config=config)
model = classifier(sys.argv[2] == "wrapped")
model.fit(*two_classes(), batch_size=8, epochs=2, validation_split=0.2, verbose=0)
experiment.end()
"""


def logged(directory, kind):
    """Returns comet's log of a run: parameters, metrics by name, step and epoch, and the model's graph."""
    directory.mkdir()
    output = output_of_command(sys.executable, "-c", SCRIPT, directory, kind, Path(__file__).parent)
    assert "unknown exception" not in output
    (archive,) = directory.glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        messages = [json.loads(line) for line in opened.read("messages.json").splitlines()]
    parameters, metrics, graphs = (
        [message["payload"][field] for message in messages if message["type"] == kind]
        for kind, field in (("parameter_msg", "param"), ("metric_msg", "metric"), ("graph", "graph"))
    )
    # A run's arguments are the script's own.
    values = {one["paramName"]: one["paramValue"] for one in parameters if not one["paramName"].startswith("run_arg")}
    numbers = {(one["metricName"], one["step"], one["epoch"]): float(one["metricValue"]) for one in metrics}
    return values, numbers, list(map(json.loads, graphs))


def test_what_comet_logs(tmp_path):
    plain, wrapped = (logged(tmp_path / kind, kind) for kind in ("plain", "wrapped"))
    (parameters, metrics, graphs), (of_wrapped, metrics_of_wrapped, graphs_of_wrapped) = plain, wrapped
    assert parameters == of_wrapped
    assert (parameters["epochs"], parameters["steps"], parameters["Adam_beta_1"]) == (2, 4, 0.9)
    assert graphs == graphs_of_wrapped
    assert {name for name, _, _ in metrics} >= {"loss", "val_loss", "accuracy", "batch_loss"}
    numbers, others = ({key: one[key] for key in one if "duration" not in key[0]} for one in (metrics, metrics_of_wrapped))
    assert others == pytest.approx(numbers, rel=1e-4)
