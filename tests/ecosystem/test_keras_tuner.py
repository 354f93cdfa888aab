"""KerasTuner finds the same hyperparameters with the same scores for plain and for wrapped models."""

import keras_tuner
import numpy as np
import pytest
from classification import classifier

import keras_dp

TUNERS = {
    keras_tuner.RandomSearch: {"max_trials": 2},
    keras_tuner.GridSearch: {"max_trials": 2},
    keras_tuner.BayesianOptimization: {"max_trials": 2},
    keras_tuner.Hyperband: {"max_epochs": 2},
}


def searched(tuner_class, wrapped, data, directory):
    """Searches for the number of units in two trials, and returns the tuner."""
    tuner = tuner_class(
        lambda hyperparameters: classifier(wrapped, hyperparameters.Int("units", 4, 8, step=4)),
        "val_loss",
        seed=0,
        directory=directory,
        project_name=f"wrapped_{wrapped}",
        **TUNERS[tuner_class],
    )
    tuner.search(*data, epochs=2, validation_data=data, verbose=0)
    return tuner


@pytest.mark.parametrize("tuner_class", TUNERS)
def test_search(tuner_class, data, tmp_path):
    plain, parallel = (searched(tuner_class, wrapped, data, tmp_path) for wrapped in (False, True))
    assert plain.get_best_hyperparameters()[0].values == parallel.get_best_hyperparameters()[0].values
    trials = [[trial.score for trial in tuner.oracle.get_best_trials(2)] for tuner in (plain, parallel)]
    assert len(trials[0]) == 2
    np.testing.assert_allclose(trials[1], trials[0], rtol=1e-5)
    (best,) = parallel.get_best_models()
    assert isinstance(best, keras_dp.DataParallelModel)
    np.testing.assert_allclose(
        best.predict(data[0], verbose=0), plain.get_best_models()[0].predict(data[0], verbose=0), rtol=1e-4
    )


class Tuner(keras_tuner.RandomSearch):
    """Defines a custom tuner, which trains and predicts itself."""

    def run_trial(self, trial, x, y, wrapped, verbose):
        model = classifier(wrapped, trial.hyperparameters.Int("units", 4, 8, step=4))
        return model.fit(x, y, epochs=1, verbose=verbose).history["loss"][0]


def test_a_tuner_of_ones_own(data, tmp_path):
    scores = []
    for wrapped in (False, True):
        tuner = Tuner(max_trials=2, seed=0, directory=tmp_path, project_name=f"wrapped_{wrapped}")
        tuner.search(*data, wrapped, verbose=0)
        scores.append([trial.score for trial in tuner.oracle.get_best_trials(2)])
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-5)
