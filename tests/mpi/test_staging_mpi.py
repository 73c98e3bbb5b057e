"""Staging by several ranks, on one node and on several."""

import json
from pathlib import Path

import pytest
import yaml
from conftest import run_ranks, write_split

from data_tools import cli
from stemdl import files
from stemdl.data import manifest

pytestmark = pytest.mark.mpi

# Arguments: experiment, ranks a node, lines to run before staging and after it.
STAGING = """
import dataclasses, json, os, signal, sys, time
from stemdl import command, config, ranks
from stemdl.data import copying, stage_plan, staging

def main():
    here = ranks.discover()
    each = int(sys.argv[2])
    here = dataclasses.replace(here, local_rank=here.rank % each, local_size=each)
    experiment = config.load(sys.argv[1])
    names, pour = [], copying._pour
    def counting(source, *rest):
        names.append(f"{source.parent.name}/{source.name}")
        return pour(source, *rest)
    copying._pour = counting
    scope = globals() | locals()
    exec(sys.argv[3], scope)
    scope["directory"] = staging.stage(experiment, here)
    scope["found"] = {"directory": str(scope["directory"]), "copied": names}
    exec(sys.argv[4], scope)
    everyone = here.collect(scope["found"])
    if here.rank == 0:
        print(json.dumps(everyone))

sys.exit(command.run(main))
"""

MEASURE = """
from stemdl.data import normalise, shards
split = shards.open_split(directory, "train")
normaliser = normalise.measure(split, experiment.data, here)
found["count"] = split.count
found["statistics"] = [normaliser.cbed_mean.tolist(), normaliser.potential_std]
"""

# Read what was staged, as the trainer does.
TRAIN = (
    MEASURE
    + """
from stemdl.data import order, pipeline
steps = order.steps_per_epoch(split.count, 2, split.place(here)[1])
batches = pipeline.training(
    split, normaliser, experiment.data, batch=2, seed=0, ranks=here,
    steps_per_epoch=steps, steps=range(steps)
)
places = [shards.locate(split, i) for batch in batches for i in batch["index"].numpy()]
found["seen"] = [(shard.path.name, shard.first + row) for shard, row in places]
"""
)


@pytest.fixture
def data(tmp_path):
    directory = tmp_path / "data"
    for seed, (split, counts) in enumerate({"train": (5, 6, 7), "dev": (4,)}.items()):
        write_split(directory, split, counts, seed)
    records = [manifest.shard_record(path) for path in sorted(directory.glob("*/*.h5"))]
    files.write_json(directory / manifest.NAME, manifest.SCHEMA, {"shards": records})
    return directory


def start(tmp_path, ranks, ranks_a_node, before="", after="", **stage):
    tree = {
        "run": str(tmp_path / "run"),
        "data": {"dir": str(tmp_path / "data")},
        "stage": {"dir": str(tmp_path / "nvme"), "keep_free": 0} | stage,
    }
    (tmp_path / "stage.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "stage.py").write_text(STAGING)
    script = [tmp_path / "stage.py", tmp_path / "stage.yaml", ranks_a_node, before, after]
    return run_ranks(ranks, [str(each) for each in script], timeout=100)


def result(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def staged(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.glob("*/*.h5"))


def test_ranks_of_a_node_share_the_copies(tmp_path, data):
    first, second = result(start(tmp_path, 2, 2, after=MEASURE))
    assert first["directory"] == second["directory"]
    assert first["count"] == 18
    assert first["copied"] and second["copied"]
    copied = sorted(first["copied"] + second["copied"])
    assert copied == staged(data) == staged(Path(first["directory"]))
    again = result(start(tmp_path, 2, 2))
    assert [each["copied"] for each in again] == [[], []]


def test_nodes_hold_different_samples_and_one_normalisation(tmp_path, data):
    first, second = result(start(tmp_path, 2, 1, after=TRAIN))
    assert [first["count"], second["count"]] == [9, 9]
    dev = ["dev/00000.h5"]
    assert staged(Path(first["directory"])) == [*dev, "train/00000.h5", "train/00001.h5"]
    assert staged(Path(second["directory"])) == [*dev, "train/00001.h5", "train/00002.h5"]
    for each in (first, second):
        assert cli.main(["verify", each["directory"]]) == 0
    used = [tuple(sample) for sample in first["seen"] + second["seen"]]
    assert len(set(used)) == len(used) == 16  # 4 steps x 2 ranks x batch 2
    assert first["statistics"] == second["statistics"]
    report = json.loads((tmp_path / "run" / "stage.json").read_text())
    assert [node["slowest_rank"] for node in report["nodes"]] == [0, 1]
    whole, _ = result(start(tmp_path, 2, 2, after=MEASURE))
    assert first["statistics"][1] == pytest.approx(whole["statistics"][1], rel=1e-12)


def test_a_corrupt_source_stops_all_ranks_with_one_line(tmp_path, data):
    path = data / "train" / "00002.h5"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    done = start(tmp_path, 2, 2)
    assert done.returncode == 2
    assert done.stderr.count("00002.h5: checksum is") == 1
    assert "Traceback" not in done.stderr


def test_a_rank_killed_in_the_middle_loses_only_what_it_was_copying(tmp_path, data):
    kill = """
def killed(source, target, *rest):
    if here.rank == 1 and len(names) == 1:
        target.write_bytes(b"half")
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    return counting(source, target, *rest)
copying._pour = killed
"""
    done = start(tmp_path, 2, 2, kill)
    assert done.returncode not in (0, 2)
    target = next((tmp_path / "nvme").glob("*/node-0-of-1"))
    finished = staged(target)
    assert 1 <= len(finished) < 4
    first, second = result(start(tmp_path, 2, 2))
    assert sorted(finished + first["copied"] + second["copied"]) == staged(data)
    assert not list(target.rglob("*.tmp"))


def test_more_ranks_than_shards_and_than_streams(tmp_path, data):
    for path in [*data.glob("train/0000[12].h5"), data / "manifest.json"]:
        path.unlink()
    everyone = result(start(tmp_path, 3, 3, streams=1))
    assert [len(each["copied"]) for each in everyone] == [2, 0, 0]


def test_fewer_samples_than_nodes(tmp_path, data):
    for path in [*data.glob("train/*"), data / "manifest.json"]:
        path.unlink()
    write_split(data, "train", [2], 0)
    done = start(tmp_path, 3, 1)
    assert done.returncode == 2
    assert done.stderr.count("2 samples are fewer than 3 nodes") == 1


def test_a_job_waits_for_another_that_stages_to_the_same_place(tmp_path, data):
    hold = """
import fcntl, threading
if here.rank == 1:  # the directory of node 1 is another job's for a second
    base = stage_plan._base(experiment)
    base.mkdir(parents=True, exist_ok=True)
    held = os.open(base / ".node-1-of-2.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    threading.Timer(1, os.close, [held]).start()
"""
    done = start(tmp_path, 2, 1, hold)
    result(done)
    assert "another job is staging" in done.stdout


# Nodes of one rank each; files travel in blocks of 1000 bytes.
SMALL_BLOCKS = """
from stemdl.data import broadcasting
blocks = broadcasting._blocks
broadcasting._blocks = lambda item, source, block, leaders: blocks(item, source, 1000, leaders)
"""


@pytest.mark.parametrize("listed", [True, False], ids=["manifest", "no manifest"])
def test_what_every_node_holds_is_read_once_and_sent(tmp_path, data, listed):
    write_split(data, "test", (3, 2), 9)
    (data / "manifest.json").unlink()
    if listed:
        records = [manifest.shard_record(path) for path in sorted(data.glob("*/*.h5"))]
        files.write_json(data / manifest.NAME, manifest.SCHEMA, {"shards": records})
    everyone = result(start(tmp_path, 3, 1, SMALL_BLOCKS, broadcast=True))
    for rank, each in enumerate(everyone):
        assert all(name.startswith("train/") for name in each["copied"])
        for name in ("dev/00000.h5", "test/00000.h5", "test/00001.h5"):
            assert Path(each["directory"], name).read_bytes() == (data / name).read_bytes(), rank
    Path(everyone[2]["directory"], "dev/00000.h5").unlink()
    again = result(start(tmp_path, 3, 1, SMALL_BLOCKS, broadcast=True))
    assert [each["copied"] for each in again] == [[], [], []]
    assert "dev/00000.h5" in staged(Path(again[2]["directory"]))


FULL = """
import errno
write = copying._write
def full(blocks, target):
    if here.rank == 1 and ".00000.h5." in target.name and target.parent.name == "dev" and TIMES:
        TIMES.pop()
        next(iter(blocks))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(blocks, target)
copying._write = full
"""


def test_a_disk_full_on_one_node_does_not_disturb_the_others(tmp_path, data):
    passing = SMALL_BLOCKS + FULL.replace("TIMES", "times").replace("import", "times = [1]; import")
    everyone = result(start(tmp_path, 3, 1, passing, broadcast=True))
    assert [each["copied"].count("dev/00000.h5") for each in everyone] == [0, 1, 0]
    for each in everyone:
        path = Path(each["directory"], "dev/00000.h5")
        assert path.read_bytes() == (data / "dev/00000.h5").read_bytes()
        path.unlink()
    lasting = passing.replace("[1]", "[1, 1]")
    done = start(tmp_path, 3, 1, lasting, broadcast=True)
    assert done.returncode == 2
    assert done.stderr.count("rank 1: ") == done.stderr.count("disk full while copying") == 1
    for rank in (0, 2):
        assert (Path(everyone[rank]["directory"]) / "dev/00000.h5").exists()


DAMAGE = """
path = directory / "dev/00000.h5"
if here.rank == 1:
    status = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
here.barrier()
staging.stage(experiment, here, verify=True)
"""


def test_a_damaged_copy_is_sent_again(tmp_path, data):
    everyone = result(start(tmp_path, 2, 1, SMALL_BLOCKS, DAMAGE, broadcast=True))
    for each in everyone:
        assert "dev/00000.h5" not in each["copied"]
        path = Path(each["directory"], "dev/00000.h5")
        assert path.read_bytes() == (data / "dev/00000.h5").read_bytes()


def test_a_bad_source_is_blamed_after_a_broadcast_as_well(tmp_path, data):
    path = data / "dev" / "00000.h5"
    content = path.read_bytes()
    path.write_bytes(content[:-1000])
    short = start(tmp_path, 2, 1, SMALL_BLOCKS, broadcast=True)
    assert short.returncode == 2
    assert short.stderr.count(f"{path}: has {len(content) - 1000} bytes, wanted") == 1
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    corrupt = start(tmp_path, 2, 1, SMALL_BLOCKS, broadcast=True)
    assert corrupt.returncode == 2
    assert corrupt.stderr.count(f"{path}: checksum is") == 1
    assert not list((tmp_path / "nvme").rglob("dev/00000.h5"))


SIGNAL = """
def signalled(source, target, *rest):
    if here.rank == 1 and len(names) == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
    return counting(source, target, *rest)
copying._pour = signalled
"""


def test_a_signal_to_one_rank_stops_all_and_the_next_run_goes_on(tmp_path, data):
    done = start(tmp_path, 2, 2, SIGNAL)
    assert done.returncode == 75, done.stderr
    assert done.stderr.count("stage: stopped by SIGTERM; what is copied stays") == 1
    assert "Traceback" not in done.stderr
    target = next((tmp_path / "nvme").glob("*/node-0-of-1"))
    finished = staged(target)
    assert 1 <= len(finished) < 4
    assert not list(target.rglob("*.tmp"))
    first, second = result(start(tmp_path, 2, 2))
    assert sorted(finished + first["copied"] + second["copied"]) == staged(data)


def test_a_signal_ends_a_broadcast_after_the_file_at_hand(tmp_path, data):
    write_split(data, "test", (3, 2), 9)
    (data / "manifest.json").unlink()
    before = """
from stemdl.data import broadcasting
send = broadcasting._send
def signalled(*arguments):
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    send(*arguments)
broadcasting._send = signalled
"""
    done = start(tmp_path, 3, 1, before, broadcast=True)
    assert done.returncode == 75, done.stderr
    directories = sorted((tmp_path / "nvme").glob("*/node-*"))
    assert [staged(each) for each in directories] == [["dev/00000.h5"]] * 3


PURGE = """
import fcntl
if here.rank == 1:  # another job reads there
    use = directory.with_name(f".{directory.name}.use")
    held = os.open(use, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_SH)
here.barrier()
staging.purge(experiment, here)
found["there"] = directory.exists()
"""


def test_purge_on_several_nodes_keeps_what_is_used(tmp_path, data):
    done = start(tmp_path, 2, 1, after=PURGE)
    assert [each["there"] for each in result(done)] == [False, True]
    assert "from 1 of 2 nodes" in done.stdout
    assert "1 kept: another job uses the copies there" in done.stdout


def test_training_purges_what_it_staged(tiny_experiment, tiny_data, tmp_path):
    stage = [f"stage.dir={tmp_path}/nvme", "stage.keep_free=0", "stage.purge=true"]
    train = ["-m", "stemdl", "train", str(tiny_experiment), "train.epochs=1", *stage]
    done = run_ranks(2, train)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("stage: purged ")
    assert list((tmp_path / "nvme").rglob("*.h5")) == []
    assert len(list(tiny_data.rglob("*.h5"))) == 4
