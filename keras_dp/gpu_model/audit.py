"""Audit what a training step would do on GPUs, on a machine that has none."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from keras_dp.gpu_model.placement import PlacedCopy, PlacedStep, place_step
from keras_dp.model import DataParallelModel
from keras_dp.partition.tracing.names import source_of
from keras_dp.reports.kinds_of_copies import KINDS, KindsOfCopies
from keras_dp.reports.step_graph import StepGraph, graph_of_step

_TOWER = re.compile(r"partitioned/tower_(\d+)/")


@dataclasses.dataclass(frozen=True)
class GpuAudit:
    """Counts what costs time on GPUs beside the operations themselves, in one training step of N towers.

    Attributes:
        copies: the number of tensors that devices send each other from or to a GPU's memory, by kind and pair of devices.
            The kinds are those of `communication_report`.
        host_copies: the number of tensors that devices send each other within the host's memory, such as shapes.
        controls: the number of control dependencies between devices, by pair of devices.
        to_host: the tensors that a GPU makes in its memory and takes from the host's, by the types of maker and taker.
        from_host: the same, the other way.
        without_kernel: the operations that stand on a GPU and have no kernel there, by type.
        misplaced: the names of the towers' operations that do not stand on their tower's device.
    """

    copies: Counter[tuple[str, str, str]]
    host_copies: int
    controls: Counter[tuple[str, str]]
    to_host: Counter[tuple[str, str]]
    from_host: Counter[tuple[str, str]]
    without_kernel: Counter[str]
    misplaced: tuple[str, ...]

    def number_of(self, *kinds: str) -> int:
        """Returns the number of copies of some kinds."""
        return sum(number for (kind, _, _), number in self.copies.items() if kind in kinds)

    def most_sent(self, *kinds: str) -> int:
        """Returns the most copies of some kinds that one device sends."""
        return max(self._by_end(1, kinds).values(), default=0)

    def most_received(self, *kinds: str) -> int:
        """Returns the most copies of some kinds that one device receives."""
        return max(self._by_end(2, kinds).values(), default=0)

    def _by_end(self, end: int, kinds: tuple[str, ...]) -> Counter[str]:
        counts: Counter[str] = Counter()
        for row, number in self.copies.items():
            if row[0] in kinds:
                counts[row[end]] += number
        return counts

    def __str__(self) -> str:
        lines = [f"{'copies between devices':<32}{'number':>8}{'one sends':>12}{'one receives':>14}"]
        for kind in KINDS:
            lines.append(f"  {kind:<30}{self.number_of(kind):>8}{self.most_sent(kind):>12}{self.most_received(kind):>14}")
        facts = {
            "within the host's memory": str(self.host_copies),
            "control edges between devices": str(self.controls.total()),
            "from a GPU to its host": _listed(self.to_host),
            "from the host to its GPU": _listed(self.from_host),
            "operations without a GPU kernel": _listed(self.without_kernel),
            "operations on a wrong device": ", ".join(self.misplaced[:3]) or "none",
        }
        return "\n".join([*lines, *(f"{name:<32}{fact:>8}" for name, fact in facts.items())])


def audit_step(parallel: DataParallelModel, batch: Any) -> GpuAudit:
    """Audits the training step of a model that was built, wrapped and compiled inside `logical_cpus_for_gpus`.

    Runs the step once on the batch. All variables are restored afterwards.

    Args:
        parallel: a compiled `DataParallelModel` that does not run eagerly.
        batch: one global batch as `fit` takes it from a dataset: `x`, `(x, y)` or `(x, y, sample_weight)`.

    Raises:
        ValueError: if the model is not a compiled `DataParallelModel`, or runs eagerly, or its step changes other state than
            variables.
    """
    step = graph_of_step(parallel, batch)
    return audit(parallel, step, place_step(step, parallel.num_towers, parallel.devices))


def audit(parallel: DataParallelModel, step: StepGraph, placed: PlacedStep) -> GpuAudit:
    """Audits a step that was collected and placed before."""
    kinds = kinds_of_copies(parallel, step, placed)
    audited = GpuAudit(Counter(), 0, Counter(), Counter(), Counter(), Counter(), tuple(_misplaced(placed)))
    host_copies = 0
    for copy in placed.copies:
        if copy.from_host and copy.to_host:
            host_copies += 1
        elif copy.source == copy.destination:
            (audited.from_host if copy.from_host else audited.to_host)[_types(copy, placed)] += 1
        else:
            audited.copies[kinds[copy], copy.source, copy.destination] += 1
    audited.controls.update((control.source, control.destination) for control in placed.controls)
    audited.without_kernel.update(operation.type for operation in placed.operations.values() if not operation.has_kernel)
    return dataclasses.replace(audited, host_copies=host_copies)


def kinds_of_copies(parallel: DataParallelModel, step: StepGraph, placed: PlacedStep) -> dict[PlacedCopy, str]:
    """Returns the kind of each copy from one device to another, one of `KINDS`."""
    captured = ((f"{name}:0", outside) for name, (outside, _) in step.captured().items() if name in placed.operations)
    handles = {id(outside): name for name, outside in captured}
    kinds = KindsOfCopies(placed.graph, set(step.names_of_slices), parallel.inner_model, handles)
    return {
        copy: kinds.kind(source_of(copy.tensor), copy.takers)
        for copy in placed.copies
        if copy.source != copy.destination and not (copy.from_host and copy.to_host)
    }


def _types(copy: PlacedCopy, placed: PlacedStep) -> tuple[str, str]:
    maker, taker = source_of(copy.tensor), copy.takers[0]
    return placed.operations[maker].type, placed.operations[taker].type


def _misplaced(placed: PlacedStep) -> Iterator[str]:
    for name, operation in placed.operations.items():
        # TensorFlow gives each device that takes a small constant a constant of its own.
        tower = None if "/replicate/" in name else _TOWER.match(name)
        if tower is not None and operation.wanted_device != placed.towers[int(tower[1])]:
            yield name


def _listed(counts: Counter[Any]) -> str:
    """Lists the largest counts in words."""
    if not counts:
        return "none"
    names = [f"{number} {name if isinstance(name, str) else ' to '.join(name)}" for name, number in counts.most_common(3)]
    return f"{counts.total()}: {', '.join(names)}{', ...' if len(counts) > 3 else ''}"
