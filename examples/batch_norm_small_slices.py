"""Compare the modes of batch normalization where each device has few images.

The script trains the same small network from the same weights on the same batches: on one device, and on towers with two
images each. The towers synchronize batch normalization ("sync"), or use each tower's own moments ("local", "first"). A further
curve shows each tower's own moments with statistics that are recalibrated after each epoch, for evaluation only. The script
prints a table and draws the learning curves.
"""

import argparse
from pathlib import Path

import keras
import matplotlib
import numpy as np
import tensorflow as tf
from command_line import HelpFormatter
from data import cifar10

import keras_dp

EVALUATION_BATCH_SIZE = 250


def network(input_shape):
    """Builds four convolutions, each with batch normalization, and a classifier on their global average."""
    model = keras.Sequential([keras.Input(input_shape)])
    for filters, strides in ((16, 1), (32, 2), (64, 2), (64, 2)):
        model.add(keras.layers.Conv2D(filters, 3, strides, padding="same", use_bias=False))
        model.add(keras.layers.BatchNormalization(momentum=0.99))
        model.add(keras.layers.ReLU())
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(10))
    return model


class TestScores(keras.callbacks.Callback):
    """Collects (accuracy, loss) on the test images after each epoch, with recalibrated statistics if `recalibrate` is set."""

    def __init__(self, x, y, recalibrate=None):
        super().__init__()
        self.x, self.y, self.recalibrate = x, y, recalibrate
        self.scores = []

    def on_epoch_end(self, epoch, logs=None):
        """Evaluates the model, and then restores the statistics of training."""
        statistics = [variable.numpy() for variable in self.model.non_trainable_variables]
        if self.recalibrate is not None:
            self.recalibrate(self.model)
        scores = self.model.evaluate(self.x, self.y, batch_size=EVALUATION_BATCH_SIZE, verbose=0, return_dict=True)
        self.scores.append((scores["accuracy"], scores["loss"]))
        for variable, value in zip(self.model.non_trainable_variables, statistics, strict=True):
            variable.assign(value)


def train(mode, seed, args, train_set, test_set):
    """Trains one network.

    Args:
        mode: None for plain Keras on one device, or a mode of `DataParallelModel`.
        seed: the seed of the weights and of the order of the images.
        args: the command line's arguments.
        train_set: images and labels.
        test_set: images and labels.

    Returns:
        Curves by name: for each epoch, (accuracy, loss) on the test images.
    """
    keras.utils.clear_session()
    keras.utils.set_random_seed(seed)
    batch_size = args.towers * args.images_per_tower
    model = network(train_set[0].shape[1:])
    if mode is not None:
        model = keras_dp.DataParallelModel(model, devices=args.towers, batch_norm=mode)
    optimizer = keras.optimizers.SGD(args.learning_rate, momentum=0.9)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    curves = {"one device" if mode is None else mode: TestScores(*test_set)}
    if mode == "local":
        images = train_set[0][: args.recalibration_images]

        def recalibrate(model):
            keras_dp.recalibrate_batch_norm(model, images, batch_size=batch_size, verbose=0)

        curves["local, recalibrated"] = TestScores(*test_set, recalibrate)
    model.fit(*train_set, batch_size=batch_size, epochs=args.epochs, callbacks=[*curves.values()], verbose=0)
    return {name: callback.scores for name, callback in curves.items()}


def draw(curves, path):
    """Draws accuracy and loss over the epochs: means over the seeds, and their standard deviations."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.style.use(Path(__file__).with_name("figures.mplstyle"))
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4))
    for panel, index, title in zip(panels, (0, 1), ("test accuracy, %", "test loss"), strict=True):
        for offset, (name, scores) in enumerate(curves.items()):
            values = scores[..., index] * (100 if index == 0 else 1)
            # Small offsets keep the error bars from hiding each other.
            epochs = np.arange(1, values.shape[1] + 1) + 0.06 * (offset - (len(curves) - 1) / 2)
            style = {"capsize": 2, "marker": "o", "markersize": 3}
            panel.errorbar(epochs, values.mean(axis=0), values.std(axis=0), label=name, **style)
        panel.set_xlabel("epoch")
        panel.set_title(title)
        panel.set_xticks(range(1, values.shape[1] + 1))
    panels[0].legend()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--data", metavar="FILE.npz", type=Path, help="CIFAR-10 as x_train, y_train, x_test, y_test")
    parser.add_argument("--towers", type=int, default=8, help="devices to train on")
    parser.add_argument("--images-per-tower", type=int, default=2, help="images in a tower's slice")
    parser.add_argument("--epochs", type=int, default=6, help="how often to go through the images")
    parser.add_argument("--seeds", type=int, default=3, help="how often each network is trained")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="learning rate of all networks")
    parser.add_argument(
        "--recalibration-images",
        type=int,
        default=2000,
        help="images to recalibrate the statistics with",
    )
    parser.add_argument("--out", type=Path, default=Path("batch_norm_small_slices.png"), help="path of the figure")
    args = parser.parse_args()
    if not tf.config.list_physical_devices("GPU"):
        keras_dp.use_logical_cpus(args.towers)

    train_set, test_set = cifar10.load(args.data)
    print(f"{len(train_set[0])} images to train on, {args.towers} towers with {args.images_per_tower} images each")
    runs = {}
    for seed in range(args.seeds):
        for mode in (None, "sync", "local", "first"):
            for name, scores in train(mode, seed, args, train_set, test_set).items():
                runs.setdefault(name, []).append(scores)
                print(f"seed {seed}, {name}: " + " ".join(f"{100 * accuracy:.1f}" for accuracy, _ in scores), flush=True)
    curves = {name: np.array(scores) for name, scores in runs.items()}
    draw(curves, args.out)

    print(f"\nafter {args.epochs} epochs, mean and standard deviation over {args.seeds} seeds")
    print(f"{'batch_norm':<22}{'test accuracy, %':>20}{'test loss':>20}")
    for name, scores in curves.items():
        accuracy, loss = 100 * scores[:, -1, 0], scores[:, -1, 1]
        accuracy, loss = (
            f"{value.mean():.{digits}f} ± {value.std():.{digits}f}" for value, digits in ((accuracy, 1), (loss, 3))
        )
        print(f"{name:<22}{accuracy:>20}{loss:>20}")
    print(f"figure: {args.out}")
    print(f"test accuracy {100 * curves['sync'][:, -1, 0].mean():.2f} %")


if __name__ == "__main__":
    main()
