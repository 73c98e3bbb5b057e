"""Data sets by simulation: one sample, and all of them over processes or MPI ranks.

    report = simulate(experiment, ranks)      # fills experiment.data.dir, see docs/data-format.md

A sample depends on (simulate.seed, its index) alone, so the bytes are the same for any number of
ranks and workers, and a run that was killed goes on with the shards that are missing. The index
tells the split: index = 3 * row + place of the split in SPLITS.
"""

import hashlib
import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import stemdl
from data_tools import structures
from data_tools.multislice import device, use_gpu
from data_tools.sample import Recipe, Sample, check, simulate_sample
from data_tools.structures import SPLITS, Catalogue, Material
from stemdl import files, schema
from stemdl.console import progress, say
from stemdl.data import manifest, shards
from stemdl.errors import UserError
from stemdl.ranks import Ranks

BEAM_UNIT = "fraction of the beam x detector pixels"

Splits = dict[str, list[Material]]
Task = tuple[Recipe, Material, str, int]  # the arguments of simulate_sample


@dataclass(frozen=True)
class Job:
    """One shard file to make."""

    path: Path
    split: str
    rows: range  # of the split


def simulate(experiment: schema.Experiment, ranks: Ranks) -> dict[str, Any]:
    """Make the data set that the experiment describes, or the shards of it that are missing.

    Returns:
        On every rank: "samples", "bytes", "seconds" of this run, "kept" shards, "directory".

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
    jobs = _jobs(settings, directory)
    missing: list[Job] = []
    with ranks.together("looking for finished shards"):
        if ranks.rank == 0:
            missing = _missing(jobs, directory, provenance)
            _clear_away(directory, stale=bool(missing))
    missing = ranks.share(missing)
    _make(recipe, splits, missing, provenance, ranks)
    with ranks.together("reading back"):
        mine = [manifest.shard_record(job.path) for job in jobs[ranks.rank :: ranks.size]]
    records = sorted(chain(*ranks.collect(mine)), key=lambda record: record["path"])
    with ranks.together("writing the manifest"):
        if ranks.rank == 0:
            content = _describe(settings, catalogue, splits, provenance, records)
            files.write_json(directory / manifest.NAME, manifest.SCHEMA, content)
    made = {job.path.relative_to(directory).as_posix() for job in missing}
    return {
        "directory": str(directory),
        "samples": sum(len(job.rows) for job in missing),
        "bytes": sum(record["bytes"] for record in records if record["path"] in made),
        "seconds": time.perf_counter() - started,
        "kept": len(jobs) - len(missing),
    }


def fingerprint(settings: schema.Simulate, materials: Iterable[Material]) -> str:
    """A short hash of all that decides a sample: settings, materials and stemdl's version."""
    content = settings.model_dump(
        mode="json", exclude={"workers": True, "samples": True, "materials": {"cif_dir": True}}
    )
    digest = hashlib.sha256(json.dumps([stemdl.__version__, content], sort_keys=True).encode())
    for material in materials:
        digest.update(f"{material.name} {material.prototype} {material.formula}".encode())
        for array in (material.lattice, material.fractional, material.numbers):
            digest.update(np.round(array, 6).tobytes())
    return f"simulate {digest.hexdigest()[:16]}"


def _jobs(settings: schema.Simulate, directory: Path) -> list[Job]:
    """All shards of the data set: which samples are in which file is fixed."""
    jobs = []
    for split in SPLITS:
        count = getattr(settings.samples, split)
        for number, first in enumerate(range(0, count, settings.shard_samples)):
            rows = range(first, min(first + settings.shard_samples, count))
            jobs.append(Job(directory / split / f"{number:05d}.h5", split, rows))
    return jobs


def _tasks(recipe: Recipe, splits: Splits, jobs: Iterable[Job]) -> Iterator[Task]:
    """Every sample of some shards. A split goes round its materials, so all have their share."""
    for job in jobs:
        place, chosen = SPLITS.index(job.split), splits[job.split]
        for row in job.rows:
            yield recipe, chosen[row % len(chosen)], job.split, len(SPLITS) * row + place


def _make(
    recipe: Recipe, splits: Splits, missing: list[Job], provenance: str, ranks: Ranks
) -> None:
    """Make the missing shards, dealt over the ranks. All ranks learn of a failure shard by shard.

    Raises:
        UserError: on every rank; the disk is full, counts too high, a process was killed.
    """
    mine = missing[ranks.rank :: ranks.size]
    total = sum(len(job.rows) for job in mine)
    settings = recipe.settings
    if device() == "gpu":
        use_gpu(ranks.local_rank)
    with (
        _processes(1 if ranks.size > 1 else settings.workers) as run,
        progress(None, "simulating", total=total, rank=ranks.rank) as bar,
    ):
        samples = run(_tasks(recipe, splits, mine))
        for turn in range(-(-len(missing) // ranks.size)):
            with ranks.together("simulating"):
                if turn < len(mine):
                    job, made = mine[turn], []
                    for sample in islice(samples, len(job.rows)):
                        made.append(sample)
                        bar.update()
                    _write(job, made, settings, provenance)


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


@contextmanager
def _processes(count: int | None) -> Iterator[Callable[[Iterable[Task]], Iterator[Sample]]]:
    """Yield a function that simulates tasks in order, in this process or on `count` others."""
    count = count or len(os.sched_getaffinity(0))
    if count == 1 or device() == "gpu":
        with threadpool_limits(1):
            yield lambda tasks: (simulate_sample(*task) for task in tasks)
        return
    pool = ProcessPoolExecutor(count, get_context("fork"), _start_worker)
    try:
        yield lambda tasks: _in_order(pool, tasks, ahead=4 * count)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, tasks: Iterable[Task], ahead: int) -> Iterator[Sample]:
    """Results in the order of the tasks, with at most `ahead` of them waiting.

    Raises:
        UserError: a process was killed.
    """
    tasks = iter(tasks)
    waiting: deque[Future[Sample]] = deque()
    try:
        waiting.extend(pool.submit(simulate_sample, *task) for task in islice(tasks, ahead))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(simulate_sample, *task) for task in islice(tasks, 1))
    except BrokenProcessPool as error:
        raise UserError(
            "a simulating process was killed, perhaps for want of memory; run the command again "
            "to go on, with fewer simulate.workers"
        ) from error


def _start_worker() -> None:
    """One core a process; Ctrl-C is the parent's affair; no worker outlives its parent."""
    threadpool_limits(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _missing(jobs: list[Job], directory: Path, provenance: str) -> list[Job]:
    """The shards still to be made. A last, short shard is made again when the data set has grown.

    Raises:
        UserError: the directory holds shards of another data set, or more than are wanted.
    """
    wanted = {job.path: len(job.rows) for job in jobs}
    whole = set()
    for path in sorted(path for split in SPLITS for path in (directory / split).glob("*.h5")):
        shard = shards.open_shard(path)
        if shard.provenance != provenance:
            raise UserError(
                f"{path}: was made with other settings or materials "
                f"({shard.provenance or 'unknown'}, now {provenance}); choose another data.dir, "
                f"or remove {directory} to make it anew"
            )
        if shard.count > wanted.get(path, 0):
            raise UserError(
                f"{path}: holds more samples than simulate.samples asks for here "
                f"({shard.count}, wanted {wanted.get(path, 0)}); ask for more, or remove the file"
            )
        if shard.count == wanted[path]:
            whole.add(path)
    return [job for job in jobs if job.path not in whole]


def _clear_away(directory: Path, stale: bool) -> None:
    """Remove unfinished files that a killed run left, and a manifest that will be wrong.

    Raises:
        UserError: the directory cannot be written.
    """
    leftovers = [path for split in SPLITS for path in (directory / split).glob(".*.h5.*.tmp")]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in leftovers + ([directory / manifest.NAME] if stale else []):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written ({error.strerror}); set data.dir"
        ) from error


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
        "simulate": settings.model_dump(mode="json", exclude={"workers"}),
        "shards": records,
    }
