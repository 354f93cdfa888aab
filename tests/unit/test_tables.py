"""Tables keep every character, and print in any encoding."""

import io

import pytest

from keras_dp import tables
from keras_dp.tables import Column

LONG = "gemma_causal_lm/gemma_backbone/decoder_block_11/feed_forward_layer/gating_dense/kernel"


@pytest.mark.parametrize("width", [30, 60])
def test_long_words_are_folded(width):
    """They were cut, and ended in an ellipsis."""
    drawn = tables.table([Column("name", "", str), Column("size", "MB", lambda _: "1.0")], [LONG], width)
    lines = tables.text(drawn, width).splitlines()
    assert max(map(len, lines)) <= width
    assert "".join(line[: -len(" 1.0")] if line.endswith(" 1.0") else line for line in lines[3:]).replace(" ", "") == LONG


def test_narrow_tables_print_in_ascii(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = tables.console(file)
    console.print(tables.table([Column("name", "", str)], [LONG], tables.terminal_width()))
    file.flush()
    assert b"gating_dense" in file.buffer.getvalue().replace(b"\n", b"").replace(b" ", b"")


def test_brackets_are_text():
    """A metric may have any name: rich took brackets for styles."""
    drawn = tables.table([Column("final", "acc [bold]", str), Column("other", "[/x]", str, 1)], ["1"], 40)
    assert "acc [bold]" in tables.text(drawn)
    assert "[/x]" in tables.text(drawn)
