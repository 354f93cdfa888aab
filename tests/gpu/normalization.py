"""Compare batch normalization and random numbers on towers with plain Keras on one device."""

import keras
import numpy as np
from keras import layers

from gpu import comparing, models
from gpu.devices import prepare, use_exact_arithmetic

TABLE = "Batch normalization"
# The random layers, with the rate or the deviation.
RANDOM_LAYERS = {
    layers.Dropout: (0.4,),
    layers.GaussianNoise: (0.3,),
    layers.SpatialDropout2D: (0.4,),
    layers.GaussianDropout: (0.3,),
    layers.AlphaDropout: (0.3,),
    layers.RandomFlip: (),
}


class PredictsAsInTraining(keras.Sequential):
    """Predicts with the random numbers and the moments that training would use."""

    def predict_step(self, data):
        return self(keras.utils.unpack_x_y_sample_weight(data)[0], training=True)


def run(record):
    """Compares normalized rows, moments, moving statistics and random numbers."""
    devices = prepare(record, 4)
    use_exact_arithmetic()
    for count in (2,) if record.quick else (2, 4):
        _compare_moments(record, devices[:count])
        _compare_modes(record, devices[:count])
        for layer in list(RANDOM_LAYERS)[: 2 if record.quick else None]:
            _compare_random_numbers(record, layer, devices[:count])
    record.finding(f"{record.within_limits()} as they should be")


def _compare_moments(record, devices):
    """Compares the normalized rows, and the moments of the last batch, which momentum 0 leaves in the moving statistics."""
    x, y = models.images(models.ROWS)
    rows, moments = [], []
    for towers in (None, devices):
        models.fresh()
        norm = layers.BatchNormalization(momentum=0.0)
        inner = PredictsAsInTraining([keras.Input(x.shape[1:]), layers.Conv2D(6, 3), norm])
        model = models.on(towers, inner)
        model.compile(jit_compile=False)
        rows.append(model.predict(x, batch_size=models.BATCH_SIZE, verbose=0))
        inner = keras.Sequential([*inner.layers, layers.GlobalAveragePooling2D(), layers.Dense(models.CLASSES)])
        model = models.compiled(models.on(towers, inner), keras.optimizers.SGD(0.1))
        model.fit(x, y, batch_size=models.BATCH_SIZE, shuffle=False, verbose=0)
        moments.append([np.array(norm.moving_mean), np.array(norm.moving_variance)])
    for what, pair in (("normalized rows", rows), ("moments of the last batch, one row", moments)):
        record.compare(TABLE, comparing.difference(*pair), what=what, towers=len(devices))


def _compare_modes(record, devices):
    """Compares weights and moving statistics; the moments of each tower's own slice must give other weights."""
    plain, state = _trained(None)
    columns = {"what": "weights and optimizer", "towers": len(devices)}
    wrapped, received = _trained(devices, batch_norm="sync")
    for name in ("moving_mean", "moving_variance"):
        difference = comparing.difference(np.array(getattr(plain, name)), np.array(getattr(wrapped, name)))
        record.compare(TABLE, difference, what=name, towers=len(devices))
    record.compare(TABLE, comparing.difference(state, received), **columns)
    difference = comparing.difference(state, _trained(devices, batch_norm="local")[1])
    record.check('Control: batch_norm="local" must differ', difference > 1e-5, **columns, difference=difference)


def _trained(devices, **arguments):
    """Returns the layer of batch normalization of a trained model, and the state."""
    model = models.trained("convolutions", devices, lambda: keras.optimizers.SGD(0.1, momentum=0.9), **arguments)
    return next(layer for layer in model.layers if isinstance(layer, layers.BatchNormalization)), comparing.state(model)


def _compare_random_numbers(record, layer, devices):
    """Compares the outputs of a random layer for two batches, so that the state of the numbers is compared too."""
    x, _ = models.images(2 * models.BATCH_SIZE)
    drawn = []
    for towers in (None, devices):
        models.fresh()
        model = models.on(towers, PredictsAsInTraining([keras.Input(x.shape[1:]), layer(*RANDOM_LAYERS[layer])]))
        model.compile(jit_compile=False)
        drawn.append(model.predict(x, batch_size=models.BATCH_SIZE, verbose=0))
    if np.array_equal(drawn[0], x):
        raise RuntimeError(f"{layer.__name__} has changed nothing: its random numbers are not compared")
    record.compare("Random numbers", comparing.difference(*drawn), layer=layer.__name__, towers=len(devices))
