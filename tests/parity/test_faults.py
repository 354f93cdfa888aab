"""A fault in the middle of an epoch leaves all state as it was after the last whole step, and training goes on from there."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_script, largest_change, next_draws, twins, values
from keras import layers

import keras_dp

rng = np.random.default_rng(0)
ROWS, BATCH, FAULT = 28, 5, 4  # rows; rows in a batch, of which the last has three; the step with the fault
X, Y = rng.normal(size=(ROWS, 4)), rng.normal(size=(ROWS, 2))
CALLED = 3  # the steps before a callback fails, which is between two executions
BROKEN = FAULT * BATCH + BATCH - 1  # a row of the last tower in that step
MARK = 100.0
TOWERS = 3


class FaultError(Exception):
    """Is raised by a fault in Python."""


@keras.saving.register_keras_serializable("tests")
class Looking(layers.Layer):
    """Looks a marked value up where nothing is, so that the kernel of one tower fails."""

    def call(self, x):
        return x * tf.gather(tf.ones([1], x.dtype), tf.cast(tf.abs(x) > MARK / 2, tf.int32))


def checked_error(y_true, y_pred):
    tf.debugging.assert_less(tf.reduce_max(tf.abs(y_true)), tf.cast(MARK / 2, y_true.dtype), "marked target")
    return keras.losses.mean_squared_error(y_true, y_pred)


def build():
    hidden = [layers.Dense(5, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3, seed=1)]
    return keras.Sequential([keras.Input((4,)), Looking(), *hidden, layers.Dense(2)])


def marked(array):
    array = array.copy()
    array[BROKEN] = MARK
    return array


def failing_pipeline():
    dataset = tf.data.Dataset.from_tensor_slices((marked(X), Y)).batch(BATCH)
    return {"x": dataset.map(lambda x, y: (tf.debugging.check_numerics(tf.where(x > MARK / 2, x / 0.0, x), "data"), y))}


def failing_python():
    """Fails in a generator of a dataset."""
    sequence, signature = FailingSequence(), tuple(tf.TensorSpec((None, width), "float64") for width in (4, 2))
    return {"x": tf.data.Dataset.from_generator(lambda: map(sequence.__getitem__, range(9)), output_signature=signature)}


class FailingSequence(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, number):
        if number == FAULT:
            raise FaultError("no such file")
        return X[number * BATCH : number * BATCH + BATCH], Y[number * BATCH : number * BATCH + BATCH]


class FailingCallback(keras.callbacks.Callback):
    """Fails after some steps. Versions of Keras number the batches of one execution in other ways."""

    def __init__(self, event):
        super().__init__()
        setattr(self, event, self.fail)

    def on_train_begin(self, logs=None):
        self.begin = int(self.model.optimizer.iterations)

    def fail(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.begin + CALLED:
            raise FaultError("a callback")


FAULTS = {
    "kernel of one tower": lambda: {"x": marked(X), "y": Y},
    "loss": lambda: {"x": X, "y": marked(Y)},
    "input pipeline": failing_pipeline,
    "generator": failing_python,
    "sequence": lambda: {"x": FailingSequence()},
    "begin of a batch": lambda: {"x": X, "y": Y, "callbacks": [FailingCallback("on_train_batch_begin")]},
    "end of a batch": lambda: {"x": X, "y": Y, "callbacks": [FailingCallback("on_train_batch_end")]},
}


def train(model, x, y=None, **arguments):
    return model.fit(x, y, batch_size=None if y is None else BATCH, shuffle=False, verbose=0, **arguments).history


def draw_from(seed):
    """Sets all seeds. Keras 3.8 keeps the state of its own generator unless the session is cleared."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)


def of_each_step(model):
    """Returns the variables that a step changes whatever its batch is: the step count and the states of random layers."""
    seeds = [variable for variable in getattr(model, "inner_model", model).variables if "seed" in variable.path]
    return [model.optimizer.iterations, *seeds]


def state_of(model):
    """Returns all else that a step changes, and the next random numbers."""
    others = {id(variable) for variable in of_each_step(model)}
    groups = {
        "model": getattr(model, "inner_model", model).variables,
        "optimizer": model.optimizer.variables,
        "metrics": [variable for metric in model.metrics for variable in metric.variables],
    }
    kept = {name: [np.asarray(each) for each in group if id(each) not in others] for name, group in groups.items()}
    return kept | {"draws": next_draws()}


# A step fails, or its batch, when another one of the same execution has ended.
IN_ONE_EXECUTION = ["kernel of one tower", "sequence"]


@pytest.mark.parametrize(("steps_per_execution", "faults"), [(1, list(FAULTS)), (3, IN_ONE_EXECUTION)])
def test_a_fault_leaves_the_state_of_the_last_whole_step(steps_per_execution, faults):
    """A failed step counts as a step, and draws its random numbers, as in plain Keras. It changes nothing else."""
    one, inner = twins(build)
    parallel = keras_dp.DataParallelModel(inner, devices=TOWERS)
    for model, steps in ((one, 1), (parallel, steps_per_execution)):
        model.compile(keras.optimizers.Adam(0.01), checked_error, metrics=["mae"], steps_per_execution=steps)

    for fault in faults:
        before = int(parallel.optimizer.iterations)
        draw_from(5)
        with pytest.raises((FaultError, tf.errors.OpError)):
            train(parallel, **FAULTS[fault]())
        received = state_of(parallel)
        steps = int(parallel.optimizer.iterations) - before
        whole, rest = divmod(int(parallel.metrics[1].variables[1]), BATCH)
        assert rest == 0, fault
        if "batch" in fault:
            assert whole == CALLED == steps, fault
        else:
            assert FAULT - steps_per_execution < whole <= FAULT, fault
            assert whole <= steps <= whole + steps_per_execution, fault

        draw_from(5)
        train(one, X[: whole * BATCH], Y[: whole * BATCH])
        expected = state_of(one)
        assert_same(expected, received, 1e-9, fault)
        for variable, other in zip(of_each_step(one), of_each_step(parallel), strict=True):
            variable.assign(other)

        results = [(train(model, X, Y), model.get_weights(), values(model.optimizer)) for model in (one, parallel)]
        assert_same(*results, 1e-9, f"{fault}, trained on")
        assert largest_change(expected["model"][:1], [np.asarray(inner.trainable_variables[0])]) > 1e-6, fault


@pytest.mark.parametrize(("row", "number", "steps_per_execution"), [(0, np.nan, 1), (BATCH - 1, -np.inf, 3)])
def test_a_number_that_is_none_in_one_tower_does_what_it_does_in_plain_keras(row, number, steps_per_execution):
    """It spoils what depends on it, here one of two outputs, and nothing else."""
    y = Y.copy()
    y[FAULT * BATCH + row, 1] = number

    def two_outputs():
        x = keras.Input((4,))
        return keras.Model(x, [layers.Dense(1, name="good")(x), layers.Dense(1, name="spoiled")(x)])

    def script(model):
        model.compile("adam", ["mse", "mse"], metrics=["mae", "mae"], steps_per_execution=steps_per_execution)
        return train(model, X, [y[:, :1], y[:, 1:]], epochs=2)

    _, parallel = assert_same_script(two_outputs, script, TOWERS)
    good, spoiled = (parallel.inner_model.get_layer(name).get_weights() for name in ("good", "spoiled"))
    assert all(np.isfinite(weight).all() for weight in good)
    assert all(np.isnan(weight).all() for weight in spoiled)


class Unfinished(keras.Sequential):
    """Fails when its step is traced for the first time, after the optimizer has made its variables."""

    is_finished = False

    def train_step(self, data):
        logs = super().train_step(data)
        if not self.is_finished:
            self.is_finished = True
            raise FaultError("in the trace")
        return logs


def test_after_an_error_in_the_first_trace_the_model_is_compiled_again():
    """The variables that the trace was making have no values, in plain Keras as well."""

    def build():
        return Unfinished([keras.Input((4,)), layers.Dense(5), layers.BatchNormalization(), layers.Dense(2)])

    def script(model):
        model.compile(keras.optimizers.Adam(0.01), "mse")
        with pytest.raises(FaultError):
            train(model, X, Y)
        assert [slot.numpy().size for slot in model.optimizer.variables[2:]] == [0] * 12
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return train(model, X, Y, epochs=2)

    assert_same_script(build, script, TOWERS)
