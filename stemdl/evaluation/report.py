"""stemdl evaluate: every sample scored on all ranks, then tables, pictures and one page.

    stemdl evaluate configs/demo.yaml                 # one rank
    mpirun -n 2 stemdl evaluate configs/demo.yaml     # two share the samples

RUN/report/ holds metrics.json (stemdl.metrics/1), samples.csv (a row a sample), the pictures,
and report.html, which needs no other file.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from stemdl import files
from stemdl.console import progress, say
from stemdl.data import shards
from stemdl.data.shards import Split
from stemdl.errors import UserError
from stemdl.evaluation import assess, curves, figures, page, predict, summary
from stemdl.evaluation.assess import NETWORK, Row
from stemdl.evaluation.figures import Example
from stemdl.ranks import Ranks
from stemdl.schema import Evaluate, Experiment
from stemdl.training import checkpoint, devices

SCHEMA = "stemdl.metrics/1"


def evaluate(experiment: Experiment, ranks: Ranks) -> dict[str, Any]:
    """Score the run on `evaluate.split` and write RUN/report; return what metrics.json holds.

    Each rank reconstructs and scores its own samples; rank 0 writes.

    Raises:
        UserError: no trained run, no data, data without potentials or of another shape than the
            network's, or a reconstruction with NaN.
    """
    settings = experiment.evaluate
    split = _supervised(
        shards.open_split(
            experiment.data.dir, settings.split, ranks, calibration=experiment.data.records
        )
    )
    with ranks.together("opening the run"):
        devices.set_up(experiment.train, experiment.seed, ranks)
        model, normaliser, trained = checkpoint.load_model(experiment.run, settings.checkpoint)
        _check_shapes(split, model)
    methods = assess.methods_for(split, settings, ranks)
    with ranks.together("scoring"):
        indices, potentials = predict.reconstruct(
            model, normaliser, split, trained.data, batch=settings.batch, ranks=ranks
        )
        found = dict(zip(indices.tolist(), potentials, strict=True))
        own_rows = [
            _row(split, index, image, methods, settings)
            for index, image in progress(found.items(), "scoring", rank=ranks.rank)
        ]
    rows = sorted(chain(*ranks.collect(own_rows)), key=lambda row: row.index)
    content = summary.collect(rows, experiment)
    chosen = summary.choose(rows, settings.examples)
    with ranks.together("reading the examples"):
        own_examples = {
            index: _example(split, rows[index], found[index], content, settings)
            for index in set(chain(*chosen.values())) & set(found)
        }
    examples = {index: each for part in ranks.collect(own_examples) for index, each in part.items()}
    with ranks.together("writing the report"):
        if ranks.rank == 0:
            folder = experiment.run / "report"
            files.write_json(folder / "metrics.json", SCHEMA, content)
            files.write_bytes(folder / "samples.csv", page.samples_csv(rows, content).encode())
            shown = {name: [examples[i] for i in those] for name, those in chosen.items()}
            pictures = draw(folder, rows, content, shown, experiment.run / "metrics.jsonl")
            html = page.html(content, [folder / each for each in pictures])
            files.write_bytes(folder / "report.html", html.encode())
            say(page.text(content))
            say(f"\nreport: {folder / 'report.html'}")
    return content


def draw(
    folder: Path,
    rows: Sequence[Row],
    content: dict[str, Any],
    examples: dict[str, list[Example]],
    training_log: Path,
) -> list[str]:
    """Draw the report's pictures in `folder`; return their names in the order of the page.

    Args:
        rows: of all samples.
        content: what metrics.json holds.
        examples: samples to show, by the names of `summary.choose`.
        training_log: RUN/metrics.jsonl; without it there are no training curves.
    """
    middle = examples["median"][len(examples["median"]) // 2]
    figures.comparison(folder / "comparison.png", middle)
    for name in ("median", "worst", "best"):
        figures.reconstructions(folder / f"{name}.png", examples[name])
    thresholds = summary.thresholds(content)
    curves.distributions(
        folder / "distributions.png",
        {
            method: np.array([row.results[method].scores["pearson"] for row in rows])
            for method in thresholds
        },
        {
            method: summary.total(rows, method, "columns", threshold).errors
            for method, threshold in thresholds.items()
        },
        content["settings"]["match_radius"],
    )
    scores = [row.results[NETWORK].scores for row in rows]
    curves.trends(
        folder / "trends.png",
        [row.record for row in rows],
        {
            "MAE [V]": np.array([each["mae"] for each in scores]),
            "R-factor": np.array([each["r_factor"] for each in scores]),
        },
    )
    pictures = ["comparison", "median", "worst", "best", "distributions", "trends"]
    lines = _training_lines(training_log)
    if lines:
        curves.training(folder / "training.png", lines)
        pictures.append("training")
    return [f"{name}.png" for name in pictures]


def _row(
    split: Split, index: int, potential: NDArray, methods: Sequence[str], settings: Evaluate
) -> Row:
    case = assess.read(split, index)
    return assess.assess(case, assess.images(case, potential, methods), settings)


def _example(
    split: Split, row: Row, potential: NDArray, content: dict[str, Any], settings: Evaluate
) -> Example:
    case = assess.read(split, row.index)
    thresholds = summary.thresholds(content)
    images = assess.images(case, potential, tuple(thresholds))
    return Example(
        record=case.record,
        cbed=case.cbed.mean((0, 1), dtype=np.float64),
        truth=case.truth,
        images={
            method: assess.in_volts(method, image, case.truth) for method, image in images.items()
        },
        verdicts={
            method: assess.verdict(case, image, thresholds[method], settings)
            for method, image in images.items()
        },
        scores={method: result.scores for method, result in row.results.items()},
        pixel=case.axes.potential_pixel,
        detector_step=case.axes.detector_step,
    )


def _training_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; none if the file is gone. A kill may have cut the last one."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def _supervised(split: Split) -> Split:
    if split.potential_shape is None:
        raise UserError(
            f"{split.directory / split.name}: holds no potential to compare with; "
            "reconstruct its files with 'stemdl predict RUN FILE'"
        )
    return split


def _check_shapes(split: Split, model: keras.Model) -> None:
    found = (split.cbed_shape, split.potential_shape)
    wanted = (model.input_shape[1:], model.output_shape[1:])
    if found != wanted:
        raise UserError(
            f"{split.directory / split.name}: patterns {found[0]} and potential {found[1]}, wanted "
            f"the network's {wanted[0]} and {wanted[1]}; set data.dir to the data of this run"
        )
