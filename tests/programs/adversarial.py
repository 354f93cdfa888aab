"""Train networks against each other, and on inputs that are made worse."""

import keras
import tensorflow as tf
from keras import layers, ops

from programs.catalogue import CLASSES, mlp, program, uniform
from programs.steps import adam, dense, descend, fits

IMAGES = uniform(13, 4, 4, 1, seed=31)


@program
def deep_convolutional_gan():
    """Trains a DCGAN in turns: first on joined real and made images with noisy labels, then the generator on wrong labels."""

    class DCGAN(keras.Model):
        def __init__(self):
            super().__init__()
            small = [keras.Input((3,)), layers.Dense(12, use_bias=False), layers.BatchNormalization(), layers.LeakyReLU(0.2)]
            grown = [layers.Reshape((2, 2, 3)), layers.Conv2DTranspose(3, 3, strides=2, padding="same", use_bias=False)]
            last = [layers.BatchNormalization(), layers.LeakyReLU(0.2), layers.Conv2D(1, 3, padding="same")]
            self.generator = keras.Sequential([*small, *grown, *last])
            seen = [keras.Input((4, 4, 1)), layers.Conv2D(3, 3, strides=2, padding="same"), layers.LeakyReLU(0.2)]
            self.discriminator = keras.Sequential([*seen, layers.Dropout(0.3), layers.GlobalMaxPooling2D(), layers.Dense(1)])
            self.seed = keras.random.SeedGenerator(32)
            self.trackers = [keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")]

        @property
        def metrics(self):
            return self.trackers

        def compile(self, d_optimizer, g_optimizer):
            super().compile()
            self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
            self.criterion = keras.losses.BinaryCrossentropy(from_logits=True)

        def made_like(self, images, training=False):
            return self.generator(keras.random.normal((ops.shape(images)[0], 3), seed=self.seed), training=training)

        def train_step(self, images):
            made = self.made_like(images)
            labels = ops.concatenate([ops.ones_like(made[:, 0, 0]), ops.zeros_like(made[:, 0, 0])], axis=0)
            labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.seed)
            with tf.GradientTape() as tape:
                d_loss = self.criterion(labels, self.discriminator(ops.concatenate([made, images], axis=0), training=True))
            descend(self.d_optimizer, tape, d_loss, self.discriminator.trainable_weights)
            with tf.GradientTape() as tape:
                answers = self.discriminator(self.made_like(images, training=True))
                g_loss = self.criterion(ops.zeros_like(answers), answers)
            descend(self.g_optimizer, tape, g_loss, self.generator.trainable_weights)
            for tracker, loss in zip(self.trackers, (d_loss, g_loss), strict=True):
                tracker.update_state(loss)
            return {tracker.name: tracker.result() for tracker in self.trackers}

    def script(model):
        model.compile(adam(), adam())
        return model.fit(IMAGES, batch_size=5, epochs=2, shuffle=False, verbose=0).history

    return DCGAN, script


@program
def wasserstein_gan():
    """Trains a WGAN-GP: second derivatives through batch normalization, and two steps of the critic for each other one."""

    class WGAN(keras.Model):
        def __init__(self):
            super().__init__()
            self.critic, self.generator = mlp(5, 4, 4, 1, normalized=True), mlp(3, 4, 5, normalized=True)
            self.critic_optimizer, self.generator_optimizer = adam(), adam()
            self.seed = keras.random.SeedGenerator(33)

        def penalty(self, real, fake):
            share = keras.random.uniform((ops.shape(real)[0], 1), seed=self.seed)
            between = real + share * (fake - real)
            with tf.GradientTape() as tape:
                tape.watch(between)
                scores = self.critic(between, training=True)
            slope = tape.gradient(scores, [between])[0]
            return tf.reduce_mean((tf.sqrt(tf.reduce_sum(tf.square(slope), axis=1)) - 1.0) ** 2)

        def train_step(self, real):
            shape = tf.shape(real)[0], 3
            for _ in range(2):
                noise = keras.random.normal(shape, seed=self.seed)
                with tf.GradientTape() as tape:
                    fake = self.generator(noise, training=True)
                    right, wrong = self.critic(real, training=True), self.critic(fake, training=True)
                    penalty = self.penalty(real, fake)
                    critic_loss = tf.reduce_mean(wrong) - tf.reduce_mean(right) + 10.0 * penalty
                descend(self.critic_optimizer, tape, critic_loss, self.critic.trainable_variables)
            noise = keras.random.normal(shape, seed=self.seed)
            with tf.GradientTape() as tape:
                generator_loss = -tf.reduce_mean(self.critic(self.generator(noise, training=True), training=True))
            descend(self.generator_optimizer, tape, generator_loss, self.generator.trainable_variables)
            return {"critic": critic_loss, "generator": generator_loss, "penalty": penalty}

    return WGAN, fits(y=None)


@program
def adversarial_regularization():
    """Moves each row along the gradient of the loss by its inputs, and trains on both with batch normalization (FGSM)."""

    class Adversarial(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                answers = self(x, training=True)
                loss = self.compute_loss(x, y, answers)
                moved = x + 0.5 * tf.sign(tape.gradient(loss, x)) + 3.0 * tf.stop_gradient(tape.gradient(loss, x))
                worse = self.compute_loss(x, y, self(moved, training=True))
                total = loss + 0.5 * worse
            descend(self.optimizer, tape, total, self.trainable_variables)
            return {**self.compute_metrics(x, y, answers), "fit": loss, "worse": worse}

        def test_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = self.compute_loss(x, y, self(x, training=False))
            answers = self(x + 0.5 * tf.sign(tape.gradient(loss, x)), training=False)
            return {**self.compute_metrics(x, y, answers), "robust": self.compute_loss(x, y, answers)}

    compiled = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    return dense(Adversarial, 3, "softmax"), fits(y=CLASSES, optimizer=adam, evaluates=True, **compiled)
