"""Measure the steps of Keras on PyTorch: in one process, or in several with DistributedDataParallel.

`keras_dp.cli.runs` starts this file by its path.
"""

import dataclasses
import json
import os
import sys
import time
from typing import Any

if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "torch"
    # Otherwise the package refuses PyTorch. This is the name of its command, which may import parts of it.
    sys.argv[0] = "keras-dp"

import keras

from keras_dp.cli import models, synthetic
from keras_dp.cli.bench.loopback import LoopbackBytes
from keras_dp.cli.bench.peak_memory import peak_memory_megabytes
from keras_dp.cli.runs import Measurement, Run


def main() -> None:
    """Measures the run that this process's only argument describes, and prints the measurement. Both are JSON."""
    print(json.dumps(dataclasses.asdict(measure(Run(**json.loads(sys.argv[1]))))))


def measure(run: Run) -> Measurement:
    """Measures a run in this process, or in each of those that `keras-dp launch` has started.

    Each process trains on its part of the rows. Batch normalization is local, and metrics are not updated.

    Raises:
        ValueError: if the model's steps cannot be timed one by one, or its inputs are not known.
    """
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    keras.utils.set_random_seed(synthetic.SEED)
    workload = models.workload(run.model)
    model = workload.build()
    if not model.compiled:
        model.compile(models.optimizer(), **workload.objective())
    models.refuse_what_is_not_timed(model)
    x, y = synthetic.arrays(model, run.batch_size)
    index = _connect() if run.workers > 1 else 0
    trained = torch.nn.parallel.DistributedDataParallel(model) if run.workers > 1 else model
    start = time.perf_counter()
    milliseconds, sent = [], LoopbackBytes()
    for step in range(run.warm_up + run.steps):
        own_x, own_y = keras.tree.map_structure(
            lambda batches, step=step: torch.as_tensor(batches[step % len(batches)][index :: run.workers]), (x, y)
        )
        begin = time.perf_counter()
        _train(trained, model, own_x, own_y)
        milliseconds.append(1000 * (time.perf_counter() - begin))
        if step == 0:
            first_step_seconds = time.perf_counter() - start
        sent.on_train_batch_end(step)
    return Measurement(
        step_milliseconds=milliseconds[run.warm_up :],
        first_step_seconds=first_step_seconds,
        peak_memory_megabytes=peak_memory_megabytes(),
        communication_bytes=sent.in_each_step(after=run.warm_up) if run.workers > 1 else None,
    )


def _connect() -> int:
    """Connects this process with the others by gloo, and returns its number."""
    import torch

    config = json.loads(os.environ["TF_CONFIG"])
    addresses, index = config["cluster"]["worker"], config["task"]["index"]
    torch.distributed.init_process_group("gloo", f"tcp://{addresses[0]}", rank=index, world_size=len(addresses))
    return int(index)


def _train(trained: Any, model: keras.Model, x: Any, y: Any) -> None:
    """Trains on a batch as Keras does on PyTorch, where DistributedDataParallel, if any, averages the gradients."""
    import torch

    model.zero_grad()
    model.compute_loss(x=x, y=y, y_pred=trained(x, training=True)).backward()
    weights = model.trainable_weights
    with torch.no_grad():
        model.optimizer.apply([weight.value.grad for weight in weights], weights)


if __name__ == "__main__":
    main()
