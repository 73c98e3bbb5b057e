"""Data sets by simulation, over processes or MPI ranks.

    report = simulate(experiment, ranks)      # fills experiment.data.dir, see docs/data-format.md

A sample depends on (simulate.seed, its index) alone, so the bytes are the same for any number of
ranks and workers, and a run that was killed goes on with the shards that are missing. The index
tells the split: index = 3 * row + place of the split in SPLITS.

While they simulate, the ranks do not wait for each other. One that fails says so and leaves its
part undone; one that is lost is missed by the others when they have done theirs.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

import stemdl
from data_tools import forecast, structures
from data_tools.forecast import Forecast
from data_tools.jobs import (
    Job,
    Record,
    Splits,
    all_jobs,
    clear_away,
    finished,
    recorded,
    shard_files,
    tasks,
)
from data_tools.meeting import apart
from data_tools.multislice import device, use_gpu
from data_tools.sample import Recipe, Sample, check, simulate_sample
from data_tools.structures import Catalogue, Material
from data_tools.workers import Run, processes
from stemdl import files, schema
from stemdl.console import progress, say
from stemdl.data import manifest, shards
from stemdl.ranks import Ranks

BEAM_UNIT = "fraction of the beam x detector pixels"
NOT_DATA = {"workers", "stall_limit"}  # keys that decide how the work is done, not what comes out
PATIENCE = 300.0  # [s] least wait for a lost rank


def simulate(
    experiment: schema.Experiment, ranks: Ranks, *, dry_run: bool = False
) -> dict[str, Any]:
    """Make the data set that the experiment describes, or the shards of it that are missing.

    Args:
        dry_run: write nothing; say what there is to make and how long it would take.

    Returns:
        On every rank: "directory", "kept" shards, "samples" and "bytes" made, "seconds" of this
        run, "making" seconds of them that it simulated, "expected" seconds for that.

    Raises:
        UserError: on every rank; a setting that cannot work, no materials, a directory that holds
            another data set, a full disk.
    """
    started = time.perf_counter()
    settings, directory = experiment.simulate, Path(experiment.data.dir)
    check(settings)
    catalogue = None
    with ranks.together("reading materials"):
        if ranks.rank == 0:
            catalogue = structures.collect(settings.materials)
    catalogue = ranks.share(catalogue)
    splits = structures.split(catalogue.materials, settings.materials, settings.seed)
    _announce(catalogue, splits, ranks)
    recipe = Recipe(settings, structures.natural_splits(splits))
    provenance = fingerprint(settings, catalogue.materials)
    jobs = all_jobs(settings, directory)
    kept = finished(jobs, directory, provenance, ranks)
    missing = [job for job in jobs if job.path not in kept]
    if not dry_run:
        with ranks.together("clearing away"):
            if ranks.rank == 0:
                clear_away(directory, stale=bool(missing))
    made, making, expected = list[Record](), 0.0, 0.0
    patience = settings.stall_limit or PATIENCE
    if missing:
        workers = _workers(settings, ranks)
        with processes(workers) as run:
            plan = forecast.foretell(recipe, splits, missing, run, workers, ranks, patience)
            expected = plan.wall
            for line in forecast.lines(plan, missing, settings):
                say(line, rank=ranks.rank)
            if not dry_run:
                began = time.perf_counter()
                mine = [missing[number] for number in plan.shares[ranks.rank]]
                made = apart(
                    ranks,
                    "simulating",
                    lambda: _make(recipe, splits, mine, run, provenance, ranks.rank),
                    limit=settings.stall_limit or PATIENCE + 3 * float(plan.seconds.max()),
                    left=lambda: _left(missing, plan, directory),
                )
                making = time.perf_counter() - began
    made = list(chain(*ranks.collect(made)))
    if not dry_run:
        old = apart(ranks, "reading back", lambda: recorded(kept, ranks), limit=patience)
        records = sorted([*made, *chain(*ranks.collect(old))], key=lambda record: record["path"])
        with ranks.together("writing the manifest"):
            if ranks.rank == 0:
                content = _describe(settings, catalogue, splits, provenance, records)
                files.write_json(directory / manifest.NAME, manifest.SCHEMA, content)
    return {
        "directory": str(directory),
        "kept": len(kept),
        "samples": sum(record["count"] for record in made),
        "bytes": sum(record["bytes"] for record in made),
        "seconds": time.perf_counter() - started,
        "making": making,
        "expected": expected,
    }


def fingerprint(settings: schema.Simulate, materials: Iterable[Material]) -> str:
    """A short hash of all that decides a sample: settings, materials and stemdl's version."""
    content = settings.model_dump(
        mode="json",
        exclude=dict.fromkeys(NOT_DATA | {"samples"}, True) | {"materials": {"cif_dir": True}},
    )
    digest = hashlib.sha256(json.dumps([stemdl.__version__, content], sort_keys=True).encode())
    for material in materials:
        digest.update(f"{material.name} {material.prototype} {material.formula}".encode())
        for array in (material.lattice, material.fractional, material.numbers):
            digest.update(np.round(array, 6).tobytes())
    return f"simulate {digest.hexdigest()[:16]}"


def _workers(settings: schema.Simulate, ranks: Ranks) -> int:
    """Processes of this rank that simulate. A GPU is one rank's, which also takes it here."""
    if device() == "gpu":
        use_gpu(ranks.local_rank)
        return 1
    return 1 if ranks.size > 1 else settings.workers or len(os.sched_getaffinity(0))


def _make(
    recipe: Recipe, splits: Splits, jobs: Sequence[Job], run: Run, provenance: str, rank: int
) -> list[Record]:
    """Make some shards; returns their records.

    Raises:
        UserError: the disk is full, counts too high, a process was killed.
    """
    made = []
    total = sum(len(job.rows) for job in jobs)
    with progress(None, "simulating", total=total, rank=rank) as bar:
        wanted = chain.from_iterable(tasks(recipe, splits, job) for job in jobs)
        samples = run(simulate_sample, wanted)
        for job in jobs:
            shard = []
            for sample in islice(samples, len(job.rows)):
                shard.append(sample)
                bar.update()
            _write(job, shard, recipe.settings, provenance)
            made.append(manifest.shard_record(job.path))
    return made


def _left(jobs: Sequence[Job], plan: Forecast, directory: Path) -> dict[int, int]:
    """How many shards of each rank are still to come."""
    there = set(shard_files(directory))
    return {
        rank: sum(jobs[number].path not in there for number in share)
        for rank, share in enumerate(plan.shares)
    }


def _write(job: Job, made: list[Sample], settings: schema.Simulate, provenance: str) -> None:
    columns = [sample.columns for sample in made]
    for row, records in enumerate(columns):
        records["sample"] = row
    shards.write(
        job.path,
        cbed=np.stack([sample.cbed for sample in made]),
        potential=np.stack([sample.potential for sample in made]),
        columns=np.concatenate(columns),
        samples=np.stack([sample.record for sample in made]),
        axes=shards.Axes(
            scan_step=settings.scan_step,
            detector_step=settings.detector_bin / settings.box,
            potential_pixel=settings.potential_pixel,
            potential_blur=settings.potential_blur,
        ),
        creator=f"stemdl-data simulate {stemdl.__version__}",
        provenance=provenance,
        cbed_unit="electrons" if settings.dtype == "uint16" else BEAM_UNIT,
        compression=settings.compression,
    )


def _announce(catalogue: Catalogue, splits: Splits, ranks: Ranks) -> None:
    counts = ", ".join(f"{len(chosen)} {name}" for name, chosen in splits.items())
    say(f"materials: {len(catalogue.materials)} ({counts})", rank=ranks.rank)
    for reason, count in catalogue.reasons().items():
        say(f"  left out: {count} ({reason}); named in {manifest.NAME}", rank=ranks.rank)


def _describe(
    settings: schema.Simulate,
    catalogue: Catalogue,
    splits: Splits,
    provenance: str,
    records: list[dict[str, Any]],
) -> dict[str, Any]:
    """The manifest's content."""
    return {
        "provenance": provenance,
        "samples": settings.samples.model_dump(),
        "materials": {name: [each.name for each in chosen] for name, chosen in splits.items()},
        "skipped": catalogue.skipped,
        "simulate": settings.model_dump(mode="json", exclude=NOT_DATA),
        "shards": records,
    }
