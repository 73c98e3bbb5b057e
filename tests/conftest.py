"""Small data sets and experiments that tests share."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from stemdl import files
from stemdl.data import manifest, shards
from stemdl.launch import local

SCAN, DETECTOR, POTENTIAL = (4, 4), (6, 6), (8, 8)


def write_split(directory: Path, split: str, counts: Sequence[int], seed: int) -> None:
    """Shards of random blobs whose patterns lean towards the potential's slope: quick to learn."""
    rng = np.random.default_rng(seed)
    for number, count in enumerate(counts):
        potential = rng.random((count, *POTENTIAL), np.float32) * 40
        blocks = potential.reshape(count, SCAN[0], 2, SCAN[1], 2).mean((2, 4))
        detector = rng.random(DETECTOR) + 0.5
        cbed = blocks[..., None, None] * detector * 0.05 + 0.1
        samples = np.zeros(count, shards.SAMPLE)
        samples["material"] = [f"{split}-{row % 3}".encode() for row in range(count)]
        samples["prototype"] = samples["formula"] = samples["material"]
        samples["energy"], samples["semi_angle"], samples["thickness"] = 100, 20, 40
        samples["mean_z"], samples["elements"] = 20, 2
        samples["index"] = np.arange(count)
        columns = np.zeros(count, shards.COLUMN)
        columns["sample"] = np.arange(count)
        columns["y"] = columns["x"] = 1.0
        columns["atoms"], columns["nearest"] = 5, 2
        shards.write(
            directory / split / f"{number:05d}.h5",
            cbed=cbed.astype(np.float16),
            potential=potential,
            columns=columns,
            samples=samples,
            axes=shards.Axes(0.5, 0.1, 0.25, 0.3),
            creator="tests",
        )


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set: 24 training samples in two shards, 6 dev, 6 test. Do not change it: copy it."""
    directory = tmp_path_factory.mktemp("tiny") / "data"
    for seed, (split, counts) in enumerate({"train": (14, 10), "dev": (6,), "test": (6,)}.items()):
        write_split(directory, split, counts, seed)
    records = [manifest.shard_record(path) for path in sorted(directory.glob("*/*.h5"))]
    files.write_json(directory / manifest.NAME, manifest.SCHEMA, {"shards": records})
    return directory


@pytest.fixture
def tiny_experiment(tmp_path: Path, tiny_data: Path) -> Path:
    """An experiment file for `tiny_data`: seconds to train, RUN in this test's folder."""
    tree = {
        "name": "tiny",
        "run": str(tmp_path / "run"),
        "data": {"dir": str(tiny_data)},
        "network": {
            "initial_channels": 8,
            "growth": 4,
            "layers": [1],
            "bottleneck_layers": 1,
        },
        "train": {
            "batch": 3,
            "epochs": 3,
            "log_every": 1,
            "threads": 1,
            "stall_limit": 60,
            "schedule": {"warmup": 0},
        },
        "reduction": {"stall_warning": 10, "stall_shutdown": 30},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def run_ranks(
    ranks: int, arguments: Sequence[str], *, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` on `ranks` processes (without mpirun if 1); never for ever."""
    launcher = [local.mpirun(), "-n", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [*launcher, sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
