"""Staging among other jobs, from start to end: signals, purging, senseless places, damage."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from making_shards import data_set, experiment, flip_byte

from stemdl import cli, config
from stemdl.data import claims, copying, shards, staging
from stemdl.errors import UserError
from stemdl.launch import local
from stemdl.ranks import Ranks

# The command line with a slow disk, 4 kB at a time: a signal comes in the middle of a file.
SLOW = """
import sys, time
from stemdl import cli
from stemdl.data import copying

read = copying._read
def slow(source, block, between):
    for part in read(source, 4096, between):
        time.sleep(SECONDS)
        yield part
copying._read = slow
sys.exit(cli.main(sys.argv[1:]))
"""


def start_slow(folder, seconds, *arguments, launcher=()):
    script = folder / "slow.py"
    script.write_text(SLOW.replace("SECONDS", str(seconds)))
    return subprocess.Popen(
        [*launcher, sys.executable, script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def data(tmp_path):
    return data_set(tmp_path / "data")


def file_of(settings):
    path = settings.data.dir.parent / "stage.yaml"
    path.write_text(config.dump(settings))
    return str(path)


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.glob("*/*.h5")}


def wait_until(true, process):
    for _ in range(600):
        if true():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("waited for nothing")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_a_signal_in_the_middle_loses_nothing_that_is_copied(data, tmp_path, number, code):
    nvme = tmp_path / "nvme"
    process = start_slow(tmp_path, 0.05, "stage", file_of(experiment(data, streams=1)))
    wait_until(
        lambda: len(list(nvme.rglob("*.h5"))) == 2 and list(nvme.rglob(".0*.h5.*.tmp")), process
    )
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    kept = {path: path.stat().st_mtime_ns for path in nvme.rglob("*.h5")}
    assert 2 <= len(kept) < 6
    if number == signal.SIGTERM:
        assert errors == (
            "stemdl: stage: stopped by SIGTERM; what is copied stays: the same command goes on\n"
        )
        assert not list(nvme.rglob("*.tmp"))
        assert not list(nvme.rglob(shards.DEAL_NAME))
    target = staging.stage(experiment(data), Ranks())
    assert contents(target) == contents(data)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert not list(nvme.rglob("*.tmp"))


@pytest.mark.mpi
def test_a_signal_to_mpirun_reaches_the_ranks(data, tmp_path):
    nvme, settings = tmp_path / "nvme", experiment(data)
    launcher = [local.mpirun(), "-n", "2"]
    process = start_slow(tmp_path, 0.05, "stage", file_of(settings), launcher=launcher)
    wait_until(lambda: len(list(nvme.rglob("*.h5"))) >= 2, process)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert len(list(nvme.rglob("*.h5"))) < 6
    assert not list(nvme.rglob("*.tmp"))
    assert contents(staging.stage(settings, Ranks())) == contents(data)


def test_training_that_is_stopped_while_it_stages_goes_on(tiny_experiment, tmp_path):
    nvme = tmp_path / "nvme"
    stage = [f"stage.dir={nvme}", "stage.keep_free=0", "stage.streams=1"]
    process = start_slow(tmp_path, 0.3, "train", str(tiny_experiment), *stage)
    wait_until(lambda: list(nvme.rglob("*.h5")), process)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert errors.splitlines()[-1].startswith("stemdl: stage: stopped by SIGTERM")
    assert not list(nvme.rglob("*.tmp"))
    assert not (tmp_path / "run").exists()


def test_two_jobs_at_once_share_the_copies(data, tmp_path):
    settings = file_of(experiment(data))
    runs = [tmp_path / "one", tmp_path / "two"]
    jobs = [start_slow(tmp_path, 0.02, "stage", settings, f"run={run}") for run in runs]
    for job in jobs:
        _, errors = job.communicate(timeout=60)
        assert job.returncode == 0, errors
    copied = [json.loads((run / "stage.json").read_text())["copied_GB"] for run in runs]
    assert sum(copied) * 1e9 == pytest.approx(sum(map(len, contents(data).values())))


def test_a_file_system_without_locks_is_refused(data, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(claims.fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"cannot be locked \(Function not impl.*set stage"):
        staging.stage(experiment(data), Ranks())


def test_a_signal_ends_the_wait_for_another_job(data, tmp_path):
    settings = experiment(data)
    target = staging.locate(settings, Ranks()).target
    with claims.alone(target, Ranks()):
        process = subprocess.Popen(
            [sys.executable, "-m", "stemdl", "stage", file_of(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "another job is staging" in process.stdout.readline()
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 75
    assert "stopped by SIGTERM" in errors


def test_purge_removes_what_staging_made_and_nothing_else(data, capsys):
    settings = experiment(data)
    before = contents(data)
    target = staging.stage(settings, Ranks())
    (target / "train" / "notes.txt").write_text("a user's")
    (target / "train" / "own.h5").write_text("a user's")
    (target / "train" / ".00001.h5.abcd.tmp").write_text("half")
    capsys.readouterr()
    assert cli.main(["stage", file_of(settings), "--purge"]) == 0
    size = sum(map(len, before.values())) / 1e3
    assert capsys.readouterr().out == f"stage: purged {size:.1f} kB from 1 of 1 node: {target}\n"
    left = {path.relative_to(target).as_posix() for path in target.rglob("*")}
    assert left == {"train", "train/notes.txt", "train/own.h5"}
    assert contents(data) == before
    for path in target.glob("train/*"):
        path.unlink()
    staging.stage(settings, Ranks())
    staging.purge(settings, Ranks())
    assert not target.exists()
    staging.purge(settings, Ranks())  # nothing is there: nothing happens
    assert contents(data) == before


def test_purge_without_staging_is_a_mistake(data):
    with pytest.raises(UserError, match=r"stage\.dir is null"):
        staging.purge(experiment(data, dir=None), Ranks())


def test_what_another_job_reads_is_not_purged(data, capsys):
    settings = experiment(data)
    with staging.staged(settings, Ranks()) as target:
        staging.purge(settings, Ranks())
        assert "from 0 of 1 node" in (out := capsys.readouterr().out)
        assert "1 kept: another job uses the copies there" in out
        assert contents(target) == contents(data)
    staging.purge(settings, Ranks())
    assert not target.exists()


def test_what_another_job_waits_for_is_not_purged(data, capsys):
    settings = experiment(data)
    target = staging.stage(settings, Ranks())
    job = threading.Thread(target=staging.stage, args=[settings, Ranks()])
    with claims.alone(target, Ranks()):
        job.start()
        while "waiting" not in capsys.readouterr().out:
            time.sleep(0.02)
        staging.purge(settings, Ranks())
        assert "1 kept" in capsys.readouterr().out
    job.join(timeout=30)
    assert contents(target) == contents(data)


def test_a_job_that_comes_while_another_purges_copies_again(data):
    settings = experiment(data)
    target = staging.stage(settings, Ranks())
    job = threading.Thread(target=staging.stage, args=[settings, Ranks()])
    with claims.unused(target) as free:
        assert free
        job.start()
        staging._remove(target)
        time.sleep(0.2)
        assert not target.exists()
    job.join(timeout=30)
    assert contents(target) == contents(data)


def test_data_are_not_staged_into_themselves(data, tmp_path):
    alias = tmp_path / "alias"
    alias.symlink_to(data)
    for place in (data, data / "train", alias, alias / "train" / "new"):
        with pytest.raises(UserError, match=r"within the data set.*set stage\.dir"):
            staging.stage(experiment(data, dir=str(place)), Ranks())
    assert not list(data.rglob("node-*"))
    first = experiment(data)
    target = staging.stage(first, Ranks())
    again = experiment(target, dir=str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"was staged itself.*set data\.dir"):
        staging.stage(again, Ranks())


def test_damage_that_leaves_the_time_stamp_is_found_and_mended_by_verify(data):
    settings = experiment(data)
    target = staging.stage(settings, Ranks())
    path = target / "train" / "00001.h5"
    status = path.stat()
    flip_byte(path, 5000)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    staging.stage(settings, Ranks())
    assert contents(target) != contents(data)  # receipts are trusted
    others = {each: each.stat().st_ino for each in target.glob("*/*.h5") if each != path}
    assert cli.main(["stage", file_of(settings), "--verify"]) == 0
    assert contents(target) == contents(data)
    assert {each: each.stat().st_ino for each in others} == others


def test_the_first_failure_ends_copies_in_the_middle(data, monkeypatch):
    """A lane that fails stops the others between two blocks, not after their files."""
    started, blocks = threading.Event(), []
    read = copying._read

    def slow(source, block, between):
        if source.name == "00001.h5":
            started.wait(10)
            raise OSError(5, "Input/output error")
        for part in read(source, 512, between):
            blocks.append(source)
            started.set()
            time.sleep(0.01)
            yield part

    monkeypatch.setattr(copying, "_read", slow)
    with pytest.raises(UserError, match="Input/output error"):
        staging.stage(experiment(data, streams=6), Ranks())
    whole = sum(path.stat().st_size for path in data.glob("*/*.h5")) / 512
    assert len(blocks) < whole / 2
