"""Optuna chooses the same hyperparameters for plain and wrapped models, gets the same values, and prunes the same trials."""

import keras
import optuna
import optuna_integration
import pytest
from classification import both, classifier
from keras import layers
from optuna.trial import TrialState

import keras_dp

PRUNING = [optuna_integration.KerasPruningCallback, optuna_integration.TFKerasPruningCallback]


@pytest.fixture(autouse=True)
def quiet():
    """Hides the line that Optuna prints for each trial."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(verbosity)


def assert_same_trials(study, other):
    for trial, of_other in zip(study.trials, other.trials, strict=True):
        assert of_other.state is trial.state
        assert of_other.params == trial.params
        assert of_other.value == pytest.approx(trial.value, rel=1e-4)
        assert of_other.intermediate_values == pytest.approx(trial.intermediate_values, rel=1e-4)
    assert other.best_params == study.best_params


@pytest.mark.parametrize("callback", PRUNING)
def test_pruning(callback, data):
    def run(wrapped):
        def objective(trial):
            model = classifier(wrapped, trial.suggest_int("units", 4, 16))
            model.optimizer.learning_rate = trial.suggest_float("learning_rate", 1e-4, 0.1, log=True)
            options = {"batch_size": 8, "validation_data": data, "callbacks": [callback(trial, "val_loss")]}
            return model.fit(*data, epochs=2, verbose=0, **options).history["val_loss"][-1]

        # The sampler draws two trials at random, and learns from the values of the trials before it then.
        sampler = optuna.samplers.TPESampler(n_startup_trials=2, seed=0)
        study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.MedianPruner(n_startup_trials=2))
        study.optimize(objective, n_trials=5)
        return study

    studies = both(run)
    assert_same_trials(*studies)
    assert {trial.state for trial in studies[1].trials} == {TrialState.COMPLETE, TrialState.PRUNED}


def test_trials_in_threads(data):
    """Two trials train at once, each its own model."""

    def value(units, wrapped):
        seeds = [keras.initializers.GlorotUniform(seed) for seed in (1, 2)]
        hidden = layers.Dense(units, activation="relu", kernel_initializer=seeds[0])
        model = keras.Sequential([keras.Input((4,)), hidden, layers.Dense(2, kernel_initializer=seeds[1])])
        model = keras_dp.DataParallelModel(model, devices=2) if wrapped else model
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model.fit(*data, epochs=3, batch_size=8, shuffle=False, verbose=0).history["loss"][-1]

    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"units": [4, 8, 16]}, seed=0))
    study.optimize(lambda trial: value(trial.suggest_int("units", 4, 16), wrapped=True), n_jobs=2)
    values = {trial.params["units"]: trial.value for trial in study.trials}
    assert values == pytest.approx({units: value(units, wrapped=False) for units in (4, 8, 16)}, rel=1e-4)
