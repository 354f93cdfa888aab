"""Audit and simulate training steps on GPUs, on a machine that has none, and check the simulator.

The audit and the simulation use the graph that TensorFlow makes for logical CPUs, which stand for a host and its GPUs. Each
model and number of GPUs has a process of its own. Results are kept in --out, so that an interrupted run goes on. The check of
the simulator runs steps on logical CPUs, and compares their times with simulated ones. See docs/gpu_audit.md.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import keras
import tensorflow as tf
from write_tables import write_table

import keras_dp
from keras_dp.cli import models, runs, synthetic
from keras_dp.cli.plan import mirrored, planning
from keras_dp.cli.plan.prediction import MirroredPlan, PlannedRun, Range, TowersPlan
from keras_dp.gpu_model.audit import audit
from keras_dp.gpu_model.hardware import Link, Machine, Processor, best_and_worst, machine_of
from keras_dp.gpu_model.placement import place_step
from keras_dp.gpu_model.simulation import simulate
from keras_dp.reports.step_graph import graph_of_step

DIRECTORY = Path(__file__).parent
# Of the processes. oneDNN has other kernels than those whose speed is measured here.
ENVIRONMENT = {"TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
PAGE = DIRECTORY.parents[1] / "docs" / "gpu_audit.md"
# The rows of a global batch, for which the steps are simulated.
BATCH_SIZES = {
    "mlp": 4_096,
    "resnet20": 1_024,
    "resnet50": 128,
    "unet": 256,
    "transformer": 512,
    "lstm": 512,
    "gpu_audit:embeddings": 8_192,
    "gpu_audit:mixed_precision": 1_024,
    "gpu_audit:gan": 1_024,
}
TOWERS = (2, 4, 8)
HOMES = (None, "sharded")
# Their batch normalizations take the moments of each GPU's rows, as MirroredStrategy's do, if that is asked for.
NORMALIZED = ("resnet20", "resnet50", "unet", "gpu_audit:mixed_precision", "gpu_audit:gan")
# The simulated step of MirroredStrategy takes as long on eight GPUs as on one, which cannot be.
NOT_COMPARED = ("lstm",)
# ResNet-50 with as many rows on each GPU, as it is published most often.
WEAK, WEAK_ROWS = "gpu_audit:half_precision_resnet50", 128
TIMES = {"": lambda plan: plan.milliseconds, "yes": lambda plan: plan.compiled_milliseconds}
MACHINES = {
    "A100, NVLink 3": ("A100", "nvlink"),
    "H100, NVLink 4": ("H100", "nvlink"),
    "RTX 4090, PCIe 4": ("RTX4090", "pcie"),
}
CHECKED = ("mlp", "resnet20", "unet", "transformer")
CHECKED_TOWERS = (1, 2, 4)


def embeddings():
    """Embeddings of a million rows, and a classifier of bags of 32 of them."""
    tokens = keras.Input((32,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(1_000_000, 32)(tokens))
    model = keras.Model(tokens, keras.layers.Dense(10)(keras.layers.Dense(128, activation="relu")(x)))
    model.compile("adam", **models.classification())
    return model


def mixed_precision():
    """ResNet-20 that computes in float16, with loss scaling."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = models.resnet20()
    model.compile(keras.optimizers.LossScaleOptimizer(models.optimizer()), **models.classification())
    return model


def half_precision_resnet50():
    """ResNet-50 that computes in float16, with loss scaling."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    model = models.resnet50()
    model.compile(keras.optimizers.LossScaleOptimizer(models.optimizer()), **models.classification())
    return model


class Gan(keras.Sequential):
    """A discriminator of images, whose step trains a generator against it, each with its own optimizer."""

    def __init__(self, layers, generator, name=None, trainable=True):
        super().__init__(layers, name=name, trainable=trainable)
        self.generator = generator
        self.generator_optimizer = keras.optimizers.Adam(2e-4, beta_1=0.5)
        self.seed = keras.random.SeedGenerator(1)

    def train_step(self, data):
        """Updates both by the losses of the non-saturating GAN (Goodfellow et al. 2014, section 3)."""
        images, _ = data
        noise = keras.random.normal((keras.ops.shape(images)[0], 64), seed=self.seed)
        with tf.GradientTape(persistent=True) as tape:
            fakes = self.generator(noise, training=True)
            of_images, of_fakes = self(images, training=True), self(fakes, training=True)
            own = keras.ops.mean(keras.ops.softplus(-of_images)) + keras.ops.mean(keras.ops.softplus(of_fakes))
            generators = keras.ops.mean(keras.ops.softplus(-of_fakes))
        for loss, optimizer, weights in (
            (own, self.optimizer, [weight for layer in self.layers for weight in layer.trainable_weights]),
            (generators, self.generator_optimizer, self.generator.trainable_weights),
        ):
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"discriminator": own, "generator": generators}


def gan():
    """A small GAN of 28 x 28 pixels with a step of its own and two optimizers."""
    layers = keras.layers
    generator = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(7 * 7 * 64, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
            layers.Reshape((7, 7, 64)),
            layers.Conv2DTranspose(32, 4, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
            layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
        ]
    )
    model = Gan(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(64, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            layers.Dense(1),
        ],
        generator,
    )
    model.compile(keras.optimizers.Adam(2e-4, beta_1=0.5), "mse")
    model.generator_optimizer.build(generator.trainable_weights)
    return model


def answer_one(question):
    """Plans one step for each machine; in a process of its own."""
    planned = PlannedRun(**question)
    parallel, step = planning.collect(planned)
    rows = planning.batch_rows(planned)
    placed = place_step(step, rows, parallel.devices)
    audited = audit(parallel, step, placed)
    plans = {
        name: dataclasses.asdict(planning.predicted(best_and_worst(machine_of(*hardware)), rows, placed, audited))
        for name, hardware in MACHINES.items()
    }
    print(json.dumps(plans))


def answer_mirrored(question):
    """Plans one step under MirroredStrategy for each machine; in a process of its own."""
    placed = mirrored.collect(PlannedRun(**question))
    plans = {
        name: dataclasses.asdict(mirrored.predicted(best_and_worst(machine_of(*hardware)), placed))
        for name, hardware in MACHINES.items()
    }
    print(json.dumps(plans))


def answers_of(option, planned, path, runs_missing):
    """Returns the answer for each machine, from a file of results or a process of its own; None if there is none."""
    if not path.exists():
        if not runs_missing:
            return None
        begin = time.monotonic()
        try:
            path.write_text(_answer(option, dataclasses.asdict(planned)))
        except runs.RunFailedError as error:
            print(f"{path.name} failed:\n{error}", file=sys.stderr, flush=True)
            return None
        print(f"{path.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return json.loads(path.read_text())


def all_plans(names, counts, batch_norm, directory, runs_missing):
    """Plans the steps of models: with variables on one GPU, and sharded."""
    plans = {}
    kind = "" if batch_norm == "sync" else f"_{batch_norm}"
    for name in names:
        for count in counts:
            for home in HOMES if count > 1 else HOMES[:1]:
                planned = PlannedRun(name, count, BATCH_SIZES[name], parameter_device=home, batch_norm=batch_norm)
                path = directory / f"{name.split(':')[-1]}_{count}_{home}{kind}.json"
                answers = answers_of("--one", planned, path, runs_missing)
                if answers is not None:
                    plans[name, count, home] = {machine: TowersPlan.of(plan) for machine, plan in answers.items()}
    return plans


def all_mirrored(names, towers, directory, runs_missing):
    """Plans the steps of all models under MirroredStrategy. On one GPU, such a step is that of plain Keras."""
    plans = {}
    for name in names:
        for count in (1, *towers):
            path = directory / f"{name.split(':')[-1]}_{count}_mirrored.json"
            answers = answers_of("--mirrored-one", PlannedRun(name, count, BATCH_SIZES[name]), path, runs_missing)
            if answers is not None:
                plans[name, count] = {machine: MirroredPlan.of(plan) for machine, plan in answers.items()}
    return plans


def all_weak(towers, directory, runs_missing):
    """Plans steps of ResNet-50 in half precision with as many rows on each GPU, by batch normalization and number of GPUs."""
    plans = {}
    for batch_norm in ("sync", "local"):
        # On one GPU, both moments are those of plain Keras.
        for count in (1, *towers) if batch_norm == "sync" else towers:
            planned = PlannedRun(WEAK, count, WEAK_ROWS, True, "sharded" if count > 1 else None, batch_norm=batch_norm)
            path = directory / f"weak_{count}_{batch_norm}.json"
            answers = answers_of("--one", planned, path, runs_missing)
            if answers is not None:
                plans[batch_norm, count] = {machine: TowersPlan.of(plan) for machine, plan in answers.items()}
    return plans


def audit_table(plans):
    """The audit, in Markdown."""
    headings = ["model", "GPUs", "variables", "copies of one GPU", "other copies", "control edges", "GPU to host, host to GPU"]
    headings += ["on the host", "no GPU kernel", "wrong device"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for (name, count, home), by_machine in plans.items():
        plan = next(iter(by_machine.values()))
        others = sum(plan.copies[kind] for kind in ("inputs", "outputs", "other"))
        kernels = ", ".join(f"{number} {kind}" for kind, number in plan.without_kernel.items()) or "none"
        cells = [
            name.split(":")[-1],
            count,
            home or "GPU:0",
            f"{plan.most_sent} / {plan.most_received}",
            others,
            plan.controls,
            f"{plan.to_host}, {plan.from_host}",
            plan.host_copies,
            kernels,
            plan.misplaced or "none",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def scaling_table(plans, names, towers):
    """The predicted times of one GPU and speed-ups of several, without XLA and with it, in Markdown."""
    headings = [
        "model, rows",
        "machine",
        "XLA",
        "1 GPU, ms",
        "variables",
        *(f"{count} GPUs" for count in towers),
        "busy, %",
        "MB",
    ]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for name in names:
        for machine in MACHINES:
            first = plans[name, 1, None][machine]
            for xla, times_of in TIMES.items():
                for home in HOMES:
                    several = [plans[name, count, home][machine] for count in towers if (name, count, home) in plans]
                    if several:
                        ups = [str(ratio(times_of(first), times_of(found))) for found in several]
                        ups += ["-"] * (len(towers) - len(ups))
                        busy = "-" if xla else " to ".join(f"{100 * share:.0f}" for share in several[-1].busy)
                        memory = "-" if xla else f"{first.peak_megabytes:,.0f}, {several[-1].peak_megabytes:,.0f}"
                        rows = f"{name.split(':')[-1]}, {BATCH_SIZES[name]:,}"
                        cells = [rows, machine, xla or "no", times_of(first), home or "GPU:0", *ups, busy, memory]
                        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def mirrored_table(plans, of_local, peers, names):
    """The predicted times of a step in milliseconds, beside those under MirroredStrategy, in Markdown."""
    headings = ["model, rows", "machine", "GPUs", "keras_dp, GPU:0", "sharded", "with XLA: GPU:0", "sharded"]
    headings += ["MirroredStrategy", "its collectives", "keras_dp / MirroredStrategy", "with XLA", "local moments", "with XLA"]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for (name, count), by_machine in peers.items():
        for machine, peer in by_machine.items() if name in names else ():
            synchronized, local = (
                [found[name, count, home][machine] for home in HOMES if (name, count, home) in found]
                for found in (plans, of_local)
            )
            cells = [f"{name.split(':')[-1]}, {BATCH_SIZES[name]:,}", machine, count]
            for times_of in TIMES.values():
                cells += [*map(times_of, synchronized), *["-"] * (len(HOMES) - len(synchronized))]
            ratios = [
                ratio(min(map(times_of, found), key=sum), peer.milliseconds) if found else "-"
                for found in (synchronized, local)
                for times_of in TIMES.values()
            ]
            cells += [peer.milliseconds, f"{peer.collectives}: {peer.collective_milliseconds:.2f}", *ratios]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def weak_table(plans, towers):
    """How many times the rows in a second of plain Keras on one GPU several compute, with as many rows on each, in Markdown."""
    headings = ["machine", "batch normalization", "XLA", "1 GPU, ms", *(f"{count} GPUs" for count in towers)]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for machine in MACHINES:
        for batch_norm in dict.fromkeys(batch_norm for batch_norm, _ in plans):
            for xla, times_of in TIMES.items():
                first = times_of(plans["sync", 1][machine])
                several = [plans[batch_norm, count][machine] if (batch_norm, count) in plans else None for count in towers]
                pairs = zip(towers, several, strict=True)
                ups = [str(ratio(first, times_of(found), count)) if found else "-" for count, found in pairs]
                lines.append(f"| {machine} | {batch_norm} | {xla or 'no'} | {first} | {' | '.join(ups)} |")
    return "\n".join(lines)


def ratio(one, other, factor=1):
    """How many times longer one takes than the other, both at best and both at worst."""
    return Range(*(factor * first / second for first, second in zip(one, other, strict=True)))


def seconds_of(function, repetitions=20):
    """The median time of a call, after two calls to warm up."""
    times = []
    for _ in range(repetitions + 2):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def seconds_of_operation(size, count):
    """The time of one operation on vectors of a size, in a function of several that wait for each other."""
    x, y = tf.random.uniform((2, size), 0.5, 1.0)

    @tf.function
    def chain(x, y):
        for _ in range(count // 2):
            x = x * y + y
        return x

    return seconds_of(lambda: chain(x, y).numpy()) / count


def measured_processor():
    """This machine's processor, with rates that are measured on it."""
    matrix = tf.random.normal((1024, 1024))
    product = tf.function(lambda: tf.matmul(matrix, matrix))
    launch = seconds_of_operation(1, 1_000)
    return Processor(
        "this processor",
        matrix_flops=2 * 1024**3 / seconds_of(lambda: product().numpy()),
        half_flops=1e9,
        # Vectors of 128 KB are in the cache. Those of 64 MB are not: two are read, and one is written.
        vector_flops=2**15 / max(1e-9, seconds_of_operation(2**15, 400) - launch),
        bandwidth=3 * 4 * 2**24 / seconds_of_operation(2**24, 8),
        memory_bytes=1e9,
        launch_seconds=launch,
        matrix_efficiency=1.0,
        bandwidth_efficiency=1.0,
        launches_ahead=False,
        source="measured",
    )


def answer_check(question):
    """Simulates one step on logical CPUs; in a process of its own."""
    name, towers, constants = question
    keras_dp.use_logical_cpus(towers)
    workload = models.workload(name)
    model = workload.build()
    parallel = keras_dp.DataParallelModel(model, devices=towers)
    parallel.compile(models.optimizer(), **workload.objective())
    step = graph_of_step(parallel, next(iter(synthetic.dataset(model, 2 * towers))))
    placed = place_step(step, workload.batch_size, parallel.devices, on_gpus=False)
    processor = Processor(**constants)
    memory = Link("memory", processor.launch_seconds, processor.bandwidth)
    machine = Machine((processor,), memory, memory, processor.launch_seconds, processor.launch_seconds, is_shared=True)
    print(json.dumps(1e3 * simulate(placed, machine).seconds))


def check_table():
    """Simulated and measured times of steps on logical CPUs, in Markdown."""
    processor = json.loads(_answer("--measure", None))
    constants = Processor(**processor)
    lines = [
        f"Measured constants: {constants.matrix_flops / 1e9:.0f} GFLOP/s in products of matrices, "
        f"{constants.vector_flops / 1e9:.1f} GFLOP/s elsewhere, {constants.bandwidth / 1e9:.1f} GB/s, "
        f"{1e6 * constants.launch_seconds:.1f} µs an operation.",
        "",
        "| model | towers | simulated, ms | measured, ms | simulated / measured | towers / one tower: simulated, measured |",
        "|---|---|---|---|---|---|",
    ]
    for name in CHECKED:
        first = None
        for towers in CHECKED_TOWERS:
            simulated = json.loads(_answer("--check-one", [name, towers, processor]))
            run = runs.Run("keras_dp", towers, models.workload(name).batch_size, name, steps=20, warm_up=5)
            answer = runs.answer_of("bench.measurement", dataclasses.asdict(run), **ENVIRONMENT)
            measured = statistics.median(answer["step_milliseconds"])
            first = first or (simulated, measured)
            lines.append(
                f"| {name} | {towers} | {simulated:.1f} | {measured:.1f} | {simulated / measured:.2f} "
                f"| {simulated / first[0]:.2f}, {measured / first[1]:.2f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def _answer(option, question):
    """Returns the last line that this program prints in a process of its own."""
    command = [sys.executable, __file__, option, json.dumps(question)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=DIRECTORY, env=os.environ | ENVIRONMENT)
    if process.returncode:
        raise runs.RunFailedError(process.stderr[-2_000:])
    return process.stdout.splitlines()[-1]


def show(name, table, writes):
    """Prints a table, and writes it between its markers in docs/gpu_audit.md if that is wanted."""
    print(f"{table}\n", flush=True)
    if writes:
        write_table(PAGE, name, table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    short_names = [name.split(":")[-1] for name in BATCH_SIZES]
    parser.add_argument("--models", nargs="*", choices=short_names, default=short_names)
    parser.add_argument("--towers", nargs="+", type=int, default=list(TOWERS))
    parser.add_argument("--check", action="store_true", help="check the simulator on this machine, too")
    parser.add_argument("--weak", action="store_true", help="plan ResNet-50 with as many rows on each GPU, too")
    parser.add_argument("--out", type=Path, default=Path("results/gpu_audit"), help="where results are kept")
    parser.add_argument("--kept", action="store_true", help="show what --out holds of the models, and plan nothing")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/gpu_audit.md")
    for option in ("--one", "--mirrored-one", "--measure", "--check-one"):
        parser.add_argument(option, type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        answer_one(arguments.one)
    elif arguments.mirrored_one is not None:
        answer_mirrored(arguments.mirrored_one)
    elif "--measure" in sys.argv:
        print(json.dumps(dataclasses.asdict(measured_processor())))
    elif arguments.check_one is not None:
        answer_check(arguments.check_one)
    else:
        arguments.out.mkdir(parents=True, exist_ok=True)
        names = [name for name in BATCH_SIZES if name.split(":")[-1] in arguments.models]
        if names:
            kept = (arguments.out, not arguments.kept)
            plans = all_plans(names, (1, *arguments.towers), "sync", *kept)
            show("audit", audit_table(plans), arguments.write)
            planned = [name for name in names if (name, 1, None) in plans]
            compared = [name for name in planned if name not in NOT_COMPARED]
            peers = all_mirrored(compared, arguments.towers, *kept)
            show("scaling", scaling_table(plans, planned, arguments.towers), arguments.write)
            normalized = [name for name in planned if name in NORMALIZED]
            of_local = all_plans(normalized, arguments.towers, "local", *kept)
            show("mirrored", mirrored_table(plans, of_local, peers, compared), arguments.write)
        if arguments.weak:
            weak = all_weak(arguments.towers, arguments.out, not arguments.kept)
            show("weak", weak_table(weak, arguments.towers), arguments.write)
        if arguments.check:
            show("check", check_table(), arguments.write)


if __name__ == "__main__":
    main()
