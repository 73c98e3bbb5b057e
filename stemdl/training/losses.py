"""Losses on the normalised potential: pure functions (prediction, target, weight) -> scalar.

`prediction` and `target` are (B, H, W), `weight` is (B,). Arithmetic is in float32 whatever the
compute dtype. A sample's loss is the mean over its pixels; the batch's is the weighted mean over
samples, so that a weight of 0 (padding) leaves a sample out and a batch of padding alone gives 0.
"""

from collections.abc import Callable

import tensorflow as tf

from stemdl import schema

Loss = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]


def create(settings: schema.Loss) -> Loss:
    """The loss that the experiment names."""
    if settings.name == "huber":
        delta = settings.huber_delta
        return lambda prediction, target, weight: huber(prediction, target, weight, delta)
    return {"l1": l1, "mse": mse}[settings.name]


def l1(prediction: tf.Tensor, target: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Mean absolute difference [deviations of the potential]."""
    return _mean(tf.abs(_difference(prediction, target)), weight)


def mse(prediction: tf.Tensor, target: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Mean squared difference [squared deviations of the potential]."""
    return _mean(tf.square(_difference(prediction, target)), weight)


def huber(prediction: tf.Tensor, target: tf.Tensor, weight: tf.Tensor, delta: float) -> tf.Tensor:
    """Huber's loss: d²/2 up to |d| = `delta`, then delta (|d| - delta/2) (Huber 1964)."""
    size = tf.abs(_difference(prediction, target))
    inner = tf.minimum(size, delta)
    return _mean(inner * (size - 0.5 * inner), weight)


def _difference(prediction: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    return tf.cast(prediction, tf.float32) - tf.cast(target, tf.float32)


def _mean(pixels: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    weight = tf.cast(weight, tf.float32)
    samples = tf.reduce_mean(pixels, axis=(1, 2))
    # A padded sample may hold anything, and NaN * 0 is NaN: choose, do not multiply.
    samples = tf.where(weight > 0, samples * weight, 0.0)
    return tf.math.divide_no_nan(tf.reduce_sum(samples), tf.reduce_sum(weight))
