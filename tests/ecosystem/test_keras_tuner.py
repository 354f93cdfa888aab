"""KerasTuner finds the same hyperparameters with the same scores for plain and for wrapped models."""

import keras
import keras_tuner
import numpy as np
import pytest
import tensorflow as tf
from classification import both, classifier
from keras import callbacks, layers
from keras_tuner import oracles
from sklearn.model_selection import KFold
from test_scikit_learn import scikeras_estimator

import keras_dp

TUNERS = {
    keras_tuner.RandomSearch: {"max_trials": 2},
    keras_tuner.GridSearch: {"max_trials": 2},
    keras_tuner.BayesianOptimization: {"max_trials": 3, "num_initial_points": 2},
    keras_tuner.Hyperband: {"max_epochs": 2, "factor": 2},
    keras_tuner.Tuner: {},
}
SEED = 1  # KerasTuner takes 0 for no seed.


def build_classifier(wrapped):
    """Returns a function that builds a `classifier` with a searched number of units."""
    return lambda hyperparameters: classifier(wrapped, hyperparameters.Int("units", 4, 12))


def new_tuner(tuner_class, build, wrapped, directory, objective="val_loss", **options):
    """Makes a tuner of a class with a project of its own for plain or for wrapped models."""
    options = {"directory": directory, "project_name": f"wrapped_{wrapped}", **TUNERS[tuner_class], **options}
    if tuner_class is keras_tuner.Tuner:
        return tuner_class(oracles.RandomSearchOracle(objective, max_trials=2, seed=SEED), build, **options)
    return tuner_class(build, objective, seed=SEED, **options)


def searched(tuner_class, wrapped, data, directory, watching=(), **options):
    """Searches for the number of units, and returns the tuner."""
    tuner = new_tuner(tuner_class, build_classifier(wrapped), wrapped, directory, **options)
    tuner.search(*data, epochs=2, validation_data=data, callbacks=list(watching), verbose=0)
    return tuner


def assert_same_trials(tuner, other, count=2):
    trials, other_trials = ([*one.oracle.trials.values()] for one in (tuner, other))
    assert len(trials) >= count
    assert [trial.hyperparameters.values for trial in trials] == [trial.hyperparameters.values for trial in other_trials]
    assert [trial.best_step for trial in trials] == [trial.best_step for trial in other_trials]
    np.testing.assert_allclose([trial.score for trial in other_trials], [trial.score for trial in trials], rtol=1e-4)


def assert_same_predictions(model, other, data):
    np.testing.assert_allclose(other.predict(data[0], verbose=0), model.predict(data[0], verbose=0), rtol=1e-4)


@pytest.mark.parametrize("tuner_class", TUNERS)
def test_search(tuner_class, data, tmp_path):
    plain, parallel = both(lambda wrapped: searched(tuner_class, wrapped, data, tmp_path))
    assert_same_trials(plain, parallel)
    hyperparameters = [trial.hyperparameters.values for trial in parallel.oracle.trials.values()]
    trained_on = any("tuner/trial_id" in values for values in hyperparameters)  # with the weights of an earlier trial
    assert trained_on == (tuner_class is keras_tuner.Hyperband)
    (best,) = parallel.get_best_models()
    assert isinstance(best, keras_dp.DataParallelModel)
    assert_same_predictions(plain.get_best_models()[0], best, data)


def test_executions_callbacks_and_other_settings(data, tmp_path):
    """Repeats each trial, replaces what the models are compiled with, and skips a model that is too large."""

    def trials(wrapped):
        objective = [keras_tuner.Objective("val_accuracy", "max"), "val_loss"]
        settings = {"objective": objective, "executions_per_trial": 2, "max_model_size": 36}
        settings |= {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
        settings |= {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9)}
        watching = [callbacks.EarlyStopping("loss", patience=1)]
        return [*searched(keras_tuner.GridSearch, wrapped, data, tmp_path, watching, **settings).oracle.trials.values()]

    plain, parallel = both(trials)
    assert [trial.status for trial in parallel] == [trial.status for trial in plain] == ["COMPLETED", "FAILED"]
    assert "Oversized model: 37 parameters" in parallel[1].message
    np.testing.assert_allclose(parallel[0].score, plain[0].score, rtol=1e-4)


def test_a_project_goes_on_with_plain_or_with_wrapped_models(data, tmp_path):
    before = searched(keras_tuner.RandomSearch, True, data, tmp_path, max_trials=1)
    for wrapped in (False, True):
        after = new_tuner(keras_tuner.RandomSearch, build_classifier(wrapped), True, tmp_path, overwrite=False)
        assert_same_trials(before, after, count=1)
        (loaded,) = after.get_best_models()
        assert isinstance(loaded, keras_dp.DataParallelModel) == wrapped
        assert_same_predictions(before.get_best_models()[0], loaded, data)
    after.search(*data, epochs=2, validation_data=data, verbose=0)
    assert len(after.oracle.trials) == 2


def test_a_distribution_strategy_is_refused(data, tmp_path):
    """KerasTuner builds the models in the scope of the strategy, and keeps the error in the trial."""

    def build(hyperparameters):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(hyperparameters.Int("units", 2, 8))])
        return keras_dp.DataParallelModel(model, devices=2)

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    tuner = new_tuner(keras_tuner.RandomSearch, build, True, tmp_path, distribution_strategy=strategy, max_trials=3)
    with pytest.raises(RuntimeError, match="keras_dp distributes the model itself and cannot run inside a tf.distribute scope"):
        tuner.search(*data, validation_data=data, verbose=0)


class Tuner(keras_tuner.RandomSearch):
    def run_trial(self, trial, x, y, wrapped, verbose):
        model = classifier(wrapped, trial.hyperparameters.Int("units", 4, 8, step=4))
        return model.fit(x, y, epochs=1, verbose=verbose).history["loss"][0]


def test_a_tuner_of_ones_own(data, tmp_path):
    def searched_by_it(wrapped):
        tuner = Tuner(max_trials=2, seed=SEED, directory=tmp_path, project_name=f"wrapped_{wrapped}")
        tuner.search(*data, wrapped, verbose=0)
        return tuner

    assert_same_trials(*both(searched_by_it))


class LoopOfItsOwn(keras_tuner.HyperModel):
    """Defines a model and a training loop as KerasTuner's guide does, which calls the callbacks itself."""

    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped

    def build(self, hyperparameters):
        return classifier(self.wrapped, hyperparameters.Int("units", 4, 12))

    def fit(self, hyperparameters, model, x, y, callbacks, epochs, **options):
        optimizer = keras.optimizers.Adam(hyperparameters.Float("learning_rate", 1e-3, 1e-1, sampling="log"))
        loss_of = keras.losses.SparseCategoricalCrossentropy()
        mean = keras.metrics.Mean()
        optimizer.build(model.trainable_variables)

        @tf.function
        def train(features, classes):
            with tf.GradientTape() as tape:
                loss = loss_of(classes, model(features, training=True))
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
            )
            mean.update_state(loss)

        for callback in callbacks:
            callback.set_model(model)
        for epoch in range(epochs):
            mean.reset_state()
            for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(10):
                train(*batch)
            for callback in callbacks:
                callback.on_epoch_end(epoch, logs={"loss": float(mean.result())})
        return float(mean.result())


def test_a_hypermodel_with_its_own_loop(data, tmp_path):
    def searched_with_it(wrapped):
        objective = keras_tuner.Objective("loss", "min")
        tuner = new_tuner(keras_tuner.RandomSearch, LoopOfItsOwn(wrapped), wrapped, tmp_path, objective)
        tuner.search(*data, epochs=2, verbose=0)
        return tuner

    tuners = both(searched_with_it)
    assert_same_trials(*tuners)
    assert_same_predictions(*(tuner.get_best_models()[0] for tuner in tuners), data)


def test_tuner_of_scikit_learn(data, tmp_path):
    def searched_by_it(wrapped):
        def build(hyperparameters):
            return scikeras_estimator(wrapped).set_params(batch_size=hyperparameters.Choice("batch_size", [8, 40]))

        oracle = oracles.GridSearchOracle(keras_tuner.Objective("score", "max"), max_trials=2)
        tuner = keras_tuner.SklearnTuner(oracle, build, cv=KFold(2), directory=tmp_path, project_name=f"wrapped_{wrapped}")
        tuner.search(*data)
        return tuner

    tuners = both(searched_by_it)
    assert_same_trials(*tuners)
    plain, parallel = (tuner.get_best_models()[0] for tuner in tuners)
    np.testing.assert_array_equal(parallel.predict(data[0]), plain.predict(data[0]))
