"""The whole job on this machine: simulate, stage, train on two Horovod ranks, evaluate.

Each step is the command that a user would type, shown before it runs.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stemdl.console import say
from stemdl.errors import UserError
from stemdl.launch import local

CONFIG = Path("configs/demo.yaml")
RANKS = 2


def run(overrides: Sequence[str]) -> int:
    """Run the steps in order; return the exit code of the first that fails, or 0.

    Raises:
        UserError: not started from the repository, which holds configs/demo.yaml.
    """
    if not CONFIG.exists():
        raise UserError(f"{CONFIG}: not found; run the demo from the repository's top folder")
    begun = time.perf_counter()
    arguments = [str(CONFIG), *overrides]
    for program, verb, ranks in (
        ("data_tools", "simulate", 1),
        ("stemdl", "stage", RANKS),
        ("stemdl", "train", RANKS),
        ("stemdl", "evaluate", RANKS),
    ):
        shown = "stemdl-data" if program == "data_tools" else program
        prefix = f"mpirun -n {ranks} " if ranks > 1 else ""
        say(f"\n$ {prefix}{shown} {verb} {' '.join(arguments)}")
        command = ["-m", program, verb, *arguments]
        started = time.perf_counter()
        code = (
            local.run(ranks, command)
            if ranks > 1
            else subprocess.run([sys.executable, *command], check=False).returncode
        )
        if code != 0:
            say(f"demo: {verb} ended with exit code {code}; run the demo again to go on from there")
            return code
        say(f"demo: {verb} took {time.perf_counter() - started:.0f} s")
    say(f"\ndemo: all of it took {(time.perf_counter() - begun) / 60:.1f} min")
    return 0
