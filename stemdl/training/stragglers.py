"""Which ranks are slow: every step lasts as long as its slowest rank.

A rank's own work ends when its gradients are ready; what follows is waiting for the others. So a
slow rank is one that waits little: its own compute time is long, everyone else's wait is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

COUNT = 3  # ranks named
NOTEWORTHY = 1.1  # times the median from which a rank is worth naming


@dataclass(frozen=True)
class Effort:
    """Mean seconds a step of one rank: waiting for data, and its own computing."""

    host: str
    data: float
    compute: float


def report(efforts: Sequence[Effort]) -> list[str]:
    """Lines on the slowest ranks by compute and by data wait, in rank order given.

    One line if none is slower than NOTEWORTHY times the median (or, for data, waits longer than
    that part of a step).
    """
    compute = np.array([effort.compute for effort in efforts])
    data = np.array([effort.data for effort in efforts])
    step = float(np.median(compute) + np.median(data))
    lines = []
    for name, values, unusual in (
        ("compute", compute, compute > NOTEWORTHY * np.median(compute)),
        ("data wait", data, data - np.median(data) > (NOTEWORTHY - 1) * step),
    ):
        slowest = [rank for rank in np.argsort(-values, kind="stable") if unusual[rank]]
        if slowest:
            named = ", ".join(
                f"rank {rank} on {efforts[rank].host} {values[rank] * 1e3:.3g} ms"
                for rank in slowest[:COUNT]
            )
            lines.append(
                f"{len(slowest)} slow by {name} (median {np.median(values) * 1e3:.3g} ms a step): "
                f"{named}"
            )
    even = f"no stragglers among {len(efforts)} ranks: compute within {_spread(compute):.0%}"
    return lines or [even]


def _spread(values: np.ndarray) -> float:
    """How much the slowest is above the median, as a part of it."""
    return float(values.max() / max(np.median(values), 1e-12) - 1)
