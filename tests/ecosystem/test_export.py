"""What a wrapped model exports equals what the plain model exports, gives `predict`'s answers, and runs without keras_dp."""

import collections
import sys

import keras
import numpy as np
import onnx
import onnxruntime
import pytest
import tensorflow as tf
import tf2onnx
from ai_edge_litert.interpreter import Interpreter
from comparison import assert_same, assert_same_script
from forked_processes import output_of_command
from keras import layers
from tensorflow.core.protobuf import saved_model_pb2

import keras_dp

ROWS, TOWERS = 20, 3
rng = np.random.default_rng(0)
CLASSES = np.arange(ROWS) % 3
NUMBERS = rng.normal(size=(ROWS, 2)).astype("float32")
DATA = {
    "images": {"image": rng.normal(size=(ROWS, 6, 6, 1)).astype("float32")},
    "tables": {"number": NUMBERS, "token": (np.arange(3 * ROWS).reshape(ROWS, 3) % 5).astype("int32")},
    "words": {"number": NUMBERS, "word": tf.constant([["red"], ["green"], ["blue"], ["?"]] * 5)},
}


def of_images():
    inputs = keras.Input((6, 6, 1), name="image")
    hidden = layers.BatchNormalization()(layers.Conv2D(4, 3)(inputs))
    hidden = layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(layers.ReLU()(hidden)))
    return keras.Model(inputs, layers.Dense(3, "softmax", name="class")(hidden))


def of_tables():
    inputs = {"number": keras.Input((2,), name="number"), "token": keras.Input((3,), dtype="int32", name="token")}
    tokens = layers.Flatten()(layers.Embedding(5, 2)(inputs["token"]))
    hidden = layers.Concatenate()([inputs["number"], tokens])
    return keras.Model(inputs, {name: layers.Dense(3, "softmax", name=name)(hidden) for name in ("one", "other")})


def of_words():
    inputs = {"number": keras.Input((2,), name="number"), "word": keras.Input((1,), dtype="string", name="word")}
    word = layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")(inputs["word"])
    return keras.Model(inputs, layers.Dense(3, "softmax", name="class")(layers.Concatenate()([inputs["number"], word])))


BUILD = {"images": of_images, "tables": of_tables, "words": of_words}


def given(kind):
    """Returns the inputs in the structure that the model takes."""
    return DATA[kind]["image"] if kind == "images" else DATA[kind]


def trained(kind, wrapped, **arguments):
    """Builds and trains a model, optionally wrapped, with the same names in both cases."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = BUILD[kind]()
    model = keras_dp.DataParallelModel(model, devices=TOWERS, **arguments) if wrapped else model
    model.compile("sgd", "sparse_categorical_crossentropy")
    y = {"one": CLASSES, "other": CLASSES} if kind == "tables" else CLASSES
    model.fit(given(kind), y, batch_size=9, epochs=2, verbose=0)
    return model


def assert_same_exports(export, kind, directory, tolerance=1e-6, **arguments):
    """Exports a plain and a wrapped model, and compares their answers with `predict`, and what was exported with each other.

    `export` exports a model to a path in the directory, and returns what is the same for equal models, and all answers of what
    it has exported, which may differ by the tolerance. The arguments are further ones of the wrapper.
    """
    plain, parallel = trained(kind, False), trained(kind, True, **arguments)
    assert_same(plain.get_weights(), parallel.get_weights(), 1e-4)
    parallel.set_weights(plain.get_weights())  # so that their files must be equal
    contents = []
    for model in (plain, parallel):
        content, *answers = export(model, directory / type(model).__name__)
        for answer in answers:
            assert_same(model.predict(given(kind), verbose=0), answer, tolerance)
        contents.append(content)
    assert contents[0]
    assert contents[0] == contents[1]


def content_of(directory):
    """Returns the signatures of a SavedModel, how often each operation is on each device, and the files."""
    (graph,) = saved_model_pb2.SavedModel.FromString((directory / "saved_model.pb").read_bytes()).meta_graphs
    functions = graph.graph_def.library.function
    nodes = [*graph.graph_def.node, *(node for function in functions for node in function.node_def)]
    operations = collections.Counter((node.op, node.device) for node in nodes)
    signatures = {
        name: {kind: sorted((key, str(value.dtype), str(value.tensor_shape)) for key, value in tensors.items())}
        for name, signature in graph.signature_def.items()
        for kind, tensors in (("inputs", signature.inputs), ("outputs", signature.outputs))
    }
    return signatures, operations, sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def only_answer(answers, kind):
    """Returns the answers in the structure of `predict`: by name if there are several."""
    return answers if kind == "tables" else next(iter(answers.values()))


def answers_by_signature(loaded, kind, name="serving_default"):
    """Calls a signature of a loaded SavedModel. Its inputs may have other names, of the same order."""
    signature = loaded.signatures[name]
    inputs = zip(sorted(signature.structured_input_signature[1]), sorted(DATA[kind]), strict=True)
    return only_answer(signature(**{name: tf.constant(DATA[kind][own]) for name, own in inputs}), kind)


@pytest.mark.parametrize(("kind", "parameter_device"), [("images", "sharded"), ("tables", "sharded"), ("words", None)])
def test_saved_model(kind, parameter_device, tmp_path):
    def export(model, path):
        model.export(path, verbose=False)
        loaded = tf.saved_model.load(path)
        return content_of(path), loaded.serve(given(kind)), answers_by_signature(loaded, kind)

    assert_same_exports(export, kind, tmp_path, parameter_device=parameter_device)


@pytest.mark.parametrize("kind", ["images", "tables"])
def test_tensorflows_saved_model(kind, tmp_path):
    """`tf.saved_model.save` takes a wrapper, and adds a signature of one's own."""

    def export(model, path):
        specification = keras.tree.map_structure(lambda x: tf.TensorSpec((None, *x.shape[1:]), x.dtype), given(kind))
        negative = tf.function(lambda x: keras.tree.map_structure(tf.negative, model(x, training=False)))
        tf.saved_model.save(model, path / "default")
        tf.saved_model.save(model, path / "own", {"negative": negative.get_concrete_function(specification)})
        default, own = (tf.saved_model.load(path / name) for name in ("default", "own"))
        answers = keras.tree.map_structure(tf.negative, answers_by_signature(own, kind, "negative"))
        return [content_of(path / name) for name in ("default", "own")], answers, answers_by_signature(default, kind)

    assert_same_exports(export, kind, tmp_path)


def test_export_archive(tmp_path):
    """An archive tracks the wrapper's variables and lookup tables, and takes endpoints of one's own."""

    def export(model, path):
        specification = {"number": tf.TensorSpec((None, 2)), "word": tf.TensorSpec((None, 1), "string")}
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint("answer", model.call, [specification])
        archive.add_endpoint("doubled", lambda inputs: 2 * model(inputs), [specification])
        archive.add_variable_collection("head", model.get_layer("class").variables)
        archive.write_out(path, verbose=False)
        loaded = tf.saved_model.load(path)
        assert_same(model.get_layer("class").get_weights(), [variable.numpy() for variable in loaded.head], 0)
        variables = [(variable.name, variable.shape) for variable in loaded.variables]
        answers = loaded.answer(given("words")), loaded.doubled(given("words")) / 2
        return [variables, content_of(path)], *answers, answers_by_signature(loaded, "words", "answer")

    assert_same_exports(export, "words", tmp_path)


def test_layers_around_a_saved_model(tmp_path):
    """`TFSMLayer` loads what a wrapper exported."""

    def export(model, path):
        model.export(path, verbose=False)
        layer = layers.TFSMLayer(path)
        weights = [(variable.name, variable.shape, variable.trainable) for variable in layer.weights]
        return weights, layer(given("tables")), keras.Model(model.input, layer(model.input)).predict(given("tables"), verbose=0)

    assert_same_exports(export, "tables", tmp_path)


def test_training_around_a_saved_model(tmp_path):
    """A model around a `TFSMLayer` trains on towers, with the layer's own weights."""
    trained("images", True).export(tmp_path / "exported", verbose=False)

    def build():
        layer = layers.TFSMLayer(tmp_path / "exported", call_endpoint="serve")
        assert layer.trainable_weights
        return keras.Sequential([keras.Input((6, 6, 1)), layer, layers.Dense(3, "softmax")])

    def script(model):
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model.fit(given("images"), CLASSES, batch_size=9, epochs=2, shuffle=False, verbose=0).history

    assert_same_script(build, script, TOWERS)


def content_of_onnx(path):
    """Returns the inputs and outputs of a file of ONNX, the operations in their order, and the constants' values."""
    graph = onnx.load(path).graph
    types = [(end.name, end.type.tensor_type) for end in (*graph.input, *graph.output)]
    ends = [(name, one.elem_type, [length.dim_value for length in one.shape.dim]) for name, one in types]
    constants = sorted(onnx.numpy_helper.to_array(constant).tobytes() for constant in graph.initializer)
    return ends, [node.op_type for node in graph.node], constants


@pytest.mark.parametrize("kind", ["images", "tables"])
def test_onnx(kind, tmp_path):
    """ONNX Runtime runs what `export` wrote, and what the function of tf2onnx wrote that takes a model of Keras."""

    def run(path):
        session = onnxruntime.InferenceSession(path)
        names = [output.name for output in session.get_outputs()]
        return only_answer(dict(zip(names, session.run(names, DATA[kind]), strict=True)), kind)

    def export(model, path):
        paths = [path.with_suffix(suffix) for suffix in (".onnx", ".from_keras")]
        model.export(paths[0], format="onnx", verbose=False)
        tf2onnx.convert.from_keras(model, output_path=paths[1])
        return [content_of_onnx(path) for path in paths], *map(run, paths)

    assert_same_exports(export, kind, tmp_path)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("images", {}), ("images", {"optimizations": [tf.lite.Optimize.DEFAULT]}), ("tables", {})],
    ids=["images", "quantized", "tables"],
)
def test_litert(kind, options, tmp_path):
    """LiteRT, formerly TensorFlow Lite, gets the same file by `export` and by its own converter."""

    def run(content):
        runner = Interpreter(model_content=content).get_signature_runner("serving_default")
        return only_answer(runner(**DATA[kind]), kind)

    def export(model, path):
        path = path.with_suffix(".tflite")
        model.export(path, format="litert", verbose=False, **options)
        converter = tf.lite.TFLiteConverter.from_keras_model(model)
        for name, value in options.items():
            setattr(converter, name, value)
        contents = path.read_bytes(), converter.convert()
        return contents, *map(run, contents)

    assert_same_exports(export, kind, tmp_path, 1e-2 if options else 1e-6)


RUN = """
import sys
sys.modules["keras_dp"] = None  # importing it fails
import numpy as np
import onnxruntime
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

assert len(tf.config.list_logical_devices("CPU")) == 1
x = np.load("x.npy")
exported, saved = tf.saved_model.load("exported"), tf.saved_model.load("saved")
np.save("exported.npy", exported.serve(x))
np.save("saved.npy", next(iter(saved.signatures["serving_default"](tf.constant(x)).values())))
np.save("onnx.npy", onnxruntime.InferenceSession("model.onnx").run(None, {"image": x})[0])
runner = Interpreter("model.tflite").get_signature_runner("serving_default")
np.save("tflite.npy", next(iter(runner(image=x).values())))
"""


def test_files_run_without_keras_dp(tmp_path):
    """A process with a single device, which cannot import keras_dp, runs what was exported from variables on three devices."""
    model = trained("images", True, parameter_device="sharded")
    model.export(tmp_path / "exported", verbose=False)
    tf.saved_model.save(model, tmp_path / "saved")
    model.export(tmp_path / "model.onnx", format="onnx", verbose=False)
    model.export(tmp_path / "model.tflite", format="litert", verbose=False)
    np.save(tmp_path / "x.npy", given("images"))
    output_of_command(sys.executable, "-c", RUN, cwd=tmp_path)
    for name in ("exported", "saved", "onnx", "tflite"):
        assert_same(model.predict(given("images"), verbose=0), np.load(tmp_path / f"{name}.npy"), 1e-5)
