"""Update rules against numpy and Keras, schedules at chosen points, skipped steps, averages."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from stemdl import schema
from stemdl.training import optimizers

RANDOM = np.random.default_rng(5)
SHAPES = [(3, 3, 4, 5), (5,), (1, 1, 5, 2)]


def weights() -> list[keras.Variable]:
    random = np.random.default_rng(1)
    return [keras.Variable(random.normal(size=shape).astype("float32")) for shape in SHAPES]


def gradients(scale: float = 1.0) -> list[tf.Tensor]:
    return [tf.constant(scale * RANDOM.normal(size=shape), tf.float32) for shape in SHAPES]


def make(variables, *, size=1, steps_per_epoch=10, total_steps=100, **train):
    train.setdefault("schedule", {"name": "constant", "warmup": 0})
    settings = schema.Train.model_validate(train)
    return optimizers.create(
        settings, variables, steps_per_epoch=steps_per_epoch, total_steps=total_steps, size=size
    )


def apply(optimizer, grads, step=0, finite=True) -> None:
    optimizer.apply(grads, tf.constant(step, tf.int64), tf.constant(finite))


def values(variables) -> list[np.ndarray]:
    return [np.array(variable) for variable in variables]


def assert_close(found, wanted, **tolerance) -> None:
    for one, other in zip(values(found), values(wanted), strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


def test_adam_is_keras_adam():
    ours, theirs = weights(), weights()
    optimizer = make(ours, optimizer={"lr": 0.01})
    reference = keras.optimizers.Adam(0.01, epsilon=1e-8)
    for step in range(5):
        grads = gradients()
        apply(optimizer, grads, step)
        reference.apply(grads, theirs)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_sgd_is_keras_nesterov():
    ours, theirs = weights(), weights()
    optimizer = make(ours, optimizer={"name": "sgd", "lr": 0.01, "momentum": 0.8})
    reference = keras.optimizers.SGD(0.01, momentum=0.8, nesterov=True)
    for step in range(5):
        grads = gradients()
        apply(optimizer, grads, step)
        reference.apply(grads, theirs)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_weight_decay_is_decoupled_and_spares_biases():
    plain, decayed = weights(), weights()
    before = values(plain)
    grads = gradients()
    apply(make(plain, optimizer={"lr": 0.01}), grads)
    apply(make(decayed, optimizer={"lr": 0.01, "weight_decay": 0.1}), grads)
    for start, one, other in zip(before, values(plain), values(decayed), strict=True):
        shrunk = 0.01 * 0.1 * start if start.ndim > 1 else 0
        np.testing.assert_allclose(one - other, shrunk, atol=1e-6)


@pytest.mark.parametrize("mode", ["scale", "clip"])
@pytest.mark.parametrize("size", [1e-8, 1e-3, 1e-1, 1e6])
def test_larc_is_its_formula(mode, size):
    options = schema.Optimizer(larc=mode, larc_eta=2e-3, larc_min_update=1e-4)
    weight = RANDOM.normal(size=(3, 3, 4, 5))
    gradient = size * RANDOM.normal(size=(3, 3, 4, 5))
    rate = 0.05
    ratio = 2e-3 * np.linalg.norm(weight) / (np.linalg.norm(gradient) + 1e-6)
    ratio /= rate if mode == "clip" else 1
    wanted = gradient * min(max(ratio, 1e-4), 1)
    found = optimizers.larc(
        tf.constant(gradient, tf.float32),
        tf.constant(weight, tf.float32),
        tf.constant(rate),
        options,
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_larc_clip_bounds_a_tensors_step_by_its_norm():
    variables = weights()
    before = values(variables)
    options = {"name": "sgd", "momentum": 0, "lr": 0.1, "larc": "clip", "larc_min_update": 1e-12}
    apply(make(variables, optimizer=options), gradients(1e3))
    for start, end in zip(before, values(variables), strict=True):
        step = np.linalg.norm(end - start)
        assert step == pytest.approx(1e-3 * np.linalg.norm(start), rel=1e-3)


def test_global_norm_clipping():
    grads = gradients()
    norm = np.sqrt(sum(float(tf.reduce_sum(each**2)) for each in grads))
    assert_close(
        optimizers.clip_global_norm(grads, norm / 4), [each / 4 for each in grads], rtol=1e-5
    )
    assert_close(optimizers.clip_global_norm(grads, norm * 2), grads, rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_step_that_is_not_finite_changes_nothing(name, poison):
    variables = weights()
    optimizer = make(variables, optimizer={"name": name, "larc": "scale"}, ema=0.9, clip_norm=1)
    apply(optimizer, gradients())
    before = values([*variables, *optimizer.state()])
    bad = gradients()
    bad[1] = bad[1] * poison
    apply(optimizer, bad, 1, finite=False)
    for one, other in zip(before, values([*variables, *optimizer.state()]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_adam_does_not_count_skipped_steps():
    ours, fresh = weights(), weights()
    optimizer = make(ours)
    for step in range(20):
        apply(optimizer, gradients(np.inf), step, finite=False)
    grads = gradients()
    apply(optimizer, grads, 20)
    apply(make(fresh), grads, 0)
    assert_close(ours, fresh, rtol=1e-6)


def test_state_restores_the_optimizer():
    one, other = weights(), weights()
    first, second = make(one, ema=0.9), make(other, ema=0.9)
    apply(first, gradients())
    for source, target in zip(first.state(), second.state(), strict=True):
        target.assign(source)
    for source, target in zip(one, other, strict=True):
        target.assign(source)
    grads = gradients()
    apply(first, grads, 1)
    apply(second, grads, 1)
    for left, right in zip([*one, *first.state()], [*other, *second.state()], strict=True):
        np.testing.assert_array_equal(left, right)


def test_averages_follow_the_weights():
    variables = weights()
    optimizer = make(variables, ema=0.5)
    average = None
    for step in range(12):
        apply(optimizer, gradients(), step)
        decay = min(0.5, step / (step + 9))
        now = values(variables)
        average = (
            now
            if average is None
            else [decay * a + (1 - decay) * w for a, w in zip(average, now, strict=True)]
        )
    assert_close(optimizer.averages, average, rtol=1e-5, atol=1e-6)


def test_exchange_swaps_weights_and_averages():
    variables = weights()
    optimizer = make(variables, ema=0.5)
    apply(optimizer, gradients())
    apply(optimizer, gradients(), 1)
    first, second = values(variables), values(optimizer.averages)
    optimizers.exchange([variable.value for variable in variables], optimizer.averages)
    assert_close(variables, second, rtol=0)
    assert_close(optimizer.averages, first, rtol=0)


def rate_at(step: int, *, size=1, schedule, lr=1e-3, scale_with_ranks=False) -> float:
    settings = schema.Train.model_validate(
        {"optimizer": {"lr": lr, "scale_with_ranks": scale_with_ranks}, "schedule": schedule}
    )
    rate = optimizers.schedule(settings, steps_per_epoch=10, total_steps=110, size=size)
    return float(rate(tf.constant(step, tf.int64)))


def test_warm_up_is_linear_and_scales_with_ranks():
    schedule = {"name": "constant", "warmup": 2}
    assert rate_at(0, schedule=schedule) == pytest.approx(1e-3 / 20)
    assert rate_at(9, schedule=schedule) == pytest.approx(1e-3 / 2)
    assert rate_at(19, schedule=schedule) == pytest.approx(1e-3)
    assert rate_at(5000, schedule=schedule) == pytest.approx(1e-3)
    assert rate_at(19, schedule=schedule, size=8) == pytest.approx(1e-3)
    assert rate_at(19, schedule=schedule, size=8, scale_with_ranks=True) == pytest.approx(8e-3)


def test_cosine_falls_from_the_warm_up_to_the_floor():
    schedule = {"name": "cosine", "warmup": 1, "floor": 0.1}
    assert rate_at(9, schedule=schedule) == pytest.approx(1e-3)
    assert rate_at(60, schedule=schedule) == pytest.approx(1e-3 * 0.55)
    assert rate_at(110, schedule=schedule) == pytest.approx(1e-4)
    assert rate_at(200, schedule=schedule) == pytest.approx(1e-4)


def test_exponential_by_steps_or_smoothly():
    stairs = {"name": "exponential", "warmup": 0, "decay": 0.99, "decay_epochs": 2}
    assert rate_at(19, schedule=stairs, lr=1e-4) == pytest.approx(1e-4)
    assert rate_at(20, schedule=stairs, lr=1e-4) == pytest.approx(0.99e-4)
    assert rate_at(99, schedule=stairs, lr=1e-4) == pytest.approx(0.99**4 * 1e-4)
    smooth = stairs | {"staircase": False}
    assert rate_at(30, schedule=smooth, lr=1e-4) == pytest.approx(0.99**1.5 * 1e-4)
