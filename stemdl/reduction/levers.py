"""Horovod's own levers, set from the experiment file, and its start.

Sources: Horovod 0.28 documentation ("Tensor Fusion", "Autotune", "Timeline", "Stalled ranks");
the response cache is the bitvector of Laanait et al. (2019).
"""

import os

from stemdl.errors import UserError
from stemdl.ranks import Ranks
from stemdl.schema import Reduction

MIB = 2**20


def environment(settings: Reduction, *, profile: bool = False) -> dict[str, str]:
    """HOROVOD_* variables for `settings`. Read by Horovod once, when it starts.

    `profile`: a timeline can be started and stopped later.
    """
    # A group is one tensor to Horovod: groups stay apart if it fuses nothing.
    fuse = settings.group_fusion or settings.planner == "none"
    fusion = settings.fusion_threshold if fuse else 0
    variables = {
        "HOROVOD_CACHE_CAPACITY": str(settings.cache_capacity),
        "HOROVOD_CYCLE_TIME": str(settings.cycle_time),
        "HOROVOD_FUSION_THRESHOLD": str(int(fusion * MIB)),
        "HOROVOD_HIERARCHICAL_ALLREDUCE": str(int(settings.hierarchical)),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(settings.stall_warning),
        # Horovod's default waits for a missing rank for ever.
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(settings.stall_shutdown),
    }
    if settings.timeline is not None:
        variables["HOROVOD_TIMELINE"] = str(settings.timeline)
        variables["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
    elif profile:
        variables["HOROVOD_TIMELINE"] = "DYNAMIC"
    return variables


def start(settings: Reduction, ranks: Ranks, *, profile: bool = False) -> None:
    """Start Horovod on `ranks`. Alone there is nothing to reduce, and Horovod stays out of it.

    Raises:
        UserError: Horovod is not built, or counts other ranks than the launcher.
    """
    if ranks.size == 1:
        return
    os.environ.update(environment(settings, profile=profile))
    try:
        import horovod.tensorflow as hvd

        hvd.init(comm=ranks.comm)
    except ImportError as error:
        raise UserError(f"Horovod is not usable ({error}): run scripts/setup") from error
    if (hvd.rank(), hvd.size()) != (ranks.rank, ranks.size):
        raise UserError(
            f"Horovod counts {hvd.size()} ranks, the launcher {ranks.size}: "
            "both must use the same MPI; run scripts/setup with MPICXX set to the system's mpicxx"
        )
