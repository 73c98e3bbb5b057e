"""Small data sets for the tests of this folder: every axis of another length."""

from pathlib import Path

import numpy as np

from stemdl import config, files
from stemdl.data import manifest, shards

SCAN, DETECTOR, POTENTIAL = (3, 5), (7, 11), (6, 10)
AXES = shards.Axes(scan_step=0.5, detector_step=0.1, potential_pixel=0.25, potential_blur=0.3)


def arrays(count, dtype="float16", seed=0, scan=SCAN, detector=DETECTOR, potential=POTENTIAL):
    """cbed, potential, samples and columns of `count` random samples."""
    rng = np.random.default_rng(seed)
    cbed = rng.random((count, *scan, *detector)) * (200 if dtype == "uint16" else 1)
    samples = np.zeros(count, shards.SAMPLE)
    samples["material"] = [f"Ga{row}Ås".encode() for row in range(count)]
    samples["dose"], samples["index"] = np.nan, np.arange(count)
    columns = np.zeros(2 * count, shards.COLUMN)
    columns["sample"] = np.tile(np.arange(count), 2)
    columns["y"] = np.arange(2 * count)
    return {
        "cbed": cbed.astype(dtype),
        "potential": rng.random((count, *potential), np.float32),
        "samples": samples,
        "columns": columns,
    }


def write(path, count, **options):
    """Write a shard; options of `arrays`, and compression."""
    compression = options.pop("compression", "none")
    content = arrays(count, **options)
    shards.write(path, **content, axes=AXES, creator="tests", compression=compression)
    return content


def data_set(directory: Path, counts=None, *, listed=True, **options) -> Path:
    """A data set of shards with `counts` samples in each split, with or without a manifest."""
    counts = counts or {"train": (5, 3, 7), "dev": (4,), "test": (2, 2)}
    for split, sizes in counts.items():
        for number, count in enumerate(sizes):
            seed = 100 * len(split) + number
            write(directory / split / f"{number:05d}.h5", count, **{"seed": seed} | options)
    if listed:
        list_shards(directory)
    return directory


def list_shards(directory: Path) -> None:
    records = [manifest.shard_record(path) for path in sorted(directory.glob("*/*.h5"))]
    files.write_json(directory / manifest.NAME, manifest.SCHEMA, {"shards": records})


def flip_byte(path: Path, offset: int) -> None:
    """Change one byte, as a bad disk would."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def experiment(data, **stage):
    """One that stages `data` beside it; `stage`: keys of that section."""
    tree = {
        "run": str(data.parent / "run"),
        "data": {"dir": str(data)},
        "stage": {"dir": str(data.parent / "nvme"), "keep_free": 0} | stage,
    }
    return config.build(tree, "test")
