"""A run on a node's own disk, copied back to the shared file system while it goes on.

    srun ... python -m stemdl.launch.mirror LOCAL RUN --every 60 -- python -m stemdl train ...

On rank 0 (which alone writes a run) this brings RUN to LOCAL, starts the command, copies what
changed back to RUN every so often and once more at the end, and ends with the command's exit code.
Signals are passed on. Other ranks become the command. Files appear in RUN whole or not at all;
checkpoints come first, so that logs are never behind them (a resumed run drops lines that are
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
from stemdl.console import say
from stemdl.errors import UserError
from stemdl.launch import chain, job
from stemdl.training.interruption import SIGNALS

# In RUN, but not the trainer's: written on the shared file system by jobs and schedulers.
NOT_MIRRORED = {job.SCRIPT, job.LOGS, chain.CHAIN, chain.QUEUE, "report"}


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


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def attend(local: Path, run: Path, every: float, order: Sequence[str]) -> int:
    """Run `order` with `local` mirrored to `run` every `every` seconds; return its exit code."""
    local.mkdir(parents=True, exist_ok=True)
    if run.exists():
        copy_changed(run, local)
    child = subprocess.Popen(order)
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: child.send_signal(number))
    due = time.monotonic() + every
    while (code := _poll(child, due)) is None:
        _copy_back(local, run)
        due = time.monotonic() + every
    copied = copy_changed(local, run)
    say(f"mirror: {files.human_bytes(copied)} copied back to {run} at the end")
    return code if code >= 0 else 128 - code  # as shells say it


def _copy_back(local: Path, run: Path) -> None:
    """A copy that fails is tried again next time: training goes on."""
    try:
        copy_changed(local, run)
    except UserError as error:
        print(f"mirror: {error}; will try again", file=sys.stderr, flush=True)


def _poll(child: subprocess.Popen, until: float) -> int | None:
    try:
        return child.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stemdl.launch.mirror", description=__doc__)
    parser.add_argument("local", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("order", nargs="+")
    parsed = parser.parse_args(arguments)
    if not ranks.speaks():
        os.execvp(parsed.order[0], parsed.order)
    return attend(parsed.local, parsed.run, parsed.every, parsed.order)


if __name__ == "__main__":
    sys.exit(command.run(main))
