"""Published kinds of programs, most with custom training steps, train on towers as they do on one device."""

import functools
import re
from pathlib import Path

import keras
import numpy as np
import pytest
from comparison import assert_same_run, plain_run, training
from programs import adversarial, contrastive, distillation, generative, sequences, traps, vision  # noqa: F401
from programs.catalogue import PROGRAMS

from keras_dp.keras_internals.graph_optimizer import graph_optimizer
from keras_dp.steps.partitioned import StepOnSlices

PARTITION = Path(__file__).parents[2] / "docs" / "partition.md"
PAGE = PARTITION.read_text(encoding="utf-8").partition("## Which programs gather rows")[2]
GATHERED = {
    name: set(re.findall(r"`(\w+)`", types)) for name, types in re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGE, re.MULTILINE)
}


@pytest.fixture
def gathered(monkeypatch):
    """Collects the types of operations that the steps traced during a test compute once, from gathered rows."""
    types = set()
    run = StepOnSlices.run

    def recording(*args, **options):
        result, partition = run(*args, **options)
        types.update(once.type for once in partition.gathered)
        return result, partition

    monkeypatch.setattr(StepOnSlices, "run", recording)
    return types


# The page has what is gathered on three towers; all other programs take turns.
TOWERS = [(name, 3 if name in GATHERED else 2 + i % 3) for i, name in enumerate(PROGRAMS)]


@pytest.mark.parametrize(("name", "towers"), TOWERS)
def test_program_trains_as_on_one_device(name, towers, gathered):
    """Rows are gathered for the operations that docs/partition.md lists, and for no others."""
    assert_same_run(*program(name), towers, plain(name))
    assert gathered == GATHERED.get(name, set())


@pytest.fixture
def even_batches(monkeypatch):
    """Makes Keras take as many rows of arrays as fill batches, so that it knows the number of rows while it traces."""

    def taking(method):
        @functools.wraps(method)
        def take(self, x=None, y=None, batch_size=None, sample_weight=None, **named):
            leaves = keras.tree.flatten(x)
            if batch_size is not None and all(isinstance(leaf, np.ndarray) for leaf in leaves) and len(leaves[0]) >= batch_size:
                kept = len(leaves[0]) // batch_size * batch_size
                cut = lambda array: None if array is None else array[:kept]  # noqa: E731
                x, y, sample_weight = keras.tree.map_structure(cut, (x, y, sample_weight))
            given = {"x": x, "y": y, "batch_size": batch_size, "sample_weight": sample_weight}
            return method(self, **{name: value for name, value in given.items() if value is not None}, **named)

        return take

    for name in ("fit", "evaluate"):
        monkeypatch.setattr(keras.Model, name, taking(getattr(keras.Model, name)))


# Two networks, masked recurrence, attention with dropout, embeddings, a queue of rows, and steps in a loop.
KINDS = [
    "wasserstein_gan",
    "sequence_to_sequence",
    "vision_transformer",
    "users_by_items",
    "momentum_contrast",
    "steps_in_a_loop",
]


@pytest.mark.parametrize("name", KINDS)
def test_program_trains_with_batches_of_one_size(name, even_batches):
    """Integers of the trace count rows, in the place of shapes: test_static_rows.py has the ways of asking for them."""
    with graph_optimizer(dependency_optimization=False):
        assert_same_run(*program(name))


def test_the_page_counts_the_programs_that_gather():
    counted = f"Of {len(PROGRAMS)} kinds of published programs (tests/programs), {len(PROGRAMS) - len(GATHERED)} gather no row"
    assert counted in PAGE
    assert GATHERED.keys() <= PROGRAMS.keys()


@functools.cache
def plain(name):
    """Returns the result of a program in plain Keras: see `plain_run`."""
    return plain_run(*program(name))


def program(name):
    """Returns functions that build a program's model and train it, and assert that its weights have changed."""
    build, script = PROGRAMS[name]()
    return build, training(script)
