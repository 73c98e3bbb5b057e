"""Losses against numpy, padding, and dtypes."""

import numpy as np
import pytest
import tensorflow as tf

from stemdl import schema
from stemdl.training import losses

RANDOM = np.random.default_rng(3)
PREDICTION = RANDOM.normal(size=(3, 4, 5)).astype("float32")
TARGET = RANDOM.normal(size=(3, 4, 5)).astype("float32")
DIFFERENCE = PREDICTION - TARGET
HUBER = np.where(np.abs(DIFFERENCE) <= 0.7, DIFFERENCE**2 / 2, 0.7 * (np.abs(DIFFERENCE) - 0.35))
PIXELS = {"l1": np.abs(DIFFERENCE), "mse": DIFFERENCE**2, "huber": HUBER}


def loss(name: str, prediction=PREDICTION, target=TARGET, weight=(1.0, 1.0, 1.0)) -> float:
    settings = schema.Loss(name=name, huber_delta=0.7)
    return float(losses.loss(settings, prediction, target, tf.constant(weight)))


@pytest.mark.parametrize("name", PIXELS)
def test_weighted_mean_over_samples_of_the_mean_over_pixels(name):
    weight = np.array([1.0, 0.0, 0.5])
    wanted = np.average(PIXELS[name].mean(axis=(1, 2)), weights=weight)
    assert loss(name, weight=weight) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", PIXELS)
def test_padding_is_left_out_whatever_it_holds(name):
    padded = PREDICTION.copy()
    padded[1] = np.nan
    weight = (1.0, 0.0, 1.0)
    assert loss(name, padded, weight=weight) == loss(name, weight=weight)
    assert loss(name, padded, weight=(0.0, 0.0, 0.0)) == 0


def test_half_precision_predictions_are_averaged_in_single():
    # The sum of these pixels, 70,000, is beyond float16.
    ones = tf.ones((1, 200, 350), tf.float16)
    value = losses.l1(ones, tf.zeros_like(ones), tf.ones(1))
    assert value.dtype == tf.float32
    assert float(value) == 1


def test_pearson_is_numpys_and_flat_samples_score_zero():
    found = losses.pearson(PREDICTION, TARGET).numpy()
    wanted = [
        np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(PREDICTION, TARGET, strict=True)
    ]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert losses.pearson(tf.ones((2, 4, 4)), tf.ones((2, 4, 4))).numpy().tolist() == [0, 0]
