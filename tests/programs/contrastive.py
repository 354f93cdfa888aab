"""Learn representations by comparing rows with rows, with queues, moving averages and learned temperatures."""

import keras
import tensorflow as tf
from keras import layers, ops

from programs.catalogue import CLASSES, FEATURES, TARGETS, integers, mlp, normal, program, uniform
from programs.steps import Learner, adam, descend, fits, follow, rows_of

IMAGES = uniform(13, 6, 6, 1, seed=41)


def augmenter(name):
    """Builds random layers of Keras, each with its own seed generator."""
    inner = [layers.RandomFlip("horizontal"), layers.RandomTranslation(0.2, 0.2, fill_mode="constant")]
    return keras.Sequential([keras.Input((6, 6, 1)), *inner, layers.RandomBrightness(0.3, value_range=(0, 1))], name=name)


def noisy(inputs, size):
    """Builds two layers on noisy inputs, with dropout."""
    inner = [layers.GaussianNoise(0.2), layers.Dense(size, activation="tanh"), layers.Dropout(0.2), layers.Dense(3)]
    return keras.Sequential([keras.Input((inputs,)), *inner])


def unit(x):
    return tf.math.l2_normalize(x, axis=1)


class Siamese(Learner, keras.Model):
    """Compares rows that an encoder encodes."""

    def __init__(self, encoder=None):
        super().__init__()
        self.encoder = encoder or mlp(5, 4, 3)

    def call(self, x, training=False):
        return self.encoder(x, training=training)


@program
def simclr():
    """Compares two augmentations of each image with those of all others, and also trains a linear probe (SimCLR)."""

    class SimCLR(keras.Model):
        def __init__(self):
            super().__init__()
            self.augment, self.gently = augmenter("strong"), augmenter("weak")
            conv = layers.Conv2D(3, 3, strides=2, activation="relu")
            self.encoder = keras.Sequential([keras.Input((6, 6, 1)), conv, layers.Flatten(), layers.Dense(4, "tanh")])
            self.projection, self.probe = mlp(4, 4, 3), mlp(4, 3)
            self.contrastive_optimizer, self.probe_optimizer = adam(), adam()
            self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="contrastive_accuracy")
            self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="probe_accuracy")

        def contrast(self, one, other):
            similarities = ops.matmul(ops.normalize(one, axis=1), ops.transpose(ops.normalize(other, axis=1))) / 0.1
            places = ops.arange(ops.shape(one)[0])
            self.accuracy.update_state(places, similarities)
            self.accuracy.update_state(places, ops.transpose(similarities))
            ways = [similarities, ops.transpose(similarities)]
            return sum(keras.losses.sparse_categorical_crossentropy(places, way, from_logits=True) for way in ways) / 2

        def train_step(self, data):
            images, labels = data
            views = self.augment(images, training=True), self.augment(images, training=True)
            with tf.GradientTape() as tape:
                one, other = (self.projection(self.encoder(view, training=True), training=True) for view in views)
                loss = self.contrast(one, other)
            weights = self.encoder.trainable_weights + self.projection.trainable_weights
            descend(self.contrastive_optimizer, tape, loss, weights)
            with tf.GradientTape() as tape:
                logits = self.probe(self.encoder(self.gently(images, training=True), training=False), training=True)
                probe_loss = self.probe_loss(labels, logits)
            descend(self.probe_optimizer, tape, probe_loss, self.probe.trainable_weights)
            self.probe_accuracy.update_state(labels, logits)
            return {"probe": probe_loss, **{metric.name: metric.result() for metric in self.metrics}}

    return SimCLR, fits(IMAGES, CLASSES)


@program
def momentum_contrast():
    """Compares each row with a queue of keys from a momentum encoder, and adds the batch's keys to the queue (MoCo)."""

    class MoCo(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = noisy(5, 4)
            self.momentum_encoder = keras.models.clone_model(self.encoder)
            self.momentum_encoder.trainable = False
            self.queue = self.add_weight(name="queue", shape=(8, 3), initializer="random_normal", trainable=False)

        def train_step(self, x):
            keys = tf.stop_gradient(unit(self.momentum_encoder(x, training=True)))
            with tf.GradientTape() as tape:
                queries = unit(self.encoder(x, training=True))
                positive = tf.reduce_sum(queries * keys, axis=1, keepdims=True)
                logits = tf.concat([positive, tf.matmul(queries, self.queue, transpose_b=True)], axis=1) / 0.2
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.zeros(tf.shape(x)[0], tf.int32), logits)
                loss = tf.reduce_mean(losses)
            descend(self.optimizer, tape, loss, self.encoder.trainable_variables)
            follow(self.momentum_encoder, self.encoder)
            self.queue.assign(tf.concat([keys, self.queue.value], axis=0)[:8])
            return {"loss": loss, "hits": tf.reduce_mean(tf.cast(tf.argmax(logits, 1) == 0, "float64"))}

    return MoCo, fits(y=None, optimizer=adam)


@program
def nearest_neighbors_in_a_queue():
    """Replaces each row by its nearest neighbor in a queue, and then compares rows with rows (NNCLR)."""

    class NNCLR(Siamese):
        def __init__(self):
            super().__init__(noisy(5, 4))
            self.queue = self.add_weight(name="queue", shape=(9, 3), initializer="random_normal", trainable=False)

        def nearest(self, projections):
            places = ops.argmax(ops.matmul(projections, ops.transpose(self.queue)), axis=1)
            neighbors = ops.take(self.queue, places, axis=0)
            return projections + ops.stop_gradient(neighbors - projections)

        def loss_of(self, x):
            one, other = unit(self(x, training=True)), unit(self(x, training=True))
            pairs = (one, other), (other, one)
            logits = ops.concatenate([ops.matmul(self.nearest(a), ops.transpose(b)) / 0.1 for a, b in pairs], axis=0)
            places = ops.tile(ops.arange(ops.shape(x)[0]), (2,))
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(places, logits, from_logits=True))
            self.queue.assign(ops.concatenate([one, self.queue[: -ops.shape(x)[0]]], axis=0))
            return loss, {"sure": ops.mean(ops.max(ops.softmax(logits), axis=1))}

    return NNCLR, fits(y=None, optimizer=adam)


@program
def barlow_twins():
    """Pulls the correlation matrix of two views over the batch towards the identity (Barlow twins)."""

    def normalized(x):
        return (x - tf.reduce_mean(x, axis=0)) / tf.math.reduce_std(x, axis=0)

    class Barlow(Siamese):
        def loss_of(self, *views):
            one, other = (normalized(self(view, training=True)) for view in views)
            correlation = tf.matmul(one, other, transpose_a=True) / rows_of(one)
            rest = tf.reshape(correlation, [-1])[:-1]
            off = tf.reshape(tf.reshape(rest, (2, 4))[:, 1:], [-1])
            loss = tf.reduce_sum((1 - tf.linalg.diag_part(correlation)) ** 2) + 5e-2 * tf.reduce_sum(off**2)
            return loss, {"rows": rows_of(one)}

    return lambda: Barlow(mlp(5, 4, 3, normalized=True)), fits(y=FEATURES + 0.1 * normal(13, 5, seed=44), optimizer=adam)


@program
def triplets_of_the_batch():
    """Finds for each row the farthest row of its class and the nearest of another, and separates them (batch-hard)."""

    class Triplets(Siamese):
        def loss_of(self, x, y):
            z = unit(self(x, training=True))
            distances = tf.reduce_sum(tf.square(z[:, None] - z[None]), axis=2)
            same = tf.cast(y[:, None] == y[None], "float64")
            farthest = tf.reduce_max(distances * same, axis=1)
            nearest = tf.reduce_min(distances + 9.0 * same, axis=1)
            terms = tf.nn.relu(farthest - nearest + 0.5)
            active = tf.reduce_sum(tf.cast(terms > 0, "float64"))
            return tf.reduce_sum(terms) / tf.maximum(active, 1.0), {"active": active}

    return Triplets, fits(y=CLASSES, optimizer=adam, predicts=True)


@program
def retrieval():
    """Scores users against all items of the batch; other items are negatives, except for duplicates."""

    class Retrieval(Learner, keras.Model):
        def __init__(self):
            super().__init__()
            self.users, self.items = layers.Embedding(7, 3), layers.Embedding(9, 3)
            self.users.build(None), self.items.build(None)
            self.top = keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top_2")

        def loss_of(self, user_ids, item_ids):
            scores = ops.matmul(self.users(user_ids), ops.transpose(self.items(item_ids)))
            duplicates = ops.cast(ops.equal(item_ids[:, None], item_ids[None]), "float64")
            places = ops.arange(ops.shape(item_ids)[0])
            scores -= 1e9 * (duplicates - ops.eye(ops.shape(item_ids)[0], dtype="float64"))
            self.top.update_state(places, ops.cast(scores, "float32"))
            loss = ops.sum(keras.losses.sparse_categorical_crossentropy(places, scores, from_logits=True))
            return loss, {"top_2": self.top.result()}

        def test_step(self, data):
            return self.loss_of(*data)[1]

    ids = integers(7, 13, seed=46), integers(9, 13, seed=47)
    return Retrieval, fits(*ids, optimizer=lambda: keras.optimizers.Adagrad(0.1), evaluates=True)


@program
def metric_learning():
    """Compares all anchors with all positives of the batch by an einsum of embeddings, with the loss given to compile."""

    class MetricLearning(Learner, keras.Model):
        def loss_of(self, anchors, positives):
            one, other = self(anchors, training=True), self(positives, training=True)
            similarities = ops.einsum("ae,pe->ap", one, other) / 0.2
            labels = ops.arange(ops.shape(one)[0])
            loss = self.compute_loss(y=labels, y_pred=similarities)
            return loss, self.compute_metrics(anchors, labels, similarities)

    def build():
        inputs = keras.Input((6, 6, 1))
        hidden = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3, strides=2, activation="relu")(inputs))
        return MetricLearning(inputs, layers.UnitNormalization()(layers.Dense(3)(hidden)))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return build, fits(IMAGES, IMAGES**2, optimizer=adam, loss=loss, metrics=["accuracy"])


@program
def images_and_texts():
    """Matches images with texts both ways, with a learned temperature that it keeps in bounds after each step (CLIP)."""

    class CLIP(Learner, keras.Model):
        def __init__(self):
            super().__init__()
            self.vision = keras.Sequential([keras.Input((6, 6, 1)), layers.Flatten(), layers.Dense(3)])
            words = keras.Input((4,), dtype="int32")
            hidden = layers.GlobalAveragePooling1D()(layers.Embedding(8, 4, mask_zero=True)(words))
            self.text = keras.Model(words, layers.Dense(3)(hidden))
            self.temperature = self.add_weight(name="temperature", initializer=keras.initializers.Constant(2.6))

        def call(self, data, training=False):
            images, texts = data
            one, other = unit(self.vision(images, training=training)), unit(self.text(texts, training=training))
            return ops.matmul(one, ops.transpose(other)) * ops.exp(self.temperature)

        def loss_of(self, data):
            logits = self(data, training=True)
            labels = ops.arange(ops.shape(logits)[0])
            ways = logits, ops.transpose(logits)
            errors = [keras.losses.sparse_categorical_crossentropy(labels, way, from_logits=True) for way in ways]
            return sum(map(ops.mean, errors)) / 2, {}

        def train_step(self, data):
            logs = super().train_step(data)
            self.temperature.assign(ops.clip(self.temperature, 0.0, 2.61))
            return {**logs, "temperature": self.temperature}

    data = (IMAGES, integers(8, 13, 4, seed=48))
    return CLIP, fits(data, None, optimizer=lambda: keras.optimizers.AdamW(0.01))


@program
def prototypes():
    """Assigns two views to prototypes by Sinkhorn iterations over the whole batch and predicts one from the other (SwAV)."""

    class SwAV(Siamese):
        def __init__(self):
            super().__init__()
            self.prototypes = self.add_weight(name="prototypes", shape=(3, 4), initializer="orthogonal")

        def assign_rows(self, scores):
            shares = tf.transpose(tf.exp(scores / 0.5))
            shares /= tf.reduce_sum(shares)
            for _ in range(3):
                shares /= 4.0 * tf.reduce_sum(shares, axis=1, keepdims=True)
                shares /= rows_of(scores) * tf.reduce_sum(shares, axis=0, keepdims=True)
            return tf.stop_gradient(tf.transpose(shares * rows_of(scores)))

        def loss_of(self, *views):
            one, other = (tf.matmul(unit(self(view, training=True)), self.prototypes) for view in views)
            pairs = (one, self.assign_rows(other)), (other, self.assign_rows(one))
            losses = [tf.reduce_sum(wanted * tf.nn.log_softmax(scores / 0.1), axis=1) for scores, wanted in pairs]
            return -tf.reduce_mean(losses), {"rows": rows_of(one)}

        def train_step(self, data):
            self.prototypes.assign(tf.math.l2_normalize(self.prototypes.value, axis=0))
            return super().train_step(data)

    return SwAV, fits(y=FEATURES + 0.2 * normal(13, 5, seed=49), optimizer=adam)


@program
def ranking_within_the_batch():
    """Learns to order all pairs of rows like their targets, by a loss over the pairs that a mask selects."""

    class Ranking(Siamese):
        def loss_of(self, x, y):
            scores = ops.sum(self(x, training=True), axis=1)
            order = ops.sign(y - ops.transpose(y))
            differences = scores[:, None] - scores[None]
            above = ops.cast(order > 0, "float64")
            return ops.sum(above * ops.softplus(-differences)) / ops.sum(above), {"pairs": ops.sum(above)}

    return Ranking, fits(y=TARGETS, optimizer=adam)
