"""What several processes cost PyTorch's DistributedDataParallel over gloo, with the models of `keras-dp bench`.

    python examples/benchmarks/torch_ddp.py mlp resnet20 transformer

Keras runs on PyTorch. One process with W threads takes turns with W processes, which have as many rows together, and cores of
their own, as with `keras-dp launch`. Batch normalization is local. PyTorch must be installed.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

WARM_UP = 5  # steps
PORT = 29_517
MODELS = Path(__file__).parents[2] / "keras_dp" / "cli" / "models.py"


def built_in_models():
    """The module with the models. The package around it needs TensorFlow."""
    spec = importlib.util.spec_from_file_location("models", MODELS)
    module = sys.modules["models"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch(model, rows):
    """Random inputs and classes."""
    import torch

    draw = np.random.default_rng(0)
    shape, classes = (rows, *model.inputs[0].shape[1:]), model.outputs[0].shape[-1]
    tokens = "int" in model.inputs[0].dtype
    x = draw.integers(100, size=shape) if tokens else draw.standard_normal(shape, "float32")
    return torch.as_tensor(x), torch.as_tensor(draw.integers(classes, size=(rows, *model.outputs[0].shape[1:-1])))


def measure(question):
    """Trains as one of W processes, and returns the milliseconds of each step."""
    index, workers, name, steps = question
    import torch

    models = built_in_models()
    workload = models.workload(name)
    model = workload.build()
    x, y = batch(model, workload.batch_size // workers)
    trained = model
    if workers > 1:
        torch.distributed.init_process_group("gloo", rank=index, world_size=workers)
        trained = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad])
    times = []
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        logits = trained(x, training=True)
        torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - begin))
    return times[WARM_UP:]


def step_milliseconds(workers, name, steps):
    """The median of a run's steps, in new processes."""
    from keras_dp.cli.launch import cores

    environment = {**os.environ, "KERAS_BACKEND": "torch", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT)}
    processes, shares = [], cores.shares(workers)
    for index in range(workers):
        command = [sys.executable, __file__, "--one", json.dumps([index, workers, name, steps])]
        environment["OMP_NUM_THREADS"] = str(len(shares[index]) or 1)
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        cores.confine(processes[-1].pid, shares[index])
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("A process has failed: its error is above.")
    return statistics.median(json.loads(outputs[0].splitlines()[-1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["mlp", "resnet20", "transformer"], help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="how many processes (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="in each of which both run once (default: %(default)s)")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    if importlib.util.find_spec("torch") is None:
        parser.error("PyTorch is not installed: pip install torch")
    print(f"{args.workers} processes beside one with as many threads; medians of {args.rounds} rounds of {args.steps} steps")
    print(f"{'model':<14}{'1 process, ms':>14}{f'{args.workers} processes, ms':>18}{'ratio':>8}{'by round':>16}")
    for name in args.models:
        rounds = [[step_milliseconds(workers, name, args.steps) for workers in (1, args.workers)] for _ in range(args.rounds)]
        one, several = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratios = [each / alone for alone, each in rounds]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name:<14}{one:>14.2f}{several:>18.2f}{statistics.median(ratios):>8.2f}{spread:>16}", flush=True)


if __name__ == "__main__":
    main()
