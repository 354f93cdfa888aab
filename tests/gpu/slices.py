"""See in a profile whether slices are copied to the GPUs while these compute."""

import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers

# TensorFlow has no public reader of its profiles; this is the format of the files.
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import keras_dp
from gpu.devices import prepare

STEPS = 10


class Event(NamedTuple):
    """Holds what a GPU did: its name, its begin and end in nanoseconds, and the bytes of a copy, if they are known."""

    name: str
    begin: float
    end: float
    bytes: int | None


def run(record):
    """Profiles steps with large batches of images."""
    devices = prepare(record, 2)
    side, rows = (64, 16) if record.quick else (224, 128)
    slice_bytes = rows // 2 * side * side * 3 * 4
    planes = _profile(devices, side, rows)
    gpus = {name: events for name, events in planes.items() if name.startswith("/device:GPU")}
    for name, events in planes.items():
        record.row("Planes of the profile", plane=name, events=len(events))
    if not gpus:
        if record.results["gpus"]:
            raise RuntimeError("the profile has no GPU: CUPTI does not run, perhaps because only administrators may profile")
        record.finding("no GPU in the profile")
        return
    shares = []
    for name, events in gpus.items():
        computing = merged([event for event in events if not event.name.lower().startswith(("memcpy", "memset"))])
        copies = [event for event in events if _is_slice(event, slice_bytes)]
        copying = sum(event.end - event.begin for event in copies)
        hidden = sum(overlap(event, computing) for event in copies)
        nanoseconds_computing = sum(end - begin for begin, end in computing)
        # No more can be hidden than the shorter of the two takes.
        share = f"{100 * hidden / min(copying, nanoseconds_computing):.0f} %" if copying and nanoseconds_computing else "-"
        counted = {"gpu": name, "slice_megabytes": slice_bytes / 1e6, "copies": len(copies), "steps": STEPS}
        times = {"copying_ms": copying, "computing_ms": nanoseconds_computing, "both_at_once_ms": hidden}
        milliseconds = {name: nanoseconds / 1e6 for name, nanoseconds in times.items()}
        record.row("Copies of slices to GPUs", **counted, **milliseconds, share_of_the_shorter=share)
        shares.append(share if copying else "no copies found")
    record.finding(f"copying and computing at once, as a share of the shorter of the two: {', '.join(shares)}")
    record.remark("Pieces of one card share its plane: computation of one tower hides the copy to another one.")


def _profile(devices, side, rows):
    inputs = keras.Input((side, side, 3))
    x = inputs
    for filters in (32, 64, 64):
        x = layers.Conv2D(filters, 3, strides=2, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    parallel = keras_dp.DataParallelModel(model, devices=devices)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile("sgd", loss, jit_compile=False)
    random = np.random.default_rng(0)
    batch = random.normal(size=(rows, side, side, 3)).astype("float32"), random.integers(0, 10, rows)
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    parallel.fit(dataset, steps_per_epoch=3, shuffle=False, verbose=0)
    with tempfile.TemporaryDirectory() as directory:
        with tf.profiler.experimental.Profile(directory):
            parallel.fit(dataset, steps_per_epoch=STEPS, shuffle=False, verbose=0)
        return {
            plane.name: list(_events(plane))
            for path in Path(directory).rglob("*.xplane.pb")
            for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes
        }


def _events(plane):
    """Yields the events of a plane; of a GPU those of its streams, not those that summarize them."""
    streams = [line for line in plane.lines if "stream" in line.name.lower()] or plane.lines
    for line in streams:
        for event in line.events:
            begin = line.timestamp_ns + event.offset_ps / 1e3
            name = plane.event_metadata[event.metadata_id].name
            yield Event(name, begin, begin + event.duration_ps / 1e3, _copied_bytes(plane, event))


def _copied_bytes(plane, event):
    """Returns the bytes of a copy, which the profiler writes in a text such as "kind_src:pinned size:1024 dest:0"."""
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == "memcpy_details":
            text = stat.str_value or plane.stat_metadata[stat.ref_value].name
            size = re.search(r"size:(\d+)", text)
            return int(size[1]) if size else None
    return None


def _is_slice(event, slice_bytes):
    name = event.name.lower()
    return name.startswith("memcpy") and "h2d" in name and (event.bytes is None or event.bytes >= slice_bytes / 2)


def merged(events):
    """Returns the times during which at least one of some events went on, in order."""
    spans = []
    for event in sorted(events, key=lambda event: event.begin):
        if spans and event.begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], event.end))
        else:
            spans.append((event.begin, event.end))
    return spans


def overlap(event, spans):
    """Returns for how long an event went on during some spans."""
    return sum(max(0.0, min(event.end, end) - max(event.begin, begin)) for begin, end in spans)
