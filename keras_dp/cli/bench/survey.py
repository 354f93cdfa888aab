"""Survey a model and the machine before a benchmark measures anything."""

import dataclasses
import json
import sys

import tensorflow as tf

from keras_dp.cli import environment, models, synthetic
from keras_dp.cli.runs import Survey


def survey(model: str) -> Survey:
    """Surveys the model with a name, and this machine."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    try:
        workload = models.workload(model)
        built = workload.build()
        models.refuse_what_is_not_timed(built)
        synthetic.refuse_unknown_inputs(built)
    except ValueError as error:
        return Survey(environment.environment(), gpus, 0, str(error))
    return Survey(environment.environment(), gpus, workload.batch_size)


def main() -> None:
    """Surveys the model that this process's only argument names, and prints the survey. Both are JSON."""
    print(json.dumps(dataclasses.asdict(survey(json.loads(sys.argv[1])))))
