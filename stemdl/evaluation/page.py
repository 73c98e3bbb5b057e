"""The report as text: the table on the terminal, samples.csv, and the page itself."""

import base64
import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jinja2

import stemdl
from stemdl.evaluation.assess import NETWORK, Row
from stemdl.evaluation.baselines import BASELINES
from stemdl.evaluation.figures import LABELS
from stemdl.evaluation.metrics import SCORES
from stemdl.evaluation.summary import thresholds

CEILING = "ceiling"


@dataclass(frozen=True)
class Line:
    """A line of the table: a value for each method, formatted; "" where there is none."""

    group: str
    label: str
    values: dict[str, str]
    best: str  # the method with the best value, of those that reconstruct


def lines(content: dict[str, Any]) -> list[Line]:
    """The table of scores. `content` is what metrics.json holds."""
    network = content[content["split"]]
    methods = {NETWORK: network} | content["baselines"]
    found = []
    for score in SCORES:
        for kind in ("median", "mean") if score.key == "pearson" else ("median",):
            values = {name: figures[score.key][kind] for name, figures in methods.items()}
            unit = f" [{score.unit}]" if score.unit else ""
            label = f"{score.label}, {kind}{unit}"
            found.append(_line("Images", label, values, score.digits, score.rises))
    for group, key in (("Columns", "columns"), ("Atoms", "atoms")):
        for label, field, digits, rises in (
            ("recall [%]", "recall", 1, True),
            ("precision [%]", "precision", 1, True),
            ("position error, rms [pm]", "rms_pm", 1, False),
            ("position error, median [pm]", "median_pm", 1, False),
        ):
            values = {name: figures[key][field] for name, figures in methods.items()}
            limit = network["ceiling"].get(key, {}).get(field)
            if "%" in label:
                values = {name: None if v is None else 100 * v for name, v in values.items()}
                limit = None if limit is None else 100 * limit
            found.append(_line(group, label, values, digits, rises, limit))
    return found


def text(content: dict[str, Any]) -> str:
    """The table for the terminal."""
    network, split = content[content["split"]], content["split"]
    table = lines(content)
    methods = [*thresholds(content), CEILING]
    heads = LABELS | {CEILING: "truth*"}
    width = max(len(line.label) for line in table) + 2
    rows = [
        f"{split}: {network['samples']} samples of {network['materials']} materials",
        " " * width + "".join(f"{heads[method]:>10}" for method in methods),
    ]
    group = ""
    for line in table:
        if line.group != group:
            group = line.group
            rows.append(_GROUPS[group])
        values = "".join(f"{line.values.get(method, ''):>10}" for method in methods)
        rows.append(f"  {line.label:<{width - 2}}{values}")
    rows.append("* the true potential itself, through the same finder of columns")
    return "\n".join(rows)


def samples_csv(rows: Sequence[Row], content: dict[str, Any]) -> str:
    """A row for each sample: what it is, and every score of every method."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    levels = thresholds(content)
    described = (
        "material", "prototype", "formula", "space_group", "zone_axis", "energy", "semi_angle",
        "defocus", "cs", "thickness", "dose", "mean_z", "elements",
    )  # fmt: skip
    counts = ("true", "found", "recall", "precision", "rms_pm", "median_pm")
    heads = [score.key for score in SCORES] + [
        f"{kind}_{key}" for kind in ("columns", "atoms") for key in counts
    ]
    writer.writerow(["index", *described, *(f"{m}_{head}" for m in levels for head in heads)])
    for row in rows:
        cells: list[Any] = [row.index]
        cells += [
            " ".join(map(str, value)) if isinstance(value, list) else value
            for value in (row.record[key] for key in described)
        ]
        for method, threshold in levels.items():
            result = row.results[method]
            cells += [f"{result.scores[score.key]:.6g}" for score in SCORES]
            for tallies in (result.columns, result.atoms):
                figures = tallies[threshold].figures()
                cells += ["" if figures[key] is None else f"{figures[key]:.6g}" for key in counts]
        writer.writerow(cells)
    return buffer.getvalue()


def html(content: dict[str, Any], pictures: Sequence[Path]) -> str:
    """The page, with the pictures inside."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("stemdl", "evaluation"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        content=content,
        network=content[content["split"]],
        settings=content["settings"],
        methods=thresholds(content),
        labels=LABELS,
        lines=lines(content),
        groups=_GROUPS,
        scores=SCORES,
        baselines=[each for each in BASELINES if each.key in content["baselines"]],
        pictures={each.stem: base64.b64encode(each.read_bytes()).decode() for each in pictures},
        version=stemdl.__version__,
        today=date.today().isoformat(),
    )


_GROUPS = {
    "Images": "whole images",
    "Columns": "columns, against the peaks of the true potential",
    "Atoms": "columns, against the simulated atoms",
}


def _line(
    group: str,
    label: str,
    values: dict[str, float | None],
    digits: int,
    rises: bool,
    limit: float | None = None,
) -> Line:
    known = {name: value for name, value in values.items() if value is not None}
    best = (max if rises else min)(known, key=lambda name: known[name]) if known else ""
    shown = {
        name: "–" if value is None else f"{value:.{digits}f}" for name, value in values.items()
    }
    if limit is not None:
        shown[CEILING] = f"{limit:.{digits}f}"
    return Line(group, label, shown, best)
