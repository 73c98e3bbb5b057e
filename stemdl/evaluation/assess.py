"""Judge one sample by every score, for the network and the baselines.

    methods = methods_for(split, experiment.evaluate, ranks)
    case = read(split, index)
    row = assess(case, images(case, reconstruction, methods), experiment.evaluate)

A method's image is scored as it is; `summary.py` sums up the rows of many samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stemdl.data import shards
from stemdl.data.shards import Axes, Split
from stemdl.evaluation import baselines, columns, metrics
from stemdl.evaluation.columns import Tally, Verdict
from stemdl.ranks import Ranks
from stemdl.schema import Evaluate

Array = NDArray[np.float64]
NETWORK = "network"
# A microscopist would set the threshold to the image at hand. A baseline gets the one of these that
# gives it the best F1 on the very split that is scored.
BASELINE_THRESHOLDS = (0.02, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6)


@dataclass(frozen=True)
class Case:
    """One sample with all that it is judged by."""

    index: int
    record: dict[str, Any]  # the fields of shards.SAMPLE
    cbed: NDArray  # (Sy, Sx, Ky, Kx)
    truth: Array  # true potential (H, W) [V], mean zero
    atoms: NDArray  # shards.COLUMN records
    axes: Axes


@dataclass(frozen=True)
class Result:
    """What one method made of one sample. Tallies are kept by the finder's threshold."""

    scores: dict[str, float]
    columns: dict[float, Tally]  # against the peaks of the true potential
    atoms: dict[float, Tally]  # against the simulated atoms


@dataclass(frozen=True)
class Row:
    """All results of one sample, by method; `ceiling` is the true potential's own atom tally."""

    index: int
    record: dict[str, Any]
    results: dict[str, Result]
    ceiling: Tally = field(default_factory=Tally)


def read(split: Split, index: int) -> Case:
    """Sample `index` of a split that has potentials."""
    shard, row = shards.locate(split, index)
    arrays = shards.read_samples(shard, [row])
    potential = arrays["potential"][0].astype(np.float64)
    return Case(
        index=index,
        record=_plain(shards.read_table(shard)[row]),
        cbed=arrays["cbed"][0],
        truth=potential - potential.mean(),
        atoms=shards.read_columns(shard, row),
        axes=shard.axes,
    )


def methods_for(split: Split, settings: Evaluate, ranks: Ranks) -> tuple[str, ...]:
    """The network, and the baselines that are wanted and possible on every sample of the split.

    All ranks call this; each looks at some of the shards.
    """
    if not settings.baselines:
        return (NETWORK,)
    detector, step = split.cbed_shape[2:], split.axes.detector_step
    with ranks.together("reading the tables of samples"):
        own = [shards.read_table(shard) for shard in split.shards[ranks.rank :: ranks.size]]
        dark_field = all(
            baselines.reaches_dark_field(detector, step, energy, semi_angle)
            for table in own
            for energy, semi_angle in np.unique(table[["energy", "semi_angle"]])
        )
    return (NETWORK, "icom", "adf") if all(ranks.collect(dark_field)) else (NETWORK, "icom")


def images(case: Case, reconstruction: NDArray, methods: Sequence[str]) -> dict[str, Array]:
    """The image (H, W) of each method: the reconstruction [V], baselines in their own units."""
    height, width = case.truth.shape
    scan = case.cbed[None], case.axes, (height, width)
    optics = case.record["energy"], case.record["semi_angle"]
    make = {
        NETWORK: lambda: reconstruction.astype(np.float64),
        "icom": lambda: baselines.icom(*scan)[0],
        "adf": lambda: baselines.adf(*scan, *optics)[0],
    }
    return {method: make[method]() for method in methods}


def in_volts(method: str, image: Array, truth: Array) -> Array:
    """An image (H, W) in volts, mean zero; a baseline's gain is fitted to the truth."""
    volts = image if method == NETWORK else metrics.fitted(truth[None], image[None])[0]
    return volts - volts.mean()


def verdict(case: Case, image: Array, threshold: float, settings: Evaluate) -> Verdict:
    """The columns of an image against the peaks of the true potential."""
    truth, found = (_peaks(each, case, settings) for each in (case.truth, image))
    return _judge_columns(
        case,
        truth.above(settings.threshold).position,
        found.above(threshold).position,
        settings,
    )


def assess(case: Case, images: dict[str, Array], settings: Evaluate) -> Row:
    """Score every image of a case.

    Raises:
        UserError: an image has NaN or infinity, or the true potential is flat.
    """
    truth = _peaks(case.truth, case, settings).above(settings.threshold).position
    results = {}
    for method, image in images.items():
        volts = in_volts(method, image, case.truth)
        scores = metrics.score(case.truth[None], volts[None], first=case.index)
        # The sign of a baseline's contrast is its own: the fit must not turn it round.
        scores["pearson"] = metrics.pearson(case.truth[None], image[None])
        peaks = _peaks(image, case, settings)
        thresholds = (settings.threshold,) if method == NETWORK else BASELINE_THRESHOLDS
        found = {each: peaks.above(each).position for each in thresholds}
        results[method] = Result(
            {key: float(values[0]) for key, values in scores.items()},
            {each: _judge_columns(case, truth, found[each], settings).tally for each in thresholds},
            {each: _judge_atoms(case, found[each], settings) for each in thresholds},
        )
    return Row(case.index, case.record, results, _judge_atoms(case, truth, settings))


def _peaks(image: Array, case: Case, settings: Evaluate) -> columns.Peaks:
    return columns.find(
        image, case.axes.potential_pixel, min_distance=settings.min_distance, threshold=0.0
    )


def _judge_columns(case: Case, truth: Array, found: Array, settings: Evaluate) -> Verdict:
    return columns.judge(truth, found, _field(case), settings)


def _judge_atoms(case: Case, found: Array, settings: Evaluate) -> Tally:
    truth = np.stack([case.atoms["y"], case.atoms["x"]], axis=-1).astype(np.float64)
    isolated = case.atoms["nearest"] >= settings.isolated
    return columns.judge(truth, found, _field(case), settings, isolated).tally


def _field(case: Case) -> tuple[float, float]:
    return columns.last_pixel(case.truth.shape, case.axes.potential_pixel)


def _plain(record: np.void) -> dict[str, Any]:
    """A SAMPLE record as text, numbers and lists."""
    values = {name: record[name] for name in record.dtype.names or ()}
    return {
        name: value.decode() if isinstance(value, bytes) else value.tolist()
        for name, value in values.items()
    }
