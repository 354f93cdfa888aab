"""Connect workers, the last of which reports another version of Keras than the others."""

import json
import os
from importlib import metadata

import keras_dp

task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
version = metadata.version
metadata.version = lambda name: "3.0.0" if name == "keras" and task == 1 else version(name)
keras_dp.connect_workers(timeout=30)
