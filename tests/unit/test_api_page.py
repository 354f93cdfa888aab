"""docs/api.md shows every public name, from a docstring with an example; doctest runs the examples."""

import doctest
import re
from pathlib import Path
from types import ModuleType

import keras_dp

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
MODULES = [keras_dp, keras_dp.callbacks, keras_dp.optimizers, keras_dp.schedules]
PUBLIC = {
    f"{module.__name__}.{name}": value
    for module in MODULES
    for name in module.__all__
    if not isinstance(value := getattr(module, name), ModuleType)
}


def test_the_page_shows_every_public_name_and_no_other():
    assert sorted(re.findall(r"^\.\. auto\w+:: (.+)$", PAGE, re.MULTILINE)) == sorted(PUBLIC)


def test_public_modules_are_looked_into():
    assert {value for name in keras_dp.__all__ if isinstance(value := getattr(keras_dp, name), ModuleType)} == set(MODULES[1:])


def test_every_public_name_has_an_example():
    parser = doctest.DocTestParser()
    assert [name for name, value in PUBLIC.items() if not parser.get_examples(value.__doc__)] == []
