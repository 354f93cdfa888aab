"""Run `keras-dp bench` with models of the sizes that GPUs are for."""

import json
import subprocess
import sys
from pathlib import Path

import tensorflow as tf

COMMAND = [sys.executable, "-c", "import sys; from keras_dp.cli import main; sys.exit(main())"]
ENGINES = {"keras_dp": "keras_dp", "ceiling": "towers alone", "single": "one device", "mirrored": "MirroredStrategy"}


# By name: the model for `keras-dp bench`, and the rows for each tower.
BENCHES = {
    "ResNet-50": ("resnet50", 64),
    "transformer, 96 million weights": ("gpu.models:large_transformer", 16),
    "MLP": ("mlp", 256),
}
# The columns of the report, and those of bench.json.
COLUMNS = {
    "batch": "batch_size",
    "ms_a_step": "median_milliseconds",
    "keras_dp_over_it": "keras_dp_ratio",
    "first_step_s": "first_step_seconds",
    "host_memory_MB": "peak_memory_megabytes",
    "MB_sent": "communication_megabytes",
    "mean_loss": "loss",
}


def run(record):
    """Times steps on all cards, with the same rows for each. Pieces of one card would compute in turns."""
    cards = len(tf.config.list_physical_devices("GPU"))
    towers = cards or 2
    record.devices(f"{cards} GPU{'s' if cards > 1 else ''}" if cards else f"{towers} logical CPUs", gpus=bool(cards))
    ratios, failures = [], []
    for name in ["MLP"] if record.quick else BENCHES:
        model, rows = BENCHES[name]
        directory = Path(record.directory, f"bench_{model.rpartition(':')[2]}")
        _run(model, rows, towers, directory, record.quick)
        results = json.loads((directory / "bench.json").read_text(encoding="utf-8"))
        for row in results["rows"]:
            engine, towers_of_it = ENGINES[row["engine"]], 1 if row["engine"] == "single" else row["towers"]
            columns = {column: row[source] for column, source in COLUMNS.items()}
            record.row("Steps", model=name, engine=engine, devices=towers_of_it, **columns)
            if row["engine"] == "mirrored":
                ratios.append(f"{name} {row['keras_dp_ratio']:.2f}")
        failures += [f"{failure['engine']} of {name} failed: {failure['message']}" for failure in results["failures"]]
        record.finding(f"keras_dp's time over MirroredStrategy's: {', '.join(ratios)}")
    record.remark("The memory is the host's; the part memory measures that of devices. One device trains the whole batch.")
    if failures:
        raise RuntimeError("\n".join(failures))


def _run(model, rows, towers, directory, quick):
    """Runs a benchmark; its progress is in the log of this part, and its results are written after each round."""
    rounds, steps, warm_up = (1, 5, 3) if quick else (2, 20, 5)
    arguments = ["--model", model, "--towers", str(towers), "--batch", str(rows), "--scaling", "weak"]
    arguments += ["--rounds", str(rounds), "--steps", str(steps), "--warm-up", str(warm_up), "--out", str(directory)]
    code = subprocess.run([*COMMAND, "bench", *arguments]).returncode
    if not (directory / "bench.json").exists():
        raise RuntimeError(f"keras-dp bench ended with exit code {code} and without results")
