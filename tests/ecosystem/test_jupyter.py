"""Notebooks run with wrapped models as with plain ones: cells run again, training goes on after errors, which name cells."""

import json
import re

import nbclient
import nbformat
import pytest
from comparison import assert_same

SETUP = """
import json
import signal

import keras
import numpy as np
import tensorflow as tf

import keras_dp

keras_dp.use_logical_cpus(2)
x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
"""
DEFINE = """
class Network(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="relu")
        self.classes = keras.layers.Dense(2, activation="softmax")

    def call(self, inputs):
        checked = tf.debugging.check_numerics(inputs, "broken")  # This line.
        return self.classes(self.hidden(checked))


keras.utils.clear_session()
keras.utils.set_random_seed(3)
model = Network()
model = keras_dp.DataParallelModel(model, devices=2) if wrapped else model
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
"""
FIT = """
history = model.fit(x, y, batch_size=8, epochs=2, validation_data=(x, y), verbose=1)
print(json.dumps(history.history))
"""
INTERRUPT = """
class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            signal.raise_signal(signal.SIGINT)


model.fit(x, y, batch_size=8, epochs=2, callbacks=[Stop()], verbose=0)
"""
CELLS = {
    "set up": SETUP,
    "define": DEFINE,
    "fit": FIT,
    "define again": DEFINE,
    "fit again": FIT,
    "interrupt": INTERRUPT,
    "go on": FIT,
    "fail": "model.fit(x * np.nan, y, batch_size=8, verbose=0)",
    "go on again": FIT,
    "show": "model",
    "explain": "model.explain((x[:8], y[:8])) if wrapped else None",
}


def run_notebook(wrapped):
    """Runs the cells in a kernel of their own, and returns the outputs of each."""
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in CELLS.values()]
    cells[0].source += f"\nwrapped = {wrapped}"
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, kernel_name="python3", timeout=200, allow_errors=True).execute()
    return {name: cell.outputs for name, cell in zip(CELLS, notebook.cells, strict=True)}


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory):
    """Runs the notebook with a plain model and with a wrapped one."""
    directory = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):  # They are in the home directory otherwise.
            monkeypatch.setenv(name, str(directory / name.lower()))
        return [run_notebook(wrapped) for wrapped in (False, True)]


def text(outputs, stream="stdout"):
    """Returns what a cell has printed, without colours."""
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == stream)
    return re.sub(r"\x1b\[[\d;]*m", "", printed)


def history(outputs):
    return json.loads(text(outputs).splitlines()[-1])


def error(outputs):
    return next(output for output in outputs if output.output_type == "error")


@pytest.mark.parametrize("cell", [name for name, source in CELLS.items() if source == FIT])
def test_fit(cell, notebooks):
    """Gives the same numbers in every cell that trains: the first, the one run again, and those after an error."""
    plain, parallel = (notebook[cell] for notebook in notebooks)
    assert_same(history(plain), history(parallel), 1e-4)
    ends = [re.findall(r"5/5 .*step - (.*)", text(outputs)) for outputs in (plain, parallel)]
    numbers = [[float(number) for end in epochs for number in re.findall(r": ([\d.]+)", end)] for epochs in ends]
    assert len(numbers[0]) == 8
    assert numbers[1] == pytest.approx(numbers[0], abs=2e-4)


def test_the_line_about_devices_comes_once_for_each_model(notebooks):
    line = "keras_dp: 2 towers on CPU:0 and CPU:1"
    assert {cell for cell, outputs in notebooks[1].items() if line in text(outputs, "stderr")} == {"fit", "fit again"}


def test_a_cell_run_again_gives_the_same(notebooks):
    for notebook in notebooks:
        assert_same(history(notebook["fit"]), history(notebook["fit again"]), 1e-4)
        assert history(notebook["go on"])["loss"][0] < history(notebook["fit again"])["loss"][1]


def test_training_is_interrupted(notebooks):
    for notebook in notebooks:
        assert error(notebook["interrupt"]).ename == "KeyboardInterrupt"


def test_an_error_names_the_line_of_the_cell(notebooks):
    plain, parallel = (error(notebook["fail"]) for notebook in notebooks)
    assert parallel.ename == plain.ename == "InvalidArgumentError"
    line = next(number for number, text in enumerate(DEFINE.strip().splitlines(), 1) if text.endswith("# This line."))
    cell = 1 + list(CELLS).index("define again")
    note = rf"keras_dp: \S+/CheckNumerics failed on tower \d \(CPU:\d\), at Cell In\[{cell}\], line {line}\."
    assert re.search(note, "\n".join(parallel.traceback))


def test_models_and_explanations_are_shown(notebooks):
    (shown,) = notebooks[1]["show"]
    assert shown.data["text/plain"] == "<DataParallelModel name=network, built=True, 2 towers on CPU:0 and CPU:1>"
    (explained,) = notebooks[1]["explain"]
    assert explained.data["text/plain"].startswith("2 towers on CPU:0, CPU:1")
