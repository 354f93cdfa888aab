"""Each kind of program trains in each way of wrapping a model as it does on one device."""

import pytest
from comparison import assert_same_run
from test_programs import KINDS, plain, program
from ways_of_wrapping import WAYS, wrap_in_the_way


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_program_trains_in_each_way(name, monkeypatch):
    expected = plain(name)
    for way in WAYS:
        with monkeypatch.context() as patch:
            wrap_in_the_way(way, patch)
            try:
                assert_same_run(*program(name), 3, expected)
            except AssertionError as error:
                raise AssertionError(f"in the way {way!r}: {error}") from error
