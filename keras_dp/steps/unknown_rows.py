"""Trace steps that ask for the number of rows while it is unknown."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

from keras_dp.partition.user_lines import user_line_of_error

Result = TypeVar("Result")

logger = logging.getLogger("keras_dp")

# What TensorFlow says where a number is None. A shape like (None, 4) in an error, on the other hand, is a batch's.
_WORDS_OF_UNKNOWN_ROWS = ("NoneType", "None values not supported", "partially known TensorShape", "Failed to convert elements")


class UnknownRows:
    """Has steps traced with any number of rows; those that ask for it, with the number of rows of the data, on one device."""

    def __init__(self) -> None:
        self._told = False

    def trace(self, attempt: Callable[[int | None], Result], rows: int | None) -> Result:
        """Traces a step, and, if that asks for the number of rows, traces it again with this known, and warns once.

        Args:
            attempt: traces the step with a number of rows, or with any number if that is None.
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
                "different ones. keras.ops.shape(x)[0] in place of x.shape[0] leaves it on the towers.",
                f" ({line})" if line else "",
            )
        return result


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Says, in errors about a None, what may have been None: the number of rows, which models with fixed batches rely on."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if _asks_for_rows(error):
            error.add_note(
                "keras_dp: how many rows a tower has is not known while it is traced, also if all batches have the same size. "
                "If the model or the loss asks for x.shape[0], which is None, let it ask for keras.ops.shape(x)[0]."
            )
        raise


def _asks_for_rows(error: Exception) -> bool:
    """Whether an error is about a None, as the number of rows is while a step is traced."""
    return any(words in str(error) for words in _WORDS_OF_UNKNOWN_ROWS)
