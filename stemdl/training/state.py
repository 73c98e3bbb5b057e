"""The state of a run: all that a checkpoint holds, built, saved and restored as one thing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from stemdl.network import layouts
from stemdl.ranks import Ranks
from stemdl.schema import Experiment
from stemdl.training import checkpoint, optimizers, precision
from stemdl.training.checkpoint import Position

Shapes = tuple[tuple[int, ...], tuple[int, ...]]

# What a training step adds to `State.sums`.
SUMS = ("steps", "loss", "gradient_norm", "skipped", "reduction_s")


class State:
    """Network, optimizer, loss scaler and position of a run, the same on all ranks.

    `sums` (float64) collects SUMS of this rank since the last line of metrics, in the graph, so
    that the host waits for the device only when it logs.
    """

    def __init__(
        self, experiment: Experiment, shapes: Shapes, steps_per_epoch: int, ranks: Ranks
    ) -> None:
        """`shapes`: of one sample, patterns (Sy, Sx, Ky, Kx) and potential (H, W)."""
        settings, self._ranks, self._run = experiment.train, ranks, experiment.run
        with ranks.together("building the network"):
            self.model = layouts.build(
                experiment.network,
                *shapes,
                compute=settings.precision.compute,
                seed=experiment.seed,
            )
            self.optimizer = optimizers.create(
                settings,
                self.model.trainable_variables,
                steps_per_epoch=steps_per_epoch,
                total_steps=steps_per_epoch * settings.epochs,
                size=ranks.size,
            )
            self.scaler = precision.create(settings.precision)
        self.sums = tf.Variable(tf.zeros(len(SUMS), tf.float64), trainable=False, name="sums")
        self.position = Position(ranks=ranks.size, steps_per_epoch=steps_per_epoch)
        self._signature = checkpoint.signature(experiment, *shapes)

    def resume(self) -> Path | None:
        """Set everything from RUN's last checkpoint, if there is one; return its path.

        Raises:
            UserError: on all ranks: damaged, or of another network or optimizer.
        """
        source = checkpoint.path(self._run, "last")
        if not self._ranks.share(source.exists()):
            return None
        steps = self.position.steps_per_epoch
        self.position = checkpoint.restore(source, self._parts(), self._signature, self._ranks)
        self.position.rescale(self._ranks.size, steps)
        if self.position.pending:
            self.sums.assign(self.position.pending[self._ranks.rank])
        return source

    def save(self, clock: dict[str, float], *, best: bool = False) -> None:
        """Write the last checkpoint, or the weights alone as the best one. A collective.

        `clock`: seconds in each phase so far, to go on from.
        """
        self.position.pending = self._ranks.collect(self.sums.numpy().tolist())
        self.position.clock = clock
        parts = self._parts()
        if best:
            parts = {name: parts[name] for name in ("weights", "averages")}
        target = checkpoint.path(self._run, "best" if best else "last")
        with self._ranks.together("writing a checkpoint"):
            if self._ranks.rank == 0:
                checkpoint.save(target, self.position, parts, self._signature)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The network holds the averaged weights (train.ema), if there are any."""
        weights = [variable.value for variable in self.model.trainable_variables]
        averages = self.optimizer.averages
        if averages:
            optimizers.exchange(weights, averages)
        try:
            yield
        finally:
            if averages:
                optimizers.exchange(weights, averages)

    def _parts(self) -> dict[str, Sequence[Any]]:
        return {
            "weights": [variable.value for variable in self.model.variables],
            "optimizer": self.optimizer.state(),
            "scaler": self.scaler.state(),
            "averages": self.optimizer.averages,
        }
