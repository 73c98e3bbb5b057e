"""Files that every node holds whole: read once for the job, and sent to the nodes over MPI."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from stemdl.console import progress
from stemdl.data import copying
from stemdl.data.copying import Item
from stemdl.errors import UserError
from stemdl.ranks import Ranks


def broadcast(
    missing: list[Item],
    source: Path,
    target: Path,
    block: int,
    ranks: Ranks,
    stopping: Callable[[], bool],
) -> None:
    """Send what is missing on any node to all that lack it; all ranks call this.

    Nothing fails here: a file that was not read, did not arrive right or could not be written is
    not there afterwards, and whoever copies it in the ordinary way finds out why.

    Args:
        missing: what this rank knows to be missing on its node.
        source: directory of the data set.
        target: this node's directory.
        block: bytes sent at a time.
        stopping: whether to end after the file at hand.
    """
    wanted = sorted({*chain(*ranks.collect(missing))}, key=lambda item: (item.split, item.name))
    leaders = ranks.comm.Split(min(ranks.local_rank, 1), ranks.rank)  # one rank of each node, rest
    if ranks.local_rank == 0:
        for item in progress(wanted, "broadcast", unit="shard", rank=ranks.rank):
            if any(leaders.allgather(stopping())):
                break
            _send(item, source, target, block, leaders)
    leaders.Free()


def _send(item: Item, source: Path, target: Path, block: int, leaders: Any) -> None:
    """Rank 0 of `leaders` reads a file; all that lack it write it."""
    source, target = (directory / item.split / item.name for directory in (source, target))
    blocks = _blocks(item, source, block, leaders)
    try:
        if not copying.is_staged(item, target):
            copying.receive(item, source, target, blocks)
    except (OSError, UserError):
        pass
    finally:
        for _ in blocks:  # the others need this rank in every block, also if its disk is full
            pass


def _blocks(item: Item, source: Path, block: int, leaders: Any) -> Iterator[memoryview]:
    """The file's blocks, as many as its size in the listing says, on every rank of `leaders`.

    What rank 0 cannot read is sent as it may be; the checksum tells.
    """
    buffer = memoryview(bytearray(block))
    with ExitStack() as stack:
        reader = None
        if leaders.Get_rank() == 0:
            with suppress(OSError):
                reader = stack.enter_context(open(source, "rb", buffering=0))
        for start in range(0, item.bytes, block):
            part = buffer[: min(block, item.bytes - start)]
            if reader is not None:
                with suppress(OSError):
                    _read_full(reader, part)
            leaders.Bcast(part, root=0)
            yield part
            if reader is not None:
                os.posix_fadvise(reader.fileno(), 0, reader.tell(), os.POSIX_FADV_DONTNEED)


def _read_full(reader: Any, part: memoryview) -> None:
    """Fill `part` from the file, or up to the file's end."""
    while part and (count := reader.readinto(part)):
        part = part[count:]
