"""The baselines against analytic objects that have no symmetry, so that a flip cannot hide."""

import numpy as np
import pytest

from stemdl import electrons
from stemdl.data.shards import Axes
from stemdl.evaluation import baselines

ENERGY, SEMI_ANGLE = 100.0, 20.0  # [keV], [mrad]
AXES = Axes(scan_step=0.5, detector_step=1 / 12, potential_pixel=0.25, potential_blur=0.0)
SCAN = (12, 16)
SHAPE = (24, 32)  # of the potential: the field is 6 Å by 8 Å


def pixels(shape=SHAPE, axes=AXES):
    """Coordinates [Å] of the potential's pixels, from the first one's centre."""
    y, x = (np.arange(count) * axes.potential_pixel for count in shape)
    return y[:, None], x


def probes(scan=SCAN, axes=AXES):
    """Coordinates [Å] of the probes, as docs/architecture.md has them."""
    y, x = ((np.arange(n) + 0.5) * axes.scan_step - 0.5 * axes.potential_pixel for n in scan)
    return y[:, None], x


def four_gaussians(y, x, width):
    """A phase [rad] that no flip or turn maps onto itself, blurred to `width` [Å]."""
    sigma = 0.4
    places = ((1.2, 1.5, 0.3), (1.5, 6.0, 0.2), (4.3, 3.0, 0.25), (5.0, 6.6, 0.1))
    scale = sigma**2 / (sigma**2 + width**2)
    return scale * sum(
        height * np.exp(-((y - py) ** 2 + (x - px) ** 2) / (2 * (sigma**2 + width**2)))
        for py, px, height in places
    )


@pytest.fixture(scope="module")
def phase_object_patterns():
    """Patterns of a pure phase object: |FFT(probe * exp(i phase))|², with a Gaussian probe."""
    box, grid, probe_sigma = 12.0, 0.125, 0.35  # [Å]; sigma of the probe's intensity
    offset = 2.0  # [Å] the box reaches beyond the field
    r = np.arange(round(box / grid)) * grid - offset
    transmission = np.exp(1j * four_gaussians(r[:, None], r, 0))
    patterns = np.empty((1, *SCAN, 31, 31))
    probe_y, probe_x = probes()
    for a, b in np.ndindex(*SCAN):
        distance = (r[:, None] - probe_y[a]) ** 2 + (r - probe_x[b]) ** 2
        wave = np.exp(-distance / (4 * probe_sigma**2)) * transmission
        intensity = np.fft.fftshift(abs(np.fft.fft2(wave)) ** 2)
        middle = len(r) // 2
        patterns[0, a, b] = intensity[middle - 15 : middle + 16, middle - 15 : middle + 16]
    return patterns, probe_sigma


def test_icom_recovers_phase_scale_and_orientation(phase_object_patterns):
    patterns, probe_sigma = phase_object_patterns
    found = baselines.icom(patterns, AXES, SHAPE)[0]
    wanted = four_gaussians(*pixels(), probe_sigma)
    assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.995
    gain = np.polyfit(wanted.ravel(), found.ravel(), 1)[0]
    assert gain == pytest.approx(1, abs=0.05)
    for wrong in (found[::-1], found[:, ::-1], found[::-1, ::-1]):
        assert np.corrcoef(wrong.ravel(), wanted.ravel())[0, 1] < 0.8


def test_icom_does_not_depend_on_intensity_or_a_tilt(phase_object_patterns):
    patterns, _ = phase_object_patterns
    found = baselines.icom(patterns, AXES, SHAPE)
    rng = np.random.default_rng(0)
    brighter = patterns * rng.uniform(1, 2, (1, *SCAN, 1, 1))
    np.testing.assert_allclose(baselines.icom(brighter, AXES, SHAPE), found, atol=1e-9)
    tilted = np.roll(patterns, (1, -2), (-2, -1))
    np.testing.assert_allclose(baselines.icom(tilted, AXES, SHAPE), found, atol=2e-3)


@pytest.mark.parametrize("waves", [(1, 0), (0, 2), (3, 2)])
def test_gradient_of_a_cosine_integrates_to_it(waves):
    """Half-waves over the field are exact, whatever their value at the border."""
    lengths = [count * AXES.scan_step for count in SCAN]
    k = [np.pi * wave / length for wave, length in zip(waves, lengths, strict=True)]
    half = 0.5 * AXES.potential_pixel  # from the field's edge to the first pixel

    def parts(y, x):
        return np.cos(k[0] * (y + half)), np.cos(k[1] * (x + half))

    probe_y, probe_x = probes()
    cos_y, cos_x = parts(probe_y, probe_x)
    gradient_y = -k[0] * np.sin(k[0] * (probe_y + half)) * cos_x
    gradient_x = -k[1] * cos_y * np.sin(k[1] * (probe_x + half))
    coefficients = baselines._integrated(gradient_y[None], gradient_x[None], AXES.scan_step)
    wanted = np.multiply(*parts(*pixels()))
    found = baselines._on_pixels(coefficients, AXES, SHAPE)
    np.testing.assert_allclose(found[0], wanted, atol=1e-12)


@pytest.mark.parametrize(("pixel", "shape"), [(0.25, (24, 32)), (0.3, (20, 27)), (0.5, (12, 16))])
def test_adf_lies_on_the_potentials_pixels(pixel, shape):
    axes = Axes(0.5, 1 / 12, pixel, 0.0)

    def smooth(y, x):
        return 0.1 + 0.05 * np.exp(-((y - 2) ** 2 + (x - 5) ** 2) / 3) + 0.02 * np.sin(y)

    signal = smooth(*probes(axes=axes))
    patterns = np.zeros((1, *SCAN, 31, 31))
    patterns[..., 15, 15] = 1 - signal  # on the optic axis
    patterns[..., 15, 26] = signal  # 11 / 12 / Å is 34 mrad, outside the disc of 20 mrad
    found = baselines.adf(patterns, axes, shape, ENERGY, SEMI_ANGLE)[0]
    wanted = smooth(*pixels(shape, axes))
    inner = np.s_[4:-4, 4:-4]
    np.testing.assert_allclose(found[inner], wanted[inner], atol=1e-3)
    assert abs(found - wanted).max() < 6e-3  # the series is even at the border, this image is not


def test_adf_takes_nothing_of_the_disc():
    k = (np.arange(31) - 15) * AXES.detector_step
    radius = np.hypot(k[:, None], k)
    disc = radius <= SEMI_ANGLE * 1e-3 / electrons.wavelength(ENERGY) + AXES.detector_step / 2
    patterns = np.broadcast_to(disc * 1.0, (1, *SCAN, 31, 31))
    assert (baselines.adf(patterns, AXES, SHAPE, ENERGY, SEMI_ANGLE) == 0).all()


def test_dark_field_needs_a_ring_outside_the_disc():
    def reaches(pixels, semi_angle):
        return baselines.reaches_dark_field(pixels, 1 / 12, ENERGY, semi_angle)

    assert reaches((31, 31), 20) and not reaches((31, 31), 46) and not reaches((13, 31), 20)


def test_patterns_without_electrons_are_no_error():
    empty = np.zeros((1, *SCAN, 31, 31), np.uint16)
    assert (baselines.icom(empty, AXES, SHAPE) == 0).all()
    assert (baselines.adf(empty, AXES, SHAPE, ENERGY, SEMI_ANGLE) == 0).all()
