"""Both layouts: the paper's figures, shapes that are odd or small, names, seeds, dtypes."""

import math
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from stemdl import config, schema
from stemdl.errors import UserError
from stemdl.network import flops, layouts
from stemdl.network.fc_densenet import Dropout

SUMMIT = Path(__file__).parents[2] / "configs" / "summit.yaml"
SMALL = {"initial_channels": 6, "growth": 3, "bottleneck_layers": 1, "fine_channels": 4}


def small(**options) -> schema.Network:
    return schema.Network.model_validate({**SMALL, "layers": [1, 2], **options})


def run(model: keras.Model, cbed_shape, batch: int = 2) -> np.ndarray:
    random = np.random.default_rng(0)
    return model(random.normal(size=(batch, *cbed_shape)).astype("float32")).numpy()


@pytest.mark.parametrize(
    ("cbed", "potential", "training_flops"),
    [
        ((32, 32, 512, 512), (512, 512), 5.15e13),
        ((16, 16, 512, 512), (512, 512), 4.38e13),
        ((16, 16, 256, 256), (256, 256), 1.09e13),
    ],
)
def test_the_papers_flops(cbed, potential, training_flops):
    network = config.load(SUMMIT).network
    model = layouts.sketch(network, cbed, potential)
    assert 3 * flops.count(model) == pytest.approx(training_flops, rel=0.01)


def test_the_papers_weights():
    network = config.load(SUMMIT).network
    counts = {}
    for kernel in (1, 2):
        changed = network.model_copy(update={"up_kernel": kernel})
        model = layouts.sketch(changed, (32, 32, 512, 512), (512, 512))
        counts[kernel] = sum(math.prod(v.shape) for v in model.trainable_variables)
    assert counts[1] == pytest.approx(2.204e8, rel=0.001)
    # Kernels of 2x2 instead of 1x1, at 768, 1,024 and 512 channels.
    assert counts[2] - counts[1] == 3 * (768**2 + 1024**2 + 512**2)


def test_the_papers_channels():
    """facts' table: the skips on the way down, the new features that go up, the last join."""
    model = layouts.sketch(config.load(SUMMIT).network, (32, 32, 512, 512), (512, 512))
    wanted = {
        "initial": (512, 512, 256),
        "dense_0_join": (512, 512, 512),
        "down_0_pool": (256, 256, 512),
        "dense_1_join": (256, 256, 1024),
        "down_1_pool": (128, 128, 1024),
        "dense_2_join": (128, 128, 2048),
        "down_2_pool": (64, 64, 2048),
        "dense_3_new": (64, 64, 768),
        "up_0": (128, 128, 768),
        "up_0_join": (128, 128, 2816),
        "dense_4_new": (128, 128, 1024),
        "up_1_join": (256, 256, 2048),
        "dense_5_new": (256, 256, 512),
        "up_2_join": (512, 512, 1024),
        "dense_6_join": (512, 512, 1280),
        "final": (512, 512, 1),
    }
    assert {name: model.get_layer(name).output.shape[1:] for name in wanted} == wanted


def test_flops_by_hand():
    network = small(layers=[], growth=3, kernel=3, initial_kernel=1, fine_layers=0)
    model = layouts.build(network, (4, 5, 2, 3), (8, 10), seed=0)
    initial, dense = 20 * (6 * 6), 20 * 9 * 6 * 3
    finer, final = 20 * 4 * (9 * 4), 80 * 4
    assert flops.count(model) == 2 * (initial + dense + finer + final)


@settings(max_examples=12, deadline=None)
@given(
    layout=st.sampled_from(["scan", "diffraction"]),
    rows=st.integers(3, 9),
    columns=st.integers(3, 9),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    ratio=st.sampled_from([1, 2, 3, 4, 5, 6]),
    up_kernel=st.sampled_from([None, 1, 4]),
)
def test_any_grid_and_integer_ratio_builds_and_runs(
    layout, rows, columns, channels, ratio, up_kernel
):
    grid = (rows, columns)
    cbed = (*grid, *channels) if layout == "scan" else (*channels, *grid)
    potential = (ratio * rows, ratio * columns)
    model = layouts.build(small(layout=layout, up_kernel=up_kernel), cbed, potential, seed=0)
    found = run(model, cbed)
    assert found.shape == (2, *potential)
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert np.ptp(found) > 0


@pytest.mark.parametrize(
    ("network", "cbed", "potential", "shown"),
    [
        (small(), (12, 12, 5, 5), (50, 50), "50 / 12 = 4.167, 50 / 12 = 4.167"),
        (small(), (12, 8, 5, 5), (48, 24), "48 / 12 = 4, 24 / 8 = 3"),
        (small(layout="diffraction"), (3, 3, 32, 32), (16, 16), "16 / 32 = 0.5"),
        (small(layers=[1, 1, 1]), (4, 12, 5, 5), (16, 48), "4 -> 2 -> 1 -> 1"),
        (small(layers=[1]), (1, 12, 5, 5), (4, 48), "1 -> 1"),
    ],
)
def test_what_cannot_build_is_refused_with_the_arithmetic(network, cbed, potential, shown):
    with pytest.raises(UserError, match=shown):
        layouts.build(network, cbed, potential, seed=0)


@pytest.mark.parametrize("layout", ["scan", "diffraction"])
def test_every_layer_has_its_own_scope(layout):
    network = small(layout=layout, dropout=0.1, batch_norm=True)
    cbed = (6, 6, 3, 3) if layout == "scan" else (3, 3, 6, 6)
    model = layouts.build(network, cbed, (12, 12), seed=0)
    paths = [variable.path for variable in model.variables]
    assert len(set(paths)) == len(paths)
    scopes = {path.rsplit("/", 1)[0] for path in paths}
    assert {"initial", "dense_0_layer_0", "dense_1_layer_1", "down_0_conv", "up_1"} <= scopes
    again = layouts.build(network, cbed, (12, 12), seed=1)
    assert [variable.path for variable in again.variables] == paths


def test_the_seed_alone_gives_the_weights():
    def weights(seed: int) -> list[np.ndarray]:
        model = layouts.build(small(), (6, 6, 3, 3), (12, 12), seed=seed)
        return model.get_weights()

    keras.utils.set_random_seed(1)
    first = weights(7)
    keras.utils.set_random_seed(2)
    for one, other in zip(first, weights(7), strict=True):
        np.testing.assert_array_equal(one, other)
    kernels = [(a, b) for a, b in zip(first, weights(8), strict=True) if a.ndim > 1]
    assert all((one != other).any() for one, other in kernels)


def test_he_initialisation_keeps_the_signals_size():
    network = schema.Network(layers=(2, 2), initial_channels=64, growth=32)
    model = layouts.build(network, (12, 12, 10, 10), (48, 48), seed=3)
    assert 0.3 < run(model, (12, 12, 10, 10), batch=4).std() < 10


@pytest.mark.parametrize(("compute", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_half_precision_computes_in_half_and_keeps_weights_and_output_single(compute, dtype):
    cbed = (4, 4, 3, 3)
    model = layouts.build(small(layers=[1]), cbed, (8, 8), compute=compute, seed=0)
    single = layouts.build(small(layers=[1]), cbed, (8, 8), seed=0)
    assert model.get_layer("dense_0_layer_0").compute_dtype == dtype
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    found = run(model, cbed)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, run(single, cbed), atol=0.1)


def test_dropout_is_a_pure_function_of_seed_step_and_rank():
    cbed = (4, 4, 3, 3)
    model = layouts.build(small(layers=[1], dropout=0.5), cbed, (4, 4), seed=0)
    patterns = tf.random.stateless_normal((1, *cbed), [0, 1])

    @tf.function
    def train(step: tf.Tensor, rank: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        layouts.set_dropout_seed(model, seed, step, rank)
        return model(patterns, training=True)

    first = train(5, 1, 9).numpy()
    for changed in [(6, 1, 9), (5, 2, 9), (5, 1, 8)]:
        assert (train(*changed).numpy() != first).any()
    np.testing.assert_array_equal(train(5, 1, 9).numpy(), first)
    kept = model(patterns, training=False).numpy()
    np.testing.assert_array_equal(model(patterns, training=False).numpy(), kept)


def test_dropout_masks_differ_between_layers():
    layer_masks = [
        (Dropout(0.5, name=name)(tf.ones((1, 8, 8, 4)), training=True).numpy() > 0)
        for name in ("one", "other")
    ]
    assert (layer_masks[0] != layer_masks[1]).any()
    assert 0.35 < layer_masks[0].mean() < 0.65


def test_scan_layout_follows_a_shift_of_the_specimen():
    """Rolling the scan by a multiple of the poolings' stride rolls the output, off the borders."""
    scan, ratio, shift = 32, 2, 4
    cbed = (scan, scan, 2, 2)
    network = small(layers=[1], bottleneck_layers=1)
    model = layouts.build(network, cbed, (scan * ratio, scan * ratio), seed=0)
    patterns = np.random.default_rng(1).normal(size=(1, *cbed)).astype("float32")
    output = model(patterns).numpy()
    rolled = model(np.roll(patterns, shift, axis=(1, 2))).numpy()
    inside = slice(30, 40)  # the receptive field is about 12 probe positions wide
    wanted = np.roll(output, shift * ratio, axis=(1, 2))
    np.testing.assert_allclose(rolled[:, inside, inside], wanted[:, inside, inside], atol=1e-4)
