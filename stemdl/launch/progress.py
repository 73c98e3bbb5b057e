"""Where a run stands, read from its files without TensorFlow."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py

from stemdl.errors import UserError


@dataclass(frozen=True)
class Checkpoint:
    """The position in RUN/checkpoints/last.h5 (see `training.checkpoint.Position`)."""

    step: int
    epochs: float  # done, with the part of the epoch under way
    ranks: int
    best: float | None  # least validation loss so far
    clock: dict[str, float]  # s in each phase of training
    written: float  # time.time() [s]


def last_checkpoint(run: Path) -> Checkpoint | None:
    """The last checkpoint's position, or None without one.

    Raises:
        UserError: the file is damaged.
    """
    path = run / "checkpoints" / "last.h5"
    if not path.exists():
        return None
    try:
        with h5py.File(path, "r", locking=False) as file:
            position = json.loads(file.attrs["position"])
        return Checkpoint(
            step=position["step"],
            epochs=position["step"] / max(1, position["steps_per_epoch"]),
            ranks=position["ranks"],
            best=position["best"],
            clock=position["clock"],
            written=path.stat().st_mtime,
        )
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read as a checkpoint ({error})") from error


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of RUN/metrics.jsonl; a last line that a kill cut short is left out."""
    path = run / "metrics.jsonl"
    lines: list[dict[str, Any]] = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines
