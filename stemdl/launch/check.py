"""stemdl check CONFIG: everything a job needs, looked at on the job's own ranks before it runs.

    mpirun -n 2 stemdl check configs/demo.yaml      # or srun, jsrun: as the training will start

A line for each check, ok or RED with what to do; red in one place costs seconds here and hours in
the queue otherwise. What ranks find alike is told once.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stemdl import logs
from stemdl.console import say
from stemdl.errors import UserError
from stemdl.launch import checks
from stemdl.ranks import Ranks, host
from stemdl.schema import Experiment


@dataclass(frozen=True)
class Finding:
    """The outcome of one check over all ranks."""

    name: str
    faults: list[str]  # lines for people; none if all is well
    detail: str  # rank 0's figures


def check(experiment: Experiment, ranks: Ranks) -> bool:
    """Run all checks and print them on rank 0; return whether all is well, on all ranks."""
    say(f"check: {checks.layout(ranks)}", rank=ranks.rank)
    well = True
    for name, look in CHECKS.items():
        finding = examine(name, look, experiment, ranks)
        well = well and not finding.faults
        mark = "RED" if finding.faults else "ok "
        for line in finding.faults or [finding.detail]:
            say(f"  {mark} {name:<10} {line}", rank=ranks.rank)
    say(f"check: {'all is well' if well else 'mend what is red first'}", rank=ranks.rank)
    return well


Check = Callable[[Experiment, Ranks], str]


def examine(name: str, look: Check, experiment: Experiment, ranks: Ranks) -> Finding:
    """Run one check on all ranks; a UserError on any of them is a fault."""
    detail, fault = "", None
    try:
        detail = look(experiment, ranks)
    except UserError as error:
        fault = str(error)
    found = ranks.collect((host(), fault))
    faults = logs.aggregate(
        (rank, where, text) for rank, (where, text) in enumerate(found) if text is not None
    )
    return Finding(name, faults, detail)


CHECKS: dict[str, Check] = {
    "versions": checks.versions,
    "devices": checks.devices,
    "clocks": checks.clocks,
    "allreduce": checks.allreduce,
    "data": checks.data,
    "storage": checks.storage,
    "run": checks.run,
}
