"""Train some published programs on one device and on the towers of all workers, and compare them on every worker.

Prints a line for each program, "passed <program>" or "FAILED <program>" with the traceback; then "done". The arguments are the
number of workers, the index of the part of the programs to run, and the number of parts.
"""

import sys
import time
import traceback

import keras
from comparison import assert_same_run
from programs.catalogue import PROGRAMS
from test_programs import plain, program

import keras_dp

keras_dp.use_logical_cpus(2)
workers = keras_dp.connect_workers(timeout=60, start_timeout=120)
assert workers.count == int(sys.argv[1])
keras.config.set_floatx("float64")

part, parts = map(int, sys.argv[2:])
for name in list(PROGRAMS)[part::parts]:
    begin = time.monotonic()
    try:
        assert_same_run(*program(name), 2, plain(name))
        print(f"passed {name}, {time.monotonic() - begin:.1f} s")
    except keras_dp.WorkerLostError:
        raise
    except Exception:
        print(f"FAILED {name}\n{traceback.format_exc()}")
    workers.agree({"the program": name})
print("done")
