"""How a run ends early: signals of batch systems, a wall-clock budget, or a rank that is gone."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stemdl import signals
from stemdl.ranks import Ranks

CHECK_SECONDS = 2.0


class Interruption:
    """Agrees between ranks, every few seconds, whether to checkpoint or to stop.

    A signal may reach some ranks only, and clocks differ; a decision taken on one rank alone would
    leave the others in a collective. So the ranks compare notes at the same steps, and rank 0's
    clock decides.
    """

    def __init__(self, ranks: Ranks, *, started: float, wall_limit: float | None) -> None:
        """`started`: time.time() at the start of the process [s]; `wall_limit` [s] or None."""
        self._ranks = ranks
        self._started = started
        self._limit = wall_limit
        self._received: Callable[[], str | None] = lambda: None
        self._next_check = 0
        self._pace = 1  # steps between checks
        self._last: tuple[float, int] | None = None  # time and step of the last check

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch SIGTERM, SIGUSR1 and SIGUSR2 for the length of the block."""
        with signals.listening() as self._received:
            yield

    def due(self, step: int) -> bool:
        """Do the ranks compare notes at this step? The same answer on every rank."""
        return step >= self._next_check

    def agree(self, step: int, reserve: float) -> tuple[str | None, float]:
        """Compare notes (a collective): why to stop, or None; and rank 0's time.time() [s].

        Args:
            step: steps done.
            reserve: time to keep for the last checkpoint within the wall limit [s].
        """
        notes = self._ranks.collect((self._received(), time.time()))
        now = notes[0][1]
        if self._last is not None and step > self._last[1]:
            seconds_a_step = (now - self._last[0]) / (step - self._last[1])
            wanted = int(CHECK_SECONDS / max(seconds_a_step, 1e-6))
            # At most doubled: a few quick steps say little of those between two validations.
            self._pace = max(1, min(wanted, 2 * self._pace))
        self._last = (now, step)
        self._next_check = step + self._pace
        received = [name for name, _ in notes if name is not None]
        if received:
            return received[0], now
        if self._limit is not None and now - self._started + reserve >= self._limit:
            return f"train.wall_limit ({self._limit:g} s)", now
        return None, now


class Watchdog:
    """Ends this process when nothing moves: a lost rank leaves the others waiting in MPI for ever.

    Horovod's own stall check sees a rank that is late, not one that is dead inside an MPI call.
    """

    def __init__(self, limit: float, ranks: Ranks) -> None:
        """`limit`: longest time between two beats [s]."""
        self._usual = self._limit = limit
        self._ranks = ranks
        self._beat = time.monotonic()
        self._doing = "starting"
        self._done = threading.Event()

    def beat(self, doing: str, *, patient: bool = False) -> None:
        """Something moved; `doing` names what comes next, which may take any time if `patient`."""
        self._beat, self._doing = time.monotonic(), doing
        self._limit = math.inf if patient else self._usual

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, daemon=True)
        self.beat(self._doing)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    def _watch(self) -> None:
        while not self._done.wait(min(1.0, self._usual / 4)):
            silent = time.monotonic() - self._beat
            if silent > self._limit:
                print(
                    f"stemdl: rank {self._ranks.rank}: {self._doing} has taken {silent:.0f} s "
                    f"(train.stall_limit is {self._usual:g} s): another rank is probably gone. "
                    "Stopping; run the same command again to resume from the last checkpoint.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
