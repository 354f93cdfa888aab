"""Arguments with few values refuse all others, and suggest the value that may have been meant."""

import inspect
from typing import get_args, get_origin

import pytest

import keras_dp
from keras_dp import choices


@pytest.mark.parametrize(
    ("value", "question"),
    [("synch", " Did you mean 'sync'?"), ("LOCAL", " Did you mean 'local'?"), ("global batch", ""), (None, ""), (3, "")],
)
def test_refuses_unknown_values(value, question):
    with pytest.raises(ValueError, match="one of") as error:
        choices.refuse_unknown("batch_norm", value, choices.BatchNorm)
    known = "'sync', 'local', 'first'"
    assert str(error.value) == f"`batch_norm` must be one of {known}.{question} Received: batch_norm={value!r}"


def test_none_is_a_value_where_it_is_one():
    choices.refuse_unknown("gradient_dtype", None, choices.GradientType)
    assert choices.values_of(choices.GradientType) == ["bfloat16", "float16", None]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (keras_dp.DataParallelModel, {"batch_norm", "gradient_dtype"}),
        (keras_dp.DataParallelModel.predict, {"rows"}),
        (keras_dp.DataParallelOptimizer, {"accumulate"}),
        (keras_dp.DataParallelOptimizer.apply_tower_gradients, {"reduction"}),
        (keras_dp.connect_workers, {"communication"}),
    ],
)
def test_editors_know_the_values(function, names):
    """Each annotation lists the values; the default is the first of them, or None."""
    parameters = inspect.signature(function, eval_str=True).parameters
    for name in names:
        values = get_args(parameters[name].annotation)
        assert get_origin(parameters[name].annotation) is not None
        assert parameters[name].default in (values[0], None)
