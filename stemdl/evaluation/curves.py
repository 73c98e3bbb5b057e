"""The report's curves: errors against their causes, distributions, and the course of training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes as Panel
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from stemdl.evaluation.columns import PM
from stemdl.evaluation.figures import COLOURS, FAINT, INK, LABELS, canvas

Array = NDArray[np.float64]


def trends(path: Path, records: Sequence[Mapping[str, Any]], scores: Mapping[str, Array]) -> None:
    """Errors of the network against thickness, mean atomic number and number of elements, if known.

    Args:
        records: the fields of shards.SAMPLE for each sample.
        scores: label of a row of panels: value for each sample.
    """
    causes = {
        "thickness [Å]": "thickness",
        "mean atomic number": "mean_z",
        "number of elements": "elements",
    }
    known = {
        cause: values
        for cause, key in causes.items()
        if np.isfinite(values := np.array([record[key] for record in records], float)).all()
    }
    with canvas(path, 10.5, 2.7 * len(scores)) as figure:
        panels = figure.subplots(len(scores), len(known), sharey="row", squeeze=False)
        for row, (label, values) in zip(panels, scores.items(), strict=True):
            row[0].set_ylabel(label)
            for panel, (cause, of_samples) in zip(row, known.items(), strict=True):
                _trend(panel, of_samples, values)
                panel.set_xlabel(cause)
                panel.set_ylim(bottom=0)


def distributions(
    path: Path, pearson: Mapping[str, Array], errors: Mapping[str, Array], radius: float
) -> None:
    """How many samples reach a correlation, and how many columns a position error.

    Args:
        pearson: correlation of each sample, by method.
        errors: distance [Å] of each recovered column, by method.
        radius: evaluate.match_radius [Å], where errors end by definition.
    """
    with canvas(path, 10.5, 3.4) as figure:
        left, right = figure.subplots(1, 2)
        for method, values in pearson.items():
            distance = 1 - np.minimum(values, 1 - 1e-6)
            left.ecdf(distance, color=COLOURS[method], label=LABELS[method])
        left.set_xscale("log")
        ticks = (0.999, 0.99, 0.9, 0.0)
        left.set_xticks([1 - tick for tick in ticks], [f"{tick:g}" for tick in ticks])
        left.minorticks_off()
        left.set_xlim(2, min(5e-4, left.get_xlim()[0]))
        left.set(
            xlabel="Pearson correlation of at least", ylabel="share of samples", ylim=(0, 1.02)
        )
        left.legend(loc="upper right")
        for method, values in errors.items():
            if len(values):
                right.ecdf(PM * values, color=COLOURS[method])
        right.set(xlim=(0, PM * radius), ylim=(0, 1.02))
        right.set(xlabel="position error of at most [pm]", ylabel="share of recovered columns")


def training(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Loss and learning rate over the epochs, from the lines of metrics.jsonl."""
    with canvas(path, 10.5, 3.2) as figure:
        loss, rate = figure.subplots(1, 2, width_ratios=(2, 1))
        for kind, label, colour, marker in (
            ("train", "training", "#9db9e0", None),
            ("dev", "validation", COLOURS["network"], "o"),
        ):
            chosen = [line for line in lines if line["kind"] == kind]
            loss.plot(
                [line["epoch"] for line in chosen],
                [line["loss"] for line in chosen],
                color=colour,
                marker=marker,
                markersize=3,
                label=label,
            )
        loss.set(xlabel="epoch", ylabel="loss (normalised potential)", yscale="log")
        loss.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        loss.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        loss.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
        loss.legend()
        chosen = [line for line in lines if line["kind"] == "train"]
        rate.plot([line["epoch"] for line in chosen], [line["lr"] for line in chosen], color=INK)
        rate.ticklabel_format(axis="y", style="scientific", scilimits=(-2, 2))
        rate.set(xlabel="epoch", ylabel="learning rate", ylim=(0, None))


def _trend(panel: Panel, cause: Array, values: Array) -> None:
    """One dot a sample, and medians of about equally many samples."""
    panel.scatter(cause, values, s=12, color=COLOURS["network"], alpha=0.45, linewidths=0)
    if np.allclose(cause % 1, 0):
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    levels = np.unique(cause)
    if len(levels) == 1:
        panel.set_xticks(levels)
        panel.set_title("the same in all samples", color=FAINT, fontsize=9)
        return
    if len(levels) > 8:
        levels = np.quantile(cause, np.linspace(0, 1, 7))
        place = np.clip(np.searchsorted(levels, cause, side="right") - 1, 0, len(levels) - 2)
    else:
        place = np.searchsorted(levels, cause)
    bins = np.unique(place)
    panel.plot(
        [np.median(cause[place == each]) for each in bins],
        [np.median(values[place == each]) for each in bins],
        color=INK,
        marker="o",
        markersize=4,
        label="median",
    )
    panel.legend(loc="upper right")
