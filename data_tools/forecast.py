"""Before a simulation starts: who makes which shards, and how long it takes.

The work is counted (`cost.operations`), its pace measured on every rank at the same time, and the
shards dealt by cost: the costliest first, each to the rank with the least to do. So the loads of
two ranks differ by no more than one shard's cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_tools import cost
from data_tools.jobs import Job, Splits, tasks
from data_tools.meeting import apart
from data_tools.multislice import device
from data_tools.sample import Recipe
from data_tools.workers import Run
from stemdl import files, schema
from stemdl.console import duration
from stemdl.data import deal
from stemdl.ranks import Ranks


@dataclass(frozen=True)
class Forecast:
    """What is to come, the same on every rank."""

    seconds: np.ndarray  # (jobs,) of each shard, on one core or GPU
    shares: list[list[int]]  # the jobs of each rank
    wall: float  # [s] until the last rank is done
    workers: int  # processes that simulate, on all ranks together


def foretell(
    recipe: Recipe,
    splits: Splits,
    jobs: Sequence[Job],
    run: Run,
    workers: int,
    ranks: Ranks,
    limit: float,
) -> Forecast:
    """Count, measure and deal. A collective; takes a second or two, more where samples are large.

    Args:
        jobs: shards to make, at least one.
        run: of `workers` processes of this rank.
        limit: longest wait for the slowest rank's measurement [s].

    Raises:
        UserError: on every rank; a sample cannot be made, or a process was killed.
    """
    mine = jobs[ranks.rank :: ranks.size]

    def look() -> tuple[np.ndarray, np.ndarray]:
        counted = run(cost.of_samples, ((list(tasks(recipe, splits, job)),) for job in mine))
        first = next(tasks(recipe, splits, (mine or jobs)[0]))
        paces = run(cost.measure, [first] * workers)
        return np.reshape(list(counted), (-1, 2)), np.stack(list(paces))

    counts, paces = zip(*ranks.collect(apart(ranks, "foretelling", look, limit=limit)), strict=True)
    work = np.empty((len(jobs), 2))
    for rank, part in enumerate(counts):
        work[rank :: ranks.size] = part
    pace = np.median(np.concatenate(paces), axis=0)
    return divide(work @ pace, workers, ranks.size)


def divide(seconds: np.ndarray, workers: int, ranks: int) -> Forecast:
    """Deal shards that cost `seconds` each to ranks of `workers` processes."""
    shares = deal.lanes([round(1e6 * each) for each in seconds], ranks)
    wall = max(seconds[share].sum() for share in shares) / workers
    return Forecast(seconds, [sorted(share) for share in shares], float(wall), workers * ranks)


def lines(forecast: Forecast, jobs: Sequence[Job], settings: schema.Simulate) -> list[str]:
    """The forecast for people."""
    unit = "core" if device() == "cpu" else "GPU"
    samples, total = sum(len(job.rows) for job in jobs), float(forecast.seconds.sum())
    each, busy = total / samples, total / (forecast.wall * forecast.workers)
    longest = int(forecast.seconds.argmax())
    size = sample_bytes(settings)
    said = [
        f"to make: {samples} samples in {len(jobs)} shards, {files.human_bytes(samples * size)}",
        f"pace measured: {3600 / each:,.1f} samples/hour a {unit}, "
        f"{f'{each:.2g}' if each < 10 else f'{each:,.0f}'} s a sample",
        f"expected: {duration(forecast.wall)} on {forecast.workers} "
        f"{'process' if forecast.workers == 1 else 'processes'}, {busy:.0%} of them busy",
        f"a shard: {len(jobs[longest].rows)} samples, "
        f"{files.human_bytes(len(jobs[longest].rows) * size)}, up to "
        f"{duration(forecast.seconds[longest])} of a {unit}; a stop loses unfinished shards only",
        f"the paper's {cost.PAPER_SAMPLES:,} samples, made like these: "
        f"{cost.PAPER_SAMPLES * each / 3600:,.1f} {unit}-hours, "
        f"{files.human_bytes(cost.PAPER_SAMPLES * size)}",
    ]
    idle = sum(not share for share in forecast.shares)
    if idle:
        said.append(
            f"warning: {idle} of {len(forecast.shares)} ranks have no shard to make; "
            "use fewer ranks, or a smaller simulate.shard_samples in a new data.dir"
        )
    return said


def sample_bytes(settings: schema.Simulate) -> int:
    """Bytes of a sample's patterns and potential, before compression."""
    cbed = math.prod(settings.scan) * math.prod(settings.detector)
    pixels = [
        round(count * settings.scan_step / settings.potential_pixel) for count in settings.scan
    ]
    return cbed * np.dtype(settings.dtype).itemsize + 4 * math.prod(pixels)
