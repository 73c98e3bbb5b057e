"""A turned specimen gives turned patterns: checked against a model computed afresh."""

import numpy as np
import pytest

from stemdl.data import symmetry

PIXEL, STEP, DETECTOR_STEP = 0.25, 0.5, 0.2
# Two unequal Gaussian atoms off the centre (y, x) [Å], so that no symmetry is left.
ATOMS = [((0.35, -0.2), 1.0, 0.3), ((-0.4, 0.55), 0.4, 0.2)]


def centred(count, step):
    return (np.arange(count) - (count - 1) / 2) * step


def simulate(atoms, scan, detector, potential):
    """Phase-object model: each pattern is a Gaussian disk moved by minus the potential's gradient.

    For a Gaussian atom h exp(-r²/2w²) the gradient at r is -h r/w² exp(-r²/2w²), analytically.
    """
    y, x = np.meshgrid(*(centred(n, PIXEL) for n in potential), indexing="ij")
    volts = sum(
        h * np.exp(-((y - cy) ** 2 + (x - cx) ** 2) / (2 * w**2)) for (cy, cx), h, w in atoms
    )
    py, px = np.meshgrid(*(centred(n, STEP) for n in scan), indexing="ij")
    shift = np.zeros((2, *scan))
    for (cy, cx), h, w in atoms:
        fall = h / w**2 * np.exp(-((py - cy) ** 2 + (px - cx) ** 2) / (2 * w**2))
        shift += 0.1 * np.array([(py - cy) * fall, (px - cx) * fall])
    ky, kx = np.meshgrid(*(centred(n, DETECTOR_STEP) for n in detector), indexing="ij")
    cbed = np.exp(-((ky - shift[0, ..., None, None]) ** 2 + (kx - shift[1, ..., None, None]) ** 2))
    return cbed, volts


def transformed(atoms, operation):
    def place(y, x):
        if operation & 4:
            y, x = x, y
        return (-y if operation & 2 else y, -x if operation & 1 else x)

    return [(place(*centre), height, width) for centre, height, width in atoms]


@pytest.mark.parametrize(
    "scan, detector, potential, order",
    [((4, 4), (7, 7), (8, 8), 8), ((3, 5), (7, 7), (6, 10), 4), ((4, 4), (7, 9), (8, 8), 4)],
)
def test_turning_the_arrays_is_turning_the_specimen(scan, detector, potential, order):
    assert symmetry.order(scan + detector, potential) == order
    cbed, volts = simulate(ATOMS, scan, detector, potential)
    seen = []
    for operation in range(order):
        wanted, wanted_volts = simulate(transformed(ATOMS, operation), scan, detector, potential)
        np.testing.assert_allclose(symmetry.apply(operation, cbed), wanted, atol=1e-12)
        np.testing.assert_allclose(symmetry.apply(operation, volts), wanted_volts, atol=1e-12)
        seen.append(wanted)
    for first in range(order):  # all different: the sample has no symmetry of its own
        for second in range(first):
            assert np.abs(seen[first] - seen[second]).max() > 1e-2
