"""Find the digit that each pixel belongs to, with only two images on each device.

A slice has few images for batch normalization, so "sync" normalizes with the moments of all slices. The learning rate is the
rate for one tower's images, scaled by the number of towers and warmed up.
"""

import argparse
import math

import keras
import numpy as np
import tensorflow as tf
from command_line import HelpFormatter
from data import mnist

import keras_dp

SIZE = 48  # pixels
DIGITS = 2  # in an image
FILTERS = 16, 32, 64, 128  # from fine to coarse
BACKGROUND = 10
INK = 0.3  # the minimum brightness of a digit's pixels


def scenes(images, labels, count, seed):
    """Makes images with several digits on noise, and the class of each pixel.

    Args:
        images: images of digits of shape (n, 28, 28, 1), from 0 to 1.
        labels: n labels.
        count: the number of scenes to make.
        seed: the seed for the choice of digits and their places.

    Returns:
        float32 images of shape (count, 48, 48, 1), and int32 classes of shape (count, 48, 48): the digit, or 10 elsewhere.
    """
    random = np.random.default_rng(seed)
    x = random.uniform(0, 0.3, (count, SIZE, SIZE, 1)).astype("float32")
    y = np.full((count, SIZE, SIZE), BACKGROUND, "int32")
    height, width = images.shape[1:3]
    for scene in range(count):
        # A digit hides earlier digits where they overlap.
        for digit in random.integers(len(images), size=DIGITS):
            top, left = random.integers(SIZE - height + 1), random.integers(SIZE - width + 1)
            window = scene, slice(top, top + height), slice(left, left + width)
            ink = images[digit, ..., 0] > INK
            x[window][ink] = images[digit][ink]
            y[window][ink] = labels[digit]
    return x, y


def unet():
    """Builds a U-Net that returns logits of shape (batch, 48, 48, 11)."""

    def convolutions(x, filters):
        for _ in range(2):
            x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = keras.layers.ReLU()(keras.layers.BatchNormalization(momentum=0.9)(x))
        return x

    inputs = keras.Input((SIZE, SIZE, 1))
    x, skipped = inputs, []
    for filters in FILTERS[:-1]:
        skipped.append(convolutions(x, filters))
        x = keras.layers.MaxPooling2D()(skipped[-1])
    x = convolutions(x, FILTERS[-1])
    for filters in FILTERS[-2::-1]:
        x = keras.layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = convolutions(keras.layers.Concatenate()([x, skipped.pop()]), filters)
    return keras.Model(inputs, keras.layers.Conv2D(BACKGROUND + 1, 1)(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    mnist.add_argument(parser)
    parser.add_argument("--towers", type=int, default=4, help="devices to train on")
    parser.add_argument("--images-per-tower", type=int, default=2, help="images in a tower's slice")
    parser.add_argument("--scenes", type=int, default=1600, help="images to train on")
    parser.add_argument("--epochs", type=int, default=8, help="how often to go through the images")
    parser.add_argument("--base-learning-rate", type=float, default=0.1, help="learning rate for one tower's images")
    parser.add_argument(
        "--batch-norm",
        choices=("sync", "local", "first"),
        default="sync",
        help="mode of batch normalization",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order of the images")
    args = parser.parse_args()
    if not tf.config.list_physical_devices("GPU"):
        keras_dp.use_logical_cpus(args.towers)

    train_digits, test_digits = mnist.load(args.data)
    x_train, y_train = scenes(*train_digits, args.scenes, args.seed)
    x_test, y_test = scenes(*test_digits, 200, args.seed + 1)
    keras.utils.set_random_seed(args.seed)

    model = keras_dp.DataParallelModel(unet(), devices=args.towers, batch_norm=args.batch_norm)
    batch_size = args.towers * args.images_per_tower
    steps_per_epoch = math.ceil(args.scenes / batch_size)
    # The base rate is for the images of one tower; N towers see N times as many.
    schedule = keras.optimizers.schedules.CosineDecay(args.base_learning_rate, args.epochs * steps_per_epoch)
    schedule = keras_dp.schedules.WarmupThen(schedule, scale=args.towers, warmup_steps=steps_per_epoch // 2)
    model.compile(
        keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.MeanIoU(BACKGROUND + 1, sparse_y_pred=False, name="mean_iou")],
    )
    correction = keras_dp.callbacks.MomentumCorrection()
    model.fit(x_train, y_train, batch_size=batch_size, epochs=args.epochs, callbacks=[correction], verbose=2)
    scores = model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0, return_dict=True)

    print(f"mean intersection over union {100 * scores['mean_iou']:.2f} %")
    print(f"test accuracy {100 * scores['accuracy']:.2f} %")


if __name__ == "__main__":
    main()
