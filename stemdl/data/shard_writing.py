"""One shard written: the same content gives the same bytes, whole and durable or not at all.

Datasets are contiguous unless compressed, and begin on a page, so that a sample is one byte range
and readers need no HDF5.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from stemdl import files
from stemdl.data.shard_reading import FORMAT, Axes, crc32, reason
from stemdl.data.tables import COLUMN, SAMPLE
from stemdl.errors import UserError

DTYPES = ("float16", "float32", "uint16")
BLOCK_BYTES = 8 << 20  # bytes under one checksum, about
ALIGNMENT = 4096  # datasets begin on a page of the file system


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
        raise UserError(f"{path}: cannot be written ({reason(error)})") from error


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
    return np.array([crc32(block) for block in blocks], np.uint32)
