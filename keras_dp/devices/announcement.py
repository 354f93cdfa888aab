"""Say in one line which devices train."""

from collections.abc import Sequence

from keras_dp.devices.available import in_words

BATCH_NORM = {
    "sync": "batch norm synchronized",
    "local": "batch norm of each tower",
    "first": "batch norm of each tower, statistics of the first",
}


def towers(devices: Sequence[str]) -> str:
    """Describes the towers and their devices.

    >>> towers(["GPU:0", "GPU:1"])
    '2 towers on GPU:0 and GPU:1'
    >>> towers(["GPU:0", "GPU:0"])
    '2 towers in turns on GPU:0'
    """
    places = [*dict.fromkeys(devices)]
    in_turns = " in turns" if len(places) < len(devices) else ""
    return f"{len(devices)} tower{'s' if len(devices) > 1 else ''}{in_turns} on {in_words(places)}"


SPREAD = 'parameter_device="sharded" would spread the variables, and is likely faster'


def training(
    devices: Sequence[str], workers: int, rows: Sequence[int] | None, batch_norm: str | None, should_spread: bool = False
) -> str:
    """Describes the workers, towers, devices and rows of a training, and its batch normalization.

    >>> training(["GPU:0", "GPU:1"], 1, [16, 16], "sync")
    '2 towers on GPU:0 and GPU:1; global batch 32, 16 rows a tower; batch norm synchronized'

    Args:
        devices: the devices of a worker's N towers.
        workers: the number of workers.
        rows: the numbers of rows in the slices of a global batch; None if they are not known.
        batch_norm: a mode of `DataParallelModel`; None if the model has no batch normalization.
        should_spread: whether to advise to spread the variables over the devices.
    """
    parts = [towers(devices) if workers == 1 else f"{workers} workers, each with {towers(devices)}"]
    if rows is not None:
        least, most = min(rows), max(rows)
        of_tower = least if least == most else f"{least} {'or' if most == least + 1 else 'to'} {most}"
        parts.append(f"global batch {sum(rows)}, {of_tower} rows a tower")
    elif len(devices) * workers > 1:
        parts.append("each tower takes its part of every batch")
    if batch_norm is not None:
        parts.append(BATCH_NORM[batch_norm])
    if should_spread:
        parts.append(SPREAD)
    return "; ".join(parts)
