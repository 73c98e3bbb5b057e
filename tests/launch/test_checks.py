"""What `stemdl check` finds red, with the remedy; ranks other than this one are made up."""

import shutil
import tempfile
from collections import namedtuple

import h5py
import pytest

from stemdl import config
from stemdl.errors import UserError
from stemdl.launch import check, checks
from stemdl.ranks import Ranks


class Others:
    """A communicator of two ranks of which this one is `rank`; the other says `theirs`."""

    def __init__(self, rank: int, theirs) -> None:
        self.rank, self.theirs = rank, theirs

    def bcast(self, value, root):
        return value if self.rank == root else self.theirs

    def allgather(self, value):
        theirs = self.theirs(value) if callable(self.theirs) else self.theirs
        return [value, theirs] if self.rank == 0 else [theirs, value]

    def Barrier(self):
        pass


def two(rank: int, theirs) -> Ranks:
    return Ranks(rank, 2, rank, 2, Others(rank, theirs))


@pytest.fixture
def experiment(tiny_experiment):
    return lambda *overrides: config.load(tiny_experiment, list(overrides))


def test_another_version_on_one_rank(experiment):
    first = {"Python": "3.11.7", "stemdl": "9.9"}
    with pytest.raises(UserError, match=r"start all ranks from one environment"):
        checks.versions(experiment(), two(1, first))
    assert "numpy 2" in checks.versions(experiment(), Ranks())


def test_a_clock_that_is_off(experiment):
    with pytest.raises(UserError, match=r"clock is -\d+\.\d s off"):
        checks.clocks(experiment(), two(0, lambda value: value + 3600.0))
    told = checks.clocks(experiment(), two(0, lambda value: value + 0.002))
    assert "within 1.0 ms" in told


def test_memory_is_no_staging_disk(experiment):
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        pytest.raises(UserError, match="is memory, not a disk"),
    ):
        checks.storage(experiment(f"stage.dir={memory}"), Ranks())


def test_a_disk_that_another_node_sees_is_shared(experiment, tmp_path):
    """The other node's probe file turns up in our directory."""
    disk = experiment(f"stage.dir={tmp_path / 'disk'}")
    (base,) = {checks.stage_plan.plan(disk, Ranks()).target.parent}
    base.mkdir(parents=True)
    strange = ".check-othernode-0"
    (base / strange).write_bytes(b"")
    probes = Others(0, lambda value: strange if str(value).startswith(".check") else value)

    class Node(Ranks):
        def collect(self, value):
            return probes.allgather(value)

    with pytest.raises(UserError, match="is shared between nodes"):
        checks.storage(disk, Node())


def test_a_full_disk(experiment, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage(10**9, 10**9, 5))
    with pytest.raises(UserError, match=r"has 5 B free, wanted 1\.0 GB"):
        checks.storage(experiment(f"stage.dir={tmp_path / 'disk'}"), Ranks())


def test_a_good_disk_is_left_as_it_was(experiment, tmp_path):
    told = checks.storage(experiment(f"stage.dir={tmp_path / 'disk'}"), Ranks())
    assert "writes" in told
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]


def test_a_truncated_shard_and_one_of_another_kind(experiment, tiny_data, tmp_path):
    copy = tmp_path / "data"
    shutil.copytree(tiny_data, copy)
    wanted = experiment(f"data.dir={copy}")
    assert checks.data(wanted, Ranks()).startswith("4 shards, 36 samples")
    path = copy / "train" / "00001.h5"
    with h5py.File(path, "r+") as file:
        file.attrs["scan_step"] = 0.7
    with pytest.raises(UserError, match=r"00001\.h5: holds samples of another kind"):
        checks.data(wanted, Ranks())
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(UserError, match=r"00001\.h5"):
        checks.data(wanted, Ranks())


def test_a_run_that_cannot_be_written(experiment, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        checks.run(experiment(f"run={tmp_path / 'file' / 'run'}"), Ranks())


def test_one_red_check_makes_all_red_and_the_others_still_run(experiment, capsys, monkeypatch):
    def fails(experiment, ranks):
        raise UserError("mend me")

    monkeypatch.setattr(check, "CHECKS", {"first": fails, "second": lambda e, r: "fine"})
    assert not check.check(experiment(), Ranks())
    out = capsys.readouterr().out
    assert "RED first" in out
    assert "mend me" in out
    assert "ok  second     fine" in out


def test_nodes_with_few_ranks_are_named():
    assert checks.layout(Ranks()) == "1 rank on 1 node"
    assert checks.layout(two(0, "elsewhere")) == "2 ranks on 2 nodes"

    class Uneven(Ranks):
        def collect(self, value):
            return ["n1"] * 6 + ["n2"] * 5

    assert checks.layout(Uneven(0, 11)).endswith("unevenly: 5 on n2, up to 6 on others")
