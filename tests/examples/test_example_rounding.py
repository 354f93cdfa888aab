"""The example that measures rounding compares what it says, sees a fault, and goes on after an interruption."""

import numpy as np
import pytest

NETWORKS = ("convolutions", "smooth_convolutions", "perceptron", "attention", "lstm")


@pytest.fixture
def example(example):
    return example("rounding")


def digits(count):
    """Random images and labels."""
    random = np.random.default_rng(0)
    return random.uniform(size=(count, 14, 14)).astype("float32"), random.integers(10, size=count)


@pytest.mark.parametrize("network", NETWORKS)
def test_towers_are_as_far_from_one_device_as_its_own_rows_in_another_order(example, network):
    """A wrong row, which stands for a fault, is much further."""
    distances = example.Measurement(network, "float32", [2]).measure(0, 3, digits(64), digits(8))["distances"]
    assert np.shape(list(distances.values())) == (3, 2)
    permuted, wrong, towers = (np.array(distances[run]) for run in (example.PERMUTED, example.WRONG, "2 towers"))
    assert (towers < 1e-4).all()
    assert (towers < 10 * permuted).all()
    assert (wrong > 100 * towers).all()


def test_a_run_does_not_depend_on_those_before(example):
    x, y = digits(48)
    training = example.Training("perceptron")
    starts = [example.build("perceptron", seed)[0].get_weights() for seed in (1, 2)]
    first, other, again = (training.run(start, x, y) for start in (*starts, starts[0]))
    np.testing.assert_array_equal(first, again)
    assert (first[-1] != other[-1]).any()


def test_permuted_rows_stay_in_their_batch_and_a_wrong_row_is_one_of_each(example):
    in_order, permuted, wrong = example.orders(seed=0, steps=5, images=64).values()
    assert in_order.shape == permuted.shape == wrong.shape == (5, example.BATCH_SIZE)
    assert sorted(in_order[:4].ravel()) == list(range(64))
    np.testing.assert_array_equal(np.sort(in_order, axis=1), np.sort(permuted, axis=1))
    assert (in_order != permuted).any(axis=1).all()
    assert ((in_order != wrong).sum(axis=1) == 1).all()
    np.testing.assert_array_equal(example.orders(seed=0, steps=5, images=64)[example.PERMUTED], permuted)


def test_the_measurement_goes_on_where_it_was_interrupted(example, tmp_path, monkeypatch, capsys):
    """Tables and figure have the medians and the range of all seeds."""
    measured = []

    class Measurement:
        def __init__(self, network, dtype, towers):
            self.name = network, dtype

        def measure(self, seed, steps, train_set, test_set):
            if len(measured) == interrupted_after:
                raise KeyboardInterrupt
            measured.append((*self.name, seed))
            towers = dict.fromkeys(("2 towers", "4 towers"), [1e-7 * (1 + seed)] * 2)
            distances = {example.PERMUTED: [1e-7] * 2, example.WRONG: [0.5] * 2} | towers
            return {"distances": distances, "accuracies": dict.fromkeys(("one device", *distances), 0.75)}

    def measure(steps, *arguments):
        monkeypatch.setattr("sys.argv", ["rounding.py", "--steps", steps, "--out", str(tmp_path), *arguments])
        example.main()

    monkeypatch.setattr(example, "Measurement", Measurement)
    monkeypatch.setattr(example.mnist, "load", lambda source: [(np.zeros((4, 28, 28, 1)), np.zeros(4))] * 2)
    arguments = ["3", "--seeds=3", "--other-seeds=1", "--networks", "perceptron", "lstm", "--dtypes", "float32", "bfloat16"]
    interrupted_after = 4
    with pytest.raises(KeyboardInterrupt):
        measure(*arguments)
    interrupted_after = None
    measure(*arguments)
    all_runs = [(network, "float32", seed) for network in ("perceptron", "lstm") for seed in range(3)]
    assert measured == [*all_runs, ("perceptron", "bfloat16", 0)]
    table = (tmp_path / "table.md").read_text()
    assert "| perceptron | 2 | 2 (1 to 3) |" in table
    assert "| perceptron | bfloat16 | 1e-07 | 1e-07 | 1e-07 | 5e-01 | 75.0 | 0.0 | 0.0 |" in table
    assert (tmp_path / "rounding.png").stat().st_size > 10_000
    assert capsys.readouterr().out.endswith("test accuracy 75.00 %\n")
    with pytest.raises(SystemExit, match="holds runs of other settings"):
        measure("10")
