"""Train a diffusion model on MNIST, with steps of its own. Without the lines marked `# keras_dp` it is a plain Keras script.

A U-Net learns to separate noise and image in noisy images, with the digits of most of them given. A moving average of its
weights then makes images from noise, step by step. It draws noise only once (DDIM, Song et al. 2021).
"""

import argparse
import math

import keras
import numpy as np
import tensorflow as tf
from command_line import HelpFormatter
from data import mnist
from image_grid import save_grid
from keras import layers, ops
from throughput import Throughput

import keras_dp  # keras_dp

FILTERS = 24, 48  # at half and a quarter of the images' size
GROUPS = 8  # of filters that are normalized together
FREQUENCIES = [2.0**exponent for exponent in range(6)]  # in the embedding of the amount of noise, which is in [0, 1]
LEAST_SIGNAL, MOST_SIGNAL = 0.02, 0.98  # amplitudes of the image in a noisy image
DIGITS = 10
UNKNOWN = DIGITS  # the label of an image whose digit is not given
UNKNOWN_SHARE = 0.1  # of the images to train on
GUIDANCE = 3.0  # the weight of the digit in a sample: 0 ignores it, 1 follows it, and more exaggerates it
ROWS = 5  # of the picture, with a column for each digit


class NoiseEmbedding(layers.Layer):
    """Embeds a number for each image in sines and cosines: (batch, 1) becomes (batch, 12)."""

    def call(self, x):
        """Returns the embedding of each number."""
        angles = math.pi * x * ops.convert_to_tensor(FREQUENCIES, x.dtype)
        return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=1)


def build_unet():
    """Builds a U-Net of images, (batch, 28, 28, 1), their noise power, (batch, 1), and labels, (batch,); it returns images."""
    images, noise, labels = keras.Input((28, 28, 1)), keras.Input((1,)), keras.Input((), dtype="int32")
    embedding = layers.Concatenate()([NoiseEmbedding()(noise), layers.Embedding(DIGITS + 1, 32)(labels)])
    embedding = layers.Dense(64, activation="swish")(embedding)

    def activated(x):
        return layers.Activation("swish")(layers.GroupNormalization(GROUPS)(x))

    def block(x, filters):
        shortcut = x if x.shape[-1] == filters else layers.Conv2D(filters, 1)(x)
        x = layers.Conv2D(filters, 3, padding="same")(activated(x))
        x = layers.Add()([x, layers.Reshape((1, 1, filters))(layers.Dense(filters)(embedding))])
        x = layers.Conv2D(filters, 3, padding="same", kernel_initializer="zeros")(activated(x))
        return layers.Add()([x, shortcut])

    fine, coarse = FILTERS
    # Convolutions at the full 28 x 28 pixels would take most of the time.
    x = skipped = block(layers.Conv2D(fine, 4, strides=2, padding="same")(images), fine)
    x = layers.Conv2D(coarse, 3, strides=2, padding="same")(x)
    x = block(block(x, coarse), coarse)
    x = layers.Conv2DTranspose(fine, 2, strides=2)(x)
    x = block(layers.Concatenate()([x, skipped]), fine)
    x = layers.Conv2DTranspose(16, 4, strides=2, padding="same", activation="swish")(activated(x))
    x = layers.Conv2D(1, 3, padding="same")(layers.Concatenate()([x, images]))
    return keras.Model([images, noise, labels], x)


class DiffusionModel(keras.Model):
    """Trains a network to denoise, and evaluates and samples with the moving average of its weights.

    Args:
        network: takes noisy images, the power of their noise, and labels, and predicts the velocities
            `signal_rate * noise - noise_rate * image`.
        average_momentum: the momentum of the moving average, in each step.
        seed: the seed of the noise.
    """

    def __init__(self, network, average_momentum, seed):
        super().__init__()
        self.network = network
        self.average_network = keras.models.clone_model(network)
        self.average_network.set_weights(network.get_weights())
        self.average_momentum = average_momentum
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        """The mean of the loss, which Keras resets in each epoch."""
        return [self.loss_tracker]

    def rates(self, times):
        """Returns the amplitudes of noise and signal at times from 0, an image, to 1, noise; their squares add up to 1."""
        first, last = math.acos(MOST_SIGNAL), math.acos(LEAST_SIGNAL)
        angles = first + times * (last - first)
        return ops.sin(angles), ops.cos(angles)

    def velocities(self, network, noisy, noise_rates, labels, training=False):
        """Returns the velocities that a network predicts for noisy images."""
        return network([noisy, ops.squeeze(noise_rates, (2, 3)) ** 2, labels], training=training)

    def loss_of(self, network, images, labels, training):
        """Returns the mean squared error of a network's velocities, on images with a random amount of noise each."""
        noise = keras.random.normal(ops.shape(images), seed=self.seed_generator)
        times = keras.random.uniform((ops.shape(images)[0], 1, 1, 1), seed=self.seed_generator)
        noise_rates, signal_rates = self.rates(times)
        noisy = signal_rates * images + noise_rates * noise
        velocities = self.velocities(network, noisy, noise_rates, labels, training)
        return ops.mean(ops.square(signal_rates * noise - noise_rates * images - velocities))

    def train_step(self, data):
        """Trains the network on a batch of images and labels, hides some of the labels, and updates the moving average."""
        images, labels = data
        untold = keras.random.uniform(ops.shape(labels), seed=self.seed_generator) < UNKNOWN_SHARE
        labels = ops.where(untold, UNKNOWN, labels)
        with tf.GradientTape() as tape:
            loss = self.loss_of(self.network, images, labels, training=True)
        weights = self.network.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for average, weight in zip(self.average_network.weights, self.network.weights, strict=True):
            average.assign(self.average_momentum * average + (1 - self.average_momentum) * weight)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        """Computes the loss of the averaged network on a batch of images and labels."""
        self.loss_tracker.update_state(self.loss_of(self.average_network, *data, training=False))
        return {"loss": self.loss_tracker.result()}

    def sample(self, labels, steps, seed):
        """Makes images from noise for n labels, in a number of steps: of shape (n, 28, 28, 1), from -1 to 1."""
        noisy = keras.random.normal((len(labels), 28, 28, 1), seed=seed)
        labels = ops.convert_to_tensor(labels, "int32")
        unknown = ops.full_like(labels, UNKNOWN)
        for step in range(steps):
            noise_rates, signal_rates = self.rates(ops.full((len(labels), 1, 1, 1), 1 - step / steps))
            with_digit, without = (
                self.velocities(self.average_network, noisy, noise_rates, given) for given in (labels, unknown)
            )
            velocities = without + GUIDANCE * (with_digit - without)
            images = ops.clip(signal_rates * noisy - noise_rates * velocities, -1, 1)
            noise = (noisy - signal_rates * images) / noise_rates
            noise_rates, signal_rates = self.rates(1 - (step + 1) / steps)
            noisy = signal_rates * images + noise_rates * noise
        return ops.convert_to_numpy(images)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
parser.add_argument("--towers", type=int, default=2, help="devices to train on")  # keras_dp
parser.add_argument("--epochs", type=int, default=30, help="how often to go through the images")
parser.add_argument("--batch-size", type=int, default=64, help="images in a global batch")
parser.add_argument("--images", type=int, help="images to train on (default: all)")
parser.add_argument("--sampling-steps", type=int, default=25, help="steps from noise to images")
parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the noise and the order of the images")
parser.add_argument("--out", default="results/mnist_diffusion.png", help="where to write a picture of generated images")
mnist.add_argument(parser)
args = parser.parse_args()

if not tf.config.list_physical_devices("GPU"):  # keras_dp
    keras_dp.use_logical_cpus(args.towers)  # keras_dp

train, test = mnist.load(args.data)
(x_train, y_train), (x_test, y_test) = ((2 * x[: args.images] - 1, y[: args.images]) for x, y in (train, test))
keras.utils.set_random_seed(args.seed)

model = DiffusionModel(build_unet(), average_momentum=0.995, seed=args.seed)
model = keras_dp.DataParallelModel(model, devices=args.towers)  # keras_dp
steps = args.epochs * math.ceil(len(x_train) / args.batch_size)
model.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, steps, alpha=0.05)))

throughput = Throughput(len(x_train), args.batch_size)
model.fit(x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, callbacks=[throughput], verbose=2)
scores = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0, return_dict=True)

images = model.sample(np.tile(np.arange(DIGITS), ROWS), args.sampling_steps, args.seed)
save_grid((images + 1) / 2, DIGITS, args.out)
print(f"test loss {scores['loss']:.4f}")
