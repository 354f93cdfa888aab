"""Run a script as a worker that reaches all others through a `RelayedNetwork`: relayed.py SCRIPT [ARGUMENT ...]."""

import json
import os
import runpy
import sys

from relayed_network import VARIABLE, Questions

from keras_dp.workers.group import WorkerGroup

config = json.loads(os.environ["TF_CONFIG"])
addresses, index = config["cluster"]["worker"], config["task"]["index"]
ask = Questions(os.environ[VARIABLE])
for i, address in enumerate(addresses):
    if i != index:
        addresses[i] = f"127.0.0.1:{ask('port', index, i, address)}"
ask.close()
os.environ["TF_CONFIG"] = json.dumps(config)

# Each worker has a list of addresses of its own, which `connect_workers` would refuse.
agree = WorkerGroup.agree
WorkerGroup.agree = lambda self, facts: agree(self, {name: fact for name, fact in facts.items() if name != "cluster"})

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
