"""Estimators of scikit-learn, from Keras and from scikeras, work with wrapped models."""

import pickle

import keras
import numpy as np
import pytest
import sklearn.base
from classification import both, classifier
from comparison import assert_same
from scikeras.wrappers import KerasClassifier
from sklearn.model_selection import GridSearchCV, cross_val_predict

import keras_dp


def one_hot_classifier(wrapped):
    """Builds a `classifier` for targets with a column for each class, which Keras's estimator passes."""
    model = classifier(wrapped)
    model.compile(keras.optimizers.Adam(0.01), "categorical_crossentropy", metrics=["accuracy"])
    return model


def keras_estimator(wrapped):
    return keras.wrappers.SKLearnClassifier(one_hot_classifier(wrapped), fit_kwargs={"epochs": 2, "verbose": 0})


def scikeras_estimator(wrapped):
    return KerasClassifier(classifier(wrapped), epochs=2, verbose=0, shuffle=False)


def probabilities(estimator, x):
    return estimator.model_.predict(x, verbose=0)


@pytest.mark.parametrize("estimator", [keras_estimator, scikeras_estimator])
def test_fit_predict_and_pickle(estimator, data):
    def fitted(wrapped):
        model = estimator(wrapped)
        keras.utils.set_random_seed(5)
        return model.fit(*data)

    plain, parallel = both(fitted)
    np.testing.assert_allclose(probabilities(parallel, data[0]), probabilities(plain, data[0]), rtol=1e-4)
    np.testing.assert_array_equal(parallel.predict(data[0]), plain.predict(data[0]))
    assert isinstance(parallel.model_, keras_dp.DataParallelModel)
    loaded = pickle.loads(pickle.dumps(parallel))
    assert not isinstance(loaded.model_, keras_dp.DataParallelModel)
    np.testing.assert_allclose(probabilities(loaded, data[0]), probabilities(parallel, data[0]), rtol=1e-5)


@pytest.mark.parametrize("estimator", [keras_estimator, scikeras_estimator])
def test_an_estimator_and_its_clone_are_trained_apart(estimator, data):
    first = estimator(wrapped=True)
    clone = sklearn.base.clone(first)
    assert isinstance(clone.model, keras_dp.DataParallelModel)
    before = first.model.get_weights()
    clone.fit(*data)
    assert_same(before, first.model.get_weights(), 0)


@pytest.mark.parametrize("jobs", [1, 2])
def test_grid_search(jobs, data):
    """With several processes, each trains the plain model on a separate device."""
    x, y = data
    search = GridSearchCV(scikeras_estimator(wrapped=True), {"batch_size": [5, 10]}, n_jobs=jobs, cv=2, error_score="raise")
    search.fit(x, y)
    assert set(search.cv_results_["param_batch_size"]) == {5, 10}
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()


def test_cross_validation(data):
    predicted = cross_val_predict(keras_estimator(wrapped=True), *data, cv=2)
    assert predicted.shape == (40,)
