"""What a step of an experiment hands to the reduction, from its network's graph; nothing is run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from stemdl.network import flops, layouts
from stemdl.reduction import timeline
from stemdl.reduction.allreduce import WIRE
from stemdl.reduction.grouping import Gradient
from stemdl.reduction.timeline import Rates
from stemdl.schema import Experiment


@dataclass(frozen=True)
class Expected:
    """One rank's step: gradients with ready times, duration, and work."""

    gradients: list[Gradient]
    compute: float  # forward and backward pass, one operation after another [s]
    critical_path: float  # the same with unlimited parallelism [s]
    flops: float  # of the whole step, as `network.flops` counts

    def lasting(self, seconds: float) -> "Expected":
        """The same with all times scaled, so that the step computes for `seconds`."""
        factor = seconds / self.compute
        gradients = [replace(each, ready=each.ready * factor) for each in self.gradients]
        return replace(
            self,
            gradients=gradients,
            compute=seconds,
            critical_path=self.critical_path * factor,
        )


def shapes(experiment: Experiment) -> tuple[tuple[int, ...], tuple[int, int]]:
    """(cbed, potential) shapes of a sample: of the training data if it is there, or to be made."""
    if Path(experiment.data.dir, "train").is_dir():
        from stemdl.data import shards

        for path in shards.shard_paths(experiment.data.dir, "train")[:1]:
            shard = shards.open_shard(path)
            if shard.potential_shape is not None:
                return shard.cbed_shape, shard.potential_shape
    made = experiment.simulate
    rows, columns = (round(n * made.scan_step / made.potential_pixel) for n in made.scan)
    return (*made.scan, *made.detector), (rows, columns)


def expect(experiment: Experiment, rates: Rates) -> Expected:
    """Trace one micro-batch's forward and backward pass and time it on a device of `rates`.

    The loss is the mean absolute difference; other losses differ by less than one operation in a
    hundred. With `train.accumulate` the earlier micro-batches go before.
    """
    cbed, potential = shapes(experiment)
    settings = experiment.train
    model = layouts.sketch(experiment.network, cbed, potential, compute=settings.precision.compute)
    gradients, weights = timeline.of_sketch(model, difference)
    micro = settings.batch // settings.accumulate
    batch = [tf.TensorSpec((micro, *shape), tf.float32) for shape in (cbed, potential)]
    operations, outputs = timeline.trace(gradients, [*batch, *weights])
    times = timeline.predict(operations, outputs, rates)
    before = (settings.accumulate - 1) * times.end
    ready = [before + each for each in times.ready]
    assert times.critical_path is not None
    return Expected(
        gradients=describe(model, ready, experiment.reduction.wire),
        compute=before + times.end,
        critical_path=before + times.critical_path,
        flops=3.0 * flops.count(model) * settings.batch,
    )


def describe(model: keras.Model, ready: Sequence[float], wire: str) -> list[Gradient]:
    """The gradients of a model's trainable variables, with ready times [s] and bytes on the wire.

    A variable's scope is its layer: its path without the last part.
    """
    return [
        Gradient(
            index=index,
            scope=variable.path.rpartition("/")[0],
            bytes=int(np.prod(variable.shape)) * WIRE[wire].size,
            ready=time,
        )
        for index, (variable, time) in enumerate(zip(model.trainable_variables, ready, strict=True))
    ]


def difference(targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Mean absolute difference, float32 scalar."""
    return tf.reduce_mean(tf.abs(outputs - targets))
