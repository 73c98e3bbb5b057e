"""Peaks at known places are found, matched one to one, and judged fairly at the border."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemdl.evaluation import columns
from stemdl.schema import Evaluate

PIXEL, SIGMA = 0.25, 0.3  # [Å]
SHAPE = (48, 40)
LAST = columns.last_pixel(SHAPE, PIXEL)
EVALUATE = Evaluate()


def image_of(positions, heights=None, sigma=SIGMA):
    heights = np.ones(len(positions)) if heights is None else heights
    y, x = np.arange(SHAPE[0])[:, None] * PIXEL, np.arange(SHAPE[1]) * PIXEL
    return sum(
        h * np.exp(-((y - py) ** 2 + (x - px) ** 2) / (2 * sigma**2))
        for (py, px), h in zip(positions, heights, strict=True)
    )


def find(image):
    return columns.find(
        image, PIXEL, min_distance=EVALUATE.min_distance, threshold=EVALUATE.threshold
    )


@settings(max_examples=30, deadline=None)
@given(
    y=st.floats(0.6, LAST[0] - 0.6),
    x=st.floats(0.6, LAST[1] - 0.6),
    sigma=st.floats(0.3, 0.6),
    height=st.floats(1e-3, 1e3),
    offset=st.floats(-50, 50),
)
def test_a_column_is_found_to_a_picometre(y, x, sigma, height, offset):
    peaks = find(height * image_of([(y, x)], sigma=sigma) + offset)
    assert peaks.position.shape == (1, 2)
    assert np.hypot(*(peaks.position[0] - (y, x))) * columns.PM < 1


def test_a_crystal_is_found_whole_and_brightest_first():
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(np.arange(1, 11, 1.8), np.arange(1, 9, 1.8), indexing="ij"), -1)
    truth = grid.reshape(-1, 2) + rng.uniform(-0.1, 0.1, (grid.size // 2, 2))
    heights = rng.uniform(0.2, 1, len(truth))
    peaks = find(image_of(truth, heights))
    pairs, distance = columns.match(truth, peaks.position, 0.5)
    assert len(pairs) == len(truth) == len(peaks.position)
    assert distance.max() * columns.PM < 1
    np.testing.assert_array_equal(np.argsort(-heights), pairs[np.argsort(pairs[:, 1]), 0])


def test_columns_too_close_merge_and_others_do_not():
    merged = find(image_of([(5, 4.8), (5, 5.2)]))
    np.testing.assert_allclose(merged.position, [[5, 5]], atol=1e-3)
    assert len(find(image_of([(5, 4.5), (5, 5.5)])).position) == 2


def test_threshold_is_over_the_range_and_can_be_applied_later():
    image = image_of([(3, 3), (6, 6), (9, 3)], [1, 0.3, 0.05]) * 40 - 15
    assert len(find(image).position) == 2
    all_three = columns.find(image, PIXEL, min_distance=0.6, threshold=0.02)
    np.testing.assert_array_equal(all_three.above(0.08).position, find(image).position)
    assert len(all_three.above(0.5).position) == 1


def test_flat_and_sloping_images_have_no_columns():
    assert len(find(np.full(SHAPE, 3.0)).position) == 0
    assert len(find(np.add.outer(np.arange(48.0), np.arange(40.0))).position) == 0


def test_flank_of_a_column_outside_is_no_column():
    assert len(find(image_of([(5, 5), (-0.2, 3), (7, LAST[1] + 0.2)])).position) == 1


positions = st.lists(st.tuples(st.floats(0, 4), st.floats(0, 4)), max_size=8).map(
    lambda points: np.array(points, float).reshape(-1, 2)
)


@settings(max_examples=60, deadline=None)
@given(first=positions, second=positions, radius=st.floats(0.1, 2))
def test_matching_is_one_to_one_symmetric_and_as_large_as_can_be(first, second, radius):
    pairs, distance = columns.match(first, second, radius)
    assert len(set(pairs[:, 0])) == len(set(pairs[:, 1])) == len(pairs)
    assert (distance <= radius).all()
    back, distance_back = columns.match(second, first, radius)
    assert len(back) == len(pairs)
    assert distance_back.sum() == pytest.approx(distance.sum())
    # None is left over on both sides that could still be paired.
    rest = [np.delete(each, pairs[:, k], axis=0) for k, each in enumerate((first, second))]
    assert len(columns.match(*rest, radius)[0]) == 0


def test_matching_keeps_a_pair_that_mutual_nearest_neighbours_lose():
    truth, found = np.array([[0.0, 0.0], [0.0, 0.5]]), np.array([[0.0, 0.2], [0.0, -0.4]])
    pairs, _ = columns.match(truth, found, 0.5)
    assert pairs.tolist() == [[0, 1], [1, 0]]


def test_errors_recall_and_precision_by_hand():
    truth = np.array([[2.0, 2.0], [2.0, 5.0], [6.0, 2.0], [8.0, 8.0]])
    found = np.array([[2.0, 2.03], [2.04, 5.0], [4.0, 4.0]])
    verdict = columns.judge(truth, found, LAST, EVALUATE)
    figures = verdict.tally.figures()
    assert (figures["true"], figures["found"]) == (4, 3)
    assert figures["recall"] == pytest.approx(2 / 4)
    assert figures["precision"] == pytest.approx(2 / 3)
    assert figures["rms_pm"] == pytest.approx(np.sqrt((3**2 + 4**2) / 2))
    assert figures["median_pm"] == pytest.approx(3.5)
    assert verdict.missed.tolist() == [[6.0, 2.0], [8.0, 8.0]]
    assert verdict.false.tolist() == [[4.0, 4.0]]
    assert len(verdict.matched) == 2
    both = verdict.tally + verdict.tally
    assert both.figures() == pytest.approx(figures | {"true": 8, "found": 6})
    assert both.f1 == pytest.approx(2 * (1 / 2) * (2 / 3) / (1 / 2 + 2 / 3))


def test_no_columns_is_no_score_rather_than_a_good_one():
    nothing = columns.judge(np.empty((0, 2)), np.empty((0, 2)), LAST, EVALUATE).tally
    assert nothing.f1 == 0
    assert nothing.figures()["recall"] is None
    assert nothing.figures()["rms_pm"] is None


def test_columns_at_the_border_are_partners_but_not_judged():
    inside, outside = [3.0, 0.52], [3.0, 0.48]
    for truth, found, judged in (
        ([inside], [outside], (1, 1, 0, 0)),  # recovered, by a column that is itself not judged
        ([outside], [inside], (0, 0, 1, 1)),
        ([outside], [], (0, 0, 0, 0)),
        ([], [outside], (0, 0, 0, 0)),
    ):
        tally = columns.judge(_points(truth), _points(found), LAST, EVALUATE).tally
        assert (tally.truths, tally.recovered, tally.claims, tally.right) == judged


def test_crowded_true_columns_are_neither_right_nor_wrong():
    truth = np.array([[3.0, 3.0], [3.0, 3.6], [6.0, 6.0]])
    isolated = np.array([False, False, True])
    found = np.array([[3.0, 3.3], [2.9, 2.9], [2.8, 3.4], [6.0, 6.1], [9.0, 3.0]])
    verdict = columns.judge(truth, found, LAST, EVALUATE, isolated)
    tally = verdict.tally
    assert (tally.truths, tally.recovered, tally.claims, tally.right) == (1, 1, 2, 1)
    assert verdict.false.tolist() == [[9.0, 3.0]]
    assert tally.errors == pytest.approx([0.1])


def _points(points):
    return np.array(points, float).reshape(-1, 2)
