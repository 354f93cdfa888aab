"""Train autoencoders, diffusion models and flows, whose steps draw noise by Keras's seed generators."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from programs.catalogue import mlp, program, uniform
from programs.steps import Learner, adam, descend, fits, follow

IMAGES = uniform(13, 4, 4, 1, seed=51)


class Sampling(layers.Layer):
    """Draws codes around means, with its own seed generator."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(52)

    def call(self, inputs):
        mean, logarithm = inputs
        noise = keras.random.normal(ops.shape(mean), dtype=mean.dtype, seed=self.seed_generator)
        return mean + ops.exp(0.5 * logarithm) * noise


def image_encoder():
    inputs = keras.Input((4, 4, 1))
    hidden = layers.Flatten()(layers.Conv2D(3, 3, strides=2, padding="same", activation="relu")(inputs))
    mean, logarithm = layers.Dense(2)(hidden), layers.Dense(2)(hidden)
    return keras.Model(inputs, [mean, logarithm, Sampling()([mean, logarithm])])


def image_decoder():
    up = layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid")
    return keras.Sequential([keras.Input((2,)), layers.Dense(12, activation="relu"), layers.Reshape((2, 2, 3)), up])


@program
def variational_autoencoder():
    """Trains a VAE by a crossentropy of the pixels and a divergence of the codes."""

    class VAE(Learner, keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = image_encoder(), image_decoder()

        def call(self, images, training=False):
            return self.decoder(self.encoder(images, training=training)[0], training=training)

        def loss_of(self, images, training=True):
            mean, logarithm, code = self.encoder(images, training=training)
            errors = keras.losses.binary_crossentropy(images, self.decoder(code, training=training))
            reconstruction = ops.mean(ops.sum(errors, axis=(1, 2)))
            divergences = ops.sum(-0.5 * (1 + logarithm - ops.square(mean) - ops.exp(logarithm)), axis=1)
            return reconstruction + ops.mean(divergences), {"reconstruction": reconstruction}

        def test_step(self, images):
            return self.loss_of(images, training=False)[1]

    return VAE, fits(IMAGES, None, optimizer=adam, evaluates=True, predicts=True)


@program
def vector_quantization():
    """Trains a VQ-VAE: nearest codes by argmin, straight-through gradients, commitment by add_loss, a precomputed variance."""

    class Quantizer(layers.Layer):
        def build(self, shape):
            self.codes = self.add_weight(name="codes", shape=(shape[-1], 4), initializer="random_uniform")

        def call(self, x):
            flat = tf.reshape(x, (-1, 2))
            squares = tf.reduce_sum(flat**2, axis=1, keepdims=True) + tf.reduce_sum(self.codes**2, axis=0)
            distances = squares - 2 * tf.matmul(flat, self.codes)
            chosen = tf.one_hot(tf.argmin(distances, axis=1), 4, dtype=x.dtype)
            quantized = tf.reshape(tf.matmul(chosen, self.codes, transpose_b=True), tf.shape(x))
            self.add_loss(0.25 * tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2))
            self.add_loss(tf.reduce_mean((quantized - tf.stop_gradient(x)) ** 2))
            return x + tf.stop_gradient(quantized - x)

    class Trainer(Learner, keras.Model):
        def __init__(self):
            super().__init__()
            encoder = [keras.Input((4, 4, 1)), layers.Conv2D(3, 3, strides=2, padding="same", activation="relu")]
            decoder = layers.Conv2DTranspose(1, 3, strides=2, padding="same")
            self.vqvae = keras.Sequential([*encoder, layers.Conv2D(2, 1), Quantizer(), decoder])

        def loss_of(self, x):
            reconstruction = tf.reduce_mean((x - self.vqvae(x)) ** 2) / np.var(IMAGES)
            codebook = sum(self.vqvae.losses)
            return reconstruction + codebook, {"reconstruction": reconstruction, "codebook": codebook}

    return Trainer, fits(IMAGES, None, optimizer=adam)


@program
def denoising_diffusion():
    """Trains a DDPM: a random time for each row, rates that are gathered from a schedule, and an average of the network."""
    betas = np.linspace(0.01, 0.3, 8)
    kept = np.cumprod(1 - betas)

    class Diffusion(keras.Model):
        def __init__(self):
            super().__init__()
            self.network, self.average = network(), network()
            self.average.set_weights(self.network.get_weights())
            self.seed = keras.random.SeedGenerator(53)
            self.signal, self.noise = tf.constant(np.sqrt(kept)), tf.constant(np.sqrt(1 - kept))

        def train_step(self, images):
            times = keras.random.randint((tf.shape(images)[0],), 0, 8, seed=self.seed)
            with tf.GradientTape() as tape:
                noise = keras.random.normal(tf.shape(images), dtype=images.dtype, seed=self.seed)
                signal, share = (tf.gather(rates, times)[:, None, None, None] for rates in (self.signal, self.noise))
                predicted = self.network([signal * images + share * noise, times], training=True)
                loss = self.loss(noise, predicted)
            descend(self.optimizer, tape, loss, self.network.trainable_weights)
            follow(self.average, self.network)
            return {"noise_loss": loss, "latest": tf.reduce_max(times)}

    def network():
        images, times = keras.Input((4, 4, 1)), keras.Input((), dtype="int32")
        embedded = layers.Dense(3, activation="swish")(layers.Embedding(8, 4)(times))
        hidden = layers.Conv2D(3, 3, padding="same")(images)
        hidden = layers.GroupNormalization(3)(hidden + layers.Reshape((1, 1, 3))(embedded))
        return keras.Model([images, times], layers.Conv2D(1, 3, padding="same")(layers.Activation("swish")(hidden)))

    return Diffusion, fits(IMAGES, None, optimizer=adam, loss=keras.losses.MeanSquaredError())


@program
def energy_by_langevin():
    """Trains an energy by contrast with rows that noisy gradient steps find, starting from a buffer of earlier ones."""

    class Energy(keras.Model):
        def __init__(self):
            super().__init__()
            self.energy = mlp(5, 6, 1)
            self.buffer = self.add_weight(name="buffer", shape=(6, 5), initializer="random_normal", trainable=False)
            self.seed = keras.random.SeedGenerator(57)

        def train_step(self, x):
            places = keras.random.randint((tf.shape(x)[0],), 0, 6, seed=self.seed)
            found = tf.gather(self.buffer.value, places)
            for _ in range(3):
                with tf.GradientTape() as tape:
                    tape.watch(found)
                    total = tf.reduce_sum(self.energy(found, training=True))
                noise = keras.random.normal(tf.shape(found), seed=self.seed)
                found = tf.clip_by_value(found - 0.3 * tape.gradient(total, found) + 0.05 * noise, -3.0, 3.0)
            with tf.GradientTape() as tape:
                real, made = self.energy(x, training=True), self.energy(found, training=True)
                loss = tf.reduce_mean(real) - tf.reduce_mean(made) + 0.1 * tf.reduce_mean(real**2 + made**2)
            descend(self.optimizer, tape, loss, self.trainable_variables)
            self.buffer.assign(tf.concat([self.buffer.value, found], axis=0)[-6:])
            return {"loss": loss, "apart": tf.norm(found - x)}

    return Energy, fits(y=None, optimizer=adam)
