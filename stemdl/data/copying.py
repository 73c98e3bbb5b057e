"""Copies of one file that are known to be right, and stay known.

Beside each copy lies a receipt: what it is a copy of, its size and its checksum. A copy with a
fitting receipt is not read again; one whose time stamp has moved since is checked by content.
"""

import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stemdl import files
from stemdl.data import manifest, shards
from stemdl.errors import UserError

RECEIPT = "stemdl.receipt/1"
SUFFIX = ".receipt"


@dataclass(frozen=True)
class Item:
    """A shard to copy. `identity` is its checksum in the manifest, else its fingerprint."""

    split: str
    name: str
    bytes: int
    count: int
    identity: str


def is_staged(item: Item, target: Path, *, read: bool = False) -> bool:
    """Whether `target` is a right copy of the item already; `read` compares every byte.

    A copy that differs from its receipt loses it, so that nobody trusts it again.
    """
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
    moved = receipt["mtime_ns"] != status.st_mtime_ns
    if (moved or read) and manifest.checksum(target) != receipt["checksum"]:
        _receipt(target).unlink()
        return False
    if moved:
        _write_receipt(item, target, receipt["checksum"])
    return True


def check_copy(target: Path) -> None:
    """Compare every byte of a copy with its receipt.

    Raises:
        UserError: the copy or its receipt is missing, or they differ.
    """
    remedy = "run stemdl stage CONFIG --verify"
    if not target.exists():
        raise UserError(f"{target}: is in {shards.DEAL_NAME} but missing; {remedy}")
    if manifest.checksum(target) != files.read_json(_receipt(target), RECEIPT)["checksum"]:
        raise UserError(f"{target}: is not what was copied (checksum differs); {remedy}")


def copy(
    item: Item,
    source: Path,
    target: Path,
    block: int,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Copy a shard, checked on the way; `target` appears whole, durable and right, or not at all.

    Args:
        block: size of one read or write [bytes].
        between: called between blocks; what it raises ends the copy.

    Raises:
        UserError: the source is not what the manifest says or is corrupt; the target's disk is
            full or loses data; either cannot be read or written.
    """

    def attempt() -> None:
        with files.appearing(target) as temporary:
            checksum = _pour(source, temporary, block, between)
            _check(item, checksum, source, temporary)
        _write_receipt(item, target, checksum)

    try:
        size = source.stat().st_size
        if size != item.bytes:
            raise UserError(
                f"{source}: has {size} bytes, wanted {item.bytes} as in the manifest; "
                "the source is truncated or was changed: make it again"
            )
        try:
            attempt()
        except UserError:  # a second reading tells a passing fault from a corrupt source
            attempt()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(
                f"{target.parent}: disk full while copying {source.name} "
                f"({files.human_bytes(size)}); free space or change stage.dir"
            ) from error
        raise UserError(
            f"{source}: cannot be copied to {target.parent} ({error.strerror})"
        ) from error


def receive(item: Item, source: Path, target: Path, blocks: Iterable[memoryview]) -> None:
    """Make `target` of blocks of `source` that somebody else read; otherwise as `copy`.

    Raises:
        OSError, UserError: it did not arrive right, or cannot be written; `target` is not there.
    """
    with files.appearing(target) as temporary:
        checksum = _write(blocks, temporary)
        _check(item, checksum, source, temporary)
    _write_receipt(item, target, checksum)


def remove_copies(directory: Path) -> int:
    """Remove the copies in `directory` that have a receipt, and what a killed copy left.

    Returns:
        Bytes that are free now.
    """
    freed = 0
    for receipt in directory.glob(f".*{SUFFIX}"):
        target = receipt.with_name(receipt.name.removeprefix(".").removesuffix(SUFFIX))
        with suppress(FileNotFoundError):
            size = target.stat().st_size
            target.unlink()
            freed += size
        receipt.unlink()  # last: a copy without one would be nobody's
    remove_unfinished(directory)
    return freed


def remove_unfinished(directory: Path) -> None:
    """Remove the files that a killed copy left half-written in `directory`."""
    for left in directory.glob(".*.tmp"):
        left.unlink(missing_ok=True)


def _check(item: Item, checksum: str, source: Path, copied: Path) -> None:
    if item.identity.startswith(shards.FINGERPRINT):
        _compare_blocks(source, copied)
    elif checksum != item.identity:
        raise UserError(
            f"{source}: checksum is {checksum}, wanted {item.identity} as in the manifest; "
            "the source is corrupt: make it again"
        )


def _compare_blocks(source: Path, copied: Path) -> None:
    """Without a manifest, read the copy and compare it with the shard's own checksums."""
    try:
        shards.verify(copied)
    except UserError as error:
        shards.verify(source)  # names the source, if that is where the fault lies
        raise UserError(f"{copied.parent}: the copy of {source} is corrupt; check the disk") from (
            error
        )


def _pour(source: Path, target: Path, block: int, between: Callable[[], None]) -> str:
    """Copy bytes in large blocks; the checksum of what was read. Leaves no page cache behind."""
    return _write(_read(source, block, between), target)


def _read(source: Path, block: int, between: Callable[[], None]) -> Iterator[memoryview]:
    """The bytes of a file in blocks; each is good until the next is asked for."""
    buffer = memoryview(bytearray(block))
    with open(source, "rb", buffering=0) as reader:
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := reader.readinto(buffer):
            between()
            yield buffer[:count]
            os.posix_fadvise(reader.fileno(), 0, reader.tell(), os.POSIX_FADV_DONTNEED)


def _write(blocks: Iterable[memoryview], target: Path) -> str:
    """Write blocks to a file, durably; their checksum."""
    checksum = 0
    with open(target, "wb", buffering=0) as writer:
        for block in blocks:
            checksum = zlib.crc32(block, checksum)
            rest = block
            while rest:
                rest = rest[writer.write(rest) :]
            # The disk begins on this block while the next is read; what it has leaves the cache.
            os.posix_fadvise(writer.fileno(), 0, writer.tell(), os.POSIX_FADV_DONTNEED)
        os.fsync(writer.fileno())
        os.posix_fadvise(writer.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return manifest.label(checksum)


def _receipt(target: Path) -> Path:
    return target.with_name(f".{target.name}{SUFFIX}")


def _write_receipt(item: Item, target: Path, checksum: str) -> None:
    content = {
        "identity": item.identity,
        "bytes": item.bytes,
        "checksum": checksum,
        "mtime_ns": target.stat().st_mtime_ns,
    }
    files.write_json(_receipt(target), RECEIPT, content)
