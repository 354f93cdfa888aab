"""Tasks of KerasHub, whose own `fit` prepares the data, give one device's result with random weights."""

import keras
import keras_hub
import numpy as np
import pytest
from classification import TOWERS
from comparison import assert_same_script

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "brown", "fox", "jumped", "."]
TEXTS = np.array(
    ["the quick brown fox.", "the fox jumped.", "quick quick fox", "the brown", "fox fox.", "jumped the fox", "the."]
)
LABELS = np.array([0, 1, 1, 0, 1, 0, 0])
MERGES = ["Ġ t", "h e", "Ġt he", "t he", "Ġ f", "o x", "Ġf ox", "f ox"]
MERGES += ["Ġ q", "u i", "c k", "Ġq ui", "Ġqui ck", "q ui", "qui ck"]
# Of the layers of language models.
SIZES = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16, "max_sequence_length": 9, "dtype": "float64"}
rng = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def double_precision(single_precision):
    """Sets float64, in which results are the same and not only close."""
    keras.config.set_floatx("float64")


def bert():
    tokenizer = keras_hub.models.BertTokenizer(vocabulary=WORDS)
    backbone = keras_hub.models.BertBackbone(vocabulary_size=len(WORDS), **SIZES)
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=9)
    return keras_hub.models.BertTextClassifier(backbone, num_classes=2, preprocessor=preprocessor)


def gpt2():
    of_merges = [piece for merge in MERGES for piece in (*merge.split(), merge.replace(" ", ""))]
    pieces = dict.fromkeys(["!", "<|endoftext|>", *of_merges])
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=MERGES)
    backbone = keras_hub.models.GPT2Backbone(vocabulary_size=len(pieces), **SIZES)
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=preprocessor)


def resnet():
    blocks = {"stackwise_num_filters": [64, 64], "stackwise_num_blocks": [1, 1], "stackwise_num_strides": [1, 2]}
    first = {"input_conv_filters": [64], "input_conv_kernel_sizes": [3], "image_shape": (12, 12, 3)}
    backbone = keras_hub.models.ResNetBackbone(block_type="basic_block", **first, **blocks, dtype="float64")
    converter = keras_hub.layers.ResNetImageConverter(image_size=(12, 12), scale=1 / 255)
    preprocessor = keras_hub.models.ResNetImageClassifierPreprocessor(converter)
    return keras_hub.models.ResNetImageClassifier(backbone, num_classes=3, preprocessor=preprocessor)


IMAGES = rng.uniform(0, 255, size=(7, 14, 14, 3)), rng.integers(0, 3, size=7)
SENTENCES = np.array(["the quick fox", "the fox", "quick quick fox", "the the", "fox", "quick the fox", "the quick"])
TASKS = {"bert": (bert, (TEXTS, LABELS)), "gpt2": (gpt2, (SENTENCES,)), "resnet": (resnet, IMAGES)}


def trained(model, data):
    """Trains, evaluates and predicts with a model that the task itself compiles."""
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    arguments = {"batch_size": 4, "verbose": 0}
    history = model.fit(*data, epochs=2, shuffle=False, validation_data=data, **arguments).history
    return [history, model.evaluate(*data, **arguments), model.predict(data[0], **arguments)]


@pytest.mark.parametrize("task", list(TASKS))
def test_a_task_prepares_its_own_data(task):
    build, data = TASKS[task]
    assert_same_script(build, lambda model: trained(model, data), TOWERS)


def test_a_wrapped_language_model_generates():
    def script(model):
        model.compile(sampler="greedy")
        model.fit(SENTENCES, batch_size=4, shuffle=False, verbose=0)
        return model.generate("the quick", max_length=6)

    assert_same_script(gpt2, script, TOWERS)
