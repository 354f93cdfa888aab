"""Train a small convolutional network on MNIST: the same script for one device, several towers, and several workers.

    python examples/multi_worker_mnist.py
    python examples/multi_worker_mnist.py --towers 2
    keras-dp launch --workers 2 examples/multi_worker_mnist.py

Every worker runs the whole script, with the same data. After an interruption, the same command resumes after the last complete
epoch. Without the lines marked `# keras_dp` it is a plain Keras script.
"""

import argparse
from pathlib import Path

import keras
import tensorflow as tf  # keras_dp
from command_line import HelpFormatter
from data import mnist

import keras_dp  # keras_dp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
parser.add_argument("--towers", type=int, help="devices of each worker to train on (default: all)")  # keras_dp
parser.add_argument("--epochs", type=int, default=3, help="how often to go through the images")
parser.add_argument("--batch-size", type=int, default=128, help="images in a global batch")
parser.add_argument(
    "--out",
    metavar="DIRECTORY",
    type=Path,
    default="results/multi_worker_mnist",
    help="directory for backups and the model; all workers must reach it",
)
parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order of the images")
mnist.add_argument(parser)
args = parser.parse_args()

if args.towers and not tf.config.list_physical_devices("GPU"):  # keras_dp
    keras_dp.use_logical_cpus(args.towers)  # keras_dp
workers = keras_dp.connect_workers()  # keras_dp

(x_train, y_train), (x_test, y_test) = mnist.load(args.data)
keras.utils.set_random_seed(args.seed)

model = keras.Sequential([keras.Input((28, 28, 1))])
for filters in (16, 32, 64):
    model.add(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
    # With the default momentum of 0.99, a short training ends before the statistics forget the first steps.
    model.add(keras.layers.BatchNormalization(momentum=0.9))
    model.add(keras.layers.ReLU())
    model.add(keras.layers.MaxPooling2D())
model.add(keras.layers.Flatten())
model.add(keras.layers.Dense(10, activation="softmax"))

parallel = keras_dp.DataParallelModel(model, devices=args.towers)  # keras_dp
parallel.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
callbacks = [
    keras.callbacks.BackupAndRestore(args.out / "backup"),
    keras.callbacks.ModelCheckpoint(args.out / "best.keras", monitor="val_accuracy", save_best_only=True),
]
parallel.fit(
    x_train,
    y_train,
    batch_size=args.batch_size,
    epochs=args.epochs,
    validation_split=0.1,
    callbacks=callbacks,
    verbose=2 if workers.is_chief else 0,  # keras_dp
)
scores = parallel.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0, return_dict=True)
parallel.save(args.out / "model.keras")

if workers.is_chief:  # keras_dp
    print(f"test accuracy {100 * scores['accuracy']:.2f} %")
