"""Ranks on this machine, by the mpirun of the environment."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stemdl.errors import UserError


def mpirun() -> str:
    """The mpirun beside this Python, or the first on PATH.

    Raises:
        UserError: there is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise UserError("no mpirun on PATH: run scripts/setup, or load the system's MPI module")
    return found


def run(ranks: int, arguments: Sequence[str], *, environment: dict[str, str] | None = None) -> int:
    """Run `python ARGUMENTS` on `ranks` processes of this machine; return the exit code."""
    command = [mpirun(), "-n", str(ranks), sys.executable, *arguments]
    return subprocess.run(command, env=os.environ | (environment or {}), check=False).returncode
