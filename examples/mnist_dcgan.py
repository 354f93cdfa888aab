"""Train a DCGAN on MNIST, with a `train_step` of its own. Without the lines marked `# keras_dp` it is a plain Keras script."""

import argparse
import math

import keras
import tensorflow as tf
from command_line import HelpFormatter
from data import mnist
from image_grid import save_grid
from keras import layers, ops
from throughput import Throughput

import keras_dp  # keras_dp

CODE_SIZE = 64
COLUMNS, ROWS = 10, 5  # of images in the picture


def build_generator():
    """Builds a network that turns codes of shape (batch, 64) into images from -1 to 1 of shape (batch, 28, 28, 1)."""
    return keras.Sequential(
        [
            keras.Input((CODE_SIZE,)),
            layers.Dense(7 * 7 * 96, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Reshape((7, 7, 96)),
            layers.Conv2DTranspose(48, 4, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
        ],
        name="generator",
    )


def build_discriminator():
    """Builds a network that returns logits of shape (batch, 1), of the probability that images are real."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(96, 4, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.LeakyReLU(0.2),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(1),
        ],
        name="discriminator",
    )


class GAN(keras.Model):
    """Trains a generator and a discriminator against each other, each with its own optimizer."""

    def __init__(self, generator, discriminator, seed):
        super().__init__()
        self.generator = generator
        self.discriminator = discriminator
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss):
        """Takes an optimizer for each network, and the loss of logits that both share."""
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_of_logits = loss

    @property
    def metrics(self):
        """The means of both losses, which Keras resets in each epoch."""
        return [self.d_loss_tracker, self.g_loss_tracker]

    def call(self, codes, training=False):
        """Makes images from codes."""
        return self.generator(codes, training=training)

    def train_step(self, real):
        """Trains both networks on a batch of real images and on as many generated ones."""
        codes = keras.random.normal((ops.shape(real)[0], CODE_SIZE), seed=self.seed_generator)
        with tf.GradientTape() as d_tape, tf.GradientTape() as g_tape:
            generated = self.generator(codes, training=True)
            real_logits = self.discriminator(real, training=True)
            generated_logits = self.discriminator(generated, training=True)
            ones, zeros = ops.ones_like(real_logits), ops.zeros_like(real_logits)
            d_loss = (self.loss_of_logits(ones, real_logits) + self.loss_of_logits(zeros, generated_logits)) / 2
            g_loss = self.loss_of_logits(ones, generated_logits)
        for loss, network, optimizer, tape in (
            (d_loss, self.discriminator, self.d_optimizer, d_tape),
            (g_loss, self.generator, self.g_optimizer, g_tape),
        ):
            optimizer.apply(tape.gradient(loss, network.trainable_weights), network.trainable_weights)
        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
parser.add_argument("--towers", type=int, default=2, help="devices to train on")  # keras_dp
parser.add_argument("--epochs", type=int, default=40, help="how often to go through the images")
parser.add_argument("--batch-size", type=int, default=64, help="images in a global batch")
parser.add_argument("--images", type=int, help="images to train on (default: all)")
parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the codes and the order of the images")
parser.add_argument("--out", default="results/mnist_dcgan.png", help="where to write a picture of generated images")
mnist.add_argument(parser)
args = parser.parse_args()

if not tf.config.list_physical_devices("GPU"):  # keras_dp
    keras_dp.use_logical_cpus(args.towers)  # keras_dp

(x_train, _), _ = mnist.load(args.data)
x_train = 2 * x_train[: args.images] - 1
keras.utils.set_random_seed(args.seed)

gan = GAN(build_generator(), build_discriminator(), args.seed)
gan = keras_dp.DataParallelModel(gan, devices=args.towers)  # keras_dp
steps = args.epochs * math.ceil(len(x_train) / args.batch_size)
# Learning rates that fall to zero let both networks settle.
d_optimizer, g_optimizer = (
    keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps), beta_1=0.5) for rate in (3e-4, 6e-4)
)
gan.compile(d_optimizer, g_optimizer, keras.losses.BinaryCrossentropy(from_logits=True))

throughput = Throughput(len(x_train), args.batch_size)
history = gan.fit(x_train, batch_size=args.batch_size, epochs=args.epochs, callbacks=[throughput], verbose=2).history

codes = keras.random.normal((ROWS * COLUMNS, CODE_SIZE), seed=args.seed)
save_grid((gan.predict(codes, verbose=0) + 1) / 2, COLUMNS, args.out)
print(f"losses of the last epoch: discriminator {history['d_loss'][-1]:.4f}, generator {history['g_loss'][-1]:.4f}")
