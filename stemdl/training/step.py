"""The training step and the validation step: one tf.function each, all in the graph.

Forward in the compute dtype, fp32 loss, scaled gradients, grouped allreduce, unscaling, then the
question whether the *reduced* gradients are finite (so that all ranks skip alike), the update of
the weights and the update of the loss scaler.
"""

import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from stemdl.network import layouts
from stemdl.ranks import Ranks
from stemdl.reduction import allreduce
from stemdl.schema import Experiment
from stemdl.training import losses
from stemdl.training.state import State

Step = Callable[[dict[str, tf.Tensor], tf.Tensor], None]


def training_step(
    state: State,
    groups: Sequence[Sequence[int]],
    experiment: Experiment,
    ranks: Ranks,
) -> Step:
    """Build the training step: run(batch, step) trains on one batch of this rank.

    Args:
        state: what the step updates; state.sums collects what it has to tell.
        groups: which gradients travel together: indices into the network's trainable variables.

    The batch is cut into `train.accumulate` micro-batches whose gradients are summed locally, and
    reduced once. Moving statistics of batch normalisation are averaged over ranks in every step, so
    that all ranks stay equal.
    """
    settings, wire = experiment.train, experiment.reduction.wire
    model, optimizer, scaler, size = state.model, state.optimizer, state.scaler, ranks.size
    variables = [variable.value for variable in model.trainable_variables]
    statistics = [
        variable.value
        for variable in model.non_trainable_variables
        if variable.path.split("/")[-1].startswith("moving_")
    ]

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
        layouts.set_dropout_seed(model, experiment.seed, step, ranks.rank)
        loss, gradients = local_gradients(batch)
        with tf.control_dependencies(gradients):
            ready = _now()
        reduced = allreduce.average(gradients, groups, size=size, wire=wire)
        with tf.control_dependencies(reduced):
            exposed = _now() - ready
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
        state.sums.assign_add(tf.stack([tf.cast(value, tf.float64) for value in seen]))

    return run


def _now() -> tf.Tensor:
    """The host's clock at this place of the graph [s]; tf.timestamp refuses op determinism."""
    return tf.numpy_function(time.perf_counter, [], tf.float64)


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
