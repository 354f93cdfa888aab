"""Define the kinds of statements that call Keras's layers."""

import tensorflow as tf
from keras import layers

from fuzz.kinds import FLOAT, kind_with_state, of
from fuzz.programs import WIDTH

# By name: how it is made, and whether it takes (rows, steps, channels) instead of (rows, ..., channels).
LAYERS = {
    "dense": (lambda: layers.Dense(WIDTH, "tanh"), False),
    "layer normalization": (layers.LayerNormalization, False),
    "batch normalization": (lambda: layers.BatchNormalization(momentum=0.7), False),
    "parametric relu": (lambda: layers.PReLU(shared_axes=[1]), True),
    "group normalization": (lambda: layers.GroupNormalization(1), True),
    "convolution": (lambda: layers.Conv1D(WIDTH, 2, padding="causal"), True),
    "transposed convolution": (lambda: layers.Conv1DTranspose(WIDTH, 2, 2), True),
    "separable convolution": (lambda: layers.SeparableConv1D(WIDTH, 2, padding="same"), True),
    "pooling": (layers.GlobalMaxPooling1D, True),
    "lstm": (lambda: layers.LSTM(WIDTH), True),
    "gru": (lambda: layers.GRU(WIDTH, return_sequences=True, go_backwards=True), True),
    "unrolled": (lambda: layers.SimpleRNN(WIDTH, return_sequences=True, unroll=True), True),
    "bidirectional": (lambda: layers.Bidirectional(layers.SimpleRNN(2)), True),
    "each step": (lambda: layers.TimeDistributed(layers.Dense(2)), True),
    "attention": (lambda: SelfAttention(2, 2), True),
    "spectral normalization": (lambda: layers.SpectralNormalization(layers.Dense(2)), False),
    "dropout": (lambda: layers.SpatialDropout1D(0.3, seed=3), True),
}


class SelfAttention(layers.MultiHeadAttention):
    """Attends to its own input."""

    def build(self, shape):
        super().build(shape, shape)

    def call(self, x):
        return super().call(x, x, use_causal_mask=True)


@kind_with_state("layer", of(FLOAT, least=2, function=LAYERS))
def layer(statement, arguments, state, scope):
    """Calls a layer while it trains. Statements with inputs of the same sizes share it."""
    (x,) = arguments
    name = statement.parameters["function"]
    make, has_steps = LAYERS[name]
    if has_steps and x.shape.rank != 3:
        x = x[:, :, tf.newaxis] if x.shape.rank == 2 else tf.reshape(x, [tf.shape(x)[0], x.shape[1], -1])
        if x.shape[1] is None or x.shape[2] is None:
            raise ValueError("Layers need the number of steps and channels.")
    called = state.layer(f"{name} of {x.shape[1:]}", make, [None, *x.shape[1:]])
    return tf.convert_to_tensor(called(x, training=True))
