"""`keras-dp bench` measures Keras on PyTorch, in one process and with DistributedDataParallel."""

import json

import pytest

from keras_dp.cli import main, runs
from keras_dp.cli.bench import loopback
from keras_dp.cli.runs import Run, RunFailedError

USER_MODULE = """
import keras

def of_two_inputs():
    words, image = keras.Input((5,), dtype="int32", name="words"), keras.Input((4, 4, 1), name="image")
    embedded = keras.layers.Flatten()(keras.layers.Embedding(11, 3)(words))
    x = keras.layers.Concatenate()([embedded, keras.layers.Flatten()(image)])
    model = keras.Model([words, image], keras.layers.Dense(2)(x))
    model.compile("adam", "mae")
    return model

def broken():
    raise RuntimeError("this model cannot be built")
"""


@pytest.fixture
def user_directory(tmp_path, monkeypatch):
    (tmp_path / "user_models.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)


def test_processes_send_each_other_the_gradients(user_directory):
    of_two = Run("ddp", 2, 32, "mlp", workers=2, steps=3, warm_up=1)
    measured = runs.measure_in_new_process(of_two)
    assert len(measured.step_milliseconds) == 3
    if loopback.DEVICES.exists():
        assert measured.communication_bytes > 2 * 4 * 669_706  # the weights of the MLP
    with pytest.raises(RunFailedError, match="this model cannot be built"):
        runs.measure_in_new_process(Run("ddp", 2, 4, "user_models:broken", workers=2))


def test_a_model_of_the_user(user_directory, capsys):
    arguments = "bench --model user_models:of_two_inputs --towers 2 --batch 6 --against torch,ddp --rounds 1 --steps 2 --json"
    assert main(arguments.split()) == 0
    of_keras_dp, ceiling, of_one_process, of_two = json.loads(capsys.readouterr().out)["rows"]
    assert [row["engine"] for row in (of_keras_dp, ceiling, of_one_process, of_two)] == ["keras_dp", "ceiling", "torch", "ddp"]
    assert of_two["speed_up"] == pytest.approx(of_one_process["median_milliseconds"] / of_two["median_milliseconds"])
    assert (of_one_process["communication_megabytes"], of_one_process["speed_up"], of_two["loss"]) == (0.0, 1.0, None)
