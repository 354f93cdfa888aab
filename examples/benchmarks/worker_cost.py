"""What several workers cost beside several towers of one: step time, and bytes on the network.

    python examples/benchmarks/worker_cost.py --models mlp resnet20 --rounds 5

Compares W workers with one tower each against one worker with W towers, on this machine, where the workers talk over loopback;
the two take turns. The bytes are those that the loopback device counts in Linux while steps run, of all workers, over W and the
steps: beside them, 2 P (W - 1) / W, what each worker sends at least in an all-reduce of P bytes (Patarasuk and Yuan 2009,
"Bandwidth optimal all-reduce algorithms", section 3). So let nothing else talk over loopback meanwhile.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

LOOPBACK = Path("/proc/net/dev")


def measure(model, workers, towers, steps, warm_up):
    """Milliseconds of each step on the first worker, bytes that a worker sends in one, and the model's bytes."""
    launcher = [sys.executable, "-c", "import sys; from keras_dp.cli import main; sys.exit(main())", "launch"]
    counts = ["--workers", str(workers), "--towers-per-worker", str(towers)]
    script = [__file__, "--train", model, "--steps", str(steps), "--warm-up", str(warm_up)]
    launched = subprocess.run([*launcher, *counts, *script], capture_output=True, text=True, check=False)
    if launched.returncode:
        sys.exit(launched.stderr)
    (result,) = (line for line in launched.stdout.splitlines() if line.startswith("[0] {"))
    return json.loads(result.removeprefix("[0] "))


def train(model_name, steps, warm_up):
    """One worker: prints what `measure` gives."""
    import keras

    import keras_dp
    from keras_dp.cli import models, synthetic

    workers = keras_dp.connect_workers()
    workload = models.workload(model_name)
    keras.utils.set_random_seed(0)
    model = workload.build()
    model.compile("sgd", **workload.objective())
    dataset = synthetic.dataset(model, workload.batch_size).repeat()
    parallel = keras_dp.DataParallelModel(model)

    times, sent = [], []

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            times.append(time.perf_counter())
            sent.append(loopback_bytes())

    parallel.fit(dataset, epochs=1, steps_per_epoch=warm_up + steps, verbose=0, callbacks=[Clock()])
    milliseconds = [1000 * (after - before) for before, after in itertools.pairwise(times[warm_up - 1 :])]
    size = sum(weight.value.numpy().nbytes for weight in model.trainable_weights)
    in_a_step = (sent[-1] - sent[warm_up - 1]) / steps / workers.count
    print(json.dumps({"ms": milliseconds, "bytes": in_a_step, "parameter_bytes": size}))


def loopback_bytes():
    for line in LOOPBACK.read_text(encoding="utf-8").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "resnet20"], help="to measure (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="W (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each configuration runs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="timed steps in each run (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=10, help="steps that are not counted (default: %(default)s)")
    parser.add_argument("--train", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps, options.warm_up)
        return
    count = options.workers
    print(f"| model | {count} workers, ms a step | 1 worker of {count} towers | ratio | bytes sent in a step | over the ring |")
    print("|---|---|---|---|---|---|")
    for model in options.models:
        several, one, sent = [], [], []
        for _ in range(options.rounds):
            result = measure(model, count, 1, options.steps, options.warm_up)
            several.append(statistics.median(result["ms"]))
            sent.append(result["bytes"])
            one.append(statistics.median(measure(model, 1, count, options.steps, options.warm_up)["ms"]))
        ratios = [a / b for a, b in zip(several, one, strict=True)]
        ring = 2 * result["parameter_bytes"] * (count - 1) / count
        print(
            f"| {model} | {statistics.median(several):.2f} | {statistics.median(one):.2f} "
            f"| **{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {statistics.median(sent):,.0f} | {statistics.median(sent) / ring:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
