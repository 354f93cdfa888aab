"""Measure what a copy and a control edge between two devices cost.

A tensor goes back and forth between two devices, with an operation on each. The time of the same operations on one device is
taken away. The time of a copy is then fitted by a latency and a bandwidth: time = latency + bytes / bandwidth.
"""

import time

import numpy as np
import tensorflow as tf

from gpu.devices import prepare
from keras_dp.keras_internals.graph_optimizer import graph_optimizer

HOPS = 16
HOST = "CPU:0"
SMALLEST, LARGEST = 4, 64 << 20


def run(record):
    """Measures copies between GPUs, and between the host and a GPU, in turns with the same work on one device."""
    devices = prepare(record, 2)
    pairs = [(devices[0], devices[1])] + ([(HOST, devices[0])] if record.results["gpus"] else [])
    largest = 1 << 20 if record.quick else LARGEST
    sizes = [SMALLEST * 4**i for i in range(20) if SMALLEST * 4**i <= largest]
    found = []
    for one, other in pairs:
        seconds = []
        for size in sizes:
            seconds.append(_seconds_of_a_copy(one, other, size, 5 if record.quick else 15))
            rate = size / seconds[-1] / 1e9 if seconds[-1] > 0 else None
            measured = {"bytes": size, "microseconds": 1e6 * seconds[-1], "gigabytes_per_second": rate}
            record.row(f"A copy between {one} and {other}", **measured)
        latency, bandwidth = fit(sizes, seconds)
        edge = _seconds_of_a_control_edge(one, other, 5 if record.quick else 15)
        constants = {"latency_microseconds": 1e6 * latency, "bandwidth_gigabytes_per_second": bandwidth / 1e9}
        record.row("Constants", between=f"{one} and {other}", **constants, control_edge_microseconds=1e6 * edge)
        found.append(f"{one} - {other}: {1e6 * latency:.1f} µs, {bandwidth / 1e9:.1f} GB/s, control edge {1e6 * edge:.1f} µs")
    record.finding("; ".join(found))
    record.remark("Times are medians, of one hop; copies between the host and a GPU are the mean of both ways.")
    record.remark("Logical CPUs share their memory, and so do the pieces of one card: only two cards show what a link costs.")


def fit(sizes, seconds):
    """Fits a latency in seconds and a bandwidth in bytes a second.

    Errors are relative, so that small messages count as much as large ones. Times that noise has made negative count as one
    nanosecond.
    """
    measured = np.maximum(seconds, 1e-9)
    ones = np.stack([1 / measured, np.array(sizes) / measured], axis=1)
    # Neither can be negative: without one of them, the other explains everything.
    latency, per_byte = np.linalg.lstsq(ones, np.ones(len(sizes)), rcond=None)[0]
    if per_byte <= 0:
        latency, per_byte = float(np.median(measured)), 1e-18
    if latency < 0:
        latency, per_byte = 0.0, float(np.median(measured / np.array(sizes)))
    return float(latency), 1 / float(per_byte)


def _seconds_of_a_copy(one, other, size, calls):
    def hops(devices):
        with tf.device(devices[0]):
            start = tf.Variable(tf.zeros([size // 4]))

        def function():
            x = start.read_value()
            for hop in range(1, HOPS + 1):
                with tf.device(devices[hop % 2]):
                    x = x + 1.0
            with tf.device(devices[0]):
                return x[0]

        return tf.function(function, autograph=False)

    return _seconds_of_a_hop(hops, one, other, calls)


def _seconds_of_a_control_edge(one, other, calls):
    """Lets operations on two devices wait for each other, without taking each other's results."""

    def hops(devices):
        variables = {}
        for device in devices:
            with tf.device(device):
                variables[device] = tf.Variable(0.0)

        def function():
            waited = []
            for hop in range(1, HOPS + 1):
                device = devices[hop % 2]
                with tf.device(device), tf.control_dependencies(waited):
                    waited = [variables[device].assign_add(1.0, read_value=False)]
            with tf.device(devices[0]), tf.control_dependencies(waited):
                return variables[devices[0]].read_value()

        return tf.function(function, autograph=False)

    return _seconds_of_a_hop(hops, one, other, calls)


def _seconds_of_a_hop(hops, one, other, calls):
    """Returns how much longer a hop takes between two devices than on each of them: the median over calls that take turns."""
    between, on_one, on_other = hops((one, other)), hops((one, one)), hops((other, other))
    # TensorFlow's graph optimizer would merge the operations.
    with graph_optimizer(disable_meta_optimizer=True):
        for function in (between, on_one, on_other) * 2:
            function()
    extra = [_seconds(between) - (_seconds(on_one) + _seconds(on_other)) / 2 for _ in range(calls)]
    return float(np.median(extra)) / HOPS


def _seconds(function):
    begin = time.perf_counter()
    function().numpy()
    return time.perf_counter() - begin
