"""Read the results of a benchmark from a bench.json, and refuse any other file."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from keras_dp.cli.bench.kinds import KINDS
from keras_dp.cli.bench.summary import Cell

_CELL = get_type_hints(Cell)
_RESULTS = {"command": str, "title": str, "measures": str, "rows": list[dict[str, Any]], "runs": list[dict[str, Any]]}
_TIMES = {"step_milliseconds": list[float], "total_seconds": float}
_TABLE = {"environment": dict[str, Any], "failures": list[dict[str, Any]]}
_MACHINE = {"processor": str, "cores": int | None, "gpus": list[str]} | dict.fromkeys(
    ("python", "keras", "tensorflow", "keras_dp"), str
)


def read(path: Path) -> dict[str, Any]:
    """Returns the results in a bench.json.

    Raises:
        ValueError: if there is no such file, or what it holds is not as `keras-dp bench` writes it.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be read: {error}") from error
    if not isinstance(results, dict):
        raise ValueError("it holds no object")
    results = {"title": results.get("command"), "measures": "steps", **results}
    _refuse_wrong_fields("the file", results, _RESULTS)
    if results["measures"] not in KINDS:
        raise ValueError(f"its field 'measures' is none of {', '.join(KINDS)}. Received: {results['measures']!r}")
    for run in results["runs"]:
        _refuse_wrong_fields("a run", run, _CELL | {name: kind for name, kind in _TIMES.items() if name in run})
        if not _TIMES.keys() & run.keys():
            raise ValueError(f"a run lacks {' and '.join(_TIMES)}")
    return results


def refuse_what_has_no_table(results: Mapping[str, Any]) -> None:
    """Raises a ValueError if results that `read` returns lack what their table shows, or hold it in other forms."""
    row_class: Any = KINDS[results["measures"]].row
    kinds = get_type_hints(row_class)
    required = [field.name for field in dataclasses.fields(row_class) if field.name in _CELL]
    _refuse_wrong_fields("the file", results, _TABLE)
    _refuse_wrong_fields("the environment", results["environment"], _MACHINE)
    for failure in results["failures"]:
        _refuse_wrong_fields("a failure", failure, {**_CELL, "message": str})
    for run in results["runs"]:
        _refuse_wrong_fields("a run", run, {"round": int})
    for row in results["rows"]:
        unknown = [name for name in row if name not in kinds]
        if unknown:
            raise ValueError(f"a row has an unknown field {unknown[0]!r}")
        _refuse_wrong_fields("a row", row, {name: kinds[name] for name in [*required, *row]})


def _refuse_wrong_fields(title: str, fields: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    missing = [name for name in kinds if name not in fields]
    if missing:
        raise ValueError(f"{title} lacks {', '.join(missing)}")
    wrong = [name for name, kind in kinds.items() if not _is_of(kind, fields[name])]
    if wrong:
        raise ValueError(f"{title} has {str(fields[wrong[0]])[:100]!r} in its field {wrong[0]!r}")


def _is_of(kind: Any, value: Any) -> bool:
    """Returns whether a value that was read from JSON is of a type that an annotation names."""
    if isinstance(kind, UnionType):
        return any(_is_of(one, value) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_of(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is_of(get_args(kind)[1], each) for each in value.values())
    if kind is float and _is_of(int, value):
        return bool(abs(value) <= sys.float_info.max)
    return kind is Any or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool)))
