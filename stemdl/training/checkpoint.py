"""Checkpoints: everything that a run is, in one HDF5 file that appears whole or not at all.

`last.h5` holds weights, optimizer, loss scaler, averaged weights and position: what a run resumes
from. `best.h5` holds the weights of the best validation, for evaluation. Rank 0 reads and writes;
arrays travel to the other ranks over MPI.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from stemdl import config, files
from stemdl.data import normalise
from stemdl.data.normalise import Normaliser
from stemdl.errors import UserError
from stemdl.network import layouts
from stemdl.ranks import Ranks
from stemdl.schema import Experiment

FORMAT = "stemdl.checkpoint/1"


@dataclass
class Position:
    """Where a run stands. Order of data, schedules and noise follow from it."""

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    ranks: int = 1
    steps_per_epoch: int = 0
    best: float | None = None  # least validation loss so far
    clock: dict[str, float] = field(default_factory=dict)  # s in each phase
    pending: list[list[float]] = field(default_factory=list)  # each rank's sums since the last log

    def rescale(self, ranks: int, steps_per_epoch: int) -> None:
        """Go on with another number of ranks or samples, at the same share of the epochs."""
        if (ranks, steps_per_epoch) == (self.ranks, self.steps_per_epoch):
            return
        done = self.step / self.steps_per_epoch if self.steps_per_epoch else 0.0
        self.epoch = int(done)
        self.step_in_epoch = int((done - self.epoch) * steps_per_epoch)
        self.step = self.epoch * steps_per_epoch + self.step_in_epoch
        self.ranks, self.steps_per_epoch, self.pending = ranks, steps_per_epoch, []


def path(run: Path, which: str) -> Path:
    return run / "checkpoints" / f"{which}.h5"


def save(target: Path, position: Position, parts: dict[str, Sequence[Any]], signature: str) -> None:
    """Write `parts` (name -> variables in a fixed order) and `position` to `target`.

    Args:
        target: the file; replaced as a whole.
        position: where the run stands.
        parts: "weights" must be among them; values are tf or Keras variables or arrays.
        signature: what the network is (see `signature`); checked on load.
    """
    with files.appearing(target) as temporary, h5py.File(temporary, "w") as file:
        file.attrs.update(format=FORMAT, position=json.dumps(asdict(position)), signature=signature)
        for part, variables in parts.items():
            group = file.create_group(part)
            group.attrs["count"] = len(variables)
            for order, variable in enumerate(variables):
                group.create_dataset(f"{order:05d}", data=np.asarray(variable))


def load(source: Path, signature: str, names: Sequence[str]) -> tuple[Position, dict[str, list]]:
    """Read a checkpoint: its position and the arrays of the parts `names`.

    Raises:
        UserError: missing, truncated or foreign file, or one of another network.
    """
    if not source.exists():
        raise UserError(f"{source}: no such checkpoint; train first (stemdl train)")
    try:
        with h5py.File(source, "r", locking=False) as file:
            if file.attrs.get("format") != FORMAT:
                raise UserError(f"{source}: format is {file.attrs.get('format')!r}, not {FORMAT!r}")
            if file.attrs["signature"] != signature:
                raise UserError(
                    f"{source}: holds another network: found {file.attrs['signature']}, "
                    f"wanted {signature}; choose another run directory or the old network section"
                )
            position = Position(**json.loads(file.attrs["position"]))
            parts = {
                name: [file[name][f"{order:05d}"][()] for order in range(file[name].attrs["count"])]
                for name in names
                if name in file
            }
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{source}: cannot be read as a checkpoint ({error}); "
            "delete it to start from the beginning"
        ) from error
    return position, parts


def restore(
    source: Path, parts: dict[str, Sequence[Any]], signature: str, ranks: Ranks
) -> Position:
    """Set the variables of `parts` on all ranks from rank 0's file; return the position.

    A part that the file holds otherwise, or not at all, is an error: half a state is no state.
    """
    found: dict[str, list] = {}
    position = None
    with ranks.together(f"reading {source}"):
        if ranks.rank == 0:
            position, found = load(source, signature, list(parts))
            for name, variables in parts.items():
                shapes = [tuple(variable.shape) for variable in variables]
                if [value.shape for value in found.get(name, [])] != shapes:
                    raise UserError(
                        f"{source}: {name} does not fit the experiment's train section: holds "
                        f"{len(found.get(name, []))} arrays, wanted {len(shapes)}; "
                        "choose another run directory or the old settings"
                    )
    for name, variables in parts.items():
        for order, variable in enumerate(variables):
            value = found[name][order] if ranks.rank == 0 else None
            variable.assign(ranks.share(value))
    return ranks.share(position)


def signature(experiment: Experiment, cbed: Sequence[int], potential: Sequence[int]) -> str:
    """What must be equal for weights to fit: the network section and the shapes of the data."""
    network = experiment.network.model_dump(mode="json", exclude={"dropout"})
    return json.dumps(network | {"cbed": list(cbed), "potential": list(potential)}, sort_keys=True)


def load_model(run: Path, which: str) -> tuple[keras.Model, Normaliser, Experiment]:
    """A trained network for evaluation: `which` is "best" or "last".

    Averaged weights (train.ema) are used where the run kept them.

    Raises:
        UserError: `run` holds no finished checkpoint, or a damaged one.
    """
    experiment = config.load(run / "config.yaml")
    source = path(run, which)
    shapes = read_shapes(source)
    text = signature(experiment, *shapes)
    _, parts = load(source, text, ["weights", "averages"])
    model = layouts.build(
        experiment.network,
        *shapes,
        compute=experiment.train.precision.compute,
        seed=experiment.seed,
    )
    for variable, value in zip(model.variables, parts["weights"], strict=True):
        variable.assign(value)
    if parts.get("averages"):
        for variable, value in zip(model.trainable_variables, parts["averages"], strict=True):
            variable.assign(value)
    return model, normalise.load(run / "normalisation.npz"), experiment


def read_shapes(source: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes (Sy, Sx, Ky, Kx) and (H, W) that a checkpoint was made for."""
    if not source.exists():
        raise UserError(f"{source}: no such checkpoint; train first (stemdl train)")
    try:
        with h5py.File(source, "r", locking=False) as file:
            found = json.loads(file.attrs["signature"])
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{source}: cannot be read as a checkpoint ({error})") from error
    return tuple(found["cbed"]), tuple(found["potential"])
