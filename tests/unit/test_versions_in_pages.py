"""The pages, CITATION.cff and .ci/versions state the same versions as the package."""

import re
from importlib import metadata
from pathlib import Path

import pytest

import keras_dp
from keras_dp.keras_internals import versions

ROOT = Path(__file__).parents[2]


def text_of(name):
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def range_of(package):
    (major, oldest), (_, untested) = getattr(versions, package)
    return f"{major}.{oldest} to {major}.{untested - 1}"


@pytest.mark.parametrize("page", ["README.md", "docs/install.md"])
def test_pages_state_the_supported_versions(page):
    named = re.findall(r"Python :: 3\.(\d+)$", "\n".join(metadata.metadata("keras_dp").get_all("Classifier")), re.MULTILINE)
    pythons = sorted(map(int, named))
    assert f"Python 3.{pythons[0]} to 3.{pythons[-1]}, Keras {range_of('KERAS')}" in text_of(page)
    assert f"TensorFlow {range_of('TENSORFLOW')}" in text_of(page)


def test_the_tested_pairs_are_those_that_are_run():
    run = re.search(r'^pairs="(.*?)"', (ROOT / ".ci" / "versions").read_text(), re.DOTALL | re.MULTILINE)[1]
    page = (ROOT / "docs" / "versioning.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (3\.\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert [" ".join(row) for row in shown] == run.splitlines()


def test_cuda_is_the_one_that_tensorflow_asks_for():
    asked = " ".join(metadata.requires("tensorflow"))
    page = text_of("docs/install.md")
    for package, name in (("nvidia-cuda-runtime-cu12", "CUDA"), ("nvidia-cudnn-cu12", "cuDNN")):
        version = re.search(rf"{package}[^;]*?[>=]=(\d+\.\d+)", asked)[1]
        assert f"| {name} | {version}, from pip |" in page


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {keras_dp.__version__}\n" in citation
    assert f"license: {metadata.metadata('keras_dp')['License-Expression']}\n" in citation
