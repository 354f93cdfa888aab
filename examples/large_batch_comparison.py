"""Compare a small batch on one device with a large one, with and without the recipe, for docs/large_batches.md."""

import json
import statistics
import time
from pathlib import Path

import matplotlib

SMALL = "small batch"
# For each network: whether the rate is scaled, and the kind of warm-up.
LARGE = {
    "no scaling": (False, "none"),
    "no warm-up": (True, "none"),
    "constant warm-up": (True, "constant"),
    "gradual warm-up": (True, "gradual"),
}
# The values that a run depends on: a run that was made with other values is repeated.
SETTINGS = ("depth", "towers", "batch_size", "base_batch_size", "base_learning_rate", "warmup_epochs", "epochs", "images")


def add_arguments(parser):
    """Adds the arguments of the comparison."""
    group = parser.add_argument_group("with --compare")
    group.add_argument("--seeds", type=int, default=1, help="how often each network is trained")
    group.add_argument(
        "--batch-norms",
        nargs="+",
        choices=("sync", "local", "first"),
        default=["sync"],
        metavar="MODE",
        help="modes of batch normalization to compare",
    )
    group.add_argument("--images", type=int, help="images to train on (default: all)")
    group.add_argument(
        "--out",
        type=Path,
        default=Path("large_batches"),
        help="directory of the runs, the table and the figure",
    )


def compare(args, data, train):
    """Trains all networks whose runs are not finished yet, and writes a table and a figure.

    Args:
        args: the command line's arguments.
        data: images and labels to train on, and to test with.
        train: the function that trains one network: see `cifar10_resnet.train`.
    """
    (images, labels), test_set = data
    train_set = images[: args.images], labels[: args.images]
    settings = {name: getattr(args, name) for name in SETTINGS} | {"images": len(train_set[0]), "test_images": len(test_set[0])}
    args.out.mkdir(parents=True, exist_ok=True)
    runs = [(name, mode, seed) for seed in range(args.seeds) for name, mode in networks(args.batch_norms)]
    curves, seconds = {}, []
    for number, (name, mode, seed) in enumerate(runs, start=1):
        path = args.out / f"{name} {mode} {seed}.json".replace(" ", "_")
        history = finished(path, settings)
        if history is None:
            begin = time.perf_counter()
            scaled, warmup = LARGE.get(name, (False, "none"))
            towers, batch_size = (1, args.base_batch_size) if name == SMALL else (args.towers, args.batch_size)
            scale = args.batch_size / args.base_batch_size if scaled else 1
            history, _ = train(args, train_set, test_set, towers, batch_size, scale, warmup, mode, seed, verbose=0)
            seconds.append(time.perf_counter() - begin)
            # If interrupted, the file is written whole or not at all.
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps({"settings": settings, "history": history}))
            unfinished.replace(path)
        left = (
            f", {(len(runs) - number) * statistics.mean(seconds) / 60:.0f} minutes left" if seconds else ", from an earlier run"
        )
        accuracy = 100 * history["val_accuracy"][-1]
        print(f"{number} of {len(runs)}: {name}, {mode}, seed {seed}: test accuracy {accuracy:.1f} %{left}", flush=True)
        curves.setdefault((name, mode), []).append(history)

    lines = table(curves, settings, args.seeds)
    (args.out / "table.md").write_text("\n".join(lines) + "\n")
    draw(curves, settings, args.out / "large_batches.png")
    print("", *lines, "", f"figure: {args.out / 'large_batches.png'}", sep="\n")
    print(f"test accuracy {mean_and_spread(curves['gradual warm-up', args.batch_norms[0]])[0]:.2f} %")


def networks(batch_norms):
    """Lists pairs of a name and a mode of batch normalization. The small batch has one device, and so one mode."""
    return [(SMALL, "sync"), *((name, mode) for mode in batch_norms for name in LARGE)]


def finished(path, settings):
    """Returns the history of a finished run with these settings; None if there is none."""
    if not path.exists():
        return None
    run = json.loads(path.read_text())
    return run["history"] if run["settings"] == settings else None


def mean_and_spread(histories, name="val_accuracy"):
    """Returns the mean and standard deviation over the seeds, in %, of the last epoch's value."""
    values = [100 * history[name][-1] for history in histories]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def table(curves, settings, seeds):
    """Returns the lines of a Markdown table of the test errors."""
    of_seeds = "of one seed" if seeds == 1 else f"mean and standard deviation over {seeds} seeds"
    lines = [
        f"Test error in % after {settings['epochs']} epochs, {of_seeds}.",
        "",
        "| | batch | learning rate | batch norm | test error, % |",
        "|---|---|---|---|---|",
    ]
    scale = settings["batch_size"] / settings["base_batch_size"]
    for (name, mode), histories in curves.items():
        mean, spread = mean_and_spread(histories)
        scaled = LARGE.get(name, (False, ""))[0]
        rate = settings["base_learning_rate"] * (scale if scaled else 1)
        batch = settings["base_batch_size"] if name == SMALL else settings["batch_size"]
        shown = "one device" if name == SMALL else mode
        error = f"{100 - mean:.1f}" if seeds == 1 else f"{100 - mean:.1f} ± {spread:.1f}"
        lines.append(f"| {name} | {batch} | {rate:.2f} | {shown} | {error} |")
    return lines


def draw(curves, settings, path):
    """Draws the training and test errors over the epochs: the mean over the seeds, and each seed faintly."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.style.use(Path(__file__).with_name("figures.mplstyle"))
    modes = list(dict.fromkeys(mode for name, mode in curves if name != SMALL))
    figure, panels = pyplot.subplots(len(modes), 2, figsize=(10, 4 * len(modes)), squeeze=False, sharex=True, sharey="col")
    for row, mode in zip(panels, modes, strict=True):
        for panel, metric, title in zip(row, ("accuracy", "val_accuracy"), ("training error", "test error"), strict=True):
            for look, name in zip(pyplot.rcParams["axes.prop_cycle"], [SMALL, *LARGE], strict=False):
                histories = curves[name, "sync" if name == SMALL else mode]
                errors = [[100 - 100 * value for value in history[metric]] for history in histories]
                epochs = range(1, settings["epochs"] + 1)
                for seed in errors:
                    panel.plot(epochs, seed, alpha=0.25, linewidth=0.7, **look)
                batch = settings["base_batch_size"] if name == SMALL else settings["batch_size"]
                means = [statistics.mean(values) for values in zip(*errors, strict=True)]
                panel.plot(epochs, means, label=f"{batch}, {name}", **look)
            panel.set_title(f'{title}, %, batch_norm="{mode}"')
            panel.set_xlabel("epoch")
    panels[0][0].legend()
    figure.savefig(path)
    pyplot.close(figure)
