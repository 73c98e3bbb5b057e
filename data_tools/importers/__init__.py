"""Other people's 4D-STEM data: read as it is, calibrated, and cut into shards.

    with importers.read(path, given) as scans:      # unread; patterns stream by rows of the scan
        scans[0].shape, scans[0].known, scans[0].rows(0, 2)

    `convert.convert` writes shards, on the sampling that a trained network expects if one is named.

docs/import.md lists the formats and says what each of them leaves open.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import h5py

from data_tools.importers.empad import open_empad
from data_tools.importers.hdf5 import open_hdf5
from data_tools.importers.records import open_records
from data_tools.importers.rosetta import open_rosetta, plugins
from data_tools.importers.scan import Given, Scan, arranged
from data_tools.importers.zarrs import open_zarr
from stemdl.errors import UserError

HDF5 = (".h5", ".hdf5", ".emd", ".de5", ".py4dstem")


@contextmanager
def read(path: str | Path, given: Given | None = None) -> Iterator[list[Scan]]:
    """The scans of a file (or folder), unread, arranged as the user says; open inside the block.

    Raises:
        UserError: missing, damaged, of no known format, or something is to be said that is not.
    """
    path, given = Path(path), given or Given()
    if not path.exists():
        raise UserError(f"{path}: no such file")
    with ExitStack() as stack:
        scans = _opener(path)(path, given, stack)
        if not scans:
            raise UserError(f"{path}: has no patterns")
        yield [arranged(scan, given) for scan in scans]


def _opener(path: Path) -> Callable[[Path, Given, ExitStack], list[Scan]]:
    """What reads a path, by its name and its first bytes."""
    suffix = path.suffix.lower()
    if suffix == ".zarr" or (path.is_dir() and any(path.glob("zarr.json"))):
        return open_zarr
    if suffix in (".db", ".lmdb", ".mdb") or (path / "data.mdb").exists():
        return open_records
    if suffix == ".raw":
        return open_empad
    if suffix in HDF5:
        return open_hdf5
    if suffix and plugins(path):
        return open_rosetta
    if path.is_file() and h5py.is_hdf5(path):
        return open_hdf5
    raise UserError(
        f"{path}: is of no format that is known by its name; wanted HDF5 (.h5, .emd), .zarr, LMDB "
        "(.db), EMPAD (.raw), .mib, .dm3, .dm4, .hspy, .zspy or another that rosettasciio reads"
    )
