"""The shard: one HDF5 file of 4D-STEM samples with the projected potentials they come from.

    write("data/train/00000.h5", cbed=cbed, potential=potential, columns=columns, samples=samples,
          axes=Axes(scan_step=1, detector_step=0.0833, potential_pixel=0.25, potential_blur=0.3),
          creator="stemdl-data simulate")
    split = open_split("data", "train")
    shard, row = locate(split, 17)
    sample = read_samples(shard, [row])       # {"cbed": (1, Sy, Sx, Ky, Kx), "potential": ...}

Datasets are contiguous unless compressed, so that a sample is one byte range and readers need no
HDF5. Files open without HDF5's locks: one that another process holds, or that lies on a read-only
file system, reads as any other. No handle outlives the call that opened it, so forks are safe.
docs/data-format.md describes the layout for other programs.
"""

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from stemdl import files
from stemdl.data.tables import COLUMN, SAMPLE
from stemdl.errors import UserError
from stemdl.ranks import Ranks

FORMAT = "stemdl.shard/1"
FINGERPRINT = "blocks:"
DEAL = "stemdl.deal/1"
DEAL_NAME = "deal.json"
DTYPES = ("float16", "float32", "uint16")
BLOCK_BYTES = 8 << 20  # bytes under one checksum, about
ALIGNMENT = 4096  # datasets begin on a page of the file system


@dataclass(frozen=True)
class Axes:
    """Sampling of a shard's axes."""

    scan_step: float  # [Å] between probe positions
    detector_step: float  # [1/Å] between detector pixels
    potential_pixel: float  # [Å]
    potential_blur: float  # [Å] Gaussian sigma applied to the potential


@dataclass(frozen=True)
class Shard:
    """The header of a shard file. Offsets are bytes from the file's start; None if chunked."""

    path: Path
    count: int
    cbed_shape: tuple[int, int, int, int]  # (Sy, Sx, Ky, Kx)
    cbed_dtype: np.dtype
    cbed_offset: int | None
    potential_shape: tuple[int, int] | None  # (H, W); None in measured data
    potential_dtype: np.dtype
    potential_offset: int | None
    axes: Axes
    cbed_unit: str
    provenance: str
    first: int = 0  # row of the file at which these samples begin

    @property
    def cbed_bytes(self) -> int:
        """Bytes of one sample's patterns."""
        return math.prod(self.cbed_shape) * self.cbed_dtype.itemsize

    @property
    def potential_bytes(self) -> int:
        """Bytes of one sample's potential."""
        return math.prod(self.potential_shape or (0,)) * self.potential_dtype.itemsize


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
        return (ranks.local_rank, ranks.local_size) if self.node_part else (ranks.rank, ranks.size)


def write(
    path: str | Path,
    *,
    cbed: np.ndarray,
    potential: np.ndarray | None,
    columns: np.ndarray,
    samples: np.ndarray,
    axes: Axes,
    creator: str,
    provenance: str = "",
    cbed_unit: str = "fraction of the beam",
    compression: Literal["none", "gzip"] = "none",
) -> None:
    """Write a shard; it appears under its name complete and durable, or not at all.

    The same arguments give the same bytes: nothing in the file depends on time or place.

    Args:
        cbed: (N, Sy, Sx, Ky, Kx) of one of DTYPES [cbed_unit].
        potential: (N, H, W) float32, projected potential over the thickness [V]; None if unknown.
        columns: COLUMN records in any order; `sample` is a row of this shard.
        samples: (N,) SAMPLE records.
        creator: program that made the data.
        provenance: free text that tells data sets apart, such as a hash of the simulation's keys.
        compression: "gzip" makes an archive: smaller, but samples are no longer byte ranges.

    Raises:
        ValueError: the arrays do not fit each other.
        UserError: the disk is full or the place cannot be written.
    """
    path = Path(path)
    tables = {"sample": samples, "columns": columns[np.argsort(columns["sample"], kind="stable")]}
    arrays = {"cbed": cbed} | ({} if potential is None else {"potential": potential})
    _check(arrays, tables)
    try:
        with (
            files.appearing(path) as temporary,
            h5py.File(
                temporary,
                "w",
                locking=False,
                alignment_threshold=ALIGNMENT,
                alignment_interval=ALIGNMENT,
            ) as file,
        ):
            file.attrs.update(
                format=FORMAT,
                creator=creator,
                provenance=provenance,
                cbed_unit=cbed_unit,
                potential_unit="V",
                **{key: float(value) for key, value in asdict(axes).items()},
            )
            for name, array in (arrays | tables).items():
                layout: dict[str, Any] = {}
                if compression == "gzip" and name in arrays:
                    layout = {"chunks": (1, *array.shape[1:]), "compression": "gzip"}
                file.create_dataset(name, data=array, **layout)
                _describe(file, name, axes)
                rows = _rows_a_block(array)
                file.attrs[f"{name}_crc32_rows"] = rows
                file.attrs[f"{name}_crc32"] = _checksums(array, rows)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({_reason(error)})") from error


def open_shard(path: str | Path) -> Shard:
    """Read the header of a shard, and check from the file's size that all of it is there.

    Raises:
        UserError: missing, unreadable, truncated, or not a stemdl shard.
    """
    path = Path(path)
    with _reading(path) as file:
        cbed = file["cbed"]
        potential = file.get("potential")
        for dataset in (cbed, potential):
            _check_extent(path, dataset)
        return Shard(
            path=path,
            count=cbed.shape[0],
            cbed_shape=cbed.shape[1:],
            cbed_dtype=cbed.dtype,
            cbed_offset=cbed.id.get_offset(),
            potential_shape=None if potential is None else potential.shape[1:],
            potential_dtype=np.dtype("float32") if potential is None else potential.dtype,
            potential_offset=None if potential is None else potential.id.get_offset(),
            axes=Axes(*(float(file.attrs[field.name]) for field in fields(Axes))),
            cbed_unit=str(file.attrs["cbed_unit"]),
            provenance=str(file.attrs["provenance"]),
        )


def read_samples(shard: Shard, rows: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
    """The samples in `rows`, in that order and in the dtype stored.

    Returns:
        "cbed" (R, Sy, Sx, Ky, Kx), and "potential" (R, H, W) [V] if the shard has it.
    """
    with _reading(shard.path) as file:
        found = {}
        for name in ("cbed", "potential"):
            if name in file:
                dataset = file[name]
                out = np.empty((len(rows), *dataset.shape[1:]), dataset.dtype)
                for place, row in enumerate(rows):
                    dataset.read_direct(out, np.s_[shard.first + int(row)], np.s_[place])
                found[name] = out
        return found


def read_table(shard: Shard) -> np.ndarray:
    """The shard's (N,) SAMPLE records."""
    with _reading(shard.path) as file:
        return file["sample"][shard.first : shard.first + shard.count].astype(SAMPLE)


def read_columns(shard: Shard, row: int) -> np.ndarray:
    """The COLUMN records of one sample."""
    with _reading(shard.path) as file:
        columns = file["columns"][:].astype(COLUMN)
    return columns[columns["sample"] == shard.first + row]


def verify(path: str | Path) -> None:
    """Compare every row block with its checksum.

    Raises:
        UserError: names the file, the dataset and the rows of the first block that differs.
    """
    shard = open_shard(path)
    with _reading(shard.path) as file:
        for name in ("cbed", "potential", "sample", "columns"):
            if name not in file:
                continue
            rows = int(file.attrs[f"{name}_crc32_rows"])
            stored = file.attrs[f"{name}_crc32"]
            for block, wanted in enumerate(stored):
                start = block * rows
                try:
                    found = _crc32(file[name][start : start + rows])
                except OSError:  # a damaged chunk does not decompress
                    found = None
                if found != wanted:
                    stop = min(start + rows, len(file[name]))
                    raise UserError(
                        f"{path}: {name} rows {start} to {stop - 1} are corrupt "
                        "(checksum differs); make or copy the file again"
                    )


def open_split(directory: str | Path, name: str) -> Split:
    """Open the shards `directory`/`name`/*.h5; in a staged directory, those dealt to this node.

    Raises:
        UserError: no such directory, no shards, a bad shard, or shards of different shapes,
            dtypes or sampling.
    """
    directory = Path(directory)
    deal = read_deal(directory)
    if deal is None:
        shards = tuple(open_shard(path) for path in shard_paths(directory, name))
    else:
        shards = tuple(
            replace(open_shard(directory / name / file), first=first, count=count)
            for file, first, count in deal["splits"].get(name, [])
        )
    if not shards:
        raise UserError(f"{directory / name}: no shards (*.h5); run stemdl-data simulate or import")
    for shard in shards[1:]:
        _check_alike(shards[0], shard)
    return Split(directory, name, shards, node_part=deal is not None and name in deal["parts"])


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


def fingerprint(path: Path) -> str:
    """A checksum of the shard's checksums: tells contents apart without reading them."""
    with _reading(path) as file:
        stored = [file.attrs[name].tobytes() for name in sorted(file.attrs) if "crc32" in name]
    return f"{FINGERPRINT}{zlib.crc32(b''.join(stored)):08x}"


def _check(arrays: dict[str, np.ndarray], tables: dict[str, np.ndarray]) -> None:
    cbed, samples, columns = arrays["cbed"], tables["sample"], tables["columns"]
    if cbed.ndim != 5 or cbed.dtype.name not in DTYPES or 0 in cbed.shape:
        raise ValueError(f"cbed: wanted (N, Sy, Sx, Ky, Kx) of {DTYPES}, found {cbed.shape}")
    if samples.dtype != SAMPLE or samples.shape != cbed.shape[:1]:
        raise ValueError(f"samples: wanted {cbed.shape[:1]} of SAMPLE, found {samples.shape}")
    if columns.dtype != COLUMN or not np.isin(columns["sample"], np.arange(len(cbed))).all():
        raise ValueError("columns: wanted COLUMN records of rows in this shard")
    potential = arrays.get("potential")
    if potential is not None and (
        potential.ndim != 3 or potential.dtype != np.float32 or len(potential) != len(cbed)
    ):
        raise ValueError(f"potential: wanted ({len(cbed)}, H, W) float32, found {potential.shape}")


def _describe(file: h5py.File, name: str, axes: Axes) -> None:
    """Root attributes that name each axis of an array with its sampling and unit."""
    scan, detector, pixel = axes.scan_step, axes.detector_step, axes.potential_pixel
    described = {
        "cbed": (
            ("sample", "scan_y", "scan_x", "detector_ky", "detector_kx"),
            (1.0, scan, scan, detector, detector),
            ("", "Å", "Å", "1/Å", "1/Å"),
        ),
        "potential": (("sample", "y", "x"), (1.0, pixel, pixel), ("", "Å", "Å")),
    }
    if name in described:
        names, sampling, units = described[name]
        file.attrs[f"{name}_axes"] = names
        file.attrs[f"{name}_sampling"] = sampling
        file.attrs[f"{name}_units"] = units


def _rows_a_block(array: np.ndarray) -> int:
    row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    return max(1, BLOCK_BYTES // row_bytes)


def _checksums(array: np.ndarray, rows: int) -> np.ndarray:
    blocks = (array[start : start + rows] for start in range(0, len(array), rows))
    return np.array([_crc32(block) for block in blocks], np.uint32)


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data)


@contextmanager
def _reading(path: Path) -> Iterator[h5py.File]:
    """A shard open for reading. Defects that the file's header shows are UserErrors."""
    try:
        size = os.stat(path).st_size
        file = h5py.File(path, "r", locking=False)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        if "truncated file" in str(error):
            raise _truncated(path, size) from error
        raise UserError(f"{path}: is no HDF5 file ({_reason(error)})") from error
    with file:
        found = file.attrs.get("format")
        if found != FORMAT:
            raise UserError(
                f"{path}: format is {found!r}, wanted {FORMAT!r}; "
                "bring other files in with stemdl-data import"
            )
        try:
            yield file
        except (OSError, KeyError) as error:
            reason = _reason(error) if isinstance(error, OSError) else f"{error} is missing"
            raise UserError(f"{path}: is damaged ({reason}); make or copy it again") from error


def _truncated(path: Path, size: int) -> UserError:
    return UserError(f"{path}: truncated ({size} bytes are there); make or copy the file again")


def _check_extent(path: Path, dataset: h5py.Dataset | None) -> None:
    """HDF5 checks the size that its header states; this checks the arrays themselves."""
    if dataset is None or dataset.id.get_offset() is None:
        return
    size = path.stat().st_size
    if dataset.id.get_offset() + dataset.nbytes > size:
        raise _truncated(path, size)


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


def _reason(error: OSError) -> str:
    return error.strerror or " ".join(str(error).split())
