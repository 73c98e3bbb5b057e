"""Whole data sets: contents, repeatability, resumption, and mistakes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small_simulation import contents, write_experiment

from data_tools import cli
from data_tools.simulate import simulate
from data_tools.structures import SPLITS
from stemdl import config, files
from stemdl.data import manifest, shards
from stemdl.ranks import Ranks


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished data set: experiment file, directory, and what simulate returned."""
    folder = tmp_path_factory.mktemp("simulated")
    path = write_experiment(folder)
    report = simulate(config.load(path, ["simulate.workers=1"]), Ranks())
    return path, folder / "data", report


def test_every_sample_is_there_once(made):
    _, directory, report = made
    assert (report["samples"], report["kept"]) == (10, 0)
    assert report["bytes"] == sum(path.stat().st_size for path in directory.glob("*/*.h5"))
    indices = []
    for place, (name, count) in enumerate(zip(SPLITS, (5, 2, 3), strict=True)):
        split = shards.open_split(directory, name)
        assert split.count == count
        assert split.cbed_shape == (4, 4, 15, 15) and split.potential_shape == (16, 16)
        assert split.axes == shards.Axes(1.0, 2 / 12, 0.25, 0.3)
        tables = [shards.read_table(shard) for shard in split.shards]
        indices += [index for table in tables for index in table["index"]]
        assert [i % 3 for table in tables for i in table["index"]] == [place] * count
    assert len(set(indices)) == 10


def test_samples_are_what_a_network_can_learn_from(made):
    split = shards.open_split(made[1], "train")
    found = shards.read_samples(split.shards[0], [0, 1])
    cbed = found["cbed"].astype(np.float32)
    assert cbed.mean() == pytest.approx(1, abs=0.15)  # fraction of the beam x pixels
    assert (found["potential"].max(axis=(1, 2)) > 2 * found["potential"].mean(axis=(1, 2))).all()
    table = shards.read_table(split.shards[0])
    np.testing.assert_allclose(table["dose"], 1e5)
    for row in range(2):
        columns = shards.read_columns(split.shards[0], row)
        assert len(columns) and (columns["y"] > -0.2).all() and (columns["y"] < 4).all()
        assert table["mean_z"][row] == pytest.approx(columns["mean_z"].mean(), rel=0.3)


def test_manifest_tells_the_story(made):
    _, directory, _ = made
    content = files.read_json(directory / manifest.NAME, manifest.SCHEMA)
    assert content["samples"] == {"train": 5, "dev": 2, "test": 3}
    named = sorted(name for names in content["materials"].values() for name in names)
    assert named == ["CsCl", "Mg", "NaCl", "Si", "SrTiO3", "W"]
    assert content["skipped"] == {}
    assert [record["path"] for record in content["shards"]] == [
        "dev/00000.h5",
        "test/00000.h5",
        "test/00001.h5",
        "train/00000.h5",
        "train/00001.h5",
        "train/00002.h5",
    ]
    for record in content["shards"]:
        assert manifest.checksum(directory / record["path"]) == record["checksum"]


def test_more_processes_make_the_same_bytes(made, tmp_path):
    path, directory, _ = made
    overrides = [f"data.dir={tmp_path / 'data'}", "simulate.workers=3"]
    simulate(config.load(path, overrides), Ranks())
    assert contents(tmp_path / "data") == contents(directory)


def test_missing_shards_are_made_again_and_others_kept(made, tmp_path):
    path, directory, _ = made
    copy = tmp_path / "data"
    shutil.copytree(directory, copy)
    (copy / "train/00001.h5").unlink()
    (copy / manifest.NAME).unlink()
    kept = (copy / "train/00000.h5").stat().st_mtime_ns
    report = simulate(config.load(path, [f"data.dir={copy}", "simulate.workers=1"]), Ranks())
    assert (report["samples"], report["kept"]) == (2, 5)
    assert contents(copy) == contents(directory)
    assert (copy / "train/00000.h5").stat().st_mtime_ns == kept


def test_a_dry_run_says_all_and_writes_nothing(made, tmp_path, capsys):
    path, *_ = made
    arguments = ["simulate", str(path), f"data.dir={tmp_path / 'data'}", "--dry-run"]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert "to make: 10 samples in 6 shards" in said and "samples/hour a core" in said
    assert "nothing was written" in said
    assert not (tmp_path / "data").exists()


def test_a_manifest_remembers_what_was_made(made, tmp_path, capsys):
    """A kept shard that rotted since is not listed with a new checksum, so verify finds it."""
    path, directory, _ = made
    copy = tmp_path / "data"
    shutil.copytree(directory, copy)
    (copy / "train/00001.h5").unlink()
    damage(copy / "train/00000.h5")
    assert cli.main(["simulate", str(path), f"data.dir={copy}", "simulate.workers=1"]) == 0
    assert (copy / manifest.NAME).read_bytes() == (directory / manifest.NAME).read_bytes()
    assert cli.main(["verify", str(copy)]) == 2
    assert "train/00000.h5" in capsys.readouterr().err


def test_shards_without_a_manifest_are_verified_before_they_are_listed(made, tmp_path, capsys):
    path, directory, _ = made
    copy = tmp_path / "data"
    shutil.copytree(directory, copy)
    (copy / manifest.NAME).unlink()
    damage(copy / "train/00000.h5")
    arguments = ["simulate", str(path), f"data.dir={copy}", "simulate.workers=1"]
    assert cli.main(arguments) == 2
    assert "cbed rows 0 to 1 are corrupt" in capsys.readouterr().err
    (copy / "train/00000.h5").unlink()
    assert cli.main(arguments) == 0
    assert contents(copy) == contents(directory)


def damage(shard: Path) -> None:
    offset = shards.open_shard(shard).cbed_offset
    content = bytearray(shard.read_bytes())
    content[offset + 5] ^= 1
    shard.write_bytes(content)


def test_a_data_set_can_grow(made, tmp_path):
    """Samples that were there stay what they were; a short last shard is filled up."""
    path, directory, _ = made
    copy = tmp_path / "data"
    shutil.copytree(directory, copy)
    overrides = [f"data.dir={copy}", "simulate.workers=1", "simulate.samples.train=6"]
    report = simulate(config.load(path, overrides), Ranks())
    assert (report["samples"], report["kept"]) == (2, 5)
    before, after = (shards.open_shard(each / "train/00002.h5") for each in (directory, copy))
    assert (before.count, after.count) == (1, 2)
    for key, values in shards.read_samples(before, [0]).items():
        np.testing.assert_array_equal(values, shards.read_samples(after, [0])[key])


def test_a_killed_run_goes_on_and_leaves_no_process(made, tmp_path):
    path, directory, _ = made
    data = tmp_path / "data"
    arguments = ["simulate", str(path), f"data.dir={data}", "simulate.workers=2"]
    process = subprocess.Popen([sys.executable, "-m", "data_tools.cli", *arguments])
    wait_for(lambda: list(data.glob("train/*.h5")), 90)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    assert workers
    wait_for(lambda: not any(is_running(int(worker)) for worker in workers), 20)
    assert cli.main(arguments) == 0
    assert contents(data) == contents(directory)


def test_a_killed_worker_is_one_line(made, tmp_path, monkeypatch, capsys):
    path, *_ = made
    monkeypatch.setattr("data_tools.simulate.simulate_sample", kill_this_process)
    arguments = ["simulate", str(path), f"data.dir={tmp_path / 'data'}", "simulate.workers=2"]
    assert cli.main(arguments) == 2
    assert "a simulating process was killed" in capsys.readouterr().err


def kill_this_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("simulate.seed=1", "was made with other settings"),
        ("simulate.samples.train=3", "holds more samples than simulate.samples asks for"),
        ("simulate.materials.cif_dir=absent", "absent: no such folder"),
        ("simulate.detector=[80,80]", "use fewer pixels or a finer grid"),
    ],
)
def test_mistakes_are_one_line(made, capsys, override, message):
    path, directory, _ = made
    before = contents(directory)
    assert cli.main(["simulate", str(path), override, "simulate.workers=1"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("stemdl: ")
    assert contents(directory) == before


def test_the_same_crystals_elsewhere_are_the_same_data(made, tmp_path):
    """The folder's name does not matter, the crystals do."""
    path, directory, _ = made
    shutil.copytree(path.parent / "cifs", tmp_path / "moved")
    arguments = ["simulate", str(path), f"simulate.materials.cif_dir={tmp_path / 'moved'}"]
    assert cli.main(arguments) == 0
    (tmp_path / "moved/W.cif").unlink()
    assert cli.main(arguments) == 2
    assert (directory / "train/00000.h5").exists()


def is_running(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_for(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
