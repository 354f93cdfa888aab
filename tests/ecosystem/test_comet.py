"""Comet's own logging of Keras logs the inner model. It runs in a new process, as comet must be imported before Keras."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    command = [sys.executable, "-c", SCRIPT, str(directory), kind, str(Path(__file__).parent)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "unknown exception" not in result.stderr
    (archive,) = directory.glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        messages = [json.loads(line) for line in opened.read("messages.json").splitlines()]
    parameters, metrics, graphs = {}, {}, []
    for message in messages:
        payload = message["payload"]
        match message["type"]:
            case "parameter_msg":
                if not payload["param"]["paramName"].startswith("run_arg"):  # the script's own
                    parameters[payload["param"]["paramName"]] = payload["param"]["paramValue"]
            case "metric_msg":
                metric = payload["metric"]
                metrics[metric["metricName"], metric["step"], metric["epoch"]] = metric["metricValue"]
            case "graph":
                graphs.append(json.loads(payload["graph"]))
    return parameters, metrics, graphs


def test_what_comet_logs(tmp_path):
    runs = []
    for kind in ("plain", "wrapped"):
        (tmp_path / kind).mkdir()
        runs.append(logged(tmp_path / kind, kind))
    (parameters, metrics, graphs), (of_wrapped, metrics_of_wrapped, graphs_of_wrapped) = runs
    assert parameters == of_wrapped
    assert (parameters["epochs"], parameters["steps"], parameters["Adam_beta_1"]) == (2, 4, 0.9)
    assert graphs == graphs_of_wrapped
    assert metrics.keys() == metrics_of_wrapped.keys()
    logged_numbers = {key: float(value) for key, value in metrics.items() if "duration" not in key[0]}
    assert {name for name, _, _ in logged_numbers} >= {"loss", "val_loss", "accuracy", "batch_loss"}
    for key, value in logged_numbers.items():
        assert float(metrics_of_wrapped[key]) == pytest.approx(value, rel=1e-4), key
