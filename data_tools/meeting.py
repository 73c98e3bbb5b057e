"""Ranks that work apart for hours meet again, or learn that one of them is lost.

    result = apart(ranks, "simulating", work, limit=600, left=left)

A collective waits for a lost rank for ever, where the launcher does not end the job. Here ranks
that are done wait as long as the others' work, which they see on the file system, goes on.
"""

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from stemdl.errors import EXIT_INTERRUPTED
from stemdl.ranks import Ranks, stop_all

Result = TypeVar("Result")
Left = Callable[[], dict[int, int]]

LOOK = 0.05  # [s] between two looks at the network
LOOKS_A_LIMIT = 10  # looks at the file system while the limit passes: few, for ranks are many


def apart(
    ranks: Ranks, doing: str, work: Callable[[], Result], *, limit: float, left: Left = dict
) -> Result:
    """Do this rank's `work`, which holds no collective, and wait for the other ranks.

    A rank that fails says so at once, and the others finish theirs before all of them raise. When a
    rank is lost, those that are done say so and end the job with exit code 75.

    Args:
        limit: longest wait in which no other rank gets on [s].
        left: what each rank has still to do, as seen from here.

    Raises:
        UserError, RuntimeError: on every rank, as from `Ranks.together`.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
        if ranks.size > 1:
            _tell(ranks, f"stops {doing} ({error}); the other ranks finish their part")
    if not _meet(ranks, limit, left):
        late = [f"rank {rank} ({count} left)" for rank, count in left().items() if count]
        _tell(
            ranks,
            f"{doing}: no other rank got on for {limit:.0f} s, lost: "
            f"{', '.join(late) or 'one of them'}. Finished shards are kept; the same command goes "
            "on from there",
        )
        stop_all(ranks, EXIT_INTERRUPTED)
    with ranks.together(doing):
        if failure is not None:
            raise failure
    return result


def _meet(ranks: Ranks, limit: float, left: Left) -> bool:
    """Wait for all ranks; False when none of the others got on for `limit` seconds."""
    if ranks.comm is None:
        return True
    arrival = ranks.comm.Ibarrier()
    before, since = None, time.monotonic()
    next_look = since + limit / LOOKS_A_LIMIT
    while not arrival.Test():
        time.sleep(LOOK)
        now = time.monotonic()
        if now < next_look:
            continue
        next_look = now + limit / LOOKS_A_LIMIT
        found = left()
        if found != before:
            before, since = found, now
        elif now - since > limit:
            return False
    return True


def _tell(ranks: Ranks, message: str) -> None:
    print(f"stemdl: rank {ranks.rank}: {message}", file=sys.stderr, flush=True)
