"""A model on paper, not a measurement: how long the weights and gradients of a step travel between eight GPUs.

The bytes and copies are those that `keras_dp.communication_report` reads off the graphs for eight logical CPUs. The times are
those of the alpha-beta model (Thakur, Rabenseifner and Gropp 2005): a copy takes alpha + bytes / beta. For the assumptions see
docs/placement_model.md.
"""

import argparse
import math
from collections import defaultdict
from typing import NamedTuple

import keras_dp
from keras_dp.cli import models, synthetic

MODELS = ("mlp", "resnet20", "transformer", "resnet50")
TOWERS = 8
PARAMETER_DEVICES = {"one device": "CPU:0", "sharded": "sharded"}
RING_BUCKET_BYTES = 25e6


class Link(NamedTuple):
    """What connects each GPU with the others.

    Attributes:
        name: as in the table.
        latency: alpha, the seconds that a copy takes however small it is.
        bandwidth: beta, in bytes per second, in each direction; both directions can be in use at once.
    """

    name: str
    latency: float
    bandwidth: float


class Load(NamedTuple):
    """What goes through the link of one device in one direction: the number of copies, and their bytes."""

    copies: int
    bytes: float

    def seconds(self, link):
        """How long it takes if one copy follows the other."""
        return self.copies * link.latency + self.bytes / link.bandwidth


LINKS = (Link("PCIe 4.0", 10e-6, 25e9), Link("NVLink 3", 5e-6, 250e9))


def measure(model_name, parameter_device):
    """The `keras_dp.CommunicationReport` of a model's step, with its usual batch."""
    workload = models.workload(model_name)
    model = workload.build()
    parallel = keras_dp.DataParallelModel(model, devices=TOWERS, parameter_device=parameter_device)
    parallel.compile(models.optimizer(), **workload.objective())
    return keras_dp.communication_report(parallel, next(iter(synthetic.dataset(model, workload.batch_size))))


def device_loads(report, kind):
    """The load of each device in each direction, for "weights" or "gradients"."""
    loads = defaultdict(lambda: Load(0, 0))
    for row in report.copies:
        if row.kind == kind:
            for end in (("out of", row.source), ("into", row.destination)):
                loads[end] = Load(loads[end].copies + row.number, loads[end].bytes + row.bytes)
    return loads.values()


def ring_load(weight_bytes):
    """What each device sends, and receives at once, in ring all-reduces of all gradients (Patarasuk and Yuan 2009)."""
    buckets = math.ceil(weight_bytes / RING_BUCKET_BYTES)
    return Load(2 * (TOWERS - 1) * buckets, 2 * weight_bytes * (TOWERS - 1) / TOWERS)


def print_row(model_name, placement, link, bytes_each_way, loads):
    """Prints what the phases of a step take, whose loads wait for each other."""
    copies = sum(load.copies for load in loads)
    transferred = sum(load.bytes for load in loads)
    milliseconds = 1e3 * sum(load.seconds(link) for load in loads)
    latency = 1e3 * copies * link.latency
    print(
        f"{model_name:<13}{placement:<12}{link.name:<10}{bytes_each_way / 1e6:>9.2f}{copies:>10}{transferred / 1e6:>10.2f}"
        f"{latency:>12.3f}{milliseconds - latency:>11.3f}{milliseconds:>9.3f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=MODELS, help="ResNet-50 takes about a minute (default: %(default)s)"
    )
    args = parser.parse_args()
    keras_dp.use_logical_cpus(TOWERS)
    print(f"A model, not a measurement: {TOWERS} GPUs, weights and gradients of one step, alone on their links")
    for link in LINKS:
        print(f"{link.name}: {1e6 * link.latency:.0f} µs a copy, {link.bandwidth / 1e9:.0f} GB/s each way")
    print(f"{'':<35}{'each way,':>9}{'one after the other':>20}{'latency,':>12}{'transfer,':>11}{'sum,':>9}")
    print(f"{'model':<13}{'placement':<12}{'link':<10}{'MB':>9}{'copies':>10}{'MB':>10}{'ms':>12}{'ms':>11}{'ms':>9}")
    for model_name in args.models:
        reports = {placement: measure(model_name, device) for placement, device in PARAMETER_DEVICES.items()}
        for link in LINKS:
            for placement, report in reports.items():
                phases = [device_loads(report, kind) for kind in ("weights", "gradients")]
                slowest = [max(loads, key=lambda load: load.seconds(link)) for loads in phases]
                print_row(model_name, placement, link, report.busiest_bytes, slowest)
            ring = ring_load(report.weight_bytes)
            print_row(model_name, "ring", link, ring.bytes, [ring])


if __name__ == "__main__":
    main()
