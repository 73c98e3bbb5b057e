"""Atomic columns: find the peaks of an image, match them with the truth, keep the score.

Positions are (y, x) in Å; the origin is the centre of the first pixel (docs/architecture.md).

The field's border is treated alike in truth and reconstruction. A peak whose highest pixel is one
of the outermost row or column is not taken: it may be the flank of a column outside the field.
Columns within `match_radius` of the border of the field are partners in the matching, but are not
judged, so that a column that lies inside in one image and outside in the other is no error.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RectBivariateSpline
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from skimage.feature import peak_local_max

from stemdl.schema import Evaluate

Array = NDArray[np.float64]
PM = 100.0  # picometres in an Å
_NEWTON_STEPS = 8


@dataclass(frozen=True)
class Peaks:
    """Peaks of one image, highest first."""

    position: Array  # (P, 2) (y, x) [Å]
    height: Array  # (P,) over the image's range: 0 is its lowest pixel, 1 its highest

    def above(self, threshold: float) -> "Peaks":
        """Those at least as high as `threshold`: the same that a search with it would find."""
        keep = self.height >= threshold
        return Peaks(self.position[keep], self.height[keep])


def find(image: NDArray, pixel: float, *, min_distance: float, threshold: float) -> Peaks:
    """Locate the peaks of an image (H, W) to a fraction of a pixel.

    A peak begins at a pixel that is the highest within `min_distance`. Its position and height are
    those of the maximum of the quintic spline through the pixels, found by Newton's method from
    there. This assumes nothing of a column's shape: the maximum of a Gaussian of 1.2 pixels sigma
    is found to 0.01 pixels.

    Args:
        pixel: sampling of the image [Å].
        min_distance: least distance of two peaks [Å]; at least a pixel and its diagonal is used.
        threshold: least height over the image's range.
    """
    low, span = image.min(), np.ptp(image)
    if span == 0:
        return Peaks(np.empty((0, 2)), np.empty(0))
    scaled = (image.astype(np.float64) - low) / span
    start = peak_local_max(
        scaled,
        min_distance=1,
        footprint=_disc(max(min_distance / pixel, 1.5)),
        exclude_border=1,
    )
    position, height = _refined(scaled, start)
    order = np.argsort(-height)
    return Peaks(position[order] * pixel, height[order]).above(threshold)


def match(first: Array, second: Array, radius: float) -> tuple[NDArray[np.intp], Array]:
    """Pair positions one to one, none farther apart than `radius`.

    Of all such pairings it is one with the most pairs, and of these the one of the least total
    distance (linear_sum_assignment). Unlike mutual nearest neighbours it does not depend on which
    list comes first, and loses no pair to a third position that is nearer to one of the two.

    Args:
        first, second: positions (P, 2) and (Q, 2) [Å].

    Returns:
        indices (K, 2) into first and second, and distances (K,) [Å].
    """
    distance = cdist(first, second)
    allowed = distance <= radius
    # Dearer than all allowed pairs together: one more pair always pays.
    forbidden = 2 * radius * (1 + min(distance.shape))
    pairs = np.stack(linear_sum_assignment(np.where(allowed, distance, forbidden)), axis=1)
    pairs = pairs[allowed[tuple(pairs.T)]]
    return pairs, distance[tuple(pairs.T)]


@dataclass(frozen=True)
class Tally:
    """Columns counted over any number of samples; tallies add up."""

    truths: int = 0  # true columns that are judged
    recovered: int = 0  # of these, those with a partner
    claims: int = 0  # found columns that are judged
    right: int = 0  # of these, those with a partner
    errors: Array = field(default_factory=lambda: np.empty(0))  # distances of `recovered` [Å]

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.truths + other.truths,
            self.recovered + other.recovered,
            self.claims + other.claims,
            self.right + other.right,
            np.concatenate([self.errors, other.errors]),
        )

    @property
    def f1(self) -> float:
        """Columns with a partner over all columns, true and found: F1. 0 when nothing is right."""
        both = self.truths + self.claims
        return (self.recovered + self.right) / both if both else 0.0

    def figures(self) -> dict[str, Any]:
        """Recall, precision and position errors [pm]; None where there is nothing to divide by."""
        square = np.mean(self.errors**2) if len(self.errors) else None
        return {
            "recall": self.recovered / self.truths if self.truths else None,
            "precision": self.right / self.claims if self.claims else None,
            "rms_pm": None if square is None else PM * float(np.sqrt(square)),
            "median_pm": None if square is None else PM * float(np.median(self.errors)),
            "true": self.truths,
            "found": self.claims,
        }


@dataclass(frozen=True)
class Verdict:
    """The columns of one sample, sorted for drawing, and their tally."""

    matched: Array  # found positions with a partner (K, 2) [Å]
    missed: Array  # true positions that are judged and have none
    false: Array  # found positions that are judged and have none
    tally: Tally


def judge(
    truth: Array,
    found: Array,
    field_size: tuple[float, float],
    settings: Evaluate,
    isolated: NDArray[np.bool_] | None = None,
) -> Verdict:
    """Compare found with true columns of one sample.

    Args:
        truth: true positions (P, 2) [Å].
        found: found positions (Q, 2) [Å].
        field_size: coordinates of the last pixel's centre (y, x) [Å].
        isolated: (P,) which true columns are judged; by default all. A found column whose partner
            is one of the others, or that lies within the match radius of one, is not judged.
    """
    radius = settings.match_radius
    isolated = np.ones(len(truth), bool) if isolated is None else isolated
    pairs, distance = match(truth, found, radius)
    paired_truth, paired_found = (np.zeros(len(points), bool) for points in (truth, found))
    paired_truth[pairs[:, 0]] = True
    paired_found[pairs[:, 1]] = True

    judged_truth = isolated & _inside(truth, field_size, radius)
    judged_found = _inside(found, field_size, radius)
    judged_found[pairs[~isolated[pairs[:, 0]], 1]] = False
    crowded = truth[~isolated]
    if len(crowded):
        near_crowded = (cdist(found, crowded) <= radius).any(1)
        judged_found &= paired_found | ~near_crowded

    recovered = judged_truth & paired_truth
    tally = Tally(
        int(judged_truth.sum()),
        int(recovered.sum()),
        int(judged_found.sum()),
        int((judged_found & paired_found).sum()),
        distance[judged_truth[pairs[:, 0]]],
    )
    return Verdict(
        matched=found[paired_found],
        missed=truth[judged_truth & ~paired_truth],
        false=found[judged_found & ~paired_found],
        tally=tally,
    )


def last_pixel(shape: tuple[int, ...], pixel: float) -> tuple[float, float]:
    """Coordinates of the last pixel's centre of an image (..., H, W) [Å]."""
    return (shape[-2] - 1) * pixel, (shape[-1] - 1) * pixel


def _inside(positions: Array, field_size: tuple[float, float], margin: float) -> NDArray[np.bool_]:
    return ((positions >= margin) & (positions <= np.array(field_size) - margin)).all(-1)


def _disc(radius: float) -> NDArray[np.bool_]:
    """Pixels within `radius` [pixels] of the middle one."""
    reach = np.arange(-int(radius), int(radius) + 1)
    return np.hypot(reach[:, None], reach) <= radius


def _refined(image: Array, start: NDArray[np.intp]) -> tuple[Array, Array]:
    """Newton's method on the quintic spline: maxima (P, 2) [pixels] near pixels (P, 2), and
    heights (P,) there.

    A maximum is sought within a pixel of its start. Where the spline is not concave, or the
    maximum lies farther away, the search stays at the edge of that square.
    """
    height, width = image.shape
    spline = RectBivariateSpline(
        np.arange(height), np.arange(width), image, kx=min(5, height - 1), ky=min(5, width - 1)
    )
    position = start.astype(np.float64)
    for _ in range(_NEWTON_STEPS):
        y, x = position.T

        def slope(dy: int, dx: int, y: Array = y, x: Array = x) -> Array:
            return spline.ev(y, x, dx=dy, dy=dx)

        gradient = np.stack([slope(1, 0), slope(0, 1)], -1)
        yy, xy, xx = slope(2, 0), slope(1, 1), slope(0, 2)
        determinant = yy * xx - xy**2
        concave = (determinant > 0) & (yy + xx < 0)
        inverse = np.stack([xx, -xy, -xy, yy], -1).reshape(-1, 2, 2)
        newton = np.zeros_like(gradient)
        newton[concave] = -np.einsum("pij,pj->pi", inverse, gradient)[concave]
        newton[concave] /= determinant[concave, None]
        position = np.clip(position + newton, start - 1, start + 1)
    return position, spline.ev(*position.T)
