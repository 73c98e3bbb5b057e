"""stemdl compare RUN RUN ...: a table of what differs and what came of it, and a picture.

From the files of the runs alone: config.yaml, metrics.jsonl, checkpoints/last.h5 and, where a run
was evaluated, report/metrics.json.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stemdl.console import duration
from stemdl.errors import UserError
from stemdl.launch import progress

# Scores of report/metrics.json in the table: heading, path in the split's section, format.
SCORES = (
    ("Pearson", ("pearson", "median"), "{:.4f}"),
    ("recall", ("columns", "recall"), "{:.3f}"),
    ("precision", ("columns", "precision"), "{:.3f}"),
    ("rms [pm]", ("columns", "rms_pm"), "{:.1f}"),
)
NOT_COMPARED = ("run", "name", "train.wall_limit")  # they differ by themselves


@dataclass(frozen=True)
class Run:
    """What is read of a run."""

    name: str
    settings: dict[str, Any]  # dotted key -> value
    train: list[dict[str, Any]]
    dev: list[dict[str, Any]]
    saved: progress.Checkpoint | None
    scores: dict[str, Any]  # the report's section of its split; empty without a report


def read(run: Path) -> Run:
    """Raises UserError where `run` is no run or a file of it is damaged."""
    path = run / "config.yaml"
    if not path.exists():
        raise UserError(f"{run}: is no run (it has no config.yaml); wanted a directory of `train`")
    lines = progress.metrics(run)
    return Run(
        name=str(run),
        settings=_flat(yaml.safe_load(path.read_text())),
        train=[line for line in lines if line["kind"] == "train"],
        dev=[line for line in lines if line["kind"] == "dev"],
        saved=progress.last_checkpoint(run),
        scores=_scores(run / "report" / "metrics.json"),
    )


def table(runs: Sequence[Run]) -> str:
    """A line for each run, then a line for each key of the experiment that differs."""
    heads = ["run", "ranks", "epochs", "dev loss", "samples/s", "training"]
    heads += [heading for heading, _, _ in SCORES]
    rows = [heads, *(_row(run) for run in runs)]
    keys = sorted({key for run in runs for key in run.settings})
    values = {key: [json.dumps(run.settings.get(key)) for run in runs] for key in keys}
    differing = [key for key in keys if len(set(values[key])) > 1 and key not in NOT_COMPARED]
    text = _aligned(rows)
    if differing:
        text += "\n\n" + _aligned(
            [["what differs", *(run.name for run in runs)]]
            + [[key, *values[key]] for key in differing]
        )
    return text


def picture(path: Path, runs: Sequence[Run]) -> None:
    """Training and dev loss over epochs, dev loss over training time, and the report's scores."""
    from stemdl.evaluation.figures import canvas

    with canvas(path, 12.0, 3.8) as figure:
        loss, time, scores = figure.subplots(1, 3)
        for number, run in enumerate(runs):
            colour = f"C{number % 10}"
            epochs = [line["epoch"] for line in run.train]
            loss.plot(epochs, [line["loss"] for line in run.train], color=colour, alpha=0.35)
            dev = [line["loss"] for line in run.dev]
            at = [line["epoch"] for line in run.dev]
            loss.plot(at, dev, color=colour, marker=".", label=run.name)
            minutes = _minutes(run)
            time.plot([epoch * minutes for epoch in at], dev, color=colour, marker=".")
            found = [_at(run.scores, place) for _, place, _ in SCORES[:3]]
            places = [index + 0.8 * (number + 0.5) / len(runs) - 0.4 for index in range(3)]
            heights = [float("nan") if value is None else value for value in found]
            scores.bar(places, heights, 0.8 / len(runs), color=colour)
        loss.set(xlabel="epochs", ylabel="loss (dev with dots)", yscale="log")
        time.set(xlabel="training time [min]", ylabel="dev loss", yscale="log")
        scores.set_xticks(range(3), [heading for heading, _, _ in SCORES[:3]])
        scores.set(ylabel="report", ylim=(0, 1))
        figure.legend(loc="outside upper left", ncols=3, frameon=False)


def _row(run: Run) -> list[str]:
    best = min((line["loss"] for line in run.dev), default=None)
    saved = run.saved
    cells = [
        run.name,
        str(saved.ranks) if saved else "-",
        f"{saved.epochs:.2f}" if saved else "-",
        "-" if best is None else f"{best:.4g}",
        f"{run.train[-1]['samples_per_s']:.1f}" if run.train else "-",
        duration(sum(saved.clock.values())) if saved else "-",
    ]
    for _, place, form in SCORES:
        value = _at(run.scores, place)
        cells.append("-" if value is None else form.format(value))
    return cells


def _minutes(run: Run) -> float:
    """Minutes of training an epoch, pauses included; NaN before the first checkpoint."""
    if run.saved is None or run.saved.epochs == 0:
        return float("nan")
    return sum(run.saved.clock.values()) / run.saved.epochs / 60


def _scores(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
        return content[content["split"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: is no report of stemdl evaluate ({error!r})") from error


def _at(tree: dict[str, Any], place: Sequence[str]) -> float | None:
    for key in place:
        tree = (tree or {}).get(key, {})
    return tree if isinstance(tree, float | int) else None


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return found


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
