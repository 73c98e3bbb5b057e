"""Copies of one file that are known to be right, and stay known.

Beside each copy lies a receipt: what it is a copy of, its size and its checksum. A copy with a
fitting receipt is not read again; one whose time stamp has moved since is checked by content.
"""

import errno
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from stemdl import files
from stemdl.data import manifest, shards
from stemdl.errors import UserError

RECEIPT = "stemdl.receipt/1"


@dataclass(frozen=True)
class Item:
    """A shard to copy. `identity` is its checksum in the manifest, else its fingerprint."""

    split: str
    name: str
    bytes: int
    count: int
    identity: str


def is_staged(item: Item, target: Path) -> bool:
    """Whether `target` is a right copy of the item already."""
    try:
        status = target.stat()
        receipt = files.read_json(_receipt(target), RECEIPT)
    except (OSError, UserError):
        return False
    if (receipt["identity"], receipt["bytes"], status.st_size) != (
        item.identity,
        item.bytes,
        item.bytes,
    ):
        return False
    if receipt["mtime_ns"] == status.st_mtime_ns:
        return True
    if manifest.checksum(target) != receipt["checksum"]:
        return False
    _write_receipt(item, target, receipt["checksum"])
    return True


def copy(item: Item, source: Path, target: Path, block: int) -> None:
    """Copy a shard, checked on the way; `target` appears whole, durable and right, or not at all.

    Args:
        block: size of one read or write [bytes].

    Raises:
        UserError: the source is not what the manifest says or is corrupt; the target's disk is
            full or loses data; either cannot be read or written.
    """
    try:
        size = source.stat().st_size
        if size != item.bytes:
            raise UserError(
                f"{source}: has {size} bytes, wanted {item.bytes} as in the manifest; "
                "the source is truncated or was changed: make it again"
            )
        try:
            checksum = _attempt(item, source, target, block)
        except UserError:  # a second reading tells a passing fault from a corrupt source
            checksum = _attempt(item, source, target, block)
        _write_receipt(item, target, checksum)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(
                f"{target.parent}: disk full while copying {source.name} "
                f"({files.human_bytes(size)}); free space or change stage.dir"
            ) from error
        raise UserError(
            f"{source}: cannot be copied to {target.parent} ({error.strerror})"
        ) from error


def _attempt(item: Item, source: Path, target: Path, block: int) -> str:
    with files.appearing(target) as temporary:
        checksum = _pour(source, temporary, block)
        if item.identity.startswith(shards.FINGERPRINT):
            _compare_blocks(source, temporary)
        elif checksum != item.identity:
            raise UserError(
                f"{source}: checksum is {checksum}, wanted {item.identity} as in the manifest; "
                "the source is corrupt: make it again"
            )
    return checksum


def _compare_blocks(source: Path, copied: Path) -> None:
    """Without a manifest, read the copy and compare it with the shard's own checksums."""
    try:
        shards.verify(copied)
    except UserError as error:
        shards.verify(source)  # names the source, if that is where the fault lies
        raise UserError(f"{copied.parent}: the copy of {source} is corrupt; check the disk") from (
            error
        )


def _pour(source: Path, target: Path, block: int) -> str:
    """Copy bytes in large blocks; the checksum of what was read. Leaves no page cache behind."""
    checksum = 0
    buffer = memoryview(bytearray(block))
    with open(source, "rb", buffering=0) as reader, open(target, "wb", buffering=0) as writer:
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := reader.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
            rest = buffer[:count]
            while rest:
                rest = rest[writer.write(rest) :]
        os.fsync(writer.fileno())
        for file in (reader, writer):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return manifest.label(checksum)


def _receipt(target: Path) -> Path:
    return target.with_name(f".{target.name}.receipt")


def _write_receipt(item: Item, target: Path, checksum: str) -> None:
    content = {
        "identity": item.identity,
        "bytes": item.bytes,
        "checksum": checksum,
        "mtime_ns": target.stat().st_mtime_ns,
    }
    files.write_json(_receipt(target), RECEIPT, content)
