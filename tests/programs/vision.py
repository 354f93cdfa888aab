"""Train on images, points and graphs, with patches, windows and all kinds of convolutions, by custom and Keras's steps."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from programs.catalogue import CLASSES, TARGETS, integers, normal, program, uniform
from programs.steps import Learner, adam, fits

IMAGES = uniform(13, 8, 8, 2, seed=81)
MASKS = integers(2, 13, 8, 8, 1, seed=82).astype("float64")


def attention_block(x):
    """Applies normalized attention with a residual, and then a feed-forward part."""
    normalized = layers.LayerNormalization()(x)
    x = layers.MultiHeadAttention(2, 2)(normalized, normalized) + x
    return layers.Dense(4)(layers.Dense(6, activation="gelu")(layers.LayerNormalization()(x))) + x


class Patches(layers.Layer):
    """Cuts images into patches of 4 by 4 pixels: (rows, 4, 32)."""

    def call(self, images):
        patches = tf.image.extract_patches(images, [1, 4, 4, 1], [1, 4, 4, 1], [1, 1, 1, 1], "VALID")
        return tf.reshape(patches, (-1, 4, 32))


@program
def masked_autoencoder():
    """Hides a random half of each image's patches by argsort and gather with batch_dims, and restores them (MAE)."""

    class MaskedAutoencoder(Learner, keras.Model):
        def __init__(self):
            super().__init__()
            self.patches = Patches()
            self.augment = keras.Sequential([keras.Input((8, 8, 2)), layers.RandomFlip("horizontal")])
            self.embed, self.restore = layers.Dense(4), layers.Dense(32)
            self.embed.build((None, 4, 32)), self.restore.build((None, 4, 4))
            tokens = keras.Input((None, 4))
            self.encoder = keras.Model(tokens, attention_block(tokens))
            self.places = self.add_weight(name="places", shape=(4, 4), initializer="random_normal")
            self.token = self.add_weight(name="token", shape=(1, 1, 4), initializer="random_normal")

        def loss_of(self, images):
            patches = self.patches(self.augment(images, training=True))
            rows = tf.shape(patches)[0]
            order = tf.argsort(keras.random.uniform((rows, 4), seed=self.seed), axis=-1)
            hidden, seen = order[:, :2], order[:, 2:]
            places = tf.repeat(self.places.value[None], rows, axis=0)
            embedded = self.embed(patches) + places
            encoded = self.encoder(tf.gather(embedded, seen, axis=1, batch_dims=1), training=True)
            tokens = tf.repeat(tf.repeat(self.token.value, 2, axis=1), rows, axis=0)
            tokens += tf.gather(places, hidden, axis=1, batch_dims=1)
            restored = self.restore(self.encoder(tf.concat([encoded, tokens], axis=1), training=True))[:, 2:]
            wanted = tf.gather(patches, hidden, axis=1, batch_dims=1)
            return self.compute_loss(y=wanted, y_pred=restored), {"distance": tf.reduce_mean(tf.abs(wanted - restored))}

    return MaskedAutoencoder, fits(IMAGES, None, optimizer=adam, loss=keras.losses.MeanSquaredError())


@program
def vision_transformer():
    """Classifies images by attention between their patches, after random layers, in Keras's own step (ViT)."""

    class Places(layers.Layer):
        def build(self, shape):
            self.token = self.add_weight(name="token", shape=(1, 1, 4), initializer="random_normal")
            self.places = self.add_weight(name="places", shape=(5, 4), initializer="random_normal")

        def call(self, x):
            token = ops.broadcast_to(self.token, (ops.shape(x)[0], 1, 4))
            return ops.concatenate([token, x], axis=1) + self.places

    def build():
        inputs = keras.Input((8, 8, 2))
        x = layers.RandomFlip("horizontal")(inputs)
        x = attention_block(Places()(layers.Dense(4)(Patches()(x))))
        return keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.2)(x[:, 0])))

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    return build, fits(IMAGES, CLASSES, optimizer=adam, loss=loss, metrics=metrics, predicts=True)


@program
def segmentation_by_dice():
    """Segments images by a small U-Net, with a Dice loss of the whole batch plus a crossentropy, and an IoU."""

    class Segmenter(Learner, keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.iou = keras.metrics.BinaryIoU()

        def loss_of(self, x, y, training=True):
            answers = self(x, training=training)
            self.iou.update_state(y, answers)
            dice = 1 - (2 * ops.sum(y * answers) + 1) / (ops.sum(y) + ops.sum(answers) + 1)
            loss = dice + ops.mean(keras.losses.binary_crossentropy(y, answers))
            return loss, {"dice": dice, "iou": self.iou.result()}

        def test_step(self, data):
            return self.loss_of(*data, training=False)[1]

    def build():
        inputs = keras.Input((8, 8, 2))
        wide = layers.Conv2D(3, 3, padding="same", activation="relu")(inputs)
        low = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(layers.MaxPooling2D()(wide)))
        high = layers.UpSampling2D(interpolation="bilinear")(layers.Activation("relu")(low))
        x = layers.Conv2D(3, 3, padding="same", activation="relu")(layers.Concatenate()([wide, high]))
        return Segmenter(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))

    return build, fits(IMAGES, MASKS, optimizer=adam, evaluates=True)


@program
def message_passing_between_rows():
    """Treats the rows of a batch as nodes of one graph, with edges, gathers, segment sums and attention (GAT)."""

    class RowGraph(Learner, keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.attention, self.head = layers.Dense(4), layers.Dense(1), layers.Dense(3)
            self.dense.build((None, 5)), self.attention.build((None, 8)), self.head.build((None, 4))

        def loss_of(self, x, y):
            rows = tf.shape(x)[0]
            starts = tf.concat([tf.range(rows), tf.range(rows)], axis=0)
            ends = tf.concat([(tf.range(rows) + 1) % rows, (tf.range(rows) * 2) % rows], axis=0)
            nodes = self.dense(x)
            edges = tf.concat([tf.gather(nodes, starts), tf.gather(nodes, ends)], axis=1)
            scores = tf.exp(tf.clip_by_value(tf.nn.leaky_relu(self.attention(edges)), -2, 2))
            totals = tf.math.unsorted_segment_sum(scores, ends, rows)
            shares = scores / tf.gather(totals, ends)
            gathered = tf.math.unsorted_segment_sum(shares * tf.gather(nodes, starts), ends, rows)
            losses = keras.losses.sparse_categorical_crossentropy(y, self.head(gathered), from_logits=True)
            return tf.reduce_mean(losses), {"edges": tf.shape(edges)[0]}

    return RowGraph, fits(normal(13, 5, seed=87), CLASSES, optimizer=adam)


@program
def kinds_of_pooling():
    """Trains all kinds of pooling, places of maxima, cropping, padding, resizing and normalizations at once."""

    class WithPlaces(layers.Layer):
        def call(self, x):
            largest, places = tf.nn.max_pool_with_argmax(x, 2, 2, "SAME")
            larger = tf.image.resize(largest, (6, 6), method="nearest")
            return tf.reduce_mean(larger, (1, 2)) + tf.reduce_mean(tf.cast(places, x.dtype), (1, 2)) / 256

    def build():
        inputs = keras.Input((8, 8, 2))
        x = layers.Conv2D(4, 3, padding="same")(inputs)
        maximum = layers.GlobalAveragePooling2D()(layers.MaxPooling2D(3, strides=2, padding="same")(x))
        average = layers.GlobalMaxPooling2D(keepdims=True)(layers.AveragePooling2D(2)(layers.LayerNormalization()(x)))
        cropped = layers.ZeroPadding2D(1)(layers.Cropping2D(((1, 2), (0, 3)))(layers.GroupNormalization(2)(x)))
        resized = layers.GlobalAveragePooling2D()(layers.Resizing(5, 7)(layers.UnitNormalization()(cropped)))
        joined = layers.Concatenate()([maximum, layers.Flatten()(average), resized, WithPlaces()(x)])
        return keras.Model(inputs, layers.Dense(1)(layers.BatchNormalization()(joined)))

    return build, fits(IMAGES, TARGETS, loss="mse", predicts=True)


@program
def mixed_and_cut_images():
    """Pastes a rectangle of a neighboring image into each image, by masks from random corners, and mixes labels (CutMix)."""

    class CutMix(keras.Model):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seed = keras.random.SeedGenerator(89)

        def train_step(self, data):
            images, labels = data
            labels = tf.one_hot(labels, 3, dtype="float64")
            corners = keras.random.randint((tf.shape(images)[0], 2), 0, 5, seed=self.seed)
            size = keras.random.randint((), 2, 5, seed=self.seed)
            pixels = tf.range(8)
            inside = (pixels[None] >= corners[:, :1]) & (pixels[None] < corners[:, :1] + size)
            across = (pixels[None] >= corners[:, 1:]) & (pixels[None] < corners[:, 1:] + size)
            mask = tf.cast(inside[:, :, None] & across[:, None, :], "float64")[..., None]
            share = tf.reduce_mean(mask, axis=(1, 2))
            mixed = images * (1 - mask) + tf.roll(images, 1, axis=0) * mask
            return super().train_step((mixed, labels * (1 - share) + tf.roll(labels, 1, axis=0) * share))

    def build():
        inputs = keras.Input((8, 8, 2))
        x = layers.BatchNormalization()(layers.Conv2D(3, 3, strides=2, activation="relu")(inputs))
        return CutMix(inputs, layers.Dense(3, activation="softmax")(layers.Flatten()(x)))

    loss = keras.losses.CategoricalCrossentropy(label_smoothing=0.1)
    return build, fits(IMAGES, CLASSES, optimizer=adam, loss=loss, metrics=["categorical_accuracy"])


@program
def boxes():
    """Detects boxes, with anchors matched by overlap, a focal loss over the batch's positives, and a distance (RetinaNet)."""
    anchors = np.array([[0.1, 0.1, 0.5, 0.5], [0.4, 0.1, 0.9, 0.5], [0.1, 0.5, 0.5, 0.9], [0.3, 0.3, 0.8, 0.9]])

    def overlap(boxes):
        low, high = tf.maximum(boxes[:, None, :2], anchors[:, :2]), tf.minimum(boxes[:, None, 2:], anchors[:, 2:])
        common = tf.reduce_prod(tf.maximum(high - low, 0.0), axis=2)
        area = tf.reduce_prod(boxes[:, 2:] - boxes[:, :2], axis=1)[:, None]
        return common / (area + np.prod(anchors[:, 2:] - anchors[:, :2], axis=1) - common)

    class Detector(Learner, keras.Model):
        def loss_of(self, images, boxes):
            matched = overlap(boxes)
            positive = tf.cast(matched > 0.3, "float64")
            ignored = tf.cast((matched > 0.2) & (matched <= 0.3), "float64")
            offsets = boxes[:, None] - anchors
            outputs = self(images, training=True)
            crossed = tf.nn.sigmoid_cross_entropy_with_logits(positive, outputs[..., 0])
            focal = (1 - tf.exp(-crossed)) ** 2 * crossed * (1 - ignored)
            found = tf.maximum(tf.reduce_sum(positive), 1.0)
            distances = tf.abs(offsets - outputs[..., 1:])
            smooth = tf.reduce_sum(tf.where(distances < 0.1, 5 * distances**2, distances - 0.05), axis=2)
            loss = tf.math.divide_no_nan(tf.reduce_sum(focal), found) + tf.reduce_sum(smooth * positive) / found
            return loss, {"found": found}

        def predict_step(self, images):
            outputs = self(images, training=False)
            boxes, scores = outputs[..., 1:] + anchors, tf.sigmoid(outputs[..., 0])
            kept = tf.image.combined_non_max_suppression(
                tf.cast(boxes[:, :, None], "float32"), tf.cast(scores[..., None], "float32"), 2, 2
            )
            return {"boxes": kept.nmsed_boxes, "count": kept.valid_detections}

    def build():
        inputs = keras.Input((8, 8, 2))
        x = layers.Flatten()(layers.Conv2D(3, 3, strides=2, activation="relu")(inputs))
        return Detector(inputs, layers.Reshape((4, 5))(layers.Dense(20)(x)))

    low = 0.5 * uniform(13, 2, seed=90)
    wanted = np.concatenate([low, low + 0.2 + 0.3 * uniform(13, 2, seed=91)], axis=1)
    # The predictions are float32, like non-maximum suppression.
    return build, fits(IMAGES, wanted, optimizer=adam, predicts=True)


@program
def rendered_rays():
    """Renders colors along rays by exclusive cumulative products of densities at random depths (NeRF)."""

    class Radiance(Learner, keras.Model):
        def loss_of(self, colors, rays):
            origins, directions = rays
            rows = tf.shape(origins)[0]
            depths = tf.linspace(tf.constant(1.0, "float64"), 2.0, 4) + keras.random.uniform((rows, 4), 0, 0.2, seed=self.seed)
            where = origins[:, None] + directions[:, None] * depths[..., None]
            encoded = tf.concat([f(2.0**i * where) for i in range(2) for f in (tf.sin, tf.cos)], axis=-1)
            outputs = tf.reshape(self(tf.reshape(encoded, (-1, 12)), training=True), (rows, 4, 4))
            densities, shades = tf.nn.softplus(outputs[..., 0]), tf.sigmoid(outputs[..., 1:])
            gaps = tf.concat([depths[:, 1:] - depths[:, :-1], tf.broadcast_to(tf.constant(1e10, "float64"), (rows, 1))], 1)
            opacity = 1 - tf.exp(-densities * gaps)
            weights = opacity * tf.math.cumprod(1 - opacity + 1e-10, axis=-1, exclusive=True)
            loss = tf.reduce_mean(tf.square(colors - tf.reduce_sum(weights[..., None] * shades, axis=1)))
            return loss, {"depth": tf.reduce_mean(tf.reduce_sum(weights * depths, axis=1))}

    def build():
        inputs = keras.Input((12,))
        return Radiance(inputs, layers.Dense(4)(layers.Dense(5, activation="relu")(inputs)))

    rays = (normal(13, 3, seed=93), normal(13, 3, seed=94))
    return build, fits(uniform(13, 3, seed=95), rays, optimizer=adam)
