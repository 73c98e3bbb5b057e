"""Mosaics: fields cut from a known image come together to it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter

from stemdl.evaluation import mosaic


def landscape(height, width, seed=0):
    image = gaussian_filter(np.random.default_rng(seed).normal(size=(height, width)), 3) * 30
    return image - image.mean()


def cut(image, starts, size):
    """Fields, each of mean zero, as a network gives them."""
    fields = np.stack([image[y : y + size[0], x : x + size[1]] for y, x in starts])
    return fields - fields.mean((1, 2), keepdims=True)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_overlapping_fields_come_together_to_the_image(data):
    height, width = data.draw(st.integers(8, 14)), data.draw(st.integers(8, 14))
    step_y, step_x = (data.draw(st.integers(size // 2, size - 2)) for size in (height, width))
    down, across = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4))
    starts = [(y * step_y, x * step_x) for y in range(down) for x in range(across)]
    image = landscape((down - 1) * step_y + height, (across - 1) * step_x + width)
    joined = mosaic.join(cut(image, starts, (height, width)), np.array(starts, float))
    np.testing.assert_allclose(joined, image, atol=1e-6)


def test_fields_side_by_side_are_laid_as_they_are():
    fields = cut(landscape(6, 15), [(0, 0), (0, 5), (0, 10)], (6, 5))
    joined = mosaic.join(fields, np.array([(0, 0), (0, 5), (0, 10)], float))
    np.testing.assert_allclose(joined, np.concatenate(list(fields), axis=1), atol=1e-12)


def test_corners_between_pixels_are_met():
    image = landscape(60, 60)
    coarse = np.arange(0, 60, 3)
    whole = image[np.ix_(coarse, coarse)]  # every third pixel
    # The second field begins 5 and 2/3 pixels further.
    second = image[np.ix_(np.arange(0, 30, 3), 17 + np.arange(0, 42, 3))]
    fields = np.stack([whole[:10, :14], second])
    fields -= fields.mean((1, 2), keepdims=True)
    joined = mosaic.join(fields, np.array([(0, 0), (0, 17 / 3)]))
    wanted = whole[:10] - whole[:10].mean()
    assert joined.shape == wanted.shape
    inner = np.s_[2:-2, 2:-2]
    assert np.corrcoef(joined[inner].ravel(), wanted[inner].ravel())[0, 1] > 0.99


def test_where_no_field_lies_there_is_no_number():
    joined = mosaic.join(np.zeros((2, 3, 3)), np.array([(0.0, 0.0), (4.0, 5.0)]))
    assert np.isnan(joined[3]).all()
    assert np.isfinite(joined).sum() == 18


def test_scans_begin_at_their_first_probe():
    starts = np.array([(0, 0), (0, 5), (5, 0), (0, 0), (0, 0), (0, 7)])
    assert [group.tolist() for group in mosaic.scans(starts)] == [[0, 1, 2], [4, 5]]
    assert mosaic.scans(np.zeros((4, 2))) == []  # simulated: each a scan of its own
    # A second shard goes on in the middle of a scan.
    assert [group.tolist() for group in mosaic.scans(starts[1:3])] == [[0, 1]]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_weights_are_the_same_from_both_edges(count):
    taper = mosaic._taper(count)
    assert (taper > 0).all()
    np.testing.assert_array_equal(taper, taper[::-1])
