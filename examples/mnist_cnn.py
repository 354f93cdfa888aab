"""Train a small convolutional network on MNIST. Without the lines marked `# keras_dp` it is a plain Keras script."""

import argparse
import math

import keras
import tensorflow as tf  # keras_dp
from command_line import HelpFormatter
from data import mnist
from throughput import Throughput

import keras_dp  # keras_dp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
parser.add_argument("--towers", type=int, default=2, help="devices to train on")  # keras_dp
parser.add_argument("--compare", action="store_true", help="first train plain Keras on one device")  # keras_dp
parser.add_argument("--epochs", type=int, default=5, help="how often to go through the images")
parser.add_argument("--batch-size", type=int, default=128, help="images in a global batch")
parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order of the images")
mnist.add_argument(parser)
args = parser.parse_args()

if not tf.config.list_physical_devices("GPU"):  # keras_dp
    keras_dp.use_logical_cpus(args.towers)  # keras_dp

(x_train, y_train), (x_test, y_test) = mnist.load(args.data)


def build():
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
    return model


def train(model):
    steps = args.epochs * math.ceil(len(x_train) / args.batch_size)
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.002, steps))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    throughput = Throughput(len(x_train), args.batch_size)
    model.fit(x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, callbacks=[throughput])
    return model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0, return_dict=True)["accuracy"]


if args.compare:  # keras_dp
    print("\nplain Keras, on one device:")  # keras_dp
    plain_accuracy = train(build())  # keras_dp
    print("\nkeras_dp:")  # keras_dp
model = build()
model = keras_dp.DataParallelModel(model, devices=args.towers)  # keras_dp
accuracy = train(model)

if args.compare:  # keras_dp
    print(f"test accuracy of plain Keras on the same images: {100 * plain_accuracy:.2f} %")  # keras_dp
print(f"test accuracy {100 * accuracy:.2f} %")
