"""Loggers of other projects log one run of several workers, with plain Keras's numbers, if the chief alone gets them."""

import json
import os
import re

import pytest
from classification import classifier
from worker_processes import TESTS, Workers

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS / "ecosystem"))),
    "WANDB_ERROR_REPORTING": "false",
    # mlflow then names the packages that it knows of, and does not load the model in a new process to find them.
    "MLFLOW_REQUIREMENTS_INFERENCE_TIMEOUT": "1",
}


def printed(name, output):
    """Returns the value that a worker has printed after a name."""
    return json.loads(re.search(f"^{name} (.*)", output, re.MULTILINE)[1])


def test_one_run_is_logged(data, tmp_path):
    directories = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("ARTIFACT", "CACHE", "CONFIG", "DATA")}
    with Workers("loggers.py", 2, tmp_path, tmp_path, **ENVIRONMENT, **directories) as workers:
        codes = workers.start().wait(seconds=240)
        outputs = [workers.output(i) for i in range(2)]
    assert codes == [0, 0], "\n".join(output[-3000:] for output in outputs)
    plain = classifier(wrapped=False).fit(*data, batch_size=7, epochs=2, validation_split=0.2, verbose=0).history
    last = {name: values[-1] for name, values in plain.items()}
    for output in outputs:
        assert printed("last", output) == pytest.approx(last, rel=1e-4)
    for logger, numbers in printed("logged", outputs[0]).items():
        assert {name: numbers[name] for name in last} == pytest.approx(last, rel=1e-4), logger
    assert ["100%" in output for output in outputs] == [True, False]  # The bar of tqdm.
    assert len(list(tmp_path.glob("wandb/offline-run*"))) == 1
    assert {path.name for path in tmp_path.glob("*.keras")} == {"1.keras", "2.keras"}
