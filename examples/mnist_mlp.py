"""Train a multilayer perceptron on MNIST. Without the lines marked `# keras_dp` it is a plain Keras script."""

import argparse

import keras
import tensorflow as tf  # keras_dp
from command_line import HelpFormatter
from data import mnist
from throughput import Throughput

import keras_dp  # keras_dp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
parser.add_argument("--towers", type=int, default=2, help="devices to train on")  # keras_dp
parser.add_argument("--epochs", type=int, default=5, help="how often to go through the images")
parser.add_argument("--batch-size", type=int, default=256, help="images in a global batch")
parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order of the images")
mnist.add_argument(parser)
args = parser.parse_args()

if not tf.config.list_physical_devices("GPU"):  # keras_dp
    keras_dp.use_logical_cpus(args.towers)  # keras_dp

(x_train, y_train), (x_test, y_test) = mnist.load(args.data)
keras.utils.set_random_seed(args.seed)

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(512, activation="relu"),
        keras.layers.Dense(512, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model = keras_dp.DataParallelModel(model, devices=args.towers)  # keras_dp
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

throughput = Throughput(len(x_train), args.batch_size)
model.fit(x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, callbacks=[throughput])
scores = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0, return_dict=True)

print(f"test accuracy {100 * scores['accuracy']:.2f} %")
