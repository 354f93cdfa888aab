"""Trace steps that ask for the number of rows while it is unknown."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from keras_dp.error_notes import add_note
from keras_dp.partition.user_lines import user_line_of_error

Result = TypeVar("Result")

logger = logging.getLogger("keras_dp")

# TensorFlow's words for a number that is None. "None" alone is in other errors, too: batches have shapes like (None, 4).
_WORDS_OF_UNKNOWN_ROWS = ("NoneType", "None values not supported", "partially known TensorShape", "Failed to convert elements")


class UnknownRows:
    """Traces steps for any number of rows.

    A step that asks for the number is traced for the number of rows of the data, and runs on one device.
    """

    def __init__(self) -> None:
        self._told = False

    def trace(self, attempt: Callable[[int | None], Result], rows: int | None) -> Result:
        """Traces a step; if it asks for the number of rows, retraces it with the known number, and warns once.

        Args:
            attempt: a function that traces the step for a number of rows, or for any number if it is given None.
            rows: the number of rows of the data; None if batches may have different ones.
        """
        try:
            with _explained():
                return attempt(None)
        except (TypeError, ValueError) as error:
            if rows is None or not _asks_for_rows(error):
                raise
            line = user_line_of_error(error)
        result = attempt(rows)
        if not self._told:
            self._told = True
            logger.warning(
                "The model runs on one device: a step asks for the number of rows while it is traced%s, and towers have "
                "different numbers. To run it on the towers, use keras.ops.shape(x)[0] in place of x.shape[0].",
                f" ({line})" if line else "",
            )
        return result


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Adds a note to errors about a None: it may be the number of rows, which models with fixed batches rely on."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if _asks_for_rows(error):
            add_note(
                error,
                "keras_dp: a tower's number of rows is unknown while it is traced, even if all batches have the same size. If "
                "the model or the loss uses x.shape[0], which is None, use keras.ops.shape(x)[0] instead.",
            )
        raise


def _asks_for_rows(error: Exception) -> bool:
    """Returns whether an error is about a None, such as the number of rows while a step is traced."""
    return any(words in str(error) for words in _WORDS_OF_UNKNOWN_ROWS)
