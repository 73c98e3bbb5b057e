"""The plan's picture: back-propagation above, each planner's reductions below."""

import io
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

INK, COMPUTE, EXPOSED = "#1c2430", "#c9d4e3", "#b3261e"
GROUPS = ("#0f62c9", "#6fa3e8")  # neighbours differ


def draw(content: Mapping[str, Any]) -> bytes:
    """A PNG of the content of plan.json. Times in ms after the start of the step."""
    rows = content["planners"]
    compute = content["compute_s"] * 1e3
    figure = Figure(figsize=(10, 1.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    axes.barh(0, compute, color=COMPUTE, height=0.7)
    ready = [gradient["ready"] * 1e3 for gradient in content["gradients"]]
    axes.plot(ready, [0] * len(ready), "|", color=INK, markersize=12)
    for place, row in enumerate(rows, start=1):
        for order, transfer in enumerate(row["transfers"]):
            start, end = transfer["start"] * 1e3, transfer["end"] * 1e3
            axes.barh(place, end - start, left=start, color=GROUPS[order % 2], height=0.6)
            if end > compute:
                exposed = max(start, compute)
                axes.barh(place + 0.36, end - exposed, left=exposed, color=EXPOSED, height=0.12)
    axes.axvline(compute, color=INK, linewidth=0.8)
    names = [f"{row['planner']} ({row['reductions']})" for row in rows]
    axes.set_yticks(range(len(rows) + 1), ["compute, | ready", *names])
    axes.invert_yaxis()
    axes.set_xlabel("time in the step [ms]; red: after the computation")
    axes.set_title(
        f"{content['experiment']}, {content['ranks']} ranks ({content['source']}): "
        "planner (reductions after fusion)"
    )
    axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()
