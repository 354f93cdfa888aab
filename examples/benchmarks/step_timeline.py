"""Draw when two GPUs compute and send in a simulated step of ResNet-20, packed and unpacked.

Run it with TF_ENABLE_ONEDNN_OPTS=0: oneDNN puts operations in the graph that no GPU runs.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path

import matplotlib

from keras_dp.cli.plan.command import plan_in_new_process
from keras_dp.cli.plan.prediction import PlannedRun

COLORS = {"computes": "0.75", "weights": "C0", "gradients": "C1", "moments": "C2", "other": "C3"}
TOWERS = 2


def events_of(model, rows, packs):
    """Returns what GPUs compute and receive in a step on A100s: a list of events for each GPU and sender."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "step.json"
        plan_in_new_process(PlannedRun(model, TOWERS, batch_size=rows, pack_copies=packs, timeline=str(path)))
        events = json.loads(path.read_text())["traceEvents"]
    devices = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    by_row = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            row = f"{devices[event['pid']]} {threads[event['tid']].removeprefix('receives ')}"
            if "host" not in row:
                by_row[row].append(event)
    return dict(sorted(by_row.items()))


def draw(panel, by_row, title, begin, end):
    for height, events in enumerate(reversed(by_row.values())):
        for kind, color in COLORS.items():
            bars = [(event["ts"] / 1e3, event["dur"] / 1e3) for event in events if event["cat"] == kind]
            panel.broken_barh(bars, (height - 0.4, 0.8), facecolors=color, edgecolors="none", linewidth=0)
    panel.set_yticks(range(len(by_row)), [*reversed(by_row)])
    panel.set_xlim(begin, end)
    panel.set_title(title)
    panel.grid(axis="y", visible=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet20", help="a model of keras-dp plan (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=1024, help="rows in a global batch (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("step_timeline.png"), help="path of the figure")
    args = parser.parse_args()
    matplotlib.use("Agg")
    from matplotlib import patches, pyplot

    pyplot.style.use(Path(__file__).parents[1] / "figures.mplstyle")
    steps = {name: events_of(args.model, args.rows, packs) for name, packs in (("unpacked", False), ("packed", True))}
    lasts = {
        name: max(event["ts"] + event["dur"] for events in by_row.values() for event in events) / 1e3
        for name, by_row in steps.items()
    }
    figure, panels = pyplot.subplots(4, 1, figsize=(10, 9))
    for i, (name, by_row) in enumerate(steps.items()):
        draw(panels[2 * i], by_row, f"{name}: {lasts[name]:.1f} ms", 0, max(lasts.values()))
        draw(panels[2 * i + 1], by_row, f"{name}, one millisecond of the forward pass", 2, 3)
    for panel in panels:
        panel.set_xlabel("milliseconds")
    present = {event["cat"] for by_row in steps.values() for events in by_row.values() for event in events}
    legend = [patches.Patch(color=color, label=kind) for kind, color in COLORS.items() if kind in present]
    figure.legend(handles=legend, loc="outside upper center", ncols=len(legend))
    figure.savefig(args.out)
    print(f"figure: {args.out}")


if __name__ == "__main__":
    main()
