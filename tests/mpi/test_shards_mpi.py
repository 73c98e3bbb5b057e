"""A split opened by several ranks: each header is read once, and all know the same."""

import json

import pytest
from conftest import run_ranks, write_split

from stemdl import files
from stemdl.data import shards

pytestmark = pytest.mark.mpi

# Arguments: a directory for each rank, ranks a node. Prints how many shards each rank opened, and
# the samples of each shard.
OPENING = """
import dataclasses, json, sys
import h5py
from stemdl import command, ranks
from stemdl.data import shard_reading, shards

opened = []
file = h5py.File
shard_reading.h5py.File = lambda *arguments, **keys: opened.append(1) or file(*arguments, **keys)

def main():
    here = ranks.discover()
    each = int(sys.argv[1])
    here = dataclasses.replace(here, local_rank=here.rank % each, local_size=each)
    split = shards.open_split(sys.argv[2 + here.rank], "train", here)
    own = [[str(shard.path), shard.first, shard.count] for shard in split.shards]
    everyone = here.collect((len(opened), own))
    if here.rank == 0:
        print(json.dumps(everyone))

sys.exit(command.run(main))
"""


@pytest.fixture
def data(tmp_path):
    directory = tmp_path / "data"
    write_split(directory, "train", (5, 6, 7, 8, 9), 0)
    return directory


def opening(tmp_path, directories, ranks_a_node):
    script = tmp_path / "opening.py"
    script.write_text(OPENING)
    arguments = [script, ranks_a_node, *directories]
    return run_ranks(len(directories), [str(each) for each in arguments], timeout=60)


def result(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_header_is_read_once_and_all_ranks_see_the_split(tmp_path, data):
    everyone = result(opening(tmp_path, [data] * 3, 3))
    assert [opened for opened, _ in everyone] == [2, 2, 1]
    wanted = [[str(data / f"train/{i:05d}.h5"), 0, 5 + i] for i in range(5)]
    assert all(found == wanted for _, found in everyone)


def test_ranks_of_a_node_share_the_headers_of_its_part(tmp_path, data):
    """Two nodes of two ranks, each with its copies and with rows of a shard on the border."""
    parts = {0: [["00000.h5", 0, 5], ["00001.h5", 0, 4]], 1: [["00001.h5", 4, 2]]}
    for node, rows in parts.items():
        directory = tmp_path / f"node-{node}"
        (directory / "train").mkdir(parents=True)
        for name, *_ in rows:
            (directory / "train" / name).write_bytes((data / "train" / name).read_bytes())
        content = {"node": node, "nodes": 2, "parts": ["train"], "splits": {"train": rows}}
        files.write_json(directory / shards.DEAL_NAME, shards.DEAL, content)
    directories = [tmp_path / f"node-{node}" for node in (0, 0, 1, 1)]
    everyone = result(opening(tmp_path, directories, 2))
    assert [opened for opened, _ in everyone] == [1, 1, 1, 0]
    for (_, found), directory, node in zip(everyone, directories, (0, 0, 1, 1), strict=True):
        rows = [[str(directory / "train" / name), *rest] for name, *rest in parts[node]]
        assert found == rows


def test_what_one_rank_finds_wrong_all_ranks_say(tmp_path, data):
    damaged = data / "train/00001.h5"  # rank 1's
    damaged.write_bytes(damaged.read_bytes()[:-1000])
    done = opening(tmp_path, [data] * 3, 3)
    assert done.returncode == 2
    assert done.stderr.count("00001.h5: truncated") == 1
    assert "Traceback" not in done.stderr
    none = opening(tmp_path, [tmp_path / "nowhere"] * 3, 3)
    assert none.returncode == 2
    assert none.stderr.count("no such data directory") == 1
