"""Count the share of the arithmetic that towers divide among themselves, for small models of published libraries.

Each model is built from a small configuration, with random weights. One training step runs on one device and on two towers,
in float64. The table shows the largest difference of results and variables, and what `explain` says of the step. Results are
kept in --out, so that an interrupted run goes on. Models of a library that is not installed are left out. See
docs/partition.md.
"""

import argparse
import dataclasses
import importlib.util
import json
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np

import keras_dp

PAGE = Path(__file__).parents[2] / "docs" / "partition.md"
ROWS, TOKENS, WORDS = 8, 6, 20
SMALLEST_SHARE = 0.95
layers = keras.layers
draw = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A model of the table.

    Attributes:
        library: the name of its package.
        build: returns a compiled model and a batch.
        dtype: "float64"; "float32" for models that mix the two.
    """

    library: str
    build: Callable
    dtype: str


MODELS = {}


def of(library, dtype="float64"):
    """Registers a function that builds a model and a batch, by the first line of its docstring."""

    def register(build):
        MODELS[build.__doc__.rstrip(".")] = Entry(library, build, dtype)
        return build

    return register


def normal(*shape):
    return draw.normal(size=(ROWS, *shape))


def tokens(length=TOKENS):
    return draw.integers(1, WORDS, (ROWS, length))


def text(length=TOKENS):
    """Token ids, and a padding mask whose rows differ in length."""
    return {
        "token_ids": tokens(length),
        "padding_mask": np.arange(length) < draw.integers(2, length + 1, (ROWS, 1)),
    }


def regression(model, x):
    """Compiles a model with a squared error, and draws targets of the shapes of its outputs."""
    model.compile("adam", "mse")
    return model, (x, keras.tree.map_structure(lambda output: normal(*output.shape[1:]), model(x)))


def language_model(name, *, length=TOKENS, **sizes):
    """A causal language model of KerasHub, with the loss of its task."""
    import keras_hub

    backbone = getattr(keras_hub.models, f"{name}Backbone")(vocabulary_size=WORDS, num_layers=1, **sizes)
    model = getattr(keras_hub.models, f"{name}CausalLM")(backbone, preprocessor=None)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), weighted_metrics=["accuracy"])
    x = text(length)
    return model, (x, np.roll(x["token_ids"], -1, axis=1), x["padding_mask"].astype("float64"))


def classifier(model, x, classes=3):
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, (x, draw.integers(0, classes, ROWS))


GROUPED = {"num_query_heads": 2, "num_key_value_heads": 1, "hidden_dim": 8, "intermediate_dim": 16}
HEADS = {"num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16}


@of("keras_hub")
def bert():
    """BERT, text classifier."""
    import keras_hub

    backbone = keras_hub.models.BertBackbone(vocabulary_size=WORDS, num_layers=1, max_sequence_length=TOKENS, **HEADS)
    x = text() | {"segment_ids": np.zeros((ROWS, TOKENS), int)}
    return classifier(keras_hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None), x)


@of("keras_hub")
def gpt2():
    """GPT-2, language model."""
    return language_model("GPT2", max_sequence_length=TOKENS, **HEADS)


@of("keras_hub", "float32")
def gemma():
    """Gemma, language model."""
    return language_model("Gemma", head_dim=4, **GROUPED)


@of("keras_hub")
def llama():
    """Llama, language model."""
    return language_model("Llama", **GROUPED)


@of("keras_hub", "float32")
def mixtral():
    """Mixtral, language model."""
    return language_model("Mixtral", num_experts=4, **GROUPED)


@of("keras_hub")
def vit():
    """ViT, image classifier."""
    import keras_hub

    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16}
    backbone = keras_hub.models.ViTBackbone(image_shape=(16, 16, 3), patch_size=(8, 8), **sizes)
    return classifier(keras_hub.models.ViTImageClassifier(backbone, num_classes=3, preprocessor=None), normal(16, 16, 3))


@of("keras_hub")
def segformer():
    """SegFormer, segmenter."""
    import keras_hub

    encoder = keras_hub.models.MiTBackbone(
        image_shape=(64, 64, 3),
        num_layers=4,
        hidden_dims=[4, 8, 12, 16],
        layerwise_depths=[1, 1, 1, 1],
        layerwise_num_heads=[1, 1, 2, 2],
        layerwise_sr_ratios=[4, 2, 1, 1],
        layerwise_patch_sizes=[7, 3, 3, 3],
        layerwise_strides=[4, 2, 2, 2],
        max_drop_path_rate=0.1,
    )
    backbone = keras_hub.models.SegFormerBackbone(image_encoder=encoder, projection_filters=8)
    return regression(keras_hub.models.SegFormerImageSegmenter(backbone, num_classes=3, preprocessor=None), normal(64, 64, 3))


def resnet(size):
    import keras_hub

    return keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 64, 64, 64],
        stackwise_num_blocks=[1, 1, 1, 1],
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="basic_block",
        image_shape=(size, size, 3),
    )


@of("keras_hub")
def deeplab():
    """DeepLabV3, segmenter."""
    import keras_hub

    backbone = keras_hub.models.DeepLabV3Backbone(
        image_encoder=resnet(64),
        low_level_feature_key="P2",
        spatial_pyramid_pooling_key="P4",
        upsampling_size=4,
        dilation_rates=[2, 3, 4],
        projection_filters=4,
        image_shape=(64, 64, 3),
    )
    return regression(keras_hub.models.DeepLabV3ImageSegmenter(backbone, num_classes=2, preprocessor=None), normal(64, 64, 3))


@of("keras_hub")
def retinanet():
    """RetinaNet, object detector."""
    import keras_hub

    backbone = keras_hub.models.RetinaNetBackbone(
        image_encoder=resnet(128), min_level=3, max_level=4, use_p5=False, image_shape=(128, 128, 3)
    )
    anchors = keras_hub.layers.AnchorGenerator(
        bounding_box_format="yxyx", min_level=3, max_level=4, num_scales=1, aspect_ratios=[1.0], anchor_size=4.0
    )
    model = keras_hub.models.RetinaNetObjectDetector(
        backbone, num_classes=2, anchor_generator=anchors, pre_logits_num_conv_layers=1, bounding_box_format="yxyx"
    )
    model.compile("adam", box_loss="auto", classification_loss="auto")
    corner = draw.uniform(0, 60, (ROWS, 2, 2))
    boxes = np.concatenate([corner, corner + draw.uniform(20, 60, (ROWS, 2, 2))], axis=-1)
    return model, (normal(128, 128, 3), {"boxes": boxes, "labels": draw.integers(0, 2, (ROWS, 2)).astype("float64")})


@of("keras_hub")
def whisper():
    """Whisper, backbone."""
    import keras_hub

    sizes = {"num_mels": 8, "max_encoder_sequence_length": 16, "max_decoder_sequence_length": TOKENS}
    model = keras_hub.models.WhisperBackbone(vocabulary_size=WORDS, num_layers=1, **HEADS, **sizes)
    decoder = {f"decoder_{name}": values for name, values in text().items()}
    return regression(model, {"encoder_features": normal(16, 8), **decoder})


@of("keras_hub")
def t5():
    """T5, backbone."""
    import keras_hub

    model = keras_hub.models.T5Backbone(vocabulary_size=WORDS, num_layers=1, **HEADS)
    sides = {f"{side}_{name}": values for side in ("encoder", "decoder") for name, values in text().items()}
    return regression(model, sides)


@of("keras_hub")
def diffusion():
    """Stable Diffusion 3, MMDiT."""
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

    shapes = {"latent_shape": (8, 8, 4), "context_shape": (TOKENS, 8), "pooled_projection_shape": (8,)}
    model = MMDiT(patch_size=2, hidden_dim=16, num_layers=1, num_heads=2, position_size=8, qk_norm="rms_norm", **shapes)
    x = {"latent": normal(8, 8, 4), "context": normal(TOKENS, 8), "pooled_projection": normal(8), "timestep": normal(1)}
    return regression(model, x)


@of("keras_hub")
def clip():
    """CLIP, contrastive loss."""
    import keras_hub

    sizes = {"num_layers": 1, **HEADS}
    vision = keras_hub.models.CLIPVisionEncoder(patch_size=8, image_shape=(16, 16, 3), **sizes)
    of_text = keras_hub.models.CLIPTextEncoder(WORDS, 8, max_sequence_length=TOKENS, **sizes)
    backbone = keras_hub.models.CLIPBackbone(vision, of_text, projection_dim=8)
    model = Contrastive(backbone.inputs, backbone.outputs)
    model.compile("adam")
    return model, ({"images": normal(16, 16, 3), "token_ids": tokens()},)


class Contrastive(keras.Model):
    """Compares each image with each text (Radford et al. 2021, figure 3)."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Returns the mean of the cross entropies by image and by text."""
        of_images, of_texts = keras.tree.flatten(y_pred)
        own = keras.ops.arange(keras.ops.shape(of_images)[0])
        losses = [
            keras.ops.mean(keras.losses.sparse_categorical_crossentropy(own, logits, from_logits=True))
            for logits in (of_images, of_texts)
        ]
        return sum(losses) / 2


@of("keras_hub")
def swin():
    """Swin Transformer, image classifier."""
    import keras_hub

    backbone = keras_hub.models.SwinTransformerBackbone((16, 16, 3), 8, (2, 2), (2, 2), window_size=2, patch_size=2)
    return classifier(
        keras_hub.models.SwinTransformerImageClassifier(backbone, num_classes=3, preprocessor=None), normal(16, 16, 3)
    )


@of("keras_rs")
def cross():
    """Deep and cross network on embeddings."""
    import keras_rs

    inputs = keras.Input((4,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(WORDS, 4)(inputs))
    x = keras_rs.layers.FeatureCross(projection_dim=4)(x, keras_rs.layers.FeatureCross(projection_dim=4)(x))
    return regression(keras.Model(inputs, layers.Dense(1)(x)), tokens(4))


@of("keras_rs")
def interactions():
    """DLRM: dot products of features and of embeddings that are reduced."""
    import keras_rs

    numbers, inputs = keras.Input((5,)), keras.Input((4,), dtype="int32")
    features = [keras_rs.layers.EmbedReduce(WORDS, 4, combiner="mean")(inputs), layers.Dense(4, "relu")(numbers)]
    x = layers.Concatenate()([keras_rs.layers.DotInteraction()(features), *features])
    return regression(keras.Model([numbers, inputs], layers.Dense(1)(x)), [normal(5), tokens(4)])


@of("keras_rs")
def distributed():
    """Tables of embeddings, of several features."""
    import keras_rs

    table = keras_rs.layers.TableConfig("words", WORDS, 4, optimizer="adam", combiner="mean", placement="default_device")
    feature = keras_rs.layers.FeatureConfig("words", table, (ROWS, 3), (ROWS, 4))
    embedding = keras_rs.layers.DistributedEmbedding({"words": feature})
    inputs = {"words": keras.Input((3,), dtype="int32", name="words")}
    return regression(keras.Model(inputs, layers.Dense(1)(embedding(inputs)["words"])), {"words": tokens(3)})


class TwoTowers(keras.Model):
    """Retrieves items for users, with each other's items as negatives, of which the hardest count."""

    def __init__(self):
        import keras_rs

        super().__init__()
        self.users, self.items = layers.Embedding(WORDS, 4), layers.Embedding(WORDS, 4)
        self.hardest = keras_rs.layers.HardNegativeMining(4)
        self.others = keras_rs.layers.RemoveAccidentalHits()

    def call(self, x):
        """Returns the scores of each user's item against the items of the batch, and which of them it is."""
        users, items = self.users(x["user"]), self.items(x["item"])
        scores = keras.ops.matmul(users, keras.ops.transpose(items))
        labels = keras.ops.eye(keras.ops.shape(scores)[0], dtype=scores.dtype)
        return self.hardest(self.others(scores, labels, x["item"]), labels)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Returns the cross entropy of the items."""
        scores, labels = y_pred
        return keras.ops.mean(keras.losses.categorical_crossentropy(labels, scores, from_logits=True))


@of("keras_rs")
def retrieval():
    """Retrieval, contrastive loss."""
    model = TwoTowers()
    model.compile("adam")
    return model, ({"user": tokens(1)[:, 0], "item": tokens(1)[:, 0]},)


def listwise(loss):
    inputs = keras.Input((5, 4))
    x = layers.Dense(1)(layers.Dense(8, "relu")(inputs))
    model = keras.Model(inputs, layers.Reshape((5,))(x))
    model.compile("adam", loss)
    return model, (normal(5, 4), draw.integers(0, 3, (ROWS, 5)).astype("float64"))


@of("keras_rs")
def list_mean_squared():
    """Ranking, ListMLE loss."""
    import keras_rs

    return listwise(keras_rs.losses.ListMLELoss())


@of("keras_rs")
def pairwise():
    """Ranking, pairwise hinge loss."""
    import keras_rs

    return listwise(keras_rs.losses.PairwiseHingeLoss())


@of("hgq", "float32")
def quantized():
    """Quantized convolutions with learned widths."""
    from hgq import layers as quantized
    from hgq.config import LayerConfigScope, QuantizerConfigScope

    with QuantizerConfigScope(place="all", default_q_type="kbi"), LayerConfigScope(enable_ebops=True, beta0=1e-5):
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                quantized.QConv2D(4, 3, activation="relu"),
                quantized.QMaxPool2D((2, 2)),
                layers.Flatten(),
                quantized.QDense(3),
            ]
        )
    return classifier(model, normal(8, 8, 1).astype("float32"))


@of("medicai", "float32")
def unet():
    """U-Net on DenseNet, segmenter."""
    import medicai

    model = medicai.models.UNet(
        input_shape=(32, 32, 1), encoder_name="densenet121", encoder_depth=3, num_classes=1, decoder_filters=(8, 8, 4)
    )
    return regression(model, normal(32, 32, 1).astype("float32"))


@of("medicai", "float32")
def swin_unetr():
    """Swin UNETR, segmenter of volumes."""
    import medicai

    model = medicai.models.SwinUNETR(input_shape=(32, 32, 32, 1), encoder_name="swin_tiny", window_size=2, feature_size=12)
    return regression(model, normal(32, 32, 32, 1).astype("float32"))


@of("kapre", "float32")
def spectrogram():
    """Mel spectrogram, classifier of sounds."""
    import kapre.composed

    features = kapre.composed.get_melspectrogram_layer(
        (256, 1), n_fft=64, hop_length=32, sample_rate=1_000, n_mels=8, return_decibel=True
    )
    model = keras.Sequential(
        [features, layers.Conv2D(4, 3, activation="relu"), layers.GlobalAveragePooling2D(), layers.Dense(3)]
    )
    return classifier(model, normal(256, 1).astype("float32"))


@of("tcn")
def temporal():
    """Temporal convolutional network."""
    from tcn import TCN

    inputs = keras.Input((12, 3))
    x = TCN(4, 2, dilations=(1, 2), dropout_rate=0.1, use_batch_norm=True)(inputs)
    return regression(keras.Model(inputs, layers.Dense(1)(x)), normal(12, 3))


def recurrent(layer):
    inputs = keras.Input((5, 3))
    return regression(keras.Model(inputs, layers.Dense(1)(layer(inputs))), normal(5, 3))


@of("ncps", "float32")
def closed_form():
    """Closed-form continuous-time network (CfC)."""
    from ncps.keras import CfC

    return recurrent(CfC(6, backbone_units=8, backbone_layers=1))


@of("ncps", "float32")
def liquid():
    """Liquid time-constant network (LTC)."""
    from ncps.keras import LTC
    from ncps.wirings import AutoNCP

    return recurrent(LTC(AutoNCP(10, 2), return_sequences=False))


def answer(entry):
    """Returns what the table shows of a model."""
    keras.utils.clear_session()
    keras.config.set_floatx(entry.dtype)
    keras.utils.set_random_seed(1)
    model, batch = entry.build()
    parallel = keras_dp.DataParallelModel(model, devices=2)
    compared = keras_dp.check_step(parallel, batch)
    explanation = parallel.explain(batch)
    return {
        "difference": compared.largest_difference,
        "is_exact": compared.is_exact,
        "share": explanation.share_of_arithmetic,
        "once": sorted({once.type for once in explanation.once}),
        "explanation": str(explanation),
    }


def answers(names, directory, again):
    """Returns the answers for some models, from files of results or from a step of the model."""
    found = {}
    for name in names:
        entry, path = MODELS[name], directory / f"{re.sub(r'[^a-z0-9]+', '_', name.lower())}.json"
        if path.exists() and not again:
            found[name] = json.loads(path.read_text())
        elif importlib.util.find_spec(entry.library):
            try:
                found[name] = answer(entry)
                path.write_text(json.dumps(found[name]))
                print(f"{name}: {found[name]['share']}, {found[name]['once']}", file=sys.stderr, flush=True)
            except Exception:
                print(f"{name} failed:\n{traceback.format_exc()[-3_000:]}", file=sys.stderr, flush=True)
    return found


def table(found):
    """The table, in Markdown."""
    lines = ["| library | model | largest difference | share of the arithmetic | computed once |", "|---|---|---|---|---|"]
    for name, facts in found.items():
        share = "not known" if facts["share"] is None else f"{100 * facts['share']:.1f} %"
        once = ", ".join(f"`{operation}`" for operation in facts["once"]) or "nothing"
        lines.append(f"| {MODELS[name].library} | {name} | {facts['difference']:.0e} | {share} | {once} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[], help="words of the models' names; all models by default")
    parser.add_argument("--out", type=Path, default=Path("results/shared_work"), help="where results are kept")
    parser.add_argument("--again", action="store_true", help="run models whose results are kept, too")
    parser.add_argument("--show", action="store_true", help="print the explanation of each model")
    parser.add_argument("--write", action="store_true", help="write the table into docs/partition.md")
    parser.add_argument("--check", action="store_true", help=f"fail if a share is below {100 * SMALLEST_SHARE:.0f} %%")
    arguments = parser.parse_args()
    keras_dp.use_logical_cpus(2)
    arguments.out.mkdir(parents=True, exist_ok=True)
    words = [word.lower() for word in arguments.models]
    names = [name for name in MODELS if not words or any(word in name.lower() for word in words)]
    found = answers(names, arguments.out, arguments.again)
    if arguments.show:
        for name, facts in found.items():
            print(f"{name}\n{facts['explanation']}\n")
    print(table(found), flush=True)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        between = re.compile("(<!-- shared work -->\n).*?(<!-- end of shared work -->)", re.DOTALL)
        PAGE.write_text(between.sub(lambda markers: f"{markers[1]}\n{table(found)}\n\n{markers[2]}", page), encoding="utf-8")
    below = [name for name, facts in found.items() if not facts["is_exact"] or (facts["share"] or 0) < SMALLEST_SHARE]
    if arguments.check and below:
        sys.exit(f"Not exact, or a smaller share than {SMALLEST_SHARE}: {', '.join(below)}")


if __name__ == "__main__":
    main()
