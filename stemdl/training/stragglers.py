"""Which ranks are slow: every step lasts as long as its slowest rank.

A rank's own work ends when its gradients are ready; what follows is waiting for the others. So a
slow rank is one that waits little: its own compute time is long, everyone else's wait is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stemdl import ranks as ranks_module
from stemdl.ranks import Ranks

COUNT = 3  # ranks named
STEPS = 10  # fewer are chance
NOTEWORTHY = 1.1  # times the median from which a rank is worth naming


@dataclass(frozen=True)
class Effort:
    """Mean seconds a step of one rank: waiting for data, and its own computing."""

    host: str
    data: float
    compute: float


class Efforts:
    """Keeps count of this rank's effort since the start of the job."""

    def __init__(self, clock: Mapping[str, float]) -> None:
        """`clock`: seconds in each phase so far, those of earlier jobs included."""
        self._begun = dict(clock)
        self._steps = self._waited = 0.0

    def count(self, steps: float, waited: float) -> None:
        """Steps done since the last call, and seconds that this rank waited in reductions."""
        self._steps += steps
        self._waited += waited

    def report(self, clock: Mapping[str, float], ranks: Ranks) -> list[str]:
        """Lines on the slowest of all ranks (a collective); none for one rank or few steps."""
        spent = {name: seconds - self._begun.get(name, 0.0) for name, seconds in clock.items()}
        # The clock counts the mean wait of all ranks as reduction; here each has its own.
        own = spent["compute"] + spent["reduction"] - self._waited
        steps = max(1.0, self._steps)
        found = ranks.collect(Effort(ranks_module.host(), spent["data"] / steps, own / steps))
        return report(found) if ranks.size > 1 and self._steps >= STEPS else []


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
                f"rank {rank} on {efforts[rank].host} {values[rank] * 1e3:.1f} ms"
                for rank in slowest[:COUNT]
            )
            lines.append(
                f"{len(slowest)} slow by {name} (median {np.median(values) * 1e3:.1f} ms a step): "
                f"{named}"
            )
    even = f"no stragglers among {len(efforts)} ranks: compute within {_spread(compute):.0%}"
    return lines or [even]


def _spread(values: np.ndarray) -> float:
    """How much the slowest is above the median, as a part of it."""
    return float(values.max() / max(np.median(values), 1e-12) - 1)
