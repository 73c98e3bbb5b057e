"""Ranks on this machine, by the mpirun of the environment.

`run` starts them at once. The rest is this machine as a scheduler (see `launch.job`): a job is the
script itself, and a chain runs it again until the run is done.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stemdl.errors import UserError
from stemdl.launch.job import Job

JOB_ID = "$$"
NODES = "hostname"


def mpirun() -> str:
    """The launcher of ranks, used as LAUNCHER -n RANKS COMMAND.

    STEMDL_MPIRUN names it (jsrun and srun understand -n as well, within a job); otherwise it is the
    mpirun beside this Python, or the first on PATH.

    Raises:
        UserError: there is none.
    """
    wanted = os.environ.get("STEMDL_MPIRUN")
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() and not wanted else shutil.which(wanted or "mpirun")
    if found is None:
        raise UserError(
            f"no {wanted or 'mpirun'} on PATH: run scripts/setup, or load the system's MPI module"
        )
    return found


def run(ranks: int, arguments: Sequence[str], *, environment: dict[str, str] | None = None) -> int:
    """Run `python ARGUMENTS` on `ranks` processes of this machine; return the exit code."""
    command = [mpirun(), "-n", str(ranks), sys.executable, *arguments]
    return subprocess.run(command, env=os.environ | (environment or {}), check=False).returncode


def directives(job: Job) -> list[str]:
    return []


def every_rank(job: Job) -> str:
    """Raises UserError where there is no mpirun, or for more than this one node."""
    if job.nodes != 1:
        raise UserError(f"--nodes is {job.nodes}: a job of scheduler 'local' has this one node")
    return " ".join((f"{shlex.quote(mpirun())} -n {job.ranks}", *job.site.step_options))


def every_node(job: Job) -> str:
    return ""


def signals() -> str:
    return ""
