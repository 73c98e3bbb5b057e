"""Where probes and detector pixels lie."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_tools import optics


@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 60))
def test_detector_is_centred_and_loses_nothing_inside(pixels, binning, reach):
    weights = optics.detector_weights(pixels, binning, reach)
    np.testing.assert_array_equal(weights, weights[::-1, ::-1])
    cells = np.arange(-reach, reach + 1)
    covered = np.abs(cells) + 0.5 <= pixels * binning / 2
    np.testing.assert_allclose(weights.sum(axis=0)[covered], 1)
    if pixels * binning / 2 <= reach + 0.5:
        np.testing.assert_allclose(weights.sum(axis=1), binning)


def test_even_binning_shares_the_cells_at_an_edge():
    weights = optics.detector_weights(pixels=3, binning=2, reach=3)
    np.testing.assert_array_equal(
        weights,
        [[0.5, 1, 0.5, 0, 0, 0, 0], [0, 0, 0.5, 1, 0.5, 0, 0], [0, 0, 0, 0, 0.5, 1, 0.5]],
    )


def test_probes_lie_at_the_centres_of_their_cells():
    positions = optics.scan_positions((2, 3), step=1.5, box=12).reshape(2, 3, 2)
    assert optics.field_start(12, 2, 1.5) == 4.5
    np.testing.assert_allclose(positions[:, 0, 0], [5.25, 6.75])
    np.testing.assert_allclose(positions[0, :, 1], [4.5, 6.0, 7.5])
    np.testing.assert_allclose(positions.mean(axis=(0, 1)), 6)
