"""Jobs that share a node's directory: one changes it at a time, and none purges what others use.

Beside the directory lie two files that hold locks of the operating system, which end with their
process, however it ends: `.NAME.use`, shared by all jobs that wait for the data or read them, and
`.NAME.lock`, for the one that copies. One rank of a node holds them for its node. The files stay:
a lock on a removed file would protect nobody.
"""

import fcntl
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stemdl.console import say
from stemdl.errors import UserError
from stemdl.ranks import Ranks


@contextmanager
def using(directory: Path, ranks: Ranks) -> Iterator[None]:
    """Keep every node's directory from being purged; it is made if it is not there.

    Raises:
        UserError: on all ranks: it cannot be written, or its file system has no locks.
    """
    with _opened(directory, "use", ranks) as use:
        with ranks.together(f"claiming {directory}"):
            if use is not None:
                try:
                    fcntl.flock(use, fcntl.LOCK_SH)  # waits at most as long as a purge takes
                except OSError as error:
                    raise UserError(
                        f"{directory}: files cannot be locked ({error.strerror}); set stage.dir to "
                        "the node's disk"
                    ) from error
                _make(directory)
        yield


@contextmanager
def alone(directory: Path, ranks: Ranks, heed: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold every node's directory against jobs that copy; wait while one of them has it.

    All or nothing, so that two jobs never wait for each other.

    Args:
        heed: called by all ranks together between tries; what it raises ends the wait.
    """
    with _opened(directory, "lock", ranks) as lock:
        waiting = False
        while not all(ranks.collect(lock is None or _locked(lock))):
            if lock is not None:
                fcntl.flock(lock, fcntl.LOCK_UN)
            if not waiting:
                say(f"stage: another job is staging to {directory}; waiting", rank=ranks.rank)
            waiting = True
            time.sleep(ranks.share(random.uniform(0.1, 0.5)))
            heed()
        yield


@contextmanager
def unused(directory: Path) -> Iterator[bool]:
    """Whether no job uses this node's directory; if so, none begins to while the block lasts.

    One rank of a node calls this.
    """
    use = _open(directory, "use")
    try:
        yield _locked(use)
    finally:
        os.close(use)


@contextmanager
def _opened(directory: Path, kind: str, ranks: Ranks) -> Iterator[int | None]:
    """The lock file's descriptor on one rank of each node; None on the others."""
    lock: int | None = None
    try:
        with ranks.together(f"locking {directory}"):
            if ranks.local_rank == 0:
                lock = _open(directory, kind)
        yield lock
    finally:
        if lock is not None:
            os.close(lock)


def _open(directory: Path, kind: str) -> int:
    _make(directory.parent)
    path = directory.with_name(f".{directory.name}.{kind}")
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{directory}: cannot be made ({error.strerror}); set stage.dir") from error


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
