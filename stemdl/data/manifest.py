"""DATA/manifest.json: every shard of a data set with its size and checksum.

A file cannot hold its own checksum, so the manifest does; with it a copy is verified byte by byte
without opening HDF5. A data set without a manifest still works: see `staging`.

    files.write_json(data / "manifest.json", SCHEMA, {"shards": [shard_record(p) for p in paths]})
"""

import zlib
from pathlib import Path
from typing import Any

from stemdl import files
from stemdl.data import shards
from stemdl.errors import UserError

SCHEMA = "stemdl.manifest/1"
NAME = "manifest.json"


def shard_record(path: str | Path) -> dict[str, Any]:
    """The manifest's entry for the shard DATA/SPLIT/NAME.h5.

    Returns:
        "path" relative to DATA, "bytes", "checksum" of the whole file, "count" of samples.
    """
    path = Path(path)
    return {
        "path": path.relative_to(path.parent.parent).as_posix(),
        "bytes": path.stat().st_size,
        "checksum": checksum(path),
        "count": shards.open_shard(path).count,
    }


def read_manifest(directory: str | Path) -> list[dict[str, Any]] | None:
    """The shard_records in DATA/manifest.json; None if there is no such file.

    Raises:
        UserError: it is not a manifest.
    """
    path = Path(directory) / NAME
    if not path.exists():
        return None
    records = files.read_json(path, SCHEMA).get("shards")
    keys = {"path", "bytes", "checksum", "count"}
    if not isinstance(records, list) or not all(keys <= set(record) for record in records):
        raise UserError(f"{path}: wanted a list 'shards' of records with {sorted(keys)}")
    return records


def checksum(path: Path, block: int = 8 << 20) -> str:
    """The whole file's checksum, such as "crc32:0a1b2c3d".

    CRC-32 finds what disks and networks do to data (any burst up to 32 bits, and all but one in
    4e9 of other changes) and runs faster than disks; it is no defence against forgery.
    """
    value = 0
    with open(path, "rb", buffering=0) as file:
        while content := file.read(block):
            value = zlib.crc32(content, value)
    return label(value)


def label(crc: int) -> str:
    return f"crc32:{crc:08x}"
