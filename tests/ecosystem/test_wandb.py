"""Weights & Biases is given the same metrics, models and tables by a wrapped model as by a plain one."""

import json
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import wandb
from classification import both, classifier
from comparison import assert_same
from wandb.integration.keras import WandbEvalCallback, WandbMetricsLogger, WandbModelCheckpoint


@pytest.fixture(autouse=True)
def directories(tmp_path, monkeypatch):
    """Sets up wandb to write below the test's directory alone, and to send nothing."""
    for name in ("ARTIFACT", "CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


class Predictions(WandbEvalCallback):
    """Logs the model's predictions after each epoch as a table."""

    def __init__(self, x):
        super().__init__([], ["epoch", "row", "probability"])
        self.x = x

    def on_train_begin(self, logs=None):
        """Skips the table of labels: wandb waits until its server has that."""

    def add_ground_truth(self, logs=None):
        raise NotImplementedError

    def add_model_predictions(self, epoch, logs=None):
        for row, probabilities in enumerate(self.model.predict(self.x, verbose=0)):
            self.pred_table.add_data(epoch, row, float(probabilities[0]))


def opened(file, name):
    """Returns the model or the rows of the table in a file of an artifact, which has another name on disk."""
    if name.endswith(".keras"):
        return keras.models.load_model(file.rename(file.with_suffix(".keras")))
    return json.loads(file.read_text())["data"]


def spied(method):
    return mock.patch.object(wandb.Run, method, autospec=True, side_effect=getattr(wandb.Run, method))


def test_metrics_checkpoints_and_predictions(data, tmp_path):
    def logged(wrapped):
        """Returns the rows that were logged, and the types, aliases, names and contents of the artifacts."""
        folder = tmp_path / f"wrapped_{wrapped}"
        folder.mkdir()
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        with spied("log") as log, spied("log_artifact") as kept, wandb.init(mode="offline", dir=folder, settings=settings):
            checkpoint = WandbModelCheckpoint(folder / "{epoch}.keras", save_best_only=True)
            given = [WandbMetricsLogger("batch"), WandbMetricsLogger(), checkpoint, Predictions(data[0])]
            classifier(wrapped).fit(*data, epochs=2, batch_size=8, validation_split=0.2, callbacks=given, verbose=0)
            artifacts = [(call.args[1], *call.kwargs["aliases"]) for call in kept.call_args_list]
        return [call.args[1] for call in log.call_args_list], artifacts

    (rows, artifacts), (other_rows, other_artifacts) = both(logged)
    names = {name for row in rows for name in row}
    assert {"batch/batch_step", "batch/loss", "epoch/epoch", "epoch/learning_rate", "epoch/val_accuracy"} < names
    assert_same(rows, other_rows, 1e-4)
    assert [artifact.type for artifact, *_ in artifacts] == ["model", "evaluation"] * 2
    for (artifact, *aliases), (other, *other_aliases) in zip(artifacts, other_artifacts, strict=True):
        assert (artifact.type, aliases) == (other.type, other_aliases)
        ((name, entry),), ((other_name, other_entry),) = (one.manifest.entries.items() for one in (artifact, other))
        assert name == other_name
        contents = [opened(Path(one.local_path), name) for one in (entry, other_entry)]
        if artifact.type == "model":
            assert type(contents[0]) is type(contents[1])
            contents = [model.predict(data[0], verbose=0) for model in contents]
        assert len(contents[0]) == len(data[0])
        np.testing.assert_allclose(contents[1], contents[0], rtol=1e-4)
