"""RUN/data.json: what the patterns were like that a network was trained on.

A network knows nothing of Å: it takes pixels, and gives sense only to patterns on the same scan
step and detector sampling as those it learned from. Whoever brings it other data needs these
numbers, and the training data may be far away.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stemdl import files
from stemdl.data import shards
from stemdl.data.normalise import Normaliser
from stemdl.data.shards import Axes, Split
from stemdl.errors import UserError

SCHEMA = "stemdl.trained_on/1"
NAME = "data.json"
SAME = 0.01  # steps that differ by less than this part count as equal
TABLES = 16  # shards whose sample tables are read for the ranges, spread over the split

Range = tuple[float, float]


@dataclass(frozen=True)
class TrainedOn:
    """The kind of data that a network takes and gives."""

    cbed_shape: tuple[int, int, int, int]  # (Sy, Sx, Ky, Kx)
    potential_shape: tuple[int, int]  # (H, W)
    axes: Axes
    cbed_unit: str
    intensity: float  # what the pixels of a pattern sum to, on average [cbed_unit]
    energy: Range | None  # least and largest [keV]; None where the data do not say it
    semi_angle: Range | None  # [mrad]


def describe(split: Split, normaliser: Normaliser) -> TrainedOn:
    """The kind of data of a training split and its statistics."""
    assert split.potential_shape is not None
    chosen = np.unique(np.linspace(0, len(split.shards) - 1, TABLES).astype(int))
    tables = np.concatenate([shards.read_table(split.shards[index]) for index in chosen])
    ranges = {name: _range(tables[name]) for name in ("energy", "semi_angle")}
    return TrainedOn(
        cbed_shape=split.cbed_shape,
        potential_shape=split.potential_shape,
        axes=split.axes,
        cbed_unit=split.shards[0].cbed_unit,
        intensity=intensity(normaliser, split.cbed_shape[2:]),
        **ranges,
    )


def intensity(normaliser: Normaliser, detector: tuple[int, int]) -> float:
    """Mean sum of a pattern over (Ky, Kx): the mean of x is mean² + deviation² of its root."""
    mean = np.asarray(normaliser.cbed_mean, np.float64)
    if normaliser.sqrt:
        mean = mean**2 + np.asarray(normaliser.cbed_std, np.float64) ** 2
    return float(np.broadcast_to(mean, detector).sum())


def save(kind: TrainedOn, run: Path) -> None:
    """Write RUN/data.json."""
    files.write_json(run / NAME, SCHEMA, asdict(kind))


def load(run: Path) -> TrainedOn:
    """Read RUN/data.json.

    Raises:
        UserError: no such run, or one that was not trained yet.
    """
    path = run / NAME
    if not path.exists():
        raise UserError(f"{path}: no such file; train first (stemdl train), or check the run")
    content = files.read_json(path, SCHEMA)
    try:
        return TrainedOn(
            cbed_shape=tuple(content["cbed_shape"]),
            potential_shape=tuple(content["potential_shape"]),
            axes=Axes(**content["axes"]),
            cbed_unit=content["cbed_unit"],
            intensity=content["intensity"],
            energy=content["energy"] and tuple(content["energy"]),
            semi_angle=content["semi_angle"] and tuple(content["semi_angle"]),
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: is damaged ({error}); train again to write it") from error


def check(kind: TrainedOn, path: Path, attributes: Mapping[str, Any]) -> None:
    """Raise a UserError if a file's attributes (as a shard's) say another sampling than `kind`."""
    for name, unit in (("scan_step", "Å"), ("detector_step", "1/Å")):
        if name not in attributes:
            continue
        found, wanted = float(attributes[name]), getattr(kind.axes, name)
        if abs(found - wanted) > SAME * wanted:
            raise UserError(
                f"{path}: {name} is {found:.4g} {unit}, the network was trained on {wanted:.4g}; "
                "resample the patterns with stemdl-data import FILE --to DATA --match RUN"
            )


def _range(values: np.ndarray) -> Range | None:
    return (float(values.min()), float(values.max())) if np.isfinite(values).all() else None
