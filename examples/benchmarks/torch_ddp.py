"""Time training steps of keras_dp and of PyTorch's DistributedDataParallel on the cores of this machine, in turns.

    python examples/benchmarks/torch_ddp.py --rounds 5

The MLP of `keras-dp bench` trains on batches of 256 rows, and a convolutional network on batches of 128 images of 28 x 28
pixels. PyTorch's models have the same layers, optimizer and loss, and other random numbers. "single" is plain Keras, and
"torch" is PyTorch: both train in one process with all cores. "keras_dp" has two towers in one process. "workers" are two
processes with a tower each, and "ddp" are two processes with DistributedDataParallel over gloo; each process has half of the
cores. Batch normalization is local. A time is the median of the rounds, each of which has the median of its steps.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from keras_dp.cli.runs import Run, measure_in_new_process

BATCHES, WARM_UP, PROCESSES = 16, 10, 2
MODELS = {"mlp": (256, (784,)), "cnn": (128, (1, 28, 28))}  # the rows of a batch, and the shape of a row for PyTorch
ENGINES = ("single", "keras_dp", "workers", "torch", "ddp")
COLUMNS = "{:<8}{:<11}{:>10}{:>28}"


def mlp():
    """The MLP of `keras-dp bench`."""
    from keras_dp.cli import models

    return compiled(models.mlp())


def cnn():
    """The convolutional network."""
    from keras import Input, Sequential, layers

    stack = [Input((28, 28, 1))]
    for filters in (16, 32, 64):
        stack += [layers.Conv2D(filters, 3, padding="same", use_bias=False), layers.BatchNormalization()]
        stack += [layers.ReLU(), layers.MaxPooling2D()]
    return compiled(Sequential([*stack, layers.Flatten(), layers.Dense(10)]))


def compiled(model):
    """A model of Keras without metrics, because PyTorch's steps have none."""
    from keras_dp.cli import models

    model.compile(models.optimizer(), models.classification()["loss"])
    return model


def of_torch(name):
    """The same model in PyTorch."""
    from torch import nn

    if name == "mlp":
        return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    layers = []
    for before, filters in itertools.pairwise((1, 16, 32, 64)):
        layers += [nn.Conv2d(before, filters, 3, padding=1, bias=False), nn.BatchNorm2d(filters), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(576, 10))


def train(name, steps, index, count, meeting):
    """Trains with PyTorch on every `count`th row, from row `index`, and prints the median milliseconds of a step."""
    import torch

    cores = sorted(os.sched_getaffinity(0))[index::count]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    torch.manual_seed(0)
    rows, shape = MODELS[name]
    x, y = torch.randn(BATCHES, rows, *shape)[:, index::count], torch.randint(10, (BATCHES, rows))[:, index::count]
    model, loss, milliseconds = of_torch(name), torch.nn.CrossEntropyLoss(), []
    if count > 1:
        torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=index, world_size=count)
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for step in range(WARM_UP + steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        value = loss(model(x[step % BATCHES]), y[step % BATCHES])
        value.backward()
        optimizer.step()
        value.item()  # Keras, too, reads the loss of each step
        milliseconds.append(1e3 * (time.perf_counter() - begin))
    print(statistics.median(milliseconds[WARM_UP:]))


def measure(name, engine, steps):
    """The median milliseconds of an engine's steps, in processes of its own."""
    count = PROCESSES if engine in ("workers", "ddp") else 1
    if engine not in ("torch", "ddp"):
        model, towers = f"{Path(__file__).stem}:{name}", 1 if engine == "single" else PROCESSES
        run = Run(engine, towers, MODELS[name][0], model, count, batch_norm="local", steps=steps, warm_up=WARM_UP)
        return statistics.median(measure_in_new_process(run).step_milliseconds)
    with tempfile.TemporaryDirectory() as directory:
        questions = [json.dumps([name, steps, index, count, f"{directory}/meeting"]) for index in range(count)]
        commands = [[sys.executable, __file__, "--one", question] for question in questions]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
        printed, *_ = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{engine} has failed.")
    return float(printed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of one run of each engine (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each run (default: %(default)s)")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train(*options.one)
        return
    os.chdir(Path(__file__).parent)  # where the processes find the models
    print(COLUMNS.format("model", "engine", "step, ms", "keras_dp over it (range)"))
    for name in MODELS:
        rounds = [{engine: measure(name, engine, options.steps) for engine in ENGINES} for _ in range(options.rounds)]
        for engine in ENGINES:
            ratios = [measured["keras_dp"] / measured[engine] for measured in rounds]
            step = statistics.median(measured[engine] for measured in rounds)
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(COLUMNS.format(name, engine, f"{step:.2f}", ratio), flush=True)


if __name__ == "__main__":
    main()
