"""Calls spread over processes: `with processes(4) as run: results = run(function, arguments)`."""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from typing import Any, Protocol

from threadpoolctl import threadpool_limits

from stemdl.errors import UserError


class Run(Protocol):
    """Call a function with each tuple of arguments; the results come in the order of the calls."""

    def __call__(self, function: Any, calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]: ...


@contextmanager
def processes(count: int) -> Iterator[Run]:
    """Yield a `Run` in this process, if count is 1, or on `count` others. One core each."""
    if count == 1:
        with threadpool_limits(1):
            yield lambda function, calls: (function(*call) for call in calls)
        return
    pool = ProcessPoolExecutor(count, get_context("fork"), _start)
    try:
        yield lambda function, calls: _in_order(pool, function, calls, ahead=4 * count)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, function: Any, calls: Iterable[tuple[Any, ...]], ahead: int
) -> Iterator[Any]:
    """Results in the order of the calls, with at most `ahead` of them waiting.

    Raises:
        UserError: a process was killed.
    """
    calls = iter(calls)
    waiting: deque[Future[Any]] = deque()
    try:
        waiting.extend(pool.submit(function, *call) for call in islice(calls, ahead))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(function, *call) for call in islice(calls, 1))
    except BrokenProcessPool as error:
        raise UserError(
            "a simulating process was killed, perhaps for want of memory; run the command again "
            "to go on, with fewer simulate.workers"
        ) from error


def _start() -> None:
    """One core a process; Ctrl-C is the parent's affair; no worker outlives its parent."""
    threadpool_limits(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
