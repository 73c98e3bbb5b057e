"""The report's pictures, from arrays to PNG files. Lengths in Å, potentials in V.

Potentials are drawn with their mean removed, and smooth between pixels. In every picture a filled
dot is a column that was found where one is, an open square one that was missed, and a cross one
that is not there.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from stemdl import files
from stemdl.evaluation.baselines import BASELINES
from stemdl.evaluation.columns import Verdict

Array = NDArray[np.float64]

INK, FAINT = "#1c2430", "#8a94a3"
COLOURS = {"network": "#0f62c9", "icom": "#d9730d", "adf": "#6b7785"}
LABELS = {"network": "network"} | {each.key: each.label for each in BASELINES}
POTENTIAL, DIFFERENCE, PATTERN = "inferno", "RdBu_r", "gray"
MATCHED, MISSED, FALSE = "#4ee1c1", "#ffffff", "#ff5fa2"
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c5ccd6",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceff3",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "savefig.dpi": 150,
}


@dataclass(frozen=True)
class Example:
    """One sample to show. Images and truth are (H, W) [V] of mean zero; images by method."""

    record: Mapping[str, Any]  # the fields of shards.SAMPLE
    cbed: Array  # (Ky, Kx) mean pattern of the scan
    truth: Array
    images: Mapping[str, Array]
    verdicts: Mapping[str, Verdict]
    scores: Mapping[str, Mapping[str, float]]  # method: key of metrics.SCORES: value
    pixel: float  # [Å]
    detector_step: float  # [1/Å]


@contextmanager
def canvas(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure of `width` by `height` [inch] in the report's style, written to `path`."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        with files.appearing(path) as temporary:
            figure.savefig(temporary, format="png")


def reconstructions(path: Path, examples: Sequence[Example]) -> None:
    """A row for each example: mean pattern, truth, reconstruction, difference."""
    height = 2.95 * len(examples) + 0.5
    with canvas(path, 11.4, height) as figure:
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - 0.32 / height), hspace=0.12)
        for panels, example in zip(
            figure.subplots(len(examples), 4, squeeze=False), examples, strict=True
        ):
            _reconstruction(figure, panels, example)
        _legend(figure)


def comparison(path: Path, example: Example) -> None:
    """Truth, network and baselines side by side, baselines with gain and offset fitted."""
    count = 1 + len(example.images)
    with canvas(path, 2.85 * count + 0.6, 3.5) as figure:
        figure.suptitle(describe(example.record), x=0.01, ha="left", weight="bold")
        panels = figure.subplots(1, count)
        low, high = example.truth.min(), example.truth.max()
        drawn = _image(panels[0], example.truth, example.pixel, low, high)
        panels[0].set_title("true potential")
        _scale_bar(panels[0], example.truth.shape, example.pixel)
        for panel, (method, image) in zip(panels[1:], example.images.items(), strict=True):
            _image(panel, image, example.pixel, low, high)
            panel.set_title(f"{LABELS[method]}   r = {example.scores[method]['pearson']:.3f}")
            _markers(panel, example.verdicts[method])
        figure.colorbar(
            drawn, ax=panels, label="potential [V]", shrink=0.8, pad=0.01, panchor=False
        )
        _legend(figure)


def predictions(path: Path, potentials: Mapping[str, Array], pixel: float) -> None:
    """A contact sheet of up to 16 reconstructions (H, W) [V], for which no truth is known."""
    shown = list(potentials.items())[:16]
    across = int(np.ceil(np.sqrt(len(shown))))
    down = -(-len(shown) // across)
    with canvas(path, 2.9 * across, 2.6 * down) as figure:
        panels = figure.subplots(down, across, squeeze=False).ravel()
        for number, panel in enumerate(panels):
            if number >= len(shown):
                panel.set_axis_off()
                continue
            title, image = shown[number]
            drawn = _image(panel, image, pixel, float(np.nanmin(image)), float(np.nanmax(image)))
            panel.set_title(title)
            _colour_bar(figure, drawn, panel)
            _scale_bar(panel, image.shape, pixel)


def describe(record: Mapping[str, Any]) -> str:
    """A sample in one line: formula, zone axis, prototype and thickness."""
    formula = re.sub(r"(\d+(?:\.\d+)?)", r"$_{\1}$", record["formula"])
    axis = "".join(
        rf"\bar{{{-index}}}" if index < 0 else str(index) for index in record["zone_axis"]
    )
    return f"{formula}  $[{axis}]$   {record['prototype']}   {record['thickness']:.0f} Å thick"


def _reconstruction(figure: Figure, panels: Sequence[Panel], example: Example) -> None:
    scores, verdict = example.scores["network"], example.verdicts["network"]
    tally = verdict.tally
    pattern, truth, image, difference = panels
    pattern.annotate(
        describe(example.record),
        xy=(0, 1),
        xytext=(0, 24),
        xycoords="axes fraction",
        textcoords="offset points",
        weight="bold",
        fontsize=11,
    ).set_in_layout(False)
    _pattern(pattern, example.cbed, example.detector_step)
    pattern.set_title("mean pattern")
    low, high = example.truth.min(), example.truth.max()
    drawn = _image(truth, example.truth, example.pixel, low, high)
    truth.set_title("true potential")
    _scale_bar(truth, example.truth.shape, example.pixel)
    _colour_bar(figure, drawn, truth)
    network = example.images["network"]
    drawn = _image(image, network, example.pixel, low, high)
    image.set_title(f"reconstruction   r = {scores['pearson']:.4f}")
    _markers(image, verdict)
    _colour_bar(figure, drawn, image)
    error = network - example.truth
    limit = abs(error).max()
    drawn = _image(difference, error, example.pixel, -limit, limit, DIFFERENCE)
    difference.set_title(f"difference   {tally.recovered} of {tally.truths} columns")
    _colour_bar(figure, drawn, difference)


def _image(
    panel: Panel, image: Array, pixel: float, low: float, high: float, colours: str = POTENTIAL
) -> Any:
    height, width = image.shape
    extent = (-0.5 * pixel, (width - 0.5) * pixel, (height - 0.5) * pixel, -0.5 * pixel)
    _frame(panel)
    return panel.imshow(
        image, cmap=colours, vmin=low, vmax=high, extent=extent, interpolation="bicubic"
    )


def _colour_bar(figure: Figure, drawn: Any, panel: Panel) -> None:
    figure.colorbar(drawn, ax=panel, label="[V]", shrink=0.85, pad=0.02, panchor=False)


def _pattern(panel: Panel, cbed: Array, step: float) -> None:
    """Square root of the intensity: the faint outside stays visible."""
    _frame(panel)
    height, width = cbed.shape
    extent = (-0.5 * step, (width - 0.5) * step, (height - 0.5) * step, -0.5 * step)
    panel.imshow(np.sqrt(np.maximum(cbed, 0)), cmap=PATTERN, extent=extent)
    _scale_bar(panel, cbed.shape, step, "Å⁻¹")


def _frame(panel: Panel) -> None:
    panel.set_anchor("N")
    panel.set_xticks([])
    panel.set_yticks([])
    panel.grid(False)
    for spine in panel.spines.values():
        spine.set_visible(False)


def _markers(panel: Panel, verdict: Verdict) -> None:
    for (y, x), style in (
        (verdict.matched.T, {"marker": "o", "s": 9, "c": MATCHED, "linewidths": 0}),
        (verdict.missed.T, {"marker": "s", "s": 34, "facecolors": "none", "edgecolors": MISSED}),
        (verdict.false.T, {"marker": "x", "s": 28, "c": FALSE}),
    ):
        drawn: Any = style
        panel.scatter(x, y, **drawn)


def _legend(figure: Figure) -> None:
    handles = [
        Line2D([], [], ls="none", label="column found", marker="o", ms=4, c=MATCHED),
        Line2D([], [], ls="none", label="missed", marker="s", ms=6, mec=INK, c="white"),
        Line2D([], [], ls="none", label="false", marker="x", ms=6, c=FALSE),
    ]
    figure.legend(handles=handles, loc="outside lower right", ncols=3)


def _scale_bar(panel: Panel, shape: tuple[int, ...], pixel: float, unit: str = "Å") -> None:
    """A bar of a round length, about a quarter of the field, at the lower left."""
    height, width = shape[0] * pixel, shape[1] * pixel
    length = max(each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if each <= width / 3)
    left, low = 0.05 * width, 0.94 * height
    edge = withStroke(linewidth=1.5, foreground="black", alpha=0.7)  # readable on bright atoms
    bar = Rectangle((left, low), length, 0.018 * height, color="white", linewidth=0)
    panel.add_patch(bar).set_path_effects([edge])
    panel.text(
        left + length / 2,
        low - 0.02 * height,
        f"{length:g} {unit}",
        color="white",
        ha="center",
        va="bottom",
        path_effects=[edge],
    )
