"""Tell in one screen how a model trains on its devices, and how much faster that can be."""

import dataclasses
import html
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.padding import Padding
from rich.table import Table

from keras_dp import tables
from keras_dp.devices.announcement import SPREAD
from keras_dp.devices.available import in_words
from keras_dp.partition.inspecting.explanation import bytes_in_words

# A GPU computes 10 to 100 TFLOP/s, and PCIe 4.0 carries 25 GB/s each way: 400 to 4,000 operations in the time of a byte.
FLOPS_OF_A_BYTE = 1000
ALMOST_ALL = 0.9  # of the arithmetic
NOTABLE = 0.001  # of the arithmetic
_OPERATIONS_LISTED = 5
_WIDTH = 79
_TOGETHER = "\N{BRAILLE PATTERN BLANK}"  # stands for a space where no line may end: a letter for all that wraps lines


@dataclasses.dataclass(frozen=True)
class ComputedOnce:
    """Describes an operation that one device computes for all rows, while the other devices wait.

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
        should_spread: whether it is likely faster to spread the weights over the devices.
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
        slices: into how many slices each device's rows are cut, which it computes one after the other.
        kept_bytes: the bytes of rows that each slice keeps while others of its device compute, where they meet in the middle.
        peak_bytes: the most bytes that TensorFlow has held so far on each device, for devices that count them, as GPUs do.
    """

    batch_rows: int
    workers: int
    devices: list[str]
    rows: list[int]
    weight_bytes: Mapping[str, int]
    largest_weights: list[tuple[str, int, str]]
    should_spread: bool
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
    slices: int = 1
    kept_bytes: int = 0
    peak_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def best_speed_up(self) -> float | None:
        """The speed-up over one device if nothing but arithmetic took time: 1 / (1 - p + p r); None if p or r is not known.

        p is the share of the arithmetic that is divided, and r the share of the rows that the busiest device has (Amdahl 1967).
        """
        if self.share is None or not max(self.rows):
            return None
        return 1 / (1 - self.share + self.share * max(self.rows) / self.batch_rows)

    @property
    def flops_per_byte(self) -> float | None:
        """The operations of the busiest device for each byte of weights and gradients that it sends or receives.

        None if they are not known: the bytes between workers are not counted.
        """
        if self.flops is None or self.share is None or not self.busiest_bytes or self.workers > 1:
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
        if self.share is None or self.best_speed_up is None:
            return (
                "How much of the arithmetic the devices divide is not known: the step takes no other number of rows, or "
                "nothing that is counted grows with them."
            )
        divided = f"The devices divide {_percent(self.share)} of the arithmetic"
        if self.share < ALMOST_ALL:
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
        if self.slices > 1:
            kept = f"each keeps {bytes_in_words(self.kept_bytes)} of its rows, since they meet in the middle"
            alone = "with the activations of one at a time in memory"
            facts["slices"] = [f"{self.slices} on each device, one after the other; {kept if self.kept_bytes else alone}"]
        places = (f"{bytes_in_words(size)} on {device}" for device, size in self.weight_bytes.items())
        largest = (f"{path}: {bytes_in_words(size)} on {device}" for path, size, device in self.largest_weights)
        advice = [SPREAD] * self.should_spread
        facts["weights"] = [", ".join(places) or "none", *largest, *advice]
        if self.peak_bytes:
            peaks = (f"{bytes_in_words(size)} on {device}" for device, size in self.peak_bytes.items())
            facts["memory"] = [f"at most {', '.join(peaks)} since the program began"]
        if self.batch_norms:
            moments = _MOMENTS[self.batch_norm].format(part="slice" if self.slices > 1 else "device")
            facts["batch norm"] = [f"{self.batch_norms} layer{'s' * (self.batch_norms > 1)}, {moments}"]
        facts["precision"] = [", ".join(self.precisions) + (", compiled by XLA" if self.jit_compile else ", without XLA")]
        kinds = ", ".join(f"{kind} {bytes_in_words(size)}" for kind, size in self.sent_bytes.items())
        total = bytes_in_words(sum(self.sent_bytes.values()))
        among = "" if self.workers == 1 else " between this worker's devices"
        facts["sent"] = [f"{self.messages:,} messages, {total} in a step{among}" + (f": {kinds}" if kinds else "")]
        if self.flops is not None and self.share is not None:
            facts["arithmetic"] = [f"{_flops_in_words(self.flops)} on rows in a step, {_percent(self.share)} of it divided"]
        counted = [str(known) + (f" ({count} of them)" if count > 1 else "") for known, count in Counter(self.once).items()]
        others = len(counted) - _OPERATIONS_LISTED
        more = [f"and {others} more: print(parallel.explain(batch))"] if others > 0 else []
        facts["computed once"] = [*counted[:_OPERATIONS_LISTED], *more] or ["nothing on rows"]
        return facts

    def __str__(self) -> str:
        facts = Table.grid(padding=(0, 2, 0, 0))
        facts.add_column()
        facts.add_column(overflow="fold")
        for heading, texts in self.facts().items():
            facts.add_row(heading, "\n".join(map(_together, texts)))
        drawn = Group(self.heading, "", Padding(facts, (0, 0, 0, 2)), "", _together(self.verdict))
        return tables.text(drawn, _WIDTH).replace(_TOGETHER, " ")

    def _repr_html_(self) -> str:
        """Returns the table for notebooks, in their own colours."""
        rows = "".join(_html_row(heading, texts) for heading, texts in self.facts().items())
        return f"<p><b>{self.heading}</b></p><table>{rows}</table><p>{html.escape(self.verdict)}</p>"


_MOMENTS = {
    "sync": "with the moments of all rows, as on one device",
    "local": "each {part} with the moments of its own rows",
    "first": "each {part} with the moments of its own rows; statistics of the first {part}",
}


def _together(text: str) -> str:
    """Returns a text in which a number and its unit are one word."""
    return re.sub(r"(?<=\d) (?=[%A-Za-z])", _TOGETHER, text)


def _percent(share: float) -> str:
    """Returns a share in percent. All of it is 100 %, and nothing else is.

    >>> _percent(1.0), _percent(0.99997), _percent(1e-6)
    ('100 %', '99.9 %', 'less than 0.1 %')
    """
    if share == 1:
        return "100 %"
    return f"{math.floor(1000 * share) / 10:.1f} %" if share >= NOTABLE else "less than 0.1 %"


def _flops_in_words(flops: int) -> str:
    for unit, size in (("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6)):
        if flops >= size:
            return f"{flops / size:.1f} {unit}"
    return f"{flops:,} operations"


def _html_row(heading: str, texts: Sequence[str]) -> str:
    cell = '<td style="text-align: left; vertical-align: top">'
    return f"<tr>{cell}{html.escape(heading)}</td>{cell}{'<br>'.join(map(html.escape, texts))}</td></tr>"
