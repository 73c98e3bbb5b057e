"""Bringing pixels onto other pixels: what must stay stays, what was not measured is refused."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from data_tools.importers import resample
from data_tools.importers.resample import Detector, centred, detector_operator
from stemdl.errors import UserError

few = settings(max_examples=25, deadline=None)
angles = st.floats(-45, 45)


def applied(operator: object, pattern: NDArray, target: Detector) -> NDArray:
    return (operator @ pattern.ravel()).reshape(target.shape)  # type: ignore[operator]


def random(*shape: int) -> NDArray:
    return np.random.default_rng(sum(shape)).random(shape)


def disc(shape: tuple[int, int], centre: tuple[float, float], radius: float) -> NDArray:
    """A disc whose rim is blurred over about two pixels, over a weak background."""
    y, x = np.indices(shape)
    r = np.hypot(y - centre[0], x - centre[1])
    return 1 / (1 + np.exp((r - radius) * 2)) + 0.02


# The detector


@few
@given(
    st.tuples(st.floats(15, 24), st.floats(13, 22)),
    st.floats(1, 3),
    angles,
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_a_constant_stays_constant(
    origin: tuple[float, float], zoom: float, angle: float, shape: tuple[int, int]
) -> None:
    source, target = Detector((40, 36), (0.1, 0.1), origin), centred(shape, 0.1 * zoom)
    operator = detector_operator(source, target, angle)
    found = applied(operator, np.full((40, 36), 5.0), target)
    assert found == pytest.approx(5 * zoom**2, rel=1e-5)


@few
@given(st.integers(1, 4), st.tuples(st.integers(1, 5), st.integers(1, 5)), st.integers(0, 9))
def test_binning_keeps_the_sum(binning: int, shape: tuple[int, int], seed: int) -> None:
    pattern = np.random.default_rng(seed).random([count * binning for count in shape])
    source = centred(pattern.shape, 0.1)
    target = centred(shape, 0.1 * binning)
    found = applied(detector_operator(source, target, 0), pattern, target)
    blocks = pattern.reshape(shape[0], binning, shape[1], binning).sum((1, 3))
    assert found == pytest.approx(blocks)
    assert found.sum() == pytest.approx(pattern.sum())


@few
@given(st.floats(1, 4), angles)
def test_a_pattern_inside_the_detector_keeps_its_sum(zoom: float, angle: float) -> None:
    y, x = np.indices((61, 61))
    pattern = np.exp(-((y - 31.3) ** 2 + (x - 28.6) ** 2) / 18)
    count = int(41 / zoom)  # its diagonal stays on the detector
    target = centred((count, count), 0.1 * zoom)
    found = applied(
        detector_operator(Detector((61, 61), (0.1, 0.1), (30, 30)), target, angle), pattern, target
    )
    assert found.sum() == pytest.approx(pattern.sum(), rel=2e-3)


@few
@given(st.floats(-180, 180), st.floats(0, 360))
def test_rotation_turns_vectors_by_r(angle: float, direction: float) -> None:
    """A spot at k on the detector comes to R k in the scan's axes, for any angle."""
    k = 8 * np.array([np.cos(np.deg2rad(direction)), np.sin(np.deg2rad(direction))])
    y, x = np.indices((51, 47))
    pattern = np.exp(-((y - 25 - k[0]) ** 2 + (x - 24 - k[1]) ** 2) / 8)
    turns = round(angle / 90)
    source = resample.turned(Detector((51, 47), (0.1, 0.1), (25.0, 24.0)), turns)
    target = centred((29, 29), 0.1)
    operator = detector_operator(source, target, angle - 90 * turns)
    found = applied(operator, resample.quarter_turns(pattern, turns), target)
    at = np.array([(found * index).sum() / found.sum() for index in np.indices((29, 29))]) - 14
    radians = np.deg2rad(angle)
    cos, sin = np.cos(radians), np.sin(radians)
    assert at == pytest.approx(np.array([[cos, -sin], [sin, cos]]) @ k, abs=0.02)


@few
@given(st.integers(1, 7), st.integers(1, 7), st.integers(-9, 9))
def test_four_quarter_turns_are_none(height: int, width: int, turns: int) -> None:
    pattern = random(2, 3, height, width)
    detector = Detector((height, width), (0.1, 0.2), (0.3 * height, 0.6 * width))
    found, place = pattern, detector
    for _ in range(4):
        found, place = resample.quarter_turns(found, turns), resample.turned(place, turns)
    assert np.array_equal(found, pattern)
    assert place.shape == detector.shape and place.step == detector.step
    assert place.origin == pytest.approx(detector.origin)


@few
@given(st.integers(0, 3), st.tuples(st.integers(0, 4), st.integers(0, 6)))
def test_the_optic_axis_turns_with_the_pattern(turns: int, at: tuple[int, int]) -> None:
    pattern = np.zeros((5, 7))
    pattern[at] = 1
    origin = (float(at[0]), float(at[1]))
    turned = resample.turned(Detector((5, 7), (0.1, 0.2), origin), turns)
    found = resample.quarter_turns(pattern, turns)
    assert found.shape == turned.shape
    assert tuple(np.argwhere(found)[0]) == turned.origin


def test_small_angles_agree_with_none() -> None:
    source, target = Detector((31, 33), (0.1, 0.1), (14.6, 16.2)), centred((7, 7), 0.31)
    pattern = disc((31, 33), (14.0, 17.0), 8)
    straight = applied(detector_operator(source, target, 0), pattern, target)
    turned = applied(detector_operator(source, target, 1e-4), pattern, target)
    assert turned == pytest.approx(straight, abs=0.02 * straight.max())


@few
@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(5, 9))
def test_a_shift_is_undone_by_centring(dy: float, dx: float, radius: float) -> None:
    still, moved = (disc((41, 39), centre, radius) for centre in ((20.0, 19.0), (20 + dy, 19 + dx)))
    target = centred((7, 7), 0.4)
    patterns = []
    for pattern in (still, moved):
        found = resample.bright_field(pattern)
        assert found is not None and found.radius == pytest.approx(radius, rel=0.1)
        source = Detector((41, 39), (0.1, 0.1), found.centre)
        patterns.append(applied(detector_operator(source, target, 0), pattern, target))
    assert patterns[1] == pytest.approx(patterns[0], abs=0.03 * patterns[0].max())


def test_the_disc_is_found_beside_hot_pixels_and_other_discs() -> None:
    pattern = disc((64, 60), (30.25, 28.5), 10) + 0.8 * disc((64, 60), (50, 45), 4)
    pattern[3, 5] = pattern[60, 2] = 1e6
    found = resample.bright_field(pattern)
    assert found is not None
    assert found.centre == pytest.approx((30.25, 28.5), abs=0.3)
    assert found.radius == pytest.approx(10, abs=0.7)


def test_no_electrons_no_disc() -> None:
    assert resample.bright_field(np.zeros((9, 9))) is None


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (centred((9, 9), 0.05), "0.1 1/Å along ky are wanted 0.05 1/Å wide: finer than measured"),
        (centred((21, 9), 0.1), "from -1.050 to 0.950 1/Å along ky, wanted -1.050 to 1.050"),
        (centred((9, 31), 0.1), "along kx, wanted -1.550 to 1.550 1/Å: beyond"),
    ],
)
def test_extrapolation_is_refused_with_numbers(target: Detector, message: str) -> None:
    with pytest.raises(UserError, match=message):
        detector_operator(Detector((20, 24), (0.1, 0.1), (10, 12)), target, 0)


def test_a_turned_square_needs_more_detector() -> None:
    source, target = centred((21, 21), 0.1), centred((19, 19), 0.1)
    detector_operator(source, target, 0)
    with pytest.raises(UserError, match="beyond what was measured"):
        detector_operator(source, target, 45)


# The scan


@few
@given(st.integers(1, 30), st.integers(1, 9), st.floats(1, 3), st.integers(0, 8))
def test_fields_cover_the_scan_and_stay_inside(
    more: int, count: int, ratio: float, overlap: int
) -> None:
    needed = resample.extent(count, ratio)
    available, overlap = needed + more - 1, min(overlap, count - 1)
    starts = resample.starts(available, count, ratio, overlap)
    assert starts[0] == 0 and starts == sorted(set(starts))
    assert available - ratio < starts[-1] + needed <= available
    assert all(b - a <= (count - overlap) * ratio + 1e-6 for a, b in itertools.pairwise(starts))


def test_a_scan_smaller_than_a_field_is_refused_with_numbers() -> None:
    with pytest.raises(UserError, match=r"has 11 probe positions along an axis, a field needs 12"):
        resample.starts(11, 12, 1.0, 0)


@pytest.mark.parametrize(
    ("step", "wanted", "ratio"),
    [(1, 1, 1), (1, 1.005, 1), (1.005, 1, 1), (0.5, 1, 2), (0.501, 1, 2), (0.4, 1, 2.5)],
)
def test_steps_within_a_hundredth_are_whole(step: float, wanted: float, ratio: float) -> None:
    assert resample.step_ratio(step, wanted) == ratio


def test_a_finer_scan_is_refused_with_numbers() -> None:
    with pytest.raises(UserError, match=r"1.2 Å apart are wanted every 1 Å: finer than measured"):
        resample.step_ratio(1.2, 1.0)


@few
@given(st.floats(1, 2.5), st.integers(2, 6), st.integers(0, 1))
def test_interpolation_is_exact_for_planes(ratio: float, count: int, axis: int) -> None:
    size = resample.extent(count, ratio)
    values = np.moveaxis(np.arange(size)[:, None] * 2.0 + np.zeros(3) + 1, 0, axis)
    at = np.arange(count) * ratio
    found = np.moveaxis(resample.interpolated(values, at, axis), axis, 0)
    assert found == pytest.approx(np.repeat((2 * at + 1)[:, None], 3, axis=1))


def test_whole_steps_take_patterns_as_they_are() -> None:
    values = random(7, 2, 3, 3).astype(np.float32)
    found = resample.interpolated(values, np.arange(4) * 2.0, 0)
    assert np.array_equal(found, values[::2]) and found.dtype == np.float32
