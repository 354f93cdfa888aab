"""Train a few steps, and compare them with one device and with themselves."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_dp.batches.speeds import shares_by_speed
from keras_dp.callbacks import InputWait
from keras_dp.cli.check.findings import Finding
from keras_dp.keras_internals import keras_models
from keras_dp.reports.report import ALMOST_ALL
from keras_dp.reports.step_check import check_step
from keras_dp.reports.step_graph import UnrepeatableStepError

_LARGE_BYTES = 1e6
_FEW_ROWS = 8
_STEPS = 8
_ALIKE = 1.15  # times the time of the fastest device
_ROUNDING = 1e-6  # of weights, by which two steps may differ if a kernel adds in any order


def result(parallel: Any, batch: Any) -> Finding:
    """Compares a training step on one device and on towers."""
    try:
        check = check_step(parallel, batch)
    except UnrepeatableStepError as error:
        return Finding("result", "warn", "a step on towers is not compared with one device", str(error))
    first, *others = str(check).splitlines()
    if check.is_exact:
        return Finding("result", "pass", first, table=tuple(line.strip() for line in others))
    advice = "Results are not those of one device: please report this with the model, and train with devices=1 until then."
    return Finding("result", "fail", first, advice, tuple(line.strip() for line in others))


def repeated(build: Callable[[], Any], batches: tf.data.Dataset) -> Finding:
    """Trains twice from the same seed."""
    weights = []
    # A dataset may be shuffled anew each time.
    taken = list(batches.take(2))
    for _ in range(2):
        keras.utils.set_random_seed(7)
        parallel = build()
        for batch in taken:
            parallel.fit(tf.data.Dataset.from_tensors(batch), shuffle=False, verbose=0)
        weights.append(parallel.inner_model.get_weights())
    apart = max((float(np.max(np.abs(a - b), initial=0.0)) for a, b in zip(*weights, strict=True)), default=0.0)
    if apart == 0:
        return Finding("repeated", "pass", "the same seed gives the same weights, bit for bit")
    if apart < _ROUNDING and any("GPU" in device for device in parallel.devices):
        return Finding("repeated", "pass", f"the same seed gives the same weights, to {apart:.1e}: GPUs add in any order")
    advice = (
        "Does a layer draw random numbers without Keras's seeds? Some kernels also add in any order: "
        "tf.config.experimental.enable_op_determinism() makes them repeat, and slower."
    )
    return Finding("repeated", "warn", f"the same seed gives weights that differ by {apart:.1e}", advice)


def rows(parallel: Any, batch_rows: int, workers: int = 1) -> Finding:
    """Looks at the rows of each tower."""
    towers = parallel.num_towers * workers
    least = batch_rows // towers
    seen = f"{batch_rows} rows for {towers} tower{'s' if towers > 1 else ''}, {least} or more for each"
    if least == 0:
        return Finding("rows", "warn", seen, f"Some towers are idle: use batches of at least {towers} rows.")
    layers = keras_models.flatten_layers(parallel.inner_model)
    has_batch_norm = any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers)
    if has_batch_norm and least < _FEW_ROWS and towers > 1:
        return Finding("rows", "pass", f"{seen}: batch normalization uses the moments of all {batch_rows}, as one device does")
    return Finding("rows", "pass", seen)


def work(parallel: Any, batch: Any) -> Finding:
    """Looks at the share of the arithmetic that the towers divide, and at the rows that they gather."""
    explanation = parallel.explain(batch)
    share = explanation.share_of_arithmetic
    gathered = [meeting for meeting in explanation.meetings if meeting.kind == "gather" and meeting.bytes > _LARGE_BYTES]
    seen = f"towers share {'an unknown part' if share is None else f'{100 * share:.1f} %'} of the arithmetic"
    if gathered:
        largest = max(gathered, key=lambda meeting: meeting.bytes)
        seen = f"{seen}; {len(gathered)} operations gather rows, the largest {largest.bytes / 1e6:.1f} MB ({largest.name})"
    if (share is not None and share < ALMOST_ALL) or gathered:
        return Finding("work", "warn", seen, "print(parallel.report(batch)) names them, with the lines that made them.")
    return Finding("work", "pass", seen)


def speed(parallel: Any, batches: tf.data.Dataset) -> Finding:
    """Times steps, and the share of the time for which they wait for input."""
    begin = time.perf_counter()
    parallel.fit(batches, steps_per_epoch=1, shuffle=False, verbose=0)
    first = time.perf_counter() - begin
    times = _Times()
    history = parallel.fit(batches, steps_per_epoch=_STEPS, shuffle=False, verbose=0, callbacks=[times, InputWait()])
    milliseconds = 1e3 * float(np.median(times.seconds[1:]))
    waited = history.history["input_wait"][-1]
    seen = f"first step {first:.1f} s, then {milliseconds:.1f} ms a step, {100 * waited:.0f} % of it waiting for input"
    data = {"first_step_seconds": first, "milliseconds": milliseconds, "input_wait": waited}
    if waited > 0.3:
        advice = "More towers make it no faster: use prefetch, map with num_parallel_calls, cache, or larger files."
        return Finding("speed", "warn", seen, advice, data=data)
    return Finding("speed", "pass", seen, data=data)


def shares(build: Callable[[Sequence[str]], Any], batches: tf.data.Dataset, batch_rows: int, devices: Sequence[str]) -> Finding:
    """Times steps with a tower's rows on each device alone, and suggests other shares of the rows if the times differ."""
    rows = max(batch_rows // len(devices), 1)
    milliseconds = [speed(build([device]), batches.rebatch(rows)).data["milliseconds"] for device in devices]
    each = ", ".join(f"{time:.1f} ms on {device}" for time, device in zip(milliseconds, devices, strict=True))
    seen, data = f"{rows} rows take {each}", {"rows": rows, "milliseconds": milliseconds}
    if max(milliseconds) <= _ALIKE * min(milliseconds):
        return Finding("shares", "pass", seen, data=data)
    advice = (
        f"DataParallelModel(model, rows={shares_by_speed(milliseconds)}) gives each device as many rows as it computes in the "
        "same time; devices= leaves a slow one out."
    )
    return Finding("shares", "warn", seen, advice, data=data)


class _Times(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self._begin)
