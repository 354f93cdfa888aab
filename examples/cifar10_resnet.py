"""Train a ResNet on CIFAR-10 with a large global batch, by the recipe of "Accurate, Large Minibatch SGD".

With --compare, it trains one device with the small batch, and the towers with the large batch. It trains the large batch with
and without the parts of the recipe, and draws the learning curves.
"""

import argparse
import math
from pathlib import Path

import keras
import large_batch_comparison
import tensorflow as tf
from command_line import HelpFormatter
from data import cifar10

import keras_dp

WEIGHT_DECAY = 5e-4
DECAYS = 0.6, 0.85  # fractions of the training after which the rate falls to a tenth


def resnet(depth):
    """Builds a ResNet for images of 32 x 32 pixels: 3 stages of n blocks with 16, 32 and 64 filters, 6 n + 2 layers.

    It follows He et al. 2016 (https://arxiv.org/abs/1512.03385, section 4.2), with parameter-free shortcuts (option A). The
    last batch normalization of each block begins with a gain of 0, so that the network begins as a shallow one (Goyal et al.
    2017, https://arxiv.org/abs/1706.02677, section 5.1).

    Args:
        depth: the number of layers, 6 n + 2: 20, 32, 44, 56 and so on.

    Returns:
        A model that returns ten logits.

    Raises:
        ValueError: if the depth is not 6 n + 2.
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ValueError(f"The depth of a ResNet for CIFAR is 6 n + 2: 8, 14, 20, 32, 56. Received: depth={depth}")

    def convolution(x, filters, strides=1, gain="ones"):
        x = keras.layers.Conv2D(filters, 3, strides, padding="same", use_bias=False, kernel_initializer="he_normal")(x)
        # With the default momentum of 0.99, a short training ends before the statistics forget the first steps.
        return keras.layers.BatchNormalization(momentum=0.9, gamma_initializer=gain)(x)

    inputs = keras.Input((32, 32, 3))
    x = keras.layers.ReLU()(convolution(inputs, 16))
    for filters in (16, 32, 64):
        for block in range(blocks):
            strides = 2 if block == 0 and filters > 16 else 1
            shortcut = x
            if strides == 2:
                shortcut = keras.ops.pad(x[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (filters // 4, filters // 4)))
            x = keras.layers.ReLU()(convolution(x, filters, strides))
            x = keras.layers.ReLU()(keras.layers.Add()([convolution(x, filters, gain="zeros"), shortcut]))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


def learning_rate(args, scale, warmup, steps_per_epoch):
    """Returns a schedule: η, then a tenth and a hundredth of it in the last epochs; scaled and warmed up.

    Args:
        args: the command line's arguments.
        scale: k, the factor of all rates.
        warmup: "gradual" from η to k η; "constant" at η, then k η; or "none".
        steps_per_epoch: the number of batches in an epoch.
    """
    rate, warmup_steps = args.base_learning_rate, int(args.warmup_epochs * steps_per_epoch)
    boundaries = [int(part * args.epochs * steps_per_epoch) for part in DECAYS]
    if warmup == "constant":
        rates = [rate, scale * rate, scale * rate / 10, scale * rate / 100]
        return keras.optimizers.schedules.PiecewiseConstantDecay([warmup_steps, *boundaries], rates)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, [rate, rate / 10, rate / 100])
    return keras_dp.schedules.WarmupThen(schedule, scale, warmup_steps if warmup == "gradual" else 0)


def train(args, train_set, test_set, towers, batch_size, scale, warmup, batch_norm, seed, verbose):
    """Trains one network.

    Args:
        args: the command line's arguments.
        train_set: images and labels.
        test_set: images and labels.
        towers: the number of devices; 1 trains with plain Keras.
        batch_size: the number of images in a global batch.
        scale: k, the factor of the learning rate.
        warmup: "gradual", "constant" or "none".
        batch_norm: a mode of `DataParallelModel`.
        seed: the seed of weights, order and augmentation.
        verbose: as for `fit`.

    Returns:
        The history of `fit`, and the model.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    model = resnet(args.depth)
    rate = learning_rate(args, scale, warmup, math.ceil(len(train_set[0]) / batch_size))
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, weight_decay=WEIGHT_DECAY)
    keras_dp.optimizers.exclude_from_weight_decay(optimizer, model)
    if towers > 1:
        model = keras_dp.DataParallelModel(model, devices=towers, batch_norm=batch_norm)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    history = model.fit(
        cifar10.augmented_batches(*train_set, batch_size, seed),
        epochs=args.epochs,
        validation_data=tf.data.Dataset.from_tensor_slices(test_set).batch(500),
        callbacks=[keras_dp.callbacks.MomentumCorrection()],
        shuffle=False,  # the dataset shuffles
        verbose=verbose,
    )
    return history.history, model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--data", metavar="FILE.npz", type=Path, help="CIFAR-10 as x_train, y_train, x_test, y_test")
    parser.add_argument("--depth", type=int, default=20, help="layers: 20, 32 or 56")
    parser.add_argument("--towers", type=int, default=2, help="devices to train on")
    parser.add_argument("--base-batch-size", type=int, default=64, help="images in a batch for the base learning rate")
    parser.add_argument("--base-learning-rate", type=float, default=0.1, help="η, for the base batch size")
    parser.add_argument("--batch-size", type=int, help="images in a global batch (default: base batch size times towers)")
    parser.add_argument("--epochs", type=int, default=6, help="how often to go through the images")
    parser.add_argument("--warmup-epochs", type=float, help="epochs of warm-up (default: a sixth of the epochs)")
    parser.add_argument(
        "--batch-norm",
        choices=("sync", "local", "first"),
        default="sync",
        help="mode of batch normalization",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order of the images")
    parser.add_argument(
        "--compare", action="store_true", help="train the small and the large batch, with and without the recipe"
    )
    large_batch_comparison.add_arguments(parser)
    args = parser.parse_args()
    if args.warmup_epochs is None:
        args.warmup_epochs = args.epochs / 6
    if args.warmup_epochs >= DECAYS[0] * args.epochs:
        parser.error(f"the warm-up must end before the rate falls, after {DECAYS[0] * args.epochs:g} epochs")
    args.batch_size = args.batch_size or args.towers * args.base_batch_size
    if not tf.config.list_physical_devices("GPU"):
        keras_dp.use_logical_cpus(args.towers)

    data = cifar10.load(args.data)
    if args.compare:
        large_batch_comparison.compare(args, data, train)
        return
    scale = args.batch_size / args.base_batch_size
    history, model = train(args, *data, args.towers, args.batch_size, scale, "gradual", args.batch_norm, args.seed, verbose=2)
    if args.towers > 1:
        print(f"towers on {', '.join(model.devices)}, parameters on {model.parameter_device}")
    print(f"test accuracy {100 * history['val_accuracy'][-1]:.2f} %")


if __name__ == "__main__":
    main()
