"""The sample and the rule of docs/a_rule.md stand in the code, and the proof fails without the rule."""

import re
from pathlib import Path

import pytest

from keras_dp.partition.placing.rules import RULES
from partition.placing.proofs import cases_of, prove
from partition.placing.samples import samples

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "a_rule.md").read_text(encoding="utf-8")


def test_the_blocks_stand_in_the_files_that_are_named():
    blocks = re.findall(r"`([\w/]+\.py)`[^`]*(?:`[^`]+`[^`]*)*?```py\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for name, block in blocks:
        assert block in (ROOT / name).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("has_rule", [True, False])
def test_the_proof_fails_without_the_rule(has_rule, monkeypatch):
    (sample,) = [sample for sample in samples() if sample.types == ("UpperBound",)]
    if not has_rule:
        monkeypatch.delitem(RULES, "UpperBound")
    spread = set().union(*(prove(sample, case) for case in cases_of(sample)))
    assert spread == ({"UpperBound"} if has_rule else set())
