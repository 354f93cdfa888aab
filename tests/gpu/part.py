"""Run one part in this process: python -m gpu.part MODULE RECORD [--quick]."""

import argparse
import importlib
from pathlib import Path

from gpu.record import Record


def main() -> None:
    """Runs the part that the command line names. An exception ends the process, with its traceback on stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    parser.add_argument("record", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    importlib.import_module(options.module).run(Record(options.record, options.quick))


if __name__ == "__main__":
    main()
