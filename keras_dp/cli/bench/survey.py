"""Survey a model, its data and the machine before a benchmark measures anything."""

import dataclasses
import json
import sys

import tensorflow as tf

from keras_dp.cli import environment, models, synthetic
from keras_dp.cli.bench.user_batches import rows_of_first
from keras_dp.cli.runs import Survey


def survey(model: str, *data: str) -> Survey:
    """Surveys the model with a name, the data that functions with these names return, if any, and this machine."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    try:
        workload = models.workload(model)
        built = workload.build()
        if data:
            batch_size, *_ = [rows_of_first(name) for name in data]
        else:
            batch_size = workload.batch_size
            models.refuse_what_is_not_timed(built)
            synthetic.refuse_unknown_inputs(built)
    except ValueError as error:
        return Survey(environment.environment(), gpus, 0, str(error))
    return Survey(environment.environment(), gpus, batch_size)


def main() -> None:
    """Surveys what this process's only argument names, and prints the survey. Both are JSON."""
    print(json.dumps(dataclasses.asdict(survey(*json.loads(sys.argv[1])))))
