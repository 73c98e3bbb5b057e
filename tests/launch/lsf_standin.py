"""LSF with stand-in commands: jobs wait in a folder until `run_next` runs them, one by one.

The commands in standins/ check their arguments as the real ones would, and jsrun really starts the
ranks, by mpirun. What LSF does by itself (start a job when the one before has ended, warn it before
its limit) is done here.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from stemdl.launch import local

STANDINS = Path(__file__).parent / "standins"


class Lsf:
    """One cluster of one node, with its spool directory."""

    def __init__(self, spool: Path) -> None:
        spool.mkdir(parents=True)
        self.spool = spool
        self.done: set[str] = set()
        self.environment = os.environ | {
            "PATH": f"{STANDINS}:{os.environ['PATH']}",
            "LSF_SPOOL": str(spool),
            "STANDIN_MPIRUN": local.mpirun(),
            "USER": os.environ.get("USER", "tests"),
        }

    def killed(self) -> list[str]:
        path = self.spool / "killed"
        return path.read_text().split() if path.exists() else []

    def run_next(
        self,
        *,
        during: Callable[[subprocess.Popen[bytes]], None] | None = None,
        timeout: float = 240,
    ) -> tuple[str, int, str]:
        """Run the next job; `during` is called with its process. Returns number, code and log."""
        for line in (self.spool / "queue").read_text().splitlines():
            number, after = line.split()
            if number in self.done or number in self.killed():
                continue
            assert after == "none" or after in self.done | set(self.killed())
            break
        else:
            raise AssertionError("no job waits")
        hosts = self.spool / "hosts"
        hosts.write_text("batch1\n" + f"{os.uname().nodename}\n" * 42)
        log = self.spool / f"{number}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", str(self.spool / f"{number}.sh")],
                env=self.environment | {"LSB_JOBID": number, "LSB_DJOB_HOSTFILE": str(hosts)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                if during is not None:
                    during(process)
                code = process.wait(timeout)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        self.done.add(number)
        return number, code, log.read_text()

    def warn(self, process: subprocess.Popen[bytes]) -> None:
        """What -wa USR1 does -wt minutes before the limit: a signal to the job script."""
        process.send_signal(signal.SIGUSR1)

    def task(self, rank: int) -> int:
        """The process of a rank of the step that runs now."""
        return int((self.spool / "tasks" / str(rank)).read_text())


def wait_for(happened: Callable[[], bool], what: str, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not happened():
        assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
        time.sleep(0.05)
