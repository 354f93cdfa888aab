"""Train on texts and sequences: masks, decoders, recurrent networks and transformers, by custom and Keras's steps."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from programs.catalogue import CLASSES, SAMPLE_WEIGHTS, integers, normal, program
from programs.steps import Learner, adam, fits, mean_square, sgd

# Ids start at 1; 0 is padding at the end, in none to four of the six places.
LENGTHS = 2 + integers(5, 13, seed=61)
WORDS = np.where(np.arange(6) < LENGTHS[:, None], 1 + integers(9, 13, 6, seed=62), 0)
ANSWERS = np.where(np.arange(4) < (LENGTHS[:, None] + 1) // 2, 1 + integers(6, 13, 4, seed=63), 0)


class Positions(layers.Layer):
    """Adds embeddings of tokens and of their places, with a mask of the padding."""

    def __init__(self, words, places, size):
        super().__init__()
        self.tokens = layers.Embedding(words, size, mask_zero=True)
        self.places = layers.Embedding(places, size)

    def call(self, x):
        return self.tokens(x) + self.places(ops.arange(ops.shape(x)[-1]))

    def compute_mask(self, x, mask=None):
        return self.tokens.compute_mask(x)


def transformer_block(x, dropout):
    """Applies self-attention and a feed-forward part, each with a residual and layer normalization."""
    attended = layers.MultiHeadAttention(2, 2, dropout=dropout)(x, x)
    x = layers.LayerNormalization()(x + layers.Dropout(dropout)(attended))
    return layers.LayerNormalization()(x + layers.Dense(4)(layers.Dense(6, activation="relu")(x)))


@program
def masked_language_model():
    """Hides random tokens, or replaces them by others, and trains on these alone by weights of the places (BERT)."""
    criterion = keras.losses.SparseCategoricalCrossentropy(reduction=None)

    class MaskedLanguageModel(Learner, keras.Model):
        def loss_of(self, words):
            chance = keras.random.uniform(ops.shape(words), seed=self.seed)
            hidden = (chance < 0.5) & (words > 0)
            others = keras.random.randint(ops.shape(words), 1, 10, dtype=words.dtype, seed=self.seed)
            replaced = ops.where(chance < 0.4, ops.full_like(words, 10), others)
            weights = ops.cast(hidden, "float64")
            losses = criterion(words, self(ops.where(hidden, replaced, words), training=True), sample_weight=weights)
            self.tracker.update_state(losses, sample_weight=weights)
            return ops.sum(losses) / ops.maximum(ops.sum(weights), 1.0), {"hidden": ops.sum(weights)}

    def build():
        inputs = keras.Input((6,), dtype="int64")
        x = transformer_block(Positions(11, 6, 4)(inputs), 0.1)
        return MaskedLanguageModel(inputs, layers.Dense(11, activation="softmax")(x))

    return build, fits(WORDS, None, optimizer=adam)


@program
def sequence_to_sequence():
    """Trains an LSTM encoder and decoder by teacher forcing and a crossentropy of words, and predicts by greedy decoding."""

    class Translator(keras.Model):
        def __init__(self):
            super().__init__()
            source, target = keras.Input((6,), dtype="int64"), keras.Input((None,), dtype="int64")
            _, *state = layers.LSTM(3, return_state=True)(layers.Embedding(11, 3, mask_zero=True)(source))
            decoded = layers.LSTM(3, return_sequences=True)(layers.Embedding(8, 3)(target), initial_state=state)
            self.network = keras.Model([source, target], layers.Dense(8)(decoded))
            self.perplexity = keras.metrics.Mean(name="perplexity")

        def call(self, data, training=False):
            return self.network(data, training=training)

        def train_step(self, data):
            source, target = data
            with tf.GradientTape() as tape:
                logits = self([source, target[:, :-1]], training=True)
                errors = tf.nn.sparse_softmax_cross_entropy_with_logits(target[:, 1:], logits)
                mask = tf.cast(target[:, 1:] > 0, "float64")
                loss = tf.reduce_sum(errors * mask) / (tf.reduce_sum(mask) + 1e-9)
            gradients = tape.gradient(loss, self.trainable_variables)
            gradients = [tf.clip_by_norm(tf.convert_to_tensor(gradient), 1.0) for gradient in gradients]
            self.optimizer.apply(gradients, self.trainable_variables)
            self.perplexity.update_state(tf.exp(loss), sample_weight=tf.reduce_sum(mask))
            return {"perplexity": self.perplexity.result(), "words": tf.reduce_sum(mask)}

        def predict_step(self, source):
            words = tf.ones((tf.shape(source)[0], 1), "int64")
            for _ in range(3):
                chosen = tf.argmax(self([source, words], training=False)[:, -1], axis=1)
                words = tf.concat([words, chosen[:, None]], axis=1)
            return words

    return Translator, fits(WORDS, ANSWERS, optimizer=adam, predicts=True)


@program
def mixture_of_experts():
    """Sends each word to one of three experts up to their capacity, and adds a balance loss, in Keras's own step."""

    class Experts(layers.Layer):
        def __init__(self, capacity):
            super().__init__()
            self.capacity = capacity
            self.router, self.experts = layers.Dense(3), [layers.Dense(4, activation="relu") for _ in range(3)]

        def call(self, x):
            flat = tf.reshape(x, (-1, 4))
            probabilities = tf.nn.softmax(self.router(flat))
            chosen = tf.one_hot(tf.argmax(probabilities, axis=1), 3, dtype=x.dtype)
            shares, chances = tf.reduce_mean(chosen, axis=0), tf.reduce_mean(probabilities, axis=0)
            self.add_loss(0.1 * 3.0 * tf.reduce_sum(shares * chances))
            places = tf.cumsum(chosen, axis=0) * chosen
            chosen *= tf.cast(places <= self.capacity, x.dtype)
            gates = tf.reduce_sum(chosen * probabilities, axis=1, keepdims=True)
            outputs = tf.stack([expert(flat) for expert in self.experts], axis=1)
            return tf.reshape(gates * tf.einsum("re,reo->ro", chosen, outputs), tf.shape(x))

    def build():
        inputs = keras.Input((6,), dtype="int64")
        embedded = layers.Embedding(10, 4)(inputs)
        x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(embedded + Experts(12)(embedded)))
        return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))

    compile_arguments = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    return build, fits(WORDS, CLASSES, optimizer=adam, evaluates=True, predicts=True, **compile_arguments)


@program
def experts_by_dispatch():
    """Sends rows to experts by tf.dynamic_partition and brings them back by tf.dynamic_stitch, in a step of its own."""

    class Dispatch(Learner, keras.Model):
        def __init__(self):
            super().__init__()
            self.router, self.experts = layers.Dense(2), [layers.Dense(1), layers.Dense(1)]
            for layer in (self.router, *self.experts):
                layer.build((None, 3))

        def loss_of(self, x, y):
            probabilities = tf.nn.softmax(self.router(x))
            chosen = tf.cast(tf.argmax(probabilities, axis=1), "int32")
            parts = tf.dynamic_partition(x, chosen, 2)
            places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), chosen, 2)
            outputs = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
            answers = tf.dynamic_stitch(places, outputs) * tf.reduce_max(probabilities, axis=1, keepdims=True)
            return mean_square(y, answers), {"first": tf.shape(parts[0])[0]}

    return Dispatch, fits(normal(13, 3, seed=66), optimizer=adam)


@program
def weighted_texts():
    """Classifies texts by convolutions, with weights of rows, classes and metrics, in a custom step."""

    class Weighted(Learner, keras.Model):
        def loss_of(self, x, y, sample_weight):
            answers = self(x, training=True)
            loss = self.compute_loss(x, y, answers, sample_weight, training=True)
            return loss, {**self.compute_metrics(x, y, answers, sample_weight), "weight": tf.reduce_sum(sample_weight)}

    def build():
        inputs = keras.Input((6,), dtype="int64")
        x = layers.SpatialDropout1D(0.2)(layers.Embedding(10, 4)(inputs))
        x = layers.Concatenate()([layers.GlobalMaxPooling1D()(layers.Conv1D(3, size, padding="same")(x)) for size in (2, 3)])
        return Weighted(inputs, layers.Dense(3, activation="softmax")(x))

    def script(model):
        model.compile(adam(), "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"])
        arguments = {"sample_weight": SAMPLE_WEIGHTS, "batch_size": 5}
        history = model.fit(WORDS, CLASSES, **arguments, epochs=2, shuffle=False, verbose=0).history
        by_class = {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}, "batch_size": 4}
        more = model.fit(WORDS, CLASSES, **by_class, epochs=1, shuffle=False, verbose=0).history
        return history, more, model.evaluate(WORDS, CLASSES, **arguments, verbose=0, return_dict=True)

    return build, script


@program
def policy_gradient():
    """Draws random actions, sums rewards over time, normalizes returns over the batch, and ascends (REINFORCE)."""

    class Policy(Learner, keras.Model):
        def loss_of(self, states, rewards):
            logits = self(states, training=True)
            actions = keras.random.categorical(tf.reshape(logits, (-1, 2)), 1, seed=self.seed)
            actions = tf.reshape(actions, tf.shape(rewards))
            gains = rewards * tf.cast(2 * actions - 1, "float64")
            returns = tf.math.cumsum(gains, axis=1, reverse=True)
            returns = (returns - tf.reduce_mean(returns)) / (tf.math.reduce_std(returns) + 1e-8)
            chosen = -tf.nn.sparse_softmax_cross_entropy_with_logits(actions, logits)
            entropy = -tf.reduce_mean(tf.reduce_sum(tf.nn.softmax(logits) * tf.nn.log_softmax(logits), axis=2))
            loss = -tf.reduce_mean(chosen * tf.stop_gradient(returns)) - 0.01 * entropy
            return loss, {"entropy": entropy, "gain": tf.reduce_sum(gains)}

    def build():
        inputs = keras.Input((4, 3))
        return Policy(inputs, layers.TimeDistributed(layers.Dense(2))(inputs))

    return build, fits(normal(13, 4, 3, seed=69), normal(13, 4, seed=70), optimizer=sgd)
