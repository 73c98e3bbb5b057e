"""Staging alone: copies are right, resumed and refused with the reason. Ranks: tests/mpi."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple

import pytest
from making_shards import data_set, experiment, flip_byte, list_shards, write

from stemdl import config
from stemdl.data import copying, shards, stage_report, staging
from stemdl.errors import UserError
from stemdl.ranks import Ranks

DONTNEED = os.POSIX_FADV_DONTNEED


@pytest.fixture(params=[True, False], ids=["manifest", "no manifest"])
def data(tmp_path, request):
    return data_set(tmp_path / "data", listed=request.param)


@pytest.fixture
def listed(tmp_path):
    return data_set(tmp_path / "data")


def stage(data, **keys):
    return staging.stage(experiment(data, **keys), Ranks())


@pytest.fixture
def copies(monkeypatch):
    """The names of the files that were copied."""
    names = []
    pour = copying._pour

    def counting(source, *rest):
        names.append(f"{source.parent.name}/{source.name}")
        return pour(source, *rest)

    monkeypatch.setattr(copying, "_pour", counting)
    return names


def contents(directory):
    return {
        path.relative_to(directory): path.read_bytes() for path in sorted(directory.glob("*/*.h5"))
    }


def report(data):
    return json.loads((data.parent / "run" / "stage.json").read_text())


def test_no_staging_reads_in_place(data):
    settings = experiment(data, dir=None)
    assert staging.stage(settings, Ranks()) == data
    assert not (data.parent / "run").exists()


def test_the_copy_is_the_same_and_the_second_run_copies_nothing(data, copies):
    target = stage(data)
    assert contents(target) == contents(data)
    size = sum(map(len, contents(data).values()))
    first = report(data)
    assert first["copied_GB"] == pytest.approx(size / 1e9)
    assert first["nodes"][0]["directory"] == str(target)
    assert len(copies) == 6
    assert stage(data) == target
    assert len(copies) == 6
    assert (report(data)["GB"], report(data)["copied_GB"]) == (pytest.approx(size / 1e9), 0)
    split = shards.open_split(target, "train")
    assert (split.count, split.node_part) == (15, False)


def test_time_stamps_do_not_matter(data, copies):
    target = stage(data)
    for path in [*target.glob("*/*.h5"), *data.glob("*/*.h5")]:
        os.utime(path, (1, 1))
    stage(data)
    assert len(copies) == 6


def test_short_damaged_and_lost_copies_are_made_again(data, copies):
    target = stage(data)
    flip_byte(target / "train" / "00001.h5", 5000)
    os.truncate(target / "train" / "00002.h5", 700)
    (target / "dev" / "00000.h5").unlink()
    del copies[:]
    stage(data)
    assert sorted(copies) == ["dev/00000.h5", "train/00001.h5", "train/00002.h5"]
    assert contents(target) == contents(data)


def test_data_made_again_under_the_same_names_are_staged_again(data, copies):
    target = stage(data)
    write(data / "train" / "00001.h5", 3, seed=77)
    if (data / "manifest.json").exists():
        list_shards(data)
    del copies[:]
    stage(data)
    assert copies == ["train/00001.h5"]
    assert contents(target) == contents(data)


def test_one_flipped_byte_in_the_source_is_blamed_on_the_source(data, copies):
    path = data / "train" / "00001.h5"
    flip_byte(path, shards.open_shard(path).cbed_offset + 7)
    with pytest.raises(UserError, match=rf"{path}: .*corrupt.*make"):
        stage(data)
    assert copies.count("train/00001.h5") == 2  # read twice before it is blamed
    target = next((data.parent / "nvme").glob("*/node-0-of-1"))
    assert not (target / "train" / "00001.h5").exists()
    assert not list(target.rglob("*.tmp"))


def test_a_truncated_source_is_blamed_on_the_source(data):
    path = data / "train" / "00002.h5"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(UserError, match=rf"{path}: .*truncated"):
        stage(data)


def test_a_passing_fault_is_read_again(data, monkeypatch):
    pour, faults = copying._pour, ["train/00001.h5"]

    def faulty(source, target, *rest):
        checksum = pour(source, target, *rest)
        if f"{source.parent.name}/{source.name}" in faults:
            faults.clear()
            flip_byte(target, shards.open_shard(source).cbed_offset)
            return "crc32:00000000"
        return checksum

    monkeypatch.setattr(copying, "_pour", faulty)
    target = stage(data)
    assert not faults
    assert contents(target) == contents(data)


def test_no_space_is_refused_before_the_first_byte(data, copies, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(staging, "disk_usage", lambda path: usage(10**6, 0, 10**4))
    with pytest.raises(UserError, match=r"10\.0 kB are free, wanted .* kB for the data and 0 B"):
        stage(data)
    assert copies == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 kB; only root may mount one."""
    disk = tmp_path / "small"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a file system here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_small_disk_is_refused_and_a_full_one_reported(listed, small_disk, copies, monkeypatch):
    with pytest.raises(UserError, match=r"65\.5 kB are free, wanted"):
        stage(listed, dir=str(small_disk))
    assert copies == []
    monkeypatch.setattr(staging, "_check_space", lambda *arguments: None)  # filled since then
    with pytest.raises(UserError, match="disk full while copying"):
        stage(listed, dir=str(small_disk))
    assert copies
    assert not list(small_disk.rglob("*.tmp"))


def test_space_is_kept_free(data, copies):
    with pytest.raises(UserError, match=r"and 1000\.0 PB to stay free \(stage\.keep_free\)"):
        stage(data, keep_free=1e9)
    assert copies == []


def test_disk_full_in_the_middle(data, copies, monkeypatch):
    """Another program may fill the disk meanwhile."""
    counting = copying._pour

    def full(source, target, *rest):
        if len(copies) == 3:
            target.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return counting(source, target, *rest)

    monkeypatch.setattr(copying, "_pour", full)
    with pytest.raises(UserError, match="disk full while copying"):
        stage(data, streams=1)
    monkeypatch.setattr(copying, "_pour", counting)
    target = stage(data)
    assert len(copies) == 6  # three before, three after
    assert contents(target) == contents(data)
    assert not list(target.rglob("*.tmp"))


LIMITED = """
import resource, sys
from stemdl import config
from stemdl.data import staging
from stemdl.ranks import Ranks
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
staging.stage(config.load(sys.argv[1]), Ranks())
"""


def test_a_real_write_error_is_one_line(listed):
    path = listed.parent / "limited.yaml"
    path.write_text(config.dump(experiment(listed)))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=60
    )
    assert "UserError" in done.stderr
    assert "cannot be copied to" in done.stderr
    assert "File too large" in done.stderr
    assert not list((listed.parent / "nvme").rglob("*.tmp"))


def test_what_a_killed_job_left_is_removed(listed, copies):
    target = stage(listed)
    (target / "train" / ".00001.h5.abcd.tmp").write_bytes(b"half")
    stage(listed)
    assert not list(target.rglob("*.tmp"))


def test_two_jobs_at_once_copy_each_file_once(listed, copies, monkeypatch):
    counting = copying._pour
    monkeypatch.setattr(
        copying, "_pour", lambda *arguments: time.sleep(0.05) or counting(*arguments)
    )
    jobs = [threading.Thread(target=stage, args=[listed]) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(timeout=30)
    assert len(copies) == 6
    target = next((listed.parent / "nvme").glob("*/node-0-of-1"))
    assert contents(target) == contents(listed)


def test_wrong_places(listed):
    with pytest.raises(UserError, match="no such data directory"):
        staging.stage(experiment(listed.parent / "nowhere"), Ranks())
    with pytest.raises(UserError, match=r"\$NOT_SET_HERE is not set"):
        stage(listed, dir="/tmp/$NOT_SET_HERE/data")
    (listed.parent / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        stage(listed, dir=str(listed.parent / "file" / "below"))
    (listed / "train" / "00001.h5").unlink()
    with pytest.raises(UserError, match=r"00001\.h5: listed in manifest\.json but not there"):
        stage(listed)


def test_two_data_sets_of_one_name_stay_apart(tmp_path):
    first, second = data_set(tmp_path / "a" / "data"), data_set(tmp_path / "b" / "data")
    nvme = str(tmp_path / "nvme")
    assert stage(first, dir=nvme) != stage(second, dir=nvme)


def test_the_page_cache_does_not_fill(listed, monkeypatch):
    """Also while a file larger than the memory is copied: block by block, of source and target."""
    advice = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: advice.append(arguments[1:]))
    monkeypatch.setattr(copying, "_pour", lambda *a, pour=copying._pour: pour(*a[:2], 1000, a[3]))
    stage(listed, streams=1)
    dropped = [until for start, until, what in advice if (start, what) == (0, DONTNEED)]
    sizes = [path.stat().st_size for path in listed.glob("*/*.h5")]
    for until in (1000, 2000, *sizes):
        assert dropped.count(until) >= 2  # source and target
    assert dropped.count(0) == len(sizes)  # the rest of each target, once it is durable


@pytest.mark.skipif(shutil.which("fincore") is None, reason="no fincore to look at the cache with")
def test_copies_leave_no_pages_in_memory(listed):
    for path in listed.glob("*/*.h5"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # dirty pages stay
    target = stage(listed)
    paths = [str(path) for where in (listed, target) for path in where.glob("*/*.h5")]
    resident = subprocess.run(
        ["fincore", "-b", "-n", "-o", "RES", *paths], capture_output=True, text=True, check=True
    )
    assert sum(map(int, resident.stdout.split())) == 0


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no file system in memory")
def test_a_target_in_memory_or_beside_the_source_is_warned_of(listed, capsys):
    shm = f"/dev/shm/stemdl-test-{os.getpid()}"
    try:
        stage(listed, dir=shm)
    finally:
        shutil.rmtree(shm, ignore_errors=True)
    assert "lives in memory (tmpfs)" in capsys.readouterr().out
    stage(listed)
    assert "same file system" in capsys.readouterr().out
    assert "same file system" in report(listed)["warnings"][0]


def test_the_report_names_each_nodes_slowest_rank(tmp_path):
    done = [
        stage_report.Done(node, f"host{node}", tmp_path, 8 * 10**9, copied, seconds, [])
        for node, copied, seconds in [(0, 4 * 10**9, 2.0), (1, 3 * 10**9, 4.0), (0, 4 * 10**9, 3.0)]
    ]
    found = stage_report.summary(done, 5.0)
    assert [node["slowest_rank"] for node in found["nodes"]] == [2, 1]
    assert found["nodes"][0]["GB_per_s"] == pytest.approx(8 / 3)
    assert (found["GB"], found["copied_GB"]) == (16, 11)
    assert found["GB_per_s"] == pytest.approx(11 / 4)
    assert found["slowest_rank"] == 1
