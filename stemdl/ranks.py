"""Which rank am I, and how do all ranks learn that one of them failed.

Needs MPI but not TensorFlow: staging and simulation start quickly. A process that no launcher
started is alone and never touches MPI (login nodes often forbid it).
"""

import os
import socket
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from stemdl.errors import UserError

# Each launcher with the variables that hold rank and size, innermost first: an mpirun inside a step
# of srun counts, not the step. Spectrum MPI has Open MPI's variables. SLURM_STEP_NUM_TASKS, unlike
# SLURM_NTASKS, is set in steps alone and not in the batch script. Sources: IBM "jsrun command",
# Open MPI's FAQ, MPICH's Hydra, flux-environment(7), srun(1).
_LAUNCHERS = (
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("mpirun (Open MPI or Spectrum MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("a PMI launcher (MPICH's mpirun, srun --mpi=pmi2)", "PMI_RANK", "PMI_SIZE"),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("a PMIx launcher", "PMIX_RANK", None),
)


@dataclass(frozen=True)
class Launched:
    """What a launcher says of a process that it started; `size` is None where it does not say."""

    launcher: str
    rank: int
    size: int | None


@dataclass(frozen=True)
class Ranks:
    """This process among the others. `comm` is None when it is alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    comm: Any = None

    def share(self, value: Any) -> Any:
        """Rank 0's `value` (any picklable object), on every rank."""
        return value if self.comm is None else self.comm.bcast(value, root=0)

    def collect(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        return [value] if self.comm is None else self.comm.allgather(value)

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum of every rank's array, the same bits on every rank. Memory: one array a rank."""
        if self.comm is None:
            return values
        result = np.empty_like(values)
        self.comm.Reduce(values, result, root=0)
        self.comm.Bcast(result, root=0)
        return result

    def barrier(self) -> None:
        if self.comm is not None:
            self.comm.Barrier()

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a block that may fail on some ranks only; if it does, every rank raises.

        All ranks must enter it, and the block itself must hold no collective. Without this, a rank
        that failed alone would leave the others waiting in their next allreduce for ever.

        Raises:
            UserError: the lowest failing rank's, on all ranks.
            RuntimeError: likewise for any other exception, with that rank's traceback as text.
        """
        failure: tuple[bool, str] | None = None
        original: Exception | None = None
        try:
            yield
        except UserError as error:
            failure, original = (True, str(error)), error
        except Exception as error:
            original = error
            failure = (False, f"{doing}: {error!r}\n{traceback.format_exc()}")
        failures = [(rank, each) for rank, each in enumerate(self.collect(failure)) if each]
        if not failures:
            return
        rank, (is_user_error, message) = failures[0]
        if len(failures) > 1:
            message += f" (and {len(failures) - 1} more ranks)"
        if is_user_error:
            where = f"rank {rank}: " if self.size > 1 else ""
            raise UserError(where + message) from original
        raise RuntimeError(f"rank {rank}: {message}") from original


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """Who started this process, by its environment; None when no launcher did."""
    for launcher, rank, size in _LAUNCHERS:
        if rank in environment and (size is None or size in environment):
            count = None if size is None else int(environment[size])
            return Launched(launcher, int(environment[rank]), count)
    return None


def speaks() -> bool:
    """Does this process speak for all? Known without MPI: rank 0, or a process alone."""
    by = launched()
    return by is None or by.rank == 0


@cache
def discover() -> Ranks:
    """The ranks that a launcher (mpirun, srun, jsrun, flux) started, or one process alone.

    A collective on its first call; afterwards the same answer, without the others.

    Raises:
        UserError: there is no MPI, or it does not see the processes that the launcher started, so
            that each would train alone and all would write the same files.
    """
    by = launched()
    if by is None or by.size == 1:
        return Ranks()
    try:
        with warnings.catch_warnings():  # mpi4py's own, less clear than the error below
            warnings.filterwarnings("ignore", "suspicious MPI execution environment")
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"{by.launcher} started this process, but MPI cannot be loaded ({error}): "
            "run scripts/setup, or load the MPI module that it was run with"
        ) from error
    world = MPI.COMM_WORLD
    if by.size is not None and by.size != world.Get_size():
        library = " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split())
        raise UserError(
            f"{by.launcher} started {by.size} processes, but MPI ({library}) counts "
            f"{world.Get_size()}: {_REMEDY}"
        )
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    return Ranks(world.Get_rank(), world.Get_size(), node.Get_rank(), node.Get_size(), world)


_REMEDY = (
    "launcher and MPI are not of one kind. Start with the mpirun of that MPI, or let the launcher "
    "speak its protocol (srun --mpi=pmi2 or --mpi=pmix), or run scripts/setup with MPICXX set to "
    "the system's mpicxx"
)


def stop_all(ranks: Ranks, code: int) -> None:
    """End every rank at once; for a failure that the others cannot be told of in order."""
    if ranks.comm is None:
        os._exit(code)
    ranks.comm.Abort(code)


def host() -> str:
    return socket.gethostname()
