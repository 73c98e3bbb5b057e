"""The training step and the validation step: one tf.function each, all in the graph.

    forward in the compute dtype -> fp32 loss -> scaled gradients -> grouped allreduce -> unscale
    -> are the *reduced* gradients finite? (so all ranks skip alike) -> update -> scaler update

What the trainer reports is summed in a variable inside the graph, so that the host waits for the
device only when it logs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from stemdl.network import layouts
from stemdl.reduction import allreduce
from stemdl.schema import Experiment
from stemdl.training import losses
from stemdl.training.optimizers import Optimizer
from stemdl.training.precision import Scaler

# What a step adds to `TrainingStep.sums`.
SUMS = ("steps", "loss", "gradient_norm", "skipped", "reduction_s")


@dataclass(frozen=True)
class TrainingStep:
    """`run(batch, step)` trains on one batch of this rank; `sums` (float64) collects SUMS."""

    run: Callable[[dict[str, tf.Tensor], tf.Tensor], None]
    sums: tf.Variable


def training_step(
    model: keras.Model,
    optimizer: Optimizer,
    scaler: Scaler,
    groups: Sequence[Sequence[int]],
    experiment: Experiment,
    *,
    rank: int,
    size: int,
) -> TrainingStep:
    """Build the training step.

    Args:
        model: (B, Sy, Sx, Ky, Kx) -> (B, H, W) float32.
        groups: which gradients travel together: indices into `model.trainable_variables`.
        rank, size: this rank and the number of ranks.

    The batch is cut into `train.accumulate` micro-batches whose gradients are summed locally, and
    reduced once. Moving statistics of batch normalisation are averaged over ranks in every step, so
    that all ranks stay equal.
    """
    settings, wire = experiment.train, experiment.reduction.wire
    variables = [variable.value for variable in model.trainable_variables]
    statistics = [
        variable.value
        for variable in model.non_trainable_variables
        if variable.path.split("/")[-1].startswith("moving_")
    ]
    sums = tf.Variable(tf.zeros(len(SUMS), tf.float64), trainable=False, name="sums")

    def gradients_of(
        cbed: tf.Tensor, potential: tf.Tensor, weight: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            predicted = model(cbed, training=True)
            loss = losses.loss(settings.loss, predicted, potential, weight)
            scaled = loss * scaler.scale
        return loss, tape.gradient(scaled, variables)

    def local_gradients(batch: dict[str, tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        fields = (batch["cbed"], batch["potential"], batch["weight"])
        count = settings.accumulate
        if count == 1:
            return gradients_of(*fields)
        micro = [tf.reshape(field, (count, -1, *field.shape[1:])) for field in fields]
        loss = tf.zeros(())
        total = [tf.zeros_like(variable) for variable in variables]
        # A loop, so that one micro-batch's activations are alive at a time; the last one stays
        # outside, so that its gradients are reduced as they become ready.
        for part in tf.range(count - 1):
            each_loss, each = gradients_of(*(field[part] for field in micro))
            loss += each_loss
            total = [one + other for one, other in zip(total, each, strict=True)]
        last_loss, last = gradients_of(*(field[count - 1] for field in micro))
        summed = [(one + other) / count for one, other in zip(total, last, strict=True)]
        return (loss + last_loss) / count, summed

    @tf.function(autograph=True, reduce_retracing=False)
    def run(batch: dict[str, tf.Tensor], step: tf.Tensor) -> None:
        layouts.set_dropout_seed(model, experiment.seed, step, rank)
        loss, gradients = local_gradients(batch)
        with tf.control_dependencies(gradients):
            ready = tf.timestamp()
        reduced = allreduce.average(gradients, groups, size=size, wire=wire)
        with tf.control_dependencies(reduced):
            exposed = tf.timestamp() - ready
        if size > 1 and statistics:
            together = [list(range(len(statistics)))]
            means = allreduce.average(statistics, together, size=size, name="statistics")
            for variable, mean in zip(statistics, means, strict=True):
                variable.assign(mean)

        unscaled = [gradient / scaler.scale for gradient in reduced]
        norm = tf.linalg.global_norm(unscaled)
        finite = tf.math.is_finite(norm)
        largest = tf.reduce_max([tf.reduce_max(tf.abs(gradient)) for gradient in unscaled])
        optimizer.apply(unscaled, step, finite)
        scaler.update(finite, largest)
        zero = tf.zeros((), norm.dtype)
        seen = (1.0, loss, tf.where(finite, norm, zero), tf.where(finite, zero, 1.0), exposed)
        sums.assign_add(tf.stack([tf.cast(value, tf.float64) for value in seen]))

    return TrainingStep(run, sums)


def validation_step(
    model: keras.Model, experiment: Experiment
) -> Callable[[dict[str, tf.Tensor]], tuple[tf.Tensor, tf.Tensor]]:
    """Build the validation step: batch -> ((3,) sums, (B, H, W) reconstruction).

    The sums are over the samples of weight 1: their number, loss and Pearson correlation.
    """

    @tf.function(reduce_retracing=False)
    def run(batch: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        truth, weight = batch["potential"], batch["weight"]
        found = model(batch["cbed"], training=False)
        count = tf.reduce_sum(weight)
        loss = losses.loss(experiment.train.loss, found, truth, weight)
        correlation = tf.reduce_sum(weight * losses.pearson(found, truth))
        # An all-padding batch has no mean loss.
        total = tf.where(count > 0, loss * count, 0.0)
        return tf.stack([count, total, correlation]), found

    return run
