"""List when a simulated step computes and sends, in the format that trace viewers read."""

from collections.abc import Iterator, Mapping
from typing import Any

from keras_dp.gpu_model.placement import PlacedCopy, PlacedStep
from keras_dp.gpu_model.schedule import Span
from keras_dp.gpu_model.simulation import Simulation, runs_on_host
from keras_dp.partition.tensorflow_internals import HOST

_HOST = "the host"


def timeline(step: PlacedStep, simulation: Simulation, kinds: Mapping[PlacedCopy, str]) -> dict[str, Any]:
    """Returns the operations and copies of a simulated step as the Trace Event Format of Chrome.

    Each GPU is a process of the trace. One of its threads shows what it computes, one for each sender shows what it receives.
    Operations that take no time are left out. Perfetto (https://ui.perfetto.dev) and chrome://tracing show the trace. Its times
    are microseconds.

    Args:
        step: the step.
        simulation: its simulation.
        kinds: the kinds of the copies between GPUs, as `keras_dp.gpu_model.audit.kinds_of_copies` finds them.
    """
    processes = {device: i for i, device in enumerate((*step.towers, HOST))}
    threads: dict[tuple[str, str], int] = {}
    events = []
    for device, row, event, span in _spans(step, simulation, kinds):
        if span.finish > span.start:
            where = {"pid": processes[device], "tid": threads.setdefault((device, row), len(threads))}
            when = {"ts": 1e6 * span.start, "dur": 1e6 * (span.finish - span.start)}
            events.append({"ph": "X", **where, **when, **event})
    for device, process in processes.items():
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": _named(device)}})
    for (device, row), thread in threads.items():
        events.append({"ph": "M", "name": "thread_name", "pid": processes[device], "tid": thread, "args": {"name": row}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _spans(
    step: PlacedStep, simulation: Simulation, kinds: Mapping[PlacedCopy, str]
) -> Iterator[tuple[str, str, dict[str, Any], Span]]:
    """Yields the device, the row, the event and the times of each operation, and of each copy to or from a GPU."""
    for name, operation in step.operations.items():
        row = "its host computes" if runs_on_host(operation) and operation.device != HOST else "computes"
        event = {"name": operation.type, "cat": "computes", "args": {"operation": name}}
        yield operation.device, row, event, simulation.spans[name]
    for copy in step.copies:
        if copy.from_host and copy.to_host:
            continue
        sender = _HOST if copy.from_host else _named(copy.source)
        row = f"to {_HOST}" if copy.to_host and copy.source == copy.destination else f"receives from {sender}"
        kind = kinds.get(copy, "host")
        arguments = {"tensor": copy.tensor, "bytes": step.sizes.bytes_of(copy.tensor)}
        yield copy.destination, row, {"name": kind, "cat": kind, "args": arguments}, simulation.spans[copy]


def _named(device: str) -> str:
    return _HOST if device == HOST else device
