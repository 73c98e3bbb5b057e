"""The cost model: what it counts, and that measuring recovers the pace."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_tools import cost, sample
from data_tools.structures import Material
from stemdl import schema

CESIUM_CHLORIDE = Material(
    "CsCl", "AB_cP2_221_b_a", "CsCl", 221, np.eye(3) * 4.12, np.array([[0, 0, 0], [0.5] * 3]),
    np.array([55, 17]),
)  # fmt: skip
SMALL = schema.Simulate(box=12, grid=0.25, scan=(4, 4), detector=(15, 15), thickness=(6, 30))


@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 32), st.sampled_from([12, 24.5, 100]))
@settings(max_examples=30, deadline=None)
def test_costs_add_up(slices, elements, probes, box):
    """Preparation goes by slices and elements, propagation by probes and slices; nothing else."""
    one, many = (schema.Simulate(box=box, scan=(1, count)) for count in (1, probes))
    count = cost.operations
    assert (count(one, slices, elements) > 0).all()
    preparation, propagation = count(many, slices, elements)
    assert preparation == pytest.approx(slices * count(one, 1, elements)[0])
    assert preparation == pytest.approx((elements + 1) / 2 * count(many, slices, 1)[0])
    assert propagation == pytest.approx(probes * count(one, slices, 1)[1])
    a_slice = count(one, 2, 1)[1] - count(one, 1, 1)[1]
    assert propagation == pytest.approx(probes * (count(one, 1, 1)[1] + (slices - 1) * a_slice))


def test_a_slice_costs_its_transforms():
    """Transforms of 5 n log2 n along rows and columns, to the grid and back, and two products."""
    one = schema.Simulate(box=12, grid=0.25, scan=(1, 1))
    a_slice = cost.operations(one, 2, 1)[1] - cost.operations(one, 1, 1)[1]
    n, m = 48, 2 * sample.antialias_reach(48) + 1
    assert n / 2 < m < 3 * n / 4
    assert a_slice == pytest.approx(2 * (n + m) * 5 * n * np.log2(n) + 6 * n * (n + m))


@pytest.mark.parametrize("substitute", [0, 1])
def test_the_thickness_foretold_is_the_one_simulated(substitute):
    materials = schema.Materials(substitute=substitute)
    recipe = sample.Recipe(SMALL.model_copy(update={"materials": materials}), {})
    for index in (0, 3, 6):
        thickness = sample.drawn_thickness(recipe, CESIUM_CHLORIDE, "train", index)
        made = sample.simulate_sample(recipe, CESIUM_CHLORIDE, "train", index)
        assert made.record["thickness"] == thickness
        assert made.record["elements"] == 2
        slices = sample.slice_count(thickness, SMALL.slice_thickness)
        np.testing.assert_array_equal(
            cost.of_sample(recipe, CESIUM_CHLORIDE, "train", index),
            cost.operations(SMALL, slices, 2),
        )


def test_measuring_recovers_the_pace(monkeypatch):
    """On a clock that moves by what the model says, but for the first, slow sample."""
    pace, clock = np.array([3e-10, 5e-11]), SimpleNamespace(now=0.0, calls=0)

    def simulated(*task):
        clock.calls += 1
        clock.now += cost.of_sample(*task) @ pace + (100 if clock.calls == 1 else 0)

    monkeypatch.setattr(cost, "simulate_sample", simulated)
    monkeypatch.setattr(cost, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    recipe = sample.Recipe(SMALL, {})
    found = cost.measure(recipe, CESIUM_CHLORIDE, "train", 0)
    np.testing.assert_allclose(found, pace, rtol=1e-6)


def test_measuring_is_real():
    found = cost.measure(sample.Recipe(SMALL, {}), CESIUM_CHLORIDE, "train", 0)
    assert found.shape == (2,) and (found >= 0).all() and found.sum() > 0
