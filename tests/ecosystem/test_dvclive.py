"""DVCLive writes the same metrics, plots and model for a wrapped model as for a plain one."""

import json

import keras
import numpy as np
import pytest
from classification import both, classifier
from comparison import assert_same
from dvc.repo import Repo
from dvclive import Live
from dvclive.keras import DVCLiveCallback


@pytest.fixture(autouse=True)
def repository(tmp_path, monkeypatch):
    """Sets up DVC's repository, without Git, in the test's directory."""
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    Repo.init(no_scm=True).close()


def written(folder):
    """Returns the names of a run's files with DVC's description, the last metrics, and each metric's steps and values."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    metrics = json.loads((folder / "metrics.json").read_text())
    plots = {path.parent.name + "/" + path.stem: np.loadtxt(path, skiprows=1) for path in folder.rglob("*.tsv")}
    return (names, (folder / "dvc.yaml").read_text()), metrics, plots


def test_metrics_plots_and_model(data, tmp_path):
    def run(wrapped):
        folder = tmp_path / f"wrapped_{wrapped}"
        with Live(str(folder), save_dvc_exp=False, dvcyaml=str(folder / "dvc.yaml")) as live:
            given = [DVCLiveCallback(live=live), keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True)]
            classifier(wrapped).fit(*data, epochs=3, batch_size=8, validation_split=0.2, callbacks=given, verbose=0)
            live.log_artifact(folder / "best.keras", type="model", copy=True)
        answers = keras.models.load_model(folder / "artifacts" / "best.keras").predict(data[0], verbose=0)
        return *written(folder), answers

    (description, *numbers), (other_description, *other_numbers) = both(run)
    assert description == other_description
    assert "path: artifacts/best.keras" in description[1]
    _, plots, _ = numbers
    assert plots.keys() == {f"{part}/{name}" for part in ("train", "eval") for name in ("accuracy", "loss")}
    assert {len(steps_and_values) for steps_and_values in plots.values()} == {3}
    assert_same(numbers, other_numbers, 1e-4)
