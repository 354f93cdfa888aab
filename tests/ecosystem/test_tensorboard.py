"""TensorBoard reads the same from the files of a wrapped model as from those of a plain one."""

import json

import numpy as np
import tensorflow as tf
from classification import both, classifier
from keras import callbacks
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.util import tensor_util


def read(folder):
    """Returns what TensorBoard shows: {(plugin, run, tag, step): value}."""
    events = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    found = {}
    for run, kinds in events.Runs().items():
        for tag in kinds["tensors"]:
            plugin = events.SummaryMetadata(run, tag).plugin_data.plugin_name
            for event in events.Tensors(run, tag):
                value = tensor_util.make_ndarray(event.tensor_proto)
                if plugin == "images":  # Its width, its height and its file.
                    value = tf.io.decode_png(value[2]).numpy().astype(int)
                found[plugin, run, tag, event.step] = value
    return found


def test_scalars_histograms_images_and_graphs(data, tmp_path):
    def run(wrapped):
        folder = tmp_path / f"wrapped_{wrapped}"
        board = callbacks.TensorBoard(
            folder, histogram_freq=1, write_images=True, update_freq="batch", profile_batch=(2, 3), embeddings_freq=1
        )
        classifier(wrapped).fit(*data, epochs=2, batch_size=8, validation_split=0.2, callbacks=[board], verbose=0)
        return read(folder), sorted(path.relative_to(folder) for path in folder.rglob("*.h5"))

    (plain, files), (parallel, other_files) = both(run)
    assert plain.keys() == parallel.keys()
    assert plain.keys() >= {
        ("scalars", "train", "batch_loss", 8),
        ("scalars", "train", "epoch_learning_rate", 1),
        ("scalars", "validation", "evaluation_accuracy_vs_iterations", 4),
        ("histograms", "train", "dense/kernel/histogram", 1),
        ("images", "train", "dense/kernel/image", 1),
        ("graph_keras_model", "train", "keras", 0),
    }
    for key, expected in plain.items():
        (plugin, *_), received = key, parallel[key]
        if plugin == "graph_keras_model":  # The layers.
            assert json.loads(received.item()) == json.loads(expected.item())
        elif plugin != "graph_run_metadata_graph":  # The operations of a step, which are the towers' in one case.
            np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1 if plugin == "images" else 1e-6, err_msg=str(key))
    assert len(files) == 2
    assert files == other_files
