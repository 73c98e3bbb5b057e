"""From the rows of single samples to the figures of a report."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stemdl.evaluation.assess import NETWORK, Row
from stemdl.evaluation.columns import Tally
from stemdl.evaluation.metrics import SCORES
from stemdl.schema import Experiment


def choose(rows: Sequence[Row], count: int) -> dict[str, list[int]]:
    """Indices of the worst, median and best samples by correlation, `count` each if there are."""
    order = sorted(rows, key=lambda row: row.results[NETWORK].scores["pearson"])
    ranked = [row.index for row in order]
    count = min(count, len(ranked))
    middle = (len(ranked) - count) // 2
    return {
        "worst": ranked[:count],
        "median": ranked[middle : middle + count],
        "best": ranked[len(ranked) - count :][::-1],
    }


def collect(rows: Sequence[Row], experiment: Experiment) -> dict[str, Any]:
    """What metrics.json holds: figures by split, and the baselines' on the same samples."""
    settings = experiment.evaluate
    methods = {
        method: summarise(rows, method, best_threshold(rows, method)) for method in rows[0].results
    }
    prototypes = families(rows, settings.threshold)
    network = {
        "samples": len(rows),
        "materials": len({row.record["material"] for row in rows}),
        "prototypes": len(prototypes),
        **methods.pop(NETWORK),
        "ceiling": {"atoms": ceiling(rows)},
        "families": prototypes,
    }
    return {
        "name": experiment.name,
        "run": str(experiment.run),
        "data": str(experiment.data.dir),
        "split": settings.split,
        settings.split: network,
        "baselines": methods,
        "settings": settings.model_dump(mode="json"),
    }


def best_threshold(rows: Sequence[Row], method: str) -> float:
    """The threshold that gives `method` the best F1 of columns, all samples together."""
    thresholds = rows[0].results[method].columns
    return max(thresholds, key=lambda each: total(rows, method, "columns", each).f1)


def thresholds(content: dict[str, Any]) -> dict[str, float]:
    """The finder's threshold of each method in a report, the network first."""
    methods = {NETWORK: content[content["split"]]} | content["baselines"]
    return {method: figures["threshold"] for method, figures in methods.items()}


def total(rows: Sequence[Row], method: str, kind: str, threshold: float) -> Tally:
    """The tally of all rows together; `kind` is "columns" or "atoms"."""
    return sum((getattr(row.results[method], kind)[threshold] for row in rows), Tally())


def summarise(rows: Sequence[Row], method: str, threshold: float) -> dict[str, Any]:
    """Median, mean and 10th percentile towards the worse side of each score, and column figures.

    Columns are counted over all samples together ("micro"): a sample with many counts for more.
    """
    figures: dict[str, Any] = {}
    for score in SCORES:
        values = [row.results[method].scores[score.key] for row in rows]
        figures[score.key] = {
            "median": _finite(np.median(values)),
            "mean": _finite(np.mean(values)),
            "worst_tenth": _finite(
                np.percentile(values, 10 if score.rises else 90, method="nearest")
            ),
        }
    for kind in ("columns", "atoms"):
        figures[kind] = total(rows, method, kind, threshold).figures()
    return figures | {"threshold": threshold}


def ceiling(rows: Sequence[Row]) -> dict[str, Any]:
    """Atom figures of the true potential itself: what the finder makes of a perfect image."""
    return sum((row.ceiling for row in rows), Tally()).figures()


def families(rows: Sequence[Row], threshold: float) -> list[dict[str, Any]]:
    """The network's figures for each prototype, lowest median correlation first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.record["prototype"], []).append(row)
    found = [
        {
            "prototype": prototype,
            "formulas": sorted({row.record["formula"] for row in group}),
            "samples": len(group),
        }
        | summarise(group, NETWORK, threshold)
        for prototype, group in groups.items()
    ]
    return sorted(found, key=lambda family: family["pearson"]["median"])


def _finite(value: Any) -> float | None:
    """A number for JSON; a perfect image's infinite PSNR becomes null."""
    return float(value) if np.isfinite(value) else None
