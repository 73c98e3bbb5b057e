"""Which rank am I, and how do all ranks learn that one of them failed.

Needs MPI but not TensorFlow: staging and simulation start quickly. A process that no launcher
started is alone and never touches MPI (login nodes often forbid it).
"""

import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from stemdl.errors import UserError

# What launchers set for the processes they start: mpich and srun with PMI, Open MPI, jsrun, flux.
_LAUNCHED = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS", "FLUX_JOB_SIZE")


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


def discover() -> Ranks:
    """The ranks that a launcher (mpirun, srun, jsrun, flux) started, or one process alone."""
    if not any(name in os.environ for name in _LAUNCHED):
        return Ranks()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    return Ranks(world.Get_rank(), world.Get_size(), node.Get_rank(), node.Get_size(), world)


def stop_all(ranks: Ranks, code: int) -> None:
    """End every rank at once; for a failure that the others cannot be told of in order."""
    if ranks.comm is None:
        os._exit(code)
    ranks.comm.Abort(code)


def host() -> str:
    return socket.gethostname()
