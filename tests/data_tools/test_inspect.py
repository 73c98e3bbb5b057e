"""Looking at data sets, and finding damage."""

import os
import shutil

import matplotlib.image
import numpy as np
import pytest

from data_tools import cli, inspect
from stemdl import config
from stemdl.data import manifest, shards, staging
from stemdl.ranks import Ranks


@pytest.fixture
def data(tmp_path, tiny_data):
    return shutil.copytree(tiny_data, tmp_path / "data")


def test_a_data_set_is_listed(data, capsys):
    assert cli.main(["inspect", str(data)]) == 0
    out = capsys.readouterr().out
    assert "train/00000.h5: 14 samples, cbed 4 x 4 x 6 x 6 float16" in out
    assert "4 shards, 36 samples" in out
    assert "scan step 0.5 Å" in out and "8 x 8 of 0.25 Å" in out


def test_a_shard_has_a_table(data, capsys):
    assert cli.main(["inspect", str(data / "train/00000.h5")]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("  2  "))
    assert row.split()[:2] == ["2", "train-2"]
    assert lines[-1] == "... 4 more"


def test_the_figure_shows_the_samples(data, tmp_path):
    png = tmp_path / "look.png"
    assert cli.main(["inspect", str(data), "--png", str(png)]) == 0
    image = matplotlib.image.imread(png)
    assert image.shape[0] > 800 and image[..., :3].std() > 0.1


def test_virtual_detectors_count_the_right_electrons():
    cbed = np.zeros((1, 2, 9, 9), np.float32)
    cbed[0, 0, 4, 6] = 3  # two pixels from the axis: inside the disc
    cbed[0, 0, 8, 4] = 1  # four pixels: beyond 1.5 of it
    bright, dark = inspect.virtual_fields(cbed, detector_step=0.1, aperture=0.25)
    np.testing.assert_allclose(bright, [[0.75, 0]])
    np.testing.assert_allclose(dark, [[0.25, 0]])


def test_whole_data_verifies(data, capsys):
    assert cli.main(["verify", str(data)]) == 0
    assert "4 shards are whole; all as in manifest.json" in capsys.readouterr().out
    (data / manifest.NAME).unlink()
    assert cli.main(["verify", str(data)]) == 0
    assert "no manifest" in capsys.readouterr().out


def flip_a_byte(data):
    path = data / "train/00001.h5"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_off(data):
    path = data / "test/00000.h5"
    path.write_bytes(path.read_bytes()[:-5000])


DAMAGE = {
    "flipped bit": (flip_a_byte, "train/00001.h5: cbed rows"),
    "truncated": (cut_off, "test/00000.h5: truncated"),
    "lost": (lambda data: (data / "dev/00000.h5").unlink(), "dev/00000.h5: is in manifest.json"),
    "strange": (
        lambda data: shutil.copy(data / "dev/00000.h5", data / "dev/00001.h5"),
        "dev/00001.h5: is not in manifest.json",
    ),
    "exchanged": (
        lambda data: shutil.copy(data / "dev/00000.h5", data / "test/00000.h5"),
        "test/00000.h5: differs from manifest.json",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(data, kind, capsys):
    damage, message = DAMAGE[kind]
    damage(data)
    assert cli.main(["verify", str(data)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.fixture
def staged(data, tmp_path):
    tree = {
        "run": str(tmp_path / "run"),
        "data": {"dir": str(data)},
        "stage": {"dir": str(tmp_path / "nvme"), "keep_free": 0},
    }
    return staging.stage(config.build(tree, "test"), Ranks())


def test_copies_on_a_node_verify(staged, capsys):
    assert cli.main(["verify", str(staged)]) == 0
    assert "4 shards are whole; all that node 0 of 1 needs, as it" in capsys.readouterr().out
    assert cli.main(["inspect", str(staged)]) == 0
    assert "4 shards, 36 samples" in capsys.readouterr().out
    assert cli.main(["verify", str(staged.parent.parent)]) == 2
    assert f"staged copies are in {staged}" in capsys.readouterr().err


def change_between_the_arrays(staged):
    """A byte that no block of rows covers; the time stamp stays."""
    path = staged / "train/00001.h5"
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(shards.open_shard(path).cbed_offset - 1)
        file.write(b"\x55")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


DAMAGED_COPY = {
    "flipped bit": (flip_a_byte, "train/00001.h5: cbed rows"),
    "between": (change_between_the_arrays, "train/00001.h5: is not what was copied"),
    "lost": (lambda staged: (staged / "dev/00000.h5").unlink(), "is in deal.json but missing; run"),
}


@pytest.mark.parametrize("kind", DAMAGED_COPY)
def test_damaged_copies_are_found(staged, kind, capsys):
    damage, message = DAMAGED_COPY[kind]
    damage(staged)
    assert cli.main(["verify", str(staged)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_nothing_there(tmp_path, capsys):
    for verb in ("inspect", "verify"):
        assert cli.main([verb, str(tmp_path / "absent")]) == 2
        assert "absent: no shard file" in capsys.readouterr().err
