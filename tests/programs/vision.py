"""Train on images, points and graphs, with patches, windows and all kinds of convolutions, by custom and Keras's steps."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from programs.catalogue import CLASSES, TARGETS, adam, descend, fits, integers, normal, program, sgd, uniform

IMAGES = uniform(13, 8, 8, 2, seed=81)
MASKS = integers(2, 13, 8, 8, 1, seed=82).astype("float64")


class Tracked(keras.Model):
    """Holds a functional model with a tracker of its custom loss."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="total")

    def learn(self, tape, loss):
        descend(self.optimizer, tape, loss, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"total": self.tracker.result()}


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

    def compute_output_shape(self, shape):
        return (shape[0], 4, 32)


@program
def masked_autoencoder():
    """Hides a random half of each image's patches by argsort and gather with batch_dims, and restores them (MAE)."""

    class MaskedAutoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.patches, self.seed = Patches(), keras.random.SeedGenerator(83)
            self.augment = keras.Sequential([keras.Input((8, 8, 2)), layers.RandomFlip("horizontal")])
            self.embed, self.restore = layers.Dense(4), layers.Dense(32)
            self.embed.build((None, 4, 32)), self.restore.build((None, 4, 4))
            tokens = keras.Input((None, 4))
            self.encoder = keras.Model(tokens, attention_block(tokens))
            self.places = self.add_weight(name="places", shape=(4, 4), initializer="random_normal")
            self.token = self.add_weight(name="token", shape=(1, 1, 4), initializer="random_normal")

        def loss_of(self, images, training):
            patches = self.patches(self.augment(images, training=training))
            rows = tf.shape(patches)[0]
            order = tf.argsort(keras.random.uniform((rows, 4), seed=self.seed), axis=-1)
            hidden, seen = order[:, :2], order[:, 2:]
            places = tf.repeat(self.places.value[None], rows, axis=0)
            embedded = self.embed(patches) + places
            encoded = self.encoder(tf.gather(embedded, seen, axis=1, batch_dims=1), training=training)
            tokens = tf.repeat(tf.repeat(self.token.value, 2, axis=1), rows, axis=0)
            tokens += tf.gather(places, hidden, axis=1, batch_dims=1)
            restored = self.restore(self.encoder(tf.concat([encoded, tokens], axis=1), training=training))
            wanted = tf.gather(patches, hidden, axis=1, batch_dims=1)
            return self.compute_loss(y=wanted, y_pred=restored[:, 2:]), wanted, restored[:, 2:]

        def train_step(self, images):
            with tf.GradientTape() as tape:
                loss, wanted, restored = self.loss_of(images, training=True)
            descend(self.optimizer, tape, loss, self.trainable_variables)
            return {"total": loss, "distance": tf.reduce_mean(tf.abs(wanted - restored))}

        def test_step(self, images):
            loss, wanted, restored = self.loss_of(images, training=False)
            return {"total": loss, "distance": tf.reduce_mean(tf.abs(wanted - restored))}

    def script(model):
        model.compile(keras.optimizers.AdamW(0.01), loss=keras.losses.MeanSquaredError())
        history = model.fit(IMAGES, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        return history, model.evaluate(IMAGES, batch_size=4, verbose=0, return_dict=True)

    return MaskedAutoencoder, script


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

    class Segmenter(Tracked):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.iou = keras.metrics.BinaryIoU()

        def loss_of(self, y, answers):
            dice = 1 - (2 * ops.sum(y * answers) + 1) / (ops.sum(y) + ops.sum(answers) + 1)
            return dice + ops.mean(keras.losses.binary_crossentropy(y, answers)), dice

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                answers = self(x, training=True)
                loss, dice = self.loss_of(y, answers)
            self.iou.update_state(y, answers)
            return {**self.learn(tape, loss), "dice": dice, "iou": self.iou.result()}

        def test_step(self, data):
            x, y = data
            answers = self(x, training=False)
            self.iou.update_state(y, answers)
            return {"dice": self.loss_of(y, answers)[1], "iou": self.iou.result()}

    def build():
        inputs = keras.Input((8, 8, 2))
        wide = layers.Conv2D(3, 3, padding="same", activation="relu")(inputs)
        low = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(layers.MaxPooling2D()(wide)))
        high = layers.UpSampling2D(interpolation="bilinear")(layers.Activation("relu")(low))
        x = layers.Conv2D(3, 3, padding="same", activation="relu")(layers.Concatenate()([wide, high]))
        return Segmenter(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))

    return build, fits(IMAGES, MASKS, optimizer=adam, evaluates=True)


@program
def depth():
    """Estimates depth by a loss of the similarity of windows (SSIM), edges and distances, as for monocular images."""

    def similarity(one, other):
        def mean(x):
            return tf.nn.avg_pool2d(x, 3, 1, "VALID")

        means = mean(one), mean(other)
        variances = mean(one**2) - means[0] ** 2, mean(other**2) - means[1] ** 2
        together = mean(one * other) - means[0] * means[1]
        numerator = (2 * means[0] * means[1] + 0.01**2) * (2 * together + 0.03**2)
        return numerator / ((means[0] ** 2 + means[1] ** 2 + 0.01**2) * (sum(variances) + 0.03**2))

    class Depth(Tracked):
        def loss_of(self, wanted, answers):
            wanted_slopes, slopes = tf.image.image_gradients(wanted), tf.image.image_gradients(answers)
            weights = [tf.exp(tf.reduce_mean(tf.abs(slope))) for slope in wanted_slopes]
            edges = sum(tf.reduce_mean(tf.abs(slope * weight)) for slope, weight in zip(slopes, weights, strict=True))
            different = tf.reduce_mean(1 - similarity(wanted, answers))
            return 0.85 * different + 0.1 * tf.reduce_mean(tf.abs(wanted - answers)) + 0.9 * edges, different

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss, different = self.loss_of(y, self(x, training=True))
            return {**self.learn(tape, loss), "different": different}

    def build():
        inputs = keras.Input((8, 8, 2))
        x = layers.LeakyReLU()(layers.BatchNormalization()(layers.Conv2D(3, 3, padding="same")(inputs)))
        return Depth(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))

    wanted = (uniform(13, 8, 8, 1, seed=84) + np.linspace(0, 1, 8)[:, None]) / 2
    return build, fits(IMAGES, wanted, optimizer=sgd)


@program
def neural_style():
    """Pulls the Gram matrices of an image's features to those of a style, and lowers the total variation."""

    class Style(keras.Model):
        def __init__(self):
            super().__init__()
            features = [keras.Input((8, 8, 2)), layers.Conv2D(3, 3, activation="tanh"), layers.Conv2D(3, 3, strides=2)]
            self.features = keras.Sequential(features)
            self.features.trainable = False
            self.painter = keras.Sequential([keras.Input((8, 8, 2)), layers.Conv2D(2, 3, padding="same")])

        def gram(self, x):
            return tf.einsum("bijc,bijd->bcd", x, x) / tf.cast(tf.shape(x)[1] * tf.shape(x)[2], x.dtype)

        def train_step(self, data):
            content, style = data
            with tf.GradientTape() as tape:
                painted = content + 0.1 * self.painter(content, training=True)
                all_features = self.features(tf.concat([content, style, painted], axis=0))
                of_content, of_style, of_painted = tf.split(all_features, 3, axis=0)
                by_content = tf.reduce_sum(tf.square(of_painted - of_content))
                by_style = tf.reduce_sum(tf.square(self.gram(of_painted) - self.gram(of_style))) / 9.0
                variation = tf.reduce_sum(tf.image.total_variation(painted))
                loss = 0.1 * by_content + by_style + 1e-3 * variation
            gradients = tape.gradient(loss, self.painter.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.painter.trainable_variables, strict=True))
            return {"content": by_content, "style": by_style, "variation": variation}

    return Style, fits(IMAGES, IMAGES[::-1], optimizer=lambda: keras.optimizers.Adam(0.02, beta_1=0.99))


@program
def graph_convolution():
    """Passes messages along a dense adjacency of each row's graph, normalized by degree, in a custom step."""

    class GraphConvolution(layers.Layer):
        def __init__(self, size):
            super().__init__()
            self.dense = layers.Dense(size, use_bias=False)

        def build(self, shapes):
            self.dense.build(shapes[0])

        def call(self, inputs):
            nodes, adjacency = inputs
            adjacency = adjacency + ops.eye(4, dtype=adjacency.dtype)
            degrees = ops.rsqrt(ops.sum(adjacency, axis=-1))
            normalized = adjacency * degrees[:, :, None] * degrees[:, None, :]
            return ops.relu(ops.matmul(normalized, self.dense(nodes)))

    class Graphs(Tracked):
        def train_step(self, data):
            (nodes, adjacency), y = data
            with tf.GradientTape() as tape:
                logits = self([nodes, adjacency], training=True)
                loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))
            return {**self.learn(tape, loss), "edges": ops.sum(adjacency)}

    def build():
        nodes, adjacency = keras.Input((4, 3)), keras.Input((4, 4))
        x = layers.BatchNormalization()(GraphConvolution(3)([nodes, adjacency]))
        x = GraphConvolution(3)([x, adjacency])
        return Graphs([nodes, adjacency], layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))

    edges = np.triu(integers(2, 13, 4, 4, seed=85), 1).astype("float64")
    data = (normal(13, 4, 3, seed=86), edges + edges.transpose(0, 2, 1))
    return build, fits(data, CLASSES, optimizer=adam)


@program
def message_passing_between_rows():
    """Treats the rows of a batch as nodes of one graph, with edges, gathers, segment sums and attention (GAT)."""

    class RowGraph(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.attention, self.head = layers.Dense(4), layers.Dense(1), layers.Dense(3)
            self.dense.build((None, 5)), self.attention.build((None, 8)), self.head.build((None, 4))

        def train_step(self, data):
            x, y = data
            rows = tf.shape(x)[0]
            starts = tf.concat([tf.range(rows), tf.range(rows)], axis=0)
            ends = tf.concat([(tf.range(rows) + 1) % rows, (tf.range(rows) * 2) % rows], axis=0)
            with tf.GradientTape() as tape:
                nodes = self.dense(x)
                edges = tf.concat([tf.gather(nodes, starts), tf.gather(nodes, ends)], axis=1)
                scores = tf.exp(tf.clip_by_value(tf.nn.leaky_relu(self.attention(edges)), -2, 2))
                totals = tf.math.unsorted_segment_sum(scores, ends, rows)
                shares = scores / tf.gather(totals, ends)
                gathered = tf.math.unsorted_segment_sum(shares * tf.gather(nodes, starts), ends, rows)
                losses = keras.losses.sparse_categorical_crossentropy(y, self.head(gathered), from_logits=True)
                loss = tf.reduce_mean(losses)
            descend(self.optimizer, tape, loss, self.trainable_variables)
            return {"total": loss, "edges": tf.shape(edges)[0]}

    return RowGraph, fits(normal(13, 5, seed=87), CLASSES, optimizer=adam)


@program
def points():
    """Classifies sets of points after learned transformations, which a regularizer keeps orthogonal (PointNet)."""

    @keras.saving.register_keras_serializable("programs")
    class Orthogonal(keras.regularizers.Regularizer):
        def __call__(self, x):
            x = ops.reshape(x, (-1, 3, 3))
            products = ops.einsum("bij,bkj->bik", x, x)
            return 0.01 * ops.sum(ops.square(products - ops.eye(3, dtype=x.dtype)))

    def build():
        inputs = keras.Input((6, 3))
        x = layers.GlobalMaxPooling1D()(layers.BatchNormalization(momentum=0.0)(layers.Conv1D(4, 1, activation="relu")(inputs)))
        bias = keras.initializers.Constant(np.eye(3).flatten())
        turned = layers.Dense(9, kernel_initializer="zeros", bias_initializer=bias, activity_regularizer=Orthogonal())(x)
        x = layers.Dot(axes=(2, 1))([inputs, layers.Reshape((3, 3))(turned)])
        x = layers.Dropout(0.3)(layers.GlobalMaxPooling1D()(layers.Conv1D(4, 1, activation="tanh")(x)))
        return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))

    compile_arguments = {"loss": "sparse_categorical_crossentropy", "metrics": ["sparse_categorical_accuracy"]}
    return build, fits(normal(13, 6, 3, seed=88), CLASSES, optimizer=adam, evaluates=True, **compile_arguments)


@program
def super_resolution():
    """Doubles the size of images by tf.nn.depth_to_space and logs the peak signal-to-noise ratio."""

    def psnr(wanted, answers):
        return tf.reduce_mean(10.0 * ops.log10(1.0 / tf.reduce_mean(tf.square(wanted - answers), axis=(1, 2, 3))))

    class SuperResolution(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                answers = self(x, training=True)
                loss = self.compute_loss(x, y, answers)
            descend(self.optimizer, tape, loss, self.trainable_variables)
            return {**self.compute_metrics(x, y, answers), "error": loss, "psnr": psnr(y, answers)}

        def predict_step(self, x):
            return tf.cast(tf.clip_by_value(self(x, training=False), 0, 1) * 255, tf.uint8)

    class Shuffle(layers.Layer):
        def call(self, x):
            return tf.nn.depth_to_space(x, 2)

    def build():
        inputs = keras.Input((4, 4, 2))
        x = layers.Conv2D(3, 3, padding="same", activation="tanh")(inputs)
        x = layers.Add()([x, layers.Conv2D(3, 3, padding="same")(x)])
        return SuperResolution(inputs, Shuffle()(layers.Conv2D(8, 3, padding="same")(x)))

    def script(model):
        model.compile(adam(), "mae", metrics=[psnr])
        small = IMAGES.reshape(13, 4, 2, 4, 2, 2).mean(axis=(2, 4))
        history = model.fit(small, IMAGES, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        return history, model.predict(small, batch_size=4, verbose=0)

    return build, script


@program
def low_light():
    """Enhances images without targets, by losses of color, exposure, smoothness and neighborhoods (Zero-DCE)."""

    class Enhancer(Tracked):
        def train_step(self, images):
            with tf.GradientTape() as tape:
                curves = self(images, training=True)
                x = images
                for curve in tf.split(curves, 2, axis=-1):
                    x = x + curve * (tf.square(x) - x)
                means = tf.reduce_mean(x, axis=(1, 2))
                color = tf.sqrt(tf.reduce_mean((means[:, 0] - means[:, 1]) ** 4) + 1e-9)
                exposure = tf.reduce_mean(tf.square(tf.nn.avg_pool2d(x, 4, 4, "VALID") - 0.6))
                heights = tf.reduce_sum(tf.square(curves[:, 1:] - curves[:, :-1]))
                smooth = 2 * heights / tf.cast(tf.shape(images)[0] * 56, "float64")
                loss = 5 * color + 10 * exposure + 20 * smooth
            return {**self.learn(tape, loss), "color": color, "exposure": exposure, "smooth": smooth}

    def build():
        inputs = keras.Input((8, 8, 2))
        x = layers.Conv2D(3, 3, padding="same", activation="relu")(inputs)
        return Enhancer(inputs, layers.Conv2D(4, 3, padding="same", activation="tanh")(x))

    def script(model):
        model.compile(optimizer=adam())
        return model.fit(IMAGES, batch_size=5, epochs=2, shuffle=False, verbose=0).history

    return build, script


@program
def kinds_of_pooling():
    """Trains all kinds of pooling, places of maxima, cropping, padding, resizing and normalizations at once."""

    class Pools(Tracked):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
            return self.learn(tape, loss)

    class WithPlaces(layers.Layer):
        def call(self, x):
            largest, places = tf.nn.max_pool_with_argmax(x, 2, 2, "SAME")
            larger = tf.image.resize(largest, (6, 6), method="nearest")
            return tf.reduce_mean(larger, (1, 2)) + tf.reduce_mean(tf.cast(places, x.dtype), (1, 2)) / 256

        def compute_output_shape(self, shape):
            return (shape[0], 4)

    def build():
        inputs = keras.Input((8, 8, 2))
        x = layers.Conv2D(4, 3, padding="same")(inputs)
        maximum = layers.GlobalAveragePooling2D()(layers.MaxPooling2D(3, strides=2, padding="same")(x))
        average = layers.GlobalMaxPooling2D(keepdims=True)(layers.AveragePooling2D(2)(layers.LayerNormalization()(x)))
        cropped = layers.ZeroPadding2D(1)(layers.Cropping2D(((1, 2), (0, 3)))(layers.GroupNormalization(2)(x)))
        resized = layers.GlobalAveragePooling2D()(layers.Resizing(5, 7)(layers.UnitNormalization()(cropped)))
        joined = layers.Concatenate()([maximum, layers.Flatten()(average), resized, WithPlaces()(x)])
        return Pools(inputs, layers.Dense(1)(layers.BatchNormalization()(joined)))

    return build, fits(IMAGES, TARGETS, optimizer=sgd, predicts=True)


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

    class Detector(Tracked):
        def train_step(self, data):
            images, boxes = data
            matched = overlap(boxes)
            positive = tf.cast(matched > 0.3, "float64")
            ignored = tf.cast((matched > 0.2) & (matched <= 0.3), "float64")
            offsets = boxes[:, None] - anchors
            with tf.GradientTape() as tape:
                outputs = self(images, training=True)
                crossed = tf.nn.sigmoid_cross_entropy_with_logits(positive, outputs[..., 0])
                focal = (1 - tf.exp(-crossed)) ** 2 * crossed * (1 - ignored)
                found = tf.maximum(tf.reduce_sum(positive), 1.0)
                distances = tf.abs(offsets - outputs[..., 1:])
                smooth = tf.reduce_sum(tf.where(distances < 0.1, 5 * distances**2, distances - 0.05), axis=2)
                loss = tf.math.divide_no_nan(tf.reduce_sum(focal), found) + tf.reduce_sum(smooth * positive) / found
            return {**self.learn(tape, loss), "found": found}

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

    class Radiance(Tracked):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.seed = keras.random.SeedGenerator(92)

        def train_step(self, data):
            colors, (origins, directions) = data
            rows = tf.shape(origins)[0]
            depths = tf.linspace(tf.constant(1.0, "float64"), 2.0, 4) + keras.random.uniform((rows, 4), 0, 0.2, seed=self.seed)
            where = origins[:, None] + directions[:, None] * depths[..., None]
            encoded = tf.concat([f(2.0**i * where) for i in range(2) for f in (tf.sin, tf.cos)], axis=-1)
            with tf.GradientTape() as tape:
                outputs = tf.reshape(self(tf.reshape(encoded, (-1, 12)), training=True), (rows, 4, 4))
                densities, shades = tf.nn.softplus(outputs[..., 0]), tf.sigmoid(outputs[..., 1:])
                gaps = tf.concat([depths[:, 1:] - depths[:, :-1], tf.broadcast_to(tf.constant(1e10, "float64"), (rows, 1))], 1)
                opacity = 1 - tf.exp(-densities * gaps)
                weights = opacity * tf.math.cumprod(1 - opacity + 1e-10, axis=-1, exclusive=True)
                loss = tf.reduce_mean(tf.square(colors - tf.reduce_sum(weights[..., None] * shades, axis=1)))
            return {**self.learn(tape, loss), "depth": tf.reduce_mean(tf.reduce_sum(weights * depths, axis=1))}

    def build():
        inputs = keras.Input((12,))
        return Radiance(inputs, layers.Dense(4)(layers.Dense(5, activation="relu")(inputs)))

    rays = (normal(13, 3, seed=93), normal(13, 3, seed=94))
    return build, fits(uniform(13, 3, seed=95), rays, optimizer=adam)
