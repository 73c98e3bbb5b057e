"""The microscope: its optics, and where probes and detector pixels lie.

Everything here is plain arithmetic. Positions and arrays go (y, x); lengths are in Å, energies in
keV, angles in mrad.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Optics:
    """The probe-forming system."""

    energy: float  # [keV]
    semi_angle: float  # [mrad]
    defocus: float  # [Å], positive is underfocus
    cs: float  # [Å]


def scan_positions(scan: tuple[int, int], step: float, box: float) -> np.ndarray:
    """Probe positions of a scan centred in the box.

    Returns:
        (Sy * Sx, 2) float64, (y, x) [Å] in the box, x fastest.
    """
    ys, xs = (field_start(box, count, step) + (np.arange(count) + 0.5) * step for count in scan)
    return np.stack(np.meshgrid(ys, xs, indexing="ij"), axis=-1).reshape(-1, 2)


def field_start(box: float, count: int, step: float) -> float:
    """Where the scanned field of `count` positions begins along one axis of the box [Å]."""
    return (box - count * step) / 2


def detector_weights(pixels: int, binning: int, reach: int) -> np.ndarray:
    """Share of each multislice frequency that falls on each detector pixel, along one axis.

    A detector pixel is `binning` frequencies wide and the detector is centred on the optic axis.
    Where a pixel's edge cuts through a frequency's cell, both neighbours get their part of it, so
    an odd number of pixels with an even binning stays symmetric.

    Returns:
        (pixels, 2 * reach + 1) float32, for frequencies -reach ... reach in units of 1/box.
    """
    left = (np.arange(pixels) - pixels / 2) * binning
    cells = np.arange(-reach, reach + 1)
    overlap = np.minimum(left[:, None] + binning, cells + 0.5) - np.maximum(
        left[:, None], cells - 0.5
    )
    return np.clip(overlap, 0, 1).astype(np.float32)
