"""Operation costs, and predicted against measured order in which gradients become ready."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy.stats import kendalltau

from stemdl.reduction import timeline
from stemdl.reduction.costs import flatten
from stemdl.reduction.timeline import Rates

RATES = Rates(flops=1e12, bandwidth=1e11, overhead=1e-6)


def spec(*shape):
    return tf.TensorSpec(shape, tf.float32)


def flops_of(function, *signature):
    operations, _ = flatten(tf.function(function).get_concrete_function(*signature).graph)
    return sum(each.flops for each in operations)


def error(targets, outputs):
    return tf.reduce_mean(tf.abs(targets - outputs))


def chain(depth=6, size=16, channels=8):
    """Convolutions one after another: gradients can only come in reverse."""
    inputs = values = keras.Input((size, size, channels))
    for _ in range(depth):
        values = keras.layers.Conv2D(channels, 3, padding="same", activation="relu")(values)
    return keras.Model(inputs, values)


def traced(model, batch=2):
    shape = (batch, *model.input_shape[1:])
    signature = [spec(*shape), spec(batch, *model.output_shape[1:])]
    return timeline.trace(timeline.of_model(model, error), signature)


MULTIPLY_ADD = 2
KERNEL = tf.zeros((3, 3, 4, 5))


@pytest.mark.parametrize(
    ("function", "shapes", "wanted"),
    [
        (lambda x: tf.nn.conv2d(x, KERNEL, 1, "SAME"), [(2, 8, 8, 4)], 2 * 64 * 9 * 4 * 5),
        (lambda x: tf.nn.conv2d(x, KERNEL, 2, "SAME"), [(2, 8, 8, 4)], 2 * 16 * 9 * 4 * 5),
        (
            lambda x: tf.nn.conv2d_transpose(x, KERNEL, (2, 16, 16, 4), 2),
            [(2, 8, 8, 5)],
            2 * 64 * 9 * 4 * 5,
        ),
        (
            lambda x: tf.nn.depthwise_conv2d(x, KERNEL, [1, 1, 1, 1], "SAME"),
            [(2, 8, 8, 4)],
            2 * 64 * 9 * 4 * 5,
        ),
        (lambda a, b: a @ b, [(3, 4), (4, 5)], 3 * 4 * 5),
        (lambda a, b: tf.matmul(a, b, transpose_a=True), [(4, 3), (4, 5)], 3 * 4 * 5),
        (lambda a, b: a @ b, [(7, 3, 4), (7, 4, 5)], 7 * 3 * 4 * 5),
        (lambda a, b: tf.einsum("bij,bjk->bik", a, b), [(7, 3, 4), (7, 4, 5)], 7 * 3 * 4 * 5),
        (tf.nn.relu, [(3, 4)], 0),
    ],
)
def test_forward_flops(function, shapes, wanted):
    assert flops_of(function, *(spec(*shape) for shape in shapes)) == MULTIPLY_ADD * wanted


def test_a_training_step_costs_three_times_the_forward_pass_but_for_the_first_input():
    model = chain(depth=3)
    one_layer = MULTIPLY_ADD * 2 * 16 * 16 * 9 * 8 * 8
    operations, _ = traced(model)
    assert sum(each.flops for each in operations) == (3 * 3 - 1) * one_layer


def test_bytes_and_launches_leave_out_views_and_shapes():
    function = tf.function(lambda x: tf.nn.relu(tf.reshape(x, (4, 3))))
    operations, _ = flatten(function.get_concrete_function(spec(3, 4)).graph)
    assert sum(each.bytes for each in operations) == 2 * 12 * 4
    assert [each.type for each in operations if each.launches] == ["Relu"]


def test_calls_are_inlined_loops_counted_and_the_dearest_branch_taken():
    inner = tf.function(lambda a, b: a @ b)
    a, b = spec(4, 4), spec(4, 4)
    once = MULTIPLY_ADD * 4**3
    assert flops_of(lambda a, b: inner(inner(a, b), b), a, b) == 2 * once

    def loop(a, b):
        turns = tf.constant(0)
        return tf.while_loop(
            lambda turn, a: turn < 5,
            lambda turn, a: (turn + 1, a @ b),
            (turns, a),
            maximum_iterations=5,
        )[1]

    assert flops_of(loop, a, b) == 5 * once

    def branch(a, b):
        return tf.cond(tf.reduce_sum(a) > 0, lambda: a @ b @ b, lambda: a)

    assert flops_of(branch, a, b) == 2 * once


def test_a_recurrent_layer_costs_its_steps():
    steps, features, units, batch = 12, 6, 8, 4
    model = keras.Sequential([keras.Input((steps, features)), keras.layers.LSTM(units)])
    operations, outputs = traced(model, batch)
    forward = MULTIPLY_ADD * batch * steps * (features + units) * 4 * units
    assert sum(each.flops for each in operations) == pytest.approx(3 * forward, rel=0.1)
    assert None not in outputs


def test_gradients_of_a_chain_are_ready_in_reverse_and_take_the_time_of_the_rates():
    operations, outputs = traced(chain())
    predicted = timeline.predict(operations, outputs, RATES)
    kernels = predicted.ready[0::2]
    assert list(kernels) == sorted(kernels, reverse=True)
    assert predicted.end == pytest.approx(sum(RATES.seconds(each) for each in operations))
    assert max(predicted.ready) <= predicted.end
    assert 0 < predicted.critical_path <= predicted.end
    half = Rates(RATES.flops / 2, RATES.bandwidth / 2, RATES.overhead * 2)
    assert timeline.predict(operations, outputs, half).end == pytest.approx(2 * predicted.end)


def test_a_variable_that_the_loss_does_not_use_is_ready_at_once():
    used, unused = tf.Variable([2.0]), tf.Variable([3.0])

    def gradients(x):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.sin(x * used))
        return tape.gradient(value, [unused, used])

    operations, outputs = timeline.trace(gradients, [spec(5)])
    predicted = timeline.predict(operations, outputs, RATES)
    measured = timeline.measure(gradients, [tf.ones(5)], steps=2)
    assert outputs[0] is None
    assert predicted.ready[0] == measured.ready[0] == 0
    assert predicted.ready[1] > 0
    assert measured.ready[1] > 0


def test_fitted_rates_are_those_that_made_the_times():
    cases = []
    for depth, channels in [(4, 4), (6, 16), (5, 8)]:
        operations, outputs = traced(chain(depth, channels=channels))
        ready = timeline.predict(operations, outputs, RATES).ready
        cases.append((operations, outputs, ready))
    fitted = timeline.fit_rates(*cases)
    assert fitted.flops == pytest.approx(RATES.flops, rel=1e-3)
    assert fitted.bandwidth == pytest.approx(RATES.bandwidth, rel=1e-3)
    assert fitted.overhead == pytest.approx(RATES.overhead, rel=1e-3)


def test_anyones_model_is_predicted_in_the_order_that_is_measured():
    model = keras.applications.MobileNetV2(input_shape=(32, 32, 3), weights=None, classes=4)
    gradients = timeline.of_model(model, error)
    operations, outputs = traced(model)
    predicted = timeline.predict(operations, outputs, RATES)
    batch = [tf.random.normal((2, 32, 32, 3)), tf.zeros((2, 4))]
    measured = timeline.measure(gradients, batch, steps=5)
    assert len(measured.ready) == len(model.trainable_variables)
    assert np.all(np.array(measured.ready) > 0)
    assert kendalltau(predicted.ready, measured.ready).statistic > 0.8


def test_measuring_leaves_the_model_as_it_was():
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    before = [each.numpy().copy() for each in model.weights]
    timeline.measure(timeline.of_model(model, error), [tf.ones((3, 4)), tf.zeros((3, 4))], steps=2)
    for old, new in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, new.numpy())
