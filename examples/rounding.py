"""Measure how far rounding takes training on towers from one device, beside one device with its rows in another order.

Towers add the same numbers as one device, in another order, so that floats round otherwise. On one device, they do so as well
if the rows within each batch are permuted. The script trains small networks on images of MNIST: on one device, on towers,
on one device with permuted rows, and on one device with a wrong row in each batch, as a fault would do. It compares their
weights with those of the first run as training goes on, prints tables, and draws the distances. --out keeps the runs, so that
an interrupted measurement goes on.
"""

import argparse
import json
import time
from pathlib import Path

import keras
import matplotlib
import numpy as np
import tensorflow as tf
from command_line import HelpFormatter
from data import mnist
from keras import layers

import keras_dp

BATCH_SIZE = 16
PIXELS = 14  # in a row of an image
COLUMNS = 3  # of panels in the figure
CHECKPOINTS = (1, 3, 10, 30, 100, 300, 1000)  # the steps after which weights are compared
PERMUTED, WRONG = "rows permuted", "a wrong row"
HEADLINE = "float32"
DTYPES = ("float32", "mixed_bfloat16", "bfloat16", "float64")
DRAWN = ("float32", "mixed_bfloat16", "float64")  # bfloat16 is where mixed_bfloat16 is


def perceptron():
    """Builds a hidden layer on all pixels, with SGD."""
    return [layers.Flatten(), layers.Dense(32, "relu")], keras.optimizers.SGD(0.05)


def convolutions(activation="relu"):
    """Builds two convolutions with batch normalization, with SGD and momentum."""
    network = [layers.Reshape((PIXELS, PIXELS, 1))]
    for filters in (8, 16):
        network += [layers.Conv2D(filters, 3, strides=2, use_bias=False), layers.BatchNormalization()]
        network += [layers.Activation(activation)]
    return [*network, layers.GlobalAveragePooling2D()], keras.optimizers.SGD(0.02, momentum=0.9)


def smooth_convolutions():
    """Builds the same with SiLU: unlike that of ReLU, its gradient has no jump."""
    return convolutions("silu")


def attention():
    """Builds self-attention over the rows of pixels, with Adam."""
    rows = keras.Input((PIXELS, PIXELS))
    x = layers.Dense(16)(rows)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
    return [keras.Model(rows, layers.Flatten()(x))], keras.optimizers.Adam()


def lstm():
    """Builds an LSTM that reads the rows of pixels, with Adam."""
    return [layers.LSTM(16)], keras.optimizers.Adam()


# Plain Keras does not train these in bfloat16: weights of Adam stay where they are, and an LSTM's initializer has no kernel.
NOT_IN_BFLOAT16 = ("attention", "lstm")
NETWORKS = {function.__name__: function for function in (perceptron, convolutions, smooth_convolutions, attention, lstm)}


def build(network, seed):
    """Returns a network that ends in ten logits, and its optimizer."""
    keras.utils.set_random_seed(seed)
    hidden, optimizer = NETWORKS[network]()
    return keras.Sequential([keras.Input((PIXELS, PIXELS)), *hidden, layers.Dense(10)]), optimizer


class Training:
    """Trains a network again and again, each time from given weights, with one trace of its step."""

    def __init__(self, network, towers=None):
        self.inner_model, optimizer = build(network, seed=0)
        optimizer.build(self.inner_model.trainable_variables)
        self.optimizer_state = [(variable, variable.numpy()) for variable in optimizer.variables]
        self.model = self.inner_model if towers is None else keras_dp.DataParallelModel(self.inner_model, devices=towers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer, loss, steps_per_execution=10)

    def run(self, start, x, y):
        """Returns the weights at each checkpoint: float64 vectors of all weights."""
        self.inner_model.set_weights(start)
        for variable, value in self.optimizer_state:
            variable.assign(value)
        found, done = [], 0
        for rows in (step * BATCH_SIZE for step in CHECKPOINTS if step * BATCH_SIZE <= len(x)):
            self.model.fit(x[done:rows], y[done:rows], batch_size=BATCH_SIZE, shuffle=False, verbose=0)
            found.append(vector(self.inner_model.get_weights()))
            done = rows
        return found

    def accuracy(self, x, y):
        """Returns the share of images whose label the inner model predicts."""
        return float((self.inner_model.predict(x, batch_size=500, verbose=0).argmax(axis=-1) == y).mean())


def vector(weights):
    """Returns all weights as one float64 vector."""
    return np.concatenate([np.asarray(weight, "float64").ravel() for weight in weights])


def orders(seed, steps, images):
    """Returns for each kind of run on one device the images of each batch: integers of shape (steps, BATCH_SIZE)."""
    random = np.random.default_rng(seed)
    epochs = -(-steps * BATCH_SIZE // images)
    in_order = np.concatenate([random.permutation(images) for _ in range(epochs)])[: steps * BATCH_SIZE].reshape(steps, -1)
    wrong = in_order.copy()
    wrong[:, -1] = wrong[:, 0]
    return {None: in_order, PERMUTED: random.permuted(in_order, axis=1), WRONG: wrong}


class Measurement:
    """Compares the runs of one network in one kind of floats."""

    def __init__(self, network, dtype, towers):
        keras.config.set_floatx("float64" if dtype == "float64" else "float32")
        keras.config.set_dtype_policy(dtype)
        self.network = network
        self.one_device = Training(network)
        self.on_towers = {f"{count} towers": Training(network, count) for count in towers}

    def measure(self, seed, steps, train_set, test_set):
        """Trains from one seed.

        Returns:
            By the name of the run, its distances from one device at each checkpoint, and its test accuracy.
        """
        batches = {
            kind: [array[order.ravel()] for array in train_set]
            for kind, order in orders(seed, steps, len(train_set[0])).items()
        }
        start = build(self.network, seed)[0].get_weights()
        expected = self.one_device.run(start, *batches[None])
        moved = [np.linalg.norm(weights - vector(start)) for weights in expected]
        distances, accuracies = {}, {"one device": self.one_device.accuracy(*test_set)}
        runs = {PERMUTED: self.one_device, WRONG: self.one_device} | self.on_towers
        for name, training in runs.items():
            received = training.run(start, *batches.get(name, batches[None]))
            differences = [np.linalg.norm(one - other) for one, other in zip(expected, received, strict=True)]
            distances[name] = [float(difference / norm) for difference, norm in zip(differences, moved, strict=True)]
            accuracies[name] = training.accuracy(*test_set)
        return {"distances": distances, "accuracies": accuracies}


def measure_all(args, train_set, test_set):
    """Measures what --out does not hold yet, and returns the results by (dtype, network): one for each seed."""
    settings = {"towers": args.towers, "steps": args.steps, "images": len(train_set[0])}
    path = args.out / "runs.json"
    kept = json.loads(path.read_text()) if path.exists() else {"settings": settings, "runs": {}}
    if kept["settings"] != settings:
        raise SystemExit(f"{path} holds runs of other settings: {kept['settings']}. Give another --out, or remove it.")
    args.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for dtype in args.dtypes:
        for network in args.networks:
            if dtype == "bfloat16" and network in NOT_IN_BFLOAT16:
                continue
            measurement = None
            for seed in range(args.seeds if dtype == HEADLINE else args.other_seeds):
                name = f"{network}, {dtype}, seed {seed}"
                if name not in kept["runs"]:
                    begin = time.perf_counter()
                    measurement = measurement or Measurement(network, dtype, args.towers)
                    kept["runs"][name] = measurement.measure(seed, args.steps, train_set, test_set)
                    # If interrupted, the file is written whole or not at all.
                    unfinished = path.with_suffix(".unfinished")
                    unfinished.write_text(json.dumps(kept, indent=1))
                    unfinished.replace(path)
                    print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
                results.setdefault((dtype, network), []).append(kept["runs"][name])
    return results


def of_seeds(results, run):
    """Returns the distances of a run: an array of shape (seeds, checkpoints)."""
    return np.array([result["distances"][run] for result in results])


def ratios(results, run):
    """Returns a run's distances over those of permuted rows: an array of shape (seeds, checkpoints)."""
    return of_seeds(results, run) / of_seeds(results, PERMUTED)


def tables(results, towers):
    """Returns the lines of two Markdown tables: ratios as training goes on, and all kinds of floats after the last step."""
    checkpoints = len(next(iter(results.values()))[0]["distances"][PERMUTED])
    shown = [index for index in range(checkpoints) if index % 2 == 0]
    lines = ["| | towers | " + " | ".join(f"step {CHECKPOINTS[index]:,}" for index in shown) + " |"]
    lines.append("|---" * (2 + len(shown)) + "|")
    for (dtype, network), measured in results.items():
        for run in towers if dtype == HEADLINE else ():
            cells = [median_and_range(ratios(measured, run)[:, index]) for index in shown]
            lines.append(f"| {network.replace('_', ' ')} | {run.removesuffix(' towers')} | " + " | ".join(cells) + " |")
    columns = ["floats", PERMUTED, *towers, WRONG, "test accuracy, %", f"{PERMUTED}, points", "towers, points"]
    lines += ["", "| | " + " | ".join(columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for (dtype, network), measured in results.items():
        cells = [f"{np.median(of_seeds(measured, run)[:, -1]):.0e}" for run in (PERMUTED, *towers, WRONG)]
        accuracies = 100 * np.array(
            [[result["accuracies"][run] for run in ("one device", PERMUTED, *towers)] for result in measured]
        )
        changes = np.abs(accuracies[:, 1:] - accuracies[:, :1])
        cells += [f"{value:.1f}" for value in (np.median(accuracies[:, 0]), changes[:, 0].max(), changes[:, 1:].max())]
        lines.append(f"| {network.replace('_', ' ')} | {dtype} | " + " | ".join(cells) + " |")
    return lines


def median_and_range(values):
    """Shows ratios with two digits, or as powers of ten if they are far from 1."""
    low, middle, high = (
        f"{value:.2g}" if 0.01 <= value < 100 else f"{value:.0e}" for value in (values.min(), np.median(values), values.max())
    )
    return f"{middle} ({low} to {high})"


def draw(results, towers, path):
    """Draws the distances over the steps, with a panel for each network: medians over the seeds, and their range."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.style.use(Path(__file__).with_name("figures.mplstyle"))
    networks = list(dict.fromkeys(network for _, network in results))
    # One cell at least is left for the legend.
    rows = len(networks) // COLUMNS + 1
    figure, cells = pyplot.subplots(rows, COLUMNS, figsize=(10, 3.8 * rows), sharex=True, sharey=True, squeeze=False)
    panels = dict(zip(networks, cells.flat, strict=False))
    for (dtype, network), measured in results.items():
        if dtype not in DRAWN:
            continue
        panel = panels[network]
        for look, run in zip(pyplot.rcParams["axes.prop_cycle"], (PERMUTED, *towers, WRONG), strict=False):
            if run == WRONG and dtype != HEADLINE:
                continue
            distances = of_seeds(measured, run)
            steps = CHECKPOINTS[: distances.shape[1]]
            # Of the same floats, runs lie on each other: the line of permuted rows is wide, to be seen below the others.
            width = 5 if run == PERMUTED else 1.5
            label = f"one device, {run}" if run in (PERMUTED, WRONG) else run
            range_of_seeds = distances.min(axis=0), distances.max(axis=0)
            panel.fill_between(steps, *range_of_seeds, color=look["color"], alpha=0.15, linewidth=0)
            panel.plot(steps, np.median(distances, axis=0), linewidth=width, alpha=0.8, label=label, **look)
        above = 1.5 * max(of_seeds(measured, run)[:, :2].max() for run in (PERMUTED, *towers))
        panel.annotate(dtype, (1, above), fontsize=8)
        panel.set(title=network.replace("_", " "), xscale="log", yscale="log", xlabel="step", ylabel="distance from one device")
        panel.label_outer()
    handles, labels = panels[networks[0]].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    for spare in cells.flat[len(networks) :]:
        spare.axis("off")
    spare.legend(named.values(), named.keys(), loc="center")
    figure.savefig(path)
    pyplot.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    mnist.add_argument(parser)
    parser.add_argument("--towers", type=int, nargs="+", default=[2, 4], help="numbers of devices to train on")
    parser.add_argument("--steps", type=int, default=1000, help="steps of training")
    parser.add_argument("--seeds", type=int, default=10, help="how often each network is trained in float32")
    parser.add_argument("--other-seeds", type=int, default=2, help="how often each network is trained in other floats")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS], help="networks to train")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="floats to train in, as policies of Keras")
    parser.add_argument("--out", type=Path, default=Path("rounding"), help="directory of the runs, the tables and the figure")
    args = parser.parse_args()
    if not tf.config.list_physical_devices("GPU"):
        keras_dp.use_logical_cpus(max(args.towers))

    train_set, test_set = ((small(images), labels) for images, labels in mnist.load(args.data))
    results = measure_all(args, train_set, test_set)
    towers = [f"{count} towers" for count in args.towers]
    lines = tables(results, towers)
    (args.out / "table.md").write_text("\n".join(lines) + "\n")
    draw(results, towers, args.out / "rounding.png")
    print("", *lines, "", f"figure: {args.out / 'rounding.png'}", sep="\n")
    last = next(iter(results.values()))[-1]["accuracies"][towers[0]]
    print(f"test accuracy {100 * last:.2f} %")


def small(images):
    """Returns images of half the width and height, without channels: means of two by two pixels."""
    return images.reshape(-1, PIXELS, 2, PIXELS, 2).mean(axis=(2, 4))


if __name__ == "__main__":
    main()
