"""Weights & Biases writes the same runs for a wrapped model as for a plain one."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import wandb
from classification import classifier
from wandb.integration.keras import WandbEvalCallback, WandbMetricsLogger, WandbModelCheckpoint
from wandb.proto import wandb_internal_pb2


@pytest.fixture(autouse=True)
def directories(tmp_path, monkeypatch):
    """Sets up wandb to write below the test's directory alone, and to send nothing."""
    for name in ("ARTIFACT", "CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def records(path):
    """Returns the records of a run's file: after a header, parts of records in blocks of 32 KiB, as LevelDB writes them."""
    content, position, parts, found = path.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        left = 2**15 - position % 2**15
        if left < 7:  # The rest of a block is too small for a part.
            position += left
            continue
        begin = position + 7
        length, kind = int.from_bytes(content[begin - 3 : begin - 1], "little"), content[begin - 1]
        position = begin + length
        parts += content[begin:position]
        if kind in (1, 4):  # A whole record, or the last part of one.
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    assert found[-1].HasField("exit")
    return found


def runs(data, directory, callbacks):
    """Trains a plain and a wrapped model with the callbacks that a function returns, and returns the records of both runs."""
    for wrapped in (False, True):
        folder = directory / f"wrapped_{wrapped}"
        folder.mkdir()
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        with wandb.init(mode="offline", dir=folder, project="towers", settings=settings):
            given = callbacks(folder)
            classifier(wrapped).fit(*data, epochs=2, batch_size=8, validation_split=0.2, callbacks=given, verbose=0)
    wandb.teardown()  # Only then are the files complete.
    plain, parallel = sorted(directory.glob("wrapped_*/wandb/offline-run*/*.wandb"))
    return records(plain), records(parallel)


def history(of_run):
    """Returns the rows that were logged, without times."""
    rows = []
    for record in of_run:
        if record.HasField("history"):
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if name not in ("_timestamp", "_runtime")})
    return rows


def artifacts(of_run):
    """Returns the types, aliases, names and contents of the artifacts, each of which is a model or a table."""
    found = []
    for record in of_run:
        if record.HasField("artifact"):
            (entry,) = record.artifact.manifest.contents
            content = opened(Path(entry.local_path), entry.path)
            found.append((record.artifact.type, *record.artifact.aliases, entry.path, content))
    return found


def opened(file, name):
    """Returns the model or the rows of the table in a file of an artifact, which has another name on disk."""
    if name.endswith(".keras"):
        return keras.models.load_model(file.rename(file.with_suffix(".keras")))
    return json.loads(file.read_text())["data"]


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


def test_metrics_checkpoints_and_predictions(data, tmp_path):
    def callbacks(folder):
        checkpoint = WandbModelCheckpoint(folder / "{epoch}.keras", save_best_only=True)
        return [WandbMetricsLogger("batch"), WandbMetricsLogger(), checkpoint, Predictions(data[0])]

    both = runs(data, tmp_path, callbacks)
    plain, parallel = map(history, both)
    names = {name for row in plain for name in row}
    assert {"_step", "batch/batch_step", "batch/loss", "epoch/epoch", "epoch/learning_rate", "epoch/val_accuracy"} < names
    for expected, received in zip(plain, parallel, strict=True):
        assert received == pytest.approx(expected, rel=1e-4)
    plain, parallel = map(artifacts, both)
    assert [kind for kind, *_ in plain] == ["model", "evaluation"] * 2
    for (*description, one), (*other_description, other) in zip(plain, parallel, strict=True):
        assert description == other_description
        assert type(one) is type(other)
        if "model" in description:
            one, other = one.predict(data[0], verbose=0), other.predict(data[0], verbose=0)
        assert len(one) == len(data[0])
        np.testing.assert_allclose(other, one, rtol=1e-4)
