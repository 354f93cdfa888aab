"""Train a program from a seed on all workers, and print its digests: repeated.py PROGRAM TOWERS."""

import json
import sys

import keras_dp

keras_dp.use_logical_cpus(2)
workers = keras_dp.connect_workers()

from repeated_runs import trained  # noqa: E402

print("digests", json.dumps(trained(sys.argv[1], int(sys.argv[2]))), flush=True)
