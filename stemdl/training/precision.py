"""Loss scaling for float16: keeps small gradients above the least number that float16 can hold.

The training step multiplies the loss by `scaler.scale`, divides the reduced gradients by it, and
calls `scaler.update`. All is graph code on explicit variables. A step whose reduced gradients hold
NaN or Inf is left out by the optimizer; the scaler learns of it here. The reduced gradients are the
same on all ranks, so all ranks scale and skip alike.
"""

from dataclasses import dataclass
from typing import Protocol

import tensorflow as tf

from stemdl import schema

MAX_SCALE = 2.0**24
LOG2_MAX = 16.0  # log2 of where float16 overflows (65,504)
TAIL = 3.09  # deviations above the mean that 1 in 1,000 of a normal distribution exceeds


class Scaler(Protocol):
    """What the training step needs of a loss scaler."""

    @property
    def scale(self) -> tf.Tensor:
        """The loss is multiplied by this; float32 scalar."""

    def update(self, finite: tf.Tensor, largest: tf.Tensor) -> None:
        """Learn from one step: are the reduced gradients finite, and max|g| of them, unscaled."""

    def state(self) -> list[tf.Variable]:
        """Everything to save and restore, in a fixed order."""


def create(settings: schema.Precision) -> Scaler:
    """The loss scaler that the experiment names."""
    if settings.scaler == "backoff":
        return Backoff(settings)
    if settings.scaler == "logmax":
        return LogMax(settings)
    return Unscaled()


@dataclass(frozen=True)
class Unscaled:
    """No loss scaling: float32 and bfloat16 have range enough."""

    @property
    def scale(self) -> tf.Tensor:
        return tf.constant(1.0)

    def update(self, finite: tf.Tensor, largest: tf.Tensor) -> None:
        pass

    def state(self) -> list[tf.Variable]:
        return []


class Backoff:
    """Halve on overflow, double after `growth_steps` clean steps in a row, within bounds.

    Source: Micikevicius et al., Mixed Precision Training (2018), arXiv:1710.03740.
    """

    def __init__(self, settings: schema.Precision) -> None:
        self._growth_steps = settings.growth_steps
        self._floor = settings.floor
        self._scale = tf.Variable(MAX_SCALE, trainable=False, name="loss_scale")
        self._clean = tf.Variable(0, dtype=tf.int64, trainable=False, name="clean_steps")

    @property
    def scale(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._scale)

    def update(self, finite: tf.Tensor, largest: tf.Tensor) -> None:
        scale, clean = backoff(finite, self._scale, self._clean, self._growth_steps, self._floor)
        self._scale.assign(scale)
        self._clean.assign(clean)

    def state(self) -> list[tf.Variable]:
        return [self._scale, self._clean]


def backoff(
    finite: tf.Tensor, scale: tf.Tensor, clean: tf.Tensor, growth_steps: int, floor: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """The next (scale, clean steps in a row)."""
    clean = tf.where(finite, clean + 1, 0)
    grow = clean >= growth_steps
    factor = tf.where(finite, tf.where(grow, 2.0, 1.0), 0.5)
    return tf.clip_by_value(scale * factor, floor, MAX_SCALE), tf.where(grow, 0, clean)


class LogMax:
    """Place the largest gradient just below overflow, by the statistics of log2(max|g|).

    With the running mean m and deviation σ of log2(max|g|) the scale is 2^(16 - m - 3.09 σ): were
    the logarithm normal, one step in a thousand would overflow. Before any step m is 0 and σ is 1.
    Source: Kuchaiev et al., Mixed-Precision Training for NLP and Speech Recognition with
    OpenSeq2Seq (2018), arXiv:1805.10387.
    """

    def __init__(self, settings: schema.Precision) -> None:
        self._floor = settings.floor
        self._steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="steps")
        self._mean = tf.Variable(0.0, trainable=False, name="log_max_mean")
        self._variance = tf.Variable(1.0, trainable=False, name="log_max_variance")

    @property
    def scale(self) -> tf.Tensor:
        exponent = LOG2_MAX - self._mean - TAIL * tf.sqrt(self._variance)
        return tf.clip_by_value(tf.pow(2.0, exponent), self._floor, MAX_SCALE)

    def update(self, finite: tf.Tensor, largest: tf.Tensor) -> None:
        mean, variance = logmax(finite, largest, self._steps, self._mean, self._variance)
        self._mean.assign(mean)
        self._variance.assign(variance)
        self._steps.assign_add(1)

    def state(self) -> list[tf.Variable]:
        return [self._steps, self._mean, self._variance]


def logmax(
    finite: tf.Tensor,
    largest: tf.Tensor,
    steps: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The next running (mean, variance) of log2(max|g|), after `steps` earlier steps.

    The mean decays by 0.99 and the variance by 0.999; the mean is a plain average for the first 100
    steps, so that the start is soon forgotten. An overflow counts as 2^16, far above what gradients
    usually are: one overflow lowers the scale at once. Gradients that are all 0 tell nothing.
    """
    observed = tf.math.log(largest) / tf.math.log(2.0)
    observed = tf.where(finite, tf.where(largest > 0, observed, mean), LOG2_MAX)
    gain = tf.maximum(1 / (tf.cast(steps, tf.float32) + 1), 0.01)
    new_mean = mean + gain * (observed - mean)
    new_variance = 0.999 * variance + 0.001 * (observed - mean) * (observed - new_mean)
    return new_mean, new_variance
