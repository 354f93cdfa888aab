"""Tasks of KerasHub, whose own `fit` prepares the data, give one device's result with random weights."""

import keras
import keras_hub
import numpy as np
import pytest
from classification import TOWERS
from comparison import TOLERANCE, assert_same, assert_same_script

import keras_dp

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "brown", "fox", "jumped", "."]
TEXTS = np.array(
    ["the quick brown fox.", "the fox jumped.", "quick quick fox", "the brown", "fox fox.", "jumped the fox", "the."]
)
LABELS = np.array([0, 1, 1, 0, 1, 0, 0])
MERGES = [
    "Ġ t",
    "h e",
    "Ġt he",
    "t he",
    "Ġ f",
    "o x",
    "Ġf ox",
    "f ox",
    "Ġ q",
    "u i",
    "c k",
    "Ġq ui",
    "Ġqui ck",
    "q ui",
    "qui ck",
]
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def double_precision(single_precision):
    """Sets float64, in which results are the same and not only close."""
    keras.config.set_floatx("float64")


def bert(preprocessed, dtype="float64"):
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=WORDS)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(WORDS),
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=9,
        dtype=dtype,
    )
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=9) if preprocessed else None
    return keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor)


def gpt2(preprocessed):
    pieces = dict.fromkeys(
        ["!", "<|endoftext|>"] + [piece for merge in MERGES for piece in (*merge.split(), merge.replace(" ", ""))]
    )
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=MERGES)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(pieces),
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=8,
        dtype="float64",
    )
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8) if preprocessed else None
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=preprocessor)


def resnet(preprocessed):
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(12, 12, 3),
        dtype="float64",
    )
    converter = keras_hub.layers.ResNetImageConverter(image_size=(12, 12), scale=1 / 255)
    preprocessor = keras_hub.models.ResNetImageClassifierPreprocessor(converter) if preprocessed else None
    return keras_hub.models.ResNetImageClassifier(backbone, num_classes=3, preprocessor=preprocessor)


IMAGES = rng.uniform(0, 255, size=(7, 14, 14, 3)), rng.integers(0, 3, size=7)
SENTENCES = np.array(["the quick fox", "the fox", "quick quick fox", "the the", "fox", "quick the fox", "the quick"])
TASKS = {
    "bert": (bert, (TEXTS, LABELS)),
    "gpt2": (gpt2, (SENTENCES,)),
    "resnet": (resnet, IMAGES),
}


def prepared(build, data):
    """Returns the data after the task's preprocessor."""
    x, *y = data
    return keras.tree.map_structure(np.asarray, build(True).preprocessor(x if x.dtype.kind == "f" else x.tolist(), *y))


def trained(model, data, **compile_arguments):
    """Trains, evaluates and predicts, compiled by the task itself or with arguments."""
    model.compile(optimizer=keras.optimizers.Adam(0.01), **compile_arguments)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    arguments = {"sample_weight": sample_weight, "batch_size": 4, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, validation_data=data, **arguments).history
    return [history, model.evaluate(x, y, **arguments), model.predict(x, batch_size=4, verbose=0)]


@pytest.mark.parametrize("task", list(TASKS))
def test_a_task_prepares_its_own_data(task):
    build, data = TASKS[task]
    assert_same_script(lambda: build(True), lambda model: trained(model, data), TOWERS)


@pytest.mark.parametrize("task", list(TASKS))
def test_a_task_without_a_preprocessor(task):
    build, data = TASKS[task]
    of_numbers = prepared(build, data)
    assert_same_script(lambda: build(False), lambda model: trained(model, of_numbers), TOWERS)


def test_low_rank_adapters():
    def build():
        model = bert(True)
        model.backbone.enable_lora(2)
        return model

    _, parallel = assert_same_script(build, lambda model: trained(model, (TEXTS, LABELS)), TOWERS)
    assert any("lora" in variable.path for variable in parallel.trainable_variables)


def plain_and_parallel(build, script):
    """Returns the results of a script for a plain model and for a wrapped one."""
    results = []
    for wrap in (lambda model: model, lambda model: keras_dp.DataParallelModel(model, devices=TOWERS)):
        keras.utils.set_random_seed(3)
        results.append(script(wrap(build())))
    return results


def test_eight_bit_integers():
    """A quantized model is not trained further; it evaluates and predicts."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(prepared(bert, (TEXTS, LABELS)))

    def script(model):
        model.quantize("int8")
        model.compile(optimizer="sgd")
        return [model.evaluate(x, y, batch_size=4, verbose=0), model.predict(x, batch_size=4, verbose=0)]

    assert_same(*plain_and_parallel(lambda: bert(False), script), TOLERANCE["float64"])


def test_a_wrapped_language_model_generates():
    def script(model):
        model.compile(sampler="greedy")
        model.fit(SENTENCES, batch_size=4, shuffle=False, verbose=0)
        return model.generate("the quick", max_length=6)

    plain, parallel = plain_and_parallel(lambda: gpt2(True), script)
    assert plain == parallel
