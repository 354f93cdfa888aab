"""Report in one screen how a model trains on its devices, and how much faster that can be."""

import dataclasses
import html
import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp.arithmetic.share import ArithmeticOfRows
from keras_dp.batch_normalization.synchronized import batch_norms
from keras_dp.devices import variable_homes
from keras_dp.devices.available import in_words
from keras_dp.keras_internals import keras_models
from keras_dp.partition.inspecting.picture import bytes_in_words
from keras_dp.partition.step import Partition
from keras_dp.partition.tracing.user_lines import current_user_line, user_line
from keras_dp.reports.communication import communication_report
from keras_dp.reports.step_graph import refuse_what_has_no_graph
from keras_dp.reports.wrapped import Wrapped
from keras_dp.steps.random_states import same_random_states

# A GPU computes 10 to 100 TFLOP/s, and PCIe 4.0 carries 25 GB/s each way: 400 to 4,000 operations in the time of a byte.
FLOPS_OF_A_BYTE = 1000
MOST_OF_IT = 0.9  # of the arithmetic
_NOTABLE = 0.001  # of the arithmetic
_LARGE = 10**6  # bytes of a weight
_LARGEST, _LISTED = 3, 5
_WIDTH = 79


@dataclasses.dataclass(frozen=True)
class ComputedOnce:
    """An operation that one device computes for all rows, while the other devices wait.

    Attributes:
        name: the type of the operation, and the layer or function that it is in.
        reason: the reason why the devices do not divide it.
        line: the user's line that made it; "" if unknown.
        share: its share of the arithmetic, from 0 to 1; None if that is not known.
    """

    name: str
    reason: str
    line: str
    share: float | None

    def __str__(self) -> str:
        share = f" ({_percent(self.share)} of the arithmetic)" if self.share else ""
        return f"{self.name}{share}: {self.reason}" + (f"; {self.line}" if self.line else "")


@dataclasses.dataclass(frozen=True)
class Report:
    """Reports how a training step runs on N devices.

    Attributes:
        batch_rows: B, the rows of a global batch.
        workers: the number of workers. The report describes this one.
        devices: the N devices.
        rows: the rows that each device computes.
        weight_bytes: the bytes of the model's weights on each device.
        largest_weights: the paths of the largest weights, each with its bytes and its device.
        batch_norms: the number of batch normalizations.
        batch_norm: the mode of batch normalization, as in `DataParallelModel`.
        precisions: the dtype policies of the layers.
        jit_compile: whether XLA compiles the devices' operations.
        messages: the number of tensors that devices send each other in a step.
        sent_bytes: their bytes, by kind, as in `communication_report`.
        busiest_bytes: the most bytes of weights and gradients into one device, or out of one.
        flops: the floating-point operations on rows in a step of one device; None if they are not known. Operations on weights
            alone, such as an optimizer's updates, are not on rows.
        share: the share of these operations that the devices divide among themselves, from 0 to 1; None if not known.
        once: the operations that one device computes from gathered rows, those with the largest shares first.
        is_assumed: whether the number of rows is assumed, since batches of several sizes were seen.
    """

    batch_rows: int
    workers: int
    devices: list[str]
    rows: list[int]
    weight_bytes: Mapping[str, int]
    largest_weights: list[tuple[str, int, str]]
    batch_norms: int
    batch_norm: str
    precisions: list[str]
    jit_compile: bool
    messages: int
    sent_bytes: Mapping[str, int]
    busiest_bytes: int
    flops: int | None
    share: float | None
    once: list[ComputedOnce]
    is_assumed: bool = False

    @property
    def best_speed_up(self) -> float | None:
        """The speed-up over one device if nothing but arithmetic took time: 1 / (1 - p + p r); None if p is not known.

        p is the share of the arithmetic that is divided, and r the share of the rows that the busiest device has (Amdahl 1967).
        """
        if self.share is None:
            return None
        return 1 / (1 - self.share + self.share * max(self.rows) / self.batch_rows)

    @property
    def flops_per_byte(self) -> float | None:
        """The operations of the busiest device for each byte of weights and gradients that it sends or receives."""
        if self.flops is None or self.share is None or not self.busiest_bytes:
            return None
        return self.flops * (1 - self.share + self.share * max(self.rows) / self.batch_rows) / self.busiest_bytes

    @property
    def verdict(self) -> str:
        """The most important fact, in a sentence or two."""
        count, idle = len(self.devices), self.rows.count(0)
        if count * self.workers == 1:
            return "There is one device, which computes all."
        if self.batch_rows == 1:
            return "The batch counts as one row, since it has no more or all its tensors stay whole: one device computes all."
        if idle:
            return f"{idle} of {count} devices have no rows: use batches of {count * self.workers} rows or more."
        if self.share is None:
            return "How much of the arithmetic the devices divide is not known: the step takes only this number of rows."
        divided = f"The devices divide {_percent(self.share)} of the arithmetic"
        if self.share < MOST_OF_IT:
            return f"{divided}. One device computes the rest, so training is at most {self.best_speed_up:.1f} times as fast."
        if self.flops_per_byte is not None and self.flops_per_byte < FLOPS_OF_A_BYTE:
            return (
                f"{divided}, but compute only {self.flops_per_byte:,.0f} operations for each byte that they send. GPUs would "
                f"wait for their links: larger batches help, up to {self.best_speed_up:.1f} times the speed of one device."
            )
        return f"{divided}: up to {self.best_speed_up:.1f} times the speed of one device."

    @property
    def heading(self) -> str:
        """The title of the report."""
        devices = f"{len(self.devices)} device{'s' * (len(self.devices) > 1)}"
        workers = "" if self.workers == 1 else f" of each of {self.workers} workers"
        assumed = " (assumed: pass a batch for your own number)" if self.is_assumed else ""
        return f"A training step of {self.batch_rows:,} rows on {devices}{workers}{assumed}"

    def facts(self) -> dict[str, list[str]]:
        """Returns the lines of the report under their headings."""
        rows = f"{min(self.rows)} to {max(self.rows)} rows each" if len(set(self.rows)) > 1 else f"{self.rows[0]} rows each"
        facts = {"devices": [f"{in_words(self.devices)}, {rows}"]}
        places = (f"{bytes_in_words(size)} on {device}" for device, size in self.weight_bytes.items())
        largest = (f"{path}: {bytes_in_words(size)} on {device}" for path, size, device in self.largest_weights)
        facts["weights"] = [", ".join(places) or "none", *largest]
        if self.batch_norms:
            facts["batch norm"] = [f"{self.batch_norms} layer{'s' * (self.batch_norms > 1)}, {_MOMENTS[self.batch_norm]}"]
        facts["precision"] = [", ".join(self.precisions) + (", compiled by XLA" if self.jit_compile else ", without XLA")]
        kinds = ", ".join(f"{kind} {bytes_in_words(size)}" for kind, size in self.sent_bytes.items())
        total = bytes_in_words(sum(self.sent_bytes.values()))
        facts["sent"] = [f"{self.messages:,} messages, {total} in a step" + (f": {kinds}" if kinds else "")]
        if self.flops is not None and self.share is not None:
            facts["arithmetic"] = [f"{_flops_in_words(self.flops)} on rows in a step, {_percent(self.share)} of it divided"]
        counted = [str(known) + (f" ({count} of them)" if count > 1 else "") for known, count in Counter(self.once).items()]
        more = [f"and {len(counted) - _LISTED} more: print(parallel.explain(batch))"] if len(counted) > _LISTED else []
        facts["computed once"] = [*counted[:_LISTED], *more] or ["nothing on rows"]
        return facts

    def __str__(self) -> str:
        lines = [self.heading, ""]
        for heading, texts in self.facts().items():
            for label, text in zip(itertools.chain([heading], itertools.repeat("")), texts, strict=False):
                lines += _wrapped(text, f"  {label:<15}", " " * 19)
        return "\n".join([*lines, "", *_wrapped(self.verdict)])

    def _repr_html_(self) -> str:
        """Returns the table for notebooks, in their own colours."""
        rows = "".join(_html_row(heading, texts) for heading, texts in self.facts().items())
        return f"<p><b>{self.heading}</b></p><table>{rows}</table><p>{html.escape(self.verdict)}</p>"


_MOMENTS = {
    "sync": "with the moments of all rows, as on one device",
    "local": "each device with the moments of its own rows",
    "first": "each device with the moments of its own rows; statistics of the first device",
}


def report_of(parallel: Wrapped, batch: Any) -> Report:
    """Reports how a training step runs on N devices.

    Traces the step, and runs it once to see what devices send each other. All variables are restored afterwards.

    Args:
        parallel: a compiled `DataParallelModel`.
        batch: a global batch of B rows, as `fit` feeds it: (x, y) or (x, y, sample_weight).

    Raises:
        ValueError: if the model is not a compiled `DataParallelModel`, or runs eagerly.
    """
    refuse_what_has_no_graph("report()", parallel)
    sent = communication_report(parallel, batch)
    steps, model = parallel.tower_steps, parallel.inner_model
    own = steps.inputs.cut(steps.on_host(batch, finds_whole=True))
    slices = steps.slices_of(batch)
    with same_random_states():
        traced = steps.trace("train", slices)
        partition = traced.partition(steps.home)
        arithmetic = traced.arithmetic(partition)
    kinds: Counter[str] = Counter()
    for row in sent.copies:
        kinds[row.kind] += row.bytes
    layers = keras_models.flatten_layers(model)
    return Report(
        devices=parallel.devices,
        batch_rows=int(slices[0].batch_rows),
        workers=steps.inputs.collectives.count,
        rows=[int(part.rows) for part in own],
        weight_bytes=_weight_bytes(model.weights),
        largest_weights=_largest(model.weights),
        batch_norms=len(batch_norms(model)),
        batch_norm=steps.batch_norm,
        precisions=sorted({layer.dtype_policy.name for layer in layers if layer.weights}) or [keras.config.floatx()],
        jit_compile=steps.jit_compile,
        messages=sum(row.number for row in sent.copies),
        sent_bytes={kind: size for kind, size in kinds.items() if size},
        busiest_bytes=sent.busiest_bytes,
        flops=arithmetic.total if arithmetic else None,
        share=arithmetic.share if arithmetic else None,
        once=sorted(_computed_once(partition, arithmetic), key=lambda known: -(known.share or 0)),
    )


def _computed_once(partition: Partition, arithmetic: ArithmeticOfRows | None) -> Iterator[ComputedOnce]:
    asked = current_user_line()
    total = arithmetic.total if arithmetic else 0
    shares = {name: flops / total for name, flops in arithmetic.once.items()} if arithmetic and total else {}
    reasons = {known.name: known.reason for known in partition.gathered}
    types = {node.name: node.op for node in partition.traced.nodes}
    for name in {**reasons, **shares}:
        if name in reasons or shares[name] >= _NOTABLE:
            reason = reasons.get(name, "it takes tensors that one device has computed")
            share = shares.get(name, 0.0) if arithmetic else None
            line = user_line(partition.traced.graph, name)
            within = name.rpartition("/")[0]
            described = f"{types[name]} in {within}" if within else types[name]
            # Keras makes most operations for the line that has asked for the report.
            yield ComputedOnce(described, reason, "" if line == asked else line, share)


def _weight_bytes(weights: Sequence[keras.Variable]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for weight in weights:
        sizes[variable_homes.home(weight)] += _bytes(weight)
    return dict(sorted(sizes.items()))


def _largest(weights: Sequence[keras.Variable]) -> list[tuple[str, int, str]]:
    by_size = sorted(weights, key=_bytes, reverse=True)[:_LARGEST]
    return [(weight.path, _bytes(weight), variable_homes.home(weight)) for weight in by_size if _bytes(weight) >= _LARGE]


def _bytes(weight: keras.Variable) -> int:
    return math.prod(weight.shape) * tf.as_dtype(weight.dtype).size


def _wrapped(text: str, first: str = "", following: str = "") -> list[str]:
    """Returns lines that fit in a terminal. A number and its unit stay together."""
    together = re.sub(r"(?<=\d) (?=[%A-Za-z])", "\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(together, _WIDTH, initial_indent=first, subsequent_indent=following, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _percent(share: float) -> str:
    """Returns a share in percent. All of it is 100 %, and nothing else is.

    >>> _percent(1.0), _percent(0.99997), _percent(1e-6)
    ('100 %', '99.9 %', 'less than 0.1 %')
    """
    if share == 1:
        return "100 %"
    return f"{math.floor(1000 * share) / 10:.1f} %" if share >= 0.001 else "less than 0.1 %"


def _flops_in_words(flops: int) -> str:
    for unit, size in (("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6)):
        if flops >= size:
            return f"{flops / size:.1f} {unit}"
    return f"{flops:,} operations"


def _html_row(heading: str, texts: Sequence[str]) -> str:
    cell = '<td style="text-align: left; vertical-align: top">'
    return f"<tr>{cell}{html.escape(heading)}</td>{cell}{'<br>'.join(map(html.escape, texts))}</td></tr>"
