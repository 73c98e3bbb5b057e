"""stemdl-data simulate under mpirun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import run_ranks
from small_simulation import contents, write_experiment

from data_tools import cli
from stemdl.launch import local

pytestmark = pytest.mark.mpi
COMMAND = ["-m", "data_tools.cli", "simulate"]
# Some seconds of work in many shards of unequal cost, to have a middle in which to lose a rank.
LONGER = (
    "simulate.samples.train=24",
    "simulate.shard_samples=1",
    "simulate.scan=[12,12]",
    "simulate.grid=0.125",
)


def test_ranks_make_the_bytes_of_one_process(tmp_path):
    alone, ranks = (write_experiment(tmp_path, name) for name in ("alone", "ranks"))
    assert cli.main(["simulate", str(alone), "simulate.workers=1"]) == 0
    result = run_ranks(2, [*COMMAND, str(ranks)])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("made 10 samples") == 1
    assert result.stdout.count("samples/hour a core") == 1
    assert contents(tmp_path / "ranks") == contents(tmp_path / "alone")


def test_a_killed_rank_costs_unfinished_shards_only(tmp_path):
    whole, broken = (write_experiment(tmp_path, name) for name in ("whole", "broken"))
    result = run_ranks(3, [*COMMAND, str(whole), *LONGER])
    assert result.returncode == 0, result.stderr

    data = tmp_path / "broken"
    process = start(3, broken, *LONGER)
    wait_for(lambda: len(list(data.glob("train/*.h5"))) >= 3, process)
    os.kill(rank_process(1, broken), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, 2), output
    kept = {path: path.stat().st_mtime_ns for path in data.glob("*/*.h5")}
    assert 3 <= len(kept) < 29
    for path in kept:
        assert path.read_bytes() == (tmp_path / "whole" / path.relative_to(data)).read_bytes()

    resumed = run_ranks(3, [*COMMAND, str(broken), *LONGER])
    assert resumed.returncode == 0, resumed.stderr
    assert f"made {29 - len(kept)} samples" in resumed.stdout
    assert f"kept {len(kept)} finished shards" in resumed.stdout
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())
    assert contents(data) == contents(tmp_path / "whole")


def test_ranks_whose_partner_hangs_finish_their_part_and_stop(tmp_path):
    """As after the loss of a node where the launcher does not end the job."""
    path, data = write_experiment(tmp_path), tmp_path / "data"
    process = start(3, path, *LONGER, "simulate.stall_limit=4")
    wait_for(lambda: len(list(data.glob("train/*.h5"))) >= 3, process)
    os.kill(rank_process(1, path), signal.SIGSTOP)
    output, _ = process.communicate(timeout=90)
    assert process.returncode not in (0, 2), output
    assert "no other rank got on for 4 s, lost: rank 1 (" in output
    left = int(output.split("lost: rank 1 (")[1].split(" left")[0])
    assert len(list(data.glob("*/*.h5"))) == 29 - left


def test_a_rank_that_fails_alone_does_not_stop_the_others(tmp_path):
    path, data = write_experiment(tmp_path), tmp_path / "data"
    data.mkdir()
    (data / "dev").write_text("in the way of one shard")
    result = run_ranks(3, [*COMMAND, str(path)])
    assert result.returncode == 2, result.stderr
    assert "stops simulating" in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("\nstemdl: ") + result.stderr.startswith("stemdl: ") == 2
    assert len(list(data.glob("t*/*.h5"))) >= 4  # all that the two other ranks had, of 6


def test_a_mistake_is_one_line_and_exit_code_2_on_all_ranks(tmp_path):
    path = write_experiment(tmp_path)
    (tmp_path / "data").write_text("in the way")
    for override, message in [
        ("simulate.materials.cif_dir=absent", "no such folder"),
        ("simulate.scan_step=4", "wider than simulate.box"),
        ("simulate.seed=0", "cannot be written"),
    ]:
        result = run_ranks(2, [*COMMAND, str(path), override])
        assert result.returncode == 2, result.stderr
        lines = [line for line in result.stderr.splitlines() if line.startswith("stemdl: ")]
        assert len(lines) == 1 and message in lines[0]
        assert "Traceback" not in result.stderr


def start(ranks: int, experiment: Path, *overrides: str) -> subprocess.Popen[str]:
    command = [local.mpirun(), "-n", str(ranks), sys.executable, *COMMAND]
    return subprocess.Popen(
        [*command, str(experiment), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rank_process(rank: int, experiment: Path) -> int:
    """The process id of one rank of the job that simulates this experiment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(experiment).encode() in command and f"PMI_RANK={rank}".encode() in environment:
                return int(entry.name)
    raise AssertionError(f"rank {rank} does not run")


def wait_for(condition, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.02)
