"""Train autoencoders, diffusion models and flows, whose steps draw noise by Keras's seed generators."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from programs.catalogue import FEATURES, adam, descend, fits, integers, mlp, program, uniform

IMAGES = uniform(13, 4, 4, 1, seed=51)


class Sampling(layers.Layer):
    """Draws codes around means, with its own seed generator."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
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


def divergence(mean, logarithm):
    return ops.sum(-0.5 * (1 + logarithm - ops.square(mean) - ops.exp(logarithm)), axis=1)


@program
def variational_autoencoder():
    """Trains a VAE by a crossentropy of the pixels and a divergence of the codes, with three trackers."""

    class VAE(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = image_encoder(), image_decoder()
            self.trackers = {name: keras.metrics.Mean(name=name) for name in ("loss", "reconstruction", "divergence")}

        @property
        def metrics(self):
            return list(self.trackers.values())

        def call(self, images, training=False):
            return self.decoder(self.encoder(images, training=training)[0], training=training)

        def losses_of(self, images, training):
            mean, logarithm, code = self.encoder(images, training=training)
            errors = keras.losses.binary_crossentropy(images, self.decoder(code, training=training))
            reconstruction, divergent = ops.mean(ops.sum(errors, axis=(1, 2))), ops.mean(divergence(mean, logarithm))
            return reconstruction + divergent, reconstruction, divergent

        def track(self, losses):
            for tracker, loss in zip(self.metrics, losses, strict=True):
                tracker.update_state(loss)
            return {name: tracker.result() for name, tracker in self.trackers.items()}

        def train_step(self, images):
            with tf.GradientTape() as tape:
                losses = self.losses_of(images, training=True)
            descend(self.optimizer, tape, losses[0], self.trainable_weights)
            return self.track(losses)

        def test_step(self, images):
            return self.track(self.losses_of(images, training=False))

    def script(model):
        model.compile(optimizer=adam())
        history = model.fit(IMAGES, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        evaluation = model.evaluate(IMAGES, batch_size=4, verbose=0, return_dict=True)
        return history, evaluation, model.predict(IMAGES, batch_size=5, verbose=0)

    return VAE, script


@program
def beta_vae_by_layers():
    """Trains a beta-VAE by Keras's own step, with a layer that adds the divergence by add_loss and tracks it."""

    class Divergence(layers.Layer):
        def __init__(self, beta):
            super().__init__()
            self.beta = beta
            self.tracker = keras.metrics.Mean(name="divergence")

        def call(self, inputs):
            mean, logarithm, code = inputs
            loss = ops.mean(divergence(mean, logarithm))
            self.tracker.update_state(loss)
            self.add_loss(self.beta * loss)
            return code

    def build():
        inputs = keras.Input((4, 4, 1))
        return keras.Model(inputs, image_decoder()(Divergence(4.0)(image_encoder()(inputs))))

    return build, fits(IMAGES, IMAGES, optimizer=adam, loss="binary_crossentropy", metrics=["mse"], evaluates=True)


@program
def gaussian_mixture_prior():
    """Trains a VAE whose prior is a mixture with learned centers, by log-sum-exp, with a weight that grows in each step."""

    class Mixture(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder, self.sampling = mlp(5, 4, 4), mlp(2, 4, 5), Sampling()
            self.centers = self.add_weight(name="centers", shape=(3, 2), initializer="random_normal")
            self.warmth = self.add_weight(name="warmth", initializer="zeros", trainable=False)

        def train_step(self, x):
            self.warmth.assign(ops.minimum(1.0, self.warmth + 0.25))
            with tf.GradientTape() as tape:
                mean, logarithm = ops.split(self.encoder(x, training=True), 2, axis=1)
                code = self.sampling([mean, logarithm])
                errors = ops.sum(ops.square(x - self.decoder(code, training=True)), axis=1)
                posterior = -0.5 * ops.sum(logarithm + (code - mean) ** 2 / ops.exp(logarithm), axis=1)
                prior = ops.logsumexp(-0.5 * ops.sum((code[:, None] - self.centers) ** 2, axis=2), axis=1) - np.log(3.0)
                loss = ops.mean(errors + self.warmth * (posterior - prior))
            descend(self.optimizer, tape, loss, self.trainable_weights)
            return {"loss": loss, "warmth": self.warmth, "nearest": ops.min(prior)}

    def script(model):
        model.compile(optimizer=adam())
        return model.fit(FEATURES, batch_size=5, epochs=2, shuffle=False, verbose=0).history

    return Mixture, script


@program
def vector_quantization():
    """Trains a VQ-VAE: nearest codes by argmin, straight-through gradients, commitment by add_loss, a precomputed variance."""

    class Quantizer(layers.Layer):
        def build(self, shape):
            self.codes = self.add_weight(name="codes", shape=(shape[-1], 4), initializer="random_uniform")

        def call(self, x):
            flat = tf.reshape(x, (-1, 2))
            distances = (
                tf.reduce_sum(flat**2, axis=1, keepdims=True)
                + tf.reduce_sum(self.codes**2, axis=0)
                - 2 * tf.matmul(flat, self.codes)
            )
            chosen = tf.one_hot(tf.argmin(distances, axis=1), 4, dtype=x.dtype)
            quantized = tf.reshape(tf.matmul(chosen, self.codes, transpose_b=True), tf.shape(x))
            self.add_loss(0.25 * tf.reduce_mean((tf.stop_gradient(quantized) - x) ** 2))
            self.add_loss(tf.reduce_mean((quantized - tf.stop_gradient(x)) ** 2))
            return x + tf.stop_gradient(quantized - x)

    class Trainer(keras.Model):
        def __init__(self, variance):
            super().__init__()
            self.variance = variance
            encoder = [keras.Input((4, 4, 1)), layers.Conv2D(3, 3, strides=2, padding="same", activation="relu")]
            decoder = layers.Conv2DTranspose(1, 3, strides=2, padding="same")
            self.vqvae = keras.Sequential([*encoder, layers.Conv2D(2, 1), Quantizer(), decoder])
            self.total, self.reconstruction = keras.metrics.Mean(name="loss"), keras.metrics.Mean(name="reconstruction_loss")

        @property
        def metrics(self):
            return [self.total, self.reconstruction]

        def train_step(self, x):
            with tf.GradientTape() as tape:
                reconstruction = tf.reduce_mean((x - self.vqvae(x)) ** 2) / self.variance
                total = reconstruction + sum(self.vqvae.losses)
            descend(self.optimizer, tape, total, self.vqvae.trainable_variables)
            self.total.update_state(total)
            self.reconstruction.update_state(reconstruction)
            return {metric.name: metric.result() for metric in self.metrics} | {"codebook": sum(self.vqvae.losses)}

    def script(model):
        model.compile(optimizer=adam())
        return model.fit(IMAGES, batch_size=5, epochs=2, shuffle=False, verbose=0).history

    return lambda: Trainer(np.var(IMAGES)), script


@program
def codebook_of_moving_averages():
    """Moves the codes of a VQ-VAE without gradients, to averages of the rows that chose them, which are kept in weights."""

    class Averages(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(5, 4, 3), mlp(3, 4, 5)
            self.codes = self.add_weight(name="codes", shape=(4, 3), initializer="random_normal", trainable=False)
            self.counts = self.add_weight(name="counts", shape=(4,), initializer="ones", trainable=False)
            self.sums = self.add_weight(name="sums", shape=(4, 3), initializer="random_normal", trainable=False)

        def train_step(self, x):
            with tf.GradientTape() as tape:
                z = self.encoder(x, training=True)
                places = tf.argmin(tf.reduce_sum((z[:, None] - self.codes) ** 2, axis=2), axis=1)
                quantized = tf.gather(self.codes.value, places)
                answers = self.decoder(z + tf.stop_gradient(quantized - z), training=True)
                loss = tf.reduce_mean((x - answers) ** 2) + 0.25 * tf.reduce_mean((z - tf.stop_gradient(quantized)) ** 2)
            descend(self.optimizer, tape, loss, self.trainable_variables)
            self.counts.assign(0.9 * self.counts + 0.1 * tf.math.bincount(places, minlength=4, maxlength=4, dtype="float64"))
            self.sums.assign(0.9 * self.sums + 0.1 * tf.math.unsorted_segment_sum(z, places, 4))
            self.codes.assign(self.sums / self.counts[:, None])
            shares = self.counts / tf.reduce_sum(self.counts)
            return {"loss": loss, "perplexity": tf.exp(-tf.reduce_sum(shares * tf.math.log(shares)))}

    def script(model):
        model.compile(optimizer=adam())
        history = model.fit(FEATURES, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        return history, [variable.numpy() for variable in (model.codes, model.counts, model.sums)]

    return Averages, script


@program
def denoising_diffusion():
    """Trains a DDPM: a random time for each row, rates that are gathered from a schedule, and an average of the network."""
    betas = np.linspace(0.01, 0.3, 8)
    kept = np.cumprod(1 - betas)

    class Diffusion(keras.Model):
        def __init__(self, network, average):
            super().__init__()
            self.network, self.average = network, average
            self.average.set_weights(self.network.get_weights())
            self.seed = keras.random.SeedGenerator(53)
            self.signal, self.noise = tf.constant(np.sqrt(kept)), tf.constant(np.sqrt(1 - kept))

        def train_step(self, images):
            rows = tf.shape(images)[0]
            times = keras.random.randint((rows,), 0, 8, seed=self.seed)
            with tf.GradientTape() as tape:
                noise = keras.random.normal(tf.shape(images), dtype=images.dtype, seed=self.seed)
                signal_rates, noise_rates = (
                    tf.gather(rates, times)[:, None, None, None] for rates in (self.signal, self.noise)
                )
                predicted = self.network([signal_rates * images + noise_rates * noise, times], training=True)
                loss = self.loss(noise, predicted)
            gradients = tape.gradient(loss, self.network.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
            for weight, mean in zip(self.network.weights, self.average.weights, strict=True):
                mean.assign(0.9 * mean + 0.1 * weight)
            return {"noise_loss": loss, "latest": tf.reduce_max(times)}

    def network():
        images, times = keras.Input((4, 4, 1)), keras.Input((), dtype="int32")
        embedded = layers.Dense(3, activation="swish")(layers.Embedding(8, 4)(times))
        hidden = layers.Conv2D(3, 3, padding="same")(images)
        hidden = layers.GroupNormalization(3)(hidden + layers.Reshape((1, 1, 3))(embedded))
        return keras.Model([images, times], layers.Conv2D(1, 3, padding="same")(layers.Activation("swish")(hidden)))

    def script(model):
        model.compile(loss=keras.losses.MeanSquaredError(), optimizer=adam())
        history = model.fit(IMAGES, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        return history, model.average.get_weights()

    return lambda: Diffusion(network(), network()), script


@program
def implicit_diffusion():
    """Trains a DDIM: a normalizing layer, continuous times, an EMA network for evaluation, and images made in test_step."""

    class Implicit(keras.Model):
        def __init__(self):
            super().__init__()
            self.normalizer = layers.Normalization()
            self.normalizer.adapt(FEATURES)
            self.network, self.ema_network = mlp(6, 6, 5, normalized=True), mlp(6, 6, 5, normalized=True)
            self.ema_network.set_weights(self.network.get_weights())
            self.seed = keras.random.SeedGenerator(54)

        def compile(self, **kwargs):
            super().compile(**kwargs)
            self.noise_tracker, self.image_tracker = keras.metrics.Mean(name="n_loss"), keras.metrics.Mean(name="i_loss")

        @property
        def metrics(self):
            return [self.noise_tracker, self.image_tracker]

        def rates(self, times):
            angles = np.arccos(0.95) + times * (np.arccos(0.02) - np.arccos(0.95))
            return ops.sin(angles), ops.cos(angles)

        def denoise(self, x, noise_rates, signal_rates, training):
            network = self.network if training else self.ema_network
            noise = network(ops.concatenate([x, noise_rates**2], axis=1), training=training)
            return noise, (x - noise_rates * noise) / signal_rates

        def losses_of(self, x, training):
            x = self.normalizer(x, training=training)
            noise = keras.random.normal(ops.shape(x), seed=self.seed)
            noise_rates, signal_rates = self.rates(keras.random.uniform((ops.shape(x)[0], 1), 0.0, 1.0, seed=self.seed))
            noises, images = self.denoise(signal_rates * x + noise_rates * noise, noise_rates, signal_rates, training)
            return self.loss(noise, noises), self.loss(x, images)

        def track(self, noise_loss, image_loss):
            self.noise_tracker.update_state(noise_loss)
            self.image_tracker.update_state(image_loss)
            return {metric.name: metric.result() for metric in self.metrics}

        def train_step(self, x):
            with tf.GradientTape() as tape:
                noise_loss, image_loss = self.losses_of(x, training=True)
            descend(self.optimizer, tape, noise_loss, self.network.trainable_weights)
            logs = self.track(noise_loss, image_loss)
            for weight, ema_weight in zip(self.network.weights, self.ema_network.weights, strict=True):
                ema_weight.assign(0.9 * ema_weight + 0.1 * weight)
            return logs

        def test_step(self, x):
            logs = self.track(*self.losses_of(x, training=False))
            made = keras.random.normal((4, 5), seed=self.seed)
            for step in range(3):
                now, then = (ops.ones((4, 1)) - (step + ahead) / 3 for ahead in (0, 1))
                noise, image = self.denoise(made, *self.rates(now), training=False)
                made = self.rates(then)[1] * image + self.rates(then)[0] * noise
            return {**logs, "made": ops.mean(ops.abs(made))}

    def script(model):
        model.compile(optimizer=keras.optimizers.AdamW(0.01, weight_decay=1e-3), loss=keras.losses.MeanAbsoluteError())
        history = model.fit(FEATURES, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        evaluation = model.evaluate(FEATURES, batch_size=4, verbose=0, return_dict=True)
        return history, evaluation, model.ema_network.get_weights()

    return Implicit, script


@program
def flow_of_couplings():
    """Trains a RealNVP by the likelihood under a normal distribution, with masked couplings in both directions."""

    class RealNVP(keras.Model):
        def __init__(self):
            super().__init__()
            self.masks = np.array([[0.0, 1.0], [1.0, 0.0]] * 2)
            self.couplings = [(mlp(2, 4, 2, last="tanh"), mlp(2, 4, 2)) for _ in self.masks]
            self.networks = [network for pair in self.couplings for network in pair]
            self.tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.tracker]

        def call(self, x, training=True):
            inverse, total = -1 if training else 1, 0.0
            for mask, (scale, shift) in list(zip(self.masks, self.couplings, strict=True))[::inverse]:
                s, t = ((1 - mask) * network(x * mask) for network in (scale, shift))
                gate = (inverse - 1) / 2
                x = (1 - mask) * (x * ops.exp(inverse * s) + inverse * t * ops.exp(gate * s)) + x * mask
                total += gate * ops.sum(s, axis=1)
            return x, total

        def likelihood(self, x):
            y, logarithm = self(x)
            return -ops.mean(-0.5 * ops.sum(y**2, axis=1) - np.log(2 * np.pi) + logarithm)

        def train_step(self, x):
            with tf.GradientTape() as tape:
                loss = self.likelihood(x)
            descend(self.optimizer, tape, loss, self.trainable_variables)
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

        def test_step(self, x):
            self.tracker.update_state(self.likelihood(x))
            return {"loss": self.tracker.result()}

    def script(model):
        model.compile(optimizer=adam())
        history = model.fit(FEATURES[:, :2], batch_size=5, epochs=2, shuffle=False, verbose=0).history
        evaluation = model.evaluate(FEATURES[:, :2], batch_size=4, verbose=0, return_dict=True)
        return history, evaluation, model.predict(FEATURES[:, :2], batch_size=5, verbose=0)

    return RealNVP, script


@program
def pixels_one_by_one():
    """Trains a masked convolution that sees only earlier pixels, and draws an image in predict_step (PixelCNN)."""

    class MaskedConvolution(layers.Layer):
        def build(self, shape):
            mask = np.ones((3, 3, 1, 1))
            mask[1, 1:], mask[2:] = 0.0, 0.0
            self.mask = mask
            self.kernel = self.add_weight(name="kernel", shape=(3, 3, shape[-1], 3))

        def call(self, x):
            return ops.conv(x, self.kernel * self.mask, padding="same")

    class PixelCNN(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seed = keras.random.SeedGenerator(55)

        def predict_step(self, data):
            images = ops.zeros_like(data)
            for row, column in ((0, 0), (0, 1), (1, 0)):
                drawn = keras.random.uniform(ops.shape(images), seed=self.seed)
                pixels = ops.cast(drawn < ops.sigmoid(self(images, training=False)), images.dtype)
                spot = np.zeros((1, 4, 4, 1))
                spot[:, row, column] = 1.0
                images = images * (1 - spot) + pixels * spot
            return images

    def build():
        inputs = keras.Input((4, 4, 1))
        return PixelCNN(inputs, layers.Conv2D(1, 1)(layers.ReLU()(MaskedConvolution()(inputs))))

    pixels = integers(2, 13, 4, 4, 1, seed=56).astype("float64")
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return build, fits(pixels, pixels, optimizer=adam, loss=loss, predicts=True)


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

    def script(model):
        model.compile(optimizer=adam())
        return model.fit(FEATURES, batch_size=5, epochs=2, shuffle=False, verbose=0).history, model.buffer.numpy()

    return Energy, script
