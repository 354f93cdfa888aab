"""Train programs from seeds in float32, and return digests of all that they leave."""

import contextlib
import hashlib
import json
import sys

import keras
import numpy as np
import tensorflow as tf
from forked_processes import output_of
from keras import layers
from ways_of_wrapping import wrapped

import keras_dp

ROWS, BATCH, EPOCHS = 90, 22, 2  # the last batch has two rows: fewer than some numbers of towers


def images():
    draw = np.random.default_rng(0)
    return draw.normal(size=(ROWS, 10, 10, 3)).astype("float32"), draw.integers(0, 4, ROWS)


def sentences():
    draw = np.random.default_rng(0)
    return draw.integers(0, 9, (ROWS, 7)), draw.integers(0, 4, ROWS)


def dropout():
    hidden = [layers.Dense(384, "relu"), layers.Dropout(0.4), layers.GaussianNoise(0.1), layers.Dense(384, "tanh")]
    return keras.Sequential([keras.Input((10, 10, 3)), layers.Flatten(), *hidden, layers.Dense(4, "softmax")])


def augmentation():
    drawn = [layers.RandomFlip(), layers.RandomRotation(0.1), layers.RandomZoom(0.2), layers.RandomContrast(0.3)]
    hidden = [layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((10, 10, 3)), *drawn, *hidden, layers.Dense(4, "softmax")])


def batch_normalization():
    blocks = [block for _ in range(3) for block in (layers.Conv2D(8, 3), layers.BatchNormalization(), layers.ReLU())]
    return keras.Sequential([keras.Input((10, 10, 3)), *blocks, layers.GlobalAveragePooling2D(), layers.Dense(4, "softmax")])


def attention():
    inputs = keras.Input((7,), dtype="int32")
    x = layers.Embedding(9, 64)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 32, dropout=0.1)(x, x))
    return keras.Model(inputs, layers.Dense(4, "softmax")(layers.GlobalAveragePooling1D()(x)))


def recurrent():
    inputs = keras.Input((7,), dtype="int32")
    x = layers.LSTM(16, dropout=0.2, recurrent_dropout=0.2)(layers.Embedding(9, 16, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.Dense(4, "softmax")(x))


class OwnStep(keras.Model):
    """Adds noise of its own, and a gradient penalty, so that each weight has several gradients."""

    def __init__(self, *args, **kwargs):  # the names by which Keras knows a class that it may load as a functional model
        super().__init__(*args, **kwargs)
        self.draws = keras.random.SeedGenerator(5)

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        x = x + keras.random.normal(tf.shape(x), stddev=0.1, seed=self.draws)
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = self.compute_loss(x, y, self(x, training=True))
            loss += tf.reduce_mean(inner.gradient(loss, x) ** 2)
            loss += 1e-3 * tf.add_n([tf.nn.l2_loss(weight) for weight in self.trainable_variables])
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def own_step():
    inputs = keras.Input((10, 10, 3))
    x = layers.Dropout(0.3)(layers.Dense(64, "tanh")(layers.Flatten()(inputs)))
    return OwnStep(inputs, layers.Dense(4, "softmax")(x))


PROGRAMS = {
    "dropout": (dropout, images),
    "augmentation": (augmentation, images),
    "batch normalization": (batch_normalization, images),
    "attention": (attention, sentences),
    "recurrent": (recurrent, sentences),
    "own step": (own_step, images),
}


def on(towers, model, **options):
    return wrapped(model, devices=towers, **options) if towers else model


def built(program, towers, seed=3, jit_compile=False, policy=None, **options):
    """Returns the inner model of a program, and the model to train: the same in plain Keras, if `towers` is None."""
    keras.config.set_floatx("float32")
    if policy:
        keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(seed)
    model = PROGRAMS[program][0]()
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", jit_compile=jit_compile)
    return model, on(towers, model, **options)


def trained(program, towers, shuffled_by="fit", **options):
    """Trains a program, whose rows `fit` or a dataset shuffles, and returns its digests."""
    model, parallel = built(program, towers, **options)
    x, y = PROGRAMS[program][1]()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).batch(BATCH)
    data = {"x": dataset} if shuffled_by == "dataset" else {"x": x, "y": y, "batch_size": BATCH}
    history = parallel.fit(**data, epochs=EPOCHS, verbose=0).history
    return digests(model, history, parallel.evaluate(x, y, batch_size=BATCH, verbose=0))


def trained_from_a_file(program, towers, path, ends):
    """Trains for an epoch and saves the model, if `ends` is false; else loads it and trains on. Returns its digests."""
    model, parallel = built(program, towers)
    if ends:
        model = keras.saving.load_model(path, custom_objects={"OwnStep": OwnStep})
        parallel = wrapped(model, towers)
    x, y = PROGRAMS[program][1]()
    history = parallel.fit(x, y, batch_size=BATCH, shuffle=False, epochs=1, verbose=0).history
    if not ends:
        parallel.save(path)
    return digests(model, history)


def trained_with_backups(program, towers, folder, stops):
    """Trains for three epochs, or goes on to their end from the backup in a folder, and returns its digests."""
    model, parallel = built(program, towers)
    x, y = PROGRAMS[program][1]()

    def stop(batch, logs):
        """Ends a run in the middle of its second epoch, without a word to other callbacks."""
        if stops and int(model.optimizer.iterations) == 7:
            raise InterruptedError

    callbacks = [keras.callbacks.BackupAndRestore(folder), keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    with contextlib.suppress(InterruptedError):
        parallel.fit(x, y, batch_size=BATCH, shuffle=False, epochs=3, callbacks=callbacks, verbose=0)
    return digests(model, {})


def called_after_op_determinism(steps_per_execution):
    """Returns the numbers of results of all methods, for a model that was made before the call of TensorFlow."""
    parallel = keras_dp.DataParallelModel(dropout(), devices=2)
    parallel.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=steps_per_execution)
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(3)
    x, y = images()
    results = [parallel.train_on_batch(x[:8], y[:8]), parallel.evaluate(x, y, batch_size=8, verbose=0)]
    results += [parallel.predict(x, batch_size=8, verbose=0), parallel.fit(x, y, batch_size=8, epochs=3, verbose=0).epoch]
    return list(map(len, results))


def digests(model, *results):
    """Returns digests of the weights, of the optimizer's state and of the results."""
    state = [variable.numpy() for variable in model.optimizer.variables]
    return {"weights": digest(model.get_weights()), "optimizer": digest(state), "results": digest(tf.nest.flatten(results))}


def digest(arrays):
    return hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in arrays)).hexdigest()


def in_a_new_process(train, *arguments, server=0, **named):
    """Returns what a function of this module returns in a process of its own, with four logical CPUs."""
    return json.loads(output_of(__file__, train.__name__, json.dumps([arguments, named]), server=server).splitlines()[-1])


if __name__ == "__main__":
    keras_dp.use_logical_cpus(4)
    given, options = json.loads(sys.argv[2])
    if options.pop("op_determinism", False):
        tf.config.experimental.enable_op_determinism()
    print(json.dumps(globals()[sys.argv[1]](*given, **options)))
