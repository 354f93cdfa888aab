"""Show the package's messages in programs that have not set up logging."""

import logging
import sys

logger = logging.getLogger("keras_dp")


class ConsoleHandler(logging.Handler):
    """Prints messages on stderr, unless the program has handlers of its own, which receive the messages too."""

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a message."""
        if not logging.getLogger().handlers:
            print(f"keras_dp: {self.format(record)}", file=sys.stderr)


def show_messages() -> None:
    """Shows messages of level INFO and above, unless the program has already set the level of the logger `keras_dp`."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not any(type(handler).__name__ == ConsoleHandler.__name__ for handler in logger.handlers):
        logger.addHandler(ConsoleHandler())
