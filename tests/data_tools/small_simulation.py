"""An experiment file for a simulation of seconds, from a few CIF files."""

from pathlib import Path

import yaml
from crystals_on_disk import write_cifs


def write_experiment(folder: Path, data: str = "data") -> Path:
    """Five shards; materials of six families from `folder`/cifs."""
    if not (folder / "cifs").exists():
        write_cifs(folder / "cifs")
    tree = {
        "name": "small",
        "data": {"dir": str(folder / data)},
        "simulate": {
            "materials": {"prototypes": False, "cif_dir": str(folder / "cifs")},
            "samples": {"train": 5, "dev": 2, "test": 3},
            "shard_samples": 2,
            "box": 12,
            "grid": 0.25,
            "scan": [4, 4],
            "detector": [15, 15],
            "thickness": [6, 10],
            "dose": 1e5,
        },
    }
    path = folder / f"{data}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a data set."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
