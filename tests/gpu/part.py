"""Run one part in this process: python -m gpu.part MODULE RECORD [--quick]."""

import importlib
import sys
from pathlib import Path

from gpu.record import Record

if __name__ == "__main__":
    # An exception ends the process, with its traceback on stderr.
    module, path, *quick = sys.argv[1:]
    importlib.import_module(module).run(Record(Path(path), bool(quick)))
