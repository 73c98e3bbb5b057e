"""What people see while they wait: lines and progress bars, from rank 0 alone."""

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def say(message: str, *, rank: int = 0) -> None:
    """Print one line at once on rank 0; other ranks stay silent. Keeps progress bars whole."""
    if rank == 0:
        tqdm.write(message, file=sys.stdout)
        sys.stdout.flush()


def duration(seconds: float) -> str:
    """3725 -> '1 h 2 min'; seconds below a minute."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def progress(
    items: Iterable[Item] | None,
    what: str,
    *,
    total: int | None = None,
    unit: str = "sample",
    rank: int = 0,
) -> Any:
    """A bar with rate and time left. Silent off a terminal and on ranks other than 0."""
    silent = rank != 0 or not sys.stderr.isatty()
    return tqdm(items, desc=what, total=total, unit=" " + unit, disable=silent, dynamic_ncols=True)
