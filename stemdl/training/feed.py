"""What a rank trains and validates on: its splits, their normalisation and its batches."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from stemdl.data import normalise, order, pipeline, shards, trained_on
from stemdl.data.normalise import Normaliser
from stemdl.data.pipeline import Batches
from stemdl.data.shards import Split
from stemdl.errors import UserError
from stemdl.ranks import Ranks
from stemdl.schema import Experiment


@dataclass(frozen=True)
class Feed:
    """The data of one rank."""

    experiment: Experiment
    ranks: Ranks
    train: Split
    dev: Split
    normaliser: Normaliser
    steps_per_epoch: int  # the same on all ranks

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of one sample: patterns (Sy, Sx, Ky, Kx) and potential (H, W)."""
        assert self.train.potential_shape is not None  # _supervised has seen to it
        return self.train.cbed_shape, self.train.potential_shape

    def training(self, steps: range) -> Batches:
        """This rank's batches of the global `steps`."""
        return pipeline.training(
            self.train,
            self.normaliser,
            self.experiment.data,
            batch=self.experiment.train.batch,
            seed=self.experiment.seed,
            ranks=self.ranks,
            steps_per_epoch=self.steps_per_epoch,
            steps=steps,
        )

    @cached_property
    def validation(self) -> Batches:
        """This rank's batches of the dev split; each sample is on one rank."""
        return pipeline.evaluation(
            self.dev,
            self.normaliser,
            self.experiment.data,
            batch=self.experiment.train.batch,
            ranks=self.ranks,
        )


def open_feed(
    experiment: Experiment,
    ranks: Ranks,
    directory: Path,
    moved: Callable[[], object] = lambda: None,
) -> Feed:
    """Open the data in `directory` (data.dir, or where it was staged) and agree on it.

    The statistics of the run (RUN/normalisation.npz) are measured on the training split once, and
    the kind of data is kept for whoever brings the network other data (RUN/data.json). `moved` is
    called as they are measured.

    Raises:
        UserError: on all ranks: no data, damaged shards, no potentials, too few samples.
    """
    train, dev = (
        _supervised(shards.open_split(directory, name, ranks, calibration=experiment.data.records))
        for name in ("train", "dev")
    )
    with ranks.together("opening the data"):
        if (train.cbed_shape, train.potential_shape) != (dev.cbed_shape, dev.potential_shape):
            raise UserError(
                f"{dev.directory / dev.name}: patterns {dev.cbed_shape} and potential "
                f"{dev.potential_shape}, wanted those of train: {train.cbed_shape} and "
                f"{train.potential_shape}"
            )
        _, size = train.place(ranks)
        steps = order.steps_per_epoch(train.count, experiment.train.batch, size)
    normaliser = _normaliser(experiment, train, ranks, moved)
    with ranks.together(f"writing {experiment.run / trained_on.NAME}"):
        if ranks.rank == 0:
            trained_on.save(trained_on.describe(train, normaliser), experiment.run)
    return Feed(experiment, ranks, train, dev, normaliser, min(ranks.collect(steps)))


def _normaliser(
    experiment: Experiment, train: Split, ranks: Ranks, moved: Callable[[], object]
) -> Normaliser:
    path = experiment.run / "normalisation.npz"
    known = None
    with ranks.together(f"reading {path}"):
        if ranks.rank == 0 and path.exists():
            known = normalise.load(path)
    known = ranks.share(known)
    if known is not None:
        return known
    measured = normalise.measure(train, experiment.data, ranks, moved)
    with ranks.together(f"writing {path}"):
        if ranks.rank == 0:
            normalise.save(measured, path)
    return measured


def _supervised(split: Split) -> Split:
    if split.potential_shape is None:
        raise UserError(f"{split.directory / split.name}: holds no potential; training needs it")
    return split
