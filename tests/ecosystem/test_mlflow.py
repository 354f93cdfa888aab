"""mlflow logs the same for a wrapped model as for a plain one: automatically, by its callback and on request."""

import mlflow
import numpy as np
import pytest
from classification import classifier
from keras import callbacks

FLAVORS = {"keras": mlflow.keras, "tensorflow": mlflow.tensorflow}


@pytest.fixture(autouse=True)
def store(tmp_path):
    """Sets up a separate store of runs for each test, and undoes mlflow's patches after it."""
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("towers", artifact_location=str(tmp_path / "artifacts")))
    yield
    for flavor in FLAVORS.values():
        flavor.autolog(disable=True)


def logged(run_id):
    """Returns the parameters, metrics and artifacts of a run."""
    run = mlflow.get_run(run_id)
    artifacts = {artifact.path for artifact in mlflow.MlflowClient().list_artifacts(run_id)}
    return run.data.params, run.data.metrics, artifacts


def assert_same_run(one, other):
    (params, metrics, artifacts), (other_params, other_metrics, other_artifacts) = one, other
    assert params == other_params
    assert artifacts == other_artifacts
    assert len(metrics) > 3
    assert other_metrics == pytest.approx(metrics, rel=1e-4)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_autolog(flavor, data):
    FLAVORS[flavor].autolog()
    runs, models = [], []
    for wrapped in (False, True):
        model = classifier(wrapped)
        with mlflow.start_run() as run:
            early_stopping = callbacks.EarlyStopping(patience=3)
            model.fit(*data, epochs=2, batch_size=8, validation_split=0.2, callbacks=[early_stopping], verbose=0)
        runs.append(logged(run.info.run_id))
        (of_run,) = mlflow.search_logged_models(filter_string=f"source_run_id='{run.info.run_id}'", output_format="list")
        assert mlflow.models.get_model_info(of_run.model_uri).signature is not None
        models.append(FLAVORS[flavor].load_model(of_run.model_uri))
    assert_same_run(*runs)
    (params, _, _) = runs[1]
    assert params["opt_learning_rate" if flavor == "tensorflow" else "optimizer_learning_rate"].startswith("0.0099")
    plain, parallel = models
    assert type(parallel) is type(plain)
    np.testing.assert_allclose(parallel.predict(data[0], verbose=0), plain.predict(data[0], verbose=0), rtol=1e-4)


def test_autolog_of_arguments_given_by_place(data):
    """Mlflow then misses the batch size of a plain model, but sees that of a wrapped one."""
    mlflow.keras.autolog(log_models=False)
    runs = []
    for wrapped in (False, True):
        with mlflow.start_run() as run:
            classifier(wrapped).fit(*data, 8, 1, 0)
        runs.append(logged(run.info.run_id))
    assert runs[1][0] == {**runs[0][0], "batch_size": "8", "epochs": "1"}
    np.testing.assert_allclose(runs[1][1]["loss"], runs[0][1]["loss"], rtol=1e-4)


def test_callback_and_log_model(data):
    runs, answers = [], []
    for wrapped in (False, True):
        model = classifier(wrapped)
        with mlflow.start_run() as run:
            model.fit(*data, epochs=2, batch_size=8, validation_split=0.2, callbacks=[mlflow.keras.MlflowCallback()], verbose=0)
            saved = mlflow.keras.log_model(model, name="model")
        runs.append(logged(run.info.run_id))
        answers.append(mlflow.keras.load_model(saved.model_uri).predict(data[0], verbose=0))
    assert_same_run(*runs)
    np.testing.assert_allclose(answers[1], answers[0], rtol=1e-4)
