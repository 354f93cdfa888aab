"""mlflow logs the same for a wrapped model as for a plain one: automatically, by its callback and on request."""

import mlflow
import numpy as np
import pytest
from classification import both, classifier
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


def assert_same_runs(fit, data):
    """Compares parameters, metrics and artifacts of the runs, and the predictions of the models that `fit` has loaded.

    Returns the parameters.
    """

    def run(wrapped):
        with mlflow.start_run() as run:
            model = fit(classifier(wrapped), run.info.run_id)
        logged = mlflow.get_run(run.info.run_id).data
        artifacts = {artifact.path for artifact in mlflow.MlflowClient().list_artifacts(run.info.run_id)}
        return (logged.params, artifacts), logged.metrics, model

    (named, metrics, model), (other_named, other_metrics, other) = both(run)
    assert named == other_named
    assert len(metrics) > 3
    assert other_metrics == pytest.approx(metrics, rel=1e-4)
    assert type(other) is type(model)
    np.testing.assert_allclose(other.predict(data[0], verbose=0), model.predict(data[0], verbose=0), rtol=1e-4)
    return named[0]


FIT = {"epochs": 2, "batch_size": 8, "validation_split": 0.2, "verbose": 0}


@pytest.mark.parametrize("flavor", FLAVORS)
def test_autolog(flavor, data):
    FLAVORS[flavor].autolog()

    def fit(model, run_id):
        model.fit(*data, callbacks=[callbacks.EarlyStopping(patience=3)], **FIT)
        (of_run,) = mlflow.search_logged_models(filter_string=f"source_run_id='{run_id}'", output_format="list")
        assert mlflow.models.get_model_info(of_run.model_uri).signature is not None
        return FLAVORS[flavor].load_model(of_run.model_uri)

    params = assert_same_runs(fit, data)
    assert params["opt_learning_rate" if flavor == "tensorflow" else "optimizer_learning_rate"].startswith("0.0099")


def test_callback_and_log_model(data):
    def fit(model, _):
        model.fit(*data, callbacks=[mlflow.keras.MlflowCallback()], **FIT)
        return mlflow.keras.load_model(mlflow.keras.log_model(model, name="model").model_uri)

    assert_same_runs(fit, data)
