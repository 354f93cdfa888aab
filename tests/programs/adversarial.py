"""Train networks against each other, and on inputs that are made worse."""

import keras
import tensorflow as tf
from keras import layers, ops

from programs.catalogue import (
    CLASSES,
    FEATURES,
    TARGETS,
    adam,
    dense,
    descend,
    integers,
    mlp,
    normal,
    program,
    rows_of,
    uniform,
)

IMAGES = uniform(13, 4, 4, 1, seed=31)


class Pair(keras.Model):
    """Holds a generator and a discriminator, each with its optimizer and tracker, and the seed of the noise."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.seed = keras.random.SeedGenerator(32)
        self.g_tracker, self.d_tracker = keras.metrics.Mean(name="g_loss"), keras.metrics.Mean(name="d_loss")

    @property
    def metrics(self):
        return [self.g_tracker, self.d_tracker]

    def compile(self, g_optimizer, d_optimizer, loss):
        super().compile()
        self.g_optimizer, self.d_optimizer, self.criterion = g_optimizer, d_optimizer, loss

    def noise(self, x, size):
        return keras.random.normal((ops.shape(x)[0], size), seed=self.seed)

    def logs(self, g_loss, d_loss):
        self.g_tracker.update_state(g_loss)
        self.d_tracker.update_state(d_loss)
        return {"g_loss": self.g_tracker.result(), "d_loss": self.d_tracker.result()}


def fits_pair(*data, batch_size=5):
    """Returns a script that compiles a pair with two optimizers and binary crossentropy, and fits it."""

    def script(model):
        optimizers = [keras.optimizers.Adam(rate, beta_1=0.5) for rate in (0.02, 0.01)]
        model.compile(*optimizers, keras.losses.BinaryCrossentropy(from_logits=True))
        history = model.fit(*data, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history
        return history, [[variable.numpy() for variable in optimizer.variables] for optimizer in optimizers]

    return script


def image_generator(inputs):
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(2 * 2 * 3, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
            layers.Reshape((2, 2, 3)),
            layers.Conv2DTranspose(3, 3, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )


def image_discriminator(channels, dropout=0.0):
    return keras.Sequential(
        [
            keras.Input((4, 4, channels)),
            layers.Conv2D(3, 3, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Dropout(dropout),
            layers.GlobalMaxPooling2D(),
            layers.Dense(1),
        ]
    )


@program
def deep_convolutional_gan():
    """Trains a DCGAN in turns: first on joined real and made images with noisy labels, then the generator on wrong labels."""

    class DCGAN(Pair):
        def train_step(self, images):
            made = self.generator(self.noise(images, 3))
            labels = ops.concatenate([ops.ones_like(made[:, 0, 0]), ops.zeros_like(made[:, 0, 0])], axis=0)
            labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed)
            with tf.GradientTape() as tape:
                d_loss = self.criterion(labels, self.discriminator(ops.concatenate([made, images], axis=0), training=True))
            descend(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
            with tf.GradientTape() as tape:
                answers = self.discriminator(self.generator(self.noise(images, 3), training=True))
                g_loss = self.criterion(ops.zeros_like(answers), answers)
            descend(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
            return self.logs(g_loss, d_loss)

    def script(model):
        model.compile(adam(), adam(), keras.losses.BinaryCrossentropy(from_logits=True))
        history = model.fit(IMAGES, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        return history, model.generator.get_weights()

    return lambda: DCGAN(image_generator(3), image_discriminator(1, dropout=0.3)), script


def wasserstein(critic):
    """Returns (build, script) of a WGAN with a gradient penalty, and two steps of the critic for each of the generator."""

    class WGAN(keras.Model):
        def __init__(self):
            super().__init__()
            self.critic, self.generator = critic(), mlp(3, 4, 5, normalized=True)
            self.seed = keras.random.SeedGenerator(33)

        def compile(self, critic_optimizer, generator_optimizer, critic_loss, generator_loss):
            super().compile()
            self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer
            self.critic_loss, self.generator_loss = critic_loss, generator_loss

        def penalty(self, real, fake):
            share = keras.random.uniform((ops.shape(real)[0], 1), seed=self.seed)
            between = real + share * (fake - real)
            with tf.GradientTape() as tape:
                tape.watch(between)
                scores = self.critic(between, training=True)
            slope = tape.gradient(scores, [between])[0]
            return tf.reduce_mean((tf.sqrt(tf.reduce_sum(tf.square(slope), axis=1)) - 1.0) ** 2)

        def train_step(self, real):
            rows = tf.shape(real)[0]
            for _ in range(2):
                noise = keras.random.normal((rows, 3), seed=self.seed)
                with tf.GradientTape() as tape:
                    fake = self.generator(noise, training=True)
                    scores = self.critic(real, training=True), self.critic(fake, training=True)
                    penalty = self.penalty(real, fake)
                    critic_loss = self.critic_loss(*scores) + 10.0 * penalty
                descend(self.critic_optimizer, tape, critic_loss, self.critic.trainable_variables)
            noise = keras.random.normal((rows, 3), seed=self.seed)
            with tf.GradientTape() as tape:
                generator_loss = self.generator_loss(self.critic(self.generator(noise, training=True), training=True))
            descend(self.generator_optimizer, tape, generator_loss, self.generator.trainable_variables)
            return {"critic": critic_loss, "generator": generator_loss, "penalty": penalty}

    def script(model):
        losses = lambda real, fake: tf.reduce_mean(fake) - tf.reduce_mean(real), lambda fake: -tf.reduce_mean(fake)
        model.compile(adam(), adam(), *losses)
        return model.fit(FEATURES, batch_size=5, epochs=2, shuffle=False, verbose=0).history

    return WGAN, script


@program
def wasserstein_gan():
    """Trains a WGAN-GP: second derivatives at interpolated rows, and two steps of the critic for each of the generator."""
    return wasserstein(lambda: mlp(5, 4, 4, 1))


@program
def wasserstein_gan_with_normalized_critic():
    """Trains a WGAN-GP whose critic couples rows by batch normalization, also in the second derivatives."""
    return wasserstein(lambda: mlp(5, 4, 4, 1, normalized=True))


@program
def cycle_gan():
    """Trains two generators and two discriminators by adversarial, cycle and identity losses from one persistent tape."""

    class CycleGAN(keras.Model):
        parts = ("there", "back", "judge_there", "judge_back")

        def __init__(self):
            super().__init__()
            self.there, self.back = mlp(4, 5, 4, normalized=True), mlp(4, 5, 4, normalized=True)
            self.judge_there, self.judge_back = mlp(4, 4, 1), mlp(4, 4, 1)
            self.mse, self.mae = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()

        def compile(self, optimizers):
            super().compile()
            self.optimizer_there, self.optimizer_back, self.optimizer_judge_there, self.optimizer_judge_back = optimizers

        def train_step(self, data):
            a, b = data
            with tf.GradientTape(persistent=True) as tape:
                to_b, to_a = self.there(a, training=True), self.back(b, training=True)
                cycle = self.mae(a, self.back(to_b, training=True)) + self.mae(b, self.there(to_a, training=True))
                same_a, same_b = self.mae(a, self.back(a, training=True)), self.mae(b, self.there(b, training=True))
                real_b, fake_b = self.judge_there(b, training=True), self.judge_there(to_b, training=True)
                real_a, fake_a = self.judge_back(a, training=True), self.judge_back(to_a, training=True)
                losses = {
                    "there": self.mse(tf.ones_like(fake_b), fake_b) + 10.0 * cycle + 5.0 * same_b,
                    "back": self.mse(tf.ones_like(fake_a), fake_a) + 10.0 * cycle + 5.0 * same_a,
                    "judge_there": self.mse(tf.ones_like(real_b), real_b) / 2 + self.mse(tf.zeros_like(fake_b), fake_b) / 2,
                    "judge_back": self.mse(tf.ones_like(real_a), real_a) / 2 + self.mse(tf.zeros_like(fake_a), fake_a) / 2,
                }
            gradients = {part: tape.gradient(losses[part], getattr(self, part).trainable_variables) for part in self.parts}
            for part in self.parts:
                optimizer = getattr(self, f"optimizer_{part}")
                optimizer.apply_gradients(zip(gradients[part], getattr(self, part).trainable_variables, strict=True))
            return losses

    def script(model):
        model.compile([keras.optimizers.Adam(2e-3, beta_1=0.5) for _ in range(4)])
        data = normal(13, 4, seed=34), normal(13, 4, seed=35)
        return model.fit(*data, batch_size=5, epochs=2, shuffle=False, verbose=0).history

    return CycleGAN, script


@program
def image_to_image():
    """Trains a pix2pix: a generator with a skip connection and dropout, by a discriminator of patches and by distance."""

    def generator():
        inputs = keras.Input((4, 4, 1))
        down = layers.Conv2D(3, 4, strides=2, padding="same", activation="relu")(inputs)
        up = layers.Conv2DTranspose(3, 4, strides=2, padding="same", use_bias=False)(down)
        up = layers.ReLU()(layers.Dropout(0.3)(layers.BatchNormalization()(up)))
        return keras.Model(inputs, layers.Conv2D(1, 3, padding="same", activation="tanh")(layers.Concatenate()([up, inputs])))

    def discriminator():
        inputs = keras.Input((4, 4, 1)), keras.Input((4, 4, 1))
        hidden = layers.ZeroPadding2D()(layers.Concatenate()(inputs))
        hidden = layers.LeakyReLU()(layers.BatchNormalization()(layers.Conv2D(3, 3, strides=1)(hidden)))
        return keras.Model(inputs, layers.Conv2D(1, 3)(hidden))

    class PixToPix(Pair):
        def train_step(self, data):
            source, target = data
            with tf.GradientTape() as g_tape, tf.GradientTape() as d_tape:
                made = self.generator(source, training=True)
                real = self.discriminator([source, target], training=True)
                fake = self.discriminator([source, made], training=True)
                distance = tf.reduce_mean(tf.abs(target - made))
                g_loss = self.criterion(tf.ones_like(fake), fake) + 100 * distance
                d_loss = self.criterion(tf.ones_like(real), real) + self.criterion(tf.zeros_like(fake), fake)
            g_variables, d_variables = self.generator.trainable_variables, self.discriminator.trainable_variables
            g_gradients, d_gradients = g_tape.gradient(g_loss, g_variables), d_tape.gradient(d_loss, d_variables)
            self.g_optimizer.apply_gradients(zip(g_gradients, g_variables, strict=True))
            self.d_optimizer.apply_gradients(zip(d_gradients, d_variables, strict=True))
            return {**self.logs(g_loss, d_loss), "distance": distance}

    return lambda: PixToPix(generator(), discriminator()), fits_pair(IMAGES, 1 - IMAGES**2)


@program
def auxiliary_classifier_gan():
    """Trains a GAN whose discriminator outputs real or made, and the class; the classes of made rows are drawn."""

    class Auxiliary(Pair):
        def train_step(self, data):
            x, y = data
            rows = ops.shape(x)[0]
            drawn = keras.random.randint((rows,), 0, 3, seed=self.seed)
            noise = ops.concatenate([self.noise(x, 2), ops.one_hot(drawn, 3, dtype="float64")], axis=1)
            classes = ops.concatenate([ops.cast(drawn, "int64"), y], axis=0)
            real = ops.concatenate([ops.zeros((rows, 1)), ops.ones((rows, 1))], axis=0)
            with tf.GradientTape(persistent=True) as tape:
                both = ops.concatenate([self.generator(noise, training=True), x], axis=0)
                logits, probabilities = self.discriminator(both, training=True)
                by_class = ops.mean(keras.losses.sparse_categorical_crossentropy(classes, probabilities))
                d_loss = self.criterion(real, logits) + by_class
                g_loss = self.criterion(ops.ones((rows, 1)), logits[:rows]) + by_class
            d_gradients = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply(d_gradients, self.discriminator.trainable_variables)
            descend(self.g_optimizer, tape, g_loss, self.generator.trainable_variables)
            return {**self.logs(g_loss, d_loss), "by_class": by_class}

    def discriminator():
        inputs = keras.Input((5,))
        hidden = layers.Dense(4, activation="tanh")(inputs)
        return keras.Model(inputs, [layers.Dense(1)(hidden), layers.Dense(3, activation="softmax")(hidden)])

    return lambda: Auxiliary(mlp(5, 4, 5, normalized=True), discriminator()), fits_pair(FEATURES, CLASSES)


@program
def adaptive_augmentation():
    """Trains a GAN whose strength of augmentation is a weight that follows the discriminator's accuracy in each step."""

    class Adaptive(Pair):
        def __init__(self, generator, discriminator):
            super().__init__(generator, discriminator)
            self.strength = self.add_weight(name="strength", initializer="zeros", trainable=False)

        def augment(self, x):
            chosen = keras.random.uniform((ops.shape(x)[0], 1), seed=self.seed) < self.strength
            return ops.where(chosen, ops.flip(x, axis=1), x)

        def train_step(self, x):
            noise = self.noise(x, 3)
            with tf.GradientTape(persistent=True) as tape:
                real = self.discriminator(self.augment(x), training=True)
                fake = self.discriminator(self.augment(self.generator(noise, training=True)), training=True)
                g_loss, d_loss = ops.mean(ops.softplus(-fake)), ops.mean(ops.softplus(fake) + ops.softplus(-real))
            g_gradients = tape.gradient(g_loss, self.generator.trainable_weights)
            descend(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
            self.g_optimizer.apply(g_gradients, self.generator.trainable_weights)
            accuracy = 0.5 * (ops.mean(ops.cast(real > 0, "float64")) + ops.mean(ops.cast(fake < 0, "float64")))
            self.strength.assign(ops.clip(self.strength + 0.3 * (accuracy - 0.3), 0.0, 1.0))
            return {**self.logs(g_loss, d_loss), "accuracy": accuracy, "strength": self.strength}

    return lambda: Adaptive(mlp(3, 4, 5, normalized=True), mlp(5, 4, 1)), fits_pair(FEATURES)


@program
def adversarial_regularization():
    """Moves each row along the gradient of the loss by its inputs, and trains on both with batch normalization (FGSM)."""

    class Adversarial(keras.Model):
        def train_step(self, data):
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                answers = self(x, training=True)
                loss = self.compute_loss(x, y, answers, sample_weight)
                moved = x + 0.5 * tf.sign(tape.gradient(loss, x)) + 3.0 * tf.stop_gradient(tape.gradient(loss, x))
                worse = self.compute_loss(x, y, self(moved, training=True), sample_weight)
                total = loss + 0.5 * worse
            descend(self.optimizer, tape, total, self.trainable_variables)
            return {**self.compute_metrics(x, y, answers, sample_weight), "fit": loss, "worse": worse}

        def test_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = self.compute_loss(x, y, self(x, training=False))
            answers = self(x + 0.5 * tf.sign(tape.gradient(loss, x)), training=False)
            return {**self.compute_metrics(x, y, answers), "robust": self.compute_loss(x, y, answers)}

    def script(model):
        model.compile(adam(), "sparse_categorical_crossentropy", metrics=["accuracy"])
        weights = 0.5 + integers(3, 13, seed=36)
        history = model.fit(FEATURES, CLASSES, sample_weight=weights, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        return history, model.evaluate(FEATURES, CLASSES, batch_size=4, verbose=0, return_dict=True)

    return dense(Adversarial, outputs=3, activation="softmax"), script


@program
def virtual_adversarial_training():
    """Finds the direction that changes the answers most, by power iteration on gradients of a divergence (VAT)."""

    class Virtual(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seed = keras.random.SeedGenerator(37)

        def train_step(self, data):
            x, y = data
            clean = tf.stop_gradient(self(x, training=False))
            direction = keras.random.normal(ops.shape(x), seed=self.seed)
            for _ in range(2):
                direction = 0.1 * tf.math.l2_normalize(direction, axis=1)
                with tf.GradientTape() as tape:
                    tape.watch(direction)
                    divergence = tf.reduce_sum(tf.abs(clean - self(x + direction, training=False)) ** 1.5)
                direction = tape.gradient(divergence, direction)
            with tf.GradientTape() as tape:
                supervised = tf.reduce_mean(tf.square(y - self(x, training=True)))
                moved = self(x + tf.math.l2_normalize(direction, axis=1), training=True)
                smooth = tf.reduce_sum(tf.square(clean - moved)) / rows_of(x)
                loss = supervised + smooth
            descend(self.optimizer, tape, loss, self.trainable_variables)
            return {"supervised": supervised, "smooth": smooth}

    def script(model):
        model.compile(adam())
        return model.fit(FEATURES, TARGETS, batch_size=5, epochs=2, shuffle=False, verbose=0).history

    return dense(Virtual), script
