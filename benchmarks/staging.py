"""Staging against `cp` of the same files to the same disk, and against itself once staged.

    python benchmarks/staging.py [--gigabytes 1] [--rounds 3] [--dir build/benchmarks/staging]

1. copy: throughput of `stemdl stage` (checksum of every byte, durable) over that of `cp` followed
   by `sync` of the copies, which is durable as well but checks nothing. Target: >= 0.95.
2. again: time of a second run, all staged, over the first. Target: < 0.05.

Rounds alternate and the source is dropped from the page cache before each copy; the best of each
counts. Plain `cp`, which leaves its copies to the page cache, is timed as well.
"""

import argparse
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stemdl import config, files
from stemdl.data import manifest, shards, staging
from stemdl.ranks import Ranks

ROOT = Path(__file__).parent.parent
SAMPLE = (12, 12, 31, 31)  # the demo's
COUNT = 240  # samples in a shard, 66 MB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the data set")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the best is reported")
    parser.add_argument("--streams", type=int, default=2, help="stage.streams")
    parser.add_argument("--dir", type=Path, default=ROOT / "build/benchmarks/staging")
    options = parser.parse_args()
    source, target = options.dir / "data", options.dir / "nvme"
    shutil.rmtree(options.dir, ignore_errors=True)
    try:
        make(source, options.gigabytes)
        result = compare(source, target, options.rounds, options.streams)
    finally:
        shutil.rmtree(options.dir, ignore_errors=True)
    print(
        f"copy: ours {result['ours_GB_per_s']:.2f} GB/s, cp and sync "
        f"{result['cp_sync_GB_per_s']:.2f} GB/s, ratio {result['copy']:.3f} (target >= 0.95); "
        f"cp alone {result['cp_GB_per_s']:.2f} GB/s"
    )
    print(
        f"again: {1e3 * result['again_s']:.0f} ms of {result['first_s']:.2f} s, "
        f"ratio {result['again']:.4f} (target < 0.05)"
    )
    path = ROOT / "build/benchmarks/staging.json"
    files.write_json(path, "stemdl.benchmark/1", result)
    print(f"wrote {path}")


def make(directory: Path, gigabytes: float) -> None:
    """A data set of random patterns: nothing that a disk could compress."""
    rng = np.random.default_rng(0)
    size = COUNT * int(np.prod(SAMPLE)) * 2
    records = []
    for number in range(max(1, round(gigabytes * 1e9 / size))):
        path = directory / "train" / f"{number:05d}.h5"
        shards.write(
            path,
            cbed=rng.random((COUNT, *SAMPLE), np.float32).astype(np.float16),
            potential=np.zeros((COUNT, 48, 48), np.float32),
            columns=np.zeros(0, shards.COLUMN),
            samples=np.zeros(COUNT, shards.SAMPLE),
            axes=shards.Axes(1, 0.08, 0.25, 0.3),
            creator="benchmarks/staging.py",
        )
        records.append(manifest.shard_record(path))
    files.write_json(directory / manifest.NAME, manifest.SCHEMA, {"shards": records})


def compare(source: Path, target: Path, rounds: int, streams: int) -> dict[str, float]:
    """Gigabytes a second of each way, and the ratios."""
    experiment = config.build(
        {
            "run": str(target / "run"),
            "data": {"dir": str(source)},
            "stage": {"dir": str(target), "streams": streams, "keep_free": 0},
        },
        "benchmark",
    )
    paths = sorted(source.glob("train/*.h5"))
    total = sum(path.stat().st_size for path in paths) / 1e9

    def ours() -> None:
        staging.stage(experiment, Ranks())

    def cp() -> None:
        subprocess.run(["cp", "-r", source, target / "cp"], check=True)

    def cp_sync() -> None:
        cp()
        subprocess.run(["sync", *target.glob("cp/train/*.h5")], check=True)

    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, copy in {"ours": ours, "cp_sync": cp_sync, "cp": cp}.items():
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            os.sync()
            forget(paths)
            best[name] = min(best.get(name, np.inf), seconds(copy))
            if name == "ours":
                best["again"] = min(best.get("again", np.inf), seconds(ours))
    return {
        "GB": total,
        "ours_GB_per_s": total / best["ours"],
        "cp_sync_GB_per_s": total / best["cp_sync"],
        "cp_GB_per_s": total / best["cp"],
        "copy": best["cp_sync"] / best["ours"],
        "first_s": best["ours"],
        "again_s": best["again"],
        "again": best["again"] / best["ours"],
    }


def forget(paths: list[Path]) -> None:
    """Drop files from the page cache, so that they are read from the disk."""
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
