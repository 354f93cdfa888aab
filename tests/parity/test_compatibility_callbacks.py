"""Every callback of Keras, and custom callbacks, see and do the same on towers as on one device."""

import contextlib
import csv
import functools
import inspect
import json
import re
import sys
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparison import assert_same, assert_same_script, largest_change, same_on_towers, twins, values
from keras import callbacks, layers, optimizers
from newest_keras import IS_NEWEST

import keras_dp

rng = np.random.default_rng(0)
# Batches of 7, 7, 7 and 2 rows: all are uneven on three towers, and the last one has fewer rows than towers.
X, Y = rng.normal(size=(23, 4)), rng.normal(size=(23, 2))
# The loss on these data first falls and then rises.
VALIDATION = X[:10] + 0.3, 0.3 - Y[:10]

HOOKS = [f"on_{phase}_{when}" for phase in ("train", "test", "predict", "epoch") for when in ("begin", "end")]
HOOKS += [f"on_{phase}_batch_{when}" for phase in ("train", "test", "predict") for when in ("begin", "end")]


def multi_optimizer(**options):
    fast = optimizers.Adam(0.05, name="fast", **options)
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.05, name="slow"), {"head/.*": fast}))


def loss_scale_optimizer(**options):
    return optimizers.LossScaleOptimizer(optimizers.Adam(0.05, name="adam", **options), initial_scale=8.0)


def build():
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Dense(3, "tanh", name="body")(inputs)), name="users")


def compiled(model, optimizer=None, **arguments):
    model.compile(optimizer or optimizers.Adam(0.05, name="adam"), "mse", metrics=["mae"], **arguments)
    return model


def train(model, *given, **arguments):
    """Fits with callbacks, and returns the history's numbers."""
    arguments = {"batch_size": 7, "epochs": 3, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(X, Y, callbacks=list(given), **arguments).history


def folder_of(model, path):
    """Returns a folder for the files of one of the two models."""
    folder = path / type(model).__name__
    folder.mkdir(exist_ok=True)
    return folder


class Recorder(callbacks.Callback):
    """Keeps every call of a hook in order: its name, its index, the names and types in its logs, and the logs' values."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def record(self, hook, index_or_logs=None, logs=None):
        index, logs = (index_or_logs, logs) if re.search("epoch|batch", hook) else (None, index_or_logs)
        described = [f"{name}: {type(value).__name__}" for name, value in (logs or {}).items()]
        self.calls[f"{len(self.calls):03} {hook} {index} {described}"] = dict(logs or {})


for name in HOOKS:
    setattr(Recorder, name, functools.partialmethod(Recorder.record, name))


@same_on_towers(build, 3)
def test_callback_hooks(model):
    """Each hook is called at the same points, with the same index and logs as in plain Keras, in fit, evaluate and predict."""
    compiled(model)
    recorder = Recorder()
    train(model, recorder, validation_data=VALIDATION, validation_freq=2, epochs=2)
    params = [recorder.params]
    model.evaluate(X, Y, batch_size=7, callbacks=[recorder], verbose=0)
    params.append(recorder.params)
    model.predict(X, batch_size=7, callbacks=[recorder], verbose=0)
    assert {key.split()[1] for key in recorder.calls} == set(HOOKS)
    return recorder.calls, params, recorder.params


@same_on_towers(build, 3)
def test_history_lambda_callback_and_callback_list(model):
    """A user's CallbackList is used, whose History is `model.history`. Hooks of batches follow three steps, or the last one."""
    compiled(model, steps_per_execution=3)
    history, seen = callbacks.History(), []
    watch = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((batch, logs)))
    given = callbacks.CallbackList([[history], watch], model=model, add_history=True, epochs=2, steps=4, verbose=0)
    for _ in range(2):
        fitted = model.fit(X, Y, batch_size=7, epochs=2, shuffle=False, callbacks=given)
        assert fitted is history is model.history
        assert history.model is model
    assert len(seen) == 2 * 2 * 2
    return history.history, history.epoch, history.params, seen


def without_times(text):
    """Removes from a progress bar's text times, colours, and the spaces and backspaces that depend on the times' lengths."""
    return " ".join(re.sub(r"\x1b\[\d+m|\x08|\d+(:\d+)*(:\d\d|us|ms|s)(/step|/epoch)?", " ", text).split())


def test_progress_bar(monkeypatch, capsys):
    """With `verbose=1` and `verbose=2`, and with a user's ProgbarLogger, the text is the same except for times."""
    every_update = functools.partialmethod(keras.utils.Progbar.__init__, interval=-1)
    monkeypatch.setattr(keras.utils.Progbar, "__init__", every_update)
    one, inner = twins(build)
    shown = []
    for model in (one, keras_dp.DataParallelModel(inner, devices=3)):
        compiled(model)
        texts = []
        for verbose in (1, 2):
            train(model, callbacks.ProgbarLogger(), epochs=2, verbose=verbose, validation_data=VALIDATION)
            model.evaluate(X, Y, batch_size=7, verbose=verbose)
            model.predict(X, batch_size=7, verbose=verbose)
            texts.append(without_times(capsys.readouterr().out))
        shown.append(texts)
    assert shown[0] == shown[1]
    bar, lines = shown[0]
    assert "1/4" in bar
    assert "Epoch 2/2" in lines
    assert all("val_mae: " in text for text in shown[0])


@same_on_towers(build, 3)
def test_callback_model_optimizer_is_the_users(model):
    """A callback can set and read its options, and find its variables. It sets the rate on every batch."""
    options = {"momentum": 0.6, "nesterov": True, "use_ema": True, "ema_momentum": 0.8, "weight_decay": 0.01, "clipnorm": 0.7}
    seen = []

    class Sets(callbacks.Callback):
        def on_train_begin(self, logs=None):
            # The step reads them once, when it is traced after this.
            for name, value in options.items():
                setattr(self.model.optimizer, name, value)

        def on_train_batch_begin(self, batch, logs=None):
            optimizer = self.model.optimizer
            step = int(optimizer.iterations.numpy())
            if step % 2:
                optimizer.learning_rate = 0.01 * (step + 1)
            else:
                optimizer.learning_rate.assign(0.02 / (step + 1))
            seen.append((step, float(optimizer.learning_rate), float(keras.ops.convert_to_numpy(optimizer.iterations))))

        def on_epoch_end(self, epoch, logs=None):
            optimizer = self.model.optimizer
            assert {name: getattr(optimizer, name) for name in options} == options
            seen.append([variable.numpy() for variable in optimizer.momentums])
            seen.append({optimizer.name: len(optimizer.variables)})

    return train(compiled(model, optimizers.SGD(0.05, name="mine")), Sets()), seen


@same_on_towers(build, 3)
def test_callback_stops(model, capsys):
    """Covers `stop_training`, `stop_evaluating` and `stop_predicting`, in the middle of an epoch, and TerminateOnNaN."""
    compiled(model)

    class Stop(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = self.model.optimizer.iterations.numpy() == 6

        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = batch == 1

        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = batch == 2

    history = train(model, Stop())
    evaluation = model.evaluate(X, Y, batch_size=7, callbacks=[Stop()], verbose=0)
    predictions = model.predict(X, batch_size=7, callbacks=[Stop()], verbose=0)
    assert len(history["loss"]) == 2
    assert len(predictions) == 21
    results = history, evaluation, predictions, train(model)
    targets = Y.copy()
    targets[8] = 1e200  # Its square is infinite, but its gradient is finite.
    compiled(model, optimizers.SGD(1e-3))
    infinite = model.fit(X, targets, batch_size=7, shuffle=False, callbacks=[callbacks.TerminateOnNaN()], verbose=0)
    assert "Batch 1: Invalid loss, terminating training" in capsys.readouterr().out
    return results, infinite.history


def content(path):
    """Loads a file with plain Keras, and returns the weights, the optimizer's state, and the classes of both."""
    if path.name.endswith(".weights.h5"):
        model = compiled(build())
        model.optimizer.build(model.trainable_variables)
        model.load_weights(path)
    else:
        model = keras.models.load_model(path)
    key = f"{type(model).__name__} {type(model.optimizer).__name__} {int(model.optimizer.iterations)}"
    return {key: (model.get_weights(), values(model.optimizer))}


@same_on_towers(build, 3)
def test_model_checkpoint(model, tmp_path):
    """Plain Keras loads each file: of whole models, weights only, the best only, and every few batches."""
    folder = folder_of(model, tmp_path)
    checkpoint = callbacks.ModelCheckpoint
    train(
        compiled(model, optimizers.Adam(0.5)),
        checkpoint(folder / "whole-{epoch}.keras"),
        checkpoint(folder / "{epoch}-{mae:.2f}.weights.h5", save_weights_only=True),
        checkpoint(folder / "best-{epoch}.keras", monitor="val_mae", save_best_only=True),
        checkpoint(folder / "better-{epoch}.keras", monitor="loss", save_best_only=True, initial_value_threshold=0.0),
        checkpoint(folder / "batch-{epoch}-{batch}.keras", save_freq=5),
        validation_data=VALIDATION,
    )
    paths = sorted(folder.iterdir())
    kinds = [re.match("[a-z]*", path.name).group() for path in paths]
    assert {kind: kinds.count(kind) for kind in kinds} == {"": 3, "batch": 2, "best": 2, "whole": 3}
    return {path.name: content(path) for path in paths}


def stopped_and_resumed(devices, backup, batch):
    """Trains one model after the other from a backup, stops all but the last, and returns the results of the last."""
    arguments = {"save_freq": 3} if batch else {"double_checkpoint": True}
    for i, number in enumerate(devices):
        keras.utils.set_random_seed(3 if i == 0 else 4)
        model = build() if number is None else keras_dp.DataParallelModel(build(), devices=number)
        is_last = i + 1 == len(devices)

        def stop(batch_now, logs, model=model, step=4 * (i + 1) + batch, is_last=is_last):
            if int(model.optimizer.iterations) == step and not is_last:
                raise InterruptedError

        given = [callbacks.BackupAndRestore(backup, **arguments), callbacks.LambdaCallback(on_train_batch_begin=stop)]
        with contextlib.nullcontext() if is_last else pytest.raises(InterruptedError):
            history = train(compiled(model), *given, epochs=4)
        assert backup.exists() is not is_last
    return history, model.history.epoch, model.get_weights(), values(model.optimizer)


@pytest.mark.parametrize(
    ("devices", "batch"), [((None, 3, 2, None), 0), ((3, 2), 3)], ids=["other towers and one device", "amid an epoch"]
)
def test_backup_and_restore(tmp_path, devices, batch):
    """Other models resume: between epochs as if never stopped, within an epoch as plain Keras, which repeats the epoch."""
    if batch:
        expected = stopped_and_resumed([None] * len(devices), tmp_path / "backup", batch)
    else:
        keras.utils.set_random_seed(3)
        whole = compiled(build())
        history = {name: numbers[3:] for name, numbers in train(whole, epochs=4).items()}
        expected = history, [3], whole.get_weights(), values(whole.optimizer)
    assert_same(expected, stopped_and_resumed(devices, tmp_path / "backup", batch), 1e-9)


@pytest.mark.parametrize("optimizer", [loss_scale_optimizer, multi_optimizer])
@same_on_towers(build, 3)
def test_learning_rate_scheduler_and_reduce_on_plateau(model, optimizer):
    schedule = callbacks.LearningRateScheduler(lambda epoch, rate: rate * (0.9 if epoch else 1.5))
    plateau = callbacks.ReduceLROnPlateau("mae", 0.3, patience=1, min_delta=10.0, cooldown=1, min_lr=0.002)
    history = train(compiled(model, optimizer()), schedule, plateau, epochs=7)
    rates = [history[name] for name in history if "learning_rate" in name]
    names = {"learning_rate_slow", "learning_rate_fast"} if optimizer is multi_optimizer else {"learning_rate"}
    assert names < set(history)
    assert all(min(each) < 0.5 * 0.9**7 * max(each) for each in rates)
    return history


@pytest.mark.parametrize(("optimizer", "swap_on_epoch"), [(loss_scale_optimizer, False), (multi_optimizer, True)])
@same_on_towers(build, 3)
def test_swap_ema_weights(model, optimizer, swap_on_epoch):
    """Validation, evaluation and prediction see the moving averages; with `swap_on_epoch`, later callbacks do as well."""
    swap, seen = callbacks.SwapEMAWeights(swap_on_epoch), []
    watch = callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(model.get_weights()),
        on_test_begin=lambda logs: seen.append(model.get_weights()),
        on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()),
    )
    history = train(
        compiled(model, optimizer(use_ema=True, ema_momentum=0.7)), swap, watch, validation_data=VALIDATION, epochs=2
    )
    batch, validation, epoch = seen[-3:]
    assert largest_change(batch, validation) > 1e-3
    assert bool(largest_change(batch, epoch) > 1e-3) is swap_on_epoch
    evaluation = model.evaluate(X, Y, batch_size=7, verbose=0, callbacks=[callbacks.SwapEMAWeights()])
    return history, seen, evaluation, model.predict(X, verbose=0, callbacks=[callbacks.SwapEMAWeights()])


def events(folder):
    """Returns all summaries in the event files of a folder: {file's folder, tag and step: value}."""
    found = {}
    for path in sorted(folder.rglob("*tfevents*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                array = tf.make_ndarray(value.tensor)
                # An image consists of its width, its height and its bytes.
                array = [list(part) for part in array] if array.dtype == object and array.ndim else array
                found[f"{path.parent.name} {value.tag} {event.step}"] = array
    return found


def test_tensorboard(tmp_path):
    """All summaries are the same but for times: of epochs, batches and evaluations, with images, embeddings and the graph."""
    options = {"histogram_freq": 1, "write_images": True, "embeddings_freq": 2, "update_freq": "batch"}
    found = []

    def script(model):
        folder = folder_of(model, tmp_path)
        evaluation = folder / "evaluation"
        evaluation.mkdir()
        watch = callbacks.TensorBoard(folder, **options, profile_batch=(2, 3), write_steps_per_second=True)
        history = train(compiled(model, loss_scale_optimizer()), watch, validation_data=VALIDATION)
        model.evaluate(X, Y, batch_size=7, callbacks=[callbacks.TensorBoard(evaluation, **options)], verbose=0)
        found.append(events(folder))
        assert len(list(folder.rglob("*.xplane.pb"))) == 1
        return history, sorted(item.name for item in folder.rglob("*") if item.suffix in (".h5", ".pbtxt"))

    assert_same_script(build, script, 3)
    expected, received = found
    graph, other = (json.loads(each.pop("train keras 0").item()) for each in found)
    assert graph == other
    assert graph["config"]["name"] == "users"
    assert set(expected) == set(received)
    names = ["train epoch_loss 2", "validation epoch_mae 1", "train epoch_learning_rate 0", "train body/kernel/histogram 2"]
    names += ["validation evaluation_loss_vs_iterations 12", "train head/bias/image 1", "train batch_mae 12"]
    assert set(names) <= set(expected) or not IS_NEWEST
    timed = [name for name in expected if "per_second" in name or name.startswith("train batch_3 ")]
    assert len(timed) == 12 + 3 + 1
    for name in timed:
        del expected[name], received[name]
    assert_same(expected, received, 1e-6)  # Scalars are kept in float32.


@same_on_towers(build, 3)
def test_csv_logger_and_remote_monitor(model, tmp_path, monkeypatch):
    """Covers `append=True`, and epochs without validation. The server gets a form and JSON."""
    path, received = folder_of(model, tmp_path) / "log.csv", []

    def post(url, data=None, **content):
        received.append((url, json.loads(data["data"] if data else json.dumps(content["json"]))))

    monkeypatch.setattr("requests.post", post)
    monitors = [callbacks.RemoteMonitor("http://a", path="/form"), callbacks.RemoteMonitor("http://a", send_as_json=True)]
    compiled(model)
    for append in (False, True):
        logger = callbacks.CSVLogger(path, separator=";", append=append)
        train(model, logger, *monitors, epochs=2, validation_data=VALIDATION, validation_freq=2)
    with path.open() as file:
        rows = list(csv.reader(file, delimiter=";"))
    assert rows[0] == ["epoch", "loss", "mae", "val_loss", "val_mae"]
    assert [row.count("NA") for row in rows[1:]] == [2, 0, 2, 0]
    assert [url for url, _ in received] == ["http://a/form", "http://a/publish/epoch/end/"] * 4
    assert set(received[0][1]) == {"epoch", "loss", "mae"}
    return [[float(value.replace("NA", "nan")) for value in row] for row in rows[1:]], [sent for _, sent in received]


@same_on_towers(build, 3)
def test_orbax_checkpoint(model, monkeypatch):
    """Covers whole models, weights only, and every few batches. A mock replaces Orbax, which Keras does not include."""
    saved = []

    def checkpointer(directory, **policies):
        made = mock.MagicMock()
        made.save_checkpointables = lambda step, payload: saved.append((f"{directory} {step}", payload))
        return made

    orbax = mock.MagicMock()
    orbax.training.Checkpointer = checkpointer
    monkeypatch.setattr(sys.modules[callbacks.OrbaxCheckpoint.__module__], "ocp", orbax)
    checkpoint = functools.partial(callbacks.OrbaxCheckpoint, save_on_background=False)
    given = checkpoint("weights", save_weights_only=True), checkpoint("whole"), checkpoint("batch", save_freq=3)
    train(compiled(model), *given, epochs=2)
    assert [name for name, _ in saved] == ["batch 3", "weights 0", "whole 0", "batch 6", "weights 1", "whole 1"]
    # Objects in a configuration are numbered by their addresses.
    configurations = [re.sub(r'"shared_object_id": \d+', "", str(payload.get("model_config"))) for _, payload in saved]
    assert ["Adam" in configuration for configuration in configurations] == [True, False, True] * 2
    return {name: payload["pytree"] for name, payload in saved}, configurations


@pytest.mark.filterwarnings("ignore:Early stopping conditioned on metric `val_loss`")
@pytest.mark.filterwarnings("ignore:Can save best model only with val_mae available")
@same_on_towers(build, 3)
def test_several_callbacks_at_once(model, tmp_path):
    """Callbacks run in the given order, and validate every other epoch."""
    folder = folder_of(model, tmp_path)
    stopping = callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    history = train(
        compiled(model, optimizers.SGD(0.1, 0.9, use_ema=True, ema_momentum=0.5)),
        callbacks.SwapEMAWeights(swap_on_epoch=True),
        callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate),
        callbacks.ReduceLROnPlateau("loss", 0.5, patience=0, min_delta=10.0),
        callbacks.ModelCheckpoint(folder / "best.keras", monitor="val_mae", save_best_only=True),
        stopping,
        epochs=7,
        validation_data=VALIDATION,
        validation_freq=2,
    )
    assert 2 < len(history["loss"]) < 7
    return history, stopping.best_epoch, stopping.best, {path.name: content(path) for path in sorted(folder.iterdir())}


def test_every_callback_of_keras_is_tested():
    public = {name for name, value in vars(callbacks).items() if inspect.isclass(value) and not name.startswith("_")}
    tested = set(re.findall(r"\bcallbacks\.([A-Z]\w+)", Path(__file__).read_text(encoding="utf-8")))
    assert tested == public if IS_NEWEST else public <= tested
