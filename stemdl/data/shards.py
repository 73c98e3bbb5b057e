"""Shards: HDF5 files of 4D-STEM samples with the projected potentials that they come from.

    write("data/train/00000.h5", cbed=cbed, potential=potential, columns=columns, samples=samples,
          axes=Axes(scan_step=1, detector_step=0.0833, potential_pixel=0.25, potential_blur=0.3),
          creator="stemdl-data simulate")
    split = open_split("data", "train")
    shard, row = locate(split, 17)
    sample = read_samples(shard, [row])       # {"cbed": (1, Sy, Sx, Ky, Kx), "potential": ...}

Here are the shards of a split as one list of samples; `shard_reading` and `shard_writing` do one
file, and what callers need of them has its name here as well.
"""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stemdl import files, schema
from stemdl.data import records
from stemdl.data.shard_reading import (
    FINGERPRINT,
    FORMAT,
    Axes,
    Shard,
    fingerprint,
    open_records,
    open_shard,
    read_columns,
    read_samples,
    read_table,
    verify,
)
from stemdl.data.shard_writing import ALIGNMENT, DTYPES, write
from stemdl.data.tables import COLUMN, SAMPLE
from stemdl.errors import UserError
from stemdl.ranks import Ranks

__all__ = [
    "ALIGNMENT",
    "COLUMN",
    "DEAL",
    "DEAL_NAME",
    "DTYPES",
    "FINGERPRINT",
    "FORMAT",
    "SAMPLE",
    "Axes",
    "Shard",
    "Split",
    "fingerprint",
    "locate",
    "locate_all",
    "open_records",
    "open_shard",
    "open_source",
    "open_split",
    "read_columns",
    "read_deal",
    "read_samples",
    "read_table",
    "shard_paths",
    "source_paths",
    "verify",
    "write",
]

DEAL = "stemdl.deal/1"
DEAL_NAME = "deal.json"


@dataclass(frozen=True)
class Split:
    """The shards of one split, in the order of their names, as one list of samples."""

    directory: Path
    name: str
    shards: tuple[Shard, ...]
    node_part: bool = False  # only what this node holds: other nodes have other samples

    @cached_property
    def starts(self) -> np.ndarray:
        """Index of each shard's first sample, and the number of samples at the end."""
        return np.concatenate([[0], np.cumsum([shard.count for shard in self.shards])])

    @property
    def count(self) -> int:
        return int(self.starts[-1])

    @property
    def cbed_shape(self) -> tuple[int, int, int, int]:
        return self.shards[0].cbed_shape

    @property
    def potential_shape(self) -> tuple[int, int] | None:
        return self.shards[0].potential_shape

    @property
    def axes(self) -> Axes:
        return self.shards[0].axes

    def place(self, ranks: Ranks) -> tuple[int, int]:
        """This rank's number among the ranks that share these samples, and how many they are."""
        return _place(self.node_part, ranks)


@dataclass(frozen=True)
class _Listing:
    """What a directory says of a split, before any shard is opened."""

    folder: Path
    rows: list[tuple[str, int, int | None]]  # file, first row, rows (None: all that it has)
    staged: bool
    node_part: bool


def open_split(
    directory: str | Path,
    name: str,
    ranks: Ranks | None = None,
    *,
    calibration: schema.Records | None = None,
) -> Split:
    """Open the shards `directory`/`name`/*.h5; in a staged directory, those dealt to this node.

    Where there are none, the LMDB environments `directory`/batch_`name`_<n>.db of the published
    network, calibrated by `calibration`. Nothing is ever written to `directory`.

    Given `ranks`, all of them call this together (and not within `Ranks.together`): the directory
    is listed once and each header read once, and the ranks tell each other. A file system that
    27,600 ranks ask for 10,000 headers each answers nobody.

    Raises:
        UserError: no such directory, no shards, a bad shard, or shards of different shapes,
            dtypes or sampling; with `ranks`, on all of them.
    """
    directory, ranks = Path(directory), ranks or Ranks()
    listing = _agree_on_listing(directory, name, ranks)
    place, size = _place(listing.node_part, ranks)
    with ranks.together(f"opening the shards of {directory / name}"):
        own = {
            file: open_source(listing.folder / file, calibration)
            for file, *_ in listing.rows[place::size]
        }
    headers = {file: header for part in ranks.collect(own) for file, header in part.items()}
    first, *others = (headers[file] for file in sorted(headers))
    for other in others:
        _check_alike(first, other)
    shards = [
        replace(
            headers[file],
            path=listing.folder / file,  # another rank's copy may lie elsewhere
            first=start,
            count=headers[file].count if rows is None else rows,
        )
        for file, start, rows in listing.rows
    ]
    return Split(directory, name, tuple(shards), listing.node_part)


def open_source(path: Path, calibration: schema.Records | None) -> Shard:
    """`open_shard` for a shard, `open_records` for an LMDB environment."""
    if path.suffix == records.SUFFIX:
        return open_records(path, calibration or schema.Records())
    return open_shard(path)


def source_paths(directory: Path, name: str) -> list[Path]:
    """The shards of a split, or else its LMDB environments; empty if it has neither.

    Raises:
        UserError: no such data directory, or it cannot be read.
    """
    return shard_paths(directory, name) or records.paths(directory, name)


def shard_paths(directory: Path, name: str) -> list[Path]:
    """The shards of a split, sorted by name; empty if the data set lacks the split.

    Raises:
        UserError: no such data directory, or it cannot be read.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such data directory; set data.dir")
    try:
        return sorted(Path(each) for each in os.scandir(directory / name) if _is_shard(each.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{directory / name}: cannot be read ({error.strerror})") from error


def read_deal(directory: Path) -> dict[str, Any] | None:
    """What staging left in `directory`: which rows of which shards this node uses; None elsewhere.

    Returns:
        "splits": {name: [[file, first row, rows], ...]}, "parts": names of the splits of which
        other nodes have other samples.
    """
    path = directory / DEAL_NAME
    return files.read_json(path, DEAL) if path.exists() else None


def locate(split: Split, index: int) -> tuple[Shard, int]:
    """The shard that holds sample `index` of the split, and the row there."""
    return locate_all(split, np.array([index]))[0]


def locate_all(split: Split, indices: np.ndarray) -> list[tuple[Shard, int]]:
    """`locate` for many samples at once."""
    if not ((indices >= 0) & (indices < split.count)).all():
        raise IndexError(f"samples {indices} of {split.count}")
    places = np.searchsorted(split.starts, indices, side="right") - 1
    rows = indices - split.starts[places]
    return [(split.shards[place], row) for place, row in zip(places, rows.tolist(), strict=True)]


def _place(node_part: bool, ranks: Ranks) -> tuple[int, int]:
    """This rank and the number of ranks among those that share a split."""
    return (ranks.local_rank, ranks.local_size) if node_part else (ranks.rank, ranks.size)


def _agree_on_listing(directory: Path, name: str, ranks: Ranks) -> _Listing:
    """Rank 0 looks for all; where the data were staged, every rank looks on its own node."""
    listing: _Listing | None = None
    with ranks.together(f"listing {directory / name}"):
        if ranks.rank == 0:
            listing = _list(directory, name)
    listing = ranks.share(listing)
    assert listing is not None  # rank 0 has listed, or all have raised
    if listing.staged:
        with ranks.together(f"listing {directory / name}"):
            listing = _list(directory, name)
    return listing


def _list(directory: Path, name: str) -> _Listing:
    deal = read_deal(directory)
    rows: list[tuple[str, int, int | None]]
    folder = directory / name
    if deal is None:
        paths = source_paths(directory, name)
        folder = paths[0].parent if paths else folder
        rows = [(path.name, 0, None) for path in paths]
    else:
        rows = [(file, first, count) for file, first, count in deal["splits"].get(name, [])]
    if not rows:
        raise UserError(f"{folder}: no shards (*.h5); run stemdl-data simulate or import")
    return _Listing(folder, rows, deal is not None, deal is not None and name in deal["parts"])


def _check_alike(first: Shard, other: Shard) -> None:
    for key in ("cbed_shape", "cbed_dtype", "potential_shape", "potential_dtype", "axes"):
        wanted, found = getattr(first, key), getattr(other, key)
        if wanted != found:
            raise UserError(
                f"{other.path}: {key} is {found}, wanted {wanted} as in {first.path.name}; "
                "one split holds samples of one kind"
            )


def _is_shard(name: str) -> bool:
    return name.endswith(".h5") and not name.startswith(".")
