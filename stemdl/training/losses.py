"""Losses and scores on the normalised potential: pure functions of float32 arithmetic.

`prediction` and `target` are (B, H, W) of any float dtype, `weight` is (B,). A sample's loss is the
mean over its pixels; the batch's is the weighted mean over samples. A weight of 0 (padding) leaves
a sample out, whatever it holds; a batch of padding alone has a loss of 0.
"""

import tensorflow as tf

from stemdl import schema


def loss(
    settings: schema.Loss, prediction: tf.Tensor, target: tf.Tensor, weight: tf.Tensor
) -> tf.Tensor:
    """The loss that the experiment names; float32 scalar."""
    if settings.name == "huber":
        return huber(prediction, target, weight, settings.huber_delta)
    return {"l1": l1, "mse": mse}[settings.name](prediction, target, weight)


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


def pearson(prediction: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    """Pearson's correlation over the pixels of each sample; (B,) float32, 0 for a flat sample."""
    first, second = (_centred(prediction), _centred(target))
    spread = tf.norm(first, axis=(1, 2)) * tf.norm(second, axis=(1, 2))
    return tf.math.divide_no_nan(tf.reduce_sum(first * second, axis=(1, 2)), spread)


def _centred(images: tf.Tensor) -> tf.Tensor:
    images = tf.cast(images, tf.float32)
    return images - tf.reduce_mean(images, axis=(1, 2), keepdims=True)


def _difference(prediction: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    return tf.cast(prediction, tf.float32) - tf.cast(target, tf.float32)


def _mean(pixels: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    weight = tf.cast(weight, tf.float32)
    samples = tf.reduce_mean(pixels, axis=(1, 2))
    # A padded sample may hold anything, and NaN * 0 is NaN: choose, do not multiply.
    samples = tf.where(weight > 0, samples * weight, 0.0)
    return tf.math.divide_no_nan(tf.reduce_sum(samples), tf.reduce_sum(weight))
