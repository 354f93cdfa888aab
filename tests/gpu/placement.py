"""List the operations that did not run where a step puts them.

TensorFlow puts an operation elsewhere if the device has no kernel for it. The graphs that it ran are recorded, one for each
device; an operation is named after its tower, or after its home.
"""

import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import keras
import tensorflow as tf

import keras_dp
from gpu import models
from gpu.devices import prepare
from keras_dp.devices.available import short_name

BATCH_SIZE = 16
HOST = "CPU:0"
TOWER = re.compile(r"(?:^|/)tower_(\d+)/")
SLICE = re.compile(r"(?:^|/)slices(?:_\d+)?/")
TRANSPORT = {"_Send", "_Recv", "_HostSend", "_HostRecv", "_Arg", "_Retval", "_DeviceArg", "_DeviceRetval"}
# Why an operation runs on the host, by its type.
BY_TYPE = {
    "Assert": "checks stop the host's program",
    "NoOp": "it only waits",
    "PrintV2": "it prints on the host",
    "StringFormat": "strings are on the host",
    "VarHandleOp": "the name of a variable",
}
CONSTANTS = "constants: TensorFlow makes them where they are needed"
INTEGERS = "integers: TensorFlow computes shapes, indices and counters on the host"
STRINGS = "strings are on the host"
SLICES = "the host cuts a batch into slices"
UNEXPLAINED = "unexplained"


class Ran(NamedTuple):
    """Names an operation that ran: its type, the type of its numbers, its node, and its device."""

    type: str
    dtype: str
    name: str
    device: str


def run(record):
    """Lists operations of towers on other devices, and operations at home on the host, for a step of some models."""
    devices = prepare(record, 2 if record.quick else 4)
    total = unexplained = 0
    for name in ("convolutions",) if record.quick else ("convolutions", "attention", "padded lstm", "padded gru"):
        home, ran = _run_step(name, devices)
        total += len(ran)
        for row in elsewhere(ran, devices, home):
            unexplained += row["number"] * (row["why"] == UNEXPLAINED)
            record.row("Operations that ran elsewhere", model=name, **row)
        numbers = {device: sum(one.device == device for one in ran) for device in dict.fromkeys([*devices, HOST])}
        record.row("Operations that ran on each device", model=name, **numbers)
        record.finding(f"{unexplained} of {total} operations ran elsewhere for no known reason")


def elsewhere(ran, devices, home):
    """Lists the operations of towers that ran on another device, and the operations at home that ran on the host instead.

    Operations at home may run on towers' devices on purpose: they prepare there what a tower sends.
    """
    moved = defaultdict(list)
    for operation in ran:
        found = TOWER.findall(operation.name)
        who, place = (f"tower {found[-1]}", devices[int(found[-1])]) if found else ("home", home)
        is_elsewhere = operation.device != place and (bool(found) or operation.device == HOST)
        if is_elsewhere and operation.type not in TRANSPORT:
            of = "slices" if SLICE.search(operation.name) else who
            moved[of, place, operation.device, operation.type, operation.dtype].append(operation.name)
    names = ("of", "belongs_on", "ran_on", "operation", "dtype")
    return [
        dict(zip(names, key, strict=True)) | {"number": len(found), "why": _explanation(*key), "for_instance": found[0][-50:]}
        for key, found in sorted(moved.items())
    ]


def _explanation(who, place, device, kind, dtype):
    if who == "slices":
        return SLICES
    if kind == "Const":
        return CONSTANTS
    if device != HOST:
        return UNEXPLAINED
    if kind in BY_TYPE:
        return BY_TYPE[kind]
    return {"int32": INTEGERS, "int64": INTEGERS, "string": STRINGS}.get(dtype, UNEXPLAINED)


def _run_step(name, devices):
    """Trains one batch, and returns the home of the step and the operations that ran."""
    keras.utils.clear_session()
    inner = models.CASES[name].build()
    parallel = keras_dp.DataParallelModel(inner, devices=devices)
    parallel.compile("adam", models.loss(), metrics=["accuracy"], jit_compile=False)
    x, y = models.CASES[name].data(BATCH_SIZE)
    home = short_name(inner.weights[0].value.device)
    with tempfile.TemporaryDirectory() as directory:
        with tf.summary.create_file_writer(directory).as_default():
            tf.summary.trace_on(graph=True, profiler=False)
            parallel.train_on_batch(x, y)
            tf.summary.trace_export("step", step=0)
        graphs = list(_graphs(next(Path(directory).iterdir())))
    ran = [operation for operation in map(_as_ran, graphs) if operation.device]
    if not any(TOWER.search(operation.name) for operation in ran):
        raise RuntimeError("no operation of a tower was recorded: the names of operations have changed")
    return home, ran


def _graphs(path):
    """Yields the nodes of the graphs that TensorFlow ran for functions with towers, after all its optimizations."""
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(path))]
    for value in (value for event in events for value in event.summary.value):
        for collected in tf.compat.v1.RunMetadata.FromString(value.tensor.string_val[0]).function_graphs:
            nodes = [node for graph in collected.partition_graphs for node in graph.node]
            if any(TOWER.search(node.name) for node in nodes):
                yield from nodes


def _as_ran(node):
    dtype = next((node.attr[name].type for name in ("T", "dtype", "DstT", "output_type", "Tparams") if name in node.attr), 0)
    return Ran(node.op, tf.as_dtype(dtype).name if dtype else "-", node.name, short_name(node.device))
