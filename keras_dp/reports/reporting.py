"""Make the report of a training step."""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dp import choices
from keras_dp.arithmetic.share import ArithmeticOfRows
from keras_dp.batch_normalization.synchronized import batch_norms
from keras_dp.devices import variable_homes
from keras_dp.error_notes import add_note
from keras_dp.keras_internals import keras_models
from keras_dp.partition.step import Partition
from keras_dp.partition.tracing.user_lines import current_user_line, user_line
from keras_dp.reports.communication import communication
from keras_dp.reports.explain import counted
from keras_dp.reports.report import NOTABLE, ComputedOnce, Report
from keras_dp.reports.wrapped import inspected
from keras_dp.steps.towers import TowerSteps

_LARGE = 10**6  # bytes of a weight
_WEIGHTS_LISTED = 3


def report(parallel: Any, batch: Any = None, step: choices.Step = "train") -> Report:
    """Reports how a step runs on the devices: what each computes and sends, and how much faster that can be.

    Traces the step, and runs it once; all variables are restored afterwards. With several workers, all must call it.

    >>> import keras, keras_dp, numpy as np
    >>> parallel = keras_dp.DataParallelModel(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), devices=1)
    >>> parallel.compile("sgd", "mse")
    >>> parallel.report((np.ones((8, 4)), np.ones((8, 1)))).verdict
    'There is one device, which computes all.'

    Args:
        parallel: a compiled `DataParallelModel`.
        batch: a global batch of B rows, as `fit` feeds it: (x, y) or (x, y, sample_weight). None makes one of ones and zeros,
            with the types of the batches for which the step was last traced.
        step: "train", "test" or "predict".

    Raises:
        ValueError: if there is no such step, the model is not a compiled `DataParallelModel`, or runs eagerly, or needs
            another batch, or its step changes other state than variables.
    """
    steps, given = inspected("report", parallel, batch, step)
    if batch is not None:
        return _report(steps, given, step)
    is_assumed = steps.batch_types[step].batch_rows is None and steps.inputs.usual_rows is None
    try:
        return dataclasses.replace(_report(steps, given, step), is_assumed=is_assumed)
    except tf.errors.OpError as error:
        add_note(error, "keras_dp: report() has run the step on ones and zeros. Pass a batch that fits: report((x, y)).")
        raise


def _report(steps: TowerSteps, batch: Any, step: choices.Step) -> Report:
    model, devices = steps.model, list(dict.fromkeys(steps.inputs.devices))
    peaks = _peak_bytes(devices)
    sent = communication(steps, batch, step)
    own = steps.inputs.cut(steps.on_host(batch, finds_whole=True))
    slices, of_device = steps.slices_of(batch), steps.options.slices_per_device
    partition, arithmetic = counted(steps, step, slices)
    kinds: Counter[str] = Counter()
    for row in sent.copies:
        kinds[row.kind] += row.bytes
    layers = [layer for layer in keras_models.flatten_layers(model) if layer.weights and layer is not model]
    policies = {layer.dtype_policy.name for layer in layers}
    return Report(
        devices=devices,
        batch_rows=int(slices[0].batch_rows),
        workers=steps.inputs.collectives.count,
        rows=[sum(int(part.rows) for part in own[i : i + of_device]) for i in range(0, len(own), of_device)],
        weight_bytes=_weight_bytes(model.weights),
        largest_weights=_largest(model.weights),
        should_spread=variable_homes.should_spread(model, devices),
        batch_norms=len(batch_norms(model)),
        batch_norm=steps.options.batch_norm,
        precisions=sorted(policies) or [keras.config.floatx()],
        jit_compile=steps.jit_compile,
        messages=sum(row.number for row in sent.copies),
        sent_bytes={kind: size for kind, size in kinds.items() if size},
        busiest_bytes=sent.busiest_bytes,
        flops=arithmetic.total if arithmetic else None,
        share=arithmetic.share if arithmetic else None,
        once=sorted(_computed_once(partition, arithmetic), key=lambda known: -(known.share or 0)),
        slices=of_device,
        kept_bytes=round(partition.kept_bytes),
        peak_bytes=peaks,
    )


def _peak_bytes(devices: Sequence[str]) -> dict[str, int]:
    """Returns the most bytes that were held on each device that counts them, before this report runs a step."""
    peaks = {}
    for device in devices:
        # The usual allocator of CPUs counts nothing.
        with contextlib.suppress(ValueError):
            peaks[device] = tf.config.experimental.get_memory_info(device)["peak"]
    return peaks


def _computed_once(partition: Partition, arithmetic: ArithmeticOfRows | None) -> Iterator[ComputedOnce]:
    asked = current_user_line()
    total = arithmetic.total if arithmetic else 0
    shares = {name: flops / total for name, flops in arithmetic.once.items()} if arithmetic and total else {}
    reasons = {known.name: known.reason for known in partition.gathered}
    types = {node.name: node.op for node in partition.traced.nodes}
    for name in {**reasons, **shares}:
        if name in reasons or shares[name] >= NOTABLE:
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
    by_size = sorted(weights, key=_bytes, reverse=True)[:_WEIGHTS_LISTED]
    return [(weight.path, _bytes(weight), variable_homes.home(weight)) for weight in by_size if _bytes(weight) >= _LARGE]


def _bytes(weight: keras.Variable) -> int:
    return math.prod(weight.shape) * tf.as_dtype(weight.dtype).size
