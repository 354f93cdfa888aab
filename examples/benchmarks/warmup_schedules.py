"""Draws the learning rates of docs/large_batches.md: what `WarmupThen` gives, beside the other ways to begin."""

import argparse
from pathlib import Path

import keras
import matplotlib
import numpy as np

import keras_dp

RATE, SCALE, WARMUP, EPOCHS, STEPS = 0.1, 8, 5, 90, 100  # STEPS in an epoch
DECAYS = (30, 60, 80)  # epochs


def steps_down(*rates):
    """A rate for each part of the training."""
    boundaries = [STEPS * epoch for epoch in ((WARMUP,) if len(rates) > len(DECAYS) + 1 else ()) + DECAYS]
    return keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, list(rates))


def schedules():
    """The schedules of the figure, by name, in its two panels."""
    small = steps_down(*(RATE / 10**decays for decays in range(4)))
    scaled = [SCALE * RATE / 10**decays for decays in range(4)]
    cosine = keras.optimizers.schedules.CosineDecay(RATE, EPOCHS * STEPS)
    warmed_up = keras_dp.schedules.WarmupThen
    return [
        {
            "small batch: η": small,
            "no warm-up": warmed_up(small, SCALE, 0),
            "constant warm-up": steps_down(RATE, *scaled),
            "gradual warm-up: WarmupThen(η, 8, 5 epochs)": warmed_up(small, SCALE, WARMUP * STEPS),
        },
        {"small batch: CosineDecay": cosine, "WarmupThen(CosineDecay, 8, 5 epochs)": warmed_up(cosine, SCALE, WARMUP * STEPS)},
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("warmup_schedules.png"), help="where the figure goes (default: %(default)s)"
    )
    args = parser.parse_args()
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.style.use(Path(__file__).parents[1] / "figures.mplstyle")
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6))
    steps = np.arange(0, EPOCHS * STEPS, STEPS // 4)
    for panel, named in zip(panels, schedules(), strict=True):
        for name, schedule in named.items():
            panel.plot(steps / STEPS, [float(schedule(step)) for step in steps], label=name)
        panel.set_xlabel("epoch")
        panel.set_ylabel("learning rate")
        panel.legend()
    panels[0].set_xlim(0, DECAYS[0] + 5)
    figure.savefig(args.out)
    print(f"figure: {args.out}")


if __name__ == "__main__":
    main()
