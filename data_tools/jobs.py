"""Which shards a data set has, which samples are in them, and which of them are finished.

jobs = all_jobs(settings, directory)               # fixed by the settings alone
kept = finished(jobs, directory, provenance, ranks)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from data_tools.sample import Recipe
from data_tools.structures import SPLITS, Material
from stemdl import schema
from stemdl.data import manifest, shards
from stemdl.errors import UserError
from stemdl.ranks import Ranks

Splits = dict[str, list[Material]]
Task = tuple[Recipe, Material, str, int]  # the arguments of simulate_sample
Record = dict[str, Any]  # a shard in the manifest


@dataclass(frozen=True)
class Job:
    """One shard file to make."""

    path: Path
    split: str
    rows: range  # of the split


def all_jobs(settings: schema.Simulate, directory: Path) -> list[Job]:
    """All shards of the data set: which samples are in which file is fixed."""
    jobs = []
    for split in SPLITS:
        count = getattr(settings.samples, split)
        for number, first in enumerate(range(0, count, settings.shard_samples)):
            rows = range(first, min(first + settings.shard_samples, count))
            jobs.append(Job(directory / split / f"{number:05d}.h5", split, rows))
    return jobs


def tasks(recipe: Recipe, splits: Splits, job: Job) -> Iterator[Task]:
    """Every sample of a shard. A split goes round its materials, so all have their share."""
    place, chosen = SPLITS.index(job.split), splits[job.split]
    for row in job.rows:
        yield recipe, chosen[row % len(chosen)], job.split, len(SPLITS) * row + place


def shard_files(directory: Path) -> list[Path]:
    """The shards that are there now."""
    return sorted(path for split in SPLITS for path in (directory / split).glob("*.h5"))


def finished(
    jobs: list[Job], directory: Path, provenance: str, ranks: Ranks
) -> dict[Path, Record | None]:
    """The whole shards, with the manifest's records where a manifest lists them. A collective.

    A last, short shard is not whole when the data set has grown. Each rank opens its part.

    Raises:
        UserError: on every rank; the directory holds shards of another data set, or more than are
            wanted, or one that cannot be read.
    """
    there: list[Path] = []
    listed: dict[Path, Record] = {}
    with ranks.together("looking for finished shards"):
        if ranks.rank == 0:
            there = shard_files(directory)
            for record in manifest.read_manifest(directory) or ():
                listed[directory / record["path"]] = record
    there, listed = ranks.share((there, listed))
    opened = []
    with ranks.together("looking for finished shards"):
        for path in there[ranks.rank :: ranks.size]:
            shard = shards.open_shard(path)
            opened.append((path, shard.provenance, shard.count, path.stat().st_size))
    wanted = {job.path: len(job.rows) for job in jobs}
    whole: dict[Path, Record | None] = {}
    for path, found, count, size in sorted(chain(*ranks.collect(opened))):
        if found != provenance:
            raise UserError(
                f"{path}: was made with other settings or materials "
                f"({found or 'unknown'}, now {provenance}); choose another data.dir, "
                f"or remove {directory} to make it anew"
            )
        if count > wanted.get(path, 0):
            raise UserError(
                f"{path}: holds more samples than simulate.samples asks for here "
                f"({count}, wanted {wanted.get(path, 0)}); ask for more, or remove the file"
            )
        if count == wanted[path]:
            record = listed.get(path, {})
            is_that = (record.get("count"), record.get("bytes")) == (count, size)
            whole[path] = record if is_that else None
    return whole


def recorded(kept: dict[Path, Record | None], ranks: Ranks) -> list[Record]:
    """This rank's part of the records of finished shards, for the manifest.

    What a manifest listed is taken from there: it knew the bytes when they were made. Other shards,
    which a killed run left, are compared with their own checksums before they are listed.

    Raises:
        UserError: on this rank; a shard is corrupt.
    """
    known = [record for record in kept.values() if record is not None]
    unlisted = [path for path, record in kept.items() if record is None]
    for path in unlisted[ranks.rank :: ranks.size]:
        shards.verify(path)
    return known[ranks.rank :: ranks.size] + [
        manifest.shard_record(path) for path in unlisted[ranks.rank :: ranks.size]
    ]


def clear_away(directory: Path, stale: bool) -> None:
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
