"""A run on a node's own disk, copied back to the shared file system while it goes on.

    srun ... python -m stemdl.launch.mirror LOCAL RUN --every 60 -- python -m stemdl train ...
    srun ... python -m stemdl.launch.mirror LOCAL RUN       # once more, when the ranks have ended

The first brings RUN to LOCAL on rank 0 (which alone writes a run), leaves a process beside it that
copies back what changed, and turns into the command, as the other ranks do at once. The second,
started on every node, copies from the one that has something. Files appear in RUN whole or not at
all; checkpoints come first, so that logs are never behind them (a resumed run drops lines that are
ahead).
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stemdl import command, files, ranks
from stemdl.errors import UserError
from stemdl.launch import chain, job
from stemdl.signals import SIGNALS

# In RUN, but not the trainer's: written on the shared file system by jobs and schedulers.
NOT_MIRRORED = {job.SCRIPT, job.LOGS, chain.CHAIN, chain.QUEUE, "report"}
POLL = 0.5  # s between looks at whether the command still runs


def copy_changed(source: Path, target: Path) -> int:
    """Copy the files of `source` that `target` holds otherwise (size or time); return the bytes.

    Raises:
        UserError: `target` cannot be written.
    """
    found = [
        path
        for path in source.rglob("*")
        if path.is_file()
        and path.suffix != ".tmp"
        and path.relative_to(source).parts[0] not in NOT_MIRRORED
    ]
    copied = 0
    for path in sorted(found, key=lambda path: (path.suffix != ".h5", path)):
        other = target / path.relative_to(source)
        try:
            stat = path.stat()
            if other.exists() and _same(stat, other.stat()):
                continue
            with files.appearing(other) as temporary:
                shutil.copyfile(path, temporary)
                os.utime(temporary, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            copied += stat.st_size
        except FileNotFoundError:
            continue  # replaced while we looked; the next round has it
        except OSError as error:
            raise UserError(f"{other}: cannot be written ({error.strerror})") from error
    return copied


def beside(local: Path, run: Path, every: float, process: int) -> None:
    """Copy back every `every` seconds as long as `process`, our parent, lives."""
    for number in SIGNALS:  # schedulers signal all processes of a step; only the ranks need to know
        signal.signal(number, signal.SIG_IGN)
    due = time.monotonic() + every
    while os.getppid() == process:
        if time.monotonic() >= due:
            try:
                copy_changed(local, run)
            except UserError as error:  # training goes on; the next round tries again
                print(f"mirror: {error}; will try again", file=sys.stderr, flush=True)
            due = time.monotonic() + every
        time.sleep(POLL)


def start(local: Path, run: Path, every: float, order: Sequence[str]) -> None:
    """Become `order`, on rank 0 with a mirror beside it. Does not return."""
    if ranks.speaks():
        local.mkdir(parents=True, exist_ok=True)
        if run.exists():
            copy_changed(run, local)
        words = [sys.executable, "-m", "stemdl.launch.mirror", local, run, "--every", every]
        subprocess.Popen([*map(str, words), "--beside", str(os.getpid())])
    os.execvp(order[0], list(order))


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stemdl.launch.mirror", description=__doc__)
    parser.add_argument("local", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--beside", type=int, help=argparse.SUPPRESS)
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    parsed, order = parser.parse_args(words[:cut]), words[cut + 1 :]
    if parsed.beside is not None:
        beside(parsed.local, parsed.run, parsed.every, parsed.beside)
    elif order:
        start(parsed.local, parsed.run, parsed.every, order)
    elif parsed.local.exists():
        copied = copy_changed(parsed.local, parsed.run)
        print(f"mirror: {files.human_bytes(copied)} copied back to {parsed.run} at the end")
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
