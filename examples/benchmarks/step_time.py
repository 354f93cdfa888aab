"""Times a training step of plain Keras on one device, of tf.distribute.MirroredStrategy and of keras_dp.

The engines take turns, each run in a process of its own, so that whatever else the machine does meets all of them. Without
GPUs, the CPU is split into one logical device per tower; plain Keras has all cores on one device.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import keras_dp

ENGINES = ("single", "mirrored", "keras_dp")
BATCH_SIZES = {"mlp": 256, "resnet20": 64}
WARM_UP_STEPS = 10
SEED = 0


def mlp(synchronized):
    """784-512-512-10 for MNIST; it has no BatchNormalization to synchronize."""
    return keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def resnet20(synchronized):
    """ResNet-20 for CIFAR, with parameter-free shortcuts (He et al. 2016, section 4.2, option A)."""

    def convolution(x, filters, strides=1):
        x = keras.layers.Conv2D(filters, 3, strides, padding="same", use_bias=False, kernel_initializer="he_normal")(x)
        return keras.layers.BatchNormalization(synchronized=synchronized)(x)

    inputs = keras.Input((32, 32, 3))
    x = keras.layers.ReLU()(convolution(inputs, 16))
    for filters, first_strides in ((16, 1), (32, 2), (64, 2)):
        for strides in (first_strides, 1, 1):
            shortcut = x
            if strides == 2:
                shortcut = keras.ops.pad(x[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (filters // 4, filters // 4)))
            x = keras.layers.ReLU()(convolution(x, filters, strides))
            x = keras.layers.ReLU()(keras.layers.Add()([convolution(x, filters), shortcut]))
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


class StepTimes(keras.callbacks.Callback):
    """Collects the milliseconds that each training step takes."""

    def __init__(self):
        super().__init__()
        self.milliseconds = []

    def on_train_batch_begin(self, batch, logs=None):
        """Starts the clock."""
        self.start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """Stops the clock; Keras has waited for the step's loss by now."""
        self.milliseconds.append(1000 * (time.perf_counter() - self.start))


def synthetic_batches(input_shape, batch_size):
    """Endless batches of noise, the same for every engine."""
    generator = np.random.default_rng(SEED)
    images = generator.standard_normal((16 * batch_size, *input_shape), dtype="float32")
    labels = generator.integers(10, size=len(images))
    options = tf.data.Options()
    # Autotuning stalls a pipeline now and then, for far longer than a step takes.
    options.autotune.enabled = False
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat()
    return dataset.batch(batch_size, drop_remainder=True).prefetch(2).with_options(options)


def measure(engine, model_name, towers, steps, batch_norm="sync"):
    """Trains a model with one engine, in this process.

    Args:
        engine: one of ENGINES.
        model_name: one of BATCH_SIZES.
        towers: devices for all engines but plain Keras.
        steps: how many to time.
        batch_norm: "sync" over the devices, or "local" to each.

    Returns:
        The milliseconds of each step after the warm-up, and the mean loss of all steps.
    """
    device_count = 1 if engine == "single" else towers
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    if kind == "CPU":
        keras_dp.use_logical_cpus(device_count)
    devices = [f"{kind}:{index}" for index in range(device_count)]
    keras.utils.set_random_seed(SEED)
    mirrored = engine == "mirrored"
    with tf.distribute.MirroredStrategy(devices).scope() if mirrored else contextlib.nullcontext():
        model = {"mlp": mlp, "resnet20": resnet20}[model_name](synchronized=mirrored and batch_norm == "sync")
        dataset = synthetic_batches(model.input_shape[1:], BATCH_SIZES[model_name])
        if engine == "keras_dp":
            model = keras_dp.DataParallelModel(model, devices=devices, batch_norm=batch_norm)
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            jit_compile=False,
        )
    step_times = StepTimes()
    history = model.fit(dataset, steps_per_epoch=WARM_UP_STEPS + steps, shuffle=False, callbacks=[step_times], verbose=0)
    return {"milliseconds": step_times.milliseconds[WARM_UP_STEPS:], "loss": history.history["loss"][0]}


def measure_in_new_process(engine, model_name, towers, steps, batch_norm="sync"):
    """The same as `measure`, in a process of its own."""
    command = [sys.executable, __file__, "--engine", engine, "--models", model_name]
    command += ["--towers", str(towers), "--steps", str(steps), "--batch-norm", batch_norm]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{process.stderr}\n{engine} failed to train {model_name}.")
    return json.loads(process.stdout.splitlines()[-1])


def print_table(model_name, rounds):
    """Prints the step times of one model.

    Args:
        model_name: the model.
        rounds: for each repetition, what `measure` returned for each engine.
    """
    print(f"\n{model_name}, batch size {BATCH_SIZES[model_name]}")
    print(f"{'engine':<22}{'ms per step':>12}{'10 % to 90 % of steps':>25}{'mean loss':>12}")
    for engine in ENGINES:
        milliseconds = [value for results in rounds for value in results[engine]["milliseconds"]]
        low, *_, high = statistics.quantiles(milliseconds, n=10)
        spread = f"{low:.2f} to {high:.2f}"
        loss = rounds[-1][engine]["loss"]
        print(f"{engine:<22}{statistics.median(milliseconds):>12.2f}{spread:>25}{loss:>12.5f}")
    for other in ("mirrored", "single"):
        # Within a round the engines ran one after the other, under much the same load.
        ratios = [
            statistics.median(results["keras_dp"]["milliseconds"]) / statistics.median(results[other]["milliseconds"])
            for results in rounds
        ]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f} by round"
        print(f"{f'keras_dp / {other}':<22}{statistics.median(ratios):>12.2f}{spread:>25}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towers", type=int, default=2, help="devices for MirroredStrategy and keras_dp")
    parser.add_argument("--steps", type=int, default=100, help="timed steps in each run, after the warm-up")
    parser.add_argument("--repetitions", type=int, default=5, help="rounds, in each of which every engine runs once")
    parser.add_argument("--models", nargs="+", choices=BATCH_SIZES, default=list(BATCH_SIZES))
    parser.add_argument("--batch-norm", choices=("sync", "local"), default="sync")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(json.dumps(measure(args.engine, args.models[0], args.towers, args.steps, args.batch_norm)))
        return
    print(f"towers: {args.towers}, repetitions: {args.repetitions}, steps: {args.steps} after {WARM_UP_STEPS} of warm-up")
    for model_name in args.models:
        rounds = [
            {engine: measure_in_new_process(engine, model_name, args.towers, args.steps, args.batch_norm) for engine in ENGINES}
            for _ in range(args.repetitions)
        ]
        print_table(model_name, rounds)


if __name__ == "__main__":
    main()
