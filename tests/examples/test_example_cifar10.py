"""The example on CIFAR-10 has the right network, rates and pipeline, and its comparison resumes after an interruption."""

import argparse
import itertools

import keras
import numpy as np
import pytest


def test_the_network_is_that_of_the_paper(example):
    """He et al. 2016, table 6, counts 0.27 million parameters. Blocks begin as the identity: only their last gains are zero."""
    model = example("cifar10_resnet").resnet(20)
    weighted = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D | keras.layers.Dense)]
    assert len(weighted) == 20
    assert sum(int(np.prod(variable.shape)) for variable in model.trainable_variables) == 269_722
    gains = [layer.gamma.numpy() for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert [not gain.any() for gain in gains] == [False, *[False, True] * 9]


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        ("none", [0.8] * 6 + [0.08] * 2 + [0.008] * 2),
        ("constant", [0.1] * 4 + [0.8] * 2 + [0.08] * 2 + [0.008] * 2),
        ("gradual", [0.1, 0.275, 0.45, 0.625] + [0.8] * 2 + [0.08] * 2 + [0.008] * 2),
    ],
)
def test_rates(example, warmup, expected):
    options = argparse.Namespace(base_learning_rate=0.1, warmup_epochs=2, epochs=5)
    schedule = example("cifar10_resnet").learning_rate(options, 8, warmup, steps_per_epoch=2)
    # Keras's piecewise schedule changes after its boundaries.
    steps = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    np.testing.assert_allclose([float(schedule(step)) for step in steps], expected, rtol=1e-5)


def test_batches_are_all_images_in_another_order_cropped_and_flipped(example):
    images = np.random.default_rng(0).normal(size=(20, 32, 32, 3)).astype("float32")
    batches, again = (example("data.cifar10").augmented_batches(images, np.arange(20), 8, seed=1) for _ in range(2))
    epochs = [list(batches.as_numpy_iterator()) for _ in range(2)]
    orders = [np.concatenate([labels for _, labels in epoch]) for epoch in epochs]
    assert [len(labels) for _, labels in epochs[0]] == [8, 8, 4]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert (orders[0] != orders[1]).any()
    np.testing.assert_array_equal(next(again.as_numpy_iterator())[0], epochs[0][0][0])
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    flips = []
    for image, label in zip(*epochs[0][0], strict=True):
        flips += [
            flipped
            for top, left, flipped in itertools.product(range(9), range(9), (False, True))
            if (padded[label, top : top + 32, left : left + 32][:, :: -1 if flipped else 1] == image).all()
        ]
    assert len(flips) == 8
    assert 0 < sum(flips) < 8


def test_what_is_wrong_is_refused(example, tmp_path):
    with pytest.raises(ValueError, match="6 n \\+ 2: 8, 14, 20, 32, 56. Received: depth=21"):
        example("cifar10_resnet").resnet(21)
    data = example("data.cifar10")
    with pytest.raises(FileNotFoundError, match="no file with images at this path"):
        data.load(tmp_path / "none.npz")
    np.savez(tmp_path / "half.npz", x_train=np.zeros((1, 32, 32, 3)))
    with pytest.raises(ValueError, match="lacks y_train, x_test, y_test"):
        data.load(tmp_path / "half.npz")


def test_the_comparison_goes_on_where_it_was_interrupted(example, tmp_path, capsys):
    comparison = example("large_batch_comparison")
    sizes = {"depth": 8, "towers": 4, "batch_size": 64, "base_batch_size": 16, "images": None, "seeds": 2}
    modes = {"batch_norms": ["local", "sync"], "base_learning_rate": 0.1, "warmup_epochs": 1, "epochs": 2}
    args = argparse.Namespace(**sizes, **modes, out=tmp_path)
    data = ((np.zeros((6, 2)), np.zeros(6)), (np.zeros((3, 2)), np.zeros(3)))
    trained = []

    def train(args, train_set, test_set, towers, batch_size, scale, warmup, mode, seed, verbose):
        if len(trained) == interrupted_after:
            raise KeyboardInterrupt
        trained.append((towers, batch_size, scale, warmup, mode, seed))
        return {"accuracy": [0.5, 0.6], "val_accuracy": [0.4, 0.5 + 0.1 * seed]}, None

    interrupted_after = 5
    with pytest.raises(KeyboardInterrupt):
        comparison.compare(args, data, train)
    interrupted_after = None
    comparison.compare(args, data, train)
    large = [(1, "none"), (4, "none"), (4, "constant"), (4, "gradual")]
    of_a_seed = [(1, 16, 1, "none", "sync"), *[(4, 64, *row, mode) for mode in ("local", "sync") for row in large]]
    assert trained == [(*run, seed) for seed in range(2) for run in of_a_seed]
    assert "5 of 18: gradual warm-up, local, seed 0: test accuracy 50.0 %, from an earlier run" in capsys.readouterr().out
    table = (tmp_path / "table.md").read_text()
    assert "| small batch | 16 | 0.10 | one device | 45.0 ± 7.1 |" in table
    assert "| gradual warm-up | 64 | 0.40 | sync | 45.0 ± 7.1 |" in table
    assert (tmp_path / "large_batches.png").stat().st_size > 10_000
    # Other settings are other runs.
    args.epochs = 3
    trained.clear()
    interrupted_after = 1
    with pytest.raises(KeyboardInterrupt):
        comparison.compare(args, data, train)
    assert len(trained) == 1
