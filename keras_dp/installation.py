"""Say which packages are installed, and how to install those that an extra of keras_dp needs."""

import json
from importlib import metadata
from urllib.parse import unquote, urlsplit

_NIGHTLY = {"keras": "keras-nightly", "tensorflow": "tf-nightly"}


def version(package: str) -> str:
    """Returns the version of an installed package, without importing it. A development version has another name."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return metadata.version(_NIGHTLY.get(package, package))


def command(extra: str) -> str:
    """Returns the command that installs an extra from where keras_dp was installed: a folder, a repository or an index.

    pip notes where a package came from (https://packaging.python.org/en/latest/specifications/direct-url/), unless it came from
    an index.

    Args:
        extra: the name of an extra in pyproject.toml, such as "cuda".
    """
    try:
        noted = metadata.distribution("keras_dp").read_text("direct_url.json")
    except metadata.PackageNotFoundError:  # imported from a folder, without being installed
        noted = None
    origin = json.loads(noted) if noted else {}
    url, vcs = origin.get("url", ""), origin.get("vcs_info", {})
    if vcs:
        revision = vcs.get("requested_revision") or vcs["commit_id"]
        return f'pip install "keras_dp[{extra}] @ {vcs["vcs"]}+{url}@{revision}"'
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f'pip install {editable}"{unquote(urlsplit(url).path)}[{extra}]"'
    return f'pip install "keras_dp[{extra}] @ {url}"' if url else f'pip install "keras_dp[{extra}]"'
