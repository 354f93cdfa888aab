"""How long models of a hundred layers and more take to begin, and to train, on many towers.

    python examples/benchmarks/large_models.py --towers 2 8

ResNet-152 and EfficientNetV2-L of `keras.applications`, for 10 classes of images of 64 x 64 pixels, and the language model of
`keras-dp bench` with 24 blocks in place of 4; batch 8. Each run has a process of its own.
"""

import argparse
import os
import statistics
from pathlib import Path

import keras

from keras_dp.cli import models
from keras_dp.cli.runs import Run, measure_in_new_process

IMAGES = {"weights": None, "input_shape": (64, 64, 3), "classes": 10, "classifier_activation": None}


def resnet152():
    """Logits of shape (batch, 10)."""
    return keras.applications.ResNet152(**IMAGES)


def efficientnet_v2_l():
    """Logits of shape (batch, 10)."""
    return keras.applications.EfficientNetV2L(**IMAGES)


def transformer24():
    """Logits of the next token, of shape (batch, 64, 5000)."""
    return models.transformer(blocks=24)


MODELS = {"resnet152": resnet152, "efficientnet_v2_l": efficientnet_v2_l, "transformer24": transformer24}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--towers", nargs="+", type=int, default=[2, 8], help="how many (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="to time, after the first one (default: %(default)s)")
    options = parser.parse_args()
    os.chdir(Path(__file__).parent)
    print(f"{'model':<20}{'layers':>8}{'towers':>8}{'first step, s':>16}{'step, ms':>12}{'memory, MB':>13}", flush=True)
    for name in options.models:
        layers = len(MODELS[name]().layers)
        for towers in options.towers:
            model = f"{Path(__file__).stem}:{name}"
            run = Run("keras_dp", towers, batch_size=8, model=model, steps=options.steps, warm_up=1)
            measured = measure_in_new_process(run)
            step, memory = statistics.median(measured.step_milliseconds), measured.peak_memory_megabytes
            print(
                f"{name:<20}{layers:>8}{towers:>8}{measured.first_step_seconds:>16.1f}{step:>12.0f}{memory:>13.0f}", flush=True
            )


if __name__ == "__main__":
    main()
