"""Messages name a command that installs an extra from where keras_dp came from: 0.1.0 is in no index."""

import json
from importlib import metadata
from types import SimpleNamespace

import pytest

from keras_dp import installation


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, 'pip install "keras_dp[cuda]"'),
        ({"url": "file:///home/a%20b/keras_dp", "dir_info": {}}, 'pip install "/home/a b/keras_dp[cuda]"'),
        ({"url": "file:///src/keras_dp", "dir_info": {"editable": True}}, 'pip install -e "/src/keras_dp[cuda]"'),
        (
            {"url": "https://host/keras_dp", "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "main"}},
            'pip install "keras_dp[cuda] @ git+https://host/keras_dp@main"',
        ),
        ({"url": "https://host/keras_dp.whl", "archive_info": {}}, 'pip install "keras_dp[cuda] @ https://host/keras_dp.whl"'),
    ],
)
def test_the_command_installs_from_the_same_place(origin, expected, monkeypatch):
    noted = SimpleNamespace(read_text=lambda name: origin and json.dumps(origin))
    monkeypatch.setattr(metadata, "distribution", lambda name: noted)
    assert installation.command("cuda") == expected


def missing(*arguments):
    raise metadata.PackageNotFoundError


def test_keras_dp_that_is_imported_from_a_folder(monkeypatch):
    """Without being installed: once, the message of a missing GPU ended in a PackageNotFoundError."""
    monkeypatch.setattr(metadata, "distribution", missing)
    assert installation.command("cuda") == 'pip install "keras_dp[cuda]"'


def test_a_development_version_has_another_name(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: missing() if name == "keras" else name)
    assert [installation.version(name) for name in ("keras", "numpy")] == ["keras-nightly", "numpy"]
