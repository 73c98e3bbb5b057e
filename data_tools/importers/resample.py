"""The mathematics of bringing one scan's pixels onto another's. Pure functions of arrays.

Detector: a pattern is counts in square pixels. Pixels that are turned or of another size share the
counts out by area, so nothing is lost or made: a constant stays constant and sums are kept.
Scan: a pattern belongs to a point, so scans are thinned out or interpolated between neighbours.
Neither is ever carried on beyond what was measured, nor made finer: that is a UserError.

Rotation: a vector (ky, kx) on the detector is R (ky, kx) in the scan's axes, with
R = [[cos, -sin], [sin, cos]]; the sign is that of py4DSTEM's QR_rotation.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage, sparse

from data_tools.importers.calibration import Disc, Pair
from stemdl.data.trained_on import SAME
from stemdl.errors import UserError


@dataclass(frozen=True)
class Detector:
    """A grid of detector pixels; `origin` is the pixel (ky, kx) of the optic axis."""

    shape: tuple[int, ...]
    step: Pair  # [1/Å]
    origin: Pair


def centred(shape: tuple[int, ...], step: float) -> Detector:
    """The detector of shards: square pixels, the optic axis in the middle."""
    return Detector(shape, (step, step), ((shape[0] - 1) / 2, (shape[1] - 1) / 2))


def bright_field(pattern: NDArray) -> Disc | None:
    """Where the bright-field disc of a mean pattern (Ky, Kx) lies; None if there is none.

    The disc is the largest connected region above half of the maximum, hot pixels left out by a
    3 x 3 median. Pixels of its rim count by their intensity over the disc's median, so centre and
    radius are good to a fraction of a pixel.
    """
    smooth = ndimage.median_filter(pattern.astype(np.float64), 3)
    peak = smooth.max()
    if not peak > 0:
        return None
    labels, _ = ndimage.label(smooth > peak / 2)
    sizes = np.bincount(labels.ravel())
    sizes[0] = 0
    disc = labels == sizes.argmax()
    rim = ndimage.binary_dilation(disc, iterations=2)
    weight = np.where(rim, np.clip(pattern / np.median(smooth[disc]), 0, 1), 0)
    area = weight.sum()
    ky, kx = (float((weight * index).sum() / area) for index in np.indices(pattern.shape))
    return Disc((ky, kx), float(np.sqrt(area / np.pi)))


def quarter_turns(patterns: NDArray, turns: int) -> NDArray:
    """A view of patterns (..., Ky, Kx) on a detector turned by `turns` times 90° into the scan."""
    # R takes (1, 0), a step down the rows, to (0, 1), a step along them: np.rot90's sense.
    return np.rot90(patterns, turns, axes=(-2, -1))


def turned(detector: Detector, turns: int) -> Detector:
    """The detector whose patterns `quarter_turns` gives."""
    (height, width), step, (y, x) = detector.shape, detector.step, detector.origin
    for _ in range(turns % 4):
        (height, width), step, (y, x) = (width, height), step[::-1], (width - 1 - x, y)
    return Detector((height, width), step, (y, x))


def detector_operator(source: Detector, target: Detector, angle: float) -> sparse.csr_array:
    """The matrix (pixels of target, pixels of source) that shares out counts by area.

    Args:
        angle: rotation of the source into the scan [degrees]. Quarter turns are exact by
            `quarter_turns`; other angles go by bilinear interpolation of the density of counts.

    Raises:
        UserError: the target reaches beyond the source, or is finer.
    """
    check_detector(source, target, angle)
    if angle == 0:
        return sparse.csr_array(sparse.kron(*(_overlaps(source, target, axis) for axis in (0, 1))))
    return _turned_operator(source, target, angle)


def check_detector(source: Detector, target: Detector, angle: float) -> None:
    """Raise a UserError if the target needs what the source did not measure."""
    for name, fine, coarse in zip(("ky", "kx"), target.step, source.step, strict=True):
        if fine < coarse * (1 - SAME):
            raise UserError(
                f"detector pixels of {coarse:.4g} 1/Å along {name} are wanted {fine:.4g} 1/Å wide: "
                "finer than measured; train a network for such pixels (simulate.detector_bin)"
            )
    corners = [
        _into(source, target, angle, np.array([y, x]))
        for y in (-0.5, target.shape[0] - 0.5)
        for x in (-0.5, target.shape[1] - 0.5)
    ]
    for axis, name in enumerate(("ky", "kx")):
        step, origin, count = source.step[axis], source.origin[axis], source.shape[axis]
        low, high = (f(corner[axis] for corner in corners) for f in (min, max))
        slack = SAME * target.step[axis] / step
        if low < -0.5 - slack or high > count - 0.5 + slack:
            has, wants = (
                f"{(ends[0] - origin) * step:.3f} to {(ends[1] - origin) * step:.3f} 1/Å"
                for ends in ((-0.5, count - 0.5), (low, high))
            )
            raise UserError(
                f"the detector reaches from {has} along {name}, wanted {wants}: beyond what was "
                "measured; check --detector-step, --origin and --rotation, or take a smaller "
                "detector (--detector, or a network trained with a smaller simulate.detector)"
            )


def step_ratio(step: float, wanted: float) -> float:
    """The wanted scan step in steps of the scan; a whole number where it is one within SAME.

    Raises:
        UserError: wanted is finer than measured.
    """
    ratio = wanted / step
    if ratio < 1 - SAME:
        raise UserError(
            f"probe positions {step:.4g} Å apart are wanted every {wanted:.4g} Å: finer than "
            "measured; check --scan-step, or train a network for this step (simulate.scan_step)"
        )
    whole = max(1, round(ratio))
    return float(whole) if abs(ratio - whole) <= SAME * whole else ratio


def extent(count: int, ratio: float) -> int:
    """Probes of the scan that `count` probes, `ratio` steps apart, need along an axis."""
    return int(np.ceil((count - 1) * ratio - 1e-9)) + 1


def starts(available: int, count: int, ratio: float, overlap: int) -> list[int]:
    """First probes of fields of `count` probes that cover an axis, `overlap` probes in common.

    The last field lies flush with the end if any of its probes would be left out otherwise.

    Raises:
        UserError: the scan is smaller than one field, or fields would not advance.
    """
    if overlap >= count:
        raise UserError(f"--overlap is {overlap}, wanted less than the {count} probes of a field")
    needed = extent(count, ratio)
    if available < needed:
        raise UserError(
            f"the scan has {available} probe positions along an axis, a field needs {needed} "
            f"({count} probes, {ratio:.4g} steps apart); take a smaller field (--field, or a "
            "network trained with a smaller simulate.scan)"
        )
    last = available - needed
    found = list(range(0, last + 1, int((count - overlap) * ratio + 1e-9)))
    return found if last - found[-1] < ratio else [*found, last]


def interpolated(values: NDArray, at: NDArray[np.float64], axis: int) -> NDArray:
    """`values` at fractional indices along an axis, linear between neighbours, exact at whole."""
    values = np.moveaxis(values, axis, 0)
    low = np.minimum(np.floor(at + 1e-9).astype(int), len(values) - 1)
    part = np.clip(at - low, 0, 1)
    out = values[low]
    if (part > 1e-9).any():
        part = part.reshape(-1, *(1,) * (values.ndim - 1)).astype(values.dtype)
        out = out * (1 - part) + values[np.minimum(low + 1, len(values) - 1)] * part
    return np.moveaxis(out, 0, axis)


def _overlaps(source: Detector, target: Detector, axis: int) -> NDArray[np.float64]:
    """Share (target, source) of each source pixel that falls on each target pixel, on one axis."""
    (low, high), (left, right) = (
        [(np.arange(d.shape[axis]) - d.origin[axis] + side) * d.step[axis] for side in (-0.5, 0.5)]
        for d in (source, target)
    )
    shared = np.minimum(right[:, None], high) - np.maximum(left[:, None], low)
    return np.clip(shared, 0, None) / source.step[axis]


def _turned_operator(source: Detector, target: Detector, angle: float) -> sparse.csr_array:
    """detector_operator for any angle: the source's density at points spread over each pixel."""
    # Points at most half a source pixel apart.
    fine = [int(np.ceil(2 * t / s)) for t, s in zip(target.step, source.step, strict=True)]
    rows, columns = (
        (np.arange(count * n) + 0.5) / n - 0.5 for count, n in zip(target.shape, fine, strict=True)
    )
    points = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1)
    into = _into(source, target, angle, points)
    last = np.array(source.shape) - 1
    into = np.clip(into, 0, last)  # the outer half of a border pixel has that pixel's density
    low = np.minimum(into.astype(int), np.maximum(last - 1, 0))
    part = into - low
    pixel = np.rint(points).astype(int)
    to = np.ravel_multi_index(tuple(np.moveaxis(pixel, -1, 0)), target.shape).ravel()
    area = np.prod(target.step) / np.prod(source.step) / np.prod(fine)
    matrix = sparse.csr_array((np.prod(target.shape), np.prod(source.shape)))
    for corner in ((0, 0), (0, 1), (1, 0), (1, 1)):
        weight = np.prod(np.where(corner, part, 1 - part), axis=-1).ravel() * area
        at = np.minimum(low + corner, last)
        of = np.ravel_multi_index(tuple(np.moveaxis(at, -1, 0)), source.shape).ravel()
        matrix += sparse.csr_array((weight, (to, of)), shape=matrix.shape)
    return matrix


def _into(source: Detector, target: Detector, angle: float, points: NDArray) -> NDArray:
    """Fractional pixels (..., 2) of the source at fractional pixels (..., 2) of the target."""
    radians = np.deg2rad(angle)
    cos, sin = np.cos(radians), np.sin(radians)
    k = (points - target.origin) * target.step
    back = np.array([[cos, sin], [-sin, cos]])  # the inverse of R
    return (k @ back.T) / source.step + source.origin
