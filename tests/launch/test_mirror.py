"""What is on the node's disk reaches the shared file system, whole, while a run goes on."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from stemdl.errors import UserError
from stemdl.launch import mirror

TRAINER = """
import pathlib, sys, time
run = pathlib.Path(sys.argv[1])
(run / "checkpoints").mkdir(parents=True, exist_ok=True)
print((run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else "fresh")
(run / "checkpoints" / "last.h5").write_text("one")
time.sleep(float(sys.argv[2]))
(run / "metrics.jsonl").write_text("the end")
sys.exit(75)
"""


def tree(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def run_mirror(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stemdl.launch.mirror", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_only_what_changed_is_copied_and_nothing_of_the_scheduler(tmp_path):
    local, run = tmp_path / "local", tmp_path / "run"
    for name in ("checkpoints/last.h5", "metrics.jsonl", "logs/7.log", "job.sh", ".x.tmp"):
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_text(name)
    assert mirror.copy_changed(local, run) == len("checkpoints/last.h5" + "metrics.jsonl")
    assert set(tree(run)) == {"checkpoints/last.h5", "metrics.jsonl"}
    assert mirror.copy_changed(local, run) == 0
    (local / "metrics.jsonl").write_text("longer than it was")
    assert mirror.copy_changed(local, run) == len("longer than it was")
    assert tree(run)["metrics.jsonl"] == "longer than it was"


def test_the_copy_happens_while_the_command_runs_and_the_rest_at_the_end(tmp_path):
    local, run = tmp_path / "local", tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("of the last job")
    command = [sys.executable, "-c", TRAINER, local, 3]
    done = run_mirror(local, run, "--every", 0.1, "--", *command)
    assert done.returncode == 75, done.stderr
    assert "of the last job" in done.stdout, "RUN was brought to the node first"
    assert tree(run)["checkpoints/last.h5"] == "one"
    run_mirror(local, run)
    assert tree(run) == tree(local)
    assert tree(run)["metrics.jsonl"] == "the end"


def test_nothing_stays_behind_when_the_command_is_killed(tmp_path):
    """The process beside it ends by itself; a job step would not end otherwise."""
    local, run = tmp_path / "local", tmp_path / "run"
    words = ["-m", "stemdl.launch.mirror", str(local), str(run), "--every", "0.1", "--"]
    command = [sys.executable, *words, sys.executable, "-c", TRAINER, str(local), "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 30
        while not (run / "checkpoints" / "last.h5").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.communicate(timeout=20)  # reads until all who hold the pipe have ended
    assert tree(run)["checkpoints/last.h5"] == "one"


def test_a_node_without_a_run_has_nothing_to_copy(tmp_path):
    done = run_mirror(tmp_path / "nothing", tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, "")


def test_a_target_that_cannot_be_written_is_a_users_mistake(tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    (local / "metrics.jsonl").write_text("x")
    (tmp_path / "run").write_text("a file where the directory should be")
    with pytest.raises(UserError, match="cannot be written"):
        mirror.copy_changed(local, tmp_path / "run")
    done = run_mirror(local, tmp_path / "run")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
