"""Loss scalers: bounds, what one overflow does, recovery, and the log-normal rule."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from stemdl import schema
from stemdl.training import precision

FLOOR = 8.0


def make(name: str, **options) -> precision.Scaler:
    return precision.create(schema.Precision(scaler=name, floor=FLOOR, **options))


def feed(scaler: precision.Scaler, *, finite: bool, largest: float = 1.0) -> float:
    scaler.update(tf.constant(finite), tf.constant(largest))
    return float(scaler.scale)


@pytest.mark.parametrize("name", ["backoff", "logmax"])
@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.one_of(st.just(np.inf), st.just(0.0), st.floats(1e-30, 1e30)), min_size=1, max_size=30
    )
)
def test_scale_stays_within_bounds_and_finite(name, steps):
    scaler = make(name, growth_steps=3)
    for largest in steps:
        scale = feed(scaler, finite=bool(np.isfinite(largest)), largest=largest)
        assert FLOOR <= scale <= precision.MAX_SCALE


@settings(max_examples=20, deadline=None)
@given(growth=st.integers(1, 5), overflows=st.integers(1, 4))
def test_backoff_halves_at_each_overflow_and_recovers_after_clean_steps(growth, overflows):
    scaler = make("backoff", growth_steps=growth)
    for count in range(1, overflows + 1):
        assert feed(scaler, finite=False, largest=np.inf) == precision.MAX_SCALE / 2**count
    low = float(scaler.scale)
    for _ in range(growth - 1):
        assert feed(scaler, finite=True) == low
    assert feed(scaler, finite=True) == 2 * low


def test_backoff_counts_clean_steps_in_a_row():
    scaler = make("backoff", growth_steps=2)
    low = feed(scaler, finite=False) / 2
    feed(scaler, finite=True)
    assert feed(scaler, finite=False) == low
    assert feed(scaler, finite=True) == low
    assert feed(scaler, finite=True) == 2 * low


def test_logmax_puts_the_overflow_3_09_deviations_above_the_mean():
    scaler = make("logmax")
    logarithms = np.random.default_rng(0).normal(-6, 1, 3000).astype("float32")
    update = tf.function(scaler.update)
    for value in logarithms:
        update(tf.constant(True), tf.constant(2.0**value, tf.float32))
    steps, mean, variance = (each.numpy() for each in scaler.state())
    assert steps == 3000
    # A running mean over about 100 steps, a running variance over about 1,000.
    assert mean == pytest.approx(-6, abs=0.3)
    assert variance == pytest.approx(1, abs=0.2)
    assert float(scaler.scale) == pytest.approx(2 ** (16 - mean - 3.09 * variance**0.5), rel=1e-4)


def test_logmax_lowers_the_scale_at_one_overflow_and_comes_back():
    scaler = make("logmax")
    for _ in range(300):
        before = feed(scaler, finite=True, largest=2.0**-5)
    assert feed(scaler, finite=False, largest=np.inf) < 0.6 * before
    for _ in range(300):
        after = feed(scaler, finite=True, largest=2.0**-5)
    assert after == pytest.approx(before, rel=0.3)


def test_logmax_learns_nothing_from_zeros():
    scaler = make("logmax")
    feed(scaler, finite=True, largest=2.0**-5)
    mean = scaler.state()[1].numpy()
    feed(scaler, finite=True, largest=0.0)
    assert scaler.state()[1].numpy() == mean


@pytest.mark.parametrize("name", ["none", "backoff", "logmax"])
def test_state_restores_the_scaler(name):
    first, second = make(name, growth_steps=2), make(name, growth_steps=2)
    feed(first, finite=False, largest=np.inf)
    feed(first, finite=True, largest=3.0)
    for source, target in zip(first.state(), second.state(), strict=True):
        target.assign(source)
    assert float(first.scale) == float(second.scale)
    assert feed(first, finite=True) == feed(second, finite=True)


def test_no_scaler_is_a_scale_of_one():
    scaler = make("none")
    assert feed(scaler, finite=False) == 1
    assert scaler.state() == []
