"""Find the tensors of a batch that have other rows than those that are cut, and name them for the user."""

import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from keras_dp.batches.whole_tensors import WholeTensors, has_name, leaves_of
from keras_dp.error_notes import add_note

Tensor = Any

SAME_ROWS = (
    "All tensors of a batch must have the same number of rows (the first axis), except those that are not cut into slices."
)
_RECEIVED = "Received numbers of rows:"

logger = logging.getLogger("keras_dp")


class FoundWhole:
    """Finds tensors that stay whole although the user does not name them: the types of the data say that they have other rows.

    The types must say so for all batches, so all numbers of rows must be known. Among single rows that were not made a batch,
    numbers differ as well. So if there are targets, two tensors at least must have the same number.

    The result of a step is the same whichever tensors are cut. Tensors that stayed whole in earlier data stay whole again. So
    training, evaluation and prediction cut the same tensors.
    """

    def __init__(self) -> None:
        self._paths: set[str] = set()

    def add_to(self, named: WholeTensors, batch: Any) -> WholeTensors:
        """Returns the tensors of a batch of tensors or types that stay whole: those that are named, and those that are found.

        Logs once what is found.
        """
        rows = known_rows_of(batch, named)
        known = [path for path in rows if path in self._paths]
        to_cut = {number for path, number in rows.items() if path not in known}
        if to_cut and (len(to_cut) == 1 or None in to_cut):
            return WholeTensors(named.names, tuple(known))
        if len(set(rows.values())) < 2 or None in rows.values():
            return named
        if _has_targets(batch) and len(set(rows.values())) == len(rows):
            return named
        others = other_than_cut(rows)
        self._paths.update(others)
        (kept,) = {number for path, number in rows.items() if path not in others}
        logger.warning(
            "The tensors of a batch have different numbers of rows: %s. Those with %s rows are cut into slices. The others "
            "stay whole: what is computed from them alone, or from rows joined with them, is computed once, on one device. The "
            "result is the same. To choose which tensors stay whole, name them: DataParallelModel(..., whole=%s).",
            listed_rows(rows),
            kept,
            _names_of(others, rows),
        )
        return WholeTensors(named.names, tuple(others))


def known_rows_of(batch: Any, whole: WholeTensors) -> dict[str, int | None]:
    """Returns the numbers of rows of the tensors or types that are cut, by their paths; None for unknown numbers."""
    shapes = {path: tf.TensorShape(leaf.shape) for path, leaf in whole.cut_leaves(batch).items()}
    return {path: None if shape.rank is None else shape[0] for path, shape in shapes.items()}


def other_than_cut(rows: Mapping[str, int | None]) -> list[str]:
    """Returns the paths of the tensors that do not have the number of rows of the tensors to cut.

    The tensors to cut have a number that inputs and targets have in common, if there is one. Of several numbers, it is that of
    most tensors, then the largest.

    Args:
        rows: the numbers of rows by paths. A tensor whose number is unknown is cut.
    """
    inputs, targets = ({rows[path] for path in rows if has_name(path, part)} for part in ("0", "1"))

    def score(number: int | None) -> tuple[bool, int, int]:
        return number in inputs & targets, list(rows.values()).count(number), -1 if number is None else number

    to_cut = max(rows.values(), key=score)
    return [path for path, number in rows.items() if number not in (None, to_cut)]


def refuse_other_rows(batch: Any, whole: WholeTensors) -> None:
    """Raises a ValueError if the tensors of a batch, or their types, are known to have different numbers of rows."""
    rows = known_rows_of(batch, whole)
    if len(set(rows.values()) - {None}) < 2:
        return
    shapes = [f"{leaf.shape} ({path})" for path, leaf in whole.cut_leaves(batch).items() if leaf.shape.rank is not None]
    received = f"Received tensors of shapes {', '.join(shapes)}."
    if None not in rows.values():
        received += " If these are single rows, make batches of them: dataset.batch(32)."
    raise ValueError(f"{SAME_ROWS} {_on_purpose(rows)} {received}")


def _on_purpose(rows: Mapping[str, int | None]) -> str:
    return f"If the numbers differ on purpose, use DataParallelModel(..., whole={_names_of(other_than_cut(rows), rows)})."


def refuse_other_rows_at_run_time(rows: Mapping[str, Tensor]) -> Any:
    """Makes an operation that fails if numbers of rows differ; None if it cannot fail. See `naming_other_rows`.

    Args:
        rows: the numbers of rows, int32 scalars, by the paths of the tensors.
    """
    known = [tf.get_static_value(number) for number in rows.values()]
    if len(rows) < 2 or (known[0] is not None and all(number is not None and number == known[0] for number in known)):
        return None
    numbers = tf.stack(list(rows.values()))
    data = [f"{SAME_ROWS} {_RECEIVED}", numbers, f"of {', '.join(rows)}."]
    return tf.raw_ops.Assert(condition=tf.reduce_all(numbers == numbers[0]), data=data, summarize=len(rows))


@contextlib.contextmanager
def naming_other_rows() -> Iterator[None]:
    """Adds a note to errors of `refuse_other_rows_at_run_time`: it tells which tensors to name.

    The names are found here and not in the graph: it would be several times as large as all that cuts a batch.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = re.search(rf"{re.escape(_RECEIVED)}\] \[([\d ]+)\] \[of (.*)\.\]", error.message)
        numbers, paths = (found[1].split(), found[2].split(", ")) if found else ([], [])
        # A key of the user's may have commas.
        if found and len(numbers) == len(paths):
            note = f"keras_dp: {_on_purpose(dict(zip(paths, map(int, numbers), strict=True)))}"
            if note not in "".join([str(error), *getattr(error, "__notes__", ())]):
                add_note(error, note)
        raise


def _names_of(paths: Iterable[str], cut: Collection[str]) -> str:
    """Returns the names of tensors as a list in Python: a key that names no other tensor that is cut, or else the path."""

    def name(path: str) -> str:
        key = path.rpartition("/")[2]
        is_own = not key.isdecimal() and [one for one in cut if has_name(one, key)] == [path]
        return f'"{key if is_own else path}"'

    return f"[{', '.join(map(name, paths))}]"


def listed_rows(rows: Mapping[str, int | None]) -> str:
    """Lists numbers of rows with the paths of the tensors that have them."""
    numbers = dict.fromkeys(rows.values())
    return " and ".join(f"{number} ({', '.join(path for path in rows if rows[path] == number)})" for number in numbers)


def _has_targets(batch: Any) -> bool:
    return any(has_name(path, "1") and leaf is not None for path, leaf in leaves_of(batch))
