"""One shard read: its header, its samples, and whether every byte is right.

Files open without HDF5's locks: one that another process holds, or that lies on a read-only file
system, reads as any other. No handle outlives the call that opened it, so forks are safe.
docs/data-format.md describes the layout for other programs.
"""

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import h5py
import numpy as np

from stemdl import schema
from stemdl.data import records
from stemdl.data.records import Header
from stemdl.data.tables import COLUMN, SAMPLE
from stemdl.errors import UserError

FORMAT = "stemdl.shard/1"
FINGERPRINT = "blocks:"


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
    records: Header | None = None  # the file is the published network's LMDB

    @property
    def cbed_bytes(self) -> int:
        """Bytes of one sample's patterns."""
        return math.prod(self.cbed_shape) * self.cbed_dtype.itemsize

    @property
    def potential_bytes(self) -> int:
        """Bytes of one sample's potential."""
        return math.prod(self.potential_shape or (0,)) * self.potential_dtype.itemsize


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


def open_records(path: str | Path, settings: schema.Records) -> Shard:
    """Read the header of an LMDB environment of the published network, as that of a shard.

    Raises:
        UserError: missing, damaged or truncated; or a key of data.records is missing or wrong.
    """
    path = Path(path)
    header = records.read_header(path)
    _, *detector = header.cbed.shape
    channels, *size = header.potential.shape
    if len(detector) != 2 or len(size) != 2 or channels != 1:
        raise UserError(
            f"{path}: holds {header.cbed.shape} -> {header.potential.shape}, wanted patterns "
            "(probes, Ky, Kx) -> potential (1, H, W)"
        )
    scan = records.scan_of(path, header, settings.scan, "set data.records.scan to [Sy, Sx]")
    for key, unit in (("scan_step", "Å"), ("detector_step", "1/Å")):
        if getattr(settings, key) is None:
            raise UserError(f"{path}: does not say its {key}; set data.records.{key} [{unit}]")
    assert settings.scan_step is not None and settings.detector_step is not None
    return Shard(
        path=path,
        count=header.count,
        cbed_shape=(*scan, detector[0], detector[1]),
        cbed_dtype=header.cbed.dtype,
        cbed_offset=None,
        potential_shape=(size[0], size[1]),
        potential_dtype=np.dtype("float32"),
        potential_offset=None,
        axes=Axes(
            scan_step=settings.scan_step,
            detector_step=settings.detector_step,
            potential_pixel=settings.scan_step * scan[0] / size[0],
            potential_blur=settings.potential_blur,
        ),
        cbed_unit="as stored",
        provenance="",
        records=header,
    )


def read_samples(shard: Shard, rows: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
    """The samples in `rows`, in that order and in the dtype stored.

    Returns:
        "cbed" (R, Sy, Sx, Ky, Kx), and "potential" (R, H, W) [V] if the shard has it.
    """
    if shard.records is not None:
        return _read_records(shard, rows)
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


def _read_records(shard: Shard, rows: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
    assert shard.records is not None and shard.potential_shape is not None
    found = {
        "cbed": np.empty((len(rows), *shard.cbed_shape), shard.cbed_dtype),
        "potential": np.empty((len(rows), *shard.potential_shape), shard.potential_dtype),
    }
    for place, row in enumerate(rows):
        target = {name: array[place] for name, array in found.items()}
        records.fill(shard.path, shard.records, shard.first + int(row), target)
    return found


def read_table(shard: Shard) -> np.ndarray:
    """The shard's (N,) SAMPLE records."""
    if shard.records is not None:  # it says nothing of its samples
        table = np.zeros(shard.count, SAMPLE)
        for name in ("energy", "semi_angle", "defocus", "cs", "thickness", "dose", "mean_z"):
            table[name] = np.nan
        table["index"] = np.arange(shard.count)
        return table
    with _reading(shard.path) as file:
        return file["sample"][shard.first : shard.first + shard.count].astype(SAMPLE)


def read_columns(shard: Shard, row: int) -> np.ndarray:
    """The COLUMN records of one sample."""
    if shard.records is not None:
        return np.zeros(0, COLUMN)
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
                    found = crc32(file[name][start : start + rows])
                except OSError:  # a damaged chunk does not decompress
                    found = None
                if found != wanted:
                    stop = min(start + rows, len(file[name]))
                    raise UserError(
                        f"{path}: {name} rows {start} to {stop - 1} are corrupt "
                        "(checksum differs); make or copy the file again"
                    )


def fingerprint(path: Path) -> str:
    """A checksum of the shard's checksums: tells contents apart without reading them."""
    with _reading(path) as file:
        stored = [file.attrs[name].tobytes() for name in sorted(file.attrs) if "crc32" in name]
    return f"{FINGERPRINT}{zlib.crc32(b''.join(stored)):08x}"


def crc32(array: np.ndarray) -> int:
    """CRC-32 over the raw bytes of an array in C order."""
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
        raise UserError(f"{path}: is no HDF5 file ({reason(error)})") from error
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
            why = reason(error) if isinstance(error, OSError) else f"{error} is missing"
            raise UserError(f"{path}: is damaged ({why}); make or copy it again") from error


def _truncated(path: Path, size: int) -> UserError:
    return UserError(f"{path}: truncated ({size} bytes are there); make or copy the file again")


def _check_extent(path: Path, dataset: h5py.Dataset | None) -> None:
    """HDF5 checks the size that its header states; this checks the arrays themselves."""
    if dataset is None or dataset.id.get_offset() is None:
        return
    size = path.stat().st_size
    if dataset.id.get_offset() + dataset.nbytes > size:
        raise _truncated(path, size)


def reason(error: OSError) -> str:
    """The error in one line; HDF5's have no strerror."""
    return error.strerror or " ".join(str(error).split())
