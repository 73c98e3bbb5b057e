"""Signals by which batch systems say that a job is about to end."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def listening() -> Iterator[Callable[[], str | None]]:
    """Catch SIGNALS for the length of the block.

    Yields:
        A function that returns the name of the latest signal, such as "SIGTERM", or None. Only
        the main thread can catch signals: in another one it returns None.
    """
    received: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)

    catching = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, note) for number in catching}
    try:
        yield lambda: received[-1] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
