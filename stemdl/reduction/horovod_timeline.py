"""What Horovod did in each step, from the timeline that it writes.

    profile = Profile(experiment, ranks); profile.after_step() after each step; profile.finish()
    for step in steps(read("runs/demo/profile/horovod.json")): ...

Horovod's file is Chrome's trace format (open it in chrome://tracing or ui.perfetto.dev): one
"process" for each tensor, with spans B ... E that nest, written by rank 0. A tensor's NEGOTIATE
span begins when the first rank has it and ends when all have; its ALLREDUCE span holds waiting in
the queue, copies into and out of the fusion buffer, and the reduction (MPI_, NCCL_ or GLOO_).
Source: Horovod's documentation, "Analyze Performance".
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stemdl import files
from stemdl.errors import UserError
from stemdl.ranks import Ranks
from stemdl.schema import Experiment

SCHEMA = "stemdl.profile/1"
WARM_UP = 3  # steps after the first, in which Horovod's cache fills
_REDUCING = ("MPI_ALLREDUCE", "NCCL_ALLREDUCE", "GLOO_ALLREDUCE", "NCCL_REDUCESCATTER")

Span = tuple[float, float]  # start and end [s]


@dataclass(frozen=True)
class Trip:
    """One tensor's way through one reduction. Times of Horovod's clock [s]."""

    tensor: str
    asked: float  # the first rank has it
    agreed: float  # all ranks have it
    reducing: tuple[Span, ...]
    done: float


@dataclass(frozen=True)
class StepReport:
    """One training step's communication [s], seen from rank 0."""

    tensors: int
    negotiation: float  # mean over tensors: from the first rank's readiness to the agreement
    queue: float  # mean over tensors: from the agreement to the start of the reduction
    allreduce: float  # time in which a reduction was on the network
    exposed: float  # from the readiness of the last tensor on the first rank to the end
    cycles: int  # in which Horovod's background thread looked for work
    agreements: int  # cycles in which something was agreed on
    operations: int  # reductions on the network, after fusion


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a timeline file, also of one that a running or killed job left unfinished.

    Raises:
        UserError: it cannot be read or is not a timeline.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    body = text.rstrip().removesuffix("]").rstrip().removesuffix(",")
    while body.startswith("["):
        try:
            return json.loads(body + "]")
        except ValueError:  # the last event was cut off
            body = body[: max(body.rfind("},{"), body.rfind("},\n{")) + 1]
    raise UserError(f"{path}: is not a timeline of Horovod, wanted a JSON list of events")


def trips(events: Iterable[dict[str, Any]]) -> tuple[list[Trip], list[float]]:
    """(every complete reduction of every tensor by its end, starts of background cycles [s])."""
    names: dict[int, str] = {}
    stacks: dict[int, list[tuple[str, float]]] = defaultdict(list)
    pending: dict[int, dict[str, Any]] = {}
    found, cycles = [], []
    for event in events:
        kind, process = event.get("ph"), event.get("pid", -1)
        time = event.get("ts", 0) * 1e-6
        if kind == "M" and event["name"] == "process_name":
            names[process] = event["args"].get("name", "")
        elif kind == "i" and event["name"] == "CYCLE_START":
            cycles.append(time)
        elif kind == "B":
            stacks[process].append((event["name"], time))
        elif kind == "E" and stacks[process]:
            name, start = stacks[process].pop()
            if name.startswith("NEGOTIATE"):
                pending[process] = {"asked": start, "agreed": time, "reducing": []}
            elif process in pending and name.startswith(_REDUCING):
                pending[process]["reducing"].append((start, time))
            elif process in pending and name == "ALLREDUCE":
                trip = pending.pop(process)
                trip["reducing"] = tuple(trip["reducing"])
                found.append(Trip(names.get(process, ""), done=time, **trip))
    return found, cycles


def steps(events: Iterable[dict[str, Any]], prefix: str = "gradients") -> list[StepReport]:
    """Reports of the steps in which every tensor whose name starts with `prefix` was reduced.

    Between two steps lies a forward pass, in which no gradient appears: n steps are parted by the
    n - 1 longest pauses. A step that the file has in part only is left out.
    """
    found, cycles = trips(events)
    ours = [trip for trip in found if trip.tensor.startswith(prefix) and trip.reducing]
    if not ours:
        return []
    ours.sort(key=lambda trip: trip.asked)
    repeats = Counter(trip.tensor for trip in ours)
    pauses = np.diff([trip.asked for trip in ours])
    cuts = np.sort(np.argsort(pauses)[::-1][: max(repeats.values()) - 1]) + 1
    parts = [ours[start:stop] for start, stop in pairwise([0, *cuts.tolist(), len(ours)])]
    whole = [part for part in parts if {trip.tensor for trip in part} == set(repeats)]
    return [_step(part, cycles) for part in whole]


def _step(together: Sequence[Trip], cycles: Sequence[float]) -> StepReport:
    spans = _union([span for trip in together for span in trip.reducing])
    first, last = min(trip.asked for trip in together), max(trip.done for trip in together)
    starts = np.array(cycles)
    agreed = np.searchsorted(starts, [trip.agreed for trip in together])
    begun, ended = np.searchsorted(starts, [first, last])
    return StepReport(
        tensors=len(together),
        negotiation=float(np.mean([trip.agreed - trip.asked for trip in together])),
        queue=float(np.mean([trip.reducing[0][0] - trip.agreed for trip in together])),
        allreduce=sum(end - start for start, end in spans),
        exposed=last - max(trip.asked for trip in together),
        cycles=int(ended - begun) + 1,
        agreements=len(set(agreed.tolist())),
        operations=len(spans),
    )


def _union(spans: Iterable[Span]) -> list[Span]:
    """Spans that overlap, joined: the tensors of one fused reduction have the same one."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


class Profile:
    """Has Horovod write a timeline of `train.profile_steps` steps, then reports on it.

    All ranks call the same methods. Needs Horovod started with a dynamic timeline
    (`levers.start(..., profile=True)`). Does nothing if there is nothing to profile.
    """

    def __init__(self, experiment: Experiment, ranks: Ranks) -> None:
        self.path = experiment.run / "profile" / "horovod.json"
        self.ranks = ranks
        self.wanted = experiment.train.profile_steps if ranks.size > 1 else 0
        self.seen = 0
        if self.wanted:
            with ranks.together("making the profile's folder"):
                self.path.parent.mkdir(parents=True, exist_ok=True)

    def after_step(self) -> None:
        """Count a step; start and stop the timeline where it is due."""
        if not self.wanted:
            return
        import horovod.tensorflow as hvd

        self.seen += 1
        if self.seen == WARM_UP:
            hvd.start_timeline(str(self.path), mark_cycles=True)
        elif self.seen == WARM_UP + self.wanted:
            hvd.stop_timeline()

    def finish(self) -> dict[str, Any] | None:
        """Write RUN/profile/reduction.json from the timeline; what it says, on rank 0.

        None on other ranks, and if the run was too short.
        """
        report: dict[str, Any] | None = None
        if not self.wanted or self.seen < WARM_UP + self.wanted:
            return None
        with self.ranks.together("reading Horovod's timeline"):
            found = (
                [asdict(each) for each in steps(read(self.path))] if self.ranks.rank == 0 else []
            )
            if found:
                mean = {key: float(np.mean([each[key] for each in found])) for key in found[0]}
                report = {"ranks": self.ranks.size, "mean": mean, "steps": found}
                files.write_json(self.path.with_name("reduction.json"), SCHEMA, report)
        return report
