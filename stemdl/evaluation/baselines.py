"""What a microscopist sees in the same data without training: iCOM and annular dark field.

Both make one number a probe position, (N, Sy, Sx), and are then interpolated to the pixels of the
potential. The scan is not periodic, so images are expanded in cosines over the scanned field (as if
mirrored at its border) instead of plane waves. A probe lies at the centre of its own cell, and the
potential's pixels share the scan's field (docs/architecture.md).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stemdl.data.shards import Axes
from stemdl.electrons import spatial_frequency

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Baseline:
    """What a baseline is called in files, in tables, and in a sentence."""

    key: str
    label: str
    meaning: str


BASELINES = (
    Baseline(
        "icom",
        "iCOM",
        "Integrated centre of mass: the mean deflection of the beam at each probe position, "
        "integrated over the scan.",
    ),
    Baseline(
        "adf",
        "ADF",
        "Virtual annular dark field: electrons scattered to outside of the bright-field disc.",
    ),
)


def icom(cbed: NDArray, axes: Axes, shape: tuple[int, int]) -> Array:
    """Integrated centre of mass at the potential's pixels: (N, *shape) [1].

    The centre of mass of each pattern is the probe-averaged gradient of the phase over 2π (Lazić,
    Bosch and Lazar, Ultramicroscopy 160, 265 (2016)). Its mean over the scan, a tilt of the beam
    or of the specimen, is removed. The phase is the cosine series whose gradient is nearest to the
    measured one in least squares.

    Args:
        cbed: patterns (N, Sy, Sx, Ky, Kx) [any unit], centred on the optic axis.
        shape: (H, W) of the potential.
    """
    ky, kx = (_frequencies(count, axes.detector_step) for count in cbed.shape[-2:])
    along_y, along_x = (cbed.sum(axis, dtype=np.float64) for axis in (-1, -2))
    intensity = along_y.sum(-1)
    gradient = (2 * np.pi * _over(moment, intensity) for moment in (along_y @ ky, along_x @ kx))
    gradient_y, gradient_x = (each - each.mean((-2, -1), keepdims=True) for each in gradient)
    return _on_pixels(_integrated(gradient_y, gradient_x, axes.scan_step), axes, shape)


def reaches_dark_field(
    detector: tuple[int, ...], step: float, energy: float, semi_angle: float
) -> bool:
    """Whether a detector (Ky, Kx) of pixels `step` [1/Å] has an annulus outside the disc."""
    return (min(detector) - 1) / 2 * step > _inner(step, energy, semi_angle)


def adf(
    cbed: NDArray, axes: Axes, shape: tuple[int, int], energy: float, semi_angle: float
) -> Array:
    """Virtual annular dark field at the potential's pixels: (N, *shape), a fraction of the beam.

    The annulus runs from one detector pixel outside the bright-field disc to the detector's edge.

    Args:
        cbed: patterns (N, Sy, Sx, Ky, Kx) [any unit] of one energy and semi-angle.
        shape: (H, W) of the potential.
        energy: [keV].
        semi_angle: [mrad].
    """
    ky, kx = (_frequencies(count, axes.detector_step) for count in cbed.shape[-2:])
    annulus = np.hypot(ky[:, None], kx) > _inner(axes.detector_step, energy, semi_angle)
    scattered = cbed[..., annulus].sum(-1, dtype=np.float64)
    signal = _over(scattered, cbed.sum((-2, -1), dtype=np.float64))
    return _on_pixels(_series(signal, np.cos, np.cos), axes, shape)


def _frequencies(count: int, step: float) -> Array:
    """Detector coordinates (count,) [1/Å], 0 in the middle of the detector."""
    return (np.arange(count) - (count - 1) / 2) * step


def _inner(step: float, energy: float, semi_angle: float) -> float:
    """Inner radius of the annulus [1/Å]: that of the bright-field disc and a detector pixel."""
    return spatial_frequency(semi_angle, energy) + step


def _over(part: Array, whole: Array) -> Array:
    """part / whole; 0 where no electron arrived."""
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _basis(wave: np.ufunc, count: int, at: Array) -> Array:
    """wave(π p t), (points, count), for p = 0 ... count - 1 at fractions t of the scanned field."""
    return wave(np.pi * at[:, None] * np.arange(count))


def _series(values: Array, wave_y: np.ufunc, wave_x: np.ufunc) -> Array:
    """Coefficients (N, Sy, Sx) of values (N, Sy, Sx) at the probes: sum over p, q of
    coefficient * wave_y(π p y / Ly) * wave_x(π q x / Lx) gives them back.

    Sine series end before p = Sy, whose cosine would be 0 at all probes.
    """

    def analysis(wave: np.ufunc, count: int) -> Array:
        matrix = _basis(wave, count, (np.arange(count) + 0.5) / count)
        return matrix * np.where(np.arange(count) == 0, 1, 2) / count

    height, width = values.shape[-2:]
    along_y, along_x = analysis(wave_y, height), analysis(wave_x, width)
    return np.einsum("nyx,yp,xq->npq", values, along_y, along_x, optimize=True)


def _integrated(gradient_y: Array, gradient_x: Array, step: float) -> Array:
    """Cosine coefficients (N, Sy, Sx) of the image whose gradient is nearest to the given one.

    Args:
        gradient_y, gradient_x: (N, Sy, Sx) [1/Å] at probes `step` [Å] apart.
    """
    height, width = gradient_y.shape[-2:]
    ky = np.pi * np.arange(height)[:, None] / (height * step)
    kx = np.pi * np.arange(width) / (width * step)
    # The derivative of cos(k y) is -k sin(k y).
    slope = ky * _series(gradient_y, np.sin, np.cos) + kx * _series(gradient_x, np.cos, np.sin)
    square = ky**2 + kx**2
    return -np.divide(slope, square, out=np.zeros_like(slope), where=square > 0)


def _on_pixels(coefficients: Array, axes: Axes, shape: tuple[int, int]) -> Array:
    """The cosine series at the potential's pixels: (N, Sy, Sx) -> (N, H, W)."""
    along_y, along_x = (
        _basis(
            np.cos,
            count,
            (np.arange(pixels) + 0.5) * axes.potential_pixel / (count * axes.scan_step),
        )
        for count, pixels in zip(coefficients.shape[-2:], shape, strict=True)
    )
    return np.einsum("npq,ip,jq->nij", coefficients, along_y, along_x, optimize=True)
