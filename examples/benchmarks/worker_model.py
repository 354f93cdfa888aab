"""A model on paper, not a measurement: how long a step takes on 2 to 256 workers that have the same number of rows each.

A ring all-reduce of P bytes takes 2 (W - 1) alpha + 2 (W - 1) / W * P / bandwidth (Patarasuk and Yuan 2009). The gradients are
summed in buckets while the backward pass goes on; the sums of synchronized batch normalization are waited for. For the
assumptions see docs/benchmarks.md.
"""

import argparse
import math
from typing import NamedTuple

from keras_dp.workers.buckets import BUCKET_BYTES

BACKWARD_SHARE = 2 / 3  # of what a step computes
WIRE_BYTES = {"float32": 4, "bfloat16": 2}


class Model(NamedTuple):
    """What is trained.

    Attributes:
        parameters: the number of trainable ones.
        batch_norms: how many batch normalizations are synchronized.
        compute: the milliseconds that a worker computes in a step, with its own rows.
    """

    parameters: float
    batch_norms: int
    compute: float


class Network(NamedTuple):
    """What connects the workers.

    Attributes:
        latency: alpha, the seconds that a message takes however small it is.
        bandwidth: in bytes per second, in each direction; both directions are in use at once.
    """

    latency: float
    bandwidth: float


MODELS = {
    "mlp": Model(669_706, 0, 5),
    "resnet20": Model(269_722, 19, 100),
    "resnet20 local": Model(269_722, 0, 100),
    "resnet50": Model(25_583_592, 53, 100),
    "resnet50 local": Model(25_583_592, 0, 100),
    "transformer": Model(110_000_000, 0, 200),
}


def latency(workers, network):
    """The seconds that a ring all-reduce takes however small it is: its messages follow each other."""
    return 2 * (workers - 1) * network.latency


def transfer(size, workers, network):
    """The seconds that the bytes of a ring all-reduce take through each worker's link."""
    return 2 * (workers - 1) / workers * size / network.bandwidth


def step(model, wire_bytes, workers, network, in_turn):
    """The seconds of a step.

    Gradients become ready evenly over the backward pass. A bucket is sent when it is full and the one before it is through.

    Args:
        model: a `Model`.
        wire_bytes: of each gradient's number.
        workers: W.
        network: a `Network`.
        in_turn: whether a bucket also waits for the latency of the one before it.
    """
    round_trip = latency(workers, network)
    compute = model.compute / 1e3
    # Batch normalization waits for a gather of the moments, once around the ring, and for one of their gradients.
    forward = compute * (1 - BACKWARD_SHARE) + model.batch_norms * round_trip / 2
    backward = compute * BACKWARD_SHARE + model.batch_norms * round_trip / 2
    size = model.parameters * wire_bytes
    end = free = 0.0
    for bucket in range(math.ceil(size / BUCKET_BYTES)):
        begin, full = bucket * BUCKET_BYTES, min((bucket + 1) * BUCKET_BYTES, size)
        ready = forward + backward * full / size
        through = max(ready, free) + transfer(full - begin, workers, network)
        end = through + round_trip
        free = end if in_turn else through
    return end


def compute_time(text):
    """NAME=MS from the command line."""
    name, _, milliseconds = text.partition("=")
    if name not in MODELS:
        raise argparse.ArgumentTypeError(f"One of {', '.join(MODELS)}, as in mlp=5. Received: {text!r}")
    return name, float(milliseconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=", ".join(MODELS))
    parser.add_argument(
        "--compute",
        nargs="+",
        type=compute_time,
        default=[],
        metavar="NAME=MS",
        help="of a step on one worker (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        nargs="+",
        type=int,
        default=[2**k for k in range(1, 9)],
        metavar="W",
        help="how many there are (default: %(default)s)",
    )
    parser.add_argument(
        "--gbits", nargs="+", type=float, default=[10, 100, 400], help="of the networks, each way (default: %(default)s)"
    )
    parser.add_argument(
        "--alpha", type=float, default=50, metavar="µs", help="that a message takes however small it is (default: %(default)s)"
    )
    parser.add_argument("--in-turn", action="store_true", help="one bucket after the other, latency included")
    args = parser.parse_args()
    models = {name: MODELS[name] for name in args.models}
    models |= {name: models[name]._replace(compute=ms) for name, ms in args.compute if name in models}
    print("A model, not a measurement: what a step computes, as a percentage of what it takes; the same rows for each worker")
    print(f"{args.alpha:g} µs a message; buckets {'one after the other' if args.in_turn else 'at once, sharing the bandwidth'}")
    columns = "".join(f"{f'W = {workers}':>9}" for workers in args.workers)
    print(f"{'model':<16}{'compute':>8}{'':<3}{'gradients':<11}{'Gbit/s':>6}{columns}")
    for name, model in models.items():
        for wire, wire_bytes in WIRE_BYTES.items():
            for gbits in args.gbits:
                network = Network(args.alpha / 1e6, gbits * 1e9 / 8)
                steps = [step(model, wire_bytes, workers, network, args.in_turn) for workers in args.workers]
                shares = "".join(f"{model.compute / 10 / seconds:>9.1f}" for seconds in steps)
                print(f"{name:<16}{model.compute:>5g} ms{'':<3}{wire:<11}{gbits:>6g}{shares}")


if __name__ == "__main__":
    main()
