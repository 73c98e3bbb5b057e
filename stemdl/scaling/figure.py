"""The scaling study's picture: efficiency by ranks with the published points, and sensitivities."""

import io
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

INK = "#1c2430"
KINDS = {"sourced": "#0f62c9", "measured": "#0f9d76", "fitted": "#d9730d", "assumed": "#8a94a3"}
COLOURS = ("#b3261e", "#d9730d", "#0f62c9", "#6b7785", "#0f9d76", "#7a3ea1")
LEAST_SHOWN = 0.002  # a quantity that moves the efficiency less is left out


def draw(report: Mapping[str, Any]) -> bytes:
    """A PNG of `study.scale`'s report."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    curve, bars = figure.subplots(1, 2, width_ratios=(1.7, 1))
    _curve(curve, report)
    _bars(bars, report)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


def _curve(axes: Axes, report: Mapping[str, Any]) -> None:
    names = list(dict.fromkeys(point["strategy"] for point in report["points"]))
    for index, name in enumerate(names):
        points = [point for point in report["points"] if point["strategy"] == name]
        axes.plot(
            [point["ranks"] for point in points],
            [point["efficiency"] for point in points],
            color=COLOURS[index % len(COLOURS)],
            linestyle="-" if index < len(COLOURS) else "--",
            marker=".",
            label=name,
        )
    at = {(point["strategy"], point["ranks"]): point["efficiency"] for point in report["points"]}
    for result in report["published"]:
        value = result["value"]
        fill: Any = "none" if result["fits"] else "full"
        label = f"published, {'fitted' if result['fits'] else 'held out'}"
        if result["over"] is not None:
            if (result["strategy"], result["ranks"]) not in at:
                continue
            # What the published ratio makes of the slower strategy.
            value = at[result["strategy"], result["ranks"]] / value
        axes.plot(
            result["ranks"], value, "*", color=INK, markersize=13, fillstyle=fill, label=label
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("ranks (GPUs)")
    axes.set_ylabel("efficiency against one rank")
    axes.set_title(f"{report['experiment']} on {report['machine']}, modelled")
    axes.grid(color="#eceff3")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes.legend(unique.values(), unique.keys(), frameon=False, fontsize=8)


def _bars(axes: Axes, report: Mapping[str, Any]) -> None:
    strategy = report["main"]
    rows = sorted(report["sensitivity"], key=lambda row: abs(row[strategy][0] - row[strategy][1]))
    rows = [row for row in rows if abs(row[strategy][0] - row[strategy][1]) > LEAST_SHOWN]
    for place, row in enumerate(rows):
        low, high = row[strategy]
        axes.barh(place, high - low, left=low, color=KINDS[row["kind"]], height=0.6)
        axes.plot(low, place, "|", color=INK, markersize=12)
    axes.set_yticks(range(len(rows)), [row["quantity"].replace("_", " ") for row in rows])
    axes.set_xlabel(f"efficiency of '{strategy}'\nhalved (tick) to doubled")
    axes.set_title("what the last point depends on")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(color=colour, label=kind) for kind, colour in KINDS.items()]
    axes.legend(handles=patches, frameon=False, fontsize=8)
