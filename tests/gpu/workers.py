"""Train with two worker processes, each on a GPU of its own if there are two, and compare with one process."""

import json
import os
import tempfile

import numpy as np
import tensorflow as tf
from worker_processes import Workers

from gpu import comparing

SECONDS = 75
TABLE = "Two workers with a tower each, beside plain Keras in one process"


def run(record):
    """Trains over gRPC ("ring"), and with NCCL where there are GPUs."""
    cards = _visible_cards()
    words = f"{min(2, len(cards))} GPU{'s' if len(cards) > 1 else ''}" if cards else "the CPU, for each of two processes"
    record.devices(words, gpus=bool(cards))
    plain = _trained(_run("plain", cards[:1], 1)[0])
    if plain is None:
        raise RuntimeError("plain Keras did not train")
    both = (cards * 2)[:2]
    found = []
    for communication in ("ring", "nccl") if cards else ("ring",):
        outputs = _run(communication, both, 2)
        trained = [_trained(output) for output in outputs]
        if None not in trained:
            differences = [_compare(record, communication, worker, plain, result) for worker, result in enumerate(trained)]
            found.append(f"{communication}: largest difference {max(differences):.0e}")
        elif communication == "nccl" and len(cards) == 1:
            record.row("NCCL on one card", result="refused, as NCCL allows one process on a card", message=_reason(outputs))
            found.append("NCCL refuses two processes on one card")
        else:
            raise RuntimeError(f"the workers did not train with {communication!r}: {_reason(outputs)}")
        record.finding(", ".join(found))
    if not cards:
        record.remark("NCCL was not tried: it needs a GPU for each process.")


def _compare(record, communication, worker, plain, result):
    difference = comparing.difference(plain["weights"], result["weights"])
    times = {"ms_a_step": result["milliseconds"], "ms_plain": plain["milliseconds"]}
    record.compare(TABLE, difference, communication=communication, worker=worker, **times)
    return difference


def _visible_cards():
    """Lists the cards as CUDA_VISIBLE_DEVICES names them, without starting TensorFlow on them."""
    count = len(tf.config.list_physical_devices("GPU"))
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in named.split(",")][:count] if named else [str(index) for index in range(count)]


def _run(communication, cards, count):
    """Runs the processes until they have ended, or their time is over, and returns their outputs."""
    with tempfile.TemporaryDirectory() as directory, Workers("gpu_training.py", count, directory, communication) as workers:
        for index in range(count):
            # NCCL gives its reasons only if it is asked to.
            workers.start(index, NCCL_DEBUG="WARN", **({"CUDA_VISIBLE_DEVICES": cards[index]} if cards else {}))
        try:
            workers.wait(seconds=SECONDS)
        except AssertionError as error:
            print(error)  # in the log of this part; the output then lacks a result
        return [workers.output(index) for index in range(count)]


def _trained(output):
    """Returns what a process has printed, or None if it has not come so far."""
    lines = [line for line in output.splitlines() if line.startswith("trained ")]
    if not lines:
        return None
    result = json.loads(lines[-1].removeprefix("trained "))
    return {"weights": [np.array(weight) for weight in result["weights"]], "milliseconds": result["milliseconds"]}


def _reason(outputs):
    """Returns the warning of NCCL, or else the last line, of processes that did not train."""
    lines = [line.strip() for output in outputs for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "NCCL WARN" in line), lines[-1] if lines else "no output")
