"""Optimizers and learning-rate schedules: pure float32 functions, and one place for their state.

A step takes the reduced, unscaled gradients in this order: clipping by the global norm, LARC for
each tensor, Adam or Nesterov's SGD, decoupled weight decay, running average of weights. The rate is
a function of the global step alone, so a resumed run goes on with the rate it had.
"""

import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from stemdl import schema

LARC_EPSILON = 1e-6  # keeps LARC's ratio finite where a gradient vanishes

Rate = Callable[[tf.Tensor], tf.Tensor]


def create(
    settings: schema.Train,
    variables: Sequence[keras.Variable],
    *,
    steps_per_epoch: int,
    total_steps: int,
    size: int,
) -> "Optimizer":
    """The optimizer that the experiment names, for these weights, on `size` ranks."""
    rate = schedule(settings, steps_per_epoch=steps_per_epoch, total_steps=total_steps, size=size)
    return Optimizer(settings, variables, rate)


class Optimizer:
    """The rule of an experiment with all of its state in variables.

    `averages` holds the running average of each weight, in the order of the weights; it is empty
    unless `train.ema` is set.
    """

    def __init__(
        self, settings: schema.Train, variables: Sequence[keras.Variable], rate: Rate
    ) -> None:
        self.learning_rate = rate
        self._settings = settings
        self._weights = [variable.value for variable in variables]
        self._updates = tf.Variable(0, dtype=tf.int64, trainable=False, name="updates")
        slots = 2 if settings.optimizer.name == "adam" else 1
        self._slots = [
            [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in self._weights]
            for _ in range(slots)
        ]
        averaged = self._weights if settings.ema is not None else []
        self.averages = [tf.Variable(weight, trainable=False) for weight in averaged]

    def state(self) -> list[tf.Variable]:
        """All to save and restore beside the weights and `averages`, in a fixed order."""
        return [self._updates, *(variable for slot in self._slots for variable in slot)]

    def apply(self, gradients: Sequence[tf.Tensor], step: tf.Tensor, finite: tf.Tensor) -> None:
        """Update weights and state in place; nothing changes where `finite` (bool scalar) is False.

        `gradients` are in the order of the weights, reduced and unscaled; `step` is the global
        step, counted from 0, skipped steps included.
        """
        # A branch, not a factor of 0: NaN stays out of the state, and nothing is passed over twice.
        tf.cond(finite, lambda: self._update(gradients, step), lambda: self._updates.value())

    def _update(self, gradients: Sequence[tf.Tensor], step: tf.Tensor) -> tf.Tensor:
        options, ema = self._settings.optimizer, self._settings.ema
        rate = self.learning_rate(step)
        count = tf.cast(self._updates, tf.float32) + 1
        gradients = [tf.cast(gradient, tf.float32) for gradient in gradients]
        if self._settings.clip_norm is not None:
            gradients = clip_global_norm(gradients, self._settings.clip_norm)
        for index, (weight, gradient) in enumerate(zip(self._weights, gradients, strict=True)):
            slots = [slot[index] for slot in self._slots]
            gradient = larc(gradient, weight, rate, options)
            if options.weight_decay and weight.shape.rank > 1:  # kernels alone
                weight.assign_sub(rate * options.weight_decay * weight)
            if options.name == "adam":
                adam(weight, slots, gradient, rate, count, options)
            else:
                nesterov(weight, slots, gradient, rate, options.momentum)
            if ema is not None:
                average = self.averages[index]
                average.assign_add((1 - _ema_decay(count, ema)) * (weight - average))
        return self._updates.assign_add(1)


def exchange(first: Sequence[tf.Variable], second: Sequence[tf.Variable]) -> None:
    """Swap the values of two lists of variables, such as weights and their averages."""
    for left, right in zip(first, second, strict=True):
        kept = tf.identity(left)
        left.assign(right)
        right.assign(kept)


def adam(
    weight: tf.Variable,
    moments: Sequence[tf.Variable],
    gradient: tf.Tensor,
    rate: tf.Tensor,
    count: tf.Tensor,
    options: schema.Optimizer,
) -> None:
    """The `count`-th update, from 1, in TensorFlow's kernel: one pass over memory, not twelve.

    Source: Kingma and Ba, Adam (2015), arXiv:1412.6980, section 2, where epsilon stands beside the
    root of the uncorrected second moment (Keras does the same).
    """
    mean, square = moments
    tf.raw_ops.ResourceApplyAdam(
        var=weight.handle,
        m=mean.handle,
        v=square.handle,
        beta1_power=tf.pow(options.beta_1, count),
        beta2_power=tf.pow(options.beta_2, count),
        lr=rate,
        beta1=options.beta_1,
        beta2=options.beta_2,
        epsilon=options.epsilon,
        grad=gradient,
    )


def nesterov(
    weight: tf.Variable,
    slots: Sequence[tf.Variable],
    gradient: tf.Tensor,
    rate: tf.Tensor,
    momentum: float,
) -> None:
    """Stochastic gradient descent with Nesterov's momentum.

    Source: Sutskever et al. (2013), in the form that keeps the weights at the point looked ahead.
    """
    (velocity,) = slots
    velocity.assign(momentum * velocity + gradient)
    weight.assign_sub(rate * (gradient + momentum * velocity))


def larc(
    gradient: tf.Tensor, weight: tf.Tensor, rate: tf.Tensor, options: schema.Optimizer
) -> tf.Tensor:
    """Scale one tensor's gradient by min(max(η |w| / (|g| + ε), least), 1); norms are Euclidean.

    Mode `clip` divides the ratio by the learning rate, so that a tensor's step is at most η |w|.
    Source: You, Gitman and Ginsburg, Large Batch Training (2017), arXiv:1708.03888.
    """
    if options.larc == "off":
        return gradient
    ratio = options.larc_eta * tf.norm(weight) / (tf.norm(gradient) + LARC_EPSILON)
    if options.larc == "clip":
        ratio /= rate
    return gradient * tf.clip_by_value(ratio, options.larc_min_update, 1.0)


def clip_global_norm(gradients: Sequence[tf.Tensor], limit: float) -> list[tf.Tensor]:
    """Scale all gradients alike so that their joint Euclidean norm is at most `limit`."""
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in gradients]))
    factor = limit / tf.maximum(norm, limit)
    return [gradient * factor for gradient in gradients]


def schedule(settings: schema.Train, *, steps_per_epoch: int, total_steps: int, size: int) -> Rate:
    """The learning rate as a function of the global step (integer scalar, from 0)."""
    chosen = settings.schedule
    peak = settings.optimizer.lr * (size if settings.optimizer.scale_with_ranks else 1)
    warm = chosen.warmup * steps_per_epoch

    def rate(step: tf.Tensor) -> tf.Tensor:
        step = tf.cast(step, tf.float32)
        factor = warmup(step, warm)
        if chosen.name == "cosine":
            factor *= cosine(step, warm, total_steps, chosen.floor)
        elif chosen.name == "exponential":
            period = chosen.decay_epochs * steps_per_epoch
            factor *= exponential(step, period, chosen.decay, chosen.staircase)
        return peak * factor

    return rate


def warmup(step: tf.Tensor, steps: float) -> tf.Tensor:
    """Rises linearly to 1 over `steps`; the first step is not 0."""
    return tf.minimum((step + 1) / max(steps, 1), 1.0)


def cosine(step: tf.Tensor, start: float, end: float, floor: float) -> tf.Tensor:
    """1 up to `start`, then half a cosine down to `floor` at `end` and after."""
    part = tf.clip_by_value((step - start) / max(end - start, 1), 0.0, 1.0)
    return floor + (1 - floor) * 0.5 * (1 + tf.cos(math.pi * part))


def exponential(step: tf.Tensor, period: float, decay: float, staircase: bool) -> tf.Tensor:
    """`decay` to the power of the periods gone by: whole periods, or smoothly."""
    periods = step / period
    return tf.pow(decay, tf.floor(periods) if staircase else periods)


def _ema_decay(count: tf.Tensor, decay: float) -> tf.Tensor:
    """The decay at the `count`-th update: shorter at first, so that the start is forgotten.

    0 at the first update: the average then is the weights, whatever it held before.
    """
    return tf.minimum(decay, (count - 1) / (count + 8))
